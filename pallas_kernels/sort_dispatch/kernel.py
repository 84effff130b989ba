"""Mosaic GPU kernels that move rows to experts and back.

A row is pieces of 16 bytes. Threads have pieces of the result and work out where what
belongs there lies; they share nothing and wait for nothing, so many small blocks hide
each other's latency.

- `gather`: a thread copies pieces of rows, times a number of the row if there is one.
- `reduce`: a thread has a piece of a token, adds the same piece of its k rows to it,
  slot after slot, in f32. The rows of several slots are in flight together.
- `pull`: the gradient of a weighted sum, both of its parts in one pass over the rows. A
  warp has a row: it writes w do, and adds up <y, do> across its threads.
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

from pallas_kernels._common import indexed
from pallas_kernels._common.indexed import WARP
from pallas_kernels._common.pieces import WARPGROUP
from pallas_kernels.sort_dispatch.config import Config, piece


WARPS = WARPGROUP // WARP


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """The static part of a launch.

    Attributes:
      tokens, slots, rows: T, k and M.
      dim: D.
      dtype: of rows and tokens.
      config: launch parameters.
    """

    tokens: int
    slots: int
    rows: int
    dim: int
    dtype: Any
    config: Config

    @property
    def width(self) -> int:
        """Values of a piece."""
        return piece(self.dim, self.dtype)

    @property
    def row_pieces(self) -> int:
        return self.dim // self.width


def _launch(body, out_type, blocks: int, name: str, args) -> Any:
    return plgpu.kernel(
        body,
        out_type=out_type,
        grid=(blocks,),
        grid_names=("block",),
        kernel_name=name,
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane,
            unsafe_no_auto_barriers=True,  # threads share nothing
        ),
    )(*args)


def _places(plan: Plan, count: int, total: int):
    """Row, column and validity of a block's pieces among `total`."""
    number = lax.axis_index("block") * count + indexed.iota(count)
    is_there = number < total
    # What is behind the end does the work of the last one, and is not written.
    number = jnp.minimum(number, total - 1)
    row = lax.div(number, jnp.int32(plan.row_pieces))
    return row, (number - row * plan.row_pieces) * plan.width, is_there


def _write(out_ref, plan: Plan, values, count: int, total: int, row, column, is_there):
    """Pieces of a block to [total, V], or to [rows, D] if the last block is short."""
    values = values.astype(plan.dtype)
    if total % count == 0:
        start = lax.axis_index("block") * count
        out_ref.at[pl.ds(start, count)][...] = values
    else:
        indexed.put(out_ref, (row, column), values, is_there)


def _out(plan: Plan, rows: int, count: int) -> Any:
    total = rows * plan.row_pieces
    shape = (total, plan.width) if total % count == 0 else (rows, plan.dim)
    return jax.ShapeDtypeStruct(shape, plan.dtype)


def _routed(total_ref, shape) -> Any:
    """i32[n]: how many rows are routed, in every thread."""
    zero = plgpu.layout_cast(jnp.zeros(shape, jnp.int32), indexed.index_layout())
    return indexed.take(total_ref, (zero,))


def _gather_kernel(*refs, plan: Plan):
    x_ref, token_ref, total_ref, *scale_ref, out_ref = refs
    count = WARPGROUP * plan.config.copied
    total = plan.rows * plan.row_pieces
    row, column, is_there = _places(plan, count, total)
    token = indexed.take(token_ref, (row,))
    is_routed = row < _routed(total_ref, row.shape)
    values = indexed.take(x_ref, (token, column), plan.width)
    if scale_ref:
        scale = indexed.spread(indexed.take(scale_ref[0], (row,)), plan.width)
        values = (values.astype(jnp.float32) * scale).astype(plan.dtype)
    zero = jnp.zeros((), plan.dtype)
    values = jnp.where(indexed.spread(is_routed, plan.width), values, zero)
    _write(out_ref, plan, values, count, total, row, column, is_there)


