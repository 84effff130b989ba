"""Attention of new queries: over what a cache chose, and over the prompt itself."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jaxaccel.cache.layer_state import AttentionSpec, LayerState, Tokens, by_head
from pallas_kernels.attention import attention, attention_with_lse
from pallas_kernels.decode_attention import decode_attention as _held_attention


def scores_of(q: jax.Array, k: jax.Array, spec: AttentionSpec) -> jax.Array:
    """Logits of queries against keys.

    Args:
      q: [B, T, H, K].
      k: [B, G, N, K].
      spec: the layer.

    Returns:
      f32[B, G, H / G, T, N], scaled and capped.
    """
    batch, time, heads, width = q.shape
    groups = k.shape[1]
    q = q.reshape(batch, time, groups, heads // groups, width)
    scores = spec.scale * jnp.einsum(
        "btgrk,bgnk->bgrtn", q, k.astype(q.dtype), preferred_element_type=jnp.float32
    )
    if spec.logit_cap is not None:
        scores = spec.logit_cap * jnp.tanh(scores / spec.logit_cap)
    return scores


def decode_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    valid: jax.Array,
    spec: AttentionSpec,
    sinks: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Attention of one query a row over a set of keys, whatever their order.

    What stands in invalid places is never used, not even multiplied by 0.

    Args:
      q: [B, 1, H, K].
      k: [B, G, N, K].
      v: [B, G, N, V].
      valid: bool[B, 1 or G, N].
      spec: the layer.
      sinks: f32[H] or `None`, as in `pallas_kernels.attention`.

    Returns:
      f32[B, 1, H, V], exactly 0 where nothing is valid, and f32[B, 1, H], the logarithm
      of the sum of exp(score), -inf there.
    """
    o, lse = _softmax_sum(scores_of(q, k, spec), v, valid[:, :, None, None, :], sinks)
    return o, lse


def held_attention(
    state: LayerState, tokens: Tokens, spec: AttentionSpec, table: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    """Attention of the newest token of each row over all that a cache holds.

    Keys and values are read where they are, several layers' too, and only as many as
    there are.

    Args:
      state: with k and v [B, G, S, K], or pages [P, G, page, K], and "length" i32[B],
        the newest token included.
      tokens: q [B, 1, H, K], of the cache's dtype.
      spec: the layer; `decode` names what runs.
      table: the pages of each row, i32[B, N], -1 for none, if there are pages.

    Returns:
      As `decode_attention`.
    """
    k, _ = state.place("k")
    v, _ = state.place("v")
    return _held_attention(
        *(tokens.q, k, v, state["length"]),
        table=table,
        layer=state.index,
        heads_first=True,
        sinks=tokens.sinks,
        logit_cap=spec.logit_cap,
        scale=spec.scale,
        out_dtype=jnp.float32,
        implementation=spec.decode,
    )


def _softmax_sum(
    scores: jax.Array, v: jax.Array, valid: jax.Array, sinks: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    """Scores f32[B, G, R, T, N], v [B, G, N, V], valid bool of 5 axes.

    Returns:
      f32[B, T, H, V] and f32[B, T, H].
    """
    batch, groups, repeats, time, _ = scores.shape
    scores = jnp.where(valid, scores, -jnp.inf)
    largest = jnp.max(scores, axis=-1, initial=-jnp.inf)  # [B, G, R, T]
    if sinks is not None:
        sinks = sinks.astype(jnp.float32).reshape(1, groups, repeats, 1)
        largest = jnp.maximum(largest, sinks)
    base = jnp.where(jnp.isfinite(largest), largest, 0.0)
    p = jnp.exp(scores - base[..., None])  # exactly 0 where masked
    total = jnp.sum(p, axis=-1)
    if sinks is not None:
        total = total + jnp.exp(sinks - base)
    has_value = jnp.any(valid, axis=(2, 3))[..., None]  # [B, 1 or G, N, 1]
    v = jnp.where(has_value, v, jnp.zeros((), v.dtype)).astype(jnp.float32)
    o = jnp.einsum("bgrtn,bgnv->bgrtv", p, v)
    o = o / jnp.where(total > 0, total, 1.0)[..., None]
    lse = jnp.where(total > 0, base + jnp.log(total), -jnp.inf)
    o = jnp.transpose(o, (0, 3, 1, 2, 4)).reshape(batch, time, -1, v.shape[-1])
    return o, jnp.transpose(lse, (0, 3, 1, 2)).reshape(batch, time, -1)


def merge(
    o: jax.Array, lse: jax.Array, other_o: jax.Array, other_lse: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Joins attention over two disjoint sets of keys.

    Args:
      o, other_o: f32[B, T, H, V].
      lse, other_lse: f32[B, T, H], -inf for an empty set.

    Returns:
      Both as if the sets had been one.
    """
    largest = jnp.maximum(lse, other_lse)
    base = jnp.where(jnp.isfinite(largest), largest, 0.0)
    a, b = jnp.exp(lse - base), jnp.exp(other_lse - base)
    total = jnp.where(a + b > 0, a + b, 1.0)
    merged = (a[..., None] * o + b[..., None] * other_o) / total[..., None]
    return merged, jnp.where(a + b > 0, base + jnp.log(total), -jnp.inf)


def prompt_attention(
    tokens: Tokens,
    spec: AttentionSpec,
    *,
    budget: int | None = None,
    num_sinks: int = 0,
    move_sinks: bool = False,
    implementation: Any = None,
) -> jax.Array:
    """Causal attention of a prompt over itself.

    Args:
      tokens: the prompt, padded behind.
      spec: the layer.
      budget: tokens that a query sees: the first `num_sinks` of its row, and the
        newest for the rest; `None` sees all before it.
      num_sinks: see `budget`; without it, unused.
      move_sinks: what `StreamingCacheConfig.move_sinks` is.
      implementation: of `pallas_kernels.attention`.

    Returns:
      [B, T, H, K] in q's dtype.

    Source: StreamingLLM (arXiv 2309.17453) for the budget.
    """
    ids = tokens.is_real.astype(jnp.int32)
    options: dict[str, Any] = {
        "q_segment_ids": ids,
        "kv_segment_ids": ids,
        "causal": True,
        "sinks": tokens.sinks,
        "logit_cap": spec.logit_cap,
        "scale": spec.scale,
        "implementation": implementation,
    }
    if budget is None:
        return attention(tokens.q, tokens.k, tokens.v, **options)
    window = budget - num_sinks
    o, lse = attention_with_lse(tokens.q, tokens.k, tokens.v, window=window, **options)
    if num_sinks == 0:
        return o
    # Real tokens have the positions 0, 1, ... in their row.
    first_k, first_v = by_head(tokens.k)[:, :, :num_sinks], tokens.v[:, :num_sinks]
    q = tokens.q
    behind = jnp.maximum(tokens.positions - (budget - 1), 0)
    if move_sinks and spec.rotate is not None:
        # Only the distance counts: moving the query back is moving the sinks forth.
        q = spec.rotate(tokens.q_pre, tokens.positions - behind)
    slot = jnp.arange(first_k.shape[2], dtype=jnp.int32)[None, None, :]
    seen = (tokens.positions[:, :, None] - slot >= window) & tokens.is_real[..., None]
    seen = seen & (slot < tokens.count[:, None, None])
    far, far_lse = _softmax_sum(
        scores_of(q, first_k, spec), by_head(first_v), seen[:, None, None], None
    )
    merged, _ = merge(o.astype(jnp.float32), lse, far, far_lse)
    return merged.astype(tokens.q.dtype)
