"""Mosaic GPU kernel of `gemv`: each block has a strip of columns, over all of K.

Neighbouring threads have neighbouring pieces of 8 columns, so that a strip's part of a
row is read at once; a warpgroup reads several rows in a step, many steps ahead,
straight into registers, and a block's warpgroups share the rows. Sums meet within warps
first, then in shared memory: weights go from memory to registers once, no block waits
for another one, and sums have one order.

RMSNorm in front of a product: sum_k x_k s_k w_k / rms is the product of x s with w,
divided by a number that is known at the end as well.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels._common import indexed, overlap
from pallas_kernels._common.pieces import WARPGROUP
from pallas_kernels.attention import tensor_core as tc
from pallas_kernels.gemv.config import PIECE, Config, strip


WARPS = WARPGROUP // indexed.WARP


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """The static part of a launch.

    Attributes:
      rows, depth: M and K.
      widths: N of each result.
      gated: whether a result has two weights.
      eps: of the norm in front, `None` without one.
      zero_centered: whether it multiplies with 1 + scale.
      adds: whether there is a residual.
      at_rest: whether no launch in front of this one writes the weights.
      config: how to divide.
    """

    rows: int
    depth: int
    widths: tuple[int, ...]
    gated: bool
    eps: float | None
    zero_centered: bool
    adds: bool
    at_rest: bool
    config: Config

    @property
    def strips(self) -> tuple[int, ...]:
        """Columns of a block, of each result."""
        return tuple(strip(n, self.config.columns) for n in self.widths)

    @property
    def blocks(self) -> tuple[int, ...]:
        """How many each result has."""
        return tuple(n // c for n, c in zip(self.widths, self.strips, strict=True))


def _vector(plan: Plan, refs: dict[str, Any], at: jax.Array, where: Any) -> Any:
    """Of each row of x the values at `at`, without and with the norm's scale."""

    def read(ref, *index):
        # What another launch may write as this one begins is no constant.
        found = indexed.take(ref, (*index, at), where=where, cached=False)
        return found.astype(jnp.float32)

    plain = [read(refs["x"], indexed.everywhere(m)) for m in range(plan.rows)]
    if plan.eps is None:
        return plain, plain
    scale = read(refs["scale"])
    scale = 1.0 + scale if plan.zero_centered else scale
    return plain, [x * scale for x in plain]


