"""Mosaic GPU kernel of the forward pass, and what all kernels of this op share.

A block has 64 queries of one head for each of its computing warpgroups and visits the
tiles of keys that `tiles.TileBounds` lists: first those where every pair is allowed,
then those that need the mask. One warpgroup feeds a ring of tiles with TMA, K and V in
turn. Each step is the online softmax in base 2,

    S = Q K^T      m' = max(m, rowmax(S) c)      P = exp2(S c - m')
    l' = exp2(m - m') l + rowsum(P)              O' = exp2(m - m') O + P V

with c = scale log2(e), or log2(e) after a soft cap. m begins at a finite number below
all others, so a query that sees nothing ends with l = 0 and no difference of
infinities. A sink is a key without a value: m begins at its logit, l at 1.

If `overlap`, the product of P and V runs while the next step's softmax is computed
(FlashAttention-3, arXiv 2407.08608, section 3.2); if `ping_pong`, warpgroups begin
their products in turn, so that one computes its softmax while another's run (3.1).
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels._common import hw
from pallas_kernels.attention import tensor_core as tc
from pallas_kernels.attention.config_mosaic import REGISTERS, ROWS, Config
from pallas_kernels.attention.tiles import TILE


LOG2_E = math.log2(math.e)
LOWEST = -1e30
# In place of the -inf of a query that sees nothing: exp2(score - this) is 0.
NOTHING = 1e30


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """Sizes of one call.

    Attributes:
      batch, heads, kv_heads, head_dim: B, H, G, K = V.
      q_blocks, kv_blocks: outer blocks per row.
      dtype: of q, k, v and o.
      scale, logit_cap: as for `attention`.
      config: launch parameters.
    """

    batch: int
    heads: int
    kv_heads: int
    head_dim: int
    q_blocks: int
    kv_blocks: int
    dtype: Any
    scale: float
    logit_cap: float | None
    config: Config

    @property
    def group(self) -> int:
        return self.heads // self.kv_heads

    @property
    def exponent(self) -> float:
        """What multiplies a score, capped or not, to become a base 2 logit."""
        return (self.scale if self.logit_cap is None else 1.0) * LOG2_E


@dataclasses.dataclass(frozen=True)
class Span:
    """Steps of one block: those without a mask first.

    Attributes:
      first, inner_first, inner_stop: i32 scalars, in steps.
      inner, count: how many need no mask, and how many there are.
    """

    first: jax.Array
    inner_first: jax.Array
    inner_stop: jax.Array
    inner: jax.Array
    count: jax.Array

    def at(self, i: jax.Array) -> jax.Array:
        """The i-th step that is taken."""
        outer = i - self.inner
        before = self.inner_first - self.first
        after = self.inner_stop + outer - before
        outer = lax.select(outer < before, self.first + outer, after)
        return lax.select(i < self.inner, self.inner_first + i, outer)


def span(
    tiles_ref: Any, row: jax.Array, block: jax.Array, step: int, *, least: int = 0
) -> Span:
    """Reads a row of a table of `TileBounds`.

    Args:
      tiles_ref: i32[B, blocks, 4] in device memory.
      row, block: which.
      step: length of a step, a multiple of 64.
      least: steps that are taken even if nothing is allowed.
    """
    first, stop, inner_first, inner_stop = (tiles_ref[row, block, i] for i in range(4))
    per = jnp.int32(step // TILE)

    def up(x):
        return lax.div(x + per - 1, per)

    first, stop = lax.div(first, per), up(stop)
    inner_first, inner_stop = up(inner_first), lax.div(inner_stop, per)
    empty = inner_stop <= inner_first
    inner_first = lax.select(empty, first, inner_first)
    inner_stop = lax.select(empty, first, inner_stop)
    return Span(
        first=first,
        inner_first=inner_first,
        inner_stop=inner_stop,
        inner=inner_stop - inner_first,
        count=jnp.maximum(stop - first, least),
    )


def in_turn(
    span_: Span, step: Callable[..., Any], carry: Any, *, begin: int = 0
) -> Any:
    """Runs step(i, carry, masked) for all steps from `begin` on."""
    inner = jnp.maximum(span_.inner, begin)
    carry = lax.fori_loop(begin, inner, functools.partial(step, masked=False), carry)
    return lax.fori_loop(
        inner, span_.count, functools.partial(step, masked=True), carry
    )


def capped(plan: Plan, scores: jax.Array) -> tuple[jax.Array, jax.Array | None]:
    """Scores to be multiplied with `plan.exponent`, and the tanh that made them."""
    if plan.logit_cap is None:
        return scores, None
    # The instruction for tanh errs by 2^-11, which a cap of 50 makes 0.02 of a logit.
    total = 1.0 + jnp.exp2(scores * (2.0 * LOG2_E * plan.scale / plan.logit_cap))
    # Its inverse by two roots: a division is a subroutine. 0 where `total` overflows.
    root = lax.rsqrt(total)
    ratio = 1.0 - 2.0 * root * root
    return ratio * plan.logit_cap, ratio


def work_item(
    order_ref: Any, index: jax.Array, heads: int, blocks: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Row, block and head of a place in the grid; neighbours differ in the head."""
    slot, head = tc.split_index(index, heads)
    row, block = tc.split_index(order_ref[slot], blocks)
    return row, block, head


