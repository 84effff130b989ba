"""Matrix-vector products, in float32."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp


def gemv(
    x: jax.Array,
    weights: Sequence[jax.Array],
    *,
    norm_scale: jax.Array | None,
    zero_centered: bool,
    eps: float,
    swiglu: bool,
    residual: jax.Array | None,
    out_dtypes: Sequence[Any],
) -> tuple[jax.Array, ...]:
    """See `api.gemv`; [M, N] of each weight, or of both together with `swiglu`."""
    h = x.astype(jnp.float32)
    if norm_scale is not None:
        scale = norm_scale.astype(jnp.float32)
        scale = 1.0 + scale if zero_centered else scale
        mean = jnp.mean(h * h, axis=-1, keepdims=True)
        h = h * jax.lax.rsqrt(mean + eps) * scale[None]
    products = [
        jnp.dot(h, w.astype(jnp.float32), precision=jax.lax.Precision.HIGHEST)
        for w in weights
    ]
    if swiglu:
        gate, up = products
        products = [jax.nn.silu(gate) * up]
    if residual is not None:
        products = [residual.astype(jnp.float32) + products[0]]
    return tuple(y.astype(d) for y, d in zip(products, out_dtypes, strict=True))
