"""A decoder with several residual streams and a memory, for experiments.

`Decoder` has one stream. Here each part of a layer stands in a `HyperConnection`, and
the memory is added to every stream in front of it.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxaccel.config.engram_bench import StreamsConfig
from jaxaccel.data.batch import packing_metadata
from jaxaccel.models.decoder import Block, ModelOutput
from jaxaccel.nn.engram_memory import EngramMemory
from jaxaccel.nn.hyper_connection import (
    HyperConnection,
    expand_streams,
    merge_streams,
)
from jaxaccel.nn.linear import Embed
from jaxaccel.nn.norm import RMSNorm


class StreamsModel(nnx.Module):
    """What a training step asks of a `Decoder`; see `StreamsConfig`.

    Attributes:
      embed: Embed, tied.
      blocks: one `Block` a layer, whose residual additions are not used.
      mixers, mlps: one `HyperConnection` a layer, around its two parts.
      final_norm: RMSNorm.
      memory: EngramMemory, only with a memory.
      config: with `engram`, for what trains tables.
    """

    def __init__(self, config: StreamsConfig, *, rngs: nnx.Rngs):
        """Creates the parameters."""
        decoder = config.decoder()
        width = decoder.d_model
        self.embed = Embed(decoder.vocab_size, width, rngs=rngs)
        self.blocks = nnx.List(
            [
                Block(decoder, *decoder.layer_parts(kind), rngs=rngs)
                for kind in decoder.layer_types
            ]
        )

        def connections() -> nnx.List:
            return nnx.List(
                [
                    HyperConnection(width, config.streams, rngs=rngs)
                    for _ in decoder.layer_types
                ]
            )

        self.mixers, self.mlps = connections(), connections()
        self.final_norm = RMSNorm(
            width,
            eps=decoder.norm_eps,
            zero_centered=decoder.zero_centered_norms,
            implementation=decoder.implementation,
        )
        if config.engram is not None:
            self.memory = EngramMemory(
                config.engram,
                decoder.vocab_size,
                width,
                implementation=decoder.implementation,
                rngs=rngs,
            )
        self.config = config

    def __call__(
        self,
        tokens: jax.Array,
        segments: jax.Array | None = None,
        positions: jax.Array | None = None,
    ) -> ModelOutput:
        """Reads tokens as `Decoder` does, without a cache."""
        batch, time = tokens.shape
        meta = packing_metadata(
            (batch, time), segment_ids=segments, positions=positions
        )
        x = expand_streams(self.embed(tokens), self.config.streams)  # [B, T, G, D]
        engram = self.config.engram
        memory = None if engram is None else self.memory.read(tokens, meta)
        parts = zip(self.blocks, self.mixers, self.mlps, strict=True)
        for layer, (block, around_mixer, around_mlp) in enumerate(parts):
            if memory is not None and engram is not None:
                x = _added(memory, layer, x, shared=engram.streams == 1)

            def mix(h: jax.Array, block: Any = block) -> jax.Array:
                return block.mixer(block.mixer_norm(h), meta, None, None)[0]

            def feed(h: jax.Array, block: Any = block) -> jax.Array:
                return block.mlp(block.mlp_norm(h))

            x = around_mlp(around_mixer(x, mix), feed)
        hidden = self.final_norm(merge_streams(x))
        return ModelOutput(
            logits=self.unembed(hidden),
            hidden=hidden,
            cache=None,
            aux=None,
            hidden_states=None,
        )

    def unembed(self, x: jax.Array) -> jax.Array:
        """Maps [..., D] after the final norm to f32[..., vocab] logits."""
        return self.embed.attend(x)


def _added(memory: Any, layer: int, x: jax.Array, *, shared: bool) -> jax.Array:
    """The streams with what is remembered, by their own keys or by one for all."""
    if not shared:
        return memory.add(layer, x)
    mean = merge_streams(x)
    return x + jnp.expand_dims(memory.add(layer, mean) - mean, 2)
