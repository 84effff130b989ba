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
from jaxaccel.data.batch import PackingMetadata, packing_metadata
from jaxaccel.decoding.layer_loop import put_part, scan_layers
from jaxaccel.nn.attention import PendingAttention
from jaxaccel.nn.moe import MoE


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class PendingTokens:
    """Tokens that `verify` read, of which `commit` keeps a prefix.

    Attributes:
      layers: the layers' caches: attention's with the tokens in them, all others as
        they were.
      mixers: what each mixer keeps to commit, one per position of the pattern, arrays
        with a leading [num_periods] axis; `None` for attention.
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
        mixed, pending = _verify_mixer(
            block.mixer, block.mixer_norm(x), meta, part, length
        )
        x = x + mixed
        h = block.mlp_norm(x)
        x = x + (block.mlp(h, meta)[0] if isinstance(block.mlp, MoE) else block.mlp(h))
        if isinstance(pending, PendingAttention):
            return x, pending.cache, None
        return x, None, pending

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
    for block, cache, kept in zip(
        model.layers, pending.layers, pending.mixers, strict=True
    ):
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


def _commit_state(block: Any, cache: Any, kept: Any, accepted: jax.Array):
    graphdef, state = nnx.split(block.mixer)

    def period(cache, sliced):
        index, state, pending = sliced
        part = _commit_mixer(nnx.merge(graphdef, state), pending, accepted)
        return put_part(cache, part, index), None

    periods = jnp.arange(jax.tree.leaves(cache)[0].shape[0])
    return jax.lax.scan(period, cache, (periods, state, kept))[0]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class _Rerun:
    """A mixer's call, to be made again with fewer tokens."""

    x: jax.Array
    meta: PackingMetadata
    cache: Any
    length: jax.Array


def _verify_mixer(mixer, x, meta, cache, length):
    if hasattr(mixer, "verify"):
        return mixer.verify(x, meta, cache, length)
    y, _ = mixer(x, meta, cache, length)
    return y, _Rerun(x=x, meta=meta, cache=cache, length=length)


def _commit_mixer(mixer, pending, accepted):
    if not isinstance(pending, _Rerun):
        return mixer.commit(pending, accepted)
    meta = pending.meta
    rank = jnp.cumsum(meta.is_real.astype(jnp.int32), axis=1)
    is_real = meta.is_real & (rank <= accepted[:, None])
    meta = dataclasses.replace(
        meta,
        is_real=is_real,
        is_first=meta.is_first & is_real,
        segment_ids=jnp.where(is_real, meta.segment_ids, 0),
    )
    return mixer(pending.x, meta, pending.cache, pending.length)[1]
