"""Dispatch by a stable argsort, with gradients left to jax."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.sort_dispatch.plan import DispatchPlan


def sort_dispatch(expert_ids: jax.Array, num_experts: int) -> DispatchPlan:
    """Arguments and results as in `api.sort_dispatch`."""
    slots = expert_ids.shape[1]
    flat = expert_ids.reshape(-1)
    order = jnp.argsort(flat, stable=True).astype(jnp.int32)
    row = jnp.argsort(order).astype(jnp.int32)
    experts = jnp.arange(num_experts, dtype=flat.dtype)
    sizes = jnp.sum(flat[None, :] == experts[:, None], axis=1, dtype=jnp.int32)
    return DispatchPlan(
        token=order // slots, row=row.reshape(expert_ids.shape), group_sizes=sizes
    )


def permute(x: jax.Array, plan: DispatchPlan) -> jax.Array:
    """Arguments and results as in `api.permute`."""
    routed = jnp.arange(plan.token.shape[0]) < jnp.sum(plan.group_sizes)
    return jnp.where(routed[:, None], x[plan.token], jnp.zeros((), x.dtype))


def combine(y: jax.Array, plan: DispatchPlan, weights: jax.Array) -> jax.Array:
    """Arguments and results as in `api.combine`."""
    routed = plan.row < jnp.sum(plan.group_sizes)
    rows = jnp.where(routed[..., None], y[plan.row].astype(jnp.float32), 0.0)
    # HIGHEST: on a GPU the default would round f32 operands to TF32.
    precision = jax.lax.Precision.HIGHEST
    return jnp.einsum("tkd,tk->td", rows, weights, precision=precision).astype(y.dtype)


def spread(x: jax.Array, plan: DispatchPlan, weights: jax.Array) -> jax.Array:
    """Arguments and results as in `api.spread`."""
    slots = jnp.argsort(plan.row.reshape(-1))[: plan.token.shape[0]]
    rows = permute(x, plan).astype(jnp.float32)
    return (rows * weights.reshape(-1)[slots][:, None]).astype(x.dtype)


def top_experts(
    scores: jax.Array,
    bias: jax.Array | None,
    top_k: int,
    *,
    num_groups: int,
    top_groups: int,
    group_score_top: int,
) -> jax.Array:
    """Arguments and results as in `api.top_experts`, by stable sorts."""

    def best_first(values):
        return jnp.argsort(values, axis=-1, stable=True, descending=True)

    choice = scores if bias is None else scores + bias[None, :]
    if num_groups > 1:
        grouped = choice.reshape(choice.shape[0], num_groups, -1)
        ordered = jnp.take_along_axis(grouped, best_first(grouped), axis=-1)
        total = ordered[..., 0]
        for place in range(1, group_score_top):
            total = total + ordered[..., place]
        place = jnp.argsort(best_first(total), axis=-1)  # [T, G], 0 is the best
        kept = (place < top_groups)[:, :, None]
        choice = jnp.where(kept, grouped, -jnp.inf).reshape(choice.shape)
    return best_first(choice)[:, :top_k].astype(jnp.int32)
