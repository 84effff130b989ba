"""Mosaic GPU kernel of the weight gradient: dw_e = x_e^T dy_e, expert by expert.

The same persistent block, ring and warpgroups as in `kernel`; the summed axis is an
expert's rows, in pieces of 64 from its first row rounded down to a multiple of 8, and
wgmma reads x transposed through its descriptor. The first and the last piece may hold
rows of other experts: the computing warpgroups write zeros over those in shared
memory, in both operands, since zero times another expert's NaN is NaN. An expert
without rows is a sum without terms.

With `accumulates` the sums are added to what the result held, in place; then an expert
without rows is left alone.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels._common import in_place
from pallas_kernels._common.layout import load_global
from pallas_kernels.grouped_matmul import tasks
from pallas_kernels.grouped_matmul.config_mosaic import (
    ALIGN,
    BAND,
    STEP,
    Tile,
)
from pallas_kernels.grouped_matmul.kernel import (
    Fetched,
    Ring,
    blocks_for,
    chunk_of,
    divide,
    each_piece,
    each_tile,
    feed,
    launch,
    part_of_columns,
    part_origin,
    run_warpgroups,
    scratch,
    store_chunks,
    store_part,
    turns,
)


def _eight_rows() -> Any:
    """Layout of [8, 64 n]: two rows a warp, sixteen threads a row, four values each."""
    layout = mgpu.TiledLayout(
        plgpu.Tiling(((8, 64), (2, 64), (1, 4))),
        warp_dims=(-6,),
        lane_dims=(-4, -3),
        vector_dim=-1,
        _check_canonical=False,
    ).canonicalize()
    return plgpu.Layout.TILED(
        layout.tiling, layout.warp_dims, layout.lane_dims, layout.vector_dim
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class WeightGradient:
    """The static part of a launch.

    Attributes:
      rows, experts, in_dim, out_dim: M, E, K, N.
      dtype, out_dtype: of the operands and the result.
      tile: launch parameters; its rows are those of dw, K.
      accumulates: whether sums are added to what stands there.
    """

    rows: int
    experts: int
    in_dim: int
    out_dim: int
    dtype: Any
    out_dtype: Any
    tile: Tile
    accumulates: bool = False

    def __post_init__(self):
        if self.tile.is_short:
            raise ValueError(
                f"block_m={self.tile.block_m} of a weight gradient, allowed are "
                "multiples of 64"
            )
        if self.tile.cluster > 1:
            raise ValueError(
                f"cluster={self.tile.cluster} of a weight gradient, allowed is 1"
            )

    @property
    def row_blocks(self) -> int:
        return -(-self.in_dim // self.tile.block_m)

    @property
    def column_blocks(self) -> int:
        return -(-self.out_dim // self.tile.block_n)


class _Task(NamedTuple):
    expert: jax.Array
    row: jax.Array  # of dw, where the tile begins
    column: jax.Array
    begin: jax.Array  # the row of x with which the first piece begins
    start: jax.Array  # the expert's rows
    end: jax.Array


def _task(plan: WeightGradient, index: jax.Array, fetched: Fetched) -> _Task:
    expert, index = divide(index, plan.row_blocks * plan.column_blocks)
    row, column = divide(index, plan.column_blocks)
    start, end = fetched
    begin = divide(start, ALIGN)[0] * ALIGN
    row, column = row * plan.tile.block_m, column * plan.tile.block_n
    return _Task(expert, row, column, begin, start, end)


def _clear(piece: Any, low: jax.Array, high: jax.Array) -> None:
    """Writes zeros over the rows of [8 or 64, 64 n] outside [low, high)."""
    layout = plgpu.Layout.WGMMA if piece.shape[0] == STEP else _eight_rows()
    row = plgpu.broadcasted_iota(jnp.int32, piece.shape, 0, layout=layout)
    value = plgpu.load(piece, layout=layout, optimized=False)
    mine = (row >= low) & (row < high)
    piece[...] = jnp.where(mine, value, jnp.zeros((), value.dtype))


def _clear_others(
    plan: WeightGradient,
    operands: tuple[Any, Any],
    slot: jax.Array,
    warpgroup: jax.Array | None,
    low: jax.Array,
    high: jax.Array,
) -> None:
    """Writes zeros over the rows of a piece outside [low, high), in both operands.

    Computing warpgroups that share a piece share the work, `warpgroup` is one of them;
    `None` does all of it.
    """
    height = plan.tile.tail_rows
    parts = []
    for operand in operands:
        # Registers hold few columns of all rows beside the sums.
        width = 64 if height == STEP else operand.shape[-1]
        parts += [(operand, at, width) for at in range(0, operand.shape[-1], width)]
    shared = plan.tile.rings == 1 and warpgroup is not None

    def clear(at, carry):
        top = at * height
        for number, (operand, column, width) in enumerate(parts):
            piece = operand.at[slot, pl.ds(top, height), pl.ds(column, width)]
            one = functools.partial(_clear, piece, low - top, high - top)
            if shared:
                pl.when(warpgroup == number % plan.tile.computing)(one)
            else:
                one()
        return carry

    count = STEP // height
    # Rows before the expert's are fewer than 8.
    pl.when(low > 0)(functools.partial(clear, jnp.int32(0), None))
    lax.fori_loop(jnp.minimum(divide(high, height)[0], count), count, clear, None)


def _add_part(
    staging: Any,
    warpgroup: jax.Array,
    out: Any,
    values: Sequence[jax.Array],
    *,
    row: jax.Array,
    high: jax.Array,
    column: jax.Array,
) -> None:
    """Adds f32 sums to a warpgroup's part of `out`; arguments as for `store_part`."""
    line = staging.shape[-1]

    def chunk(band, at):
        rows, columns = pl.ds(row + band * BAND, BAND), pl.ds(column + at * line, line)
        before = load_global(out.at[rows, columns]).astype(jnp.float32)
        return ((before + chunk_of(values, band, at * line, line)).astype(out.dtype),)

    store_chunks(
        staging,
        warpgroup,
        ((out, column),),
        chunk,
        shape=(values[0].shape[0], values[0].shape[1] * len(values)),
        row=row,
        low=row,
        high=high,
        column=column,
        columns=out.shape[1],
    )


