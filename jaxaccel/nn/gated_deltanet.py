"""Gated DeltaNet (Yang et al., arXiv:2412.06464) in the form of Qwen3-Next."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, cast

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike

from jaxaccel.cache.recurrent import (
    PendingRecurrent,
    RecurrentCache,
    RecurrentCacheOfLayer,
)
from jaxaccel.data.batch import ChunkStarts, ConvBorders, PackingMetadata
from jaxaccel.nn import few_rows
from jaxaccel.nn.implementation import Implementations, implementation_of
from jaxaccel.nn.linear import Linear, fan_in_init
from jaxaccel.nn.norm import RMSNorm, l2_normalize
from pallas_kernels.causal_conv1d import causal_conv1d
from pallas_kernels.causal_conv1d import choose as choose_conv
from pallas_kernels.gated_delta_rule import choose as choose_rule
from pallas_kernels.gated_delta_rule import gated_delta_rule
from pallas_kernels.gated_delta_step import (
    Layer,
    choose,
    gated_delta_commit,
    gated_delta_step,
    gated_delta_verify,
)


_DT_INITS = ("inverse_softplus", "ones")
_STATE_DTYPES = ("float32", "bfloat16")


@dataclasses.dataclass(frozen=True, kw_only=True)
class GatedDeltaNetConfig:
    """A Gated DeltaNet layer.

    Attributes:
      num_key_heads: heads Hk of queries and keys.
      num_value_heads: heads Hv of values, state and output; value head h uses key
        head h // (Hv / Hk).
      key_dim: K.
      value_dim: V.
      conv_width: taps W of the short convolution over queries, keys and values.
      chunk_size: tokens per chunk of the chunked form.
      allow_negative_eigenvalues: beta in (0, 2) instead of (0, 1)
        (Grazzi et al., arXiv:2411.12537).
      dt_init: "inverse_softplus", so that softplus(dt_bias) is log-uniform in
        [1e-3, 0.1] (flash-linear-attention's layer, after Mamba); or "ones"
        (Hugging Face Qwen3-Next).
      state_dtype: of the state that a cache keeps, "float32" or "bfloat16"; what is
        computed with it is f32 either way.
    """

    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    conv_width: int = 4
    chunk_size: int = 64
    allow_negative_eigenvalues: bool = False
    dt_init: str = "inverse_softplus"
    state_dtype: str = "float32"

    def __post_init__(self):
        for name in (
            "num_key_heads",
            "num_value_heads",
            "key_dim",
            "value_dim",
            "chunk_size",
        ):
            if getattr(self, name) < 1:
                raise ValueError(
                    f"GatedDeltaNetConfig: {name}={getattr(self, name)} must be "
                    "positive"
                )
        if self.num_value_heads % self.num_key_heads:
            raise ValueError(
                f"GatedDeltaNetConfig: num_value_heads={self.num_value_heads} must be "
                f"a multiple of num_key_heads={self.num_key_heads}"
            )
        if self.conv_width < 2:
            raise ValueError(
                f"GatedDeltaNetConfig: conv_width={self.conv_width} must be at least 2"
            )
        if self.dt_init not in _DT_INITS:
            raise ValueError(
                f"GatedDeltaNetConfig: dt_init={self.dt_init!r} is unknown, allowed "
                f"are {', '.join(map(repr, _DT_INITS))}"
            )
        if self.state_dtype not in _STATE_DTYPES:
            raise ValueError(
                f"GatedDeltaNetConfig: state_dtype={self.state_dtype!r} is unknown, "
                f"allowed are {', '.join(map(repr, _STATE_DTYPES))}"
            )

    @property
    def conv_channels(self) -> int:
        """C, the channels of [q | k | v]."""
        return (
            2 * self.num_key_heads * self.key_dim
            + self.num_value_heads * self.value_dim
        )


def _init_dt_bias(key: jax.Array, heads: int, kind: str) -> jax.Array:
    if kind == "ones":
        return jnp.ones((heads,), jnp.float32)
    low, high = math.log(1e-3), math.log(0.1)
    dt = jnp.exp(jax.random.uniform(key, (heads,), jnp.float32, low, high))
    return dt + jnp.log(-jnp.expm1(-dt))


class GatedDeltaNet(nnx.Module):
    """A mixer whose memory is one matrix per head, see `GatedDeltaNetConfig`.

    Attributes:
      qkv_proj: Linear [D, C], its outputs flat [q | k | v].
      z_proj: Linear [D, Hv*V], the output gate.
      b_proj: Linear [D, Hv], beta before the sigmoid.
      a_proj: Linear [D, Hv], the decay's input.
      conv_kernel: [W, C], the last tap on the current token.
      A_log: f32[Hv].
      dt_bias: f32[Hv].
      norm: RMSNorm over V with a plain scale, before the gate.
      out_proj: Linear [Hv*V, D].
    """

    def __init__(
        self,
        config: GatedDeltaNetConfig,
        d_model: int,
        *,
        norm_eps: float = 1e-6,
        out_gain: float = 1.0,
        dtype: DTypeLike = jnp.float32,
        param_dtype: DTypeLike = jnp.float32,
        implementation: Implementations = None,
        rngs: nnx.Rngs,
    ):
        """Creates the parameters; `A_log` and `dt_bias` are f32 under any dtype.

        Args:
          config: the layer.
          d_model: width D.
          norm_eps: of the output norm.
          out_gain: multiplies the initial deviation of `out_proj`.
          dtype: dtype of the computation outside gates, decay and state.
          param_dtype: dtype of the other parameters.
          implementation: see `nn.implementation`.
          rngs: source of the `params` key.
        """
        kind = {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
        heads = config.num_value_heads
        d_value = heads * config.value_dim
        width, channels = config.conv_width, config.conv_channels
        self.qkv_proj = Linear(d_model, channels, **kind)
        self.z_proj = Linear(d_model, d_value, **kind)
        self.b_proj = Linear(d_model, heads, **kind)
        self.a_proj = Linear(d_model, heads, **kind)
        bound = width**-0.5
        self.conv_kernel = nnx.Param(
            jax.random.uniform(
                rngs.params(), (width, channels), param_dtype, -bound, bound
            )
        )
        # U(0, 16) as in the Hugging Face layer, kept off zero, whose logarithm is not
        # a number that can be trained.
        decay = jax.random.uniform(rngs.params(), (heads,), jnp.float32, 0.01, 16.0)
        self.A_log = nnx.Param(jnp.log(decay))
        self.dt_bias = nnx.Param(_init_dt_bias(rngs.params(), heads, config.dt_init))
        self.norm = RMSNorm(
            config.value_dim,
            eps=norm_eps,
            param_dtype=param_dtype,
            implementation=implementation,
        )
        self.out_proj = Linear(
            d_value, d_model, kernel_init=fan_in_init(out_gain), **kind
        )
        self.config = config
        self.dtype = jnp.dtype(dtype)
        self.conv_implementation = implementation_of("causal_conv1d", implementation)
        self.rule_implementation = implementation_of("gated_delta_rule", implementation)
        self.step_implementation = implementation_of("gated_delta_step", implementation)
        self.products = few_rows.named(implementation)
        # Both `gated_delta_verify` and the `gated_delta_commit` behind it.
        self.verify_implementation: Any = implementation_of(
            "gated_delta_verify", implementation
        )

    @property
    def _starts(self) -> ChunkStarts:
        """The table that the rule's kernels read, if it is they that run."""
        return ChunkStarts(chunk=self.config.chunk_size)

    @property
    def _borders(self) -> ConvBorders:
        """The tables that the convolution's kernels read, if it is they that run."""
        return ConvBorders(width=self.config.conv_width)

    def tables(
        self, batch: int, time: int, *, cached: bool = False
    ) -> tuple[ChunkStarts | ConvBorders, ...]:
        """Says which tables of `PackingMetadata` a call reads.

        Args:
          batch, time: B and T of the call.
          cached: whether it has a cache; one token is then a step of decoding.

        Returns:
          The tables, none where the implementation that will run needs none.
        """
        if cached and time == 1:
            return ()
        config = self.config
        q, v = (
            jax.ShapeDtypeStruct((batch, time, heads, dim), self.dtype)
            for heads, dim in (
                (config.num_key_heads, config.key_dim),
                (config.num_value_heads, config.value_dim),
            )
        )
        rule = choose_rule(
            *(q, q, v),
            chunk_size=config.chunk_size,
            implementation=self.rule_implementation,
        )
        x, weight = (
            jax.ShapeDtypeStruct((*shape, config.conv_channels), self.dtype)
            for shape in ((batch, time), (config.conv_width,))
        )
        conv = choose_conv(x, weight, implementation=self.conv_implementation)
        found: list[ChunkStarts | ConvBorders] = []
        if rule.implementation == "mosaic":
            found.append(self._starts)
        # With a cache, a row's first document goes on and its borders are others.
        if conv.implementation == "mosaic" and not cached:
            found.append(self._borders)
        return tuple(found)

    def init_cache(
        self, batch: int, max_length: int, dtype: DTypeLike
    ) -> RecurrentCache:
        """Makes the state before any token; its size does not depend on the length."""
        del max_length
        config = self.config
        return RecurrentCache.empty(
            batch,
            config.conv_width,
            config.conv_channels,
            config.num_value_heads,
            config.value_dim,
            config.key_dim,
            dtype,
            config.state_dtype,
        )

    def gates(self, x: jax.Array, meta: PackingMetadata) -> tuple[jax.Array, jax.Array]:
        """Computes how much each head forgets and writes at each token.

        Args:
          x: [B, T, D].
          meta: padding gets g = 0 and beta = 0: the state passes through it.

        Returns:
          g f32[B, T, Hv], the log of the decay, at most 0; beta f32[B, T, Hv].
        """
        a = self.a_proj(x, out_dtype=jnp.float32)  # [B, T, Hv]
        b = self.b_proj(x, out_dtype=jnp.float32)  # [B, T, Hv]
        rate = jnp.exp(self.A_log[...])[None, None, :]
        g = -rate * jax.nn.softplus(a + self.dt_bias[...][None, None, :])
        beta = jax.nn.sigmoid(b)
        if self.config.allow_negative_eigenvalues:
            beta = 2.0 * beta
        if meta.ids_are_given:
            real = meta.is_real[:, :, None]
            g, beta = jnp.where(real, g, 0.0), jnp.where(real, beta, 0.0)
        return g, beta

    def __call__(
        self,
        x: jax.Array,
        meta: PackingMetadata,
        cache: RecurrentCache | RecurrentCacheOfLayer | None = None,
        length: jax.Array | None = None,
    ) -> tuple[jax.Array, RecurrentCache | RecurrentCacheOfLayer | None]:
        """Mixes along time.

        Args:
          x: [B, T, D].
          meta: documents; state and convolution restart at each one's first token.
          cache: state left by earlier calls; each row is one document then.
          length: unused, taken so that all mixers are called alike.

        Returns:
          [B, T, D] in the compute dtype, and the state after the last real token, of
          the cache's type (`None` without one).
        """
        config = self.config
        batch, time, _ = x.shape
        if cache is not None and time == 1:
            return self._step(x, meta, cache)
        if isinstance(cache, RecurrentCacheOfLayer):
            y, row = self(x, meta, cache.row, length)
            return y, cache.replace(cast(RecurrentCache, row))
        del length
        if meta.ids_are_given:
            x = jnp.where(meta.is_real[:, :, None], x, jnp.zeros((), x.dtype))
        # One document per row from an empty state never restarts inside the row.
        restarts = meta.ids_are_given or cache is not None
        qkv = checkpoint_name(self.qkv_proj(x), "gdn_qkv")  # [B, T, C]
        g, beta = self.gates(x, meta)
        with jax.named_scope("conv"):
            qkv, conv = causal_conv1d(
                qkv,
                self.conv_kernel[...].astype(qkv.dtype),
                is_first=meta.is_first if restarts else None,
                is_real=meta.is_real if meta.ids_are_given else None,
                borders=meta.table(self._borders) if cache is None else None,
                initial_state=None if cache is None else cache.conv.astype(qkv.dtype),
                activation="silu",
                implementation=self.conv_implementation,
            )
        d_key = config.num_key_heads * config.key_dim
        q, k, v = jnp.split(qkv, (d_key, 2 * d_key), axis=-1)
        key_heads = (batch, time, config.num_key_heads, config.key_dim)
        q = l2_normalize(q.reshape(key_heads)).astype(self.dtype)  # [B, T, Hk, K]
        k = l2_normalize(k.reshape(key_heads)).astype(self.dtype)  # [B, T, Hk, K]
        value_heads = (batch, time, config.num_value_heads, config.value_dim)
        v = v.reshape(value_heads)  # [B, T, Hv, V]
        state = None if cache is None else cache.state.astype(jnp.float32)
        starts = meta.table(self._starts)
        o, state = gated_delta_rule(
            q,
            k,
            v,
            g,
            beta,
            is_first=meta.is_first if restarts and starts is None else None,
            starts=starts,
            initial_state=state,
            chunk_size=config.chunk_size,
            implementation=self.rule_implementation,
        )
        o = checkpoint_name(o, "gdn_out")  # [B, T, Hv, V]
        z = self.z_proj(x).reshape(value_heads)
        o = self.norm(o, gate=z, norm_before_gate=True)
        y = self.out_proj(o.reshape(batch, time, -1))
        if cache is None:
            return y, None
        state = state.astype(cache.state.dtype)
        return y, RecurrentCache(conv=conv.astype(cache.conv.dtype), state=state)

    def _layer(self) -> Layer:
        """The parameters that decoding needs between the projections."""
        return Layer(
            conv_weight=self.conv_kernel[...].astype(self.dtype),
            A_log=self.A_log[...],
            dt_bias=self.dt_bias[...],
            norm_scale=self.norm.scale[...],
            key_heads=self.config.num_key_heads,
            norm_eps=self.norm.eps,
            negative_eigenvalues=self.config.allow_negative_eigenvalues,
        )

    def _projections(
        self, x: jax.Array, norm: RMSNorm | None = None
    ) -> tuple[jax.Array, ...]:
        """qkv, a, b, z of [B, T, D], as decoding takes them, or of its norm."""
        if few_rows.applies(self.products, x):
            maps = (self.qkv_proj, self.a_proj, self.b_proj, self.z_proj)
            dtypes = (self.dtype, jnp.float32, jnp.float32, self.dtype)
            return few_rows.project(
                self.products, x, maps, norm=norm, out_dtypes=dtypes
            )
        a = self.a_proj(x, out_dtype=jnp.float32)
        b = self.b_proj(x, out_dtype=jnp.float32)
        return self.qkv_proj(x), a, b, self.z_proj(x)

    def _step(
        self,
        x: jax.Array,
        meta: PackingMetadata,
        cache: RecurrentCache | RecurrentCacheOfLayer,
        norm: RMSNorm | None = None,
    ) -> tuple[jax.Array, RecurrentCache | RecurrentCacheOfLayer]:
        """One token, see `__call__`; a padded row keeps its cache and gives zeros.

        With a norm, x is the stream in front of it, and the result that behind.
        """
        qkv, a, b, z = (p[:, 0] for p in self._projections(x, norm))
        layer = self._layer()

        def decode(pools, slots=None, implementation=self.step_implementation):
            return gated_delta_step(
                qkv,
                a,
                b,
                z,
                layer,
                pools.conv,
                pools.state,
                slots,
                is_real=meta.is_real[:, 0] if meta.ids_are_given else None,
                is_first=meta.is_first[:, 0],
                implementation=implementation,
            )

        if isinstance(cache, RecurrentCache):
            y, conv, state = decode(cache)
            new = RecurrentCache(conv=conv, state=state)
        else:
            pools = cache.pools
            choice = choose(
                *(qkv, a, b, z, layer, pools.conv, pools.state),
                implementation=self.step_implementation,
            )
            if choice.implementation == "mosaic":
                # It updates the layer's part where it is.
                y, *written = decode(pools, cache.slots, choice)
                new = cache.with_pools(*written)
            else:
                y, conv, state = decode(cache.row, implementation=choice)
                new = cache.replace(RecurrentCache(conv=conv, state=state))
        return few_rows.output(self.products, x, y[:, None], self.out_proj, norm), new

    @property
    def awaited(self) -> tuple[Linear, ...]:
        """Maps behind its step, see `few_rows.Stream.foresee`."""
        return (self.out_proj,)

    def added(
        self,
        x: jax.Array,
        norm: RMSNorm,
        meta: PackingMetadata,
        cache: RecurrentCache | RecurrentCacheOfLayer | None,
        length: jax.Array | None,
    ) -> tuple[jax.Array, RecurrentCache | RecurrentCacheOfLayer | None]:
        """x [B, T, D] + self(norm(x), ...), see `few_rows.adds_itself`."""
        if cache is not None and x.shape[1] == 1:
            return self._step(x, meta, cache, norm)
        x = few_rows.settled(x)
        y, cache = self(norm(x), meta, cache, length)
        return x + y, cache

    def verify(
        self,
        x: jax.Array,
        meta: PackingMetadata,
        cache: RecurrentCache | RecurrentCacheOfLayer,
        length: jax.Array | None = None,
        norm: RMSNorm | None = None,
    ) -> tuple[jax.Array, PendingRecurrent]:
        """Mixes tokens of which only a prefix may be kept, for speculative decoding.

        Args:
          x: [B, T, D], each row its document's next tokens, then padding if any.
          meta: as for `__call__`; only the first token may begin a document.
          cache: state left by earlier calls.
          length: unused, taken so that all mixers are called alike.
          norm: if given, x is the stream in front of it, see `few_rows.adds_itself`.

        Returns:
          [B, T, D] in the compute dtype, or the stream after it, and what `commit`
          needs. Padding and what stands behind it gets values without meaning.
        """
        del length
        if isinstance(cache, RecurrentCacheOfLayer):
            cache = cache.row
        qkv, a, b, z = self._projections(x, norm)
        y, pending = gated_delta_verify(
            qkv,
            a,
            b,
            z,
            self._layer(),
            cache.conv,
            cache.state,
            is_first=meta.is_first[:, 0],
            implementation=self.verify_implementation,
        )
        y = few_rows.output(self.products, x, y, self.out_proj, norm)
        return y, PendingRecurrent(cache=cache, tokens=pending)

    def commit(self, pending: PendingRecurrent, accepted: jax.Array) -> RecurrentCache:
        """Keeps the first of the tokens that `verify` has seen.

        Args:
          pending: of `verify`.
          accepted: i32[B], how many to keep, 0 to T; 0 leaves a row's cache as it was.

        Returns:
          The cache as if the accepted tokens alone had been read.
        """
        conv, state = gated_delta_commit(
            pending.tokens,
            accepted,
            pending.cache.conv,
            pending.cache.state,
            implementation=self.verify_implementation,
        )
        return RecurrentCache(conv=conv, state=state)
