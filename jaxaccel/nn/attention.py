"""Grouped-query attention: gated, normalised, windowed, with sinks."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike

from jaxaccel.cache.dense import KVCache, KVCacheOfLayer
from jaxaccel.cache.layer_state import AttentionSpec, Tokens
from jaxaccel.cache.plan import PolicyCacheOfLayer
from jaxaccel.data.batch import AttentionTiles, PackingMetadata
from jaxaccel.nn import few_rows
from jaxaccel.nn.implementation import Implementations, implementation_of
from jaxaccel.nn.linear import Linear, fan_in_init
from jaxaccel.nn.norm import RMSNorm
from jaxaccel.nn.rope import RopeConfig, apply_rope, frequencies, rotary_tables
from pallas_kernels.attention import attention, choose, tiling
from pallas_kernels.decode_attention import MAX_TIME, padded_group
from pallas_kernels.sparse_decode_attention import Rotary


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionConfig:
    """An attention layer.

    Attributes:
      num_heads: query heads H.
      num_kv_heads: key and value heads G; query head h reads h // (H / G).
      head_dim: K, of queries, keys and values.
      rope: rotary embedding, `None` for none.
      qk_norm: RMS norm over each head's queries and keys, before the rotation.
      output_gate: multiply the heads' outputs by the sigmoid of a projection of x
        (Qwen3-Next).
      window: a query sees this many tokens, itself among them; `None` sees all.
      sinks: one learned logit per query head that takes part in the softmax and
        gives nothing (gpt-oss).
      logit_cap: scores become cap * tanh(score / cap).
      use_bias: biases on all four projections.
      scale: factor on the scores, `None` for head_dim**-0.5.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope: RopeConfig | None = dataclasses.field(default_factory=RopeConfig)
    qk_norm: bool = False
    output_gate: bool = False
    window: int | None = None
    sinks: bool = False
    logit_cap: float | None = None
    use_bias: bool = False
    scale: float | None = None

    def __post_init__(self):
        for name in ("num_heads", "num_kv_heads", "head_dim"):
            if getattr(self, name) < 1:
                raise ValueError(
                    f"AttentionConfig: {name}={getattr(self, name)} must be positive"
                )
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"AttentionConfig: num_heads={self.num_heads} must be a multiple of "
                f"num_kv_heads={self.num_kv_heads}"
            )
        if self.window is not None and self.window < 1:
            raise ValueError(
                f"AttentionConfig: window={self.window} must be positive or None"
            )
        if self.logit_cap is not None and self.logit_cap <= 0:
            raise ValueError(
                f"AttentionConfig: logit_cap={self.logit_cap} must be positive or None"
            )
        if self.rope is not None:
            self.rope.rotary_dim(self.head_dim)


@dataclasses.dataclass(frozen=True)
class Rotation:
    """A rotary embedding as a function of (x, positions) that can be hashed."""

    rope: RopeConfig

    def __call__(self, x: jax.Array, positions: jax.Array) -> jax.Array:
        """[B, T, H, K] at positions i32[B, T], rotated."""
        return apply_rope(x, positions, self.rope)

    def rotary(self, head_dim: int) -> Rotary | None:
        """The same as kernels take it; `None` if some dimensions do not turn."""
        per_position, factor = frequencies(self.rope, head_dim)
        if 2 * per_position.size != head_dim:
            return None
        return Rotary(frequencies=tuple(per_position.tolist()), factor=factor)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class PendingAttention:
    """What `Attention.verify` read and `Attention.commit` may take back.

    Attributes:
      cache: all of the tokens in it.
      length: i32[B], tokens it held before them.
    """

    cache: KVCache | KVCacheOfLayer
    length: jax.Array


