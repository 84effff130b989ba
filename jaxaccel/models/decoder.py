"""A decoder-only language model: one pattern of layers, scanned."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike

from jaxaccel.cache.decoder import DecoderCache, LayerCache
from jaxaccel.cache.dense import KVCache
from jaxaccel.cache.plan import PolicyCache
from jaxaccel.core.offload import offload_scan
from jaxaccel.data.batch import PackingMetadata, PackingTable, packing_metadata
from jaxaccel.models.config import DecoderConfig, RematPolicy
from jaxaccel.nn import few_rows
from jaxaccel.nn.attention import Attention, AttentionConfig
from jaxaccel.nn.engram_memory import EngramMemory, Reading
from jaxaccel.nn.gated_deltanet import GatedDeltaNet
from jaxaccel.nn.linear import Embed, Linear
from jaxaccel.nn.mamba2 import Mamba2, Mamba2Config
from jaxaccel.nn.mlp import MLP, MLPConfig
from jaxaccel.nn.moe import MoE
from jaxaccel.nn.norm import RMSNorm
from jaxaccel.nn.router import MoEConfig, RouterAux


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelOutput:
    """What a forward pass returns.

    Attributes:
      logits: f32[B, T, vocab]; dead code under `jax.jit` where nothing reads it.
      hidden: [B, T, D] after the final norm.
      cache: the cache with these tokens read, `None` without one.
      aux: the routers' reports, leaves with a leading axis of the layers that have
        one, in their order; `None` for dense models.
      hidden_states: num_layers + 1 arrays [B, T, D], the embedding, each layer's
        output, the last of them after the final norm; `None` unless asked for.
    """

    logits: jax.Array
    hidden: jax.Array
    cache: DecoderCache | None
    aux: RouterAux | None
    hidden_states: tuple[jax.Array, ...] | None


class Block(nnx.Module):
    """`x += mixer(norm(x)); x += mlp(norm(x))`, or one of the two.

    Attributes:
      mixer_norm: RMSNorm, only with a mixer.
      mixer: Attention, GatedDeltaNet or Mamba2; whichever it is, `tables` says what it
        reads of the `PackingMetadata`. `None` in a layer without one.
      mlp_norm: RMSNorm, only with a feed-forward part.
      mlp: MLP or MoE; `None` in a layer without one.
    """

    def __init__(
        self,
        config: DecoderConfig,
        mixer: Any,
        mlp: MLPConfig | MoEConfig | None,
        *,
        rngs: nnx.Rngs,
    ):
        """Creates a layer of the given parts, see `DecoderConfig.layer_parts`."""
        norm = _norm_arguments(config)
        # Every layer adds one or two outputs to the stream; this keeps its size at the
        # end from growing with the depth (GPT-2).
        outputs = config.num_layers * (1 if config.single_part else 2)
        kind = {
            "out_gain": outputs**-0.5,
            "dtype": config.dtype,
            "param_dtype": config.param_dtype,
            "rngs": rngs,
        }
        # Assigned once: what a module holds after `None` would count as no part of it.
        self.mixer: Any = None if mixer is None else _mixer(config, mixer, kind)
        if mixer is not None:
            self.mixer_norm = RMSNorm(config.d_model, **norm)
        self.mlp: Any = None if mlp is None else _feed_forward(config, mlp, kind)
        if mlp is not None:
            self.mlp_norm = RMSNorm(config.d_model, **norm)

    def __call__(
        self,
        x: jax.Array,
        meta: PackingMetadata,
        cache: LayerCache | None = None,
        length: jax.Array | None = None,
    ) -> tuple[jax.Array, LayerCache | None, RouterAux | None]:
        """Applies the layer to [B, T, D]; see the mixers for `cache` and `length`."""
        aux = None
        decodes = length is not None  # a layer without a mixer has no cache
        if self.mixer is not None:
            with jax.named_scope("mixer"):
                if few_rows.adds_itself(self.mixer, x, decodes=decodes):
                    x, cache = self.mixer.added(x, self.mixer_norm, meta, cache, length)
                else:
                    x = few_rows.settled(x)
                    mixed, cache = self.mixer(self.mixer_norm(x), meta, cache, length)
                    x = x + mixed
        if self.mlp is not None:
            with jax.named_scope("mlp"):
                x, aux = self.feed_forward(x, meta, decodes=decodes)
        return x, cache, aux

    def feed_forward(
        self, x: jax.Array, meta: PackingMetadata, *, decodes: bool
    ) -> tuple[jax.Array, RouterAux | None]:
        """Adds the feed-forward part to [B, T, D]; see `few_rows` for `decodes`."""
        if few_rows.adds_itself(self.mlp, x, decodes=decodes):
            return self.mlp.added(x, self.mlp_norm), None
        h = self.mlp_norm(x := few_rows.settled(x))
        mixes = isinstance(self.mlp, MoE)
        y, aux = self.mlp(h, meta, decodes=decodes) if mixes else (self.mlp(h), None)
        return x + y, aux


class MTPHead(nnx.Module):
    """Predicts the token after the next one (DeepSeek-V3, arXiv:2412.19437).

    Attributes:
      embed_norm: RMSNorm of the next token's embedding.
      hidden_norm: RMSNorm of the trunk's hidden state.
      proj: Linear [2D, D] over [embedding | hidden].
      block: one attention layer.
      final_norm: RMSNorm before the shared output layer.
    """

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs):
        """Creates the head; embedding and output layer are the trunk's."""
        norm = _norm_arguments(config)
        self.embed_norm = RMSNorm(config.d_model, **norm)
        self.hidden_norm = RMSNorm(config.d_model, **norm)
        self.proj = Linear(
            2 * config.d_model,
            config.d_model,
            dtype=config.dtype,
            param_dtype=config.param_dtype,
            rngs=rngs,
        )
        self.block = Block(config, config.attention, config.mlp, rngs=rngs)
        self.final_norm = RMSNorm(config.d_model, **norm)