def _wgrad_kernel(
    bounds,
    x,
    dy,
    out,
    *,
    a,
    b,
    staging,
    full,
    free,
    met=None,
    ready: Any = None,
    plan: WeightGradient,
    blocks: int,
):
    tile = plan.tile
    ring = Ring(tile, a, b, full, free, ready)
    shares = turns(plan.experts * plan.row_blocks * plan.column_blocks, blocks)

    def fetch(index):
        expert = divide(index, plan.row_blocks * plan.column_blocks)[0]
        expert = jnp.minimum(expert, plan.experts - 1)
        return bounds[expert, 0], bounds[expert, 1]

    def task_of(index, fetched):
        task = _task(plan, index, fetched)
        pieces = divide(task.end - task.begin + STEP - 1, STEP)[0]
        return task, jnp.where(task.end > task.start, pieces, 0)

    def sources(task, k):
        rows = pl.ds(task.begin + k * STEP, STEP)
        return (
            x.at[rows, pl.ds(task.row, tile.block_m)],
            dy.at[rows, pl.ds(task.column, tile.block_n)],
        )

    def rows_of(task, k):
        """The expert's rows of a piece, and whether there are others."""
        low = jnp.maximum(task.start - task.begin - k * STEP, 0)
        high = jnp.minimum(task.end - task.begin - k * STEP, STEP)
        return low, high, (low > 0) | (high < STEP)

    def clean():
        incoming = Ring(tile, a, b, full, free)

        def one(which, count, task, k):
            slot = incoming.wait(which, count)
            low, high, mixed = rows_of(task, k)

            @pl.when(mixed)
            def _():
                _clear_others(plan, (a, b), slot, None, low, high)
                plgpu.commit_smem()

            plgpu.barrier_arrive(ready.at[slot])

        each_piece(incoming, shares, fetch, task_of, one)

    def compute(warpgroup):
        offset, shape = part_origin(tile, warpgroup), tile.part
        parts = part_of_columns(tile, offset[1])

        def one(index, fetched, which, passed):
            task, pieces = task_of(index, fetched)

            def multiply(*args):
                *accs, slot, k = args
                low, high, mixed = rows_of(task, k)

                def clear():
                    _clear_others(plan, (ring.a, ring.b), slot, warpgroup, low, high)
                    plgpu.commit_smem()
                    if met is not None:
                        plgpu.barrier_arrive(met)
                        plgpu.barrier_wait(met)

                if not tile.cleans:
                    pl.when(mixed)(clear)

                left = ring.a.at[slot, :, pl.ds(offset[0], shape[0])].T
                for acc, part in zip(accs, parts, strict=True):
                    plgpu.wgmma(acc, left, ring.b.at[slot, :, pl.ds(*part)])

            row, column = task.row + offset[0], task.column + offset[1]
            values = ring.accumulate(
                which,
                passed,
                pieces,
                (shape[0], parts[0][1]),
                multiply,
                sums=len(parts),
            )
            part = staging, warpgroup, out.at[task.expert], values
            high = jnp.int32(plan.in_dim)
            if plan.accumulates:
                # Nothing to add: no rows to write.
                high = jnp.where(task.end > task.start, high, row)
                _add_part(*part, row=row, high=high, column=column)
            else:
                store_part(*part, row=row, low=row, high=high, column=column)
            return pieces

        each_tile(tile, shares, warpgroup, fetch, one)

    others = [lambda: feed(ring, shares, fetch, task_of, sources)]
    if tile.cleans:
        others.append(clean)
    run_warpgroups(tile, compute, *others)


