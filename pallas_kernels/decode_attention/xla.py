"""Attention of new tokens over a cache as two products of all its tokens."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels._common.chunked import product
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
    k, v = (in_rows(layer_of(x, layer), sizes, table) for x in (k, v))
    groups = (sizes.kv_heads, sizes.group)
    q = q.reshape(sizes.batch, sizes.time, *groups, sizes.head_dim)
    dtype = jnp.dtype(k.dtype)
    scores = scale * product("btgrk,bgsk->bgrts", q, k, dtype=dtype)
    if logit_cap is not None:
        scores = logit_cap * jnp.tanh(scores / logit_cap)
    mask = allowed(sizes, lengths, window, table)
    scores = jnp.where(mask[:, None, None], scores, -jnp.inf)
    highest = jnp.max(scores, axis=-1)  # [B, G, R, T]
    if sinks is not None:
        sinks = sinks.astype(jnp.float32).reshape(1, *groups, 1)
        highest = jnp.maximum(highest, sinks)
    highest = jnp.where(jnp.isfinite(highest), highest, 0.0)
    weights = jnp.exp(scores - highest[..., None])
    total = jnp.sum(weights, axis=-1)
    if sinks is not None:
        total = total + jnp.exp(sinks - highest)
    lse = highest + jnp.log(total)  # -inf where nothing is seen
    # What no query of the row sees may be anything, NaN among it.
    is_read = jnp.any(mask, axis=1)[:, None, :, None]
    v = jnp.where(is_read, v, jnp.zeros((), v.dtype))
    o = product("bgrts,bgsk->bgrtk", weights, v, dtype=dtype)
    o = o / jnp.where(total == 0.0, 1.0, total)[..., None]

    def by_token(x):  # [B, G, R, T, ...] -> [B, T, H, ...]
        x = jnp.moveaxis(x, 3, 1)
        return x.reshape(sizes.batch, sizes.time, sizes.heads, *x.shape[4:])

    return by_token(o).astype(out_dtype), by_token(lse)
