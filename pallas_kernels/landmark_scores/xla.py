"""The weights as XLA runs them well: products of 16-bit values, sums in f32."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.landmark_scores.reference import of_layer, weights_of


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
    q = q.reshape(batch, groups, heads // groups, width)
    scores = scale * jnp.einsum(
        "bgrk,bgck->bgrc",
        q,
        of_layer(landmarks, layer).astype(q.dtype),
        preferred_element_type=jnp.float32,
    )
    if logit_cap is not None:
        scores = logit_cap * jnp.tanh(scores / logit_cap)
    return weights_of(scores, allowed)
