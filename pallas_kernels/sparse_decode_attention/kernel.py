"""Mosaic GPU kernel of `sparse_decode_attention`: keys are made where they are read.

An *item* is a kv head of a row. Its tokens are tiles of 64: 8 of the chosen chunks, 8
outliers, or 8 times 8 tokens of the ring. All tiles of all items stand in one line, of
which each block has the same share; an item whose tiles lie in several blocks is joined
afterwards (`join.py`), by the logarithms of its parts' sums.

One warpgroup runs ahead and copies. Two compute, a tile each by turns:

    K = A B^T            a pair of the rotation is in one thread
    K <- R(p) K          p is the position of each row, the angle exact in 32-bit turns
    S^T = K Q^T          the group's few heads are the columns
    O^T <- O^T + V^T P^T with the online softmax of `attention`

Tokens are the rows, because a product has 64 of them whatever it is given: with the
heads there, 60 of 64 rows of the softmax would be padding. The rotated K goes to the
product from the registers that it is made in; keys of outliers and of the ring are
read where they were copied to, and begin with the third line. An angle is kept as a
share of a turn, 2^32 to one: the product of a position and a frequency then leaves out
whole turns by itself, however large the position. R(p) is the rotation of the chunk's
first token, which the copying warpgroup writes beside the tile, and that of the place
in the chunk, which a thread keeps: it has the same row of 8 in every tile.

Memory is what the kernel waits for, so the next item's queries and basis are on their
way before the last tiles of this one, its outliers and ring, are done with.
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
from pallas_kernels._common import matrix_columns as columns
from pallas_kernels._common.matrix_rows import (
    load_flags,
    load_repeated,
    put_rows,
    repeat_eights,
)
from pallas_kernels.attention import kernel_fwd as flash
from pallas_kernels.attention import tensor_core as tc
from pallas_kernels.sparse_decode_attention.config import (
    CHUNK,
    CHUNKS,
    COLUMNS,
    REGISTERS,
    TILE,
    WARPGROUPS,
    Config,
    Sizes,
)
from pallas_kernels.sparse_decode_attention.held import Held, Rotary
from pallas_kernels.sparse_decode_attention.join import box, by_item, join


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

    def pieces(self, which: int) -> tuple[int, int]:
        """Rows of keys, or of their rows in the basis, and of values copied as one."""
        if which == 0:
            return CHUNK, CHUNK
        # Rows that are there to the end, so that none lies behind them.
        rows = (self.sizes.outliers * CHUNK, self.sizes.ring)[which - 1]
        size = math.gcd(rows, TILE)
        # Keys in a place that is wider lie together as far as a tile of memory goes.
        return CHUNK if self.sizes.rank > self.sizes.head_dim else size, size

    def arrivals(self, which: int) -> int:
        """Of the barrier that tells that a tile is there."""
        copies = sum(TILE // size for size in self.pieces(which))
        return copies + (which == 0 and self.rotary is not None)


def _operand(*shape: int, dtype: Any) -> Any:
    """Shared memory for products, in narrow tiles: ranks are multiples of 32."""
    tiles = (plgpu.TilingTransform((8, COLUMNS)), plgpu.SwizzleTransform(2 * COLUMNS))
    return plgpu.SMEM(shape, dtype, transforms=tiles)


@dataclasses.dataclass(frozen=True)
class Item:
    """Tiles of one item that this block has.

    Attributes:
      number, pair, row: of the item, of its kv head and of its row.
      begin, end: its tiles that are this block's.
      counts: chunks that count, of each section.
    """

    number: jax.Array
    pair: jax.Array
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
    """body(i, item, carry) for all items that this block has tiles of; how many."""
    sizes = plan.sizes
    total, tiles = sizes.items * sizes.tiles, jnp.int32(sizes.tiles)
    begin = lax.axis_index("block") * sizes.share
    end = jnp.minimum(begin + sizes.share, total)
    first, last = lax.div(begin, tiles), lax.div(end - 1, tiles)

    def one(i, carry):
        number = first + i
        pair = lax.div(number, jnp.int32(sizes.splits))
        row = lax.div(pair, jnp.int32(sizes.kv_heads))
        before = number * sizes.tiles
        chosen = jnp.clip(refs["count"][pair], 0, sizes.chosen)
        outliers = jnp.clip(refs["out_count"][row], 0, sizes.outliers)
        here = Item(
            number=number,
            pair=pair,
            row=row,
            begin=jnp.maximum(begin - before, 0),
            end=jnp.minimum(end - before, sizes.tiles),
            counts=(chosen, outliers, jnp.int32(sizes.ring // CHUNK)),
        )
        return body(i, here, carry)

    count = last - first + 1
    return lax.fori_loop(0, count, one, carry), count


def _layer(plan: Plan, refs) -> jax.Array:
    """The layer that is meant: a launch of its own would take longer than this."""
    sizes = plan.sizes
    layers = refs["a"].shape[0] // (sizes.batch * sizes.chunks)
    return jnp.clip(refs["layer"][0], 0, layers - 1)


def _named(plan: Plan, refs, item: Item, tile) -> tuple[tuple[Any, ...], ...]:
    """The chunks of a tile and the places of their values, as the caller has them."""
    # What lies behind the last chunk is a copy of it, and has no weight.
    most = plan.sizes.chosen - 1
    places = [jnp.minimum(tile * CHUNKS + i, most) for i in range(CHUNKS)]
    return tuple(
        tuple(refs[name][item.pair, place] for place in places)
        for name in ("ids", "slots")
    )


def _kept(plan: Plan, refs, item: Item, which: int, tile, layer) -> list[Any]:
    """Where the pieces of a tile of outliers or of the ring are, keys and values."""
    sizes = plan.sizes
    names = (("out_k", "out_v"), ("ring_k", "ring_v"))[which - 1]
    rows = (sizes.outliers * CHUNK, sizes.ring)[which - 1]
    first = (tile - sum(sizes.sections[:which])) * TILE
    pair = item.pair + (layer * sizes.pairs if which == 1 else 0)
    return [
        [
            refs[name].at[pair, pl.ds(jnp.minimum(first + j, rows - size), size)]
            for j in range(0, TILE, size)
        ]
        for name, size in zip(names, plan.pieces(which), strict=True)
    ]


def _send(plan: Plan, smem, w, slot, which: int, sources: Any) -> None:
    """Copies the pieces of a tile: keys, or rows in the basis, and values."""
    sizes = plan.sizes
    width = sizes.rank if which == 0 else sizes.head_dim
    into = smem["k"].at[w, slot, :, pl.ds(0, width)], smem["v"].at[w, slot]
    for pieces, place, size in zip(sources, into, plan.pieces(which), strict=True):
        for j, piece in enumerate(pieces):
            rows = place.at[pl.ds(j * size, size)]
            plgpu.copy_gmem_to_smem(piece, rows, smem["full"][which].at[w, slot])


def _turner(plan: Plan, refs, smem) -> Callable[..., None]:
    """What writes the rotation of each chunk's first token, cosines and sines."""
    shape = (CHUNKS, plan.half)
    layout = plgpu.Layout.WG_STRIDED(shape, math.prod(shape) // 128)
    turns, chunk = (
        plgpu.load(refs[name], layout=layout) for name in ("turns", "chunk")
    )

    def turn(w, slot, firsts):
        first = plgpu.layout_cast(jnp.full(shape, firsts[0], jnp.int32), layout)
        for j, x in enumerate(firsts[1:], 1):
            first = jnp.where(chunk == j, jnp.full_like(first, x), first)
        angle = _angle(first * turns)
        smem["cos"].at[w, slot][...] = jnp.cos(angle)
        smem["sin"].at[w, slot][...] = jnp.sin(angle)

    return turn


def _feed(plan: Plan, refs: dict[str, Any], smem: dict[str, Any]) -> None:
    """The warpgroup that runs ahead."""
    sizes, slots = plan.sizes, jnp.int32(plan.config.slots)
    layer = _layer(plan, refs)
    turn = None if plan.rotary is None else _turner(plan, refs, smem)

    def item(i, here, done):
        buffer = lax.rem(i, jnp.int32(2))

        @pl.when(i > 1)
        def _():
            plgpu.barrier_wait(smem["item_free"].at[buffer])

        start = box(sizes, here.number) * sizes.columns
        queries = refs["q"].at[pl.ds(start, sizes.columns)]
        plgpu.copy_gmem_to_smem(
            queries, smem["q"].at[buffer], smem["item_full"].at[buffer]
        )

        @pl.when(i > 0)
        def _():
            plgpu.barrier_wait(smem["basis_free"])

        plgpu.copy_gmem_to_smem(
            refs["basis"].at[here.pair], smem["basis"], smem["basis_full"]
        )

        def place(tile, done):
            """Waits for the place of a tile."""
            w = lax.rem(tile, jnp.int32(WARPGROUPS))
            n = lax.select(w == 0, done[0], done[1])
            slot = lax.rem(n, slots)

            @pl.when(n >= slots)
            def _():
                plgpu.barrier_wait(smem["free"].at[w, slot])

            done = tuple(d + (w == x).astype(jnp.int32) for x, d in enumerate(done))
            return w, slot, done

        def made(tile, carry):
            done, named = carry
            ids = [jnp.clip(x, 0, sizes.chunks - 1) for x in named[0]]
            kept = [jnp.clip(x, 0, sizes.places - 1) for x in named[1]]
            # Reads that take long are begun before the waits.
            firsts = [refs["first"][here.row, x] for x in ids] if turn else []
            behind = jnp.minimum(tile + 1, jnp.int32(sizes.sections[0] - 1))
            named = _named(plan, refs, here, behind)
            rows = (layer * sizes.batch + here.row) * sizes.chunks
            pool = (layer * sizes.pairs + here.pair) * sizes.places
            w, slot, done = place(tile, done)
            sources = (
                [refs["a"].at[rows + x] for x in ids],
                [refs["values"].at[pool + x] for x in kept],
            )
            _send(plan, smem, w, slot, 0, sources)
            if turn:
                turn(w, slot, firsts)
                plgpu.barrier_arrive(smem["full"][0].at[w, slot])
            return done, named

        begin, end = here.section(sizes, 0)
        named = _named(plan, refs, here, jnp.minimum(begin, sizes.sections[0] - 1))
        done, _ = lax.fori_loop(begin, end, made, (done, named))
        for which in (1, 2):

            def exact(tile, done, which=which):
                sources = _kept(plan, refs, here, which, tile, layer)
                w, slot, done = place(tile, done)
                _send(plan, smem, w, slot, which, sources)
                return done

            begin, end = here.section(sizes, which)
            done = lax.fori_loop(begin, end, exact, done)
        return done

    done, items = _items(plan, refs, item, (jnp.int32(0),) * WARPGROUPS)
    # Every arrival must be waited for before the block ends.
    for w, n in enumerate(done):

        def drain(i, carry, w=w):
            plgpu.barrier_wait(smem["free"].at[w, lax.rem(i, slots)])
            return carry

        lax.fori_loop(jnp.maximum(n - slots, 0), n, drain, None)

    def drain_items(i, carry):
        plgpu.barrier_wait(smem["item_free"].at[lax.rem(i, jnp.int32(2))])
        return carry

    lax.fori_loop(jnp.maximum(items - 2, 0), items, drain_items, None)
    plgpu.barrier_wait(smem["basis_free"])


def _angle(turns: jax.Array) -> jax.Array:
    return turns.astype(jnp.float32) * (2 * math.pi / 2**32)


def _offsets(plan: Plan, refs) -> tuple[jax.Array, jax.Array] | None:
    """The rotation from a chunk's first token to each, of all tiles the same."""
    if plan.rotary is None:
        return None
    shape = (TILE, plan.half)
    turns = tc.load_global(refs["turns"].at[0], tc.PER_COLUMN)
    offset = tc.index(shape, 0) & (CHUNK - 1)
    angle = _angle(offset * tc.per_column(turns, shape))
    factor = plan.rotary.factor
    cos, sin = jnp.cos(angle) * factor, jnp.sin(angle) * factor
    return repeat_eights(cos), repeat_eights(sin)


def _turned(pair: Any, cos: jax.Array, sin: jax.Array) -> tuple[jax.Array, jax.Array]:
    one, two = pair
    return one * cos - two * sin, two * cos + one * sin


def _made(plan: Plan, smem, offsets, w: int, slot) -> tuple[jax.Array, ...]:
    """The rotated keys of a tile, in halves of their columns, for a product."""
    sizes, half = plan.sizes, plan.half
    a = smem["k"].at[w, slot, :, pl.ds(0, sizes.rank)]

    def body(total):
        tc.mma(total, a, smem["basis"].T)
        return tc.read(total)

    total = tc.accumulate(body, (TILE, sizes.head_dim))
    pair = tuple(
        lax.slice(total, (0, first), (TILE, first + half)) for first in (0, half)
    )
    if offsets is not None:
        first = (load_repeated(smem[x].at[w, slot], CHUNK) for x in ("cos", "sin"))
        pair = _turned(_turned(pair, *offsets), *first)
    return tuple(tc.settle(x.astype(plan.dtype)) for x in pair)


def _clear(plan: Plan, seen: Callable[..., Any], v: Any) -> None:
    """Clears values that do not count: 0 times NaN would be NaN."""
    for column in range(0, plan.sizes.head_dim, TILE):
        part = v.at[:, pl.ds(column, TILE)]
        values = tc.load(part)
        part[...] = jnp.where(seen((TILE, TILE)), values, jnp.zeros_like(values))


def _tile(
    plan: Plan, refs, smem, item: Item, which: int, w: int, tile, offsets, q, carry
):
    """One step of the online softmax."""
    sizes, half = plan.sizes, plan.half
    n, acc, m, l = carry
    slot = lax.rem(n, jnp.int32(plan.config.slots))
    plgpu.barrier_wait(smem["full"][which].at[w, slot])
    v, scratch = smem["v"].at[w, slot], smem["scratch"].at[w]
    live = item.live(sizes, which, tile)

    def seen(shape):
        if which < 2:
            return tc.index(shape, 0) < live * CHUNK
        first = (tile - sum(sizes.sections[:2])) * TILE
        flags = load_flags(refs["ring_valid"], item.row, first, TILE)
        return tc.per_row(flags, shape) != 0

    if which == 0:
        keys = _made(plan, smem, offsets, w, slot)

    def scores_of(total):
        if which == 0:
            for part, k in enumerate(keys):
                tc.mma(total, k, q.at[:, pl.ds(part * half, half)].T)
        else:
            tc.mma(total, smem["k"].at[w, slot, :, pl.ds(0, sizes.head_dim)], q.T)
        return tc.read(total)

    shape, wide = (TILE, sizes.columns), (sizes.head_dim, sizes.columns)
    as_attention: Any = plan
    scores, _ = flash.capped(as_attention, tc.accumulate(scores_of, shape))
    scores = jnp.where(seen(shape), scores, -jnp.inf)
    largest = columns.reduce_columns(scores, scratch, "max") * plan.exponent
    largest = jnp.maximum(m, largest)
    factor = jnp.exp2(m - largest)
    p = jnp.exp2(scores * plan.exponent - tc.per_column(largest, shape))
    l = l * tc.per_column(factor, shape) + p
    acc = acc * tc.per_column(factor, wide)
    clear = functools.partial(_clear, plan, seen, v)
    if which < 2:
        pl.when(live < CHUNKS)(clear)
    else:
        clear()
    weights = smem["p"].at[w]
    # The last product with them was done before all met to find the largest score.
    weights.T[...] = plgpu.layout_cast(
        p.astype(plan.dtype), plgpu.Layout.WGMMA_TRANSPOSED
    )
    plgpu.commit_smem()

    def values_of(total):
        tc.mma(total, v.T, weights.T)
        return tc.read(total)

    acc = tc.accumulate(values_of, acc)
    tc.give_back(smem["free"].at[w, slot])
    return n + 1, acc, largest, l


def _compute(plan: Plan, refs: dict[str, Any], smem: dict[str, Any], w: int) -> None:
    """A warpgroup that computes every other tile."""
    sizes = plan.sizes
    tall, wide = (TILE, sizes.columns), (sizes.head_dim, sizes.columns)
    offsets = _offsets(plan, refs)

    def item(i, here, n):
        buffer = lax.rem(i, jnp.int32(2))
        plgpu.barrier_wait(smem["item_full"].at[buffer])
        plgpu.barrier_wait(smem["basis_full"])
        carry = (
            n,
            tc.full(wide, 0.0, tc.MATRIX),
            tc.full((sizes.columns,), flash.LOWEST, tc.PER_COLUMN),
            tc.full(tall, 0.0, tc.MATRIX),
        )
        for which in range(3):
            begin, end = here.section(sizes, which)
            # Tiles of even numbers are those of the first warpgroup.
            begin = begin + lax.rem(begin + w, jnp.int32(WARPGROUPS))
            steps = lax.div(jnp.maximum(end - begin, 0) + 1, jnp.int32(WARPGROUPS))

            def step(j, carry, which=which, begin=begin):
                tile, q = begin + j * WARPGROUPS, smem["q"].at[buffer]
                return _tile(plan, refs, smem, here, which, w, tile, offsets, q, carry)

            carry = lax.fori_loop(0, steps, step, carry)
            if which == 0:
                tc.give_back(smem["basis_free"])
        n, acc, m, l = carry
        tc.give_back(smem["item_free"].at[buffer])
        l = columns.reduce_columns(l, smem["scratch"].at[w], "add")
        nothing = l == 0.0
        acc = acc * tc.per_column(jnp.where(nothing, 0.0, 1.0 / l), wide)
        lse = jnp.where(nothing, flash.LOWEST, m + jnp.log(l) * flash.LOG2_E)
        part = lax.axis_index("block") - lax.div(
            here.number * sizes.tiles, jnp.int32(sizes.share)
        )
        place = (here.number * sizes.parts + part) * WARPGROUPS + w
        rows: dict[str, Any] = {"stride": 1, "low": jnp.int32(0)}
        put_rows(
            refs["o"],
            acc,
            start=place * sizes.head_dim,
            count=jnp.int32(sizes.head_dim),
            **rows,
        )
        put_rows(
            refs["lse"],
            tc.per_column(lse, tall),
            start=place,
            count=jnp.int32(1),
            **rows,
        )
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
    """Arrays of the launch by name: each launch to prepare one costs a microsecond."""
    sizes = plan.sizes
    pairs, width = sizes.pairs, sizes.head_dim
    return {
        "q": by_item(sizes, q),
        "a": held.a.reshape(-1, CHUNK, sizes.rank),
        "basis": held.basis.reshape(pairs, width, sizes.rank),
        "first": held.first,
        "values": held.values.reshape(-1, CHUNK, width),
        "out_k": held.out_k.reshape(-1, sizes.outliers * CHUNK, width),
        "out_v": held.out_v.reshape(-1, sizes.outliers * CHUNK, width),
        "ring_k": held.ring_k.reshape(pairs, sizes.ring, width),
        "ring_v": held.ring_v.reshape(pairs, sizes.ring, width),
        "ring_valid": held.ring_valid,
        "ids": ids.reshape(pairs, -1),
        "slots": slots.reshape(pairs, -1),
        "count": count.reshape(pairs),
        "out_count": held.out_count,
        "turns": jnp.asarray(np.tile(_turns(plan), (CHUNKS, 1))),
        "chunk": jnp.asarray(
            np.repeat(np.arange(CHUNKS, dtype=np.int32), plan.half)
        ).reshape(CHUNKS, plan.half),
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
    width, places = sizes.head_dim, sizes.items * sizes.parts * WARPGROUPS
    narrow = functools.partial(_operand, dtype=plan.dtype)
    operand = functools.partial(tc.operand, dtype=plan.dtype)
    ring = WARPGROUPS, config.slots
    scratch = {
        "k": narrow(*ring, TILE, max(sizes.rank, width)),
        "v": operand(*ring, TILE, width),
        "q": narrow(2, sizes.columns, width),
        "basis": narrow(width, sizes.rank),
        "p": operand(WARPGROUPS, sizes.columns, TILE),
        "scratch": plgpu.SMEM(
            (WARPGROUPS, columns.scratch_size(sizes.columns)), jnp.float32
        ),
        "cos": plgpu.SMEM((*ring, CHUNKS, plan.half), jnp.float32),
        "sin": plgpu.SMEM((*ring, CHUNKS, plan.half), jnp.float32),
        "full": [
            plgpu.Barrier(num_arrivals=plan.arrivals(which), num_barriers=ring)
            for which in range(3)
        ],
        "free": plgpu.Barrier(num_arrivals=1, num_barriers=ring),
        "item_full": plgpu.Barrier(num_arrivals=1, num_barriers=2),
        "item_free": plgpu.Barrier(num_arrivals=WARPGROUPS, num_barriers=2),
        "basis_full": plgpu.Barrier(num_arrivals=1),
        "basis_free": plgpu.Barrier(num_arrivals=WARPGROUPS),
    }
    body: Any = functools.partial(
        _sparse_decode_attention_kernel, plan=plan, names=(*inputs, "o", "lse")
    )
    o, lse = plgpu.kernel(
        body,
        out_type=(
            jax.ShapeDtypeStruct((places * width, sizes.columns), jnp.float32),
            jax.ShapeDtypeStruct((places, sizes.columns), jnp.float32),
        ),
        grid=(sizes.blocks,),
        grid_names=("block",),
        num_threads=WARPGROUPS + 1,
        thread_name="warpgroup",
        scratch_types=[scratch],
        kernel_name="pk_sparse_decode_attention",
        # What other threads read is committed, or told by a barrier.
        compiler_params=tc.params(auto_barriers=False),
    )(*inputs.values())
    return join(sizes, o, lse, sinks)
