"""The selection as it is written: a stable sort, largest first."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def flushed(scores: jax.Array) -> jax.Array:
    """Scores with 0 for -0 and for what has no normal number."""
    return jnp.where(jnp.abs(scores) < jnp.finfo(jnp.float32).tiny, 0.0, scores)


def top_k_select(scores: jax.Array, k: int) -> jax.Array:
    """Arguments and result as in `api.top_k_select`."""
    count, scores = scores.shape[-1], flushed(scores)
    # What is never taken comes last: NaN sorts behind infinity.
    falling = jnp.where(scores > -jnp.inf, -scores, jnp.nan)
    order = jnp.argsort(falling, axis=-1, stable=True)[..., :k].astype(jnp.int32)
    taken = jnp.take_along_axis(scores, order, axis=-1) > -jnp.inf
    ids = jnp.sort(jnp.where(taken, order, count), axis=-1)
    return jnp.where(ids < count, ids, -1)
