"""Mixture of experts over one sort of the tokens."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike

from jaxaccel.core.sharding import BATCH_AXES
from jaxaccel.data.batch import PackingMetadata
from jaxaccel.nn import few_rows
from jaxaccel.nn.expert_parallel import (
    ExpertSharding,
    say_indivisible,
    sharded_experts,
)
from jaxaccel.nn.experts import (
    ExpertOps,
    ExpertWeights,
    routed_experts,
    visited_experts,
)
from jaxaccel.nn.implementation import Implementations, implementation_of
from jaxaccel.nn.linear import Linear, fan_in_init
from jaxaccel.nn.mlp import MLP
from jaxaccel.nn.router import MoEConfig, Router, RouterAux, Routing, router_aux
from pallas_kernels.sort_dispatch import sort_dispatch


class ExpertBias(nnx.Module):
    """A vector per expert, added to the rows that visit it.

    Attributes:
      bias: param_dtype[E, F].
    """

    def __init__(self, num_experts: int, width: int, *, param_dtype: DTypeLike):
        """Creates the biases, zero at first.

        Args:
          num_experts: E.
          width: F.
          param_dtype: dtype of the parameters.
        """
        self.bias = nnx.Param(jnp.zeros((num_experts, width), param_dtype))


class MoE(nnx.Module):
    """Sends each token through k of E experts, see `MoEConfig`.

    No token is dropped and nothing of size [tokens, experts, width] is built: tokens
    are sorted by expert once, and both products run over the sorted rows. See
    `jaxaccel.nn.experts` for what is kept for the backward pass, and
    `jaxaccel.nn.expert_parallel` for experts on several devices, where rows may be
    dropped if the config gives a capacity.

    With `d_latent` the experts work on `latent_in(x)`, L wide, and `latent_out` maps
    their weighted sum back, once a token; L is D without (LatentMoE, arXiv 2601.18089;
    Nemotron 3, arXiv 2512.20856). Both maps are plain: no norm, no activation.

    Attributes:
      router: `Router`, over the D of x.
      latent_in: Linear [D, L], only with `d_latent`.
      latent_out: Linear [L, D], only with `d_latent`.
      w_in: [E, L, 2F], gate then up, for "swiglu"; [E, L, F] for "relu2".
      w_out: [E, F, L].
      bias_in: ExpertBias [E, 2F] or [E, F], only with `use_bias`.
      bias_out: ExpertBias [E, L], only with `use_bias`.
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
        dispatch = implementation_of("sort_dispatch", implementation)
        self.router = Router(config, d_model, implementation=dispatch, rngs=rngs)
        d_expert = config.d_latent or d_model
        # The projection that adds to the stream has the gain.
        experts_gain = 1.0 if config.d_latent else out_gain
        if config.d_latent:
            self.latent_in = Linear(d_model, d_expert, **kind)
            self.latent_out = Linear(
                d_expert, d_model, kernel_init=fan_in_init(out_gain), **kind
            )
        self.w_in = nnx.Param(
            fan_in_init(expert_axis=True)(
                rngs.params(), (experts, d_expert, d_in), param_dtype
            )
        )
        self.w_out = nnx.Param(
            fan_in_init(experts_gain, expert_axis=True)(
                rngs.params(), (experts, d_ff, d_expert), param_dtype
            )
        )
        if config.use_bias:
            self.bias_in = ExpertBias(experts, d_in, param_dtype=param_dtype)
            self.bias_out = ExpertBias(experts, d_expert, param_dtype=param_dtype)
        if config.shared_d_ff:
            self.shared = MLP(
                d_model,
                config.shared_d_ff,
                config.activation,
                out_gain=out_gain,
                implementation=implementation,
                **kind,
            )
        if config.shared_gate:
            self.shared_gate = Linear(d_model, 1, **kind)
        self.config = config
        self.dtype = jnp.dtype(dtype)
        self.products = few_rows.named(implementation)
        self.visits = few_rows.named(implementation, "expert_gemv")
        self.ops = ExpertOps(
            activation=config.activation,
            dtype=self.dtype,
            swiglu_limit=config.swiglu_limit,
            matmul=implementation_of("grouped_matmul", implementation),
            dispatch=dispatch,
        )

    def __call__(
        self, x: jax.Array, meta: PackingMetadata, *, decodes: bool = False
    ) -> tuple[jax.Array, RouterAux]:
        """Applies the mixture.

        Args:
          x: [B, T, D].
          meta: padding is sent to no expert.
          decodes: whether nobody asks for a gradient. Then few tokens are multiplied
            by latent and shared maps in `gemv` and by their experts in `expert_gemv`,
            without a sort, where the implementation names these; experts with biases
            or a limit stay sorted, those on several devices have neither.

        Returns:
          [B, T, D] in the compute dtype, and the router's report.
        """
        config = self.config
        is_real = meta.is_real if meta.ids_are_given else None
        routing = self.router(x, is_real)
        h = x.astype(self.dtype)
        decodes = decodes and _expert_sharding(config) is None
        few = decodes and few_rows.applies(self.products, x)
        visits = decodes and self._is_plain and few_rows.applies(self.visits, x)

        def mapped(linear, x):
            return (
                few_rows.project(self.products, x, (linear,))[0] if few else linear(x)
            )

        if config.d_latent:
            h = checkpoint_name(mapped(self.latent_in, h), "moe_latent")  # [B, T, L]
        routed = self._routed_few if visits else self._routed
        y, counts, overflow = routed(h, routing)
        if config.d_latent:
            y = mapped(self.latent_out, y)  # [B, T, D]
        if config.shared_d_ff:
            shared = self.shared.of_few(x) if few else self.shared(x)
            if config.shared_gate:
                gate = jax.nn.sigmoid(self.shared_gate(x, out_dtype=jnp.float32))
                shared = (shared.astype(jnp.float32) * gate).astype(self.dtype)
            y = y + shared
        load = self.router.load[...] if config.global_balance_loss_coef else None
        aux = router_aux(
            routing, counts, config, is_real, load_before=load, overflow=overflow
        )
        return y, aux

    @property
    def _is_plain(self) -> bool:
        """Whether experts are products and an activation."""
        return not self.config.use_bias and self.config.swiglu_limit is None

    def _routed_few(
        self, h: jax.Array, routing: Routing
    ) -> tuple[jax.Array, jax.Array, None]:
        """As `_routed`, of a handful of tokens: each visit reads its expert."""
        config = self.config
        ids = routing.expert_ids.reshape(-1, config.top_k)
        weights = routing.weights.reshape(ids.shape)
        w_in, w_out = (w[...].astype(self.dtype) for w in (self.w_in, self.w_out))
        y = visited_experts(
            *(h.reshape(-1, h.shape[-1]), weights, ids, w_in, w_out),
            activation=config.activation,
            implementation=self.visits,
        )
        counts = jnp.zeros((config.num_experts,), jnp.int32)
        counts = counts.at[ids.reshape(-1)].add(1, mode="drop")
        return y.reshape(h.shape), counts, None

    def _routed(
        self, h: jax.Array, routing: Routing
    ) -> tuple[jax.Array, jax.Array, jax.Array | None]:
        """The experts' weighted sum [B, T, L], their counts, and dropped rows."""
        config = self.config
        biases = ()
        if config.use_bias:
            biases = (self.bias_in.bias[...], self.bias_out.bias[...])
        experts = ExpertWeights(self.w_in[...], self.w_out[...], *biases)
        sharding = _expert_sharding(config)
        if sharding is not None and h.shape[0] % sharding.row_parts:
            # A prompt that is continued, for example.
            say_indivisible(h.shape[0], sharding.row_parts)
        elif sharding is not None:
            return sharded_experts(
                sharding, self.ops, h, routing.weights, routing.expert_ids, experts
            )
        plan = sort_dispatch(
            routing.expert_ids.reshape(-1, config.top_k),
            config.num_experts,
            implementation=self.ops.dispatch,
        )
        y = routed_experts(
            self.ops,
            h.reshape(-1, h.shape[-1]),
            routing.weights.reshape(-1, config.top_k),
            plan,
            experts,
        )
        return y.reshape(h.shape), plan.group_sizes, None


def _expert_sharding(config: MoEConfig) -> ExpertSharding | None:
    """How experts lie under the ambient mesh; `None` if they lie beside the tokens."""
    mesh = jax.sharding.get_abstract_mesh()
    if not config.expert_axis or mesh.empty:
        return None
    if mesh.shape.get(config.expert_axis, 1) == 1:
        return None
    return ExpertSharding(
        mesh=mesh,
        axis=config.expert_axis,
        batch_axes=tuple(axis for axis in BATCH_AXES if axis in mesh.shape),
        exchange=config.expert_exchange,
        capacity=config.expert_capacity,
    )
