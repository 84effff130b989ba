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
    return jnp.einsum("tkd,tk->td", rows, weights).astype(y.dtype)
