"""Inverse of a batch of unit lower triangular matrices, stable for any keys."""

from __future__ import annotations

import jax
import jax.numpy as jnp


_BASE = 16
_HIGHEST = jax.lax.Precision.HIGHEST


def _substitute(lower: jax.Array) -> jax.Array:
    """Forward substitution on [M, n, n] blocks, all blocks side by side."""
    size = lower.shape[-1]
    # Rows first and blocks last, so that each step is one long vector operation.
    lower = jnp.transpose(lower, (1, 2, 0))  # [n, n, M]
    eye = jnp.eye(size, dtype=lower.dtype)
    rows = jnp.broadcast_to(eye[:1, :, None], (1, size, lower.shape[-1]))
    for i in range(1, size):
        known = jnp.sum(lower[i, :i, None, :] * rows, axis=0)  # [n, M]
        rows = jnp.concatenate([rows, (eye[i][:, None] - known)[None]], axis=0)
    return jnp.transpose(rows, (2, 0, 1))


def unit_lower_inverse(lower: jax.Array) -> jax.Array:
    """(I + lower)^-1 by substitution on 16 x 16 blocks, then by merging blocks.

    The Neumann product (I - L)(I + L^2)(I + L^4)... needs fewer steps, but powers of
    L overflow for keys that resemble each other; merging never leaves the size of
    the true inverse.

    Args:
      lower: f32[..., C, C], zero on and above the diagonal; C is a power of two.

    Returns:
      f32[..., C, C], unit lower triangular.
    """
    *batch, size, _ = lower.shape
    lower = lower.reshape(-1, size, size)
    width = min(_BASE, size)
    # [M, C / width, width, width]: the diagonal blocks.
    blocks = jnp.stack(
        [lower[:, i : i + width, i : i + width] for i in range(0, size, width)],
        axis=1,
    )
    count = size // width
    inverse = _substitute(blocks.reshape(-1, width, width))
    inverse = inverse.reshape(-1, count, width, width)
    while width < size:
        below = jnp.stack(
            [
                lower[:, i + width : i + 2 * width, i : i + width]
                for i in range(0, size, 2 * width)
            ],
            axis=1,
        )
        first, second = inverse[:, 0::2], inverse[:, 1::2]
        corner = jnp.einsum("mcij,mcjk->mcik", below, first, precision=_HIGHEST)
        corner = -jnp.einsum("mcij,mcjk->mcik", second, corner, precision=_HIGHEST)
        top = jnp.concatenate([first, jnp.zeros_like(first)], axis=-1)
        bottom = jnp.concatenate([corner, second], axis=-1)
        inverse = jnp.concatenate([top, bottom], axis=-2)
        width *= 2
    return inverse.reshape(*batch, size, size)