def copy_tile(
    ring: dict[str, Any], n: jax.Array, slots: int, sources: Sequence[tuple[str, Any]]
) -> None:
    """Copies what the n-th place of a ring holds, once it is free."""
    slot = lax.rem(n, jnp.int32(slots))

    @pl.when(n >= slots)
    def _():
        plgpu.barrier_wait(ring["free"].at[slot])

    for name, source in sources:
        plgpu.copy_gmem_to_smem(source, ring[name].at[slot], ring["full"].at[slot])


def drain(ring: dict[str, Any], count: jax.Array, slots: int) -> None:
    """Waits for the arrivals that no copy waited for: all must be, before the end."""

    def wait(n, carry):
        plgpu.barrier_wait(ring["free"].at[lax.rem(n, jnp.int32(slots))])
        return carry

    lax.fori_loop(jnp.maximum(count - slots, 0), count, wait, None)


@dataclasses.dataclass(frozen=True)
class _Turns:
    """Who may begin products: nobody waits if `barrier` is `None`."""

    barrier: Any
    warpgroup: jax.Array
    count: int

    def begin(self) -> None:
        """The last warpgroup gives the first turn to the first one."""
        if self.barrier is not None:
            pl.when(self.warpgroup == self.count - 1)(
                lambda: plgpu.barrier_arrive(self.barrier.at[0])
            )

    def take(self) -> None:
        if self.barrier is not None:
            plgpu.barrier_wait(self.barrier.at[self.warpgroup])

    def give(self) -> None:
        if self.barrier is not None:
            following = lax.rem(self.warpgroup + 1, jnp.int32(self.count))
            plgpu.barrier_arrive(self.barrier.at[following])

    def end(self) -> None:
        """The turn that the last warpgroup gave last is waited for by the first."""
        if self.barrier is not None:
            pl.when(self.warpgroup == 0)(lambda: plgpu.barrier_wait(self.barrier.at[0]))


def _softmax(plan, scores, m, l, allowed):
    """One step: new m and l, the factor on what was summed, P in f32."""
    scores, _ = capped(plan, scores)
    if allowed is not None:
        scores = jnp.where(allowed, scores, -jnp.inf)
    largest = jnp.maximum(m, jnp.max(scores, axis=1) * plan.exponent)
    factor = jnp.exp2(m - largest)
    p = jnp.exp2(
        scores * plan.exponent - tc.per_row(largest, (ROWS, plan.config.step_kv))
    )
    return largest, l * factor + jnp.sum(p, axis=1), factor, p


