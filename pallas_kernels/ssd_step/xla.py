"""One read of the state for the output and the update."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.ssd_step.layer import Layer
from pallas_kernels.ssd_step.reference import convolved, normed


def step(
    layer: Layer,
    xbc: jax.Array,
    dt: jax.Array,
    z: jax.Array,
    window: jax.Array,
    state: jax.Array,
    is_first: jax.Array | None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """As `reference.step`; the output is read from the state before the token."""
    token, window = convolved(layer, xbc, dt, window, state.shape[1:])
    before = state.astype(jnp.float32)
    if is_first is not None:
        before = jnp.where(is_first[:, None, None, None], 0.0, before)
    decay = jnp.exp(-jnp.exp(layer.A_log)[None] * token.step)  # [B, H]
    written = token.step[:, :, None] * token.x  # [B, H, V]
    along = jnp.sum(token.b * token.c, axis=-1)  # [B, H]
    # A sum of products and no matrix product, so that it shares its read of the state.
    read = jnp.sum(before * token.c[:, :, None, :], axis=-1)  # [B, H, V]
    y = decay[:, :, None] * read + along[:, :, None] * written
    y = y + layer.D[None, :, None] * token.x
    added = written[..., None] * token.b[:, :, None, :]
    state = decay[:, :, None, None] * before + added
    return normed(layer, y.reshape(z.shape), z), window, state
