"""Other key and value dims as the 128 x 128 states that the kernels have.

A value dim of 256 is two heads that read one key head and share their gates, each with
half of the rows of S: the rule treats rows of S alike and apart. A dim of 64 is padded
with zeros, which change no product; it costs what 128 does. Both are exact.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.gated_delta_rule.config_mosaic import HEAD_DIM, heads_of


def _padded(x: jax.Array, axis: int) -> jax.Array:
    missing = HEAD_DIM - x.shape[axis]
    if missing == 0:
        return x
    return jnp.pad(x, [(0, missing if i == axis else 0) for i in range(x.ndim)])


def fit_keys(x: jax.Array) -> jax.Array:
    """q or k [B, T, Hk, K] to [B, T, Hk, 128]."""
    return _padded(x, 3)


def fit_values(x: jax.Array) -> jax.Array:
    """v or o [B, T, Hv, V] to [B, T, Hv', 128]."""
    batch, time, heads, dim = x.shape
    count = heads_of(dim)
    x = x.reshape(batch, time, heads * count, dim // count)
    return _padded(x, 3)


def fit_gates(x: jax.Array, value_dim: int) -> jax.Array:
    """g or beta [B, T, Hv] to [B, T, Hv']."""
    count = heads_of(value_dim)
    return x if count == 1 else jnp.repeat(x, count, axis=2)


def fit_states(x: jax.Array) -> jax.Array:
    """[B, Hv, V, K] to [B, Hv', 128, 128]."""
    batch, heads, dim, key_dim = x.shape
    count = heads_of(dim)
    x = x.reshape(batch, heads * count, dim // count, key_dim)
    return _padded(_padded(x, 2), 3)


def values(x: jax.Array, value_dim: int) -> jax.Array:
    """[B, T, Hv', 128] back to [B, T, Hv, V]."""
    count = heads_of(value_dim)
    x = x[..., : value_dim // count]
    return x.reshape(*x.shape[:2], -1, value_dim)


def states(x: jax.Array, value_dim: int, key_dim: int) -> jax.Array:
    """[B, Hv', 128, 128] back to [B, Hv, V, K]."""
    x = x[:, :, : value_dim // heads_of(value_dim), :key_dim]
    return x.reshape(x.shape[0], -1, value_dim, key_dim)


def maps(x: jax.Array, value_dim: int, key_dim: int) -> jax.Array:
    """Maps [B, Hv', 128, 128] of states to [B, Hv, K, K]: alike in halves of a head."""
    return x[:, :: heads_of(value_dim), :key_dim, :key_dim]
