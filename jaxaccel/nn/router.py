"""Choosing experts: scores, selection, weights, and what is reported about them."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxaccel.nn.mlp import check_activation
from jaxaccel.nn.split_product import split_product
from pallas_kernels.gemv import MAX_ROWS
from pallas_kernels.sort_dispatch import chosen_scores, top_experts


SCORES = ("softmax", "sigmoid", "topk_softmax")
EXCHANGES = ("auto", "allgather", "all_to_all", "ragged_all_to_all")
_BALANCE_COUNTS = ("selected", "unbiased")


class RouterBias(nnx.Variable):
    """Offsets that steer selection; moved by load, never by a gradient."""


class RouterLoad(nnx.Variable):
    """i32[E], what this step's micro-batches before this one sent to each expert."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class MoEConfig:
    """A mixture of experts.

    Attributes:
      num_experts: E.
      top_k: experts per token k.
      d_ff: hidden width F of each expert.
      d_latent: width of the space in which the routed experts work; 0 is the model's.
        Tokens are projected down before they are sent and up once after they are
        summed; router and shared expert read the model's width (LatentMoE,
        arXiv:2601.18089).
      activation: "swiglu" or "relu2", as in `MLPConfig`.
      swiglu_limit: of "swiglu", clamps gate and up and makes of them
        (up + 1) * gate * sigmoid(1.702 gate) (gpt-oss); `None` is the plain one.
      use_bias: learned biases on the router's logits and both products of an expert.
      score: "softmax" over all experts, then the top k (Qwen3-Next); "sigmoid" of
        each logit (DeepSeek-V3, Nemotron); or "topk_softmax", the top k logits, then
        a softmax over those (gpt-oss).
      normalize_weights: divide the chosen scores by their sum. Skipped for top_k = 1,
        where it would make every weight one and cut the router's gradient; without
        effect on "topk_softmax", whose weights sum to one already.
      scale: factor on the weights.
      num_groups: experts are split into this many groups of neighbours.
      top_groups: only the experts of this many groups are candidates.
      group_score_top: a group's score is the sum of this many best experts in it.
      bias_update_rate: step of the load-steered selection bias; 0 has no bias.
      shared_d_ff: hidden width of an expert that every token visits; 0 has none.
      shared_gate: multiply the shared expert by the sigmoid of a projection of x.
      balance_loss_coef: of the loss E / (k N^2) * sum_e sum_n p_ne * count_e over all
        N real tokens of the batch (Fedus et al., arXiv:2101.03961); under jit over
        several devices the batch is the global one. A training step that accumulates
        takes each micro-batch as the batch.
      sequence_balance_loss_coef: of the same loss within each row of the batch,
        averaged over rows (DeepSeek-V3, arXiv:2412.19437).
      global_balance_loss_coef: of the same loss with the counts of all micro-batches
        of the step so far (Qiu et al., arXiv:2501.11873); without accumulation it is
        that of `balance_loss_coef`.
      balance_counts: "selected" counts the real selection (DeepSeek); "unbiased" what
        would be selected without bias and groups (Megatron). For the losses only.
      z_loss_coef: of mean(logsumexp(logits)^2) (Zoph et al., arXiv:2202.08906).
      expert_axis: mesh axis over which experts lie where the ambient mesh has it, one
        of those that rows lie on; "" computes every expert beside its tokens. See
        `jaxaccel.nn.expert_parallel`, also for the next two.
      expert_exchange: how tokens get there, one of `EXCHANGES`.
      expert_capacity: rows that a device has room for, as a multiple of an even
        share; what does not fit is dropped and reported. 0 drops nothing. Dropped are
        the last rows of a device: with "allgather" those of its experts of the highest
        numbers, latest tokens first; with the others those of the last devices of the
        axis, of each the experts of the highest numbers first.
    """

    num_experts: int
    top_k: int
    d_ff: int
    d_latent: int = 0
    activation: str = "swiglu"
    swiglu_limit: float | None = None
    use_bias: bool = False
    score: str = "softmax"
    normalize_weights: bool = True
    scale: float = 1.0
    num_groups: int = 1
    top_groups: int = 1
    group_score_top: int = 2
    bias_update_rate: float = 0.0
    shared_d_ff: int = 0
    shared_gate: bool = False
    balance_loss_coef: float = 0.0
    sequence_balance_loss_coef: float = 0.0
    global_balance_loss_coef: float = 0.0
    balance_counts: str = "selected"
    z_loss_coef: float = 0.0
    expert_axis: str = ""
    expert_exchange: str = "auto"
    expert_capacity: float = 0.0

    def __post_init__(self):
        for name in ("num_experts", "d_ff", "num_groups", "group_score_top"):
            if getattr(self, name) < 1:
                raise ValueError(
                    f"MoEConfig: {name}={getattr(self, name)} must be positive"
                )
        if not 1 <= self.top_k <= self.num_experts:
            raise ValueError(
                f"MoEConfig: top_k={self.top_k} must be from 1 to "
                f"num_experts={self.num_experts}"
            )
        check_activation("MoEConfig", self.activation)
        for name, known in (
            ("score", SCORES),
            ("balance_counts", _BALANCE_COUNTS),
            ("expert_exchange", EXCHANGES),
        ):
            if getattr(self, name) not in known:
                raise ValueError(
                    f"MoEConfig: {name}={getattr(self, name)!r} is unknown, allowed "
                    f"are {', '.join(map(repr, known))}"
                )
        if self.num_experts % self.num_groups:
            raise ValueError(
                f"MoEConfig: num_experts={self.num_experts} must be a multiple of "
                f"num_groups={self.num_groups}"
            )
        if not 1 <= self.top_groups <= self.num_groups:
            raise ValueError(
                f"MoEConfig: top_groups={self.top_groups} must be from 1 to "
                f"num_groups={self.num_groups}"
            )
        in_group = self.num_experts // self.num_groups
        if self.top_k > self.top_groups * in_group:
            raise ValueError(
                f"MoEConfig: top_k={self.top_k} is more than the "
                f"{self.top_groups * in_group} experts of top_groups={self.top_groups}"
            )
        if self.num_groups > 1 and self.group_score_top > in_group:
            raise ValueError(
                f"MoEConfig: group_score_top={self.group_score_top} is more than the "
                f"{in_group} experts of a group"
            )
        for name in (
            "bias_update_rate",
            "d_latent",
            "shared_d_ff",
            "balance_loss_coef",
            "sequence_balance_loss_coef",
            "global_balance_loss_coef",
            "z_loss_coef",
            "expert_capacity",
        ):
            if getattr(self, name) < 0:
                raise ValueError(
                    f"MoEConfig: {name}={getattr(self, name)} must not be negative"
                )
        if self.swiglu_limit is not None and (
            self.swiglu_limit <= 0 or self.activation != "swiglu"
        ):
            raise ValueError(
                f"MoEConfig: swiglu_limit={self.swiglu_limit} with activation="
                f"{self.activation!r}, allowed are None and, with 'swiglu', positive "
                "numbers"
            )
        if self.shared_d_ff and (self.use_bias or self.swiglu_limit is not None):
            raise ValueError(
                f"MoEConfig: shared_d_ff={self.shared_d_ff} must be 0 with use_bias or "
                "swiglu_limit, which the shared expert does not have"
            )
        if self.global_balance_loss_coef and self.balance_counts == "unbiased":
            raise ValueError(
                f"MoEConfig: global_balance_loss_coef={self.global_balance_loss_coef} "
                "needs balance_counts='selected': the running counts are those of the "
                "real selection"
            )
        if self.shared_gate and not self.shared_d_ff:
            raise ValueError(
                "MoEConfig: shared_gate=True needs shared_d_ff above 0, got 0"
            )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class RouterAux:
    """What a router reports; padding takes no part in any of it.

    Attributes:
      counts: i32[E], tokens sent to each expert.
      balance_loss: f32[], the balance losses times their coefficients.
      z_loss: f32[], times its coefficient.
      entropy: f32[], of the shares of the counts in nats; ln(E) is perfect balance.
      max_violation: f32[], load of the fullest expert over the mean load, minus one.
      overflow: i32[], rows that had no room on their expert's device and were dropped.
    """

    counts: jax.Array
    balance_loss: jax.Array
    z_loss: jax.Array
    entropy: jax.Array
    max_violation: jax.Array
    overflow: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Routing:
    """Where each token goes.

    Attributes:
      expert_ids: i32[B, T, k], best first; E on padding, which no expert sees.
      weights: f32[B, T, k], zero on padding.
      logits: f32[B, T, E].
    """

    expert_ids: jax.Array
    weights: jax.Array
    logits: jax.Array


