"""Products, layouts and copies that the Mosaic GPU kernels of this op share."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels._common import interpret


ROWS = plgpu.Layout.WGMMA  # how a warpgroup holds a matrix; a result of wgmma
PER_ROW = ROWS.reduce(1)  # a vector with one value per row of such a matrix
PER_COLUMN = ROWS.reduce(0)

# Shared memory that both TMA and wgmma read: 8 x 64 tiles of 16-bit values.
OPERAND = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))

# An operand in registers, or a reference to shared memory.
Operand = Any


def operand(*shape: int, dtype: Any) -> Any:
    """Shared memory for 16-bit matrices that products read."""
    return plgpu.SMEM(shape, dtype, transforms=OPERAND)


_BARRIER_BYTES = 1024


def params(reduction_bytes: int = 0) -> plgpu.CompilerParams:
    """Compiler options of all kernels.

    Args:
      reduction_bytes: shared memory that column sums exchange values through. There
        is one such place in a block: two warpgroups must not take them at a time.
    """
    # The default semantics takes minutes to infer layouts for bodies of this size.
    return plgpu.CompilerParams(
        approx_math=True,
        lowering_semantics=plgpu.LoweringSemantics.Lane,
        reduction_scratch_bytes=reduction_bytes,
    )


def shared_bytes(scratch: Any) -> int:
    """Bytes of shared memory that scratch types take, with room for barriers."""
    leaves = jax.tree.leaves(scratch, is_leaf=lambda x: hasattr(x, "memory_space"))
    arrays = (x for x in leaves if getattr(x, "memory_space", None) == plgpu.SMEM)
    total = sum(math.prod(x.shape) * jnp.dtype(x.dtype).itemsize for x in arrays)
    return total + _BARRIER_BYTES


def _value(x: Operand) -> jax.Array:
    return (x if isinstance(x, jax.Array) else x[...]).astype(jnp.float32)


def _sum_of_products(pairs, init):
    total = init
    for a, b in pairs:
        term = jnp.dot(_value(a), _value(b), precision=lax.Precision.HIGHEST)
        total = term if total is None else total + term
    return total


def mma(*pairs: tuple[Operand, Operand], init: jax.Array | None = None) -> jax.Array:
    """Sum of the products a @ b of all pairs, added to `init`.

    Args:
      *pairs: (a [64, N1] in registers or shared memory, b [N1, N2] in shared
        memory), 16-bit values.
      init: f32[64, N2], zeros if `None`.

    Returns:
      f32[64, N2].
    """
    if init is not None:
        return mma_onto((init, *pairs))[0]
    # The interpreter knows neither operands in registers nor initial values.
    if interpret.is_interpreting():
        return _sum_of_products(pairs, None)

    def scoped(acc):
        for a, b in pairs:
            plgpu.wgmma(acc, a, b)
        return acc[...]

    return pl.run_scoped(scoped, plgpu.ACC(_shape(pairs[0]), jnp.float32))


def mma_each(*pairs: tuple[Operand, Operand]) -> list[jax.Array]:
    """The products a @ b, in flight together; arguments as for `mma`."""
    if interpret.is_interpreting():
        return [_sum_of_products([pair], None) for pair in pairs]

    def scoped(*accs):
        for acc, (a, b) in zip(accs, pairs, strict=True):
            plgpu.wgmma(acc, a, b)
        return [acc[...] for acc in accs]

    accs = [plgpu.ACC(_shape(pair), jnp.float32) for pair in pairs]
    return pl.run_scoped(scoped, *accs)


def mma_onto(*terms: Any) -> list[jax.Array]:
    """Several sums as `mma` makes them, in flight together.

    Args:
      *terms: (init f32[64, N2], pair, ...), init and pairs as for `mma`.

    Returns:
      f32[64, N2] for each term.
    """
    if interpret.is_interpreting():
        return [_sum_of_products(pairs, init) for init, *pairs in terms]

    def issue(accs):
        for acc, (_, *pairs) in zip(accs, terms, strict=True):
            for a, b in pairs:
                plgpu.wgmma(acc, a, b)

    sums: Any = pl.run_state(issue)(tuple(plgpu.ACC.init(t[0]) for t in terms))
    return list(sums)


def _shape(pair: tuple[Operand, Operand]) -> tuple[int, int]:
    return pair[0].shape[0], pair[1].shape[1]


def per_row(vector: jax.Array, shape: tuple[int, int]) -> jax.Array:
    """Repeats a `PER_ROW` vector over the columns of a matrix."""
    return lax.broadcast_in_dim(vector, shape, (0,))


def per_column(vector: jax.Array, shape: tuple[int, int]) -> jax.Array:
    """Repeats a `PER_COLUMN` vector over the rows of a matrix."""
    return lax.broadcast_in_dim(vector, shape, (1,))


def load(ref: Any, layout: Any = ROWS) -> jax.Array:
    """Reads shared memory into registers."""
    return plgpu.load(ref, layout=layout)


def load_global(ref: Any, layout: Any = ROWS) -> jax.Array:
    """Reads device memory into registers, for what is read too rarely for TMA."""
    return plgpu.load(ref, layout=layout, optimized=False)


def store_transposed(ref: Any, value: jax.Array) -> None:
    """Writes a [M, N] value into shared memory [N, M]."""
    ref.T[...] = plgpu.layout_cast(value, plgpu.Layout.WGMMA_TRANSPOSED)


def split_index(index: jax.Array, inner: int) -> tuple[jax.Array, jax.Array]:
    """The outer and the inner index of a grid index, which has one axis of any size."""
    return lax.div(index, jnp.int32(inner)), lax.rem(index, jnp.int32(inner))


def square_indices(size: int) -> tuple[jax.Array, jax.Array]:
    """Row and column index of each element of a [size, size] matrix, i32."""
    shape = (size, size)
    return (
        plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=ROWS),
        plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=ROWS),
    )
