"""Dispatch by one sort of unique integer keys; gradients are gathers only."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.sort_dispatch.plan import DispatchPlan, row_weights


def sort_dispatch(expert_ids: jax.Array, num_experts: int) -> DispatchPlan:
    """Arguments and results as in `api.sort_dispatch`."""
    slots = expert_ids.shape[1]
    rows = expert_ids.size
    iota = jnp.arange(rows, dtype=jnp.int32)
    # Keys are unique, so that no sort can break a tie in another order.
    keys = jnp.sort(expert_ids.reshape(-1).astype(jnp.int32) * rows + iota)
    order = keys % rows
    borders = jnp.arange(num_experts + 1, dtype=jnp.int32) * rows
    starts = jnp.searchsorted(keys, borders).astype(jnp.int32)
    row = jnp.zeros((rows,), jnp.int32).at[order].set(iota, unique_indices=True)
    return DispatchPlan(
        token=order // slots,
        row=row.reshape(expert_ids.shape),
        group_sizes=jnp.diff(starts),
    )


def _gather_rows(x: jax.Array, plan: DispatchPlan) -> jax.Array:
    routed = jnp.arange(plan.token.shape[0], dtype=jnp.int32) < jnp.sum(
        plan.group_sizes
    )
    rows = jnp.asarray(x).at[plan.token].get(mode="promise_in_bounds")
    return jnp.where(routed[:, None], rows, jnp.zeros((), x.dtype))


def _slot_rows(y: jax.Array, plan: DispatchPlan, slot: int) -> jax.Array:
    """f32[T, D]: the row of one slot of each token, 0 where it is not routed."""
    row = plan.row[:, slot]
    routed = row < jnp.sum(plan.group_sizes)
    # A plan that was cut off has slots whose row is behind the last one.
    row = jnp.minimum(row, y.shape[0] - 1)
    rows = jnp.asarray(y).at[row].get(mode="promise_in_bounds")
    return jnp.where(routed[:, None], rows.astype(jnp.float32), 0.0)


@jax.custom_vjp
def permute(x: jax.Array, plan: DispatchPlan) -> jax.Array:
    """Arguments and results as in `api.permute`."""
    return _gather_rows(x, plan)


def _permute_forward(x, plan):
    return _gather_rows(x, plan), plan


def _permute_backward(plan, dy):
    total = _slot_rows(dy, plan, 0)
    for slot in range(1, plan.row.shape[1]):
        total = total + _slot_rows(dy, plan, slot)
    return total.astype(dy.dtype), None


permute.defvjp(_permute_forward, _permute_backward)


@jax.custom_vjp
def combine(y: jax.Array, plan: DispatchPlan, weights: jax.Array) -> jax.Array:
    """Arguments and results as in `api.combine`."""
    total = weights[:, 0, None] * _slot_rows(y, plan, 0)
    for slot in range(1, plan.row.shape[1]):
        total = total + weights[:, slot, None] * _slot_rows(y, plan, slot)
    return total.astype(y.dtype)


def _combine_forward(y, plan, weights):
    return combine(y, plan, weights), (y, plan, weights)


def _combine_backward(residuals, do):
    y, plan, weights = residuals
    do32 = do.astype(jnp.float32)
    d_weights = jnp.stack(
        [
            jnp.sum(do32 * _slot_rows(y, plan, slot), axis=1)
            for slot in range(plan.row.shape[1])
        ],
        axis=1,
    )
    dy = _gather_rows(do32, plan) * row_weights(plan, weights)[:, None]
    return dy.astype(y.dtype), None, d_weights


combine.defvjp(_combine_forward, _combine_backward)
