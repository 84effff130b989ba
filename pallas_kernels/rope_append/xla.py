"""The reference's arithmetic, with caches that are written by scatters."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from pallas_kernels.rope_append import reference


def _put(
    into: jax.Array, what: jax.Array, slots: jax.Array, layer: jax.Array | None
) -> jax.Array:
    """As `reference.put`."""
    length = into.shape[1 if layer is None else 2]
    slots = jnp.where(slots < 0, jnp.full_like(slots, length), slots)
    rows = jnp.arange(len(slots), dtype=jnp.int32)[:, None]
    place = (jnp.broadcast_to(rows, slots.shape), slots)
    if layer is not None:
        place = (layer, *place)
    return into.at[place].set(what.astype(into.dtype), mode="drop")


rope_append = functools.partial(reference.rope_append, put=_put)
