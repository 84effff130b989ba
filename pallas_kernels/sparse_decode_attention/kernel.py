"""Mosaic GPU kernel of `sparse_decode_attention`: keys are made where they are read.

An *item* is a kv head of a row. Its tokens are tiles of 64: 8 of the chosen chunks, 8
outliers, or 8 times 8 tokens of the ring. All tiles of all items stand in one line, of
which each block has the same share; an item whose tiles lie in several blocks is joined
afterwards, by the logarithms of its parts' sums.

One warpgroup runs ahead and copies, chunk by chunk. Two compute, a tile each by turns:

    K = A B^T        two halves, so that a pair of the rotation is in one thread
    K <- R(p) K      p is the position of each row, the angle exact in 32-bit turns
    S = Q K^T        the group's heads are the rows of Q
    O <- O + P V     with the online softmax of `attention`

The rotated K takes the place of A in shared memory. Keys of outliers and of the ring
are copied to that place as they are, and begin with the third line. An angle is kept
as a share of a turn, 2^32 to one: the product of a position and a frequency then leaves
out whole turns by itself, however large the position.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels._common import hw
from pallas_kernels._common.matrix_rows import put_rows
from pallas_kernels.attention import kernel_fwd as flash
from pallas_kernels.attention import tensor_core as tc
from pallas_kernels.sparse_decode_attention.config import (
    CHUNK,
    CHUNKS,
    COLUMNS,
    REGISTERS,
    TILE,
    Config,
    Sizes,
)
from pallas_kernels.sparse_decode_attention.held import Held, Rotary


WARPGROUPS = 2  # that compute
STATS = 8  # columns of the sums' logarithms, which are all the same


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """The static part of a launch.

    Attributes:
      sizes: of the call.
      dtype: of queries, keys and values.
      rotary, scale, logit_cap: as for `api.sparse_decode_attention`.
      config: how to divide.
    """

    sizes: Sizes
    dtype: Any
    rotary: Rotary | None
    scale: float
    logit_cap: float | None
    config: Config

    @property
    def exponent(self) -> float:
        """What multiplies a score, capped or not, to become a base 2 logit."""
        return (self.scale if self.logit_cap is None else 1.0) * flash.LOG2_E

    @property
    def half(self) -> int:
        return self.sizes.head_dim // 2

    @property
    def box(self) -> int:
        """Rows of queries that are copied: whole tiles of shared memory."""
        return -(-self.sizes.group // 8) * 8


def _operand(*shape: int, dtype: Any) -> Any:
    """Shared memory for products, in narrow tiles: ranks are multiples of 32."""
    tiles = (plgpu.TilingTransform((8, COLUMNS)), plgpu.SwizzleTransform(2 * COLUMNS))
    return plgpu.SMEM(shape, dtype, transforms=tiles)


@dataclasses.dataclass(frozen=True)
class Item:
    """Tiles of one item that this block has.

    Attributes:
      number, row: of the item, and of its row.
      begin, end: its tiles that are this block's.
      counts: chunks that count, of each section.
    """

    number: jax.Array
    row: jax.Array
    begin: jax.Array
    end: jax.Array
    counts: tuple[Any, Any, Any]

    def section(self, sizes: Sizes, which: int) -> tuple[jax.Array, jax.Array]:
        """The first tile of a section that this block has, and the one behind."""
        start = sum(sizes.sections[:which])
        live = lax.div(self.counts[which] + (CHUNKS - 1), jnp.int32(CHUNKS))
        return jnp.maximum(self.begin, start), jnp.minimum(self.end, start + live)

    def live(self, sizes: Sizes, which: int, tile: jax.Array) -> jax.Array:
        """Chunks of a tile that count, 1 to 8."""
        first = (tile - sum(sizes.sections[:which])) * CHUNKS
        return jnp.minimum(self.counts[which] - first, CHUNKS)


def _items(plan: Plan, refs: dict[str, Any], body: Callable[..., Any], carry: Any):
    """body(i, item, carry) for all items that this block has tiles of."""
    sizes = plan.sizes
    total, tiles = sizes.items * sizes.tiles, jnp.int32(sizes.tiles)
    begin = lax.axis_index("block") * sizes.share
    end = jnp.minimum(begin + sizes.share, total)
    first, last = lax.div(begin, tiles), lax.div(end - 1, tiles)

    def one(i, carry):
        number = first + i
        row = lax.div(number, jnp.int32(sizes.kv_heads))
        before = number * sizes.tiles
        chosen = jnp.clip(refs["count"][number], 0, sizes.chosen)
        outliers = jnp.clip(refs["out_count"][row], 0, sizes.outliers)
        here = Item(
            number=number,
            row=row,
            begin=jnp.maximum(begin - before, 0),
            end=jnp.minimum(end - before, sizes.tiles),
            counts=(chosen, outliers, jnp.int32(sizes.ring // CHUNK)),
        )
        return body(i, here, carry)

    return lax.fori_loop(0, last - first + 1, one, carry)


def _sources(plan: Plan, refs, item: Item, which: int, tile) -> list[tuple[Any, Any]]:
    """Where the 8 chunks of a tile are: keys, or rows in the basis, and values."""
    sizes = plan.sizes
    first = (tile - sum(sizes.sections[:which])) * CHUNKS
    # What lies behind the last chunk is a copy of it, and has no weight.
    most = (sizes.chosen, sizes.outliers, sizes.ring // CHUNK)[which] - 1
    places = [jnp.minimum(first + i, most) for i in range(CHUNKS)]
    # A launch of its own would take longer than this.
    layers = refs["a"].shape[0] // (sizes.batch * sizes.chunks)
    layer = jnp.clip(refs["layer"][0], 0, layers - 1)
    if which == 0:
        # All are read before the first copy waits for one.
        ids = [refs["ids"][item.number, place] for place in places]
        slots = [refs["slots"][item.number, place] for place in places]
        rows = (layer * sizes.batch + item.row) * sizes.chunks
        pool = (layer * sizes.items + item.number) * sizes.places
        return [
            (refs["a"].at[rows + chunk], refs["values"].at[pool + slot])
            for chunk, slot in zip(ids, slots, strict=True)
        ]
    if which == 1:
        base = (layer * sizes.items + item.number) * sizes.outliers
        return [
            (refs["out_k"].at[base + place], refs["out_v"].at[base + place])
            for place in places
        ]
    return [
        tuple(refs[n].at[item.number, pl.ds(place * CHUNK, CHUNK)] for n in names)
        for place in places
        for names in [("ring_k", "ring_v")]
    ]


def _feed(plan: Plan, refs: dict[str, Any], smem: dict[str, Any]) -> None:
    """The warpgroup that runs ahead."""
    sizes, slots = plan.sizes, jnp.int32(plan.config.slots)

    def item(i, here, done):
        @pl.when(i > 0)
        def _():
            plgpu.barrier_wait(smem["item_free"])

        queries = smem["q"].at[pl.ds(0, plan.box)]
        plgpu.copy_gmem_to_smem(refs["q"].at[here.number], queries, smem["item_full"])
        plgpu.copy_gmem_to_smem(
            refs["basis"].at[here.number], smem["basis"], smem["item_full"]
        )
        for which in range(3):

            def step(tile, done, which=which):
                w = lax.rem(tile, jnp.int32(WARPGROUPS))
                n = lax.select(w == 0, done[0], done[1])
                slot = lax.rem(n, slots)
                sources = _sources(plan, refs, here, which, tile)

                @pl.when(n >= slots)
                def _():
                    plgpu.barrier_wait(smem["free"].at[w, slot])

                full = smem["full"].at[w, slot]
                width = sizes.rank if which == 0 else sizes.head_dim
                for j, (keys, values) in enumerate(sources):
                    rows = pl.ds(j * CHUNK, CHUNK)
                    into = smem["k"].at[w, slot, rows, pl.ds(0, width)]
                    plgpu.copy_gmem_to_smem(keys, into, full)
                    plgpu.copy_gmem_to_smem(values, smem["v"].at[w, slot, rows], full)
                return tuple(d + (w == x).astype(jnp.int32) for x, d in enumerate(done))

            begin, end = here.section(sizes, which)
            done = lax.fori_loop(begin, end, step, done)
        return done

    done = _items(plan, refs, item, (jnp.int32(0),) * WARPGROUPS)
    # Every arrival must be waited for before the block ends.
    for w, n in enumerate(done):

        def drain(i, carry, w=w):
            plgpu.barrier_wait(smem["free"].at[w, lax.rem(i, slots)])
            return carry

        lax.fori_loop(jnp.maximum(n - slots, 0), n, drain, None)
    plgpu.barrier_wait(smem["item_free"])


def _make_keys(plan: Plan, refs, smem, item: Item, tile, k) -> None:
    """Puts the rotated keys of a tile in the place of their rows in the basis."""
    sizes, half = plan.sizes, plan.half
    shape = (TILE, half)
    rows = pl.ds(tile * TILE, TILE)
    place = tc.load_global(refs["positions"].at[item.number, rows], tc.PER_ROW)
    a = k.at[:, pl.ds(0, sizes.rank)]

    def body(one, two):
        for part, total in enumerate((one, two)):
            tc.mma(total, a, smem["basis"].at[pl.ds(part * half, half)].T)
        return tc.read(one), tc.read(two)

    one, two = tc.accumulate(body, shape, shape)
    if plan.rotary is not None:
        turns = tc.load_global(refs["turns"], tc.PER_COLUMN)
        turns = tc.per_row(place, shape) * tc.per_column(turns, shape)
        angle = turns.astype(jnp.float32) * (2 * math.pi / 2**32)
        cos = jnp.cos(angle) * plan.rotary.factor
        sin = jnp.sin(angle) * plan.rotary.factor
        one, two = one * cos - two * sin, two * cos + one * sin
    for part, total in enumerate((one, two)):
        k.at[:, pl.ds(part * half, half)][...] = total.astype(plan.dtype)
    plgpu.commit_smem()


def _clear(plan: Plan, seen: Callable[..., Any], v: Any) -> None:
    """Clears values that do not count: 0 times NaN would be NaN."""
    for column in range(0, plan.sizes.head_dim, COLUMNS):
        part = v.at[:, pl.ds(column, COLUMNS)]
        values = tc.load(part)
        keep = seen((TILE, COLUMNS), 0)
        part[...] = jnp.where(keep, values, jnp.zeros_like(values))
    plgpu.commit_smem()


def _tile(plan: Plan, refs, smem, item: Item, which: int, w: int, tile, carry):
    """One step of the online softmax."""
    sizes = plan.sizes
    n, acc, m, l = carry
    slot = lax.rem(n, jnp.int32(plan.config.slots))
    plgpu.barrier_wait(smem["full"].at[w, slot])
    k, v = smem["k"].at[w, slot], smem["v"].at[w, slot]
    live = item.live(sizes, which, tile)

    def seen(shape, axis):
        token = tc.index(shape, axis)
        if which < 2:
            return token < live * CHUNK
        first = (tile - sum(sizes.sections[:2])) * TILE
        flags = refs["ring_valid"].at[item.row, pl.ds(first, TILE)]
        kind, along = (
            (tc.PER_COLUMN, tc.per_column) if axis == 1 else (tc.PER_ROW, tc.per_row)
        )
        return along(tc.load_global(flags, kind), shape) != 0

    if which == 0:
        _make_keys(plan, refs, smem, item, tile, k)
    keys = k.at[:, pl.ds(0, sizes.head_dim)]

    def scores_of(total):
        tc.mma(total, smem["q"], keys.T)
        return tc.read(total)

    shape = (TILE, TILE)
    as_attention: Any = plan
    scores, _ = flash.capped(as_attention, tc.accumulate(scores_of, shape))
    scores = jnp.where(seen(shape, 1), scores, -jnp.inf)
    largest = jnp.maximum(m, jnp.max(scores, axis=1) * plan.exponent)
    factor = jnp.exp2(m - largest)
    p = jnp.exp2(scores * plan.exponent - tc.per_row(largest, shape))
    l = l * factor + jnp.sum(p, axis=1)
    acc = acc * tc.per_row(factor, (TILE, sizes.head_dim))
    clear = functools.partial(_clear, plan, seen, v)
    if which < 2:
        pl.when(live < CHUNKS)(clear)
    else:
        clear()
    p = tc.settle(p.astype(plan.dtype))

    def values_of(total):
        tc.mma(total, p, v)
        return tc.read(total)

    acc = tc.accumulate(values_of, acc)
    tc.give_back(smem["free"].at[w, slot])
    return n + 1, acc, largest, l


def _compute(plan: Plan, refs: dict[str, Any], smem: dict[str, Any], w: int) -> None:
    """A warpgroup that computes every other tile."""
    sizes = plan.sizes
    wide = (TILE, sizes.head_dim)

    def item(i, here, n):
        plgpu.barrier_wait(smem["item_full"])
        sums = (
            tc.full(wide, 0.0, tc.MATRIX),
            tc.full((TILE,), flash.LOWEST, tc.PER_ROW),
            tc.full((TILE,), 0.0, tc.PER_ROW),
        )
        carry = (n, *sums)
        for which in range(3):
            begin, end = here.section(sizes, which)
            # Tiles of even numbers are those of the first warpgroup.
            begin = begin + lax.rem(begin + w, jnp.int32(WARPGROUPS))
            turns = lax.div(jnp.maximum(end - begin, 0) + 1, jnp.int32(WARPGROUPS))

            def step(j, carry, which=which, begin=begin):
                tile = begin + j * WARPGROUPS
                return _tile(plan, refs, smem, here, which, w, tile, carry)

            carry = lax.fori_loop(0, turns, step, carry)
        n, acc, m, l = carry
        tc.give_back(smem["item_free"])
        nothing = l == 0.0
        acc = acc * tc.per_row(jnp.where(nothing, 0.0, 1.0 / l), wide)
        lse = jnp.where(nothing, flash.LOWEST, m + jnp.log(l) * flash.LOG2_E)
        part = lax.axis_index("block") - lax.div(
            here.number * sizes.tiles, jnp.int32(sizes.share)
        )
        place = (here.number * sizes.parts + part) * WARPGROUPS + w
        rows: dict[str, Any] = {
            "start": place * sizes.group,
            "stride": 1,
            "low": jnp.int32(0),
            "count": jnp.int32(sizes.group),
        }
        put_rows(refs["o"], acc, **rows)
        put_rows(refs["lse"], tc.per_row(lse, (TILE, STATS)), **rows)
        return n

    _items(plan, refs, item, jnp.int32(0))


def _sparse_decode_attention_kernel(*args, plan: Plan, names: tuple[str, ...]):
    arrays, (smem,) = args[: len(names)], args[len(names) :]
    refs = dict(zip(names, arrays, strict=True))
    warpgroup = lax.axis_index("warpgroup")
    for w in range(WARPGROUPS):

        @pl.when(warpgroup == w)
        def _(w=w):
            plgpu.set_max_registers(REGISTERS[w], action="increase")
            _compute(plan, refs, smem, w)

    @pl.when(warpgroup == WARPGROUPS)
    def _():
        plgpu.set_max_registers(REGISTERS[-1], action="decrease")
        _feed(plan, refs, smem)


def _turns(plan: Plan) -> np.ndarray:
    """Turns per position of each pair, i32: a turn has 2^32 of them."""
    frequencies = (0.0,) * plan.half if plan.rotary is None else plan.rotary.frequencies
    shares = np.mod(np.array(frequencies) / (2 * math.pi), 1.0)
    return np.round(shares * 2**32).astype(np.uint64).astype(np.uint32).view(np.int32)


def _inputs(plan: Plan, q, held: Held, ids, slots, count, layer) -> dict[str, Any]:
    """Arrays of the launch by name."""
    sizes = plan.sizes
    items, width = sizes.items, sizes.head_dim
    q = q.reshape(items, sizes.group, width)
    row = jnp.arange(sizes.batch, dtype=jnp.int32)[:, None, None]
    offset = jnp.arange(CHUNK, dtype=jnp.int32)[None, None, None]
    positions = held.first[row, ids][..., None] + offset
    positions = positions.reshape(items, -1)
    room = sizes.sections[0] * TILE - positions.shape[1]
    ring_room = sizes.sections[2] * TILE - sizes.ring
    return {
        "q": jnp.pad(q, ((0, 0), (0, plan.box - sizes.group), (0, 0))),
        "a": held.a.reshape(-1, CHUNK, sizes.rank),
        "basis": held.basis.reshape(items, width, sizes.rank),
        "positions": jnp.pad(positions, ((0, 0), (0, room))),
        "values": held.values.reshape(-1, CHUNK, width),
        "out_k": held.out_k.reshape(-1, CHUNK, width),
        "out_v": held.out_v.reshape(-1, CHUNK, width),
        "ring_k": held.ring_k.reshape(items, sizes.ring, width),
        "ring_v": held.ring_v.reshape(items, sizes.ring, width),
        "ring_valid": jnp.pad(
            held.ring_valid.astype(jnp.int32), ((0, 0), (0, ring_room))
        ),
        "ids": jnp.clip(ids.reshape(items, -1), 0, sizes.chunks - 1),
        "slots": jnp.clip(slots.reshape(items, -1), 0, sizes.places - 1),
        "count": count.reshape(items),
        "out_count": held.out_count,
        "turns": jnp.asarray(_turns(plan)),
        "layer": jnp.zeros(1, jnp.int32) if layer is None else layer[None],
    }


def sparse_decode_attention(
    plan: Plan,
    q: jax.Array,
    held: Held,
    ids: jax.Array,
    slots: jax.Array,
    count: jax.Array,
    sinks: jax.Array | None,
    layer: jax.Array | None,
) -> tuple[jax.Array, jax.Array]:
    """Launches the kernel; arguments and results as in the public function."""
    sizes, config = plan.sizes, plan.config
    hw.check_smem(sizes.shared_bytes(config.slots), "sparse_decode_attention")
    hw.check_registers(REGISTERS)
    inputs = _inputs(plan, q, held, ids, slots, count, layer)
    width, rows = sizes.head_dim, sizes.items * sizes.parts * WARPGROUPS * sizes.group
    operand = functools.partial(_operand, dtype=plan.dtype)
    ring = WARPGROUPS, config.slots
    scratch = {
        "k": operand(*ring, TILE, max(sizes.rank, width)),
        "v": operand(*ring, TILE, width),
        "q": operand(TILE, width),
        "basis": operand(width, sizes.rank),
        "full": plgpu.Barrier(num_arrivals=2 * CHUNKS, num_barriers=ring),
        "free": plgpu.Barrier(num_arrivals=1, num_barriers=ring),
        "item_full": plgpu.Barrier(num_arrivals=2),
        "item_free": plgpu.Barrier(num_arrivals=WARPGROUPS),
    }
    body: Any = functools.partial(
        _sparse_decode_attention_kernel, plan=plan, names=(*inputs, "o", "lse")
    )
    o, lse = plgpu.kernel(
        body,
        out_type=(
            jax.ShapeDtypeStruct((rows, width), jnp.float32),
            jax.ShapeDtypeStruct((rows, STATS), jnp.float32),
        ),
        grid=(sizes.blocks,),
        grid_names=("block",),
        num_threads=WARPGROUPS + 1,
        thread_name="warpgroup",
        scratch_types=[scratch],
        kernel_name="pk_sparse_decode_attention",
        compiler_params=tc.params(),
    )(*inputs.values())
    return _joined(plan, o, lse[:, 0], sinks)


def _joined(plan: Plan, o, lse, sinks) -> tuple[jax.Array, jax.Array]:
    """Joins the parts of each item, of which later ones may have none."""
    sizes = plan.sizes
    shape = (sizes.items, sizes.parts * WARPGROUPS, sizes.group)
    o, lse = o.reshape(*shape, -1), lse.reshape(shape)
    number = np.arange(sizes.items)
    last = ((number + 1) * sizes.tiles - 1) // sizes.share
    found = last - sizes.first_block(number) + 1  # parts of each item
    there = np.arange(sizes.parts)[None] < found[:, None]
    there = jnp.asarray(np.repeat(there, WARPGROUPS, axis=1))[..., None]
    lse = jnp.where(there, lse, flash.LOWEST)
    top = jnp.max(lse, axis=1, keepdims=True)
    if sinks is not None:
        sinks = sinks.astype(jnp.float32) * flash.LOG2_E
        sinks = jnp.tile(sinks.reshape(sizes.kv_heads, -1), (sizes.batch, 1))[:, None]
        top = jnp.maximum(top, sinks)
    weight = jnp.where(lse > flash.LOWEST, jnp.exp2(lse - top), 0.0)
    total = jnp.sum(weight, axis=1)
    o = jnp.sum(weight[..., None] * jnp.where(there[..., None], o, 0.0), axis=1)
    if sinks is not None:
        total = total + jnp.exp2(sinks - top)[:, 0]
    o = o / jnp.where(total > 0, total, 1.0)[..., None]
    lse = jnp.where(total > 0, top[:, 0] / flash.LOG2_E + jnp.log(total), -jnp.inf)
    out = sizes.batch, sizes.heads
    return o.reshape(*out, -1), lse.reshape(out)
