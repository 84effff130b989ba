"""Inverse of a batch of unit lower triangular matrices, stable for any keys."""

from __future__ import annotations

import jax
import jax.numpy as jnp


# Up to this size a product of two blocks costs more to start than to compute.
_SMALL = 16


def _diagonal(lower: jax.Array, width: int) -> jax.Array:
    """The diagonal blocks of [M, n, n], as [M, n / width, width, width]."""
    starts = range(0, lower.shape[-1], width)
    return jnp.stack([lower[:, i : i + width, i : i + width] for i in starts], axis=1)


def _product(a: jax.Array, b: jax.Array) -> jax.Array:
    """[c, i, j, M] times [c, j, k, M], written out as a sum over j."""
    total = a[:, :, 0, None] * b[:, None, 0]
    for j in range(1, a.shape[2]):
        total = total + a[:, :, j, None] * b[:, None, j]
    return total


def _small_inverse(lower: jax.Array) -> jax.Array:
    """(I + lower)^-1 of [n, n, M]: blocks last, so each step is one long vector."""
    size, _, count = lower.shape
    inverse = jnp.ones((size, 1, 1, count), lower.dtype)
    width = 1
    while width < size:
        below = jnp.stack(
            [
                lower[i + width : i + 2 * width, i : i + width]
                for i in range(0, size, 2 * width)
            ]
        )
        first, second = inverse[0::2], inverse[1::2]
        corner = -_product(second, _product(below, first))
        top = jnp.concatenate([first, jnp.zeros_like(first)], axis=2)
        bottom = jnp.concatenate([corner, second], axis=2)
        inverse = jnp.concatenate([top, bottom], axis=1)
        width *= 2
    return inverse[0]


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
    width = min(_SMALL, size)
    blocks = _diagonal(lower, width).reshape(-1, width, width)
    inverse = _small_inverse(jnp.transpose(blocks, (1, 2, 0)))
    inverse = jnp.transpose(inverse, (2, 0, 1)).reshape(-1, size // width, width, width)
    highest = jax.lax.Precision.HIGHEST
    while width < size:
        starts = range(0, size, 2 * width)
        below = jnp.stack(
            [lower[:, i + width : i + 2 * width, i : i + width] for i in starts], axis=1
        )
        first, second = inverse[:, 0::2], inverse[:, 1::2]
        corner = jnp.einsum("mcij,mcjk->mcik", below, first, precision=highest)
        corner = -jnp.einsum("mcij,mcjk->mcik", second, corner, precision=highest)
        top = jnp.concatenate([first, jnp.zeros_like(first)], axis=-1)
        bottom = jnp.concatenate([corner, second], axis=-1)
        inverse = jnp.concatenate([top, bottom], axis=-2)
        width *= 2
    return inverse.reshape(*batch, size, size)
