"""Mosaic GPU kernel of `engram_gather`: every thread moves pieces of 16 bytes.

A block has `Config.rows` lookups. Their rows, cut into pieces, lie in the result one
behind the other; thread i has the pieces i, i + 128, ... It reads the ids of their
lookups, which its neighbours read too, then all its pieces, and writes them: stores of
a warp are one span, loads of a warp are whole rows but for its ends. Nothing is shared
between threads and nothing waits, so that many small blocks hide each other's latency.

Rows of 8 bits leave as 16: a thread multiplies 8 values by the power of two of their
block and rounds once.
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
from pallas_kernels.engram_gather.config import Config, piece
from pallas_kernels.engram_gather.reference import BLOCK, factors


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """The static part of a launch.

    Attributes:
      num_rows, dim: N and d of the table.
      dtype, out_dtype: of table and result.
      config: how to tile.
    """

    num_rows: int
    dim: int
    dtype: Any
    out_dtype: Any
    config: Config

    @property
    def width(self) -> int:
        """Values of a piece."""
        return piece(self.dim, self.dtype)

    @property
    def row_pieces(self) -> int:
        return self.dim // self.width

    @property
    def pieces(self) -> int:
        """Of a block."""
        return self.config.rows * self.row_pieces


def _engram_gather_kernel(*refs, plan: Plan):
    table_ref, ids_ref, *scale_ref, out_ref = refs
    block = lax.axis_index("block")
    number = indexed.iota(plan.pieces)
    lookup = lax.div(number, jnp.int32(plan.row_pieces))
    column = (number - lookup * plan.row_pieces) * plan.width
    ids = indexed.take(ids_ref, (block * plan.config.rows + lookup,))
    is_row = (ids >= 0) & (ids < plan.num_rows)
    ids = jnp.where(is_row, ids, 0)
    values = indexed.take(table_ref, (ids, column), plan.width)  # [n, V]
    if scale_ref:
        powers = indexed.take(scale_ref[0], (ids, lax.div(column, jnp.int32(BLOCK))))
        factor = jnp.where(is_row, factors(powers), jnp.float32(jnp.nan))
        values = values.astype(jnp.float32) * indexed.spread(factor, plan.width)
    else:
        nan = jnp.array(jnp.nan, plan.dtype)
        values = jnp.where(indexed.spread(is_row, plan.width), values, nan)
    out_ref.at[pl.ds(block * plan.pieces, plan.pieces)][...] = values.astype(
        plan.out_dtype
    )


def engram_gather(
    plan: Plan, table: jax.Array, ids: jax.Array, scale: jax.Array | None
) -> jax.Array:
    """Launches the gather.

    Args:
      plan: the static part.
      table: [N, d].
      ids: i32[M], M a multiple of `plan.config.rows`.
      scale: u8[N, d / 32] or `None`.

    Returns:
      [M, d] in `plan.out_dtype`.
    """
    lookups, rows = ids.shape[0], plan.config.rows
    if lookups % rows:
        raise ValueError(f"{lookups} lookups are no multiple of a block's {rows} rows")
    out = plgpu.kernel(
        functools.partial(_engram_gather_kernel, plan=plan),
        out_type=jax.ShapeDtypeStruct(
            (lookups * plan.row_pieces, plan.width), plan.out_dtype
        ),
        grid=(lookups // rows,),
        grid_names=("block",),
        kernel_name="pk_engram_gather",
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane,
            unsafe_no_auto_barriers=True,  # threads share nothing
        ),
    )(table, ids, *(() if scale is None else (scale,)))
    return out.reshape(lookups, plan.dim)