class Decoder(nnx.Module):
    """A language model over `DecoderConfig`.

    Attributes:
      embed: Embed [vocab, D].
      layers: one `Block` per position of the pattern, every parameter with a leading
        [num_periods] axis: layer p * len(pattern) + i is row p of layers[i]. Where
        `DecoderConfig.runs` has several runs, those of each run in turn.
      final_norm: RMSNorm.
      lm_head: Linear [D, vocab], absent where the embedding is tied.
      mtp: MTPHead, only with `num_mtp_layers`.
      memory: EngramMemory, only with `engram`.
    """

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs):
        """Creates the parameters."""
        kind = {
            "dtype": config.dtype,
            "param_dtype": config.param_dtype,
            "rngs": rngs,
        }
        self.embed = Embed(config.vocab_size, config.d_model, **kind)
        self.layers = nnx.List(_stacked_blocks(config, rngs.params()))
        self.final_norm = RMSNorm(config.d_model, **_norm_arguments(config))
        if not config.tie_embeddings:
            self.lm_head = Linear(config.d_model, config.vocab_size, **kind)
        if config.num_mtp_layers:
            self.mtp = MTPHead(config, rngs=rngs)
        if config.engram is not None:
            kind["implementation"] = config.implementation
            sizes = config.vocab_size, config.d_model
            self.memory = EngramMemory(config.engram, *sizes, **kind)
        self.config = config

    def __call__(
        self,
        tokens: jax.Array,
        segments: jax.Array | None = None,
        positions: jax.Array | None = None,
        cache: DecoderCache | None = None,
        *,
        output_hidden_states: bool = False,
    ) -> ModelOutput:
        """Reads tokens.

        Args:
          tokens: i32[B, T].
          segments: i32[B, T], document of each token, 0 is padding; `None` means one
            document per row without padding.
          positions: i32[B, T]; `None` counts from each document's start, behind what
            the cache holds.
          cache: what earlier calls read; then each row holds one document, padded
            left or right or not at all, whatever its id: a call goes on with what the
            row holds, and `DecoderCache.reset` starts a new document. Real tokens
            beyond the cache's slots, over all calls, are lost; their number is known
            only on the device.
          output_hidden_states: return every layer's output.

        Returns:
          The output. Values at padding mean nothing.

        Raises:
          ValueError: a shape differs from that of `tokens`; T is more than the slots
            of the cache; or `segments` comes with a cache and is a numpy array in
            which a row holds more than one run of real tokens of one document.
        """
        if tokens.ndim != 2:
            raise ValueError(f"tokens must be [B, T], got shape {tokens.shape}")
        length = None if cache is None else cache.length
        if length is not None and length.shape != tokens.shape[:1]:
            raise ValueError(
                f"the cache has {length.shape[0]} rows, tokens have {tokens.shape[0]}"
            )
        batch, time = tokens.shape
        if cache is not None:
            _check_cached_call(time, segments, cache)
        with jax.named_scope("packing_metadata"):
            meta = packing_metadata(
                (batch, time),
                segment_ids=segments,
                positions=positions,
                cached_length=length,
                tables=self.packing_tables(batch, time, cached=cache is not None),
            )
        with jax.named_scope("embed"):
            embedded = self.embed(tokens)  # [B, T, D]
        has_memory = self.config.engram is not None
        memory = self.memory.read(tokens, meta, cache) if has_memory else None
        x, layer_caches, aux, states = self._run_layers(
            embedded,
            meta,
            None if cache is None else cache.layers,
            length,
            output_hidden_states,
            memory,
        )
        with jax.named_scope("final_norm"):
            hidden = self.final_norm(x)
        hidden_states = None
        if states is not None:
            hidden_states = (embedded, *states[:-1], hidden)
        if cache is not None:
            read = jnp.sum(meta.is_real, axis=1, dtype=jnp.int32)
            cache = DecoderCache(layers=layer_caches, length=cache.length + read)
            cache = cache if memory is None else memory.cache(cache)
        return ModelOutput(
            logits=self.unembed(hidden),
            hidden=hidden,
            cache=cache,
            aux=aux,
            hidden_states=hidden_states,
        )

    def packing_tables(
        self, batch: int, time: int, *, cached: bool = False
    ) -> tuple[PackingTable, ...]:
        """Says what the layers' kernels read of the packing.

        Args:
          batch, time: B and T of a call.
          cached: whether it has a cache.

        Returns:
          The tables for `packing_metadata`, each once however many layers read it;
          none of an op whose kernels will not run.
        """
        return tuple(
            dict.fromkeys(
                table
                for block in self._mixing
                for table in block.mixer.tables(batch, time, cached=cached)
            )
        )

    def unembed(self, x: jax.Array) -> jax.Array:
        """Maps [..., D] after the final norm to f32[..., vocab] logits."""
        with jax.named_scope("unembed"):
            if self.config.tie_embeddings:
                return self.embed.attend(x)
            return self.lm_head(x, out_dtype=jnp.float32)

    def init_cache(
        self, batch: int, max_length: int, dtype: DTypeLike | None = None
    ) -> DecoderCache:
        """Makes an empty cache.

        Args:
          batch: rows B.
          max_length: tokens a row may hold, over all calls.
          dtype: dtype of keys, values and convolution states, the compute dtype by
            default; recurrent states are f32 under any.

        Returns:
          The cache.
        """
        dtype = self.config.compute_dtype if dtype is None else dtype

        def stacked(block, repeats):
            one = block.mixer.init_cache(batch, max_length, dtype)
            return jax.tree.map(
                lambda leaf: jnp.tile(leaf[None], (repeats,) + (1,) * leaf.ndim), one
            )

        pairs = zip(self.layers, self.config.positions, strict=True)
        cache = DecoderCache(
            layers=tuple(
                stacked(block, repeats)
                for block, (_, repeats) in pairs
                if block.mixer is not None
            ),
            length=jnp.zeros((batch,), jnp.int32),
        )
        if self.config.engram is None:
            return cache
        return self.memory.init_cache(cache, batch, dtype)

    @property
    def _mixing(self) -> list[Block]:
        """The layers that have a mixer, and with it a part of the cache."""
        return [block for block in self.layers if block.mixer is not None]

    def mtp_hidden(
        self,
        hidden: jax.Array,
        tokens: jax.Array,
        segments: jax.Array | None = None,
        positions: jax.Array | None = None,
    ) -> tuple[jax.Array, RouterAux | None]:
        """Runs the multi-token prediction head.

        Args:
          hidden: [B, T, D], `ModelOutput.hidden`.
          tokens: i32[B, T], what `hidden` was computed from.
          segments: i32[B, T] as in `__call__`.
          positions: i32[B, T] as in `__call__`.

        Returns:
          [B, T - 1, D]: index t, from tokens up to t + 1, is to predict token t + 2;
          `unembed` makes logits of it. Where token t + 1 is of another document the
          value means nothing. And the report of the head's router, if it has one.

        Raises:
          ValueError: the model has no such head.
        """
        if not self.config.num_mtp_layers:
            raise ValueError("this model has no MTP head: num_mtp_layers=0")
        if segments is not None:
            segments = jnp.where(
                segments[:, :-1] == segments[:, 1:], segments[:, :-1], 0
            )
        batch, time = tokens.shape
        meta = packing_metadata(
            (batch, time - 1),
            segment_ids=segments,
            positions=None if positions is None else positions[:, :-1],
            tables=self.mtp.block.mixer.tables(batch, time - 1),
        )
        with jax.named_scope("mtp"):
            mtp = self.mtp
            e = mtp.embed_norm(self.embed(tokens[:, 1:]))  # [B, T-1, D]
            h = mtp.hidden_norm(hidden[:, :-1])  # [B, T-1, D]
            x = mtp.proj(jnp.concatenate([e, h], axis=-1))
            graphdef, state = nnx.split(mtp.block)
            policy = RematPolicy.parse(self.config.remat_policy)
            run = _checkpointed(_pure(graphdef), policy, in_loop=False)
            if policy.mode != "save":
                run = jax.checkpoint(run)
            x, _, aux = run(state, x, meta, None, None)
            return mtp.final_norm(x), aux

    def mtp_logits(
        self,
        hidden: jax.Array,
        tokens: jax.Array,
        segments: jax.Array | None = None,
        positions: jax.Array | None = None,
    ) -> jax.Array:
        """Logits of `mtp_hidden`, f32[B, T - 1, vocab]; same arguments."""
        x, _ = self.mtp_hidden(hidden, tokens, segments, positions)
        return self.unembed(x)

    def _run_layers(
        self,
        x: jax.Array,
        meta: PackingMetadata,
        caches: tuple[LayerCache, ...] | None,
        length: jax.Array | None,
        keep_states: bool,
        memory: Reading | None = None,
    ):
        policy = RematPolicy.parse(self.config.remat_policy)
        mode, group = policy.mode, policy.group
        if caches is not None:
            mode, group = "save", 1  # nobody differentiates through a cache
        remaining = iter(caches or ())
        first, depth, new_caches, reports, states = 0, 0, [], [], []
        for run in self.config.runs:
            if memory is not None:
                x = memory.add(depth, x, remat=mode != "save")
            depth += len(run.kinds) * run.repeats
            blocks = self.layers[first : first + len(run.kinds)]
            own_caches = tuple(
                None if caches is None or block.mixer is None else next(remaining)
                for block in blocks
            )
            parts = [nnx.split(block) for block in blocks]
            stages = [
                _stage(
                    f"layer_{first + i}_{kind}",
                    _checkpointed(_pure(graphdef), policy, in_loop=run.repeats > 1),
                    keep_states,
                )
                for i, (kind, (graphdef, _)) in enumerate(
                    zip(run.kinds, parts, strict=True)
                )
            ]
            x, kept = offload_scan(
                stages,
                tuple((s, c) for (_, s), c in zip(parts, own_caches, strict=True)),
                x,
                (meta, length),
                mode=mode,
                group=group,
                names=policy.names if mode == "policy" else (),
            )
            run_caches, run_reports, run_states = zip(*kept, strict=True)
            new_caches += [cache for cache in run_caches if cache is not None]
            run_reports = [report for report in run_reports if report is not None]
            if run_reports:
                reports.append(jax.tree.map(_in_layer_order, *run_reports))
            if keep_states:
                states += [s[p] for p in range(run.repeats) for s in run_states]
            first += len(run.kinds)
        aux = reports[0] if reports else None
        if len(reports) > 1:
            aux = jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *reports)
        return x, tuple(new_caches), aux, tuple(states) if keep_states else None


