"""The weights as they are written: a softmax for each query head, then the largest."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def of_layer(array: jax.Array, layer: jax.Array | None) -> jax.Array:
    """One layer's array of those of all layers."""
    if layer is None:
        return array
    return jax.lax.dynamic_index_in_dim(array, layer, keepdims=False)


def landmark_scores(
    q: jax.Array,
    landmarks: jax.Array,
    allowed: jax.Array,
    *,
    scale: float,
    logit_cap: float | None,
    layer: jax.Array | None,
) -> tuple[jax.Array, jax.Array]:
    """Arguments and results as in `api.landmark_scores`."""
    batch, heads, width = q.shape
    groups = allowed.shape[1]
    q = q.astype(jnp.float32).reshape(batch, groups, heads // groups, width)
    landmarks = of_layer(landmarks, layer).astype(jnp.float32)
    scores = scale * jnp.einsum(
        "bgrk,bgck->bgrc", q, landmarks, precision=jax.lax.Precision.HIGHEST
    )
    if logit_cap is not None:
        scores = logit_cap * jnp.tanh(scores / logit_cap)
    return weights_of(scores, allowed)


def weights_of(scores: jax.Array, allowed: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Of scores f32[B, G, R, C], what `api.landmark_scores` returns."""
    scores = jnp.where(allowed[:, :, None, :], scores, -jnp.inf)
    lse = jax.nn.logsumexp(scores, axis=-1)  # [B, G, R]
    base = jnp.where(lse > -jnp.inf, lse, 0.0)
    weights = jnp.max(scores - base[..., None], axis=2)
    return weights, lse.reshape(lse.shape[0], -1)
