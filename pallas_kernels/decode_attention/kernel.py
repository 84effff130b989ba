"""Mosaic GPU kernel of attention over a cache, split over its tokens.

An *item* is a kv head of a row and a unit of its tokens. The queries of all heads that
read the kv head, of all new tokens, are the rows of one product: at most 64, mostly far
fewer, but the tensor cores are idle otherwise. Blocks are persistent and walk over the
rows; the items of one continue where those of the row before ended, so that rows of
unequal length share the blocks equally, and an empty one costs a read of its length.

One warpgroup runs ahead through all items of its block and feeds rings of tiles of keys
and values with TMA; the others take an item's tiles by turns, each with the online
softmax of `attention`, and write o and the logarithm of the sums of what they had. A
second kernel joins these parts, 64 at a time. How, depends on a row's own tokens alone:
its sums have one order, whatever the batch is.

A tile that ends behind the row's last token, or holds pages that are none, may have
anything in its values there. Multiplied by 0 that could be NaN: it is cleared first.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels._common import hw, overlap
from pallas_kernels._common.matrix_rows import put_rows
from pallas_kernels.attention import kernel_fwd as flash
from pallas_kernels.attention import tensor_core as tc
from pallas_kernels.decode_attention.config import (
    REGISTERS,
    ROWS,
    Config,
)
from pallas_kernels.decode_attention.held import Sizes, real_heads


STATS = 8  # columns of the sums' logarithms, which are all the same


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """The static part of a launch.

    Attributes:
      sizes: of the call.
      dtype: of q, k and v.
      window, logit_cap, scale: as for `decode_attention`.
      config: launch parameters.
    """

    sizes: Sizes
    dtype: Any
    window: int | None
    logit_cap: float | None
    scale: float
    config: Config

    @property
    def exponent(self) -> float:
        """What multiplies a score, capped or not, to become a base 2 logit."""
        return (self.scale if self.logit_cap is None else 1.0) * flash.LOG2_E

    @property
    def rows(self) -> int:
        """Queries that read a kv head of a row."""
        return self.sizes.time * self.sizes.group

    @property
    def row_blocks(self) -> int:
        return -(-self.rows // ROWS)

    @property
    def box(self) -> int:
        """Rows of queries that are copied for an item: whole tiles of shared memory.

        Copies begin at whole tiles, too: from anywhere else they bring zeros for what
        lies in the next one. So each row and kv head has `row_blocks` boxes.
        """
        return min(ROWS, -(-self.rows // 8) * 8)

    @property
    def units(self) -> int:
        """Of a full row."""
        return -(-self.sizes.length // self.config.unit)

    @property
    def parts(self) -> int:
        """Parts that a query's sum may have."""
        return self.units * self.config.warpgroups

    @property
    def copies(self) -> int:
        """Copies of one tile: one for each of its pages."""
        return max(1, self.config.step_kv // self.sizes.page) if self.sizes.page else 1

    @property
    def items_per_unit(self) -> int:
        return self.sizes.kv_heads * self.row_blocks

    @property
    def blocks(self) -> int:
        most = self.sizes.batch * self.units * self.items_per_unit
        return min(most, hw.device().sms)

    @property
    def total_rows(self) -> int:
        """Queries of all items, in the order of rows, kv heads, tokens, heads."""
        return self.sizes.batch * self.sizes.kv_heads * self.rows


@dataclasses.dataclass(frozen=True)
class Item:
    """One item.

    Attributes:
      row, kv_head: i32 scalars.
      pair: of its row and kv head, among all.
      first_row: of its queries among all queries.
      first_of_pair: how many queries of its row and kv head come before these.
      unit: which unit of the row.
      first_tile, tiles: of the row's tiles, how many.
      low, stop: the row's first token that any query sees, and the one behind its last.
    """

    row: jax.Array
    kv_head: jax.Array
    pair: jax.Array
    first_row: jax.Array
    first_of_pair: jax.Array
    unit: jax.Array
    first_tile: jax.Array
    tiles: jax.Array
    low: jax.Array
    stop: jax.Array


def _up(x: jax.Array, by: int) -> jax.Array:
    """x / by, rounded up, 0 for what is negative."""
    return lax.div(jnp.maximum(x, 0) + (by - 1), jnp.int32(by))


def _length(plan: Plan, refs: dict[str, Any], row: jax.Array) -> jax.Array:
    """Tokens that a row holds."""
    return jnp.minimum(jnp.maximum(refs["lengths"][row], 0), plan.sizes.length)


def _least(plan: Plan, length: jax.Array) -> jax.Array:
    """First token that any query of a row sees."""
    if plan.window is None:
        return jnp.int32(0)
    return jnp.maximum(length - (plan.sizes.time + plan.window - 1), 0)


def _items(plan: Plan, refs: dict[str, Any], body: Callable[..., Any], carry: Any):
    """body(item, carry) for all items of this block, in order."""
    config, blocks = plan.config, plan.blocks
    per_unit = config.unit // config.step_kv
    me = lax.axis_index("block")

    def row(b, state):
        before, carry = state  # items of the rows before, modulo blocks
        stop = _length(plan, refs, b)
        low = _least(plan, stop)
        first_unit = lax.div(low, jnp.int32(config.unit))
        units = jnp.maximum(_up(stop, config.unit) - first_unit, 0)
        count = units * plan.items_per_unit
        begin = me - before
        begin = lax.select(begin < 0, begin + blocks, begin)

        def item(i, carry):
            unit, inside = tc.split_index(begin + i * blocks, plan.items_per_unit)
            unit = first_unit + unit
            kv_head, row_block = tc.split_index(inside, plan.row_blocks)
            pair = b * plan.sizes.kv_heads + kv_head
            first_of_pair = row_block * ROWS
            first_tile = jnp.maximum(
                unit * per_unit, lax.div(low, jnp.int32(config.step_kv))
            )
            end = jnp.minimum((unit + 1) * per_unit, _up(stop, config.step_kv))
            here = Item(
                row=b,
                kv_head=kv_head,
                pair=pair,
                first_row=pair * plan.rows + first_of_pair,
                first_of_pair=first_of_pair,
                unit=unit,
                first_tile=first_tile,
                tiles=end - first_tile,
                low=low,
                stop=stop,
            )
            return body(here, carry)

        carry = lax.fori_loop(0, _up(count - begin, blocks), item, carry)
        return lax.rem(before + count, jnp.int32(blocks)), carry

    return lax.fori_loop(0, plan.sizes.batch, row, (jnp.int32(0), carry))[1]


def _start_of(plan: Plan, tile: jax.Array) -> jax.Array:
    """First token of a tile in memory: the last tile may reach back into another's."""
    start = tile * plan.config.step_kv
    if plan.sizes.page:
        return start
    return jnp.minimum(start, plan.sizes.length - plan.config.step_kv)


def _copy_tile(plan: Plan, refs, smem, w: int, name: str, item: Item, tile, n) -> None:
    """Copies a tile of keys or values to the n-th place of the w-th ring, once free."""
    sizes, step = plan.sizes, plan.config.step_kv
    slot = lax.rem(n, jnp.int32(plan.config.slots))
    full, into = smem["full"].at[w, slot], smem["tile"].at[w, slot]

    @pl.when(n >= plan.config.slots)
    def _():
        plgpu.barrier_wait(smem["free"].at[w, slot])

    def source(row, tokens):
        if sizes.heads_first:
            return refs[name].at[row, item.kv_head, tokens]
        return refs[name].at[row, tokens, item.kv_head]

    if not sizes.page:
        row = item.row + (refs["first"][0] if sizes.layers else 0)
        tokens = pl.ds(_start_of(plan, tile), step)
        plgpu.copy_gmem_to_smem(source(row, tokens), into, full)
        return
    if sizes.page >= step:
        page, inside = tc.split_index(tile, sizes.page // step)
        page = jnp.maximum(refs["table"][item.row, page], 0)
        plgpu.copy_gmem_to_smem(source(page, pl.ds(inside * step, step)), into, full)
        return
    last = sizes.length // sizes.page - 1
    for i in range(plan.copies):
        # The last tile may have fewer pages; any other one fills it.
        page = refs["table"][item.row, jnp.minimum(tile * plan.copies + i, last)]
        plgpu.copy_gmem_to_smem(
            source(jnp.maximum(page, 0), pl.ds(0, sizes.page)),
            into.at[pl.ds(i * sizes.page, sizes.page)],
            full,
        )


def _feed(plan: Plan, refs: dict[str, Any], smem: dict[str, Any]) -> None:
    """The warpgroup that runs ahead."""
    config = plan.config
    places, count = jnp.int32(config.q_places), config.warpgroups

    def item(here, state):
        before, done = state  # tiles of each ring, items

        def queries():
            at = lax.rem(done, places)

            @pl.when(done >= places)
            def _():
                plgpu.barrier_wait(smem["q_free"].at[at])

            plgpu.copy_gmem_to_smem(
                refs["q"].at[here.pair, pl.ds(here.first_of_pair, plan.box)],
                smem["q"].at[at, pl.ds(0, plan.box)],
                smem["q_full"].at[at],
            )

        def turn(j, carry):
            for w, n in enumerate(before):
                i = j * count + w

                @pl.when(i < here.tiles)
                def _(w=w, i=i, n=n + 2 * j):
                    tile = here.first_tile + i
                    _copy_tile(plan, refs, smem, w, "k", here, tile, n)
                    _copy_tile(plan, refs, smem, w, "v", here, tile, n + 1)

            # Only now: these tiles need not wait for the end of the item before.
            pl.when(j == 0)(queries)
            return carry

        lax.fori_loop(0, _up(here.tiles, count), turn, None)
        after = (n + 2 * _turns(here.tiles, w, count) for w, n in enumerate(before))
        return tuple(after), done + 1

    start = (jnp.int32(0),) * count, jnp.int32(0)
    before, done = _items(plan, refs, item, start)
    # Every arrival must be waited for before the block ends.
    for w, n in enumerate(before):
        _drain(n, config.slots, lambda slot, w=w: smem["free"].at[w, slot])
    _drain(done, config.q_places, lambda at: smem["q_free"].at[at])


def _drain(count: jax.Array, places: int, barrier: Callable[..., Any]) -> None:
    """Waits for the arrivals at the last places that no copy waited for."""

    def wait(i, carry):
        plgpu.barrier_wait(barrier(lax.rem(i, jnp.int32(places))))
        return carry

    lax.fori_loop(jnp.maximum(count - places, 0), count, wait, None)


def _is_held(plan: Plan, refs, item: Item, tile) -> list[jax.Array]:
    """Which pages of a tile hold tokens."""
    sizes, step = plan.sizes, plan.config.step_kv
    if sizes.page >= step:
        number = lax.div(tile, jnp.int32(sizes.page // step))
        return [refs["table"][item.row, number] >= 0]
    last = sizes.length // sizes.page - 1
    numbers = [jnp.minimum(tile * plan.copies + i, last) for i in range(plan.copies)]
    return [refs["table"][item.row, number] >= 0 for number in numbers]


def _seen(plan: Plan, shape, item: Item, tile, held, axis: int) -> jax.Array:
    """Which tokens of a tile, along `axis`, any query of the row sees."""
    place = tc.index(shape, axis)
    token = place + _start_of(plan, tile)
    low = jnp.maximum(item.low, tile * plan.config.step_kv)
    seen = (token >= low) & (token < item.stop)
    if not held:
        return seen
    page = lax.div(place, jnp.int32(plan.config.step_kv // plan.copies))
    for i, is_held in enumerate(held):
        seen = seen & ((page != i) | is_held)
    return seen


def _allowed(plan: Plan, item: Item, tile, held) -> jax.Array:
    """Which pairs of a query and a token of a tile count, bool[64, step_kv]."""
    shape = (ROWS, plan.config.step_kv)
    seen = _seen(plan, shape, item, tile, held, 1)
    time = plan.sizes.time
    if time == 1:
        return seen
    # Rows that are no queries have any place.
    query = tc.index(shape, 0) + item.first_of_pair
    query = lax.div(query, jnp.int32(plan.sizes.group))
    token = tc.index(shape, 1) + _start_of(plan, tile)
    place = query + (item.stop - time)
    seen = seen & (token <= place)
    return seen if plan.window is None else seen & (place - token < plan.window)


def _clear(plan: Plan, item: Item, tile, held, ref) -> None:
    """Clears the values of a tile that no query sees."""
    step, dim = plan.config.step_kv, plan.sizes.head_dim
    start = _start_of(plan, tile)
    low = jnp.maximum(item.low, tile * step)
    partial = (start < low) | (start + step > item.stop)
    for is_held in held:
        partial = partial | jnp.logical_not(is_held)

    @pl.when(partial)
    def _():
        shape = (step, _columns(dim))
        seen = _seen(plan, shape, item, tile, held, 0)
        for column in range(0, dim, shape[1]):
            part = ref.at[:, pl.ds(column, shape[1])]
            values = tc.load(part)
            part[...] = jnp.where(seen, values, jnp.zeros_like(values))
        plgpu.commit_smem()


def _columns(dim: int) -> int:
    """Columns that are in registers at a time: those of one swizzled tile."""
    return min(dim, 64)


def _softmax(plan: Any, scores, m, l, allowed):
    """One step: new m and l, the factor on what was summed, P in f32."""
    scores, _ = flash.capped(plan, scores)
    if allowed is not None:
        scores = jnp.where(allowed, scores, -jnp.inf)
    largest = jnp.maximum(m, jnp.max(scores, axis=1) * plan.exponent)
    factor = jnp.exp2(m - largest)
    shape = (ROWS, plan.config.step_kv)
    p = jnp.exp2(scores * plan.exponent - tc.per_row(largest, shape))
    return largest, l * factor + jnp.sum(p, axis=1), factor, p


def _turns(count: jax.Array, w: jax.Array | int, of: int) -> jax.Array:
    """How many of the first `count` tiles are the w-th warpgroup's."""
    return _up(count - w, of)


def _attend(plan: Plan, refs, smem, q, w, item: Item, n) -> tuple[Any, Any, Any]:
    """Sums of the tiles of an item that are this warpgroup's.

    Args:
      plan: of the launch.
      refs, smem: device and shared memory.
      q: [64, K] in shared memory.
      w: the warpgroup.
      item: the item.
      n: places of its ring that were used before.

    Returns:
      O before it is divided, f32[64, K]; m and l, f32[64] in `PER_ROW`.
    """
    config = plan.config
    step_kv, count = config.step_kv, config.warpgroups
    shape, wide = (ROWS, step_kv), (ROWS, plan.sizes.head_dim)

    def arrived(n):
        slot = lax.rem(n, jnp.int32(config.slots))
        plgpu.barrier_wait(smem["full"].at[w, slot])
        return smem["free"].at[w, slot], smem["tile"].at[w, slot]

    def step(turn, carry, masked):
        acc, m, l = carry
        tile = item.first_tile + w + turn * count
        held = _is_held(plan, refs, item, tile) if plan.sizes.page else []
        k_free, k = arrived(n + 2 * turn)

        def scores_of(total):
            tc.mma(total, q, k.T)
            return tc.read(total)

        scores = tc.accumulate(scores_of, shape)
        tc.give_back(k_free)
        allowed = _allowed(plan, item, tile, held) if masked else None
        m, l, factor, p = _softmax(plan, scores, m, l, allowed)
        acc = acc * tc.per_row(factor, wide)
        p = tc.settle(p.astype(plan.dtype))
        v_free, v = arrived(n + 2 * turn + 1)
        if masked:
            _clear(plan, item, tile, held, v)

        def values_of(total):
            tc.mma(total, p, v)
            return tc.read(total)

        acc = tc.accumulate(values_of, acc)
        tc.give_back(v_free)
        return acc, m, l

    acc = tc.full(wide, 0.0, tc.MATRIX)
    m, l = (tc.full((ROWS,), x, tc.PER_ROW) for x in (flash.LOWEST, 0.0))
    carry, turns = (acc, m, l), _turns(item.tiles, w, count)
    masked = functools.partial(step, masked=True)
    if plan.sizes.page:
        return lax.fori_loop(0, turns, masked, carry)
    # In between, every query sees every token.
    low = jnp.int32(0) if plan.window is None else item.stop - plan.window
    begin = _up(low, step_kv) - item.first_tile
    begin = jnp.minimum(jnp.maximum(begin, 0), item.tiles)
    end = jnp.maximum(item.stop - (plan.sizes.time - 1), 0)
    end = lax.div(end, jnp.int32(step_kv)) - item.first_tile
    end = jnp.minimum(jnp.maximum(end, begin), item.tiles)
    begin, end = (_turns(x, w, count) for x in (begin, end))
    carry = lax.fori_loop(0, begin, masked, carry)
    carry = lax.fori_loop(begin, end, functools.partial(step, masked=False), carry)
    return lax.fori_loop(end, turns, masked, carry)


def _write(plan: Plan, refs, w, item: Item, sums) -> None:
    """Writes a part: o, divided, and the base 2 logarithm of the sums."""
    acc, m, l = sums
    nothing = l == 0.0
    inverse = jnp.where(nothing, 0.0, 1.0 / l)
    log_total = jnp.where(nothing, -jnp.inf, m + jnp.log(l) * flash.LOG2_E)
    count = jnp.minimum(plan.rows - item.first_of_pair, ROWS)
    start = item.first_row * plan.parts + item.unit * plan.config.warpgroups + w
    where = {"start": start, "stride": plan.parts, "low": jnp.int32(0), "count": count}
    put_rows(refs["o"], acc * tc.per_row(inverse, acc.shape), **where)
    put_rows(refs["lse"], tc.per_row(log_total, (ROWS, STATS)), **where)


def _decode_attention_kernel(refs, smem, *, plan: Plan) -> None:
    count = plan.config.warpgroups
    registers = REGISTERS[count]
    warpgroup = lax.axis_index("warpgroup")

    @pl.when(warpgroup == count)
    def _():
        plgpu.set_max_registers(registers[-1], action="decrease")
        _feed(plan, refs, smem)

    @pl.when(warpgroup < count)
    def _():
        plgpu.set_max_registers(registers[0], action="increase")

        def item(here, state):
            n, done = state
            at = lax.rem(done, jnp.int32(plan.config.q_places))
            plgpu.barrier_wait(smem["q_full"].at[at])
            sums = _attend(plan, refs, smem, smem["q"].at[at], warpgroup, here, n)
            tc.give_back(smem["q_free"].at[at])
            _write(plan, refs, warpgroup, here, sums)
            return n + 2 * _turns(here.tiles, warpgroup, count), done + 1

        _items(plan, refs, item, (jnp.int32(0), jnp.int32(0)))


@overlap.launch(0)
def _parts(plan: Plan, inputs: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
    """Launches the kernel.

    Args:
      plan: of the launch.
      inputs: q [B G, rows, K], rows of whole boxes; k, v of four axes; lengths i32[B];
        table i32[B, N] if there are pages, first i32[1] if there are layers.

    Returns:
      o f32[rows * parts + 64, K] and the base 2 logarithm of the sums, f32[rows *
      parts + 64, STATS]; what no item has is not written.
    """
    config, dim = plan.config, plan.sizes.head_dim
    count = config.warpgroups
    rings = (count, config.slots)
    scratch = {
        "q": tc.operand(config.q_places, ROWS, dim, dtype=plan.dtype),
        "q_full": plgpu.Barrier(num_arrivals=1, num_barriers=config.q_places),
        "q_free": plgpu.Barrier(num_arrivals=count, num_barriers=config.q_places),
        "tile": tc.operand(*rings, config.step_kv, dim, dtype=plan.dtype),
        "full": plgpu.Barrier(num_arrivals=plan.copies, num_barriers=rings),
        "free": plgpu.Barrier(num_arrivals=1, num_barriers=rings),
    }
    rows = plan.total_rows * plan.parts + ROWS  # they are read 64 at a time
    return flash.launch(
        overlap.overlapping(functools.partial(_decode_attention_kernel, plan=plan)),
        "pk_decode_attention",
        inputs,
        {
            "o": jax.ShapeDtypeStruct((rows, dim), jnp.float32),
            "lse": jax.ShapeDtypeStruct((rows, STATS), jnp.float32),
        },
        blocks=plan.blocks,
        registers=REGISTERS[count],
        scratch=scratch,
        # A thread writes shared memory where it alone has read; `commit_smem` follows.
        auto_barriers=False,
    )


def _join_kernel(refs, *, plan: Plan, width: int) -> None:
    sizes, config = plan.sizes, plan.config
    query, column = tc.split_index(lax.axis_index("block"), sizes.head_dim // width)
    pair, inside = tc.split_index(query, plan.rows)
    row, kv_head = tc.split_index(pair, sizes.kv_heads)
    token, head = tc.split_index(inside, sizes.group)
    stop = _length(plan, refs, row)
    unit = jnp.int32(config.unit)
    first = lax.div(_least(plan, stop), unit) * config.warpgroups
    end = _up(stop, config.unit) * config.warpgroups
    wide = (ROWS, width)
    place = plgpu.broadcasted_iota(jnp.int32, (ROWS,), 0, layout=tc.PER_ROW)

    def step(i, carry):
        acc, m, l = carry
        part = first + i * ROWS
        rows = pl.ds(query * plan.parts + part, ROWS)
        o = tc.load_global(refs["o"].at[rows, pl.ds(column * width, width)])
        log_total = jnp.max(tc.load_global(refs["lse"].at[rows]), axis=1)
        # -inf of an empty part, and anything behind the last one.
        log_total = jnp.where(place + part < end, log_total, -jnp.inf)
        largest = jnp.maximum(m, log_total)
        factor, weight = jnp.exp2(m - largest), jnp.exp2(log_total - largest)
        share = tc.per_row(weight, wide)
        acc = acc * tc.per_row(factor, wide) + jnp.where(share > 0.0, share * o, 0.0)
        return acc, largest, l * factor + weight

    acc = tc.full(wide, 0.0, tc.MATRIX)
    m, l = (tc.full((ROWS,), x, tc.PER_ROW) for x in (flash.LOWEST, 0.0))
    acc, m, l = lax.fori_loop(0, _up(end - first, ROWS), step, (acc, m, l))
    # What stands in one row of the matrices came from every 64th part.
    sink = jnp.float32(-jnp.inf)
    if "sinks" in refs:
        sink = refs["sinks"][kv_head * sizes.group + head] * flash.LOG2_E
    largest = jnp.maximum(jnp.max(m), sink)
    factor = jnp.exp2(m - largest)
    total = jnp.sum(l * factor) + jnp.exp2(sink - largest)
    nothing = total == 0.0
    inverse = lax.select(nothing, jnp.float32(0), 1.0 / total)
    o = jnp.sum(acc * tc.per_row(factor * inverse, wide), axis=0)
    into = ((row * sizes.time + token) * sizes.kv_heads + kv_head) * sizes.group + head
    into_row = into * (sizes.head_dim // width) + column
    if "gate" in refs:
        gate = tc.load_global(refs["gate"].at[into_row], tc.PER_COLUMN)
        o = o.astype(refs["joined"].dtype).astype(jnp.float32)
        o = o / (1.0 + jnp.exp(-gate.astype(jnp.float32)))
    o = tc.per_column(o, wide).astype(refs["joined"].dtype)
    one = {"stride": 1, "low": jnp.int32(0), "count": jnp.int32(1)}
    put_rows(refs["joined"], o, start=into_row, **one)
    log_total = lax.select(
        nothing, jnp.float32(-jnp.inf), largest * (1 / flash.LOG2_E) + jnp.log(total)
    )

    @pl.when(column == 0)
    def _():
        refs["log"][into] = log_total


@overlap.launch(0, 1)
def _join(
    plan: Plan, out_dtype: Any, inputs: dict[str, jax.Array]
) -> tuple[jax.Array, jax.Array]:
    """Sums the parts of each query, in an order that their number alone decides.

    Args:
      plan: of the launch.
      out_dtype: of o.
      inputs: o and lse of `_parts`, lengths i32[B], sinks f32[H] and gate [B T H, K]
        if there are.

    Returns:
      o [B T H, K] and the natural logarithm of the sums, f32[B T H].
    """
    # Sums of 64 parts of more columns would not fit the registers.
    width = min(plan.sizes.head_dim, 128)
    pieces = plan.sizes.head_dim // width
    count = plan.total_rows
    names = (*inputs, "joined", "log")
    if "gate" in inputs:
        inputs = inputs | {"gate": inputs["gate"].reshape(count * pieces, width)}

    def body(*refs):
        _join_kernel(dict(zip(names, refs, strict=True)), plan=plan, width=width)

    o, lse = plgpu.kernel(
        overlap.overlapping(body),
        out_type=(
            jax.ShapeDtypeStruct((count * pieces, width), out_dtype),
            jax.ShapeDtypeStruct((count,), jnp.float32),
        ),
        grid=(count * pieces,),
        grid_names=("block",),
        kernel_name="pk_decode_attention_join",
        compiler_params=tc.params(),
    )(*inputs.values())
    return o.reshape(count, -1), lse


def _boxes(plan: Plan, q: jax.Array) -> jax.Array:
    """q as `_parts` takes it, which of one token may be as it is."""
    sizes = plan.sizes
    padded = plan.row_blocks * plan.box
    if sizes.time == 1 and q.shape[2] == sizes.kv_heads * padded:
        return q.reshape(-1, padded, sizes.head_dim)
    q = real_heads(q, sizes)
    grouped = (sizes.batch, sizes.time, sizes.kv_heads, sizes.group)
    rows = jnp.swapaxes(q.reshape(*grouped, -1), 1, 2)
    rows = rows.reshape(-1, plan.rows, sizes.head_dim)
    return jnp.pad(rows, ((0, 0), (0, padded - plan.rows), (0, 0)))


def decode_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    lengths: jax.Array,
    *,
    sizes: Sizes,
    table: jax.Array | None,
    layer: jax.Array | None,
    window: int | None,
    sinks: jax.Array | None,
    gate: jax.Array | None,
    logit_cap: float | None,
    scale: float,
    out_dtype: Any,
    config: Config,
) -> tuple[jax.Array, jax.Array]:
    """Kernel form; arguments and results as in `api.decode_attention`.

    Raises:
      ValueError: the launch parameters do not fit these sizes or the card.
    """
    if reason := config.refusal(sizes):
        raise ValueError(reason)
    plan = Plan(
        sizes=sizes,
        dtype=jnp.dtype(q.dtype),
        window=window,
        logit_cap=logit_cap,
        scale=scale,
        config=config,
    )
    inputs = {"q": _boxes(plan, q), "k": k, "v": v, "lengths": lengths}
    first = jnp.int32(0)
    if layer is not None:
        inputs |= {x: inputs[x].reshape(-1, *k.shape[2:]) for x in ("k", "v")}
        first = jnp.asarray(layer, jnp.int32)
        if table is None:
            inputs["first"] = (first * sizes.batch).reshape(1)
    if table is not None:
        is_page = (table >= 0) & (table < sizes.pages)
        table = table.astype(jnp.int32) + first * sizes.pages
        inputs["table"] = jnp.where(is_page, table, -1)
    o, lse = _parts(plan, inputs)
    parts = {"o": o, "lse": lse, "lengths": lengths}
    if sinks is not None:
        parts["sinks"] = sinks.astype(jnp.float32)
    if gate is not None:
        parts["gate"] = gate
    o, lse = _join(plan, jnp.dtype(out_dtype), parts)
    queries = (sizes.batch, sizes.time, sizes.heads)
    return o.reshape(*queries, sizes.head_dim), lse.reshape(queries)
