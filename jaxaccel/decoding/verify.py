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
from jaxaccel.decoding.layer_loop import scan_layers
from jaxaccel.nn.attention import PendingAttention
from jaxaccel.nn.moe import MoE


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
    """

    layers: tuple[LayerCache, ...]
    mixers: tuple[Any, ...]
    length: jax.Array


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
            h = block.mixer_norm(x)
            mixed, pending = block.mixer.verify(h, meta, part, length)
            x = x + mixed
        if block.mlp is not None:
            h = block.mlp_norm(x)
            is_moe = isinstance(block.mlp, MoE)
            x = x + (block.mlp(h, meta)[0] if is_moe else block.mlp(h))
        if pending is None:
            return x, None, None
        if isinstance(pending, PendingAttention):
            return x, pending.cache, None
        # The state is read again to commit: it stays, and is not kept a second time.
        return x, None, pending.tokens

    x, layers, mixers = scan_layers(model, model.embed(tokens), cache.layers, layer)
    pending = PendingTokens(layers=layers, mixers=mixers, length=length)
    return model.final_norm(x), pending


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
    return DecoderCache(layers=tuple(layers), length=pending.length + accepted)


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
