"""Gated DeltaNet (Yang et al., arXiv:2412.06464) in the form of Qwen3-Next."""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike

from jaxaccel.cache.recurrent import RecurrentCache
from jaxaccel.data.batch import PackingMetadata
from jaxaccel.nn.implementation import Implementations, implementation_of
from jaxaccel.nn.linear import Linear, fan_in_init
from jaxaccel.nn.norm import RMSNorm, l2_normalize
from pallas_kernels.causal_conv1d import causal_conv1d
from pallas_kernels.gated_delta_rule import (
    gated_delta_rule,
    gated_delta_rule_step,
)


_DT_INITS = ("inverse_softplus", "ones")


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
    """

    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    conv_width: int = 4
    chunk_size: int = 64
    allow_negative_eigenvalues: bool = False
    dt_init: str = "inverse_softplus"

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
        cache: RecurrentCache | None = None,
        length: jax.Array | None = None,
    ) -> tuple[jax.Array, RecurrentCache | None]:
        """Mixes along time.

        Args:
          x: [B, T, D].
          meta: documents; state and convolution restart at each one's first token.
          cache: state left by earlier calls; each row is one document then.
          length: unused, taken so that all mixers are called alike.

        Returns:
          [B, T, D] in the compute dtype, and the state after the last real token
          (`None` without a cache).
        """
        del length
        config = self.config
        batch, time, _ = x.shape
        if meta.ids_are_given:
            x = jnp.where(meta.is_real[:, :, None], x, jnp.zeros((), x.dtype))
        # One document per row from an empty state never restarts inside the row.
        restarts = meta.ids_are_given or cache is not None
        qkv = checkpoint_name(self.qkv_proj(x), "gdn_qkv")  # [B, T, C]
        g, beta = self.gates(x, meta)
        qkv, conv = causal_conv1d(
            qkv,
            self.conv_kernel[...].astype(qkv.dtype),
            is_first=meta.is_first if restarts else None,
            is_real=meta.is_real if meta.ids_are_given else None,
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
        if cache is not None and time == 1:
            o, state = gated_delta_rule_step(
                q[:, 0], k[:, 0], v[:, 0], g[:, 0], beta[:, 0], cache.state
            )
            o = o[:, None]
        else:
            o, state = gated_delta_rule(
                q,
                k,
                v,
                g,
                beta,
                is_first=meta.is_first if restarts else None,
                initial_state=None if cache is None else cache.state,
                chunk_size=config.chunk_size,
                implementation=self.rule_implementation,
            )
        o = checkpoint_name(o, "gdn_out")  # [B, T, Hv, V]
        z = self.z_proj(x).reshape(value_heads)
        o = self.norm(o, gate=z, norm_before_gate=True)
        y = self.out_proj(o.reshape(batch, time, -1))
        if cache is None:
            return y, None
        return y, RecurrentCache(conv=conv.astype(cache.conv.dtype), state=state)
