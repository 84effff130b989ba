"""The lookup as it is written, on a device that has the whole table."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def host_gather(table: jax.Array, ids: jax.Array) -> jax.Array:
    """Arguments and result as in `api.host_gather`."""
    if jax.typeof(table).memory_space == jax.memory.Space.Host:
        table = jax.device_put(table, jax.memory.Space.Device)
    is_row = (ids >= 0) & (ids < table.shape[0])
    rows = table[jnp.clip(ids, 0, table.shape[0] - 1)]
    return jnp.where(is_row[..., None], rows, jnp.zeros((), table.dtype))
