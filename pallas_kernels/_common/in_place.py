"""Kernels that update arrays in place."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import lax


def update(
    kernel: Callable[..., Any], inputs: Sequence[jax.Array], *arrays: jax.Array
) -> tuple[Any, ...]:
    """Runs a kernel that writes to some arrays, or reads and writes them.

    Such an array has one address in the kernel. But XLA fuses a kernel with the slices
    that it reads and with the updates that its results go to, and a fusion forgets that
    the array is one: in a scan over layers, a state was read from memory that nobody
    had written. Nothing is fused across a barrier.

    Args:
      kernel: called with the inputs and with a reference to each array.
      inputs: what it reads.
      *arrays: what it updates.

    Returns:
      What `kernel` returns, and the new arrays.
    """
    inputs, arrays = lax.optimization_barrier((tuple(inputs), arrays))
    refs = [jax.new_ref(array) for array in arrays]
    result = kernel(*inputs, *refs)
    return lax.optimization_barrier((result, *(jax.freeze(ref) for ref in refs)))
