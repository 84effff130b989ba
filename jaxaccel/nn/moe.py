"""Mixture of experts over one sort of the tokens."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike

from jaxaccel.data.batch import PackingMetadata
from jaxaccel.nn.implementation import Implementations, implementation_of
from jaxaccel.nn.linear import Linear, fan_in_init
from jaxaccel.nn.mlp import MLP, clamped_swiglu, relu2, swiglu
from jaxaccel.nn.router import MoEConfig, Router, RouterAux, router_aux
from pallas_kernels.grouped_matmul import grouped_matmul
from pallas_kernels.sort_dispatch import combine, permute, sort_dispatch


class ExpertBias(nnx.Module):
    """A vector per expert, added to the rows that visit it.

    Attributes:
      bias: param_dtype[E, F].
    """

    def __init__(
        self,
        num_experts: int,
        width: int,
        *,
        param_dtype: DTypeLike,
        implementation: Implementations,
    ):
        """Creates the biases, zero at first.

        Args:
          num_experts: E.
          width: F.
          param_dtype: dtype of the parameters.
          implementation: see `nn.implementation`.
        """
        self.bias = nnx.Param(jnp.zeros((num_experts, width), param_dtype))
        name = implementation_of("grouped_matmul", implementation)
        # There is no kernel for matrices of one row: naming it means the large ones.
        self.implementation: Any = "reference" if name == "reference" else "xla"

    def __call__(self, rows: jax.Array, group_sizes: jax.Array) -> jax.Array:
        """Adds them.

        Args:
          rows: [M, F], sorted by expert.
          group_sizes: i32[E], rows of each expert.

        Returns:
          [M, F] in the dtype of `rows`; rows of no expert are as they were.
        """
        # A product with a column of ones: its gradient adds an expert's rows in their
        # order, where that of a lookup is a scatter with atomics.
        ones = jnp.ones((rows.shape[0], 1), rows.dtype)
        bias = self.bias[...].astype(rows.dtype)[:, None, :]  # [E, 1, F]
        return rows + grouped_matmul(
            ones, bias, group_sizes, implementation=self.implementation
        )


class MoE(nnx.Module):
    """Sends each token through k of E experts, see `MoEConfig`.

    No token is dropped and nothing of size [tokens, experts, width] is built: tokens
    are sorted by expert once, and both products run over the sorted rows.

    Attributes:
      router: `Router`.
      w_in: [E, D, 2F], gate then up, for "swiglu"; [E, D, F] for "relu2".
      w_out: [E, F, D].
      bias_in: ExpertBias [E, 2F] or [E, F], only with `use_bias`.
      bias_out: ExpertBias [E, D], only with `use_bias`.
      shared: MLP, only with `shared_d_ff`.
      shared_gate: Linear [D, 1], only with `shared_gate`.
    """

    def __init__(
        self,
        config: MoEConfig,
        d_model: int,
        *,
        out_gain: float = 1.0,
        dtype: DTypeLike = jnp.float32,
        param_dtype: DTypeLike = jnp.float32,
        implementation: Implementations = None,
        rngs: nnx.Rngs,
    ):
        """Creates the parameters; the router's are f32 under any dtype.

        Args:
          config: the mixture.
          d_model: width D.
          out_gain: multiplies the initial deviation of the output projections.
          dtype: dtype of the experts' computation.
          param_dtype: dtype of the experts' parameters.
          implementation: see `nn.implementation`.
          rngs: source of the `params` key.
        """
        kind = {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
        experts, d_ff = config.num_experts, config.d_ff
        d_in = 2 * d_ff if config.activation == "swiglu" else d_ff
        self.router = Router(config, d_model, rngs=rngs)
        self.w_in = nnx.Param(
            fan_in_init(expert_axis=True)(
                rngs.params(), (experts, d_model, d_in), param_dtype
            )
        )
        self.w_out = nnx.Param(
            fan_in_init(out_gain, expert_axis=True)(
                rngs.params(), (experts, d_ff, d_model), param_dtype
            )
        )
        if config.use_bias:
            bias = {"param_dtype": param_dtype, "implementation": implementation}
            self.bias_in = ExpertBias(experts, d_in, **bias)
            self.bias_out = ExpertBias(experts, d_model, **bias)
        if config.shared_d_ff:
            self.shared = MLP(
                d_model,
                config.shared_d_ff,
                config.activation,
                out_gain=out_gain,
                **kind,
            )
        if config.shared_gate:
            self.shared_gate = Linear(d_model, 1, **kind)
        self.config = config
        self.dtype = jnp.dtype(dtype)
        self.matmul_implementation = implementation_of("grouped_matmul", implementation)
        self.dispatch_implementation = implementation_of(
            "sort_dispatch", implementation
        )

    def __call__(
        self, x: jax.Array, meta: PackingMetadata
    ) -> tuple[jax.Array, RouterAux]:
        """Applies the mixture.

        Args:
          x: [B, T, D].
          meta: padding is sent to no expert.

        Returns:
          [B, T, D] in the compute dtype, and the router's report.
        """
        config = self.config
        d_model = x.shape[-1]
        is_real = meta.is_real if meta.ids_are_given else None
        routing = self.router(x, is_real)
        expert_ids = routing.expert_ids.reshape(-1, config.top_k)  # [B*T, k]
        weights = routing.weights.reshape(-1, config.top_k)  # [B*T, k]
        plan = sort_dispatch(
            expert_ids,
            config.num_experts,
            implementation=self.dispatch_implementation,
        )
        tokens = x.astype(self.dtype).reshape(-1, d_model)  # [B*T, D]
        rows = permute(tokens, plan)  # [B*T*k, D]
        hidden = self._experts(rows, self.w_in[...], plan.group_sizes)
        if config.use_bias:
            hidden = self.bias_in(hidden, plan.group_sizes)
        hidden = checkpoint_name(hidden, "moe_hidden")
        if config.swiglu_limit is not None:
            gate, up = jnp.split(hidden, 2, axis=-1)
            hidden = clamped_swiglu(gate, up, config.swiglu_limit)  # [B*T*k, F]
        elif config.activation == "swiglu":
            hidden = swiglu(*jnp.split(hidden, 2, axis=-1))  # [B*T*k, F]
        else:
            hidden = relu2(hidden)
        out = self._experts(hidden, self.w_out[...], plan.group_sizes)
        if config.use_bias:
            out = self.bias_out(out, plan.group_sizes)
        y = combine(out, plan, weights).reshape(x.shape)  # [B, T, D]
        if config.shared_d_ff:
            shared = self.shared(x)
            if config.shared_gate:
                gate = jax.nn.sigmoid(self.shared_gate(x, out_dtype=jnp.float32))
                shared = (shared.astype(jnp.float32) * gate).astype(self.dtype)
            y = y + shared
        return y, router_aux(routing, plan.group_sizes, config, is_real)

    def _experts(self, rows, kernel, group_sizes):
        return grouped_matmul(
            rows,
            kernel.astype(self.dtype),
            group_sizes,
            implementation=self.matmul_implementation,
        )