def _attend(plan, smem, w, steps, interval, start, n, turns):
    """Sums of one warpgroup over the steps of its block.

    Args:
      smem: q, and the ring.
      w: the warpgroup.
      steps: the block's `Span`.
      interval: first and one-past-last key of each query, i32[64] in `PER_ROW`.
      start: m and l to begin with, f32[64] in `PER_ROW`.
      n: places of the ring that were used before.
      turns: of the warpgroups.

    Returns:
      O before it is divided, f32[64, V]; m and l.
    """
    config, ring, q = plan.config, smem["ring"], smem["q"].at[w]
    shape = (ROWS, config.step_kv)
    wide = (ROWS, plan.head_dim)
    low, high = (tc.per_row(x, shape) for x in interval)

    def place(i, offset):
        return lax.rem(n + 2 * i + offset, jnp.int32(config.slots))

    def arrived(slot):
        plgpu.barrier_wait(ring["full"].at[slot])
        return ring["tile"].at[slot]

    def allowed(i):
        key = tc.index(shape, 1) + steps.at(i) * config.step_kv
        return (key >= low) & (key < high)

    def values(acc, p, slot):
        def body(total):
            tc.mma(total, p, ring["tile"].at[slot])
            return tc.read(total)

        acc = tc.accumulate(body, acc)
        tc.give_back(ring["free"].at[slot])
        return acc

    def scores_of(i):
        slot = place(i, 0)
        k = arrived(slot)

        def body(total):
            tc.mma(total, q, k.T)
            turns.give()
            return tc.read(total)

        scores = tc.accumulate(body, shape)
        tc.give_back(ring["free"].at[slot])
        return scores

    def step(i, carry, masked):
        acc, m, l = carry
        scores = scores_of(i)
        m, l, factor, p = _softmax(plan, scores, m, l, allowed(i) if masked else None)
        acc = acc * tc.per_row(factor, wide)
        p = tc.settle(p.astype(plan.dtype))
        slot = place(i, 1)
        arrived(slot)
        turns.take()
        return values(acc, p, slot), m, l

    def overlapped_step(i, carry, masked):
        acc, m, l, p = carry
        k_slot, v_slot = place(i, 0), place(i - 1, 1)
        k, v = arrived(k_slot), arrived(v_slot)
        turns.take()

        def body(total, onto):
            tc.mma(total, q, k.T)
            tc.mma(onto, p, v)
            turns.give()
            scores = tc.read(total, pending=1)
            tc.give_back(ring["free"].at[k_slot])
            now = _softmax(plan, scores, m, l, allowed(i) if masked else None)
            return now, tc.read(onto)

        (new_m, new_l, factor, new_p), acc = tc.accumulate(body, shape, acc)
        tc.give_back(ring["free"].at[v_slot])
        # Only now, as the product read the registers that this is written to.
        new_p = tc.settle(new_p).astype(plan.dtype)
        return acc * tc.per_row(factor, wide), new_m, new_l, new_p

    acc = tc.full(wide, 0.0, tc.MATRIX)
    if not config.overlap:
        turns.take()
        acc, m, l = in_turn(steps, step, (acc, *start))
        # The turn that was taken for the products of another step.
        turns.give()
        return acc, m, l
    turns.take()
    # This one may need a mask or not; there is always one.
    m, l = start
    zero = jnp.int32(0)
    m, l, _, p = _softmax(plan, scores_of(zero), m, l, allowed(zero))
    carry = (acc, m, l, p.astype(plan.dtype))
    acc, m, l, p = in_turn(steps, overlapped_step, carry, begin=1)
    slot = place(steps.count - 1, 1)
    arrived(slot)
    turns.take()
    acc = values(acc, p, slot)
    turns.give()
    return acc, m, l


def _start(plan, sinks_ref, head):
    """m and l before the first key."""
    m, l = LOWEST, 0.0
    if sinks_ref is not None:
        sink = sinks_ref[head] * LOG2_E
        m = jnp.maximum(sink, LOWEST)
        # 0 for a sink of -inf, which is none.
        l = lax.select(sink >= LOWEST, jnp.float32(1), jnp.float32(0))
    return tuple(tc.full((ROWS,), x, tc.PER_ROW) for x in (m, l))


