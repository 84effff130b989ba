"""Mosaic GPU kernel of `host_gather`: loads that go over the link themselves.

The table stays where it is. A warpgroup shares a row, 16 bytes a thread at most, and
asks for several before it writes the first; a few blocks together keep the link full,
as each answer takes long but the link holds many. No copy engine, no thread of the host
and no second buffer has a part in it.

Rows that 128 threads cannot share, of 160 bytes say, are read several at a time: each
thread has pieces of 16 bytes of them.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels._common import indexed
from pallas_kernels.host_gather.config import Config, piece, short_piece


def _host_gather_kernel(
    table_ref, ids_ref, out_ref, *, num_rows: int, groups: int, config: Config
):
    block, blocks = lax.axis_index("block"), min(config.blocks, groups)
    dim = out_ref.shape[1]
    layout = plgpu.Layout.WG_STRIDED((dim,), piece(dim, out_ref.dtype))
    zeros = plgpu.layout_cast(jnp.zeros(dim, out_ref.dtype), layout)

    def read(lookup):
        row = ids_ref[lookup]
        # What is no row is not read: another in its stead would cross the link, too.
        return lax.cond(
            (row >= 0) & (row < num_rows),
            lambda: plgpu.load(table_ref.at[row], layout=layout),
            lambda: zeros,
        )

    def step(i, carry):
        first = (block + i * blocks) * config.rows
        lookups = [first + r for r in range(config.rows)]
        # No row is written before all are asked for. Each load is behind a condition of
        # its own, so how many are on their way at once is up to the compiler.
        loaded = [read(lookup) for lookup in lookups]
        for lookup, row in zip(lookups, loaded, strict=True):
            out_ref.at[lookup][...] = row
        return carry

    count = lax.div(groups - 1 - block + blocks, jnp.int32(blocks))
    lax.fori_loop(0, count, step, 0)


def _host_gather_short_kernel(
    table_ref, ids_ref, out_ref, *, num_rows: int, groups: int, config: Config
):
    block, blocks = lax.axis_index("block"), min(config.blocks, groups)
    width = out_ref.shape[1]
    row_pieces = table_ref.shape[1] // width
    pieces = config.rows * row_pieces
    number = indexed.iota(pieces)
    lookup = lax.div(number, jnp.int32(row_pieces))
    column = (number - lookup * row_pieces) * width

    def step(i, carry):
        group = block + i * blocks
        ids = indexed.take(ids_ref, (group * config.rows + lookup,))
        is_row = (ids >= 0) & (ids < num_rows)
        values = indexed.take(
            table_ref, (ids, column), width, cached=False, where=is_row
        )
        out_ref.at[pl.ds(group * pieces, pieces)][...] = values
        return carry

    count = lax.div(groups - 1 - block + blocks, jnp.int32(blocks))
    lax.fori_loop(0, count, step, 0)


def host_gather(config: Config, table: jax.Array, ids: jax.Array) -> jax.Array:
    """Launches the gather.

    Args:
      config: how to read.
      table: [N, d], in the host's memory or the device's.
      ids: i32[M], M a multiple of `config.rows`.

    Returns:
      [M, d] on the device.
    """
    lookups, dim = ids.shape[0], table.shape[1]
    shape, kernel = (lookups, dim), _host_gather_kernel
    if not piece(dim, table.dtype):
        width = short_piece(dim, table.dtype)
        shape = (lookups * dim // width, width)
        kernel = _host_gather_short_kernel
    if lookups % config.rows:
        raise ValueError(
            f"{lookups} lookups are no multiple of the {config.rows} rows of a step"
        )
    groups = lookups // config.rows
    body: Any = functools.partial(
        kernel, num_rows=table.shape[0], groups=groups, config=config
    )
    rows = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct(shape, table.dtype),
        grid=(min(config.blocks, groups),),
        grid_names=("block",),
        kernel_name="pk_host_gather",
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane,
            unsafe_no_auto_barriers=True,  # threads share nothing
        ),
    )(table, ids)
    return rows.reshape(lookups, dim)
