"""A decoder whose layers have arrays of their own, for models that fill a device.

`Decoder` stacks layers of a kind in one array, and a loop over layers takes its part of
it. Here a layer is built alone, so that beside the finished ones no more than one
layer's random bits are in memory; and a program names each layer's arrays, so that
nothing decides on the way where they are, and launches can be put into one graph.
Layers of a kind are traced once.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxaccel.cache.decoder import DecoderCache
from jaxaccel.data.batch import PackingMetadata, packing_metadata
from jaxaccel.models.config import DecoderConfig
from jaxaccel.models.decoder import Block, Decoder
from jaxaccel.nn.linear import Embed, Linear
from jaxaccel.nn.norm import RMSNorm


class Ends(nnx.Module):
    """What a decoder has before and behind its layers.

    Attributes:
      embed, final_norm, lm_head: as in `Decoder`.
    """

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs):
        """Creates the parameters."""
        sizes = config.vocab_size, config.d_model
        kind = {"dtype": config.dtype, "param_dtype": config.param_dtype, "rngs": rngs}
        self.embed = Embed(*sizes, **kind)
        self.final_norm = RMSNorm(
            config.d_model,
            eps=config.norm_eps,
            zero_centered=config.zero_centered_norms,
            param_dtype=config.param_dtype,
            implementation=config.implementation,
        )
        if not config.tie_embeddings:
            self.lm_head = Linear(*sizes[::-1], **kind)
        self.is_tied = config.tie_embeddings

    def unembed(self, x: jax.Array) -> jax.Array:
        """Maps [..., D] after the final norm to f32[..., vocab] logits."""
        if self.is_tied:
            return self.embed.attend(x)
        return self.lm_head(x, out_dtype=jnp.float32)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Parameters:
    """Arrays of a `LayeredDecoder`.

    Attributes:
      ends: state of `Ends`.
      layers: state of each layer's `Block`, in order.
    """

    ends: Any
    layers: tuple[Any, ...]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class LayeredOutput:
    """What `LayeredDecoder.read` returns; dead code under `jax.jit` where unread.

    Attributes:
      hidden: [B, T, D] after the final norm.
      cache: the cache with these tokens read.
      counts: i32[E] of each layer with a mixture, tokens that went to each expert.
    """

    hidden: jax.Array
    cache: DecoderCache
    counts: tuple[jax.Array, ...]


class LayeredDecoder:
    """A decoder's programs over `Parameters`; it holds no array.

    Attributes:
      config: the model.
    """

    def __init__(self, config: DecoderConfig):
        """Takes the model's structure.

        Args:
          config: the model; its prediction block, if any, is left out.

        Raises:
          NotImplementedError: it has an n-gram memory.
        """
        if config.engram is not None:
            raise NotImplementedError(
                f"LayeredDecoder: a model with a memory is read by `Decoder`, this one "
                f"has engram={config.engram}"
            )
        self.config = config
        self._ends = nnx.split(_abstract(self._make_ends))[0]
        self._blocks = {
            kind: _abstract(functools.partial(self._make_block, kind))
            for kind in dict.fromkeys(config.layer_types)
        }
        # One function for all layers of a kind, so that they are one program.
        self._runs = {kind: self._run(kind) for kind in self._blocks}

    def _make_ends(self, rngs: nnx.Rngs) -> Ends:
        return Ends(self.config, rngs=rngs)

    def _make_block(self, kind: str, rngs: nnx.Rngs) -> Block:
        return Block(self.config, *self.config.layer_parts(kind), rngs=rngs)

    def _run(self, kind: str) -> Callable[..., tuple[jax.Array, Any, Any]]:
        graphdef = nnx.split(self._blocks[kind])[0]

        @jax.jit
        def run(state, x, meta, cache, length):
            x, cache, aux = nnx.merge(graphdef, state)(x, meta, cache, length)
            return x, cache, None if aux is None else aux.counts

        return run

    def init(self, key: jax.Array) -> Parameters:
        """Draws parameters as `Decoder` draws them, one layer at a time."""
        ends, *keys = jax.random.split(key, self.config.num_layers + 1)

        def drawn(make):
            return jax.jit(lambda key: nnx.split(make(nnx.Rngs(key)))[1])

        kinds = {
            kind: drawn(functools.partial(self._make_block, kind))
            for kind in self._blocks
        }
        layers = zip(self.config.layer_types, keys, strict=True)
        return Parameters(
            ends=drawn(self._make_ends)(ends),
            layers=tuple(kinds[kind](key) for kind, key in layers),
        )

    def split(self, model: Decoder) -> Parameters:
        """The parameters of a `Decoder` of this config, a copy."""
        states = [nnx.split(block)[1] for block in model.layers]
        layers = tuple(
            jax.tree.map(lambda leaf, row=row: leaf[row], states[position])
            for position, row in self.config.layer_places
        )
        ends = _abstract(self._make_ends)
        for name in ("embed", "final_norm", "lm_head"):
            if hasattr(ends, name):
                nnx.update(getattr(ends, name), nnx.state(getattr(model, name)))
        return Parameters(ends=nnx.split(ends)[1], layers=layers)

    def init_cache(self, batch: int, max_length: int) -> DecoderCache:
        """An empty cache, a part for each layer that has a mixer.

        Args:
          batch: rows B.
          max_length: tokens that a row may hold.
        """
        mixers = [self._blocks[kind].mixer for kind in self.config.layer_types]
        return DecoderCache(
            layers=tuple(
                mixer.init_cache(batch, max_length, self.config.compute_dtype)
                for mixer in mixers
                if mixer is not None
            ),
            length=jnp.zeros((batch,), jnp.int32),
        )

    def read(
        self, parameters: Parameters, tokens: jax.Array, cache: DecoderCache
    ) -> LayeredOutput:
        """Reads tokens as `Decoder.__call__` with a cache does, none of them padding.

        Args:
          parameters: of `init` or `split`.
          tokens: i32[B, T], each row's next ones.
          cache: what earlier calls read.

        Returns:
          The output.
        """
        batch, time = tokens.shape
        meta = self._metadata(batch, time, cache.length)
        ends = nnx.merge(self._ends, parameters.ends)
        x, remaining = ends.embed(tokens), iter(cache.layers)
        after, counts = [], []
        for kind, state in zip(self.config.layer_types, parameters.layers, strict=True):
            mixes = self._blocks[kind].mixer is not None
            part = next(remaining) if mixes else None
            x, part, sent = self._runs[kind](state, x, meta, part, cache.length)
            after += [part] if mixes else []
            counts += [] if sent is None else [sent]
        return LayeredOutput(
            hidden=ends.final_norm(x),
            cache=DecoderCache(layers=tuple(after), length=cache.length + time),
            counts=tuple(counts),
        )

    def _metadata(self, batch: int, time: int, length: jax.Array) -> PackingMetadata:
        mixers = [block.mixer for block in self._blocks.values()]
        tables = [
            table
            for mixer in mixers
            if mixer is not None
            for table in mixer.tables(batch, time, cached=True)
        ]
        return packing_metadata((batch, time), cached_length=length, tables=tables)

    def unembed(self, parameters: Parameters, hidden: jax.Array) -> jax.Array:
        """Maps [..., D] of `read` to f32[..., vocab] logits."""
        return nnx.merge(self._ends, parameters.ends).unembed(hidden)

    def next_token(
        self, parameters: Parameters, last: jax.Array, cache: DecoderCache
    ) -> tuple[jax.Array, DecoderCache]:
        """The best token behind `last`, both i32[B], and the cache with `last`."""
        output = self.read(parameters, last[:, None], cache)
        logits = self.unembed(parameters, output.hidden[:, 0])
        return jnp.argmax(logits, axis=-1).astype(jnp.int32), output.cache


def _abstract(make: Callable[[nnx.Rngs], Any]) -> Any:
    return nnx.eval_shape(lambda: make(nnx.Rngs(0)))
