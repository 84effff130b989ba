"""What of a cache a call reads: a layer's part, the pages of a row, the mask."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes:
    """Shapes of a call.

    Attributes:
      batch, time, heads, kv_heads, head_dim: B, T, H, G, K.
      length: S, tokens that a row has room for.
      page: tokens of a page, 0 for a cache without pages.
      pages: of the pool of one layer.
      layers: of the cache, 0 if its arrays are one layer's.
      heads_first: as for `decode_attention`.
    """

    batch: int
    time: int
    heads: int
    kv_heads: int
    head_dim: int
    length: int
    page: int
    pages: int
    layers: int
    heads_first: bool

    @property
    def group(self) -> int:
        """Query heads that read a kv head."""
        return self.heads // self.kv_heads


def real_heads(q: jax.Array, sizes: Sizes) -> jax.Array:
    """q [B, T, H, K] without what stands behind the heads of each kv head."""
    if q.shape[2] == sizes.heads:
        return q
    q = q.reshape(sizes.batch, sizes.time, sizes.kv_heads, -1, sizes.head_dim)
    q = q[:, :, :, : sizes.group]
    return q.reshape(sizes.batch, sizes.time, sizes.heads, sizes.head_dim)


def layer_of(x: jax.Array, layer: jax.Array | None) -> jax.Array:
    """One layer's keys or values."""
    if layer is None:
        return x
    return jax.lax.dynamic_index_in_dim(x, layer, keepdims=False)


def in_rows(x: jax.Array, sizes: Sizes, table: jax.Array | None) -> jax.Array:
    """Keys or values of one layer as [B, G, S, K]; where no page is, anything."""
    if table is not None:
        x = x[jnp.clip(table, 0, sizes.pages - 1)]  # [B, N, page, G, K]
        if not sizes.heads_first:
            x = jnp.swapaxes(x, 2, 3)
        x = jnp.swapaxes(x, 1, 2)  # [B, G, N, page, K]
        return x.reshape(sizes.batch, sizes.kv_heads, sizes.length, sizes.head_dim)
    return x if sizes.heads_first else jnp.swapaxes(x, 1, 2)


def allowed(
    sizes: Sizes,
    lengths: jax.Array,
    window: int | None,
    table: jax.Array | None,
) -> jax.Array:
    """bool[B, T, S], the tokens that each query sees."""
    time = jnp.arange(sizes.time, dtype=jnp.int32)
    token = jnp.arange(sizes.length, dtype=jnp.int32)[None, None, :]
    place = (lengths[:, None] - sizes.time + time[None, :])[:, :, None]  # [B, T, 1]
    mask = token <= place
    if window is not None:
        mask = mask & (place - token < window)
    if table is not None:
        is_held = (table >= 0) & (table < sizes.pages)
        mask = mask & jnp.repeat(is_held, sizes.page, axis=1)[:, None, :]
    return mask
