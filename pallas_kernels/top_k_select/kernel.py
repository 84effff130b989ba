"""Mosaic GPU kernel of `top_k_select`: one block a row, one launch.

Scores become integers of the same order, which lie in shared memory. Then the k-th
largest is enclosed: with `low` that at least k keys reach and `high` that fewer do,
their middle is counted and takes the place of one of them, until exactly k keys reach
`low`, or no key lies between. Keys of `high` and more are taken, and of those from
`low` on the first ones, as many as lack: equal ones if there was nothing between.

For the places, thread t has the columns from t m on, m of them. Two running sums over
threads say where each one's results begin, so they come in ascending order without a
sort. As m is odd, the threads of a warp read different banks.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels._common import hw, indexed, interpret
from pallas_kernels._common.pieces import WARPGROUP
from pallas_kernels.top_k_select.config import UNROLL, Config, run, shared_bytes


NEVER = -(2**31)  # the key of what is not taken
LOWEST = -(2**31) + 0x7FFFFF  # the key of -inf
LARGEST = 2**31 - 1
LEAST_NORMAL = 1 << 23  # the key of 2^-126
PIECE = 16  # values of a thread that are loaded together
TOGETHER = 8  # pieces on their way at a time
STREAMED = 1024  # keys that are read together if registers don't hold the row


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """The static part of a launch.

    Attributes:
      columns: scores of a row, C.
      k: places to take.
      config: how to count.
    """

    columns: int
    k: int
    config: Config

    @property
    def run(self) -> int:
        """Columns of a thread, m."""
        return run(self.columns)

    @property
    def keys(self) -> int:
        """Of a row, with those that are there for equal shares alone."""
        return WARPGROUP * self.run


def _strided(count: int, width: int = 1) -> Any:
    return plgpu.Layout.WG_STRIDED((count,), width)


def _key(scores: jax.Array) -> jax.Array:
    """Integers in the order of floats; those of NaN and -inf are below all others."""
    bits = lax.bitcast_convert_type(scores, jnp.int32)
    key = bits ^ ((bits >> 31) & LARGEST)
    # With the number first, what follows would be compared as unsigned.
    is_normal = (key <= -LEAST_NORMAL) | (key >= LEAST_NORMAL)
    key = jnp.where(is_normal, key, 0)
    return jnp.where(scores > -jnp.inf, key, NEVER)


def _load_keys(plan: Plan, scores_ref: Any, keys: Any) -> None:
    """Writes a row's keys to shared memory."""
    row, columns = lax.axis_index("row"), plan.columns
    whole = columns // WARPGROUP * WARPGROUP
    if rest := plan.keys - whole:
        nothing = jnp.full((rest,), NEVER, jnp.int32)
        keys.at[pl.ds(whole, rest)][...] = plgpu.layout_cast(nothing, _strided(rest))
    size = min(PIECE * WARPGROUP, whole)
    # The last piece begins before the one in front of it ends: same keys, same place.
    starts = [min(i * size, columns - size) for i in range(-(-columns // size))]
    for begin in range(0, len(starts), TOGETHER):
        batch = starts[begin : begin + TOGETHER]
        loaded = [
            plgpu.load(
                scores_ref.at[row, pl.ds(start, size)],
                layout=_strided(size),
                optimized=False,
            )
            for start in batch
        ]
        for start, scores in zip(batch, loaded, strict=True):
            keys.at[pl.ds(start, size)][...] = _key(scores)
    plgpu.commit_smem()


def _reduce(plan: Plan, keys: Any, terms: Any, join: Any, whole: Any) -> Any:
    """Folds all keys of a row: terms(keys), joined, then `whole` over threads."""
    if plan.config.in_registers:
        kept = plgpu.load(keys, layout=_strided(plan.keys), optimized=False)
        return lambda *bound: whole(terms(kept, *bound))
    pieces, rest = divmod(plan.keys, STREAMED)

    def folded(*bound):
        def read(start, count, width):
            layout = _strided(count, width)
            part = keys.at[pl.ds(start, count)]
            return terms(plgpu.load(part, layout=layout, optimized=False), *bound)

        result = whole(read(pieces * STREAMED, rest, 1)) if rest else None
        if pieces:
            first = read(0, STREAMED, 4)

            def step(i, total):
                return join(total, read(i * STREAMED, STREAMED, 4))

            total = whole(lax.fori_loop(1, pieces, step, first))
            result = total if result is None else join(total, result)
        return result

    return folded


def _enclose(plan: Plan, keys: Any) -> tuple[Any, Any, Any, Any]:
    """The two bounds, how many places are taken, and how many of those from `low`."""
    k = plan.k

    def add(a, b):
        return a + b

    fold = functools.partial(_reduce, plan, keys)
    reaching = fold(lambda x, bound: jnp.where(x >= bound, 1, 0), add, jnp.sum)
    largest = fold(lambda x: x, jnp.maximum, jnp.max)()
    smallest = fold(lambda x: jnp.where(x > LOWEST, x, LARGEST), jnp.minimum, jnp.min)()

    def middle(low, high):
        return (low & high) + ((low ^ high) >> 1)  # a sum would overflow

    def goes_on(carry):
        low, high, count = carry
        return (count > k) & (middle(low, high) != low)

    def halve(carry):
        low, high, count = carry
        bound = middle(low, high)
        found = reaching(bound)
        enough = found >= k
        return (
            lax.select(enough, bound, low),
            lax.select(enough, high, bound),
            lax.select(enough, found, count),
        )

    start = smallest, largest + 1, reaching(smallest)
    low, high, count = lax.while_loop(goes_on, halve, start)
    taken = jnp.minimum(count, k)
    return low, high, taken, taken - reaching(high)


def _runs(plan: Plan, keys: Any, column: jax.Array | None = None) -> jax.Array:
    """Each thread's columns, [128, m], or one of them, [128]."""
    if interpret.is_interpreting():  # it knows no reshaped memory
        whole = keys[...].reshape(WARPGROUP, plan.run)
        if column is None:
            return whole
        return lax.dynamic_index_in_dim(whole, column, 1, keepdims=False)
    whole = keys.reshape(WARPGROUP, plan.run)
    if column is None:
        return plgpu.load(whole, layout=indexed.layout(1), optimized=False)
    part = whole.at[:, column]
    return plgpu.load(part, layout=indexed.index_layout(), optimized=False)


def _sum_before(counts: jax.Array, sums: Any) -> jax.Array:
    """Sums i32[128] over the threads in front of each."""
    begin = sums.at[pl.ds(WARPGROUP, WARPGROUP)]
    nothing = jnp.zeros((WARPGROUP,), jnp.int32)
    sums.at[pl.ds(0, WARPGROUP)][...] = plgpu.layout_cast(nothing, _strided(WARPGROUP))
    begin[...] = counts

    # In this layout, which reads one number a thread: the other one moves matrices,
    # which lie at multiples of 16 bytes.
    def read(ref):
        return plgpu.load(ref, layout=_strided(WARPGROUP), optimized=False)

    plgpu.commit_smem()
    total, distance = read(begin), 1
    while distance < WARPGROUP:
        earlier = read(sums.at[pl.ds(WARPGROUP - distance, WARPGROUP)])
        total = total + earlier
        begin[...] = total
        plgpu.commit_smem()
        distance *= 2
    through = plgpu.load(begin, layout=indexed.index_layout(), optimized=False)
    return through - counts


def _top_k_select_kernel(scores_ref, out_ref, keys, sums, *, plan: Plan):
    _load_keys(plan, scores_ref, keys)
    low, high, taken, lacking = _enclose(plan, keys)

    def above(x):
        return x >= high

    def between(x):
        return (x >= low) & (x < high)

    def ones(flags):
        return jnp.where(flags, 1, 0)

    layout = indexed.index_layout()
    unroll = 1 if (plan.run - 1) % UNROLL or interpret.is_interpreting() else UNROLL

    def walk(step, carry):
        carry = lax.fori_loop(0, plan.run - 1, step, carry, unroll=unroll)
        return step(jnp.int32(plan.run - 1), carry)

    def count(column, counts):
        x = _runs(plan, keys, column)
        return tuple(
            n + ones(test(x)) for n, test in zip(counts, (above, between), strict=True)
        )

    if plan.config.in_registers:
        runs = _runs(plan, keys)
        counts = [jnp.sum(ones(test(runs)), axis=1) for test in (above, between)]
        counts = [plgpu.layout_cast(n, layout) for n in counts]
    else:
        zero = plgpu.layout_cast(jnp.zeros((WARPGROUP,), jnp.int32), layout)
        counts = walk(count, (zero, zero))
    before = [_sum_before(count, sums.at[i]) for i, count in enumerate(counts)]
    first = indexed.iota(WARPGROUP) * plan.run

    def row_of(count):
        row = jnp.full((count,), lax.axis_index("row"), jnp.int32)
        return plgpu.layout_cast(row, layout)

    def take(column, before):
        sure, maybe = before
        x = _runs(plan, keys, column)
        is_sure, is_maybe = above(x), between(x)
        place = sure + jnp.minimum(maybe, lacking)
        indexed.put(
            out_ref,
            (row_of(WARPGROUP), place),
            indexed.spread(first + column, 1),
            is_sure | (is_maybe & (maybe < lacking)),
        )
        return sure + ones(is_sure), maybe + ones(is_maybe)

    walk(take, tuple(before))

    places = indexed.iota(-(-plan.k // WARPGROUP) * WARPGROUP)
    none = jnp.full((*places.shape, 1), -1, jnp.int32)
    indexed.put(
        out_ref,
        (row_of(places.shape[0]), places),
        plgpu.layout_cast(none, indexed.layout(1)),
        (places >= taken) & (places < plan.k),
    )


def top_k_select(plan: Plan, scores: jax.Array) -> jax.Array:
    """Launches the selection.

    Args:
      plan: the static part.
      scores: f32[R, C].

    Returns:
      i32[R, k].
    """
    rows = scores.shape[0]
    hw.check_smem(shared_bytes(plan.columns), "top_k_select")
    return plgpu.kernel(
        functools.partial(_top_k_select_kernel, plan=plan),
        out_type=jax.ShapeDtypeStruct((rows, plan.k), jnp.int32),
        grid=(rows,),
        grid_names=("row",),
        scratch_types=[
            plgpu.SMEM((plan.keys,), jnp.int32),
            plgpu.SMEM((2, 2 * WARPGROUP), jnp.int32),
        ],
        kernel_name="pk_top_k_select",
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane
        ),
    )(scores)