# Lowered once a module: calls of equal sizes, such as those of layers, share it.
@functools.partial(jax.jit, static_argnums=0)
def weight_gradient(
    plan: WeightGradient,
    x: jax.Array,
    dy: jax.Array,
    group_sizes: jax.Array,
    into: jax.Array | None = None,
) -> jax.Array:
    """The gradient of each expert's matrix, summed over its rows in their order.

    Args:
      plan: sizes and launch parameters.
      x: [M, K].
      dy: [M, N].
      group_sizes: i32[E].
      into: [E, K, N] of `plan.out_dtype`, if `plan.accumulates`.

    Returns:
      dw [E, K, N] of `plan.out_dtype`; exactly 0 for an expert without rows. `into`
      with dw added, in the same memory, if `plan.accumulates`.
    """
    tile = plan.tile
    if padding := -plan.rows % ALIGN:
        # The copies' view has whole pieces of 8 rows.
        x, dy = (jnp.pad(v, ((0, padding), (0, 0))) for v in (x, dy))
    tiles = plan.experts * plan.row_blocks * plan.column_blocks
    blocks = blocks_for(tile, tiles)
    pieces = (STEP, tile.block_m), (STEP, tile.block_n)
    scratch_types = scratch(tile, *pieces, plan.dtype, plan.out_dtype)
    if tile.cleans:
        scratch_types["ready"] = plgpu.Barrier(num_barriers=tile.stages)
    elif tile.rings == 1:
        scratch_types["met"] = plgpu.Barrier(num_arrivals=tile.computing)
    kernel = functools.partial(_wgrad_kernel, plan=plan, blocks=blocks)
    operands = tasks.bounds(group_sizes), x, dy
    if into is None:
        shape = plan.experts, plan.in_dim, plan.out_dim
        return launch(
            kernel,
            "pk_grouped_matmul_wgrad",
            tile,
            operands,
            jax.ShapeDtypeStruct(shape, plan.out_dtype),
            scratch_types,
            blocks,
        )
    name = "pk_grouped_matmul_wgrad_into"

    def add(*operands):
        launch(kernel, name, tile, operands, (), scratch_types, blocks)

    _, total = in_place.update(add, operands, into)
    return total
