"""The public function: checks, then the implementation that was chosen."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels._common.dispatch import Choice, Implementation, select
from pallas_kernels.grouped_matmul import reference, xla
from pallas_kernels.grouped_matmul.config import heuristic


_AVAILABLE: tuple[Implementation, ...] = ("xla", "reference")


def choose(
    *args: Any, implementation: Implementation | None = None, **options: Any
) -> Choice:
    """Says what a call of `grouped_matmul` would run.

    Args:
      *args: arrays or `jax.ShapeDtypeStruct`, as for `grouped_matmul`.
      implementation: the one asked for.
      **options: the other keywords of `grouped_matmul`.

    Returns:
      The choice.
    """
    del args, options  # Both implementations run everything that passes the checks.
    return select("grouped_matmul", implementation, {}, available=_AVAILABLE)


def grouped_matmul(
    x: jax.Array,
    w: jax.Array,
    group_sizes: jax.Array,
    *,
    preferred_element_type: Any = None,
    implementation: Implementation | None = None,
) -> jax.Array:
    """Multiplies each group of consecutive rows with its own matrix.

    Args:
      x: [M, Kd], rows sorted by expert.
      w: [E, Kd, N], dtype of x.
      group_sizes: i32[E], rows of each expert, in order; their sum is at most M.
      preferred_element_type: dtype of the result, x's if `None`; sums are f32.
      implementation: "xla", "reference" or `None`.

    Returns:
      [M, N]. Rows past the sum of `group_sizes` are exactly 0 and get no gradient;
      an expert without rows gets a gradient of exactly 0; a NaN in one expert's rows
      or weights stays with that expert.

    Raises:
      ValueError: a shape or dtype is not allowed.
    """
    choice = choose(x, w, group_sizes, implementation=implementation)
    if x.ndim != 2 or w.ndim != 3 or x.shape[1] != w.shape[1]:
        raise ValueError(
            f"x and w have shapes {x.shape} and {w.shape}, expected [M, K] and "
            "[E, K, N]"
        )
    if x.dtype != w.dtype:
        raise ValueError(f"w has dtype {w.dtype}, expected x's, {x.dtype}")
    if group_sizes.shape != w.shape[:1] or group_sizes.dtype != jnp.int32:
        raise ValueError(
            f"group_sizes is {group_sizes.dtype}{list(group_sizes.shape)}, expected "
            f"int32[{w.shape[0]}]"
        )
    if preferred_element_type is None:
        preferred_element_type = x.dtype
    dtype = jnp.dtype(preferred_element_type)
    if choice.implementation == "reference":
        return reference.grouped_matmul(x, w, group_sizes, dtype=dtype)
    config = heuristic(
        rows=x.shape[0],
        experts=w.shape[0],
        in_dim=w.shape[1],
        out_dim=w.shape[2],
        itemsize=w.dtype.itemsize,
    )
    return xla.grouped_matmul(x, w, group_sizes, dtype, config)
