"""Reading drafted tokens in one pass and keeping a prefix of them.

`verify` runs all layers over T tokens as any call with a cache does; `commit` then
makes the cache what it would be if only the first tokens of each row had been read.
A mixer offers the same two calls for its own cache.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxaccel.cache.decoder import DecoderCache, LayerCache
from jaxaccel.cache.recurrent import PendingRecurrent, RecurrentCacheOfLayer
from jaxaccel.data.batch import packing_metadata
from jaxaccel.decoding.layer_loop import begin_reading, scan_layers
from jaxaccel.nn import few_rows
from jaxaccel.nn.attention import PendingAttention
from jaxaccel.nn.engram import EngramState
from jaxaccel.nn.engram_memory import MemoryCache


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class PendingMemory:
    """What a memory read, of which `commit` keeps a prefix.

    Attributes:
      tokens: i32[B, T].
      count: i32[B], the real ones among them.
      history: i32[B, N - 1], as it was before.
      conv: as `EngramState.conv` after all real tokens, T longer: it still has all that
        the state after any prefix of them holds.
    """

    tokens: jax.Array
    count: jax.Array
    history: jax.Array
    conv: tuple[jax.Array, ...]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class PendingTokens:
    """Tokens that `verify` read, of which `commit` keeps a prefix.

    Attributes:
      layers: the layers' caches: attention's with the tokens in them, all others as
        they were.
      mixers: what recurrent layers would write, one per position with a mixer, arrays
        with a leading axis of the layers there; `None` for attention.
      length: i32[B], tokens read before.
      memory: of a model with an n-gram memory, else `None`.
    """

    layers: tuple[LayerCache, ...]
    mixers: tuple[Any, ...]
    length: jax.Array
    memory: PendingMemory | None


def verify(
    model: Any, tokens: jax.Array, segments: jax.Array, cache: DecoderCache
) -> tuple[jax.Array, PendingTokens]:
    """Reads drafts; rows may turn out to keep different numbers of them.

    Args:
      model: a `Decoder`.
      tokens: i32[B, T], behind what the cache holds; attention caches need T free
        slots, however many are kept.
      segments: i32[B, T], 1 on real tokens, 0 on padding behind them.
      cache: what was read before.

    Returns:
      [B, T, D] after the final norm, and what `commit` takes.
    """
    batch, time = tokens.shape
    length = cache.length
    meta = packing_metadata((batch, time), segment_ids=segments, cached_length=length)

    def layer(block: Any, x: jax.Array, part: Any):
        pending = None
        if block.mixer is not None:
            if few_rows.adds_itself(block.mixer, x, decodes=True):
                x, pending = block.mixer.verify(x, meta, part, length, block.mixer_norm)
            else:
                x = few_rows.settled(x)
                h = block.mixer_norm(x)
                mixed, pending = block.mixer.verify(h, meta, part, length)
                x = x + mixed
        if block.mlp is not None:
            x, _ = block.feed_forward(x, meta, decodes=True)
        if pending is None:
            return x, None, None
        if isinstance(pending, PendingAttention):
            return x, pending.cache, None
        # The state is read again to commit: it stays, and is not kept a second time.
        return x, None, pending.tokens

    reading = begin_reading(model, tokens, meta, _with_room(cache, time))
    embedded = model.embed(tokens)
    x, layers, mixers = scan_layers(model, embedded, cache.layers, layer, reading)
    memory = None
    if reading is not None and isinstance(cache, MemoryCache):
        memory = PendingMemory(
            tokens=tokens,
            count=jnp.sum(meta.is_real, axis=1, dtype=jnp.int32),
            history=cache.memory.history,
            conv=reading.cache(cache).memory.conv,
        )
    pending = PendingTokens(layers=layers, mixers=mixers, length=length, memory=memory)
    return model.final_norm(x), pending


def _with_room(cache: DecoderCache, time: int) -> DecoderCache:
    """The cache with T places in front of a memory's convolution inputs.

    A convolution reaches its own width back, so what stands there is never read.
    """
    if not isinstance(cache, MemoryCache):
        return cache
    room = ((0, 0), (time, 0), (0, 0), (0, 0))
    conv = tuple(jnp.pad(x, room) for x in cache.memory.conv)
    return dataclasses.replace(
        cache, memory=dataclasses.replace(cache.memory, conv=conv)
    )


def commit(model: Any, pending: PendingTokens, accepted: jax.Array) -> DecoderCache:
    """Keeps the first tokens of each row.

    Args:
      model: the decoder that verified.
      pending: what `verify` returned.
      accepted: i32[B], tokens to keep, from 0 to the real ones that were read.

    Returns:
      The cache as if the others had never been read.
    """
    layers = []
    mixing = [block for block in model.layers if block.mixer is not None]
    for block, cache, kept in zip(mixing, pending.layers, pending.mixers, strict=True):
        if kept is None:
            layers.append(_commit_attention(block, cache, pending.length, accepted))
        else:
            layers.append(_commit_state(block, cache, kept, accepted))
    after = DecoderCache(layers=tuple(layers), length=pending.length + accepted)
    if pending.memory is None:
        return after
    memory = _commit_memory(model, pending.memory, pending.length, accepted)
    return MemoryCache(layers=after.layers, length=after.length, memory=memory)


def _commit_memory(
    model: Any, pending: PendingMemory, length: jax.Array, accepted: jax.Array
) -> EngramState:
    batch, time = pending.tokens.shape
    places = jnp.arange(time, dtype=jnp.int32)
    segments = (places[None, :] < accepted[:, None]).astype(jnp.int32)
    meta = packing_metadata((batch, time), segment_ids=segments, cached_length=length)
    _, history = model.memory.ngrams(pending.tokens, meta, pending.history)
    first = time - (pending.count - accepted)  # [B]

    def before(x: jax.Array) -> jax.Array:
        kept = jnp.arange(x.shape[1] - time, dtype=jnp.int32)
        index = first[:, None] + kept[None, :]
        return jnp.take_along_axis(x, index[:, :, None, None], axis=1)

    return EngramState(history=history, conv=tuple(map(before, pending.conv)))


def _commit_attention(block: Any, cache: Any, length: jax.Array, accepted: jax.Array):
    def one(cache):
        pending = PendingAttention(cache=cache, length=length)
        return block.mixer.commit(pending, accepted)

    return jax.vmap(one)(cache)


def _commit_state(block: Any, cache: Any, tokens: Any, accepted: jax.Array):
    graphdef, state = nnx.split(block.mixer)

    def period(cache, sliced):
        index, state, tokens = sliced
        part = RecurrentCacheOfLayer(stacked=cache, index=index)
        pending = PendingRecurrent(cache=part.row, tokens=tokens)
        row = nnx.merge(graphdef, state).commit(pending, accepted)
        return part.replace(row).stacked, None

    periods = jnp.arange(jax.tree.leaves(cache)[0].shape[0])
    return jax.lax.scan(period, cache, (periods, state, tokens))[0]
