"""Mosaic GPU kernel of the product of sorted rows with their experts' matrices.

A persistent block walks over tiles of the result. One warpgroup feeds a ring of
pieces of the summed axis with TMA, tile after tile without a pause; two or three
multiply them with wgmma and write the result. The table of `tasks.row_tiles` says which
tiles there are: expert by expert, and within an expert column after column, so that a
matrix is read from device memory once and then from the cache.

A tile starts at a multiple of 8 rows, as copies into shared memory must, and may begin
and end with rows of other experts. Those are multiplied, but not written: a band of 64
rows leaves by one copy if all are the expert's, otherwise by copies of 32, 16, 8, 4, 2
and 1 rows, the binary digits of how many there are. Rows of no expert are tiles whose
sum has no terms.

With `transposed` the matrices are read as their transposes, through the descriptor of
wgmma, which makes this the gradient of the rows as well.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels._common import hw
from pallas_kernels.grouped_matmul import tasks
from pallas_kernels.grouped_matmul.activation import activate
from pallas_kernels.grouped_matmul.config_mosaic import (
    ALIGN,
    BAND,
    LINE_BYTES,
    STEP,
    Tile,
)
from pallas_kernels.grouped_matmul.tasks import Column


CLUSTER = "neighbour"  # axis of the blocks of a cluster

# What both TMA and wgmma read: 8 x 64 pieces of 16-bit values.
_OPERAND = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))


def divide(a: jax.Array, b: jax.Array | int) -> tuple[jax.Array, jax.Array]:
    """Quotient and remainder of two i32 that are not negative."""
    b = jnp.int32(b)
    return lax.div(a, b), lax.rem(a, b)


# Numbers that say what a tile is, as they stand in a table.
Fetched = tuple[jax.Array, ...]


class Turns(NamedTuple):
    """The tiles of a block: `first`, `first + every`, ..., `count` of them."""

    first: jax.Array
    every: int
    count: jax.Array

    def at(self, i: jax.Array) -> jax.Array:
        return self.first + i * self.every

    def walk(
        self,
        fetch: Callable[[jax.Array], Fetched],
        one: Callable[[jax.Array, jax.Array, Fetched, Any], Any],
        carry: Any,
    ) -> Any:
        """Calls `one(i, index, fetched, carry)` for each tile.

        What `fetch` reads of a tile from device memory is read during the tile before:
        a short sum would otherwise wait for it as long as it computes.
        """

        def step(i, state):
            fetched, carry = state
            ahead = fetch(self.at(jnp.minimum(i + 1, self.count - 1)))
            return ahead, one(i, self.at(i), fetched, carry)

        state = fetch(self.at(jnp.int32(0))), carry
        return lax.fori_loop(0, self.count, step, state)[1]


def turns(total: jax.Array | int, blocks: int) -> Turns:
    """Shares `total` tiles out to the blocks of the grid, one each in turn."""
    block = lax.axis_index("block")
    count = divide(jnp.maximum(total - block + blocks - 1, 0), blocks)[0]
    return Turns(block, blocks, count)


class Ring:
    """Pieces of the summed axis in shared memory, between one writer and its readers.

    Both sides count the pieces that went through, and a count says which slot is
    next.
    """

    def __init__(
        self, tile: Tile, a: Any, b: Any, full: Any, free: Any, ready: Any = None
    ):
        """`ready` says that a piece is more than there, if not all its readers can
        use it as it comes."""
        self.a, self.b = a, b
        self._ready = ready
        self._stages, self._rings = tile.ring_stages, tile.rings
        self._short = tile.block_m if tile.is_short else None
        self._eager = tile.eager
        # Each block brings its part of a for all blocks of the cluster.
        self._shared = CLUSTER if tile.cluster > 1 else None
        self._full, self._free = full, free

    @property
    def rings(self) -> int:
        return self._rings

    def _slot(self, ring: jax.Array | int, count: jax.Array) -> jax.Array:
        return ring * self._stages + lax.rem(count, jnp.int32(self._stages))

    def write(
        self, ring: jax.Array | int, count: jax.Array, a_source: Any, b_source: Any
    ) -> None:
        """Starts the copies of one piece once its slot was read.

        A tuple of sources for b fills the parts of the slot.
        """
        slot = self._slot(ring, count)

        @pl.when(count >= self._stages)
        def _():
            plgpu.barrier_wait(self._free.at[slot])

        full = self._full.at[slot]
        a_slot = self.a.at[slot]
        if self._short is not None:
            a_slot = self.a.at[slot, pl.ds(0, self._short)]
        plgpu.copy_gmem_to_smem(a_source, a_slot, full, collective_axes=self._shared)
        if not isinstance(b_source, tuple):
            plgpu.copy_gmem_to_smem(b_source, self.b.at[slot], full)
            return
        for part, source in enumerate(b_source):
            plgpu.copy_gmem_to_smem(source, self.b.at[slot, part], full)

    def finish(self, counts: tuple[jax.Array, ...]) -> None:
        """Waits for the readers: every arrival must be met before the block ends."""
        for ring, count in enumerate(counts):
            for stage in range(self._stages):
                slot = ring * self._stages + stage
                pl.when(stage < count)(
                    functools.partial(plgpu.barrier_wait, self._free.at[slot])
                )

    def wait(self, ring: jax.Array | int, count: jax.Array) -> jax.Array:
        """Waits for a piece and returns its slot."""
        slot = self._slot(ring, count)
        plgpu.barrier_wait(self._full.at[slot])
        if self._ready is not None:
            plgpu.barrier_wait(self._ready.at[slot])
        return slot

    def release(self, ring: jax.Array | int, count: jax.Array) -> None:
        """Gives the slot of a piece back to the writer."""
        plgpu.barrier_arrive(self._free.at[self._slot(ring, count)])

    def skip(self, ring: jax.Array | int, count: jax.Array, steps: Any) -> None:
        """Lets the pieces of a tile pass unread."""

        def step(k, carry):
            self.wait(ring, count + k)
            self.release(ring, count + k)
            return carry

        lax.fori_loop(0, steps, step, None)

    def accumulate(
        self,
        ring: jax.Array | int,
        count: jax.Array,
        steps: Any,
        shape: tuple[int, int],
        multiply: Callable[..., None],
        sums: int = 1,
    ) -> tuple[jax.Array, ...]:
        """The sums over the pieces of a tile, each f32 of `shape`.

        Args:
          multiply: called with the accumulators, the slot and the index of a piece;
            starts one product for each.
          sums: how many accumulators.
        """

        def scoped(*accs):
            def step(k, carry):
                multiply(*accs, self.wait(ring, count + k), k)
                if self._eager:
                    plgpu.wgmma_wait(0)
                    self.release(ring, count + k)
                    return carry
                # The products before these are done, these still run.
                plgpu.wgmma_wait(sums)

                @pl.when(k > 0)
                def _():
                    self.release(ring, count + k - 1)

                return carry

            lax.fori_loop(0, steps, step, None)
            plgpu.wgmma_wait(0)
            if not self._eager:

                @pl.when(steps > 0)
                def _():
                    self.release(ring, count + steps - 1)

            return tuple(acc[...] for acc in accs)

        return pl.run_scoped(scoped, *[plgpu.ACC(shape, jnp.float32)] * sums)


def store_part(
    staging: Any,
    warpgroup: jax.Array,
    out: Any,
    values: Sequence[jax.Array],
    *,
    row: jax.Array,
    low: jax.Array,
    high: jax.Array,
    column: jax.Array,
) -> None:
    """Writes a warpgroup's part of the result, and of its rows those of one expert.

    Args:
      staging: shared memory [computing warpgroups, slots, 64, line].
      warpgroup: index of this one.
      out: device memory [rows, columns].
      values: f32 or out's dtype, the part in pieces of equal width side by side.
      row, column: of `out` at which the part begins.
      low, high: the first row of `out` to write and the one behind the last.
    """
    values = [value.astype(out.dtype) for value in values]
    line = staging.shape[-1]
    rows, width = values[0].shape

    def chunk(band, at):
        return (chunk_of(values, band, at * line, line),)

    store_chunks(
        staging,
        warpgroup,
        ((out, column),),
        chunk,
        shape=(rows, width * len(values)),
        row=row,
        low=low,
        high=high,
        column=column,
        columns=out.shape[1],
    )


def chunk_of(
    values: Sequence[jax.Array], band: int, start: int, columns: int
) -> jax.Array:
    """[64, columns] of a part that lies in pieces of equal width side by side."""
    which, column = divmod(start, values[0].shape[1])
    rows = slice(band * BAND, (band + 1) * BAND)
    return values[which][rows, column : column + columns]


def part_of_columns(tile: Tile, start: Any) -> list[tuple[Any, int]]:
    """Column and width of each accumulator's part of a warpgroup's columns."""
    width = tile.part[1] // tile.accumulators
    return [(start + i * width, width) for i in range(tile.accumulators)]


def store_chunks(
    staging: Any,
    warpgroup: jax.Array,
    outs: Sequence[tuple[Any, jax.Array]],
    chunk: Callable[[int, int], Sequence[jax.Array]],
    *,
    shape: tuple[int, ...],
    row: jax.Array,
    low: jax.Array,
    high: jax.Array,
    column: jax.Array,
    columns: int,
) -> None:
    """Writes a warpgroup's parts of results, chunk by chunk of [64, line].

    Args:
      staging: shared memory [computing warpgroups, slots, 64, line].
      warpgroup: index of this one.
      outs: device memory [rows, ...] of each result, and where in it the part begins.
      chunk: (band of 64 rows, line of columns) of the part -> that chunk of each
        result.
      shape: of the part.
      row, low, high: as for `store_part`.
      column: of the results at which the part begins.
      columns: that the results have.
    """
    buffers, _, line = staging.shape[1:]
    first = jnp.clip(low - row, 0, shape[0])
    last = jnp.clip(high - row, 0, shape[0])
    first_band = divide(first, BAND)[0]
    lines = divide(jnp.clip(columns - column, 0, shape[1]), line)[0]
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    def store(slots, band, at):
        top = jnp.clip(first - band * BAND, 0, BAND)
        count = jnp.clip(last - band * BAND, 0, BAND) - top
        values: Sequence[jax.Array] = ()
        for number, (out, base) in enumerate(outs):
            source = staging.at[warpgroup, slots[number]]
            place = pl.ds(base + at * line, line)
            plgpu.wait_smem_to_gmem(buffers - 1, wait_read_only=True)
            values = values or chunk(band, at)
            source[...] = values[number]
            plgpu.commit_smem()
            _copy_rows(source, out, row, band, top, count, place)
            plgpu.commit_smem_to_gmem_group()

    for band in range(shape[0] // BAND):
        for at in range(shape[1] // line):
            slots = tuple(number % buffers for number in range(len(outs)))
            if len(outs) % buffers:
                # Counts what was stored, so that the slots really take turns.
                passed = (band - first_band) * lines + at
                passed = passed * len(outs) if len(outs) > 1 else passed
                begin = divide(passed, buffers)[1]
                slots = (
                    begin,
                    *(divide(begin + more, buffers)[1] for more in range(1, len(outs))),
                )
            mine = (first < (band + 1) * BAND) & (last > band * BAND)
            pl.when(mine & (at < lines))(functools.partial(store, slots, band, at))


def _copy_rows(
    source: Any,
    out: Any,
    row: jax.Array,
    band: int,
    begin: jax.Array,
    count: jax.Array,
    columns: Any,
) -> None:
    """Starts copies of `count` rows of a band, from its row `begin` on.

    A copy has a static number of rows: all 64, or the binary digits of `count`.
    """

    def copy(offset, height):
        plgpu.copy_smem_to_gmem(
            source.at[pl.ds(offset, height)],
            out.at[pl.ds(row + band * BAND + offset, height), columns],
            commit_group=False,
        )

    pl.when(count == BAND)(functools.partial(copy, 0, BAND))
    height = BAND // 2
    while height:
        digit = count & height
        pl.when(digit > 0)(functools.partial(copy, begin, height))
        begin = begin + digit
        height //= 2


def run_warpgroups(
    tile: Tile, compute: Callable[[jax.Array], None], *others: Callable[[], None]
) -> None:
    """Gives the warpgroups of a block their parts, `others` those behind computing."""
    warpgroup = lax.axis_index("warpgroup")

    for number, other in enumerate(others, tile.computing):

        @pl.when(warpgroup == number)
        def _(number=number, other=other):
            plgpu.set_max_registers(tile.registers[number], action="decrease")
            other()

    @pl.when(warpgroup < tile.computing)
    def _():
        plgpu.set_max_registers(tile.registers[0], action="increase")
        compute(warpgroup)
        plgpu.wait_smem_to_gmem(0)


def feed(
    ring: Ring,
    shares: Turns,
    fetch: Callable[[jax.Array], Fetched],
    task_of: Callable[[jax.Array, Fetched], tuple[Any, Any]],
    sources: Callable[[Any, jax.Array], tuple[Any, Any]],
) -> None:
    """The copying warpgroup: every piece of every tile, in order.

    Args:
      fetch, task_of: as for `each_piece`.
      sources: (what `task_of` says of a tile, index of a piece) -> both operands in
        device memory.
    """

    def write(which, count, task, k):
        ring.write(which, count, *sources(task, k))

    ring.finish(each_piece(ring, shares, fetch, task_of, write))


def each_piece(
    ring: Ring,
    shares: Turns,
    fetch: Callable[[jax.Array], Fetched],
    task_of: Callable[[jax.Array, Fetched], tuple[Any, Any]],
    act: Callable[[Any, jax.Array, Any, jax.Array], None],
) -> tuple[jax.Array, ...]:
    """Every piece of every tile of a block, in order.

    Args:
      fetch: as for `Turns.walk`.
      task_of: index of a tile and what was fetched -> (what `act` needs of the tile,
        its number of pieces).
      act: called with the ring of a piece, how many went through it before, what
        `task_of` said of the tile, and the index of the piece in it.

    Returns:
      How many pieces went through each ring.
    """

    def one(i, index, fetched, counts):
        which = lax.rem(i, jnp.int32(ring.rings))
        task, steps = task_of(index, fetched)
        count = counts[0]
        for r in range(1, ring.rings):
            count = jnp.where(which == r, counts[r], count)

        def step(k, carry):
            act(which, count + k, task, k)
            return carry

        lax.fori_loop(0, steps, step, None)
        return tuple(
            jnp.where(which == r, count + steps, c) for r, c in enumerate(counts)
        )

    zeros = (jnp.int32(0),) * ring.rings
    return shares.walk(fetch, one, zeros)


def each_tile(
    tile: Tile,
    shares: Turns,
    warpgroup: jax.Array,
    fetch: Callable[[jax.Array], Fetched],
    compute: Callable[[jax.Array, Fetched, jax.Array | int, jax.Array], Any],
) -> None:
    """The tiles of a computing warpgroup.

    Args:
      fetch: as for `Turns.walk`.
      compute: called with a tile's index, what was fetched, its ring and the pieces
        that went through that ring before; returns the tile's number of pieces.
    """
    apart = tile.rings > 1
    ring = warpgroup if apart else 0
    if apart:
        left = jnp.maximum(shares.count - warpgroup + tile.rings - 1, 0)
        first = shares.first + warpgroup * shares.every
        shares = Turns(first, shares.every * tile.rings, divide(left, tile.rings)[0])

    def one(i, index, fetched, count):
        del i
        return count + compute(index, fetched, ring, count)

    shares.walk(fetch, one, jnp.int32(0))


def part_origin(tile: Tile, warpgroup: jax.Array) -> tuple[Any, Any]:
    """Row and column of a tile at which a warpgroup's part begins."""
    return (
        warpgroup * tile.part[0] if tile.split == "rows" else 0,
        warpgroup * tile.part[1] if tile.split == "columns" else 0,
    )


