"""Columns of what a matrix product leaves in registers: their sums, writes of a few."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax._src.lib.mlir import ir
from jax._src.lib.mlir.dialects import llvm, scf, vector
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels._common import indexed, interpret
from pallas_kernels._common.layout import MATRIX, PER_COLUMN


_INTERPRETED = {"add": jnp.sum, "max": jnp.max}


def scratch_size(columns: int) -> int:
    """Values of shared memory that `reduce_columns` takes for so many columns."""
    return 32 * columns  # 4 warps of 32 threads, a pair of values for 8 columns


def reduce_columns(values: jax.Array, scratch: Any, how: str) -> jax.Array:
    """Reduces each column of a matrix, whose rows lie in all warps of a warpgroup.

    `jnp.max(x, axis=0)` would do this in memory that all warpgroups of a block share.
    All threads of the warpgroup meet here twice, after the last write to `scratch`
    and after the last read.

    Args:
      values: f32[64, N] in `layout.MATRIX`, N a multiple of 8.
      scratch: f32[scratch_size(N)] in shared memory, of this warpgroup alone.
      how: "add", in an order that is fixed, or "max".

    Returns:
      f32[N] in `layout.PER_COLUMN`.
    """
    if interpret.is_interpreting():
        return _INTERPRETED[how](values, axis=0)

    @plgpu.inline_mgpu(
        arg_types=(MATRIX, plgpu.RefType()),
        return_type=plgpu.ShapeDtypeStruct(
            values.shape[1:], values.dtype, layout=PER_COLUMN
        ),
    )
    def reduce(_, array, memory):
        return array.reduce(how, 0, memory)

    return reduce(values, scratch)


def put_columns(
    ref: Any,
    values: jax.Array,
    *,
    start: jax.Array,
    stride: int,
    low: jax.Array,
    count: jax.Array,
) -> None:
    """Writes some columns of a matrix, as a product leaves it, to rows of an array.

    The first R values of column `low + i` go to `ref[start + i * stride]` for i
    in [0, count).

    Args:
      ref: [n, R] in device memory, contiguous.
      values: [M, N] in `layout.MATRIX`, M a multiple of 64 and at least R, N of 8,
        `ref`'s dtype.
      start, low, count: i32.
      stride: rows of `ref`.
    """
    length = ref.shape[1]
    if interpret.is_interpreting():

        def step(i, carry):
            # A column is cut out by a mask: the index is no constant.
            mine = jnp.arange(values.shape[1], dtype=jnp.int32) == low + i
            column = jnp.sum(jnp.where(mine[None], values, 0), axis=1)
            ref.at[start + i * stride][...] = column[:length].astype(values.dtype)
            return carry

        lax.fori_loop(0, count, step, 0)
        return
    row, column = (
        plgpu.broadcasted_iota(jnp.int32, values.shape, axis, layout=MATRIX)
        for axis in (0, 1)
    )
    column = column - low
    where = (column >= 0) & (column < count) & (row < length)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), MATRIX, MATRIX, MATRIX, MATRIX))
    def write(_, memory, values, flags, *arrays):
        registers = [x.registers.flat for x in (values, flags, *arrays)]
        kept = values.mlir_dtype
        for piece, *others in zip(*registers, strict=True):
            for i in range(ir.VectorType(piece.type).shape[0]):
                value, flag, *index = (
                    vector.extract(x, [], [i]) for x in (piece, *others)
                )
                branch = scf.IfOp(flag)
                with ir.InsertionPoint(branch.then_block):
                    llvm.store(value, indexed._address(memory, tuple(index), kept))
                    scf.yield_([])

    write(ref, values, where, start + column * stride, row)