def _finish(plan, refs, smem, w, where, interval, sums):
    """Divides and writes o and the logarithm of the sums, in base 2."""
    row, head, rows = where
    low, _ = interval
    acc, m, l = sums
    nothing = l == 0.0
    inverse = jnp.where(nothing, 0.0, 1.0 / l)
    inverse = jnp.where(low < 0, jnp.nan, inverse)
    log_total = jnp.where(nothing, NOTHING, m + jnp.log(l) * LOG2_E)
    log_total = jnp.where(low < 0, jnp.nan, log_total)
    q, lse = smem["q"].at[w], smem["lse"].at[w]
    q[...] = (acc * tc.per_row(inverse, acc.shape)).astype(plan.dtype)
    lse[...] = log_total
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(q, refs["o"].at[row, rows, head])
    plgpu.copy_smem_to_gmem(lse, refs["lse"].at[row, head, rows])
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def _items(total: int, blocks: int, body: Callable[..., Any], carry: Any) -> Any:
    """body(round, index, carry) for all work of this block of the grid.

    Work comes in descending order, so every other round goes backwards.
    """
    me = lax.axis_index("block")
    if total == blocks:
        return body(jnp.int32(0), me, carry)
    whole, rest = divmod(total, blocks)
    backwards = whole % 2 == 1
    mine = blocks - 1 - me if backwards else me

    def one(i, carry):
        there = lax.rem(i, jnp.int32(2)) == 1
        place = lax.select(there, blocks - 1 - me, me)
        return body(i, i * blocks + place, carry)

    rounds = whole + (mine < rest).astype(jnp.int32)
    return lax.fori_loop(0, rounds, one, carry)


def _attention_fwd_kernel(refs, smem, *, plan, blocks):
    config = plan.config
    count = config.warpgroups
    warpgroup = lax.axis_index("warpgroup")
    total = plan.batch * plan.q_blocks * plan.heads
    registers = REGISTERS[count]

    def where(index):
        row, block, head = work_item(refs["order"], index, plan.heads, plan.q_blocks)
        steps = span(refs["tiles"], row, block, config.step_kv, least=1)
        return row, block, head, steps

    @pl.when(warpgroup == count)
    def _():
        plgpu.set_max_registers(registers[-1], action="decrease")
        ring = smem["ring"]

        def item(i, index, n):
            row, block, head, steps = where(index)
            kv_head = lax.div(head, jnp.int32(plan.group))

            def fetch_queries():
                @pl.when(i > 0)
                def _():
                    plgpu.barrier_wait(smem["q_free"])

                for w in range(count):
                    rows = pl.ds(block * config.block_q + w * ROWS, ROWS)
                    plgpu.copy_gmem_to_smem(
                        refs["q"].at[row, rows, head], smem["q"].at[w], smem["q_full"]
                    )

            def step(j, n):
                keys = pl.ds(steps.at(j) * config.step_kv, config.step_kv)
                source = refs["k"].at[row, keys, kv_head]
                copy_tile(ring, n, config.slots, [("tile", source)])
                pl.when(j == 0)(fetch_queries)
                source = refs["v"].at[row, keys, kv_head]
                copy_tile(ring, n + 1, config.slots, [("tile", source)])
                return n + 2

            return lax.fori_loop(0, steps.count, step, n)

        n = _items(total, blocks, item, jnp.int32(0))
        drain(ring, n, config.slots)
        plgpu.barrier_wait(smem["q_free"])

    @pl.when(warpgroup < count)
    def _():
        plgpu.set_max_registers(registers[0], action="increase")
        turns = _Turns(smem.get("turn"), warpgroup, count)
        turns.begin()

        def item(i, index, n):
            row, block, head, steps = where(index)
            rows = pl.ds(block * config.block_q + warpgroup * ROWS, ROWS)
            interval = tuple(
                tc.load_global(refs[x].at[row, rows], tc.PER_ROW)
                for x in ("key_start", "key_stop")
            )
            start = _start(plan, refs.get("sinks"), head)
            plgpu.barrier_wait(smem["q_full"])
            sums = _attend(plan, smem, warpgroup, steps, interval, start, n, turns)
            _finish(plan, refs, smem, warpgroup, (row, head, rows), interval, sums)
            plgpu.barrier_arrive(smem["q_free"])
            return n + 2 * steps.count

        _items(total, blocks, item, jnp.int32(0))
        turns.end()
        plgpu.wait_smem_to_gmem(0)