class Router(nnx.Module):
    """Scores experts in f32 and picks k per token, see `MoEConfig`.

    Attributes:
      kernel: f32[D, E].
      logit_bias: f32[E], only with `use_bias`; part of the logits, and learned.
      bias: f32[E] `RouterBias`, only with `bias_update_rate` above 0; for selection,
        never in the weights.
      load: i32[E] `RouterLoad`, only with `global_balance_loss_coef`.
    """

    def __init__(
        self,
        config: MoEConfig,
        d_model: int,
        *,
        implementation: Any = None,
        rngs: nnx.Rngs,
    ):
        """Creates the kernel, truncated normal with deviation `1 / sqrt(d_model)`.

        Args:
          config: the mixture.
          d_model: width D.
          implementation: of `top_experts`.
          rngs: source of the `params` key.
        """
        init = jax.nn.initializers.truncated_normal(d_model**-0.5)
        self.kernel = nnx.Param(
            init(rngs.params(), (d_model, config.num_experts), jnp.float32)
        )
        if config.use_bias:
            self.logit_bias = nnx.Param(jnp.zeros((config.num_experts,), jnp.float32))
        if config.bias_update_rate > 0:
            self.bias = RouterBias(jnp.zeros((config.num_experts,), jnp.float32))
        if config.global_balance_loss_coef:
            self.load = RouterLoad(jnp.zeros((config.num_experts,), jnp.int32))
        self.config = config
        self.implementation = implementation

    def __call__(self, x: jax.Array, is_real: jax.Array | None = None) -> Routing:
        """Routes tokens.

        Args:
          x: [B, T, D].
          is_real: bool[B, T], false on padding; `None` means no padding.

        Returns:
          The routing; equal scores go to the lowest expert.
        """
        config = self.config
        logits = _logits(x, self.kernel[...])
        if config.use_bias:
            logits = logits + self.logit_bias[...][None, None, :]
        scores = expert_scores(logits, config)
        expert_ids = select_experts(
            scores,
            config,
            bias=self.bias[...] if config.bias_update_rate > 0 else None,
            implementation=self.implementation,
        )
        flat = (a.reshape(-1, a.shape[-1]) for a in (scores, expert_ids))
        weights = chosen_scores(*flat).reshape(expert_ids.shape)  # [B, T, k]
        if config.score == "topk_softmax":
            weights = jax.nn.softmax(weights, axis=-1)
        elif config.normalize_weights and config.top_k > 1:
            total = jnp.sum(weights, axis=-1, keepdims=True)
            if config.score == "sigmoid":
                # Sigmoids can all vanish, a softmax's largest k cannot. The gradient
                # divides by the square, which must stay above the smallest f32.
                total = jnp.maximum(total + 1e-20, 1e-18)
            weights = weights / total
        weights = weights * config.scale
        if is_real is not None:
            real = is_real[:, :, None]
            expert_ids = jnp.where(real, expert_ids, config.num_experts)
            weights = jnp.where(real, weights, 0.0)
        return Routing(expert_ids=expert_ids, weights=weights, logits=logits)


