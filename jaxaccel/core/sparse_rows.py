"""Rows of a large table that one batch reads: each once, with a sorted gradient."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class RowPlan:
    """Which rows a batch reads, each once.

    Attributes:
      unique: i32[K], ascending row numbers, then numbers from `num_rows` on, which no
        table has: a gather fills there, a scatter drops.
      slots: i32[...], place of each lookup in `unique`, K where the id is no row.
      count: i32[], how many of `unique` are rows.
      num_missing: i32[], lookups of an id that is no row, or that found no place.
    """

    unique: jax.Array
    slots: jax.Array
    count: jax.Array
    num_missing: jax.Array


def plan_rows(ids: jax.Array, num_rows: int, *, capacity: int | None = None) -> RowPlan:
    """Finds the rows that a batch reads, by one sort.

    Args:
      ids: i32[...].
      num_rows: rows of the table.
      capacity: K, places for different rows; as many as there can be by default.
        Lookups beyond it are counted and get no row.

    Returns:
      The plan.

    Raises:
      ValueError: the ids are no int32, or capacity and table exceed their range.
    """
    if ids.dtype != jnp.int32:
        raise ValueError(f"ids are {ids.dtype}, expected int32")
    most = min(ids.size, num_rows)
    capacity = most if capacity is None else capacity
    if capacity < 1 or num_rows + capacity >= 2**31:
        raise ValueError(
            f"capacity {capacity} and {num_rows} rows: the first must be at least 1, "
            "and their sum is to be below 2^31"
        )
    flat = ids.reshape(-1)
    is_row = (flat >= 0) & (flat < num_rows)
    flat = jnp.where(is_row, flat, num_rows)
    iota = jnp.arange(flat.size, dtype=jnp.int32)
    ordered, source = jax.lax.sort((flat, iota), num_keys=1, is_stable=True)
    is_new = jnp.concatenate([jnp.ones(1, bool), ordered[1:] != ordered[:-1]])
    is_new = is_new & (ordered < num_rows)
    rank = jnp.cumsum(is_new.astype(jnp.int32)) - 1
    unique = num_rows + jnp.arange(capacity, dtype=jnp.int32)
    # Ranks of new rows differ; all others, and those beyond the end, fall off.
    place = jnp.where(is_new & (rank < capacity), rank, capacity + iota)
    unique = unique.at[place].set(ordered, mode="drop", unique_indices=True)
    found = (ordered < num_rows) & (rank < capacity)
    slots = jnp.zeros_like(flat)
    slots = slots.at[source].set(
        jnp.where(found, rank, capacity), unique_indices=True, mode="drop"
    )
    return RowPlan(
        unique=unique,
        slots=slots.reshape(ids.shape),
        count=jnp.minimum(jnp.sum(is_new, dtype=jnp.int32), capacity),
        num_missing=jnp.sum(~found, dtype=jnp.int32),
    )


def gather_rows(table: jax.Array, unique: jax.Array, fill: float = 0.0) -> jax.Array:
    """Reads `RowPlan.unique` of [N, ...]; places without a row hold `fill`."""
    return table.at[unique].get(mode="fill", fill_value=fill)


def scatter_rows(table: jax.Array, unique: jax.Array, rows: jax.Array) -> jax.Array:
    """Writes rows [K, ...] back in place, where `table` is donated."""
    return table.at[unique].set(
        rows.astype(table.dtype), mode="drop", unique_indices=True
    )


@jax.custom_vjp
def take_rows(rows: jax.Array, slots: jax.Array) -> jax.Array:
    """`rows[slots]` whose gradient sums sorted runs.

    XLA compiles an unsorted scatter-add of many equal indices to a loop of atomic
    exchanges; sorted runs have an order, too, so that equal calls give equal bits.

    Args:
      rows: [K, d].
      slots: i32[...]; NaN comes back for a slot outside.

    Returns:
      [..., d].
    """
    return jnp.take(rows, slots, axis=0, mode="fill")


def _take_forward(rows, slots):
    # An empty array tells the backward pass shape and dtype without keeping the rows.
    return take_rows(rows, slots), (slots, jnp.zeros((rows.shape[0], 0), rows.dtype))


def _take_backward(residuals, dy):
    slots, like = residuals
    num_rows = like.shape[0]
    iota = jnp.arange(slots.size, dtype=jnp.int32)
    ordered, source = jax.lax.sort(
        (slots.reshape(-1), iota), num_keys=1, is_stable=True
    )
    dy = dy.reshape(slots.size, -1).astype(jnp.float32)
    total = jax.ops.segment_sum(
        dy[source], ordered, num_rows, indices_are_sorted=True, mode="drop"
    )
    return total.astype(like.dtype), np.zeros(slots.shape, jax.dtypes.float0)


take_rows.defvjp(_take_forward, _take_backward)