def scratch(
    tile: Tile,
    a: tuple[int, ...],
    b: tuple[int, ...],
    dtype: Any,
    out_dtype: Any,
) -> dict[str, Any]:
    """Shared memory and barriers; `a` and `b` are the shapes of a piece's operands."""
    line = LINE_BYTES // jnp.dtype(out_dtype).itemsize
    transforms = (plgpu.SwizzleTransform(LINE_BYTES),) if tile.swizzled else ()
    readers = tile.computing // tile.rings
    free = plgpu.Barrier
    if tile.cluster > 1:
        # A slot is written again once the readers of all blocks are done with it.
        free = functools.partial(plgpu.ClusterBarrier, collective_axes=(CLUSTER,))
    return {
        "a": plgpu.SMEM((tile.stages, *a), dtype, transforms=_OPERAND),
        "b": plgpu.SMEM((tile.stages, *b), dtype, transforms=_OPERAND),
        # No tiling: copies leave it that start at any row.
        "staging": plgpu.SMEM(
            (tile.computing, tile.slots, BAND, line), out_dtype, transforms=transforms
        ),
        "full": plgpu.Barrier(num_arrivals=2, num_barriers=tile.stages),
        "free": free(num_arrivals=readers, num_barriers=tile.stages),
    }


def blocks_for(tile: Tile, tiles: int) -> int:
    """Blocks of a persistent grid, or its clusters, for at most so many tiles."""
    return min(hw.device().sms // tile.cluster, tiles)


def launch(
    body: Callable[..., None],
    name: str,
    tile: Tile,
    operands: tuple[Any, ...],
    out_type: Any,
    scratch_types: dict[str, Any],
    blocks: int,
    *,
    more_bytes: int = 0,
    approx_math: bool = False,
) -> Any:
    """Runs a persistent kernel of computing warpgroups and one that copies.

    `blocks` counts clusters where there are any; `more_bytes` of shared memory are
    asked for beside those of the tile.
    """
    hw.check_registers(tile.registers)
    hw.check_smem(tile.smem_bytes() + more_bytes, name)
    cluster: dict[str, Any] = {}
    if tile.cluster > 1:
        cluster = {"cluster": (tile.cluster,), "cluster_names": (CLUSTER,)}
    return plgpu.kernel(
        body,
        out_type=out_type,
        grid=(blocks,),
        grid_names=("block",),
        num_threads=len(tile.registers),
        thread_name="warpgroup",
        **cluster,
        scratch_types=scratch_types,
        kernel_name=name,
        compiler_params=plgpu.CompilerParams(
            approx_math=approx_math,
            lowering_semantics=plgpu.LoweringSemantics.Lane,
        ),
    )(*operands)


def check_reads_as_it_comes(tile: Tile) -> None:
    """Refuses a tile with a warpgroup that has nothing to do."""
    if tile.cleans:
        raise ValueError("cleans=True, only weight gradients have rows to clean")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Product:
    """The static part of a product.

    Attributes:
      rows, experts, depth, columns: M, E, length of the summed axis, columns of the
        result.
      transposed: whether matrices are [columns, depth], not [depth, columns].
      dtype, out_dtype: of the operands and the result.
      tile: launch parameters.
      activation: applied to the sums before they are rounded, or `None`.
    """

    rows: int
    experts: int
    depth: int
    columns: int
    transposed: bool
    dtype: Any
    out_dtype: Any
    tile: Tile
    activation: str | None = None

    def __post_init__(self):
        check_reads_as_it_comes(self.tile)

    @property
    def steps(self) -> int:
        return self.depth // STEP

    @property
    def width(self) -> int:
        """Columns of the result in a tile."""
        return self.tile.block_n

    @property
    def column_blocks(self) -> int:
        """Of the blocks of a cluster together, if they share rows."""
        return -(-self.columns // (self.width * self.tile.cluster))


class RowTask(NamedTuple):
    """A tile of the result of a product."""

    expert: jax.Array
    row: jax.Array  # where the tile begins
    column: jax.Array
    start: jax.Array  # the expert's rows
    end: jax.Array


def row_task(plan: Any, index: jax.Array, fetched: Fetched) -> RowTask:
    """The tile of an index, from its row of the table of `tasks.row_tiles`.

    Args:
      plan: has a tile, and the width and number of its blocks of columns, of which the
        blocks of a cluster have neighbouring ones.
    """
    tile = plan.tile
    expert, base, tiles, start, end = fetched
    index = index - base * plan.column_blocks
    panel, index = divide(index, tile.panel * plan.column_blocks)
    height = jnp.minimum(tiles - panel * tile.panel, tile.panel)
    column, row = divide(index, height)
    row = (panel * tile.panel + row) * tile.block_m + divide(start, ALIGN)[0] * ALIGN
    if tile.cluster > 1:
        column = column * tile.cluster + lax.axis_index(CLUSTER)
    return RowTask(expert, row, column * plan.width, start, end)


def fetch_row(plan: Any, table: Any, index: jax.Array) -> Fetched:
    """What `row_task` needs of a tile."""
    # From its first tile to its last, an expert's rows of the table are the same:
    # which of them is read does not matter.
    at = jnp.minimum(divide(index, plan.column_blocks)[0], table.shape[0] - 1)
    return tuple(table[at, name] for name in Column)


def end_of(tile: Tile, task: RowTask) -> jax.Array:
    """The row behind the last that is written of a tile or of its expert."""
    return jnp.minimum(task.end, task.row + tile.block_m) if tile.is_short else task.end


def _product_kernel(
    table, count, x, w, out, *, a, b, staging, full, free, plan: Product, blocks: int
):
    tile, steps = plan.tile, plan.steps
    ring = Ring(tile, a, b, full, free)
    shares = turns(count[0] * plan.column_blocks, blocks)

    fetch = functools.partial(fetch_row, plan, table)

    def task_of(index, fetched):
        task = row_task(plan, index, fetched)
        return task, jnp.where(task.expert < plan.experts, steps, 0)

    def sources(task, k):
        rows = x.at[pl.ds(task.row, tile.block_m), pl.ds(k * STEP, STEP)]
        depth, columns = pl.ds(k * STEP, STEP), pl.ds(task.column, tile.block_n)
        if plan.transposed:
            return rows, w.at[task.expert, columns, depth]
        return rows, w.at[task.expert, depth, columns]

    def compute(warpgroup):
        offset = part_origin(tile, warpgroup)
        shape = tile.part
        parts = part_of_columns(tile, offset[1])

        def multiply(*args):
            *accs, slot, k = args
            del k
            left = ring.a.at[slot, pl.ds(offset[0], shape[0])]
            for acc, part in zip(accs, parts, strict=True):
                if plan.transposed:
                    right = ring.b.at[slot, pl.ds(*part)].T
                else:
                    right = ring.b.at[slot, :, pl.ds(*part)]
                plgpu.wgmma(acc, left, right)

        def one(index, fetched, which, passed):
            task, pieces = task_of(index, fetched)
            row, column = task.row + offset[0], task.column + offset[1]
            low, high = jnp.maximum(task.start, row), end_of(tile, task)
            # A part without rows of the expert would take the tensor cores from the
            # other warpgroup.
            live = (low < jnp.minimum(high, row + shape[0])) & (column < plan.columns)

            @pl.when(live)
            def _():
                sums = ring.accumulate(
                    which,
                    passed,
                    pieces,
                    (shape[0], parts[0][1]),
                    multiply,
                    sums=len(parts),
                )
                store_part(
                    staging,
                    warpgroup,
                    out,
                    [activate(plan.activation, value) for value in sums],
                    row=row,
                    low=low,
                    high=high,
                    column=column,
                )

            @pl.when(jnp.logical_not(live))
            def _():
                ring.skip(which, passed, pieces)

            return pieces

        each_tile(tile, shares, warpgroup, fetch, one)

    run_warpgroups(tile, compute, lambda: feed(ring, shares, fetch, task_of, sources))


# Lowered once a module: calls of equal sizes, such as those of layers, share it.
@functools.partial(jax.jit, static_argnums=0)
def product(
    plan: Product, x: jax.Array, w: jax.Array, group_sizes: jax.Array
) -> jax.Array:
    """Multiplies each expert's rows with its matrix or its transpose.

    Args:
      plan: sizes and launch parameters.
      x: [M, depth].
      w: [E, depth, columns], or [E, columns, depth] if `plan.transposed`.
      group_sizes: i32[E].

    Returns:
      [M, columns] of `plan.out_dtype`; rows of no expert are exactly 0.
    """
    tile = plan.tile
    table, count = tasks.row_tiles(group_sizes, plan.rows, tile.block_m)
    if padding := -plan.rows % ALIGN:
        # The copies' view of x has whole pieces of 8 rows.
        x = jnp.pad(x, ((0, padding), (0, 0)))
    blocks = blocks_for(tile, table.shape[0] * plan.column_blocks)
    piece = (tile.block_n, STEP) if plan.transposed else (STEP, tile.block_n)
    name = "pk_grouped_matmul_dgrad" if plan.transposed else "pk_grouped_matmul_fwd"
    return launch(
        functools.partial(_product_kernel, plan=plan, blocks=blocks),
        name,
        tile,
        (table, count, x, w),
        jax.ShapeDtypeStruct((plan.rows, plan.columns), plan.out_dtype),
        scratch(tile, (tile.piece_rows, STEP), piece, plan.dtype, plan.out_dtype),
        blocks,
    )