def init_decoder(config: DecoderConfig, key: jax.Array | int = 0) -> Decoder:
    """Builds a decoder with its initial parameters drawn in one compiled call.

    The same as `Decoder(config, rngs=nnx.Rngs(key))`, which draws parameter by
    parameter and so compiles dozens of small programs first.

    Args:
      config: the model.
      key: a random key or a seed.

    Returns:
      The model.
    """
    key = jax.random.key(key) if isinstance(key, int) else key

    def parameters(key):
        return nnx.split(Decoder(config, rngs=nnx.Rngs(key)))[1]

    graphdef, _ = nnx.split(nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0))))
    return nnx.merge(graphdef, jax.jit(parameters)(key))


def _check_cached_call(time: int, segments: Any, cache: DecoderCache) -> None:
    """Refuses what a cache cannot take, as far as it is known before running."""
    if any(isinstance(c, PolicyCache) for c in cache.layers):
        raise ValueError(
            "a cache with planned layers is read by `jaxaccel.decoding.cached` and "
            "`read_tokens`, not by calling the model"
        )
    slots = [c.k.shape[2] for c in cache.layers if isinstance(c, KVCache)]
    if slots and time > min(slots):
        raise ValueError(
            f"tokens have T={time}, more than the {min(slots)} slots of the cache"
        )
    if isinstance(segments, np.ndarray) and segments.ndim == 2:
        before = np.pad(segments[:, :-1], ((0, 0), (1, 0)))
        documents = np.sum((segments > 0) & (segments != before), axis=1)  # [B]
        for row in np.flatnonzero(documents > 1)[:1]:
            raise ValueError(
                f"segments[{row}] holds {documents[row]} documents, with a cache a row "
                "is one document without padding inside"
            )