def expert_scores(logits: jax.Array, config: MoEConfig) -> jax.Array:
    """Turns f32[..., E] logits into what selection and weights are made from."""
    if config.score == "softmax":
        return jax.nn.softmax(logits, axis=-1)
    if config.score == "sigmoid":
        return jax.nn.sigmoid(logits)
    return logits


def _logits(x: jax.Array, kernel: jax.Array) -> jax.Array:
    """f32[B, T, E], of f32 quality."""
    if x.dtype == jnp.bfloat16 and math.prod(x.shape[:-1]) <= MAX_ROWS:
        return _logits_of_few(x, kernel)
    if x.dtype == jnp.bfloat16:
        flat = split_product(x.reshape(-1, x.shape[-1]), kernel)
        return flat.reshape(*x.shape[:-1], -1)
    # HIGHEST: on a GPU the default would round f32 operands to TF32.
    return jnp.einsum(
        "btd,de->bte",
        x.astype(jnp.float32),
        kernel,
        precision=jax.lax.Precision.HIGHEST,
    )


def _logits_of_few(x: jax.Array, kernel: jax.Array) -> jax.Array:
    """`_logits` of a handful of rows, which wait for the kernel to be read.

    So it is read once, not written again in three parts, and by every core: XLA gives a
    column's sum to one of them, unless it is many sums.
    """
    depth, num_experts = kernel.shape
    pieces = math.gcd(depth, 64)
    parts = (pieces, depth // pieces)
    rows = x.astype(jnp.float32).reshape(-1, *parts, 1)
    products = rows * kernel.reshape(1, *parts, num_experts)
    # Without the barrier both sums become one again.
    sums = jax.lax.optimization_barrier(jnp.sum(products, axis=2))  # [rows, pieces, E]
    return jnp.sum(sums, axis=1).reshape(*x.shape[:-1], num_experts)


def select_experts(
    scores: jax.Array,
    config: MoEConfig,
    *,
    bias: jax.Array | None = None,
    implementation: Any = None,
) -> jax.Array:
    """Picks the k best experts of the best groups.

    Args:
      scores: f32[..., E].
      config: the mixture.
      bias: f32[E], added for the choice only.
      implementation: of `top_experts`.

    Returns:
      i32[..., k], best first; equal ones by their ids. Not differentiable.
    """
    expert_ids = top_experts(
        scores.reshape(-1, config.num_experts),
        config.top_k,
        bias=None if bias is None else jax.lax.stop_gradient(bias),
        num_groups=config.num_groups,
        top_groups=config.top_groups,
        group_score_top=config.group_score_top,
        implementation=implementation,
    )
    return expert_ids.reshape(*scores.shape[:-1], config.top_k)


def router_aux(
    routing: Routing,
    counts: jax.Array,
    config: MoEConfig,
    is_real: jax.Array | None = None,
    *,
    load_before: jax.Array | None = None,
    overflow: jax.Array | None = None,
) -> RouterAux:
    """Computes the losses and load figures of a routing.

    Args:
      routing: what the router returned.
      counts: i32[E], tokens per expert.
      config: the mixture, with the coefficients.
      is_real: bool[B, T], false on padding; `None` means no padding.
      load_before: i32[E], counts of the step's earlier micro-batches; `None` is zero.
      overflow: i32[], dropped rows; `None` is zero.

    Returns:
      The report. Losses whose coefficient is zero cost nothing.
    """
    batch, time, num_experts = routing.logits.shape
    if is_real is None:
        is_real = jnp.ones((batch, time), bool)
    real = is_real.astype(jnp.float32)
    row_tokens = jnp.sum(real, axis=1)  # [B]
    tokens = jnp.sum(row_tokens)
    zero = jnp.zeros((), jnp.float32)

    balance = zero
    coefs = (
        config.balance_loss_coef,
        config.global_balance_loss_coef,
        config.sequence_balance_loss_coef,
    )
    if any(coefs):
        probabilities = _probabilities(routing.logits, config)
        row_mass = jnp.einsum("bte,bt->be", probabilities, real)
        row_counts = _row_counts(routing, config, is_real).astype(jnp.float32)
        mass = jnp.sum(row_mass, axis=0)
        load = counts.astype(jnp.float32)
        if config.balance_counts == "unbiased":
            load = jnp.sum(row_counts, axis=0)
        if config.balance_loss_coef:
            norm = config.top_k * jnp.maximum(tokens, 1.0) ** 2
            raw = num_experts * jnp.sum(mass * load) / norm
            balance += config.balance_loss_coef * raw
        if config.global_balance_loss_coef:
            if load_before is not None:
                load = load + load_before.astype(jnp.float32)
            share = load / jnp.maximum(jnp.sum(load), 1.0)
            raw = num_experts * jnp.sum(mass * share) / jnp.maximum(tokens, 1.0)
            balance += config.global_balance_loss_coef * raw
        if config.sequence_balance_loss_coef:
            raw = jnp.sum(row_mass * row_counts, axis=1)  # [B]
            norm = config.top_k * jnp.maximum(row_tokens, 1.0) ** 2
            rows = jnp.maximum(jnp.sum(row_tokens > 0), 1).astype(jnp.float32)
            mean = jnp.sum(num_experts * raw / norm) / rows
            balance += config.sequence_balance_loss_coef * mean

    z_loss = zero
    if config.z_loss_coef:
        log_z = jax.nn.logsumexp(routing.logits, axis=-1)  # [B, T]
        z_loss = jnp.sum(log_z * log_z * real) / jnp.maximum(tokens, 1.0)
        z_loss = config.z_loss_coef * z_loss

    load = counts.astype(jnp.float32)
    share = load / jnp.maximum(jnp.sum(load), 1.0)
    entropy = -jnp.sum(share * jnp.log(jnp.maximum(share, 1e-30)))
    return RouterAux(
        counts=counts,
        balance_loss=balance,
        z_loss=z_loss,
        entropy=entropy,
        max_violation=jnp.max(share) * num_experts - 1.0,
        overflow=jnp.zeros((), jnp.int32) if overflow is None else overflow,
    )


def _probabilities(logits: jax.Array, config: MoEConfig) -> jax.Array:
    if config.score != "sigmoid":
        return jax.nn.softmax(logits, axis=-1)
    scores = jax.nn.sigmoid(logits)
    return scores / (jnp.sum(scores, axis=-1, keepdims=True) + 1e-20)


def _row_counts(routing: Routing, config: MoEConfig, is_real: jax.Array) -> jax.Array:
    """Counts tokens per row and expert, i32[B, E]."""
    ids = routing.expert_ids
    if config.balance_counts == "unbiased":
        scores = jax.lax.stop_gradient(expert_scores(routing.logits, config))
        _, ids = jax.lax.top_k(scores, config.top_k)
        ids = jnp.where(is_real[:, :, None], ids, config.num_experts)
    batch = ids.shape[0]
    row = jnp.broadcast_to(jnp.arange(batch)[:, None, None], ids.shape)
    counts = jnp.zeros((batch, config.num_experts), jnp.int32)
    # Integers: the order of the additions cannot change the sum.
    return counts.at[row, ids].add(1, mode="drop")
