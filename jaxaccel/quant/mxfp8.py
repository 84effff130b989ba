"""MXFP8 rows: eight-bit floats that share one power of two per 32 values.

An element is E4M3 without infinities, whose largest number is 448. A scale is E8M0, the
exponent of a power of two with bias 127; 255 is NaN (OCP Microscaling Formats
specification 1.0, sections 5.3.1 and 5.4.1).

A packed row is one span of bytes, so that whoever reads it reads one place: d elements,
d / 32 scales, and zeros up to 5/4 d. Then rows of 128, 256 and 512 elements are five
times a power of two pieces of 16 bytes, which the threads of a kernel share evenly.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np


BLOCK_SIZE = 32  # elements that share a scale
_LARGEST = 448.0
_BIAS = 127
# Packed rows of so many elements are made of whole pieces.
PACKED_MULTIPLE = 128


def quantize(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Rounds rows to the nearest elements.

    The scale is the smallest power of two with which nothing of a block is beyond the
    largest element.

    Args:
      x: float[..., 32 n], finite.

    Returns:
      (float8_e4m3fn[..., 32 n], scales u8[..., n]).

    Raises:
      ValueError: the last axis is no multiple of 32.
    """
    if x.shape[-1] % BLOCK_SIZE:
        raise ValueError(
            f"rows of {x.shape[-1]} are no multiple of the {BLOCK_SIZE} that share a "
            "scale"
        )
    blocks = x.astype(jnp.float32).reshape(*x.shape[:-1], -1, BLOCK_SIZE)
    most = jnp.max(jnp.abs(blocks), axis=-1)  # [..., n]
    fraction, exponent = jnp.frexp(most)  # in [0.5, 1); 448 is 0.875 2^9
    exponent = jnp.where(fraction <= 0.875, exponent - 9, exponent - 8)
    exponent = jnp.where(most > 0, exponent, -_BIAS)
    scales = jnp.clip(exponent + _BIAS, 0, 254).astype(jnp.uint8)
    power = scales.astype(jnp.int32) - _BIAS
    # In two steps: a factor of 2^127 and more is no float32.
    half = power // 2
    scaled = jnp.ldexp(jnp.ldexp(blocks, -half[..., None]), (half - power)[..., None])
    values = jnp.clip(scaled, -_LARGEST, _LARGEST).astype(jnp.float8_e4m3fn)
    return values.reshape(x.shape), scales


def pack(values: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Puts rows and their scales side by side.

    Args:
      values: float8_e4m3fn[N, d], d a multiple of 128.
      scales: u8[N, d / 32].

    Returns:
      u32[N, 5 d / 16].

    Raises:
      ValueError: the shapes are not these.
    """
    values, scales = np.asarray(values), np.asarray(scales)
    num_rows, dim = values.shape
    if dim % PACKED_MULTIPLE or scales.shape != (num_rows, dim // BLOCK_SIZE):
        raise ValueError(
            f"values are {list(values.shape)} and scales {list(scales.shape)}, "
            f"expected [N, d] and [N, d / {BLOCK_SIZE}] with d a multiple of "
            f"{PACKED_MULTIPLE}"
        )
    rows = np.zeros((num_rows, 4 * packed_width(dim)), np.uint8)
    rows[:, :dim] = values.view(np.uint8)
    rows[:, dim : dim + scales.shape[1]] = scales
    return rows.view(np.dtype("<u4"))


def packed_width(dim: int) -> int:
    """Words of a packed row.

    Raises:
      ValueError: rows of that many elements cannot be packed.
    """
    if dim % PACKED_MULTIPLE:
        raise ValueError(
            f"rows of {dim} cannot be packed, allowed are multiples of "
            f"{PACKED_MULTIPLE}"
        )
    return dim // 4 + dim // 16


def unpack(rows: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The inverse of `pack`, on the device.

    Args:
      rows: u32[..., 5 d / 16].

    Returns:
      (float8_e4m3fn[..., d], u8[..., d / 32]).
    """
    dim = rows.shape[-1] * 16 // 5
    flat = jax.lax.bitcast_convert_type(rows, jnp.uint8)  # [..., words, 4]
    flat = flat.reshape(*rows.shape[:-1], -1)
    values = jax.lax.bitcast_convert_type(flat[..., :dim], jnp.float8_e4m3fn)
    return values, flat[..., dim : dim + dim // BLOCK_SIZE]
