"""Inverse of a batch of unit lower triangular matrices, stable for any keys."""

from __future__ import annotations

import jax
import jax.numpy as jnp


_BASE = 16
_HIGHEST = jax.lax.Precision.HIGHEST


def _small_inverse(lower: jax.Array) -> jax.Array:
    """(I + lower)^-1 of [n, n, M]: blocks last, so that each step is one long vector.

    The matrix products are written out as sums, because a product of two 4 x 4
    matrices costs more to start than to compute.
    """
    size = lower.shape[0]
    if size == 1:
        return jnp.ones_like(lower)
    half = size // 2
    first = _small_inverse(lower[:half, :half])
    second = _small_inverse(lower[half:, half:])
    below = lower[half:, :half]
    corner = below[:, 0, None] * first[None, 0]
    for j in range(1, half):
        corner = corner + below[:, j, None] * first[None, j]
    product = second[:, 0, None] * corner[None, 0]
    for j in range(1, half):
        product = product + second[:, j, None] * corner[None, j]
    top = jnp.concatenate([first, jnp.zeros_like(first)], axis=1)
    return jnp.concatenate([top, jnp.concatenate([-product, second], axis=1)], axis=0)


def unit_lower_inverse(lower: jax.Array) -> jax.Array:
    """(I + lower)^-1 by merging the inverses of ever larger diagonal blocks.

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
    blocks = jnp.transpose(blocks.reshape(-1, width, width), (1, 2, 0))
    inverse = jnp.transpose(_small_inverse(blocks), (2, 0, 1))
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
