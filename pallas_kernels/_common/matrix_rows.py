"""Writes of a few rows of what a matrix product leaves in registers."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax._src.lib.mlir import ir
from jax._src.lib.mlir.dialects import llvm, scf
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels._common import indexed, interpret
from pallas_kernels._common.layout import MATRIX


def put_rows(
    ref: Any,
    values: jax.Array,
    *,
    start: jax.Array,
    stride: int,
    low: jax.Array,
    count: jax.Array,
) -> None:
    """Writes some rows of a matrix, as a product leaves it, to rows that lie apart.

    Row `low + i` goes to `ref[start + i * stride]` for i in [0, count).

    Args:
      ref: [n, V] in device memory, contiguous.
      values: [M, V] in `layout.MATRIX`, M a multiple of 64 and V of 8, `ref`'s dtype.
      start, low, count: i32.
      stride: rows of `ref`.
    """
    if interpret.is_interpreting():

        def step(i, carry):
            ref.at[start + i * stride][...] = values[low + i]
            return carry

        lax.fori_loop(0, count, step, 0)
        return
    row, column = (
        plgpu.broadcasted_iota(jnp.int32, values.shape, axis, layout=MATRIX)
        for axis in (0, 1)
    )
    row = row - low
    where = (row >= 0) & (row < count)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), MATRIX, MATRIX, MATRIX, MATRIX))
    def write(_, memory, values, flags, *arrays):
        stores = zip(
            values.registers.flat,
            flags.registers.flat,
            indexed._indices(arrays),
            strict=True,
        )
        for piece, flag, index in stores:
            branch = scf.IfOp(indexed._scalar(flag))
            with ir.InsertionPoint(branch.then_block):
                kept = ir.VectorType(piece.type).element_type
                llvm.store(piece, indexed._address(memory, index, kept))
                scf.yield_([])

    write(ref, values, where, start + row * stride, column)
