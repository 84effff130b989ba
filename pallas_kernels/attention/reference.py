"""Attention with the whole score matrix and mask, in f32."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    q_segment_ids: jax.Array | None,
    kv_segment_ids: jax.Array | None,
    q_positions: jax.Array | None,
    kv_positions: jax.Array | None,
    causal: bool,
    window: int | None,
    sinks: jax.Array | None,
    logit_cap: float | None,
    scale: float,
    is_prefix: jax.Array | None,
) -> tuple[jax.Array, jax.Array]:
    """Arguments and results as in `api.attention_with_lse`."""
    batch, time, heads, _ = q.shape
    length, kv_heads = k.shape[1:3]
    # [B, S, H, K]: query head h reads kv head h // (H / G).
    k, v = (
        jnp.repeat(x.astype(jnp.float32), heads // kv_heads, axis=2) for x in (k, v)
    )
    scores = scale * jnp.einsum("bthk,bshk->bhts", q.astype(jnp.float32), k)
    if logit_cap is not None:
        scores = logit_cap * jnp.tanh(scores / logit_cap)

    allowed = jnp.ones((batch, time, length), bool)
    if q_segment_ids is not None and kv_segment_ids is not None:
        allowed &= q_segment_ids[:, :, None] == kv_segment_ids[:, None, :]
        allowed &= (q_segment_ids != 0)[:, :, None]
    if q_positions is None or kv_positions is None:
        query, key = jnp.arange(time)[None, :, None], jnp.arange(length)[None, None, :]
    else:
        query, key = q_positions[:, :, None], kv_positions[:, None, :]
        allowed &= key >= 0
    if causal:
        earlier = key <= query
        if is_prefix is not None:
            earlier = earlier | is_prefix[:, None, :]
        allowed &= earlier
    if window is not None:
        allowed &= query - key < window
    allowed = allowed[:, None]  # [B, 1, T, S]

    scores = jnp.where(allowed, scores, -jnp.inf)
    highest = jnp.max(scores, axis=-1, keepdims=True)
    # A sink is one more key without a value; none is one that gets no weight.
    sink = jnp.full((heads,), -jnp.inf) if sinks is None else sinks
    sink = sink.astype(jnp.float32)[None, :, None, None]
    highest = jnp.maximum(highest, sink)
    highest = jnp.where(jnp.isfinite(highest), highest, 0.0)
    weights = jnp.exp(scores - highest)
    total = jnp.sum(weights, axis=-1, keepdims=True) + jnp.exp(sink - highest)
    nothing = total == 0.0
    total = jnp.where(nothing, 1.0, total)
    lse = jnp.where(nothing, -jnp.inf, highest + jnp.log(total))[..., 0]
    weights = weights / total
    o = jnp.einsum("bhts,bshv->bthv", weights, v).astype(q.dtype)
    return o, jnp.swapaxes(lse, 1, 2)
