"""Limits of the `rope_append` kernel."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp


WARP = 32  # threads; a warp has a head of a token
HEAD_DIMS = (64, 128, 256)
DTYPES = ("bfloat16", "float16", "float32")


def refusal(*, head_dim: int, half: int, dtype: Any, cache_dtype: Any) -> str | None:
    """Why the kernel cannot run these sizes, `None` if it can.

    Args:
      head_dim: K.
      half: pairs of dimensions that rotate, 0 without a rotation.
      dtype, cache_dtype: of q, k and v, and of the caches.
    """
    if head_dim not in HEAD_DIMS:
        return f"K = {head_dim}, the kernel has {', '.join(map(str, HEAD_DIMS))}"
    if half % (head_dim // WARP):
        return (
            f"{2 * half} of {head_dim} dimensions rotate, the kernel has multiples of "
            f"{2 * head_dim // WARP}"
        )
    for name, found in (("q", dtype), ("the cache", cache_dtype)):
        if jnp.dtype(found).name not in DTYPES:
            return (
                f"{name} has dtype {jnp.dtype(found)}, the kernel has "
                f"{', '.join(DTYPES)}"
            )
    return None
