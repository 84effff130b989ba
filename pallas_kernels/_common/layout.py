"""Shared memory, register layouts and indices that Mosaic GPU kernels share."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu


MATRIX = plgpu.Layout.WGMMA  # how a warpgroup holds a result of wgmma
PER_ROW = MATRIX.reduce(1)  # a vector with one value per row of such a matrix
PER_COLUMN = MATRIX.reduce(0)

# Shared memory that both TMA and wgmma read: 8 x 64 tiles of 16-bit values.
OPERAND = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))

_BARRIER_BYTES = 1024


def operand(*shape: int, dtype: Any) -> Any:
    """Shared memory for 16-bit matrices that products read."""
    return plgpu.SMEM(shape, dtype, transforms=OPERAND)


def shared_bytes(scratch: Any) -> int:
    """Bytes of shared memory that scratch types take, with room for barriers."""
    leaves = jax.tree.leaves(scratch, is_leaf=lambda x: hasattr(x, "memory_space"))
    arrays = (x for x in leaves if getattr(x, "memory_space", None) == plgpu.SMEM)
    total = sum(math.prod(x.shape) * jnp.dtype(x.dtype).itemsize for x in arrays)
    return total + _BARRIER_BYTES


def per_row(vector: jax.Array, shape: tuple[int, int]) -> jax.Array:
    """Repeats a `PER_ROW` vector over the columns of a matrix."""
    return lax.broadcast_in_dim(vector, shape, (0,))


def per_column(vector: jax.Array, shape: tuple[int, int]) -> jax.Array:
    """Repeats a `PER_COLUMN` vector over the rows of a matrix."""
    return lax.broadcast_in_dim(vector, shape, (1,))


def load(ref: Any, layout: Any = MATRIX) -> jax.Array:
    """Reads shared memory into registers."""
    return plgpu.load(ref, layout=layout)


def load_global(ref: Any, layout: Any = MATRIX) -> jax.Array:
    """Reads device memory into registers, for what is read too rarely for TMA."""
    return plgpu.load(ref, layout=layout, optimized=False)


def split_index(index: jax.Array, inner: int) -> tuple[jax.Array, jax.Array]:
    """The outer and the inner index of a grid index, which has one axis of any size."""
    return lax.div(index, jnp.int32(inner)), lax.rem(index, jnp.int32(inner))
