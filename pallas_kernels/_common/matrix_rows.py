"""Rows of what a matrix product leaves in registers: reads and writes of a few."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax._src.lib.mlir import ir
from jax._src.lib.mlir.dialects import arith, llvm, scf, vector
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels._common import indexed, interpret
from pallas_kernels._common.layout import MATRIX, PER_ROW


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


def load_flags(ref: Any, row: jax.Array, first: jax.Array, count: int) -> jax.Array:
    """Reads booleans as they are, a byte each, for which loads have no layout.

    Args:
      ref: bool[n, V] in device memory, contiguous.
      row, first: i32, where to begin.
      count: of rows of a matrix, a multiple of 64.

    Returns:
      i32[count] in `layout.PER_ROW`, 0 or 1; 0 behind the end of the row.
    """
    length = ref.shape[1]
    place = first + plgpu.broadcasted_iota(jnp.int32, (count,), 0, layout=PER_ROW)
    there = place < length
    place = jnp.minimum(place, length - 1)
    if interpret.is_interpreting():
        flags = ref.at[row][...][place].astype(jnp.int32)
        return jnp.where(there, flags, jnp.zeros_like(flags))

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), PER_ROW, PER_ROW),
        return_type=plgpu.ShapeDtypeStruct((count,), jnp.int32, layout=PER_ROW),
    )
    def read(_, memory, rows, places):
        byte, word = (ir.IntegerType.get_signless(bits) for bits in (8, 32))
        registers = np.empty_like(places.registers)
        for i, index in enumerate(indexed._indices((rows, places))):
            value = llvm.load(byte, indexed._address(memory, index, byte))
            value = arith.extui(word, value)
            register = places.registers.flat[i]
            if isinstance(register.type, ir.VectorType):
                value = vector.broadcast(register.type, value)
            registers.flat[i] = value
        return mgpu.FragmentedArray(
            _registers=registers, _layout=places.layout, _is_signed=True
        )

    rows = plgpu.layout_cast(jnp.full((count,), row, jnp.int32), PER_ROW)
    flags = read(ref, rows, place)
    return jnp.where(there, flags, jnp.zeros_like(flags))


def load_repeated(ref: Any, times: int) -> jax.Array:
    """Reads a matrix of which each row stands for several, one after the other.

    Args:
      ref: f32[n, V] in shared memory, contiguous, n * times a multiple of 64, V of 8.
      times: how often each row is there.

    Returns:
      f32[n * times, V] in `layout.MATRIX`.
    """
    rows, columns = ref.shape
    shape = rows * times, columns
    if interpret.is_interpreting():
        return jnp.repeat(ref[...], times, axis=0, total_repeat_length=shape[0])
    row, column = (
        plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=MATRIX) for axis in (0, 1)
    )

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), MATRIX, MATRIX),
        return_type=plgpu.ShapeDtypeStruct(shape, ref.dtype, layout=MATRIX),
    )
    def read(_, memory, *arrays):
        kept = ir.MemRefType(memory.type).element_type
        registers = np.empty_like(arrays[0].registers)
        for i, index in enumerate(indexed._indices(arrays)):
            (length,) = ir.VectorType(arrays[0].registers.flat[i].type).shape
            kind = ir.VectorType.get((length,), kept)
            registers.flat[i] = llvm.load(kind, indexed._address(memory, index, kept))
        return mgpu.FragmentedArray(
            _registers=registers, _layout=arrays[0].layout, _is_signed=None
        )

    return read(ref, lax.div(row, jnp.int32(times)), column)


def repeat_eights(values: jax.Array) -> jax.Array:
    """The first 8 of each 16 rows in place of the other 8: half as many registers.

    Args:
      values: [64, V] in `layout.MATRIX`.
    """
    if interpret.is_interpreting():
        parts = values.reshape(-1, 2, 8, values.shape[1])
        return jnp.concatenate([parts[:, :1]] * 2, axis=1).reshape(values.shape)

    @plgpu.inline_mgpu(
        arg_types=(MATRIX,),
        return_type=plgpu.ShapeDtypeStruct(values.shape, values.dtype, layout=MATRIX),
    )
    def repeat(_, array):
        # As the left operand of a product: the two halves of 16 rows, column by column.
        pairs = array.registers.reshape(-1, 2)
        registers = np.stack([pairs[:, 0]] * 2, axis=1).reshape(array.registers.shape)
        return mgpu.FragmentedArray(
            _registers=registers, _layout=array.layout, _is_signed=array.is_signed
        )

    return repeat(values)