def _sums(plan: Plan, refs: Any, weights: Any, column: Any, lanes: int, wg: Any) -> Any:
    """What each thread adds up: by weight and row the products, by row the squares."""
    number = indexed.iota(WARPGROUP) // lanes
    step = WARPGROUP // lanes  # rows of a weight that a warpgroup reads at once
    sums = [
        tc.full((WARPGROUP, PIECE), 0.0, indexed.layout(PIECE))
        for _ in range(len(weights) * plan.rows)
    ]
    squares = [
        tc.full((WARPGROUP,), 0.0, indexed.index_layout())
        for _ in range(0 if plan.eps is None else plan.rows)
    ]

    def ask(begin, steps: int, whole: bool):
        """What `steps` of each warpgroup read of the weights, from the row `begin` on.

        Also where that is, for `values`.
        """
        begin = begin + wg * (steps * step)
        ats = [number + (begin + s * step) for s in range(steps)]
        wheres = [None if whole else at < plan.depth for at in ats]
        parts = [
            [indexed.take(w, (at, column), PIECE, where=where) for w in weights]
            for at, where in zip(ats, wheres, strict=True)
        ]
        return parts, (ats, wheres)

    def values(places):
        return [_vector(plan, refs, *x) for x in zip(*places, strict=True)]

    def load(begin, steps: int, whole: bool):
        """All of it is asked for before any of it is used."""
        parts, places = ask(begin, steps, whole)
        return parts, values(places)

    def load_first(*args):
        """As `load`; waits for the launch in front, which writes x."""
        if not plan.at_rest:
            overlap.wait()
        parts, places = ask(0, *args)
        if plan.at_rest:
            overlap.wait()
        return parts, values(places)

    def add(carry, loaded):
        sums, squares = (list(x) for x in carry)
        for part, (plain, scaled) in zip(*loaded, strict=True):
            for m in range(plan.rows):
                factor = indexed.spread(scaled[m], PIECE)
                for i, values in enumerate(part):
                    n = i * plan.rows + m
                    sums[n] = sums[n] + values.astype(jnp.float32) * factor
                if squares:
                    squares[m] = squares[m] + plain[m] * plain[m]
        return tuple(sums), tuple(squares)

    together = plan.config.warpgroups * step
    steps = plan.config.burst // 2 if plan.config.paired else plan.config.burst
    burst = steps * together
    full, carry = plan.depth // burst, (tuple(sums), tuple(squares))
    left = plan.depth - full * burst
    last = -(-left // together), left % together == 0
    first = load_first(*((steps, True) if full else last))
    if full > 1 and plan.config.paired:

        def both(i, carry):
            # Memory is at work on these while those before are added up.
            following = load((i + 1) * burst, steps, True)
            return add(*carry), following

        carry, first = lax.fori_loop(0, full - 1, both, (carry, first))
    carry = add(carry, first)
    if full > 1 and not plan.config.paired:
        carry = lax.fori_loop(
            1, full, lambda i, carry: add(carry, load(i * burst, steps, True)), carry
        )
    if full and left:
        carry = add(carry, load(full * burst, *last))
    return carry


def leave_sums(shared, parts: Sequence[jax.Array], lanes: int, wg: Any) -> None:
    """Adds up each warp's sums and leaves them in shared memory.

    Args:
      shared: f32[places, warps, columns].
      parts: of each place, f32[128, V] of a thread's rows.
      lanes: threads that neighbouring columns are of.
      wg: which warpgroup.
    """
    thread = indexed.iota(WARPGROUP)
    warp, lane = thread // indexed.WARP + wg * WARPS, thread % lanes * PIECE
    for place, part in enumerate(parts):
        part = indexed.across_lanes(part, lanes)
        index = (indexed.everywhere(place), warp, lane)
        indexed.put(shared, index, part, thread % indexed.WARP < lanes)
    plgpu.commit_smem()


def sum_of_warps(shared, lane: Any, warpgroups: int, place: int) -> jax.Array:
    """f32[128, V]: what the warps of all warpgroups left at a place, see above."""
    parts = [
        indexed.take(
            shared,
            (indexed.everywhere(place), indexed.everywhere(warp), lane),
            PIECE,
            cached=False,
        )
        for warp in range(warpgroups * WARPS)
    ]
    return functools.reduce(operator.add, parts)


def _result(
    plan: Plan, refs, ahead, shared, barrier, weights, out, first: Any, lanes: int
) -> None:
    """Computes and writes a strip of one result."""
    warpgroups = plan.config.warpgroups
    wg = lax.axis_index("warpgroup") if warpgroups > 1 else 0
    thread = indexed.iota(WARPGROUP)
    lane = thread % lanes * PIECE
    column = lane + first
    sums, squares = _sums(plan, refs, weights, column, lanes, wg)
    parts = [*sums, *(indexed.spread(s, PIECE) for s in squares)]
    leave_sums(shared, parts, lanes, wg)
    # Memory would be idle from here to the loads of the next launch.
    block = lax.axis_index("block")
    for ref in ahead:
        parts = sum(plan.blocks) * warpgroups
        indexed.prefetch(ref, block * warpgroups + wg, parts)
    if warpgroups == 1:
        _write(plan, refs, shared, len(weights), out, thread < lanes, lane, column)
        return
    plgpu.barrier_arrive(barrier)

    @pl.when(wg == 0)
    def _():
        plgpu.barrier_wait(barrier)
        _write(plan, refs, shared, len(weights), out, thread < lanes, lane, column)


def _write(
    plan: Plan, refs, shared, weights: int, out, where: Any, lane: Any, column: Any
) -> None:
    """Adds up the warps' sums and writes what becomes of them."""
    total = functools.partial(sum_of_warps, shared, lane, plan.config.warpgroups)
    for m in range(plan.rows):
        products = [total(i * plan.rows + m) for i in range(weights)]
        if plan.eps is not None:
            # Every column has the same sum.
            square = total(weights * plan.rows + m)
            products = [x * lax.rsqrt(square / plan.depth + plan.eps) for x in products]
        y = products[0]
        if plan.gated:
            y = y / (1.0 + jnp.exp(-y)) * products[1]
        index = (indexed.everywhere(m), column)
        if plan.adds:
            kept = indexed.take(
                refs["residual"], index, PIECE, where=where, cached=False
            )
            y = y + kept.astype(jnp.float32)
        indexed.put(out, index, y.astype(out.dtype), where)


def _gemv_kernel(*args, plan: Plan, names: tuple[str, ...]):
    arrays, rest = args[: len(names)], args[len(names) :]
    refs = dict(zip(names, arrays, strict=True))
    *outs, shared, barrier = rest if plan.config.warpgroups > 1 else (*rest, None)
    ahead = [ref for name, ref in refs.items() if name.startswith("ahead")]
    block, before = lax.axis_index("block"), 0
    each = 2 if plan.gated else 1
    overlap.let_next_begin()
    for i, (count, columns) in enumerate(zip(plan.blocks, plan.strips, strict=True)):
        weights = [refs[f"w{i * each + k}"] for k in range(each)]

        @pl.when((block >= before) & (block < before + count))
        def _(before=before, columns=columns, weights=weights, out=outs[i]):
            first = (block - before) * columns
            lanes = columns // PIECE
            _result(plan, refs, ahead, shared, barrier, weights, out, first, lanes)

        before += count


@overlap.launch(0, 1)
def _launch(
    plan: Plan, out_dtypes: tuple[Any, ...], inputs: dict[str, jax.Array]
) -> tuple[jax.Array, ...]:
    """Launches the kernel.

    Args:
      plan: of the launch.
      out_dtypes: of the results.
      inputs: x, "w0" and on, what else there is of "scale" and "residual", and "ahead0"
        and on, which are brought into L2.

    Returns:
      [M, N] of each result.
    """
    config = plan.config
    places = plan.rows * ((2 if plan.gated else 1) + (plan.eps is not None))
    scratch: list[Any] = [
        plgpu.SMEM((places, config.warpgroups * WARPS, max(plan.strips)), jnp.float32)
    ]
    threads: dict[str, Any] = {}
    if config.warpgroups > 1:
        scratch.append(plgpu.Barrier(num_arrivals=config.warpgroups))
        threads = {"num_threads": config.warpgroups, "thread_name": "warpgroup"}
    body: Any = functools.partial(_gemv_kernel, plan=plan, names=tuple(inputs))
    return tuple(
        plgpu.kernel(
            body,
            out_type=tuple(
                jax.ShapeDtypeStruct((plan.rows, n), d)
                for n, d in zip(plan.widths, out_dtypes, strict=True)
            ),
            grid=(sum(plan.blocks),),
            grid_names=("block",),
            scratch_types=scratch,
            **threads,
            kernel_name="pk_gemv",
            compiler_params=tc.params(),
        )(*inputs.values())
    )


def gemv(
    config: Config,
    x: jax.Array,
    weights: Sequence[jax.Array],
    *,
    norm_scale: jax.Array | None,
    zero_centered: bool,
    eps: float,
    swiglu: bool,
    residual: jax.Array | None,
    prefetch: Sequence[jax.Array],
    at_rest: bool,
    out_dtypes: Sequence[Any],
) -> tuple[jax.Array, ...]:
    """Launches the kernel; see `api.gemv`, results as in `reference.gemv`."""
    plan = Plan(
        rows=x.shape[0],
        depth=x.shape[1],
        widths=tuple(w.shape[1] for w in (weights[:1] if swiglu else weights)),
        gated=swiglu,
        eps=None if norm_scale is None else eps,
        zero_centered=zero_centered,
        adds=residual is not None,
        at_rest=at_rest,
        config=config,
    )
    inputs = {"x": x} | {f"w{i}": w for i, w in enumerate(weights)}
    if norm_scale is not None:
        inputs["scale"] = norm_scale
    if residual is not None:
        inputs["residual"] = residual
    inputs |= {f"ahead{i}": array for i, array in enumerate(prefetch)}
    return _launch(plan, tuple(jnp.dtype(d) for d in out_dtypes), inputs)