def _norm_arguments(config: DecoderConfig) -> dict[str, Any]:
    return {
        "eps": config.norm_eps,
        "zero_centered": config.zero_centered_norms,
        "param_dtype": config.param_dtype,
        "implementation": config.implementation,
    }


def _mixer(config: DecoderConfig, mixer: Any, kind: dict[str, Any]) -> nnx.Module:
    """The module of a mixer's config; `kind` goes to it as it is."""
    kind = {**kind, "norm_eps": config.norm_eps}
    kind["implementation"] = config.implementation
    if isinstance(mixer, AttentionConfig):
        return Attention(
            mixer, config.d_model, zero_centered=config.zero_centered_norms, **kind
        )
    if isinstance(mixer, Mamba2Config):
        return Mamba2(mixer, config.d_model, **kind)
    return GatedDeltaNet(mixer, config.d_model, **kind)


def _feed_forward(
    config: DecoderConfig, mlp: MLPConfig | MoEConfig, kind: dict[str, Any]
) -> nnx.Module:
    """The module of a feed-forward part's config; `kind` goes to it as it is."""
    kind = {**kind, "implementation": config.implementation}
    if isinstance(mlp, MoEConfig):
        return MoE(mlp, config.d_model, **kind)
    return MLP(config.d_model, mlp.d_ff, mlp.activation, **kind)


