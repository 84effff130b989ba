"""Attention in blocks of queries, each against only the keys it may see."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from pallas_kernels.attention.config import Config


def _allowed(
    query: jax.Array,
    key: jax.Array,
    q_ids: jax.Array | None,
    kv_ids: jax.Array | None,
    *,
    causal: bool,
    window: int | None,
    by_position: bool,
) -> jax.Array | None:
    """Mask [B or 1, block, keys]; `None` where everything is allowed.

    Args:
      query, key: i32[B or 1, block] and i32[B or 1, keys], positions or indices.
      q_ids, kv_ids: segment ids of the same places.
      causal, window: as in `api.attention`.
      by_position: whether a negative key marks an empty slot.
    """
    terms = []
    if q_ids is not None and kv_ids is not None:
        terms.append(q_ids[:, :, None] == kv_ids[:, None, :])
        terms.append((q_ids != 0)[:, :, None])
    if by_position:
        terms.append((key >= 0)[:, None, :])
    if causal:
        terms.append(key[:, None, :] <= query[:, :, None])
    if window is not None:
        terms.append(query[:, :, None] - key[:, None, :] < window)
    return functools.reduce(jnp.logical_and, terms) if terms else None


@functools.partial(jax.checkpoint, static_argnums=(0, 1))
def _block(
    scale: float,
    logit_cap: float | None,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    allowed: jax.Array | None,
    sinks: jax.Array | None,
) -> jax.Array:
    """One block of queries; rematerialised in the backward.

    Args:
      scale, logit_cap: as in `api.attention`.
      q: [B, block, G, R, K], R query heads per kv head.
      k, v: [B, keys, G, K] and [B, keys, G, V].
      allowed: bool[B or 1, block, keys].
      sinks: f32[G, R].

    Returns:
      [B, block, G, R, V] of q's dtype.
    """
    scores = jnp.einsum("btgrk,bsgk->bgrts", q, k, preferred_element_type=jnp.float32)
    scores = scores * scale
    if logit_cap is not None:
        scores = logit_cap * jnp.tanh(scores / logit_cap)
    if allowed is not None:
        scores = jnp.where(allowed[:, None, None], scores, -jnp.inf)
    highest = jnp.max(jax.lax.stop_gradient(scores), axis=-1)  # [B, G, R, block]
    sink = None
    if sinks is not None:
        sink = sinks[None, :, :, None]
        highest = jnp.maximum(highest, jax.lax.stop_gradient(sink))
    # A row that may see nothing has -inf here, and -inf - -inf is no number.
    highest = jnp.where(jnp.isfinite(highest), highest, 0.0)
    weights = jnp.exp(scores - highest[..., None])
    total = jnp.sum(weights, axis=-1)
    if sink is not None:
        total = total + jnp.exp(sink - highest)
    total = jnp.where(total == 0.0, 1.0, total)
    o = jnp.einsum(
        "bgrts,bsgv->btgrv",
        weights.astype(v.dtype),
        v,
        preferred_element_type=jnp.float32,
    )
    o = o / jnp.transpose(total, (0, 3, 1, 2))[..., None]
    return o.astype(q.dtype)


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
    config: Config,
) -> jax.Array:
    """Arguments and results as in `api.attention`."""
    batch, time, heads, key_dim = q.shape
    length, kv_heads, value_dim = v.shape[1:]
    by_position = q_positions is not None
    if q_positions is None or kv_positions is None:
        q_positions = jnp.arange(time, dtype=jnp.int32)[None]
        kv_positions = jnp.arange(length, dtype=jnp.int32)[None]
    grouped = q.reshape(batch, time, kv_heads, heads // kv_heads, key_dim)
    if sinks is not None:
        sinks = sinks.astype(jnp.float32).reshape(kv_heads, heads // kv_heads)
    blocks = []
    for start in range(0, time, config.block):
        queries = slice(start, min(start + config.block, time))
        keys = slice(0, length)
        if not by_position:
            # The index form knows while tracing which keys no query here can see.
            low = 0 if window is None else max(0, start - window + 1)
            keys = slice(low, queries.stop if causal else length)
        allowed = _allowed(
            q_positions[:, queries],
            kv_positions[:, keys],
            None if q_segment_ids is None else q_segment_ids[:, queries],
            None if kv_segment_ids is None else kv_segment_ids[:, keys],
            causal=causal,
            window=window,
            by_position=by_position,
        )
        blocks.append(
            _block(
                scale,
                logit_cap,
                grouped[:, queries],
                k[:, keys],
                v[:, keys],
                allowed,
                sinks,
            )
        )
    o = blocks[0] if len(blocks) == 1 else jnp.concatenate(blocks, axis=1)
    return o.reshape(batch, time, heads, value_dim)
