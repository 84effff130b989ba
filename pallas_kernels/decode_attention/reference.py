"""Attention of new tokens over a cache with all scores at once, in f32."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.decode_attention.held import Sizes, allowed, in_rows, layer_of


def decode_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    lengths: jax.Array,
    *,
    sizes: Sizes,
    table: jax.Array | None,
    layer: jax.Array | None,
    window: int | None,
    sinks: jax.Array | None,
    logit_cap: float | None,
    scale: float,
    out_dtype: Any,
) -> tuple[jax.Array, jax.Array]:
    """Arguments and results as in `api.decode_attention`."""
    # [B, H, S, K]: query head h reads kv head h // (H / G).
    k, v = (
        jnp.repeat(
            in_rows(layer_of(x, layer), sizes, table).astype(jnp.float32),
            sizes.group,
            axis=1,
        )
        for x in (k, v)
    )
    mask = allowed(sizes, lengths, window, table)
    exact = jax.lax.Precision.HIGHEST
    scores = scale * jnp.einsum(
        "bthk,bhsk->bhts", q.astype(jnp.float32), k, precision=exact
    )
    if logit_cap is not None:
        scores = logit_cap * jnp.tanh(scores / logit_cap)
    scores = jnp.where(mask[:, None], scores, -jnp.inf)
    # A sink is one more key without a value; none is one that gets no weight.
    sink = jnp.full((sizes.heads,), -jnp.inf) if sinks is None else sinks
    sink = sink.astype(jnp.float32)[None, :, None]
    highest = jnp.maximum(jnp.max(scores, axis=-1), sink)  # [B, H, T]
    highest = jnp.where(jnp.isfinite(highest), highest, 0.0)
    weights = jnp.exp(scores - highest[..., None])
    total = jnp.sum(weights, axis=-1) + jnp.exp(sink - highest)
    lse = highest + jnp.log(total)  # -inf where nothing is seen
    weights = weights / jnp.where(total == 0.0, 1.0, total)[..., None]
    # What no query of the row sees may be anything, NaN among it.
    is_read = jnp.any(mask, axis=1)[:, None, :, None]
    v = jnp.where(is_read, v, 0.0)
    o = jnp.einsum("bhts,bhsk->bthk", weights, v, precision=exact)
    return o.astype(out_dtype), jnp.swapaxes(lse, 1, 2)