def gather(
    plan: Plan,
    x: jax.Array,
    token: jax.Array,
    routed: jax.Array,
    scale: jax.Array | None = None,
) -> jax.Array:
    """Copies tokens to rows.

    Args:
      plan: the static part.
      x: [T, D].
      token: i32[M], in [0, T).
      routed: i32[1], how many rows are; those behind are 0.
      scale: f32[M] or `None`.

    Returns:
      [M, D].
    """
    count = WARPGROUP * plan.config.copied
    args = (x, token, routed) if scale is None else (x, token, routed, scale)
    out = _launch(
        functools.partial(_gather_kernel, plan=plan),
        _out(plan, plan.rows, count),
        -(-plan.rows * plan.row_pieces // count),
        "pk_sort_dispatch_gather",
        args,
    )
    return out.reshape(plan.rows, plan.dim)


def _reduce_kernel(*refs, plan: Plan):
    y_ref, row_ref, total_ref, *weight_ref, out_ref = refs
    config, width = plan.config, plan.width
    count = WARPGROUP * config.summed
    pieces = plan.tokens * plan.row_pieces
    token, column, is_there = _places(plan, count, pieces)
    routed = _routed(total_ref, token.shape)
    total = plgpu.layout_cast(
        jnp.zeros((count, width), jnp.float32), indexed.layout(width)
    )
    first = token * plan.slots

    def add(total, start, slots):
        places = [first + (start + slot) for slot in range(slots)]
        # All loads are issued before the first one is needed.
        rows = [indexed.take(row_ref, (place,)) for place in places]
        is_routed = [row < routed for row in rows]
        loaded = [
            indexed.take(y_ref, (jnp.where(is_own, row, 0), column), width)
            for row, is_own in zip(rows, is_routed, strict=True)
        ]
        weights = [
            indexed.take(weight_ref[0], (place,)) if weight_ref else None
            for place in places
        ]
        for is_own, values, weight in zip(is_routed, loaded, weights, strict=True):
            values = values.astype(jnp.float32)
            if weight is not None:
                values = values * indexed.spread(weight, width)
            total = total + jnp.where(indexed.spread(is_own, width), values, 0.0)
        return total

    # A loop: of code without one the compiler puts the loads of all slots first, whose
    # registers leave room for few warps.
    steps, rest = divmod(plan.slots, config.unroll)
    if steps:
        total = lax.fori_loop(
            0,
            steps,
            lambda i, total: add(total, i * config.unroll, config.unroll),
            total,
        )
    if rest:
        total = add(total, steps * config.unroll, rest)
    _write(out_ref, plan, total, count, pieces, token, column, is_there)


def reduce(
    plan: Plan,
    y: jax.Array,
    row: jax.Array,
    routed: jax.Array,
    weights: jax.Array | None = None,
) -> jax.Array:
    """Adds up the rows of each token.

    Args:
      plan: the static part.
      y: [M, D].
      row: i32[T k], the row of each slot; at `routed` or above adds nothing.
      routed: i32[1], at most M.
      weights: f32[T k] or `None`.

    Returns:
      [T, D].
    """
    count = WARPGROUP * plan.config.summed
    args = (y, row, routed) if weights is None else (y, row, routed, weights)
    out = _launch(
        functools.partial(_reduce_kernel, plan=plan),
        _out(plan, plan.tokens, count),
        -(-plan.tokens * plan.row_pieces // count),
        "pk_sort_dispatch_reduce",
        args,
    )
    return out.reshape(plan.tokens, plan.dim)


def _pull_kernel(
    y_ref, do_ref, token_ref, total_ref, scale_ref, dy_ref, product_ref, *, plan: Plan
):
    width = plan.width
    number = indexed.iota(WARPGROUP)
    warp = lax.div(number, jnp.int32(WARP))
    lane = number - warp * WARP
    row = lax.axis_index("block") * WARPS + warp
    is_there = row < plan.rows
    row = jnp.minimum(row, plan.rows - 1)
    token = indexed.take(token_ref, (row,))
    is_routed = row < _routed(total_ref, row.shape)
    scale = indexed.spread(indexed.take(scale_ref, (row,)), width)
    wide = indexed.spread(is_routed, width)
    total = plgpu.layout_cast(
        jnp.zeros((WARPGROUP, width), jnp.float32), indexed.layout(width)
    )
    for start in range(0, plan.row_pieces, WARP):
        place = start + lane
        is_own = place < plan.row_pieces
        column = jnp.minimum(place, plan.row_pieces - 1) * width
        y = indexed.take(y_ref, (row, column), width).astype(jnp.float32)
        do = indexed.take(do_ref, (token, column), width).astype(jnp.float32)
        # Selected, not multiplied: what stands in rows that are not routed is anything.
        total = total + jnp.where(indexed.spread(is_own, width) & wide, y * do, 0.0)
        dy = jnp.where(wide, do * scale, 0.0).astype(plan.dtype)
        indexed.put(dy_ref, (row, column), dy, is_own & is_there)
    own = plgpu.layout_cast(jnp.sum(total, axis=1), indexed.index_layout())
    product = indexed.spread(indexed.across_warp(own, "sum"), 1)
    indexed.put(product_ref, (row, lane * 0), product, is_there & (lane == 0))


def pull(
    plan: Plan,
    y: jax.Array,
    do: jax.Array,
    token: jax.Array,
    routed: jax.Array,
    scale: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Both gradients of a weighted sum, row by row.

    Args:
      plan: the static part.
      y: [M, D].
      do: [T, D].
      token: i32[M].
      routed: i32[1], how many rows are; gradients of those behind are 0.
      scale: f32[M], the weight of each row.

    Returns:
      scale do_token [M, D], and <y, do_token> f32[M].
    """
    dy, product = _launch(
        functools.partial(_pull_kernel, plan=plan),
        (
            jax.ShapeDtypeStruct((plan.rows, plan.dim), plan.dtype),
            jax.ShapeDtypeStruct((plan.rows, 1), jnp.float32),
        ),
        -(-plan.rows // WARPS),
        "pk_sort_dispatch_pull",
        (y, do, token, routed, scale),
    )
    return dy, product[:, 0]
