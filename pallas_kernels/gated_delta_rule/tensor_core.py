"""Products, layouts and copies that the Mosaic GPU kernels of this op share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels._common import interpret
from pallas_kernels._common.layout import MATRIX as MATRIX
from pallas_kernels._common.layout import PER_COLUMN as PER_COLUMN
from pallas_kernels._common.layout import PER_ROW as PER_ROW
from pallas_kernels._common.layout import load as load
from pallas_kernels._common.layout import load_global as load_global
from pallas_kernels._common.layout import operand as operand
from pallas_kernels._common.layout import per_column as per_column
from pallas_kernels._common.layout import per_row as per_row
from pallas_kernels._common.layout import shared_bytes as shared_bytes
from pallas_kernels._common.layout import split_index as split_index


ROWS = MATRIX  # how a warpgroup holds a matrix; a result of wgmma


# An operand in registers, or a reference to shared memory.
Operand = Any


def params(
    reduction_bytes: int = 0, *, auto_barriers: bool = True
) -> plgpu.CompilerParams:
    """Compiler options of all kernels.

    Args:
      auto_barriers: as for `attention.tensor_core.params`.
      reduction_bytes: shared memory that column sums exchange values through. There
        is one such place in a block: two warpgroups must not take them at a time.
    """
    # The default semantics takes minutes to infer layouts for bodies of this size.
    return plgpu.CompilerParams(
        approx_math=True,
        lowering_semantics=plgpu.LoweringSemantics.Lane,
        reduction_scratch_bytes=reduction_bytes,
        unsafe_no_auto_barriers=not auto_barriers,
    )


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


def mma_beside(
    work: Callable[[], Any], *pairs: tuple[Operand, Operand]
) -> tuple[jax.Array, Any]:
    """What `mma` makes of the pairs, and what `work` does while they are multiplied.

    Args:
      work: waits for nothing: a branch among products makes the compiler end them.
      *pairs: both in shared memory, else as for `mma`.

    Returns:
      f32[64, N2], and what `work` returns.
    """
    if interpret.is_interpreting():
        return _sum_of_products(pairs, None), work()

    def scoped(acc):
        for a, b in pairs:
            plgpu.wgmma(acc, a, b)
        done = work()
        return acc[...], done

    return pl.run_scoped(scoped, plgpu.ACC(_shape(pairs[0]), jnp.float32))


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


def store_transposed(ref: Any, value: jax.Array) -> None:
    """Writes a [M, N] value into shared memory [N, M]."""
    ref.T[...] = plgpu.layout_cast(value, plgpu.Layout.WGMMA_TRANSPOSED)


def square_indices(size: int) -> tuple[jax.Array, jax.Array]:
    """Row and column index of each element of a [size, size] matrix, i32."""
    shape = (size, size)
    return (
        plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=ROWS),
        plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=ROWS),
    )
