"""Rows of pools by slot, and which of them a call leaves alone."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def check_slots(slots: Any, batch: int, count: int) -> None:
    """Refuses slots that are no i32[B], and, in a NumPy array, outside or doubled ones.

    Values on a device are not looked at: that would wait for them.

    Raises:
      ValueError: naming the slot.
    """
    if slots.shape != (batch,) or slots.dtype != jnp.int32:
        raise ValueError(
            f"slots is {slots.dtype}{list(slots.shape)}, expected int32[{batch}]"
        )
    if not isinstance(slots, np.ndarray):
        return
    if ((slots < -1) | (slots >= count)).any():
        bad = slots[(slots < -1) | (slots >= count)][0]
        raise ValueError(
            f"slot {bad} is outside the pool, allowed are -1 to {count - 1}"
        )
    named, times = np.unique(slots[slots >= 0], return_counts=True)
    if (times > 1).any():
        raise ValueError(
            f"slot {named[times > 1][0]} is named by {times.max()} rows, allowed is one"
        )


def inside(slots: jax.Array | None, count: int) -> jax.Array | None:
    """The slots, -1 for those outside a pool of `count`."""
    if slots is None:
        return None
    return jnp.where((slots < 0) | (slots >= count), -1, slots)


def live_rows(slots: jax.Array | None, is_real: jax.Array | None) -> jax.Array | None:
    """bool[B], which rows read and write the pools; `None` if all do."""
    if slots is None:
        return is_real
    live = slots >= 0
    return live if is_real is None else live & is_real


def take(
    pool: jax.Array, slots: jax.Array | None, is_first: jax.Array | None = None
) -> jax.Array:
    """The rows' entries of a pool, zeros where a document begins."""
    rows = pool if slots is None else pool[jnp.maximum(slots, 0)]
    return rows if is_first is None else masked(rows, ~is_first)


def put(
    pool: jax.Array,
    slots: jax.Array | None,
    live: jax.Array | None,
    rows: jax.Array,
) -> jax.Array:
    """The pool with the live rows' entries replaced, all others bit for bit."""
    rows = rows.astype(pool.dtype)
    if slots is None:
        if live is None:
            return rows
        return jnp.where(live.reshape(_column(rows)), rows, pool)
    if live is None:
        live = slots >= 0
    # Rows left out get places of their own outside of the pool: all are distinct.
    outside = pool.shape[0] + jnp.arange(rows.shape[0], dtype=jnp.int32)
    places = jnp.where(live, slots, outside)
    return pool.at[places].set(rows, mode="drop", unique_indices=True)


def masked(rows: jax.Array, keep: jax.Array | None) -> jax.Array:
    """Zeros in all rows but those to keep."""
    if keep is None:
        return rows
    return jnp.where(keep.reshape(_column(rows)), rows, jnp.zeros((), rows.dtype))


def _column(rows: jax.Array) -> tuple[int, ...]:
    return (-1,) + (1,) * (rows.ndim - 1)
