"""Mosaic GPU kernels of products that do more with their sums before they are written.

Both have the persistent block, the ring and the tiles of `kernel`.

The forward adds a row of each expert's bias, applies an activation and scales rows. A
gated activation needs the gate and the up product of the same columns: a slot of the
ring then holds the pieces of both matrices' columns, one warpgroup sums both, and the
products leave beside the result if a gradient will want them.

The backward is the data gradient of the product behind an activation: da = dy w^T is
not written, but turned to dz = scale da act'(saved) in registers, beside the row sums
of a da, which are the gradient of the rows' scale, and the result a (scaled, if rows
are) that the weight gradient multiplies with dy. What the forward saved of a tile is
copied to shared memory while the tile is summed.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels._common.layout import (
    MATRIX,
    OPERAND,
    PER_COLUMN,
    PER_ROW,
    load,
    load_global,
    per_column,
    per_row,
)
from pallas_kernels.grouped_matmul import tasks
from pallas_kernels.grouped_matmul.activation import ACTIVATIONS, Activation, parts_of
from pallas_kernels.grouped_matmul.config_fused import is_for_pairs, saved_bytes
from pallas_kernels.grouped_matmul.config_mosaic import (
    ALIGN,
    BAND,
    STEP,
    Tile,
)
from pallas_kernels.grouped_matmul.kernel import (
    Ring,
    RowTask,
    blocks_for,
    check_reads_as_it_comes,
    chunk_of,
    divide,
    each_tile,
    end_of,
    feed,
    fetch_row,
    launch,
    row_task,
    run_warpgroups,
    scratch,
    store_chunks,
    turns,
)


_SLICE = 32  # columns


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Plan:
    """The static part of a product.

    Attributes:
      rows, experts, depth, columns: M, E, length of the summed axis, columns of the
        result, which are those of one product if there are two.
      dtype, out_dtype: of the operands and of all results.
      tile: launch parameters; its columns are those of the matrices.
      activation: name, or `None`.
      scaled: whether rows are scaled.
    """

    rows: int
    experts: int
    depth: int
    columns: int
    dtype: Any
    out_dtype: Any
    tile: Tile
    activation: str | None = None
    scaled: bool = False

    def __post_init__(self):
        check_reads_as_it_comes(self.tile)

    @property
    def sums(self) -> int:
        """Accumulators of a warpgroup."""
        raise NotImplementedError

    @property
    def steps(self) -> int:
        return self.depth // STEP

    @property
    def width(self) -> int:
        """Columns of the result in a tile."""
        return self.tile.block_n // self.sums

    @property
    def column_blocks(self) -> int:
        return -(-self.columns // (self.width * self.tile.cluster))

    @property
    def part(self) -> tuple[int, int]:
        """Rows and columns of the result that a warpgroup has at a time."""
        rows, columns = self.tile.part
        return rows, columns // self.sums

    def places(self, start: Any) -> list[tuple[int, Any, int]]:
        """Product, first column and width of each accumulator of a warpgroup.

        `start` is the column of the tile at which the warpgroup's part begins.
        """
        each = max(1, self.tile.accumulators // self.sums)
        width = self.part[1] // each
        return [
            (part, start + i * width, width)
            for part in range(self.sums)
            for i in range(each)
        ]

    def origin(self, warpgroup: jax.Array) -> tuple[Any, Any]:
        """Row and column of a tile at which a warpgroup's part begins."""
        return (
            warpgroup * self.part[0] if self.tile.split == "rows" else 0,
            warpgroup * self.part[1] if self.tile.split == "columns" else 0,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Forward(_Plan):
    """scale * act(x w + bias).

    Attributes:
      biased: whether experts have a bias.
      saves: whether the products of a gated activation are written, too.
    """

    biased: bool = False
    saves: bool = False

    def __post_init__(self):
        super().__post_init__()
        if self.sums > 1 and not is_for_pairs(self.tile):
            raise ValueError(
                f"{self.tile} gives a warpgroup {self.tile.part[1]} columns of gate "
                "and up, allowed are multiples of 128"
            )

    @property
    def sums(self) -> int:
        return parts_of(self.activation)

    @property
    def names(self) -> tuple[str, ...]:
        """Of the kernel's operands and results, in their order."""
        asked = {"bias": self.biased, "scale": self.scaled, "out": True}
        asked["products"] = self.saves
        return ("table", "count", "x", "w", *(n for n, is_in in asked.items() if is_in))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Backward(_Plan):
    """dz = scale * (dy w^T) * act'(saved).

    Attributes:
      emits: whether scale * a is written, too.
    """

    emits: bool = False

    def __post_init__(self):
        super().__post_init__()
        if self.tile.is_short:
            raise ValueError(
                f"block_m={self.tile.block_m} of a backward, allowed are multiples of "
                "64"
            )

    @property
    def sums(self) -> int:
        return 1

    @property
    def act(self) -> Activation:
        if self.activation is None:
            raise ValueError("activation=None, a backward needs a name")
        return ACTIVATIONS[self.activation]

    @property
    def names(self) -> tuple[str, ...]:
        """Of the kernel's operands and results, in their order."""
        asked = {"scale": self.scaled, "dz": True, "dots": self.scaled}
        asked["scaled"] = self.emits
        given = ("table", "count", "dy", "w", "saved")
        return (*given, *(n for n, is_in in asked.items() if is_in))


def _live(plan: _Plan, task: RowTask, row: Any, column: Any) -> tuple[Any, Any, Any]:
    """The rows to write, from one and up to another, and whether there are any."""
    low, high = jnp.maximum(task.start, row), end_of(plan.tile, task)
    # A part without rows of the expert would take the tensor cores from the other
    # warpgroup.
    some = low < jnp.minimum(high, row + plan.part[0])
    return low, high, some & (column < plan.columns)


def _pieces(plan: _Plan, task: RowTask) -> jax.Array:
    return jnp.where(task.expert < plan.experts, plan.steps, 0)


def _scale(scale: Any, task: RowTask, row: Any, experts: int) -> jax.Array:
    """The scale of 64 rows, 0 for those of no expert."""
    value = load_global(scale.at[pl.ds(row, BAND)], PER_ROW)
    return jnp.where(task.expert < experts, value, jnp.float32(0))


def _forward_kernel(*refs, a, b, staging, full, free, plan: Forward, blocks: int):
    r = dict(zip(plan.names, refs, strict=True))
    tile, shape = plan.tile, plan.part
    ring = Ring(tile, a, b, full, free)
    shares = turns(r["count"][0] * plan.column_blocks, blocks)
    fetch = functools.partial(fetch_row, plan, r["table"])

    def task_of(index, fetched):
        task = row_task(plan, index, fetched)
        return task, _pieces(plan, task)

    def sources(task, k):
        depth = pl.ds(k * STEP, STEP)
        rows = r["x"].at[pl.ds(task.row, tile.block_m), depth]
        halves = tuple(
            r["w"].at[
                task.expert,
                depth,
                pl.ds(part * plan.columns + task.column, plan.width),
            ]
            for part in range(plan.sums)
        )
        return rows, halves

    def finish(task, sums, row, column, band, at):
        """A chunk of each result: first the result, then the products."""
        line = staging.shape[-1]
        chunk_shape = BAND, line
        products = []
        each = len(sums) // plan.sums
        for part in range(plan.sums):
            value = sums[part * each : (part + 1) * each]
            value = chunk_of(value, band, at * line, line)
            if plan.biased:
                expert = jnp.minimum(task.expert, plan.experts - 1)
                at_column = part * plan.columns + column + at * line
                bias = load_global(
                    r["bias"].at[expert, pl.ds(at_column, line)], PER_COLUMN
                )
                bias = jnp.where(
                    task.expert < plan.experts, bias.astype(jnp.float32), 0.0
                )
                value = value + per_column(bias, chunk_shape)
            products.append(value)
        if plan.activation is None:
            (result,) = products
        else:
            result = ACTIVATIONS[plan.activation].apply(*products)
        if plan.scaled:
            scale = _scale(r["scale"], task, row + band * BAND, plan.experts)
            result = result * per_row(scale, chunk_shape)
        chunks = [result, *(products if plan.saves else ())]
        return [chunk.astype(plan.out_dtype) for chunk in chunks]

    def compute(warpgroup):
        offset = plan.origin(warpgroup)
        rows = pl.ds(offset[0], shape[0])
        places = plan.places(offset[1])

        def multiply(*args):
            *accs, slot, k = args
            del k
            left = ring.a.at[slot, rows]
            for (part, *columns), acc in zip(places, accs, strict=True):
                plgpu.wgmma(acc, left, ring.b.at[slot, part, :, pl.ds(*columns)])

        def one(index, fetched, which, passed):
            task, pieces = task_of(index, fetched)
            row, column = task.row + offset[0], task.column + offset[1]
            low, high, live = _live(plan, task, row, column)

            @pl.when(live)
            def _():
                sums = ring.accumulate(
                    which,
                    passed,
                    pieces,
                    (shape[0], places[0][2]),
                    multiply,
                    sums=len(places),
                )
                outs = [(r["out"], column)]
                if plan.saves:
                    outs += [
                        (r["products"], part * plan.columns + column)
                        for part in range(plan.sums)
                    ]
                store_chunks(
                    staging,
                    warpgroup,
                    outs,
                    functools.partial(finish, task, sums, row, column),
                    shape=shape,
                    row=row,
                    low=low,
                    high=high,
                    column=column,
                    columns=plan.columns,
                )

            @pl.when(jnp.logical_not(live))
            def _():
                ring.skip(which, passed, pieces)

            return pieces

        each_tile(tile, shares, warpgroup, fetch, one)

    run_warpgroups(tile, compute, lambda: feed(ring, shares, fetch, task_of, sources))


def _whole_eights(plan: _Plan, *arrays: jax.Array) -> tuple[jax.Array, ...]:
    """The copies' view of rows has whole pieces of 8."""
    padding = -plan.rows % ALIGN
    if not padding:
        return arrays
    return tuple(jnp.pad(x, ((0, padding), (0, 0))) for x in arrays)


def _readable(plan: _Plan, scale: jax.Array) -> jax.Array:
    """Scales of all rows that a tile may have, those behind the last among them."""
    return jnp.pad(scale.astype(jnp.float32), (0, plan.tile.piece_rows))


# Lowered once a module: calls of equal sizes, such as those of layers, share it.
@functools.partial(jax.jit, static_argnums=0)
def forward(
    plan: Forward,
    x: jax.Array,
    w: jax.Array,
    group_sizes: jax.Array,
    bias: jax.Array | None = None,
    scale: jax.Array | None = None,
) -> tuple[jax.Array, ...]:
    """Multiplies each expert's rows with its matrix and applies what the plan says.

    Args:
      plan: sizes and launch parameters.
      x: [M, depth].
      w: [E, depth, sums * columns], gate then up if gated.
      group_sizes: i32[E].
      bias: [E, sums * columns] if `plan.biased`.
      scale: f32[M] if `plan.scaled`.

    Returns:
      The result [M, columns] and, if `plan.saves`, the products
      [M, sums * columns]; rows of no expert are exactly 0 in both.
    """
    tile = plan.tile
    table, count = tasks.row_tiles(group_sizes, plan.rows, tile.block_m)
    (x,) = _whole_eights(plan, x)
    operands = [table, count, x, w]
    if bias is not None:
        operands.append(bias)
    if scale is not None:
        operands.append(_readable(plan, scale))
    blocks = blocks_for(tile, table.shape[0] * plan.column_blocks)
    piece = plan.sums, STEP, plan.width
    types = scratch(tile, (tile.piece_rows, STEP), piece, plan.dtype, plan.out_dtype)
    types["full"] = plgpu.Barrier(num_arrivals=1 + plan.sums, num_barriers=tile.stages)
    outs = [jax.ShapeDtypeStruct((plan.rows, plan.columns), plan.out_dtype)]
    if plan.saves:
        products = plan.rows, plan.sums * plan.columns
        outs.append(jax.ShapeDtypeStruct(products, plan.out_dtype))
    return launch(
        functools.partial(_forward_kernel, plan=plan, blocks=blocks),
        "pk_grouped_matmul_fused_fwd",
        tile,
        tuple(operands),
        tuple(outs),
        types,
        blocks,
        approx_math=True,
    )


def _backward_kernel(
    *refs, a, b, staging, full, free, kept, arrived, plan: Backward, blocks: int
):
    r = dict(zip(plan.names, refs, strict=True))
    tile, shape, act = plan.tile, plan.part, plan.act
    ring = Ring(tile, a, b, full, free)
    shares = turns(r["count"][0] * plan.column_blocks, blocks)
    fetch = functools.partial(fetch_row, plan, r["table"])
    line = staging.shape[-1]

    def task_of(index, fetched):
        task = row_task(plan, index, fetched)
        return task, _pieces(plan, task)

    def sources(task, k):
        depth = pl.ds(k * STEP, STEP)
        rows = r["dy"].at[pl.ds(task.row, tile.block_m), depth]
        return rows, r["w"].at[task.expert, pl.ds(task.column, plan.width), depth]

    def finish(task, sums, row, column, place, warpgroup, band, at):
        """A chunk of the gradient of each product, and of scale * a."""
        rows, columns = pl.ds(band * BAND, BAND), pl.ds(at * line, line)
        kept_here = [
            load(kept.at[warpgroup, part, rows, columns], MATRIX)
            for part in range(act.parts)
        ]
        scale = None
        if plan.scaled:
            scale = _scale(r["scale"], task, row + band * BAND, plan.experts)
        slices, dots = [], jnp.float32(0)
        # A few columns at a time: registers do not hold all steps of a whole chunk.
        for first in range(0, line, _SLICE):
            here = slice(first, first + _SLICE)
            begin = at * line + first
            da = chunk_of(sums, band, begin, _SLICE)
            saved = [x[:, here].astype(jnp.float32) for x in kept_here]
            result = act.result(*saved)
            if scale is not None:
                dots = dots + result * da
                factor = per_row(scale, (BAND, _SLICE))
                da, result = da * factor, result * factor
            done = [*act.gradient(*saved, da), *([result] if plan.emits else ())]
            # The barrier keeps the steps of the next columns behind these.
            done = [x.astype(plan.out_dtype) for x in done]
            slices.append(lax.optimization_barrier(done))
        if scale is not None:
            number = divide(column, line)[0] + at
            out = r["dots"].at[number, pl.ds(place + band * BAND, BAND)]
            out[...] = jnp.sum(dots, axis=1)
        return [jnp.concatenate(x, axis=1) for x in zip(*slices, strict=True)]

    def compute(warpgroup):
        offset = plan.origin(warpgroup)
        rows = pl.ds(offset[0], shape[0])
        places = plan.places(offset[1])

        def multiply(*args):
            *accs, slot, k = args
            del k
            left = ring.a.at[slot, rows]
            for (_, *columns), acc in zip(places, accs, strict=True):
                plgpu.wgmma(acc, left, ring.b.at[slot, pl.ds(*columns)].T)

        def one(index, fetched, which, passed):
            task, pieces = task_of(index, fetched)
            row, column = task.row + offset[0], task.column + offset[1]
            low, high, live = _live(plan, task, row, column)
            # The tile among all, and where in its rows the part begins.
            begin = divide(task.start, ALIGN)[0] * ALIGN
            number = fetched[tasks.Column.BASE]
            number = number + divide(task.row - begin, tile.block_m)[0]
            place = number * tile.block_m + offset[0]

            @pl.when(live)
            def _():
                for part in range(act.parts):
                    plgpu.copy_gmem_to_smem(
                        r["saved"].at[
                            pl.ds(row, shape[0]),
                            pl.ds(part * plan.columns + column, shape[1]),
                        ],
                        kept.at[warpgroup, part],
                        arrived.at[warpgroup],
                    )
                sums = ring.accumulate(
                    which,
                    passed,
                    pieces,
                    (shape[0], places[0][2]),
                    multiply,
                    sums=len(places),
                )
                plgpu.barrier_wait(arrived.at[warpgroup])
                outs = [
                    (r["dz"], part * plan.columns + column) for part in range(act.parts)
                ]
                if plan.emits:
                    outs.append((r["scaled"], column))
                store_chunks(
                    staging,
                    warpgroup,
                    outs,
                    functools.partial(
                        finish, task, sums, row, column, place, warpgroup
                    ),
                    shape=shape,
                    row=row,
                    low=low,
                    high=high,
                    column=column,
                    columns=plan.columns,
                )

            @pl.when(jnp.logical_not(live))
            def _():
                ring.skip(which, passed, pieces)

            return pieces

        each_tile(tile, shares, warpgroup, fetch, one)

    run_warpgroups(tile, compute, lambda: feed(ring, shares, fetch, task_of, sources))


# Lowered once a module: calls of equal sizes, such as those of layers, share it.
@functools.partial(jax.jit, static_argnums=0)
def backward(
    plan: Backward,
    dy: jax.Array,
    w: jax.Array,
    group_sizes: jax.Array,
    saved: jax.Array,
    scale: jax.Array | None = None,
) -> dict[str, jax.Array]:
    """The gradients behind y = scale * (act(z) w), from y's.

    Args:
      plan: sizes and launch parameters; `depth` is y's width.
      dy: [M, depth].
      w: [E, columns, depth].
      group_sizes: i32[E].
      saved: act(z) [M, columns]; z [M, 2 columns] if the activation is gated.
      scale: f32[M] if `plan.scaled`.

    Returns:
      "dz", of saved's shape; "d_scale" f32[M], without a bias' part, if `plan.scaled`;
      "scaled", scale * act(z), if `plan.emits`. Rows of no expert are 0 in "d_scale"
      and of no meaning in the others.
    """
    tile, parts = plan.tile, plan.act.parts
    table, count = tasks.row_tiles(group_sizes, plan.rows, tile.block_m)
    dy, saved = _whole_eights(plan, dy, saved)
    operands = [table, count, dy, w, saved]
    if scale is not None:
        operands.append(_readable(plan, scale))
    blocks = blocks_for(tile, table.shape[0] * plan.column_blocks)
    pieces = (tile.block_m, STEP), (plan.width, STEP)
    types = scratch(tile, *pieces, plan.dtype, plan.out_dtype)
    kept = tile.computing, parts, *plan.part
    types["kept"] = plgpu.SMEM(kept, plan.dtype, transforms=OPERAND)
    types["arrived"] = plgpu.Barrier(num_arrivals=parts, num_barriers=tile.computing)
    line = types["staging"].shape[-1]
    shapes = {
        "dz": ((plan.rows, parts * plan.columns), plan.out_dtype),
        # Each tile has its own place, whoever else has rows in it.
        "dots": ((plan.columns // line, math.prod((table.shape[0], tile.block_m))),),
        "scaled": ((plan.rows, plan.columns), plan.out_dtype),
    }
    names = plan.names[len(operands) :]
    outs = launch(
        functools.partial(_backward_kernel, plan=plan, blocks=blocks),
        "pk_grouped_matmul_fused_dgrad",
        tile,
        tuple(operands),
        tuple(jax.ShapeDtypeStruct(*(*shapes[n], jnp.float32)[:2]) for n in names),
        types,
        blocks,
        more_bytes=saved_bytes(tile, parts),
        approx_math=True,
    )
    found = dict(zip(names, outs, strict=True))
    if plan.scaled:
        dots = jnp.sum(found.pop("dots"), axis=0)
        found["d_scale"] = _by_row(plan, dots, group_sizes)
    return found


def _by_row(plan: Backward, dots: jax.Array, group_sizes: jax.Array) -> jax.Array:
    """Numbers of the rows of all tiles, in the order of the rows; 0 for no expert's."""
    place, routed = tasks.place_in_tiles(group_sizes, plan.rows, plan.tile.block_m)
    return jnp.where(routed, dots[place], 0.0)