# Lowered once a module: calls of equal sizes, such as those of layers, share it.
@functools.partial(jax.jit, static_argnums=(0,))
def attention_fwd(plan: Plan, inputs: dict[str, jax.Array]) -> tuple[jax.Array, Any]:
    """Launches the forward kernel.

    Args:
      plan: sizes of the call.
      inputs: q [B, T', H, K]; k, v [B, S', G, K]; key_start, key_stop i32[B, T'];
        tiles i32[B, q_blocks, 4]; order i32[B q_blocks]; sinks f32[H] if there are.

    Returns:
      o [B, T', H, V] and the base 2 logarithm of the sums, f32[B, H, T'].
    """
    config = plan.config
    q = inputs["q"]
    lse_shape = (plan.batch, plan.heads, q.shape[1])
    scratch = {
        "q": tc.operand(config.warpgroups, ROWS, plan.head_dim, dtype=plan.dtype),
        "lse": plgpu.SMEM((config.warpgroups, ROWS), jnp.float32),
        "q_full": plgpu.Barrier(num_arrivals=config.warpgroups),
        "q_free": plgpu.Barrier(num_arrivals=config.warpgroups),
        "ring": {
            "tile": tc.operand(
                config.slots, config.step_kv, plan.head_dim, dtype=plan.dtype
            ),
            "full": plgpu.Barrier(num_arrivals=1, num_barriers=config.slots),
            "free": plgpu.Barrier(
                num_arrivals=config.warpgroups, num_barriers=config.slots
            ),
        },
    }
    if config.ping_pong:
        scratch["turn"] = plgpu.Barrier(num_arrivals=1, num_barriers=config.warpgroups)
    total = plan.batch * plan.q_blocks * plan.heads
    blocks = min(total, hw.device().sms) if config.persistent else total
    return launch(
        functools.partial(_attention_fwd_kernel, plan=plan, blocks=blocks),
        "pk_attention_fwd",
        inputs,
        {
            "o": jax.ShapeDtypeStruct(q.shape, plan.dtype),
            "lse": jax.ShapeDtypeStruct(lse_shape, jnp.float32),
        },
        blocks=blocks,
        registers=REGISTERS[config.warpgroups],
        scratch=scratch,
    )


def launch(
    kernel: Callable[..., None],
    name: str,
    inputs: dict[str, jax.Array],
    outputs: dict[str, jax.ShapeDtypeStruct],
    *,
    blocks: int,
    registers: Sequence[int],
    scratch: dict[str, Any],
    auto_barriers: bool = True,
) -> Any:
    """Runs a kernel on a grid of one axis.

    Args:
      kernel: called as kernel(refs, scratch) with dicts of references.
      name: of the kernel in profiles.
      inputs, outputs: by name.
      blocks: size of the grid.
      registers: per thread of each warpgroup.
      scratch: shared memory and barriers.
      auto_barriers: as for `tensor_core.params`.

    Returns:
      The outputs, in their order.
    """
    hw.check_registers(registers)
    hw.check_smem(tc.shared_bytes(scratch), name)

    def body(*refs, **scratch_refs):
        named = dict(zip((*inputs, *outputs), refs, strict=True))
        kernel(named, scratch_refs)

    return plgpu.kernel(
        body,
        out_type=tuple(outputs.values()),
        grid=(blocks,),
        grid_names=("block",),
        num_threads=len(registers),
        thread_name="warpgroup",
        scratch_types=scratch,
        kernel_name=name,
        compiler_params=tc.params(auto_barriers=auto_barriers),
    )(*inputs.values())
