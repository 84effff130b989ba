"""One pass through a decoder's layers that updates the caches where they are.

`Decoder` scans over its layers with the caches as inputs and outputs of the scan, so
that each call makes new arrays for all of them. Here the scan carries the caches and
writes a layer's tokens into them: inside of a loop over tokens, or with the cache
donated, nothing is copied. The values are the same.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxaccel.cache.decoder import DecoderCache, LayerCache
from jaxaccel.cache.dense import KVCache, KVCacheOfLayer
from jaxaccel.cache.recurrent import RecurrentCacheOfLayer
from jaxaccel.data.batch import packing_metadata


# (block, x, its part of the cache) -> (x, that part anew, what to keep of the layer).
LayerFn = Callable[[Any, jax.Array, Any], tuple[jax.Array, Any, Any]]


def read_tokens(
    model: Any, tokens: jax.Array, segments: jax.Array, cache: DecoderCache
) -> tuple[jax.Array, DecoderCache]:
    """Reads tokens as `Decoder.__call__` with a cache does.

    Args:
      model: a `Decoder`.
      tokens: i32[B, T].
      segments: i32[B, T], 1 on real tokens, 0 on padding, which leaves a row as it is.
      cache: what earlier calls read.

    Returns:
      [B, T, D] after the final norm, and the cache with the tokens in it.
    """
    batch, time = tokens.shape
    meta = packing_metadata(
        (batch, time), segment_ids=segments, cached_length=cache.length
    )

    def layer(block: Any, x: jax.Array, part: Any):
        x, part, _ = block(x, meta, part, cache.length)
        return x, part, None

    x, layers, _ = scan_layers(model, model.embed(tokens), cache.layers, layer)
    read = jnp.sum(meta.is_real, axis=1, dtype=jnp.int32)
    return model.final_norm(x), DecoderCache(layers=layers, length=cache.length + read)


def scan_layers(
    model: Any, x: jax.Array, caches: tuple[LayerCache, ...], layer: LayerFn
) -> tuple[jax.Array, tuple[LayerCache, ...], tuple[Any, ...]]:
    """Runs every layer in order, the caches being carried.

    Args:
      model: a `Decoder`.
      x: [B, T, D], embedded tokens.
      caches: as in `DecoderCache.layers`.
      layer: what a layer does with x and its part of the cache, a `KVCacheOfLayer` or
        a `RecurrentCacheOfLayer`; it may return `None` for a part that stays.

    Returns:
      x, the caches, and what `layer` kept: one value per position of the pattern, its
      arrays with a leading [num_periods] axis.
    """
    parts = [nnx.split(block) for block in model.layers]

    def period(carry, sliced):
        x, caches = carry
        index, states = sliced
        after, kept = [], []
        for (graphdef, _), state, cache in zip(parts, states, caches, strict=True):
            block = nnx.merge(graphdef, state)
            x, part, keep = layer(block, x, layer_part(cache, index))
            after.append(put_part(cache, part))
            kept.append(keep)
        return (x, tuple(after)), tuple(kept)

    periods = jnp.arange(model.config.num_periods)
    states = tuple(state for _, state in parts)
    (x, caches), kept = jax.lax.scan(period, (x, caches), (periods, states))
    return x, caches, kept


def layer_part(cache: LayerCache, index: jax.Array) -> Any:
    """One layer's part of the cache of its position, as `scan_layers` hands it out."""
    if isinstance(cache, KVCache):
        return KVCacheOfLayer(stacked=cache, index=index)
    return RecurrentCacheOfLayer(stacked=cache, index=index)


def put_part(cache: LayerCache, part: Any) -> Any:
    """The cache of a position after a layer's part of it; `None` leaves it as it is."""
    return cache if part is None else part.stacked
