"""The norm, the rotation and the cache's update as they are written, in f32."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def normed(
    x: jax.Array, scale: jax.Array | None, *, zero_centered: bool, eps: float
) -> jax.Array:
    """RMSNorm over K of [B, T, H, K], rounded to x's dtype; x without a scale."""
    if scale is None:
        return x
    u = x.astype(jnp.float32)
    factor = scale.astype(jnp.float32)
    if zero_centered:
        factor = 1.0 + factor
    rms = jnp.sqrt(jnp.mean(u * u, axis=-1, keepdims=True) + eps)
    return (u / rms * factor[None, None, None]).astype(x.dtype)


def rotated(x: jax.Array, cos_sin: jax.Array | None) -> jax.Array:
    """[B, T, H, K] with its first R dimensions turned, in pairs R/2 apart."""
    if cos_sin is None:
        return x
    half = cos_sin.shape[-1] // 2
    cos, sin = cos_sin[:, :, None, :half], cos_sin[:, :, None, half:]  # [B, T, 1, R/2]
    first = x[..., :half].astype(jnp.float32)
    second = x[..., half : 2 * half].astype(jnp.float32)
    turned = [first * cos - second * sin, second * cos + first * sin]
    turned = [part.astype(x.dtype) for part in turned]
    return jnp.concatenate([*turned, x[..., 2 * half :]], axis=-1)


def padded(q: jax.Array, kv_heads: int, padded_group: int | None) -> jax.Array:
    """q with zeros behind the heads of each kv head."""
    batch, time, heads, dim = q.shape
    group = heads // kv_heads
    if padded_group is None or padded_group == group:
        return q
    q = q.reshape(batch, time, kv_heads, group, dim)
    q = jnp.pad(q, ((0, 0),) * 3 + ((0, padded_group - group), (0, 0)))
    return q.reshape(batch, time, kv_heads * padded_group, dim)


def put(
    into: jax.Array, what: jax.Array, slots: jax.Array, layer: jax.Array | None
) -> jax.Array:
    """`into` [B, S, ...] with `what` [B, T, ...] in its slots, those that there are."""
    if layer is not None:
        own = jax.lax.dynamic_index_in_dim(into, layer, keepdims=False)
        own = put(own, what, slots, None)
        return jax.lax.dynamic_update_index_in_dim(into, own, layer, 0)
    place = jnp.arange(into.shape[1], dtype=jnp.int32)
    names = slots[:, :, None] == place[None, None, :]  # [B, T, S]
    axes = (..., *[None] * (into.ndim - 2))
    token = jnp.argmax(names, axis=1)[axes]
    new = jnp.take_along_axis(what.astype(into.dtype), token, axis=1)
    return jnp.where(jnp.any(names, axis=1)[axes], new, into)


def rope_append(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    slots: jax.Array,
    caches: tuple[jax.Array, ...],
    *,
    positions: jax.Array | None,
    cos_sin: jax.Array | None,
    layer: jax.Array | None,
    q_scale: jax.Array | None,
    k_scale: jax.Array | None,
    zero_centered: bool,
    eps: float,
    padded_group: int | None,
    put=put,
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    """Arguments and results as in `api.rope_append`.

    The caches are of keys, of values and, with `positions`, of those; `put` is how one
    is written.
    """
    norm = {"zero_centered": zero_centered, "eps": eps}
    q = rotated(normed(q, q_scale, **norm), cos_sin)
    k = rotated(normed(k, k_scale, **norm), cos_sin)
    new = (k, v) if positions is None else (k, v, positions)
    after = tuple(put(x, y, slots, layer) for x, y in zip(caches, new, strict=True))
    return padded(q, k.shape[2], padded_group), after
