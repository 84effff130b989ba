"""Dispatch by one sort of unique integer keys, in as few launches as XLA allows."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.sort_dispatch.plan import DispatchPlan, row_weights, slot_values


def sort_dispatch(expert_ids: jax.Array, num_experts: int) -> DispatchPlan:
    """Arguments and results as in `api.sort_dispatch`."""
    slots = expert_ids.shape[1]
    rows = expert_ids.size
    iota = jnp.arange(rows, dtype=jnp.int32)
    # Keys are unique, so that no sort can break a tie in another order.
    keys = jnp.sort(expert_ids.reshape(-1).astype(jnp.int32) * rows + iota)
    order = keys % rows
    borders = jnp.arange(num_experts + 1, dtype=jnp.int32) * rows
    # A rolled search launches every step of its loop.
    starts = jnp.searchsorted(keys, borders, method="scan_unrolled").astype(jnp.int32)
    row = (
        jnp.zeros((rows,), jnp.int32)
        .at[order]
        .set(
            iota,
            unique_indices=True,
            mode="promise_in_bounds",
            wrap_negative_indices=False,
        )
    )
    return DispatchPlan(
        token=order // slots,
        row=row.reshape(expert_ids.shape),
        group_sizes=jnp.diff(starts),
    )


def _take(x: jax.Array, rows: jax.Array) -> jax.Array:
    """Rows that are known to be there."""
    return (
        jnp.asarray(x)
        .at[rows]
        .get(mode="promise_in_bounds", wrap_negative_indices=False)
    )


def _token_rows(x: jax.Array, plan: DispatchPlan, scale: jax.Array | None = None):
    """[M, D]: each row's token, times f32[M]; 0 where no token is routed."""
    rows = plan.token.shape[0]
    routed = jnp.arange(rows, dtype=jnp.int32) < jnp.sum(plan.group_sizes)
    found = _take(x, plan.token)
    if scale is not None:
        found = (found.astype(jnp.float32) * scale[:, None]).astype(x.dtype)
    return jnp.where(routed[:, None], found, jnp.zeros((), x.dtype))


def _slot_sums(
    y: jax.Array, plan: DispatchPlan, weights: jax.Array | None
) -> jax.Array:
    """f32[T, D]: sums over the rows of a token, with weights f32[T, k] or without."""
    routed = plan.row < jnp.sum(plan.group_sizes)
    # A plan that was cut off has slots whose row is behind the last one.
    rows = _take(y, jnp.minimum(plan.row, y.shape[0] - 1)).astype(jnp.float32)
    if weights is not None:
        rows = rows * weights[:, :, None]
    # One fusion, whose loop over the slots is the reduction's. A chain of sums, slot
    # after slot, is cut into a launch for each, with the f32 sum in memory between.
    return jnp.sum(jnp.where(routed[:, :, None], rows, 0.0), axis=1)


@jax.custom_vjp
def permute(x: jax.Array, plan: DispatchPlan) -> jax.Array:
    """Arguments and results as in `api.permute`."""
    return _token_rows(x, plan)


def _permute_forward(x, plan):
    return _token_rows(x, plan), plan


def _permute_backward(plan, dy):
    return _slot_sums(dy, plan, None).astype(dy.dtype), None


permute.defvjp(_permute_forward, _permute_backward)


@jax.custom_vjp
def combine(y: jax.Array, plan: DispatchPlan, weights: jax.Array) -> jax.Array:
    """Arguments and results as in `api.combine`."""
    return _slot_sums(y, plan, weights).astype(y.dtype)


def _combine_forward(y, plan, weights):
    return combine(y, plan, weights), (y, plan, weights)


def _combine_backward(residuals, do):
    y, plan, weights = residuals
    dy = spread(do, plan, weights)
    # Rows are read where they lie; a token's few numbers are carried to it afterwards.
    products = _take(do, plan.token).astype(jnp.float32) * y.astype(jnp.float32)
    return dy, None, slot_values(plan, jnp.sum(products, axis=1))


combine.defvjp(_combine_forward, _combine_backward)


def spread(x: jax.Array, plan: DispatchPlan, weights: jax.Array) -> jax.Array:
    """Arguments and results as in `api.spread`."""
    return _token_rows(x, plan, row_weights(plan, weights))


def top_experts(
    scores: jax.Array,
    bias: jax.Array | None,
    top_k: int,
    *,
    num_groups: int,
    top_groups: int,
    group_score_top: int,
) -> jax.Array:
    """Arguments and results as in `api.top_experts`, the ids alone."""
    choice = scores if bias is None else scores + bias[None, :]
    # `top_k` may tell a zero's sign, and puts a negative NaN last.
    choice = jnp.where(choice == 0, 0.0, choice)
    choice = jnp.where(jnp.isnan(choice), jnp.nan, choice)
    if num_groups > 1:
        grouped = choice.reshape(choice.shape[0], num_groups, -1)
        best, _ = jax.lax.top_k(grouped, group_score_top)
        total = best[..., 0]
        for place in range(1, group_score_top):
            total = total + best[..., place]
        _, groups = jax.lax.top_k(total, top_groups)  # [T, top_groups]
        kept = jnp.any(
            groups[:, :, None] == jnp.arange(num_groups)[None, None, :], axis=1
        )
        # -inf and not 0: with a negative bias, 0 would win over a kept expert.
        grouped = jnp.where(kept[:, :, None], grouped, -jnp.inf)
        choice = grouped.reshape(choice.shape)
    _, ids = jax.lax.top_k(choice, top_k)
    return ids.astype(jnp.int32)
