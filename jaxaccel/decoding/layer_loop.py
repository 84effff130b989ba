"""One pass through a decoder's layers that updates the caches where they are.

`Decoder` scans over its layers with the caches as inputs and outputs of the scan, so
that each call makes new arrays for all of them. Here the scan carries the caches and
writes a layer's tokens into them: inside of a loop over tokens, or with the cache
donated, nothing is copied. The values are the same.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxaccel.cache.decoder import DecoderCache, LayerCache
from jaxaccel.cache.dense import KVCache, KVCacheOfLayer
from jaxaccel.cache.plan import PolicyCache
from jaxaccel.cache.recurrent import RecurrentCacheOfLayer
from jaxaccel.data.batch import PackingMetadata, packing_metadata
from jaxaccel.nn import few_rows
from jaxaccel.nn.engram_memory import Reading


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

    memory = begin_reading(model, tokens, meta, cache)
    x, layers, _ = scan_layers(model, model.embed(tokens), cache.layers, layer, memory)
    read = jnp.sum(meta.is_real, axis=1, dtype=jnp.int32)
    after = DecoderCache(layers=layers, length=cache.length + read)
    return model.final_norm(x), after if memory is None else memory.cache(after)


def begin_reading(
    model: Any, tokens: jax.Array, meta: PackingMetadata, cache: DecoderCache
) -> Reading | None:
    """What adds a decoder's memory to its layers' inputs, `None` without a memory."""
    if model.config.engram is None:
        return None
    return model.memory.read(tokens, meta, cache)


def scan_layers(
    model: Any,
    x: jax.Array,
    caches: tuple[LayerCache, ...],
    layer: LayerFn,
    memory: Reading | None,
) -> tuple[jax.Array, tuple[LayerCache, ...], tuple[Any, ...]]:
    """Runs every layer in order, the caches being carried.

    Args:
      model: a `Decoder`.
      x: [B, T, D], embedded tokens.
      caches: as in `DecoderCache.layers`.
      layer: what a layer does with x and its part of the cache, a `KVCacheOfLayer`, a
        `PolicyCacheOfLayer` or a `RecurrentCacheOfLayer`, `None` in a layer without a
        mixer; it may return `None` for a part that stays.
      memory: of `begin_reading`; it stands in front of runs.

    Returns:
      x, the caches, and what `layer` kept: one value per position with a mixer, its
      arrays with a leading axis of the layers there.
    """
    first, depth, remaining = 0, 0, iter(caches)
    chain = few_rows.named(model.config.implementation, "gemv_chain")
    after, kept = [], []
    for run in model.config.runs:
        if memory is not None:
            x = memory.add(depth, x)
        depth += len(run.kinds) * run.repeats
        blocks = model.layers[first : first + len(run.kinds)]
        own = tuple(
            None if block.mixer is None else next(remaining) for block in blocks
        )
        x, own, keep = _scan_run(blocks, run.repeats, x, own, layer, chain)
        mixing = [i for i, block in enumerate(blocks) if block.mixer is not None]
        after += [own[i] for i in mixing]
        kept += [keep[i] for i in mixing]
        first += len(run.kinds)
    return x, tuple(after), tuple(kept)


def _scan_run(
    blocks: Sequence[Any],
    repeats: int,
    x: jax.Array,
    caches: tuple[LayerCache | None, ...],
    layer: LayerFn,
    chain: Any,
) -> tuple[jax.Array, tuple[LayerCache | None, ...], tuple[Any, ...]]:
    """`scan_layers` of one run of layers, products of neighbours in one `chain`."""
    parts = [nnx.split(block) for block in blocks]
    states = tuple(state for _, state in parts)

    def period(carry, sliced, first=0):
        x, caches = carry
        if few_rows.applies(chain, x):
            x = few_rows.Stream(x, chain)
        index, states = sliced
        after, kept = [], []
        for (graphdef, _), state, cache in zip(parts, states, caches, strict=True):
            block = nnx.merge(graphdef, state)
            part = None if cache is None else layer_part(cache, index, first)
            if isinstance(x, few_rows.Stream) and repeats == 1:
                x.foresee((block.mixer, block.mlp))
            x, part, keep = layer(block, x, part)
            after.append(put_part(cache, part))
            kept.append(keep)
        return (few_rows.settled(x), tuple(after)), tuple(kept)

    ends = {end for c in caches if isinstance(c, PolicyCache) for end in c.ends}
    cuts = sorted({0, repeats, *ends})
    if len(cuts) == 2:
        sliced = (jnp.arange(repeats), states)
        (x, caches), kept = jax.lax.scan(period, (x, caches), sliced)
        return x, caches, kept
    # Layers with different caches are different programs; their parameters stay in one
    # array, of which a slice would be a copy.
    carry, kept = (x, caches), []
    for first, end in itertools.pairwise(cuts):

        def indexed(carry, index, first=first):
            own = jax.tree.map(
                lambda w: jax.lax.dynamic_index_in_dim(w, index, keepdims=False), states
            )
            return period(carry, (index, own), first)

        carry, keep = jax.lax.scan(indexed, carry, jnp.arange(first, end))
        kept.append(keep)
    kept = jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *kept)
    x, caches = carry
    return x, caches, kept


def layer_part(cache: LayerCache, index: jax.Array, first: int = 0) -> Any:
    """One layer's part of the cache of its position, as `scan_layers` hands it out.

    Args:
      cache: of the position.
      index: i32[], the layer.
      first: where a `PolicyCache` has several policies, a layer with the same one.
    """
    if isinstance(cache, PolicyCache):
        return cache.layer(index, first)
    if isinstance(cache, KVCache):
        return KVCacheOfLayer(stacked=cache, index=index)
    return RecurrentCacheOfLayer(stacked=cache, index=index)


def put_part(cache: LayerCache | None, part: Any) -> Any:
    """The cache of a position after a layer's part of it; `None` leaves it as it is."""
    return cache if part is None else part.stacked
