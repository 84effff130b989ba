"""The lookup as XLA runs it well: a gather that fills, without a mask of the rows."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.engram_gather.reference import BLOCK, factors


# No table has this row: a gather fills there.
_NO_ROW = 2**31 - 1


def engram_gather(
    table: jax.Array, ids: jax.Array, *, scale: jax.Array | None
) -> jax.Array:
    """Arguments and result as in `api.engram_gather`."""
    # A gather takes -1 for the last row.
    ids = jnp.where(ids < 0, _NO_ROW, ids)
    rows = jnp.take(table, ids, axis=0, mode="fill")  # [..., d]
    if scale is None:
        return rows
    powers = jnp.take(scale, ids, axis=0, mode="fill", fill_value=255)
    blocks = rows.astype(jnp.float32).reshape(*ids.shape, -1, BLOCK)
    rows = blocks * factors(powers)[..., None]
    return rows.reshape(*ids.shape, -1).astype(jnp.bfloat16)
