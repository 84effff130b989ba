"""Products, layouts and copies that the Mosaic GPU kernels of this op share."""

from __future__ import annotations

import dataclasses
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


def params(
    *, auto_barriers: bool = True, reduction_bytes: int = 2048
) -> plgpu.CompilerParams:
    """Compiler options of all kernels.

    Args:
      auto_barriers: whether the compiler puts a barrier before and after each write to
        memory. A kernel needs none if `commit_smem` or a wait for copies stands
        between a write and what other warps did with that memory before and do after.
      reduction_bytes: shared memory for sums over more than a warp; rows need none.
    """
    # The default semantics takes minutes to infer layouts for bodies of this size.
    return plgpu.CompilerParams(
        approx_math=True,
        lowering_semantics=plgpu.LoweringSemantics.Lane,
        reduction_scratch_bytes=reduction_bytes,
        unsafe_no_auto_barriers=not auto_barriers,
    )


@dataclasses.dataclass
class _Queue:
    """What the interpreter has instead of products in flight.

    A product reads its operands when it is waited for, as late as the card may read
    them: memory that was given back too early is a race then.
    """

    waiting: list[tuple[_Sum, Any, Any]] = dataclasses.field(default_factory=list)

    def wait(self, pending: int) -> None:
        while len(self.waiting) > pending:
            total, a, b = self.waiting.pop(0)
            term = jnp.dot(_value(a), _value(b), precision=lax.Precision.HIGHEST)
            total.value = total.value + term


@dataclasses.dataclass
class _Sum:
    queue: _Queue
    value: jax.Array


def _value(x: Any) -> jax.Array:
    return (x if isinstance(x, jax.Array) else x[...]).astype(jnp.float32)


def accumulate(body: Callable[..., Any], *sums: jax.Array | tuple[int, int]) -> Any:
    """Calls `body` with an accumulator for each sum, on which `mma` and `read` work.

    Args:
      body: called with the accumulators; reads all of them with nothing pending.
      *sums: f32[64, N] to begin with, or a shape for zeros.

    Returns:
      What `body` does.
    """
    # The interpreter knows neither operands in registers nor initial values.
    if interpret.is_interpreting():
        queue = _Queue()
        starts = (
            x if isinstance(x, jax.Array) else jnp.zeros(x, jnp.float32) for x in sums
        )
        result = body(*(_Sum(queue, x) for x in starts))
        assert not queue.waiting, "products were not waited for"
        return result

    def scoped(*refs):
        for ref, start in zip(refs, sums, strict=True):
            if isinstance(start, jax.Array):
                ref[...] = start
        return body(*refs)

    shapes: Any = (x.shape if isinstance(x, jax.Array) else x for x in sums)
    return pl.run_scoped(scoped, *(plgpu.ACC(x, jnp.float32) for x in shapes))


def mma(total: Any, a: Any, b: Any) -> None:
    """Begins total += a @ b.

    Args:
      total: an accumulator of `accumulate`.
      a: [64, N1] of 16-bit values, in registers or shared memory.
      b: [N1, N2] in shared memory.
    """
    if isinstance(total, _Sum):
        total.queue.waiting.append((total, a, b))
    else:
        plgpu.wgmma(total, a, b)


def read(total: Any, pending: int = 0) -> jax.Array:
    """The value of an accumulator once at most `pending` later products run."""
    if isinstance(total, _Sum):
        total.queue.wait(pending)
        return total.value
    value = plgpu.wgmma_accumulator_load(total, wait_n=pending)
    # Nothing that uses the value may be computed before the wait.
    return lax.optimization_barrier(value)


def settle(value: jax.Array) -> jax.Array:
    """Keeps what uses the value behind the waits and products that came before."""
    return value if interpret.is_interpreting() else lax.optimization_barrier(value)


def full(shape: tuple[int, ...], value: Any, layout: Any) -> jax.Array:
    """One value everywhere, f32."""
    return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)


def index(shape: tuple[int, int], axis: int) -> jax.Array:
    """The index along `axis` of each element of a matrix, i32."""
    return plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=MATRIX)


def give_back(barrier: Any) -> None:
    """Tells the copying warpgroup that this one is done with a place."""
    if interpret.is_interpreting():
        # It reads operands with ordinary loads, which copies don't wait for.
        plgpu.commit_smem()
    plgpu.barrier_arrive(barrier)