class Attention(nnx.Module):
    """A mixer whose memory is all keys and values, see `AttentionConfig`.

    Attributes:
      q_proj: Linear [D, H*K].
      gate_proj: Linear [D, H*K], only with `output_gate`.
      k_proj: Linear [D, G*K].
      v_proj: Linear [D, G*K].
      o_proj: Linear [H*K, D].
      q_norm: RMSNorm over K, only with `qk_norm`.
      k_norm: RMSNorm over K, only with `qk_norm`.
      sinks: f32[H], only with `sinks`.
    """

    def __init__(
        self,
        config: AttentionConfig,
        d_model: int,
        *,
        norm_eps: float = 1e-6,
        zero_centered: bool = False,
        out_gain: float = 1.0,
        dtype: DTypeLike = jnp.float32,
        param_dtype: DTypeLike = jnp.float32,
        implementation: Implementations = None,
        rngs: nnx.Rngs,
    ):
        """Creates the projections.

        Args:
          config: the layer.
          d_model: width D.
          norm_eps: of the query and key norms.
          zero_centered: whether those norms scale by 1 + w.
          out_gain: multiplies the initial deviation of `o_proj`.
          dtype: dtype of the computation.
          param_dtype: dtype of the parameters, the sinks apart.
          implementation: see `nn.implementation`.
          rngs: source of the `params` key.
        """
        kind = {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
        d_query = config.num_heads * config.head_dim
        d_key = config.num_kv_heads * config.head_dim
        bias = config.use_bias
        self.q_proj = Linear(d_model, d_query, use_bias=bias, **kind)
        if config.output_gate:
            self.gate_proj = Linear(d_model, d_query, use_bias=bias, **kind)
        self.k_proj = Linear(d_model, d_key, use_bias=bias, **kind)
        self.v_proj = Linear(d_model, d_key, use_bias=bias, **kind)
        self.o_proj = Linear(
            d_query, d_model, use_bias=bias, kernel_init=fan_in_init(out_gain), **kind
        )
        if config.qk_norm:
            norm = {
                "eps": norm_eps,
                "zero_centered": zero_centered,
                "param_dtype": param_dtype,
                "implementation": implementation,
            }
            self.q_norm = RMSNorm(config.head_dim, **norm)
            self.k_norm = RMSNorm(config.head_dim, **norm)
        if config.sinks:
            self.sinks = nnx.Param(jnp.zeros((config.num_heads,), jnp.float32))
        self.config = config
        self.dtype = jnp.dtype(dtype)
        self.implementation = implementation_of("attention", implementation)
        # One name for every op is of those that read whole sequences: short caches and
        # other dtypes must run, too.
        self.decode: Any = None
        if not isinstance(implementation, str):
            self.decode = implementation_of("decode_attention", implementation)
        self.appends = few_rows.named(implementation, "rope_append")
        self.products = few_rows.named(implementation)
        if bias and self.products is not None:
            raise NotImplementedError(
                f"Attention: implementation names {self.products!r} for gemv, which "
                "has no biases, and use_bias=True"
            )

    @property
    def _tiles(self) -> AttentionTiles:
        """The table that the kernels read, if it is they that run."""
        config = self.config
        return AttentionTiles(window=config.window, **tiling(config.head_dim))

    def tables(
        self, batch: int, time: int, *, cached: bool = False
    ) -> tuple[AttentionTiles, ...]:
        """Says which tables of `PackingMetadata` a call reads.

        Args:
          batch, time: B and T of the call.
          cached: whether it has a cache, which no kernel reads.

        Returns:
          The tables, none where the implementation that will run needs none.
        """
        if cached:
            return ()
        config = self.config
        q, k = (
            jax.ShapeDtypeStruct((batch, time, heads, config.head_dim), self.dtype)
            for heads in (config.num_heads, config.num_kv_heads)
        )
        choice = choose(q, k, k, scale=config.scale, implementation=self.implementation)
        return (self._tiles,) if choice.implementation == "mosaic" else ()

    def init_cache(self, batch: int, max_length: int, dtype: DTypeLike) -> KVCache:
        """Makes an empty cache for rows of up to `max_length` tokens."""
        config = self.config
        return KVCache.empty(
            batch,
            max_length,
            config.num_kv_heads,
            config.head_dim,
            config.head_dim,
            dtype,
        )

    @property
    def cache_spec(self) -> AttentionSpec:
        """What a cache of `jaxaccel.cache.plan` must know of the layer."""
        config = self.config
        scale = config.head_dim**-0.5 if config.scale is None else config.scale
        return AttentionSpec(
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            scale=scale,
            logit_cap=config.logit_cap,
            rotate=None if config.rope is None else Rotation(config.rope),
            decode=self.decode,
        )

    def __call__(
        self,
        x: jax.Array,
        meta: PackingMetadata,
        cache: Any = None,
        length: jax.Array | None = None,
    ) -> tuple[jax.Array, Any]:
        """Mixes along time.

        Args:
          x: [B, T, D].
          meta: documents and positions.
          cache: keys and values of earlier calls, a `KVCache`, `KVCacheOfLayer` or
            `PolicyCacheOfLayer`; each row is one document then.
          length: i32[B], tokens in the cache; required with it.

        Returns:
          [B, T, D] in the compute dtype, and the cache with x's tokens in it (`None`
          without one).

        Raises:
          ValueError: a cache comes without its length.
        """
        return self._mixed(x, meta, cache, length)

    @property
    def awaited(self) -> tuple[Linear, ...]:
        """Maps behind its step, see `few_rows.Stream.foresee`."""
        return (self.o_proj,)

    def added(
        self,
        x: jax.Array,
        norm: RMSNorm,
        meta: PackingMetadata,
        cache: Any,
        length: jax.Array | None,
    ) -> tuple[jax.Array, Any]:
        """x [B, T, D] + self(norm(x), ...), see `few_rows.adds_itself`."""
        return self._mixed(x, meta, cache, length, norm)

    def _projections(
        self, x: jax.Array, norm: RMSNorm | None
    ) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array | None]:
        """q, k, v of x, or of its norm, and the gate's logits with a norm."""
        if norm is None:
            return self.q_proj(x), self.k_proj(x), self.v_proj(x), None
        maps, dtypes = [self.q_proj, self.k_proj, self.v_proj], [self.dtype] * 3
        if self.config.output_gate:
            maps.append(self.gate_proj)
            dtypes.append(jnp.dtype(jnp.float32))
        found = few_rows.project(self.products, x, maps, norm=norm, out_dtypes=dtypes)
        q, k, v, *gate = found
        return q, k, v, gate[0] if gate else None

    def _mixed(
        self,
        x: jax.Array,
        meta: PackingMetadata,
        cache: Any,
        length: jax.Array | None,
        norm: RMSNorm | None = None,
        *,
        are_drafts: bool = False,
    ) -> tuple[jax.Array, Any]:
        """See `__call__`, `added` with a norm, and `verify` where these are drafts."""
        config = self.config
        if cache is not None and length is None:
            raise ValueError("Attention: a cache needs `length`, got None")
        batch, time, _ = x.shape
        heads = (batch, time, config.num_heads, config.head_dim)
        kv_heads = (batch, time, config.num_kv_heads, config.head_dim)
        q, k, v, gate = self._projections(x, norm)
        q = q.reshape(heads)  # [B, T, H, K]
        k = k.reshape(kv_heads)  # [B, T, G, K]
        v = v.reshape(kv_heads)  # [B, T, G, K]
        project = functools.partial(self._project, x, gate=gate, norm=norm)
        decodes = time == 1 or (are_drafts and time <= MAX_TIME)
        if (
            isinstance(cache, KVCache | KVCacheOfLayer)
            and length is not None
            and self.appends is not None
            and decodes
        ):
            q, cache = self._appended(q, k, v, meta, cache, length)
        else:
            if config.qk_norm:
                q, k = self.q_norm(q), self.k_norm(k)
            q_pre, k_pre = q, k
            if config.rope is not None:
                q = apply_rope(q, meta.positions, config.rope)
                k = apply_rope(k, meta.positions, config.rope)
            if isinstance(cache, PolicyCacheOfLayer):
                tokens = Tokens(
                    **{"q_pre": q_pre, "k_pre": k_pre, "q": q, "k": k, "v": v},
                    positions=meta.positions,
                    is_real=meta.is_real,
                    sinks=self.sinks[...] if config.sinks else None,
                )
                o, cache = cache.mix(tokens, self.cache_spec, self.implementation)
                return project(o), cache
            q = checkpoint_name(q, "attention_q")
            k = checkpoint_name(k, "attention_k")
            v = checkpoint_name(v, "attention_v")
            if cache is not None and length is not None:
                cache = cache.append(k, v, meta, length)
        if cache is not None and length is not None:
            if self.decode is not None and decodes:
                o = self._attended(x, q, gate, meta, cache, length)
                return project(o, is_gated=True), cache
            k, v = cache.k.astype(q.dtype), cache.v.astype(q.dtype)
            # Padding queries attend to nothing, as without a cache.
            where: dict[str, Any] = {
                "q_segment_ids": meta.is_real.astype(jnp.int32),
                "kv_segment_ids": (cache.positions >= 0).astype(jnp.int32),
                "q_positions": meta.positions,
                "kv_positions": cache.positions,
            }
        elif meta.ids_are_given:
            where = {
                "q_segment_ids": meta.segment_ids,
                "kv_segment_ids": meta.segment_ids,
            }
        else:
            where = {}
        implementation: Any = self.implementation
        if cache is not None and implementation == "mosaic":
            # The kernel compares places by index, not by the positions of a cache:
            # naming it for whole sequences is no word about these calls.
            implementation = None
        o = attention(
            q,
            k,
            v,
            causal=True,
            window=config.window,
            sinks=self.sinks[...] if config.sinks else None,
            logit_cap=config.logit_cap,
            scale=config.scale,
            bounds=None if cache is not None else meta.table(self._tiles),
            implementation=implementation,
            **where,
        )  # [B, T, H, K]
        return project(o), cache

    def _appended(
        self,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        meta: PackingMetadata,
        cache: KVCache | KVCacheOfLayer,
        length: jax.Array,
    ) -> tuple[jax.Array, KVCache | KVCacheOfLayer]:
        """Projections to queries for `_attended`, and a cache with the keys in it."""
        config = self.config
        options: dict[str, Any] = {"implementation": self.appends}
        if config.qk_norm:
            norm = self.q_norm
            options |= {"zero_centered": norm.zero_centered, "eps": norm.eps}
            options |= {"q_scale": norm.scale[...], "k_scale": self.k_norm.scale[...]}
        if config.rope is not None:
            # Equal in all layers, of which the compiler keeps one.
            tables = rotary_tables(meta.positions, config.rope, config.head_dim)
            options["cos_sin"] = jnp.concatenate(tables, axis=-1)
        if self.decode == "mosaic" and q.shape[1] == 1:
            group = config.num_heads // config.num_kv_heads
            options["padded_group"] = padded_group(group)
        return cache.rope_append(q, k, v, meta, length, **options)

    def _attended(
        self,
        x: jax.Array,
        q: jax.Array,
        gate: jax.Array | None,
        meta: PackingMetadata,
        cache: KVCache | KVCacheOfLayer,
        length: jax.Array,
    ) -> jax.Array:
        """Outputs [B, T, H, K] of the heads by `decode_attention`, gated if they are.

        Args:
          x: what the layer was given.
          q: [B, T, H, K], or as `_appended` gives them.
          gate: logits of the gate, if they were computed with q.
          meta, cache, length: of the call, the tokens in the cache.
        """
        config, time = self.config, x.shape[1]
        if config.output_gate:
            if gate is None:
                gate = self.gate_proj(x, out_dtype=jnp.float32)
            gate = gate.reshape(*x.shape[:2], config.num_heads, config.head_dim)
        held = length + time
        if time == 1:
            held = jnp.where(meta.is_real[:, 0], held, jnp.zeros_like(held))
        o = cache.attend(
            q,
            held,
            heads=config.num_heads,
            window=config.window,
            sinks=self.sinks[...] if config.sinks else None,
            gate=gate,
            logit_cap=config.logit_cap,
            scale=config.scale,
            implementation=self.decode,
        )
        if time == 1:
            return o
        # Padding behind drafts saw slots of no meaning, nothing sees it.
        return jnp.where(meta.is_real[:, :, None, None], o, jnp.zeros_like(o))

    def _project(
        self,
        x: jax.Array,
        o: jax.Array,
        gate: jax.Array | None,
        norm: RMSNorm | None,
        *,
        is_gated: bool = False,
    ) -> jax.Array:
        """The heads' outputs [B, T, H, K], gated by x unless they are, as [B, T, D].

        With a norm, x is the stream, which is added, and `gate` has the gate's logits.
        """
        o = checkpoint_name(o, "attention_out").reshape(*x.shape[:2], -1)
        if self.config.output_gate and not is_gated:
            if gate is None:
                gate = self.gate_proj(x, out_dtype=jnp.float32)
            o = (o.astype(jnp.float32) * jax.nn.sigmoid(gate)).astype(self.dtype)
        if norm is None:
            return self.o_proj(o)
        return few_rows.output(self.products, x, o, self.o_proj, norm)

    def verify(
        self,
        x: jax.Array,
        meta: PackingMetadata,
        cache: KVCache | KVCacheOfLayer,
        length: jax.Array,
        norm: RMSNorm | None = None,
    ) -> tuple[jax.Array, PendingAttention]:
        """Reads drafted tokens, of which `commit` keeps a prefix.

        Args:
          x: [B, T, D], drafts behind what the cache holds.
          meta: documents and positions.
          cache: keys and values of earlier calls.
          length: i32[B], tokens in the cache.
          norm: if given, x is the stream in front of it, see `few_rows.adds_itself`.

        Returns:
          [B, T, D] as from `__call__`, or the stream after it, and what `commit` takes.
        """
        y, after = self._mixed(x, meta, cache, length, norm, are_drafts=True)
        assert after is not None  # a cache was given
        return y, PendingAttention(cache=after, length=length)

    def commit(
        self, pending: PendingAttention, accepted: jax.Array
    ) -> KVCache | KVCacheOfLayer:
        """Keeps the first drafts of each row.

        Args:
          pending: what `verify` returned.
          accepted: i32[B], real tokens to keep, at most those that were read.

        Returns:
          The cache as if the others had never been read.
        """
        return pending.cache.truncate(pending.length + accepted)
