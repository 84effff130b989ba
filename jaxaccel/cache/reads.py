"""Which tokens a query reads, told from a cache's state; for reports, not for speed."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from jaxaccel.cache.full import DenseCacheConfig
from jaxaccel.cache.h2o import H2OCacheConfig
from jaxaccel.cache.layer_state import LayerState, ring_positions
from jaxaccel.cache.paged import PagedCacheConfig
from jaxaccel.cache.policy import CachePolicy, Selection
from jaxaccel.cache.quest import QuestCacheConfig
from jaxaccel.cache.shadowkv import ShadowKVCacheConfig
from jaxaccel.cache.snapkv import SnapKVCacheConfig
from jaxaccel.cache.streaming import StreamingCacheConfig


def tokens_read(
    policy: CachePolicy, state: LayerState, selection: Selection | None, total: int
) -> jax.Array:
    """The tokens that the last query read.

    Args:
      policy: the cache.
      state: of one layer, after `select`.
      selection: what `select` returned.
      total: tokens N to tell of, from the first on.

    Returns:
      bool[B, G, N]; G may be 1 where all kv heads read the same.

    Raises:
      NotImplementedError: the policy is of a kind that is not known here.
    """
    length = state["length"]
    token = jnp.arange(total, dtype=jnp.int32)[None, None, :]
    is_held = token < length[:, None, None]
    if isinstance(policy, DenseCacheConfig | PagedCacheConfig):
        return is_held
    if isinstance(policy, StreamingCacheConfig):
        first = (length - policy.window)[:, None, None]
        return is_held & ((token < policy.num_sinks) | (token >= first))
    if isinstance(policy, H2OCacheConfig):
        return _marked([state["positions"]], total)
    if isinstance(policy, SnapKVCacheConfig):
        ring = ring_positions(length, policy.window + policy.generated)
        ring = jnp.where(ring >= state["start"][:, None], ring, -1)[:, None]
        return _marked([state["positions"], ring], total)
    assert selection is not None or not isinstance(
        policy, QuestCacheConfig | ShadowKVCacheConfig
    )
    if isinstance(policy, QuestCacheConfig) and selection is not None:
        pages = _spread(selection, selection.ids * policy.page, policy.page)
        newest = token >= (length - policy.local_window)[:, None, None]
        return is_held & (_marked([pages], total) | newest)
    if isinstance(policy, ShadowKVCacheConfig) and selection is not None:
        return _shadowkv_reads(policy, state, selection, total) & is_held
    raise NotImplementedError(
        f"{type(policy).__name__}: what such caches read is not known here"
    )


def _shadowkv_reads(
    policy: ShadowKVCacheConfig, state: LayerState, selection: Selection, total: int
) -> jax.Array:
    """Chosen chunks, the prompt's outliers, and the ring.

    Outliers are the chunks of the prompt that may not be chosen; those of generated
    tokens are told as not read.
    """
    first = state["first"]  # [B, C]
    rows = jnp.arange(first.shape[0])[:, None, None]
    chosen = _spread(selection, first[rows, selection.ids], policy.chunk)
    number = jnp.arange(first.shape[1], dtype=jnp.int32)[None, None, :]
    before = (state["seen_start"] // policy.chunk)[:, None, None]
    outside = state["excluded"] & (number < before)
    starts = jnp.broadcast_to((number * policy.chunk), outside.shape)
    outliers = _spread(Selection(ids=starts, valid=outside), starts, policy.chunk)
    token = jnp.arange(total, dtype=jnp.int32)[None, None, :]
    in_ring = token >= state["seen_start"][:, None, None]
    return _marked([chosen, outliers], total) | in_ring


def _spread(selection: Selection, first: jax.Array, count: int) -> jax.Array:
    """Positions of units of `count` tokens from i32[B, G, N] on, -1 where invalid."""
    offset = jnp.arange(count, dtype=jnp.int32)[None, None, None, :]
    where = first[..., None] + offset
    where = jnp.where(selection.valid[..., None], where, -1)
    return where.reshape(*where.shape[:2], -1)


def _marked(positions: list[jax.Array], total: int) -> jax.Array:
    """bool[B, G, total] of positions i32[B, G, N], of which -1 is none."""

    def mark(where):
        batch, heads, _ = where.shape
        row = jnp.arange(batch)[:, None, None]
        head = jnp.arange(heads)[None, :, None]
        where = jnp.where(where >= 0, where, total)
        empty = jnp.zeros((batch, heads, total), bool)
        return empty.at[row, head, where].set(True, mode="drop")

    return functools.reduce(jnp.logical_or, map(mark, positions))
