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
    is_prefix: jax.Array | None,
) -> jax.Array | None:
    """Mask [B or 1, block, keys]; `None` where everything is allowed.

    Args:
      query, key: i32[B or 1, block] and i32[B or 1, keys], positions or indices.
      q_ids, kv_ids: segment ids of the same places.
      causal, window: as in `api.attention`.
      by_position: whether a negative key marks an empty slot.
      is_prefix: bool[B, keys], keys that `causal` does not hide.
    """
    terms = []
    if q_ids is not None and kv_ids is not None:
        terms.append(q_ids[:, :, None] == kv_ids[:, None, :])
        terms.append((q_ids != 0)[:, :, None])
    if by_position:
        terms.append((key >= 0)[:, None, :])
    if causal:
        earlier = key[:, None, :] <= query[:, :, None]
        if is_prefix is not None:
            earlier = earlier | is_prefix[:, None, :]
        terms.append(earlier)
    if window is not None:
        terms.append(query[:, :, None] - key[:, None, :] < window)
    if not terms:
        return None
    # Written once: fused into the scores, it would be computed again for each head.
    return jax.lax.optimization_barrier(functools.reduce(jnp.logical_and, terms))


def _product(subscripts: str, a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.einsum(subscripts, a, b, preferred_element_type=jnp.float32)


def _scores(
    scale: float,
    logit_cap: float | None,
    q: jax.Array,
    k: jax.Array,
    allowed: jax.Array | None,
) -> tuple[jax.Array, jax.Array]:
    """f32[B, G, R, block, keys] after the cap: masked with -inf, and unmasked."""
    scores = scale * _product("btgrk,bsgk->bgrts", q, k)
    if logit_cap is not None:
        scores = logit_cap * jnp.tanh(scores / logit_cap)
    if allowed is None:
        return scores, scores
    return jnp.where(allowed[:, None, None], scores, -jnp.inf), scores


def _softmax_block(
    scale: float,
    logit_cap: float | None,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    allowed: jax.Array | None,
    sinks: jax.Array | None,
) -> tuple[jax.Array, jax.Array]:
    """Arguments and results of `_block`."""
    scores, _ = _scores(scale, logit_cap, q, k, allowed)
    highest = jnp.max(scores, axis=-1)
    if sinks is not None:
        highest = jnp.maximum(highest, sinks[None, :, :, None])
    # A row that may see nothing has -inf here, and -inf - -inf is no number.
    highest = jnp.where(jnp.isfinite(highest), highest, 0.0)
    weights = jnp.exp(scores - highest[..., None])
    total = jnp.sum(weights, axis=-1)
    if sinks is not None:
        total = total + jnp.exp(sinks[None, :, :, None] - highest)
    log_total = highest + jnp.log(total)  # -inf for a row that may see nothing
    total = jnp.where(total == 0.0, 1.0, total)
    o = _product("bgrts,bsgv->btgrv", weights.astype(v.dtype), v)
    o = o / jnp.transpose(total, (0, 3, 1, 2))[..., None]
    return o.astype(q.dtype), log_total


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _block(
    scale: float,
    logit_cap: float | None,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    allowed: jax.Array | None,
    sinks: jax.Array | None,
) -> tuple[jax.Array, jax.Array]:
    """One block of queries; the backward computes its scores again.

    Args:
      scale, logit_cap: as in `api.attention`.
      q: [B, block, G, R, K], R query heads per kv head.
      k, v: [B, keys, G, K] and [B, keys, G, V].
      allowed: bool[B or 1, block, keys].
      sinks: f32[G, R].

    Returns:
      [B, block, G, R, V] of q's dtype; the logarithm of each row's normaliser,
      f32[B, G, R, block], -inf for a row that may see nothing.
    """
    return _softmax_block(scale, logit_cap, q, k, v, allowed, sinks)


def _block_forward(scale, logit_cap, q, k, v, allowed, sinks):
    o, log_total = _softmax_block(scale, logit_cap, q, k, v, allowed, sinks)
    return (o, log_total), (q, k, v, allowed, sinks, o, log_total)


def _block_backward(scale, logit_cap, residuals, cotangents):
    q, k, v, allowed, sinks, o, log_total = residuals
    do, d_log_total = cotangents
    log_total = jnp.where(jnp.isfinite(log_total), log_total, 0.0)
    masked, scores = _scores(scale, logit_cap, q, k, allowed)
    weights = jnp.exp(masked - log_total[..., None])
    # Each row of the softmax has d_scores = p (dp - sum of p dp), and that sum is
    # do . o, over V instead of over the keys. The logarithm has p as its gradient.
    row = jnp.einsum("btgrv,btgrv->bgrt", do.astype(jnp.float32), o.astype(jnp.float32))
    row = row - d_log_total
    d_weights = _product("btgrv,bsgv->bgrts", do, v)
    d_scores = weights * (d_weights - row[..., None])
    if logit_cap is not None:
        d_scores = d_scores * (1.0 - jnp.square(scores / logit_cap))
    d_scores = (scale * d_scores).astype(q.dtype)
    dq = _product("bgrts,bsgk->btgrk", d_scores, k).astype(q.dtype)
    dk = _product("bgrts,btgrk->bsgk", d_scores, q).astype(k.dtype)
    dv = _product("bgrts,btgrv->bsgv", weights.astype(do.dtype), do).astype(v.dtype)
    d_sinks = None
    if sinks is not None:
        to_sink = jnp.exp(sinks[None, :, :, None] - log_total)
        d_sinks = -jnp.sum(to_sink * row, axis=(0, 3))
    return dq, dk, dv, None, d_sinks


_block.defvjp(_block_forward, _block_backward)


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
    config: Config,
) -> tuple[jax.Array, jax.Array]:
    """Arguments and results as in `api.attention_with_lse`."""
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
            hides_later = causal and is_prefix is None
            keys = slice(low, queries.stop if hides_later else length)
        allowed = _allowed(
            q_positions[:, queries],
            kv_positions[:, keys],
            None if q_segment_ids is None else q_segment_ids[:, queries],
            None if kv_segment_ids is None else kv_segment_ids[:, keys],
            causal=causal,
            window=window,
            by_position=by_position,
            is_prefix=None if is_prefix is None else is_prefix[:, keys],
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

    def whole(parts):
        return parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=1)

    o, lse = zip(*blocks, strict=True)
    lse = whole([jnp.transpose(x, (0, 3, 1, 2)) for x in lse])  # [B, T, G, R]
    o = whole(o).reshape(batch, time, heads, value_dim)
    return o, lse.reshape(batch, time, heads)
