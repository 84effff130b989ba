"""Tokens cut into chunks, for the `xla` forms of linear recurrences."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def product(subscripts: str, *operands: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Product of operands rounded to `dtype`, accumulated in f32."""
    # Without HIGHEST a GPU multiplies f32 operands as tf32.
    exact = dtype == jnp.float32
    return jnp.einsum(
        subscripts,
        *(x.astype(dtype) for x in operands),
        preferred_element_type=jnp.float32,
        precision=jax.lax.Precision.HIGHEST if exact else jax.lax.Precision.DEFAULT,
    )


def to_chunks(x: jax.Array, heads: int, *, chunk: int, group: int) -> jax.Array:
    """Cuts time into groups of chunks, padded with zeros to whole groups.

    Args:
      x: [B, T] or [B, T, H R, ...].
      heads: H, each read by R others, or 0 if x has one entry a head.
      chunk: tokens of a chunk, C.
      group: chunks of a group, n.

    Returns:
      [groups, n, B, C], or [groups, n, B, H, R, C, ...]; no R axis if `heads` is 0.
    """
    batch, time, *rest = x.shape
    groups = max(1, -(-time // (chunk * group)))
    padding = groups * group * chunk - time
    x = jnp.pad(x, ((0, 0), (0, padding)) + ((0, 0),) * len(rest))
    shape = (batch, groups, group, chunk)
    if not rest:
        return jnp.moveaxis(x.reshape(shape), 0, 2)
    if heads == 0:
        x = x.reshape(*shape, *rest)
        return jnp.transpose(x, (1, 2, 0, 4, 3, *range(5, x.ndim)))
    x = x.reshape(*shape, heads, rest[0] // heads, *rest[1:])
    return jnp.transpose(x, (1, 2, 0, 4, 5, 3, *range(6, x.ndim)))


def to_tokens(x: jax.Array) -> jax.Array:
    """[groups, n, B, H, R, C, V] back to [B, T, H R, V], padding at the end."""
    groups, count, batch, heads, group, size, dim = x.shape
    x = jnp.transpose(x, (2, 0, 1, 5, 3, 4, 6))
    return x.reshape(batch, groups * count * size, heads * group, dim)
