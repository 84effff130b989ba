"""Mosaic GPU kernel of the forward pass, and what all kernels of this op share.

A block has 64 queries of one head for each of its computing warpgroups and visits the
tiles of keys that `tiles.TileBounds` lists: first those that need the mask, then those
where every pair is allowed. One warpgroup feeds a ring of tiles with TMA, K and V in
turn. Each step is the online softmax in base 2,

    S = Q K^T      m' = max(m, rowmax(S) c)      P = exp2(S c - m')
    l' = exp2(m - m') l + rowsum(P)              O' = exp2(m - m') O + P V

with c = scale log2(e), or log2(e) after a soft cap. m begins at a finite number below
all others, so a query that sees nothing ends with l = 0 and no difference of
infinities. A sink is a key without a value: m begins at its logit, l at 1.

The product of P and V runs while the next step's softmax is computed (FlashAttention-3,
arXiv 2407.08608, section 3.2); if `ping_pong`, warpgroups begin their products in turn,
so that one computes its softmax while another's run (3.1). If `persistent`, a block of
the grid goes from one block of queries to the next, and the last product of one runs
while the first softmax of the next is computed: rows of short documents have few steps.
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
    """Steps of one block: those that need a mask first.

    Attributes:
      first, inner_first, inner_stop: i32 scalars, in steps.
      outer, count: how many need a mask, and how many there are.
    """

    first: jax.Array
    inner_first: jax.Array
    inner_stop: jax.Array
    outer: jax.Array
    count: jax.Array

    def at(self, i: jax.Array) -> jax.Array:
        """The i-th step that is taken."""
        before = self.inner_first - self.first
        outer = lax.select(i < before, self.first + i, self.inner_stop + i - before)
        return lax.select(i < self.outer, outer, self.inner_first + i - self.outer)


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
    count = jnp.maximum(stop - first, least)
    return Span(
        first=first,
        inner_first=inner_first,
        inner_stop=inner_stop,
        outer=count - (inner_stop - inner_first),
        count=count,
    )


def in_turn(span_: Span, step: Callable[..., Any], carry: Any) -> Any:
    """Runs step(i, carry, masked) for all steps."""
    outer, count = span_.outer, span_.count
    carry = lax.fori_loop(0, outer, functools.partial(step, masked=True), carry)
    return lax.fori_loop(outer, count, functools.partial(step, masked=False), carry)


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


@dataclasses.dataclass(frozen=True)
class _Sums:
    """What a warpgroup adds up over the steps of an item.

    Attributes:
      acc: O before it is divided, f32[64, V], without the last step's values.
      m, l: the maxima and the sums, f32[64] in `PER_ROW`.
      p: the last step's P, 16 bits, which its values are yet to be multiplied with.
    """

    acc: jax.Array
    m: jax.Array
    l: jax.Array
    p: jax.Array


jax.tree_util.register_dataclass(_Sums)


@dataclasses.dataclass(frozen=True)
class _Place:
    """Where an item is.

    Attributes:
      row, block, head: which queries.
      slot: where in shared memory they come.
    """

    row: jax.Array
    block: jax.Array
    head: jax.Array
    slot: jax.Array


jax.tree_util.register_dataclass(_Place)


@dataclasses.dataclass(frozen=True)
class _Item:
    """Queries of one head that a block works on.

    Attributes:
      at: where they are.
      low: the first key of each query, i32[64] in `PER_ROW`.
      end: places of the ring that were used after its last step.
    """

    at: _Place
    low: jax.Array
    end: jax.Array


jax.tree_util.register_dataclass(_Item)


@dataclasses.dataclass(frozen=True)
class _Computing:
    """One warpgroup that computes.

    Attributes:
      plan: sizes of the call.
      refs: inputs and outputs by name.
      smem: scratch of `attention_fwd`.
      w: the warpgroup.
      turns: of the warpgroups.
    """

    plan: Plan
    refs: dict[str, Any]
    smem: dict[str, Any]
    w: jax.Array
    turns: _Turns

    @property
    def shape(self) -> tuple[int, int]:
        """Of the scores of a step."""
        return ROWS, self.plan.config.step_kv

    def by_row(self, vector: jax.Array) -> jax.Array:
        """A `PER_ROW` vector over the columns of O."""
        return tc.per_row(vector, (ROWS, self.plan.head_dim))

    def ring_slot(self, n: jax.Array) -> jax.Array:
        """Of the n-th tile of this block."""
        return lax.rem(n, jnp.int32(self.plan.config.slots))

    def arrived(self, slot: jax.Array) -> Any:
        ring = self.smem["ring"]
        plgpu.barrier_wait(ring["full"].at[slot])
        return ring["tile"].at[slot]

    def give_back(self, slot: jax.Array) -> None:
        tc.give_back(self.smem["ring"]["free"].at[slot])

    def rows(self, block: jax.Array) -> Any:
        return pl.ds(block * self.plan.config.block_q + self.w * ROWS, ROWS)

    def scores(self, q: Any, n: jax.Array) -> jax.Array:
        """Scores of the keys at a place of the ring."""
        slot = self.ring_slot(n)
        k = self.arrived(slot)

        def body(total):
            tc.mma(total, q, k.T)
            self.turns.give()
            return tc.read(total)

        scores = tc.accumulate(body, self.shape)
        self.give_back(slot)
        return scores

    def values(self, sums: _Sums, end: jax.Array) -> jax.Array:
        """O with the values at the last place before `end`."""
        slot = self.ring_slot(end - 1)
        v = self.arrived(slot)

        def body(total):
            tc.mma(total, sums.p, v)
            self.turns.give()
            return tc.read(total)

        acc = tc.accumulate(body, sums.acc)
        self.give_back(slot)
        return acc

    def scores_and_values(
        self, q: Any, n: jax.Array, sums: _Sums, softmax: Callable[..., Any]
    ) -> tuple[Any, jax.Array]:
        """Scores at place n of the ring, and O with the values at the place before.

        Args:
          q: the queries of the scores.
          n: a place.
          sums: that the values are added to.
          softmax: of the scores, while the values are multiplied.

        Returns:
          What `softmax` does; O.
        """
        k_slot, v_slot = self.ring_slot(n), self.ring_slot(n - 1)
        k, v = self.arrived(k_slot), self.arrived(v_slot)
        self.turns.take()

        def body(total, onto):
            tc.mma(total, q, k.T)
            tc.mma(onto, sums.p, v)
            self.turns.give()
            scores = tc.read(total, pending=1)
            self.give_back(k_slot)
            return softmax(scores), tc.read(onto)

        result, acc = tc.accumulate(body, self.shape, sums.acc)
        self.give_back(v_slot)
        return result, acc

    def item(
        self, at: _Place, n: jax.Array, before: tuple[_Item, _Sums] | None
    ) -> tuple[_Item, _Sums]:
        """Works on an item, all but the values of its last step.

        The first scores are computed beside the last values of the item before, whose
        O is then written.

        Args:
          at: where the item is.
          n: places of the ring that were used before.
          before: the item before, if there is one.

        Returns:
          The item and its sums.
        """
        plan, config = self.plan, self.plan.config
        rows = self.rows(at.block)
        first_key, stop_key = (
            tc.load_global(self.refs[name].at[at.row, rows], tc.PER_ROW)
            for name in ("key_start", "key_stop")
        )
        low, high = (tc.per_row(x, self.shape) for x in (first_key, stop_key))
        steps = span(self.refs["tiles"], at.row, at.block, config.step_kv, least=1)

        def allowed(i):
            key = tc.index(self.shape, 1) + steps.at(i) * config.step_kv
            return (key >= low) & (key < high)

        plgpu.barrier_wait(self.smem["q_full"].at[at.slot])
        q = self.smem["q"].at[at.slot, self.w]
        m, l = _start(plan, self.refs.get("sinks"), at.head)
        zero = jnp.int32(0)

        def first(scores):
            # There is always one, and mostly it needs a mask.
            return _softmax(plan, scores, m, l, allowed(zero))

        if before is None:
            self.turns.take()
            m, l, _, p = first(self.scores(q, n))
        else:
            done, sums = before
            (m, l, _, p), acc = self.scores_and_values(q, n, sums, first)
            self.write(done, dataclasses.replace(sums, acc=acc))
        # Only now, as the product read the registers that this is written to.
        p = tc.settle(p).astype(plan.dtype)
        acc = tc.full((ROWS, plan.head_dim), 0.0, tc.MATRIX)

        def release_item_before():
            """It is written by now, and the item behind this one may come."""
            if before is not None:
                self.give_back_queries(before[0])

        def step(i, sums, masked):
            pl.when(i == 2)(release_item_before)

            def softmax(scores):
                mask = allowed(i) if masked else None
                return _softmax(plan, scores, sums.m, sums.l, mask)

            (m, l, factor, p), acc = self.scores_and_values(q, n + 2 * i, sums, softmax)
            p = tc.settle(p).astype(plan.dtype)
            return _Sums(acc * self.by_row(factor), m, l, p)

        outer = jnp.maximum(steps.outer, 1)
        masked = functools.partial(step, masked=True)
        sums = lax.fori_loop(1, outer, masked, _Sums(acc, m, l, p))
        unmasked = functools.partial(step, masked=False)
        sums = lax.fori_loop(outer, steps.count, unmasked, sums)
        pl.when(steps.count <= 2)(release_item_before)
        end = n + 2 * steps.count
        return _Item(at, first_key, end), sums

    def last_values(self, item: _Item, sums: _Sums) -> None:
        """Ends the last item of a block."""
        self.turns.take()
        self.write(item, dataclasses.replace(sums, acc=self.values(sums, item.end)))
        self.give_back_queries(item)

    def write(self, item: _Item, sums: _Sums) -> None:
        """Divides and writes o and the logarithm of the sums, in base 2."""
        nothing, invalid = sums.l == 0.0, item.low < 0
        inverse = jnp.where(nothing, 0.0, 1.0 / sums.l)
        inverse = jnp.where(invalid, jnp.nan, inverse)
        log_total = jnp.where(nothing, NOTHING, sums.m + jnp.log(sums.l) * LOG2_E)
        log_total = jnp.where(invalid, jnp.nan, log_total)
        at = item.at
        o, lse = self.smem["q"].at[at.slot, self.w], self.smem["lse"].at[self.w]
        o[...] = (sums.acc * self.by_row(inverse)).astype(self.plan.dtype)
        lse[...] = log_total
        plgpu.commit_smem()
        rows = self.rows(at.block)
        plgpu.copy_smem_to_gmem(o, self.refs["o"].at[at.row, rows, at.head])
        plgpu.copy_smem_to_gmem(lse, self.refs["lse"].at[at.row, at.head, rows])

    def give_back_queries(self, item: _Item) -> None:
        """Lets queries come to where the o was that is written."""
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        plgpu.barrier_arrive(self.smem["q_free"].at[item.at.slot])


def _start(plan, sinks_ref, head):
    """m and l before the first key."""
    m, l = LOWEST, 0.0
    if sinks_ref is not None:
        sink = sinks_ref[head] * LOG2_E
        m = jnp.maximum(sink, LOWEST)
        # 0 for a sink of -inf, which is none.
        l = lax.select(sink >= LOWEST, jnp.float32(1), jnp.float32(0))
    return tuple(tc.full((ROWS,), x, tc.PER_ROW) for x in (m, l))


@dataclasses.dataclass(frozen=True)
class _Work:
    """The items of a block of the grid.

    Attributes:
      plan: sizes of the call.
      order: `TileBounds.q_order` in device memory.
      blocks: of the grid.
      total: items of all.
    """

    plan: Plan
    order: Any
    blocks: int
    total: int

    @property
    def slots(self) -> int:
        """Places of queries: while one has the next item's, o is written from one."""
        return min(2, -(-self.total // self.blocks))

    @property
    def rounds(self) -> int | jax.Array:
        """How many items this block has."""
        whole, rest = divmod(self.total, self.blocks)
        if not rest:
            return whole
        return whole + (self._me(whole) < rest).astype(jnp.int32)

    def _me(self, i: int | jax.Array) -> jax.Array:
        """This block's place in a round; work descends, so every other one turns."""
        me = lax.axis_index("block")
        backwards = lax.rem(jnp.int32(i), jnp.int32(2)) == 1
        return lax.select(backwards, self.blocks - 1 - me, me)

    def ordered(self, i: int | jax.Array) -> jax.Array:
        """What `order` has of the i-th item, or of any item where there is no i-th."""
        index = jnp.minimum(i * self.blocks + self._me(i), self.total - 1)
        return self.order[lax.div(index, jnp.int32(self.plan.heads))]

    def at(self, i: int | jax.Array, ordered: jax.Array) -> _Place:
        """Where the i-th item is; neighbours differ in the head."""
        index = i * self.blocks + self._me(i)
        row, block = tc.split_index(ordered, self.plan.q_blocks)
        head = lax.rem(index, jnp.int32(self.plan.heads))
        return _Place(row, block, head, lax.rem(jnp.int32(i), jnp.int32(self.slots)))


def _copy(plan: Plan, refs: dict[str, Any], smem: dict[str, Any], work: _Work) -> None:
    """The warpgroup that copies: queries and the ring's tiles, in the order of use."""
    config, ring = plan.config, smem["ring"]

    def item(i, n):
        at = work.at(i, work.ordered(i))
        steps = span(refs["tiles"], at.row, at.block, config.step_kv, least=1)
        kv_head = lax.div(at.head, jnp.int32(plan.group))

        def fetch_queries():
            @pl.when(i >= work.slots)
            def _():
                plgpu.barrier_wait(smem["q_free"].at[at.slot])

            for w in range(config.warpgroups):
                rows = pl.ds(at.block * config.block_q + w * ROWS, ROWS)
                source = refs["q"].at[at.row, rows, at.head]
                full = smem["q_full"].at[at.slot]
                plgpu.copy_gmem_to_smem(source, smem["q"].at[at.slot, w], full)

        def step(j, n):
            keys = pl.ds(steps.at(j) * config.step_kv, config.step_kv)
            source = refs["k"].at[at.row, keys, kv_head]
            copy_tile(ring, n, config.slots, [("tile", source)])
            pl.when(j == 0)(fetch_queries)
            source = refs["v"].at[at.row, keys, kv_head]
            copy_tile(ring, n + 1, config.slots, [("tile", source)])
            return n + 2

        return lax.fori_loop(0, steps.count, step, n)

    rounds = work.rounds
    n = lax.fori_loop(0, rounds, item, jnp.int32(0))
    drain(ring, n, config.slots)

    def written(i, carry):
        plgpu.barrier_wait(smem["q_free"].at[lax.rem(i, jnp.int32(work.slots))])
        return carry

    lax.fori_loop(jnp.maximum(jnp.int32(rounds) - work.slots, 0), rounds, written, None)


def _attention_fwd_kernel(refs, smem, *, plan, blocks):
    count = plan.config.warpgroups
    warpgroup = lax.axis_index("warpgroup")
    total = plan.batch * plan.q_blocks * plan.heads
    registers = REGISTERS[count]
    work = _Work(plan, refs["order"], blocks, total)

    @pl.when(warpgroup == count)
    def _():
        plgpu.set_max_registers(registers[-1], action="decrease")
        _copy(plan, refs, smem, work)

    @pl.when(warpgroup < count)
    def _():
        plgpu.set_max_registers(registers[0], action="increase")
        turns = _Turns(smem.get("turn"), warpgroup, count)
        turns.begin()
        me = _Computing(plan, refs, smem, warpgroup, turns)
        # The order is read an item ahead, the rest beside an item's first products.
        last = me.item(work.at(0, work.ordered(0)), jnp.int32(0), None)
        if work.slots > 1:

            def item(i, carry):
                last, ordered = carry
                at = work.at(i, ordered)
                ordered = work.ordered(i + 1)
                return me.item(at, last[0].end, last), ordered

            carry = last, work.ordered(1)
            last, _ = lax.fori_loop(1, work.rounds, item, carry)
        done, sums = last
        me.last_values(done, sums)
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
    total = plan.batch * plan.q_blocks * plan.heads
    blocks = min(total, hw.device().sms) if config.persistent else total
    q_slots = _Work(plan, None, blocks, total).slots
    count, dim = config.warpgroups, plan.head_dim
    scratch = {
        "q": tc.operand(q_slots, count, ROWS, dim, dtype=plan.dtype),
        "lse": plgpu.SMEM((count, ROWS), jnp.float32),
        "q_full": plgpu.Barrier(num_arrivals=count, num_barriers=q_slots),
        "q_free": plgpu.Barrier(num_arrivals=count, num_barriers=q_slots),
        "ring": {
            "tile": tc.operand(config.slots, config.step_kv, dim, dtype=plan.dtype),
            "full": plgpu.Barrier(num_arrivals=1, num_barriers=config.slots),
            "free": plgpu.Barrier(num_arrivals=count, num_barriers=config.slots),
        },
    }
    if config.ping_pong:
        scratch["turn"] = plgpu.Barrier(num_arrivals=1, num_barriers=count)
    return launch(
        functools.partial(_attention_fwd_kernel, plan=plan, blocks=blocks),
        "pk_attention_fwd",
        inputs,
        {
            "o": jax.ShapeDtypeStruct(q.shape, plan.dtype),
            "lse": jax.ShapeDtypeStruct(lse_shape, jnp.float32),
        },
        blocks=blocks,
        registers=REGISTERS[count],
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
        compiler_params=tc.params(auto_barriers=auto_barriers, reduction_bytes=0),
    )(*inputs.values())