def _stacked_blocks(config: DecoderConfig, key: jax.Array) -> list[Block]:
    """Builds a block per position of the layers, its parameters holding all rows.

    All layers of one kind are drawn together: every random array that is drawn on
    its own is a program of its own to compile.
    """
    positions = config.positions
    blocks: dict[int, Block] = {}
    for kind in sorted({kind for kind, _ in positions}):
        places = [(i, n) for i, (name, n) in enumerate(positions) if name == kind]

        def build(rngs, kind=kind):
            return Block(config, *config.layer_parts(kind), rngs=rngs)

        def parameters(key, build=build):
            return nnx.split(build(nnx.Rngs(key)))[1]

        total = sum(repeats for _, repeats in places)
        keys = jax.random.split(jax.random.fold_in(key, places[0][0]), total)
        drawn = jax.vmap(parameters)(keys)  # [rows of all places, ...]
        graphdef, _ = nnx.split(nnx.eval_shape(lambda build=build: build(nnx.Rngs(0))))
        row = 0
        for place, repeats in places:
            rows = slice(row, row + repeats)
            state = jax.tree.map(lambda leaf, rows=rows: leaf[rows], drawn)
            blocks[place] = nnx.merge(graphdef, state)
            row += repeats
    return [blocks[place] for place in range(len(positions))]


def _in_layer_order(*leaves: jax.Array) -> jax.Array:
    """Interleaves per-position leaves [num_periods, ...] into [num_layers, ...]."""
    stacked = jnp.stack(leaves, axis=1)  # [num_periods, positions, ...]
    return stacked.reshape(-1, *stacked.shape[2:])


def _stage(scope: str, run: Callable, keep_states: bool) -> Callable:
    """A block as a stage of `offload_scan`."""

    def layer(own, x, shared):
        state, cache = own
        meta, length = shared
        with jax.named_scope(scope):
            x, cache, aux = run(state, x, meta, cache, length)
        return x, (cache, aux, x if keep_states else None)

    return layer


def _pure(graphdef: Any) -> Callable:
    """A block as a function of its state."""

    def run(state, x, meta, cache, length):
        return nnx.merge(graphdef, state)(x, meta, cache, length)

    return run


def _checkpointed(run: Callable, policy: RematPolicy, *, in_loop: bool) -> Callable:
    """Wraps a block where the policy keeps matrix products or named values of it."""
    policies = jax.checkpoint_policies
    if policy.kind == "save_names":
        saveable = policies.save_only_these_names(*policy.names)
    elif policy.kind == "dots":
        saveable = policies.dots_with_no_batch_dims_saveable
    else:
        return run
    # The loop already keeps XLA from merging the recomputation with the forward pass;
    # the barriers that would do it outside of one cost fusions.
    return jax.checkpoint(run, policy=saveable, prevent_cse=not in_loop)
