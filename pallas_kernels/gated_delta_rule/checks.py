"""What the public functions refuse before anything runs."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp


def expect(name: str, array: Any, shape: tuple[int, ...], dtype: Any) -> None:
    """Raises `ValueError` if an array has another shape or dtype."""
    if array.shape != shape:
        raise ValueError(f"{name} has shape {array.shape}, expected {shape}")
    if array.dtype != dtype:
        raise ValueError(f"{name} has dtype {array.dtype}, expected {jnp.dtype(dtype)}")


def tokens(
    q: Any, k: Any, v: Any, g: Any, beta: Any, *, value: str = "v"
) -> tuple[int, int]:
    """Checks q and k [B, T, Hk, K], v [B, T, Hv, V], g and beta [B, T, Hv].

    Args:
      q, k, v, g, beta: the arrays; `q` is `None` for what reads no queries.
      value: the name of `v` in messages.

    Returns:
      (B, T).

    Raises:
      ValueError: naming the array.
    """
    for name, array in (("k" if q is None else "q", k if q is None else q), (value, v)):
        if array.ndim != 4:
            raise ValueError(f"{name} has shape {array.shape}, expected four axes")
    batch, time, value_heads, _ = v.shape
    key_heads, key_dim = (k if q is None else q).shape[2:]
    keys = (batch, time, key_heads, key_dim)
    if q is not None:
        expect("q", q, keys, v.dtype)
    expect("k", k, keys, v.dtype)
    if value_heads % key_heads:
        raise ValueError(
            f"{value} has {value_heads} heads, which is no multiple of the "
            f"{key_heads} heads of k"
        )
    if not jnp.issubdtype(v.dtype, jnp.floating):
        raise ValueError(f"{value} has dtype {v.dtype}, expected a floating one")
    expect("g", g, (batch, time, value_heads), jnp.float32)
    expect("beta", beta, (batch, time, value_heads), jnp.float32)
    return batch, time


def chunk_size(size: int) -> None:
    """Raises `ValueError` if it is no power of two of at least 16 tokens."""
    if size < 16 or size & (size - 1):
        raise ValueError(f"chunk_size is {size}, expected a power of two >= 16")


def documents(shape: tuple[int, int], is_first: Any, starts: Any) -> None:
    """Raises `ValueError` for both of `is_first` and `starts`, or a wrong one."""
    if is_first is not None and starts is not None:
        raise ValueError("is_first and starts say the same, give one of them")
    if is_first is not None:
        expect("is_first", is_first, shape, jnp.bool_)
    if starts is not None:
        expect("starts", starts, shape, jnp.int32)
