"""The gate of Engram (arXiv 2601.07372), section 2, as it is written, in float32."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def _rms_normed(x: jax.Array, eps: float) -> jax.Array:
    return x / jnp.sqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps)


def engram_gate(
    h: jax.Array,
    kv: jax.Array,
    query_scale: jax.Array,
    key_scale: jax.Array,
    *,
    is_live: jax.Array | None,
    eps: float,
    clamp: float,
    copies_sign: bool,
    dtype: jnp.dtype,
) -> tuple[jax.Array, jax.Array]:
    """Arguments and results as in `api.engram_gate`; differentiated by JAX."""
    h, kv = h.astype(jnp.float32), kv.astype(jnp.float32)
    keys, value = kv[:, :, :-1], kv[:, :, -1:]  # [B, T, G, D], [B, T, 1, D]
    query = _rms_normed(h, eps) * query_scale.astype(jnp.float32)[None, None]
    key = _rms_normed(keys, eps) * key_scale.astype(jnp.float32)[None, None]
    score = jnp.sum(query * key, axis=-1) / jnp.sqrt(jnp.float32(h.shape[-1]))
    root = jnp.sqrt(jnp.maximum(jnp.abs(score), clamp))  # [B, T, G]
    signed = jnp.copysign(root, score) if copies_sign else jnp.sign(score) * root
    gate = jax.nn.sigmoid(signed)
    if is_live is not None:
        gate = jnp.where(is_live[:, :, None], gate, 0.0)
        value = jnp.where(is_live[:, :, None, None], value, 0.0)
    return (gate[..., None] * value).astype(dtype), gate
