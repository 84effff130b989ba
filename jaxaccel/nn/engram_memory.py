"""All of a decoder's Engram layers: one hash, and what each layer adds."""

from __future__ import annotations

import dataclasses
from typing import Any, Self

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from jaxaccel.cache.decoder import DecoderCache
from jaxaccel.data.batch import PackingMetadata, packing_metadata
from jaxaccel.nn.engram import Engram, EngramState, NGramHash, init_engram_state
from jaxaccel.nn.engram_config import EngramConfig
from jaxaccel.nn.implementation import Implementations


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class MemoryCache(DecoderCache):
    """The cache of a decoder with a memory.

    Attributes:
      memory: what the memory remembers of each row's text.
    """

    memory: EngramState

    def reset(self, rows: jax.Array) -> Self:
        """As `DecoderCache.reset`."""
        cleared = super().reset(rows)
        return dataclasses.replace(cleared, memory=self.memory.reset(rows))


class EngramMemory(nnx.Module):
    """The memory of a decoder.

    Attributes:
      ngrams: NGramHash.
      layers: one `Engram` for each of `EngramConfig.layers`.
    """

    def __init__(
        self,
        config: EngramConfig,
        vocab_size: int,
        d_model: int,
        *,
        dtype: DTypeLike = jnp.float32,
        param_dtype: DTypeLike = jnp.float32,
        implementation: Implementations = None,
        rngs: nnx.Rngs,
    ):
        """Creates hash and layers; see `Engram`."""
        self.ngrams = NGramHash(config, vocab_size, implementation=implementation)
        kind = {
            "dtype": dtype,
            "param_dtype": param_dtype,
            "implementation": implementation,
            "rngs": rngs,
        }
        self.layers = nnx.List(
            [Engram(config, d_model, n, **kind) for n in self.ngrams.layout.num_rows]
        )
        self.config = config
        self.d_model = d_model

    def lookups(
        self, tokens: jax.Array, segments: jax.Array | None = None
    ) -> jax.Array:
        """The rows that a batch reads, known before any layer has run.

        Args:
          tokens: i32[B, T].
          segments: i32[B, T] as a decoder takes them.

        Returns:
          i32[B, T, L, C].
        """
        batch, time = tokens.shape
        meta = packing_metadata((batch, time), segment_ids=segments)
        return self.ngrams(tokens, meta)[0]

    def read(
        self, tokens: jax.Array, meta: PackingMetadata, cache: Any = None
    ) -> Reading:
        """Begins a pass through the layers.

        Args:
          tokens: i32[B, T].
          meta: where documents begin.
          cache: `MemoryCache` of earlier calls.

        Returns:
          What adds the memory to the layers' inputs.
        """
        return Reading(self, tokens, meta, None if cache is None else cache.memory)

    def init_cache(
        self, cache: DecoderCache, batch: int, dtype: DTypeLike
    ) -> MemoryCache:
        """The empty cache of a decoder, with the memory's."""
        state = init_engram_state(
            self.config, batch, self.d_model, self.ngrams.vocab_size, dtype
        )
        return MemoryCache(layers=cache.layers, length=cache.length, memory=state)


class Reading:
    """One pass of a batch through the layers, with the memory in front of some."""

    def __init__(
        self,
        memory: EngramMemory,
        tokens: jax.Array,
        meta: PackingMetadata,
        state: EngramState | None,
    ):
        """Hashes all layers' lookups at once."""
        self._memory, self._meta, self._state = memory, meta, state
        with jax.named_scope("engram_hash"):
            history = None if state is None else state.history
            self._ids, self._history = memory.ngrams(tokens, meta, history)
        self._conv: list[jax.Array] = []

    def add(self, layer: int, x: jax.Array, *, remat: bool = False) -> jax.Array:
        """The input of a layer with what is remembered.

        Args:
          layer: counted from 0.
          x: [B, T, D].
          remat: keep nothing for the backward pass but x, as layers do that are
            rematerialised.

        Returns:
          [B, T, D]; x itself in front of a layer without a memory.
        """
        places = self._memory.config.places
        if layer not in places:
            return x
        index, conv = places.index(layer), None
        if self._state is not None and self._state.conv:
            conv = self._state.conv[index]
        engram: Any = self._memory.layers[index]
        engram = jax.checkpoint(engram) if remat else engram
        y, conv = engram(x, self._ids[:, :, index], self._meta, conv)
        if conv is not None:
            self._conv.append(conv)
        return x + y

    def cache(self, cache: DecoderCache) -> MemoryCache:
        """The decoder's cache after the pass, with the memory's."""
        state = EngramState(history=self._history, conv=tuple(self._conv))
        return MemoryCache(layers=cache.layers, length=cache.length, memory=state)
