"""A lookup as it is written: each id's row, times its scales."""

from __future__ import annotations

import jax
import jax.numpy as jnp


BLOCK = 32  # values that share a scale
SCALE_BIAS = 127


def factors(scale: jax.Array) -> jax.Array:
    """2^(e - 127) in float32; NaN for e = 255, which is no power."""
    power = scale.astype(jnp.int32)
    # The smallest is below what a float32's exponent says: half of 2^-126.
    bits = jnp.where(power == 0, 1 << 22, power << 23)
    bits = jnp.where(power == 255, 0x7FC00000, bits)
    return jax.lax.bitcast_convert_type(bits.astype(jnp.int32), jnp.float32)


def engram_gather(
    table: jax.Array, ids: jax.Array, *, scale: jax.Array | None
) -> jax.Array:
    """Arguments and result as in `api.engram_gather`."""
    num_rows = table.shape[0]
    is_row = (ids >= 0) & (ids < num_rows)
    ids = jnp.clip(ids, 0, num_rows - 1)
    rows = table[ids].astype(jnp.float32)  # [..., d]
    dtype = table.dtype
    if scale is not None:
        blocks = rows.reshape(*ids.shape, -1, BLOCK)
        rows = blocks * factors(scale[ids])[..., None]
        rows = rows.reshape(*ids.shape, -1)
        dtype = jnp.dtype(jnp.bfloat16)
    return jnp.where(is_row[..., None], rows, jnp.nan).astype(dtype)
