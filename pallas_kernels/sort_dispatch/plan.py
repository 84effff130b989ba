"""The plan that says which token each sorted row holds, and back."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class DispatchPlan:
    """Where the k slots of T tokens go when they are sorted by expert; M = T k.

    Attributes:
      token: i32[M], the source token of each sorted row.
      row: i32[T, k], the sorted row of each slot; one behind the last row, which
        `limit_rows` makes, counts as not routed.
      group_sizes: i32[E], rows of each expert; rows past their sum are not routed.
    """

    token: jax.Array
    row: jax.Array
    group_sizes: jax.Array


def limit_rows(plan: DispatchPlan, rows: int) -> DispatchPlan:
    """Cuts the plan off behind its first rows, so that buffers may be shorter.

    Args:
      plan: of `sort_dispatch`.
      rows: M' <= M, rows that are kept; slots behind them count as not routed.

    Returns:
      A plan of M' rows; `row` still tells the place that a slot would have.

    Raises:
      ValueError: `rows` is not from 1 to M.
    """
    if not 1 <= rows <= plan.token.shape[0]:
        raise ValueError(f"rows is {rows}, expected 1 to {plan.token.shape[0]}")
    ends = jnp.minimum(jnp.cumsum(plan.group_sizes), rows)
    return DispatchPlan(
        token=plan.token[:rows],
        row=plan.row,
        group_sizes=jnp.diff(ends, prepend=0).astype(jnp.int32),
    )


def row_weights(plan: DispatchPlan, weights: jax.Array) -> jax.Array:
    """The weight of each sorted row.

    Args:
      plan: of `sort_dispatch`.
      weights: f32[T, k].

    Returns:
      f32[M].
    """
    # Each row has one slot, so its weight is placed, never added. Slots behind the
    # rows of a plan that was cut off are dropped.
    by_row = jnp.zeros((plan.token.shape[0],), jnp.float32)
    return by_row.at[plan.row.reshape(-1)].set(
        weights.reshape(-1), unique_indices=True, mode="drop"
    )


def slot_values(plan: DispatchPlan, values: jax.Array) -> jax.Array:
    """The value of each slot's row, the transpose of `row_weights`.

    Args:
      plan: of `sort_dispatch`.
      values: f32[M].

    Returns:
      f32[T, k], 0 where the slot is not routed.
    """
    routed = plan.row < jnp.sum(plan.group_sizes)
    row = jnp.minimum(plan.row, values.shape[0] - 1)
    return jnp.where(routed, values[row], 0.0)
