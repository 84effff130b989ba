"""MXFP4: four-bit floats that share one power of two per 32 values.

An element is E2M1, a sign, two bits of exponent and one of mantissa, so its magnitude
is one of 0, 0.5, 1, 1.5, 2, 3, 4 and 6. A scale is E8M0, the exponent of a power of two
with bias 127; 255 is NaN. (OCP Microscaling Formats specification 1.0, sections 5.3.3
and 5.4.1.) Files keep two elements in a byte, the earlier one in the low four bits.
"""

from __future__ import annotations

import functools

import ml_dtypes
import numpy as np
from numpy.typing import DTypeLike


BLOCK_SIZE = 32  # elements that share a scale
_BLOCK_BYTES = BLOCK_SIZE // 2
_PIECE = 1 << 15  # blocks
_DTYPES = (np.dtype(ml_dtypes.bfloat16), np.dtype(np.float32))


def dequantize(
    blocks: np.ndarray, scales: np.ndarray, dtype: DTypeLike = ml_dtypes.bfloat16
) -> np.ndarray:
    """Turns packed blocks into numbers, every one of them exact.

    Args:
      blocks: u8[..., n, 16], two elements a byte.
      scales: u8[..., n], the scale of each block.
      dtype: bfloat16 or float32. Both hold every product up to their largest number;
        what is beyond it, from 2^128 on, becomes infinite.

    Returns:
      [..., 32 n] in `dtype`; the blocks of a NaN scale are NaN.

    Raises:
      ValueError: a dtype or shape is not as above.
    """
    dtype = np.dtype(dtype)
    if dtype not in _DTYPES:
        raise ValueError(
            f"dtype is {dtype}, expected one of {', '.join(map(str, _DTYPES))}"
        )
    if blocks.dtype != np.uint8 or scales.dtype != np.uint8:
        raise ValueError(
            f"blocks are {blocks.dtype} and scales {scales.dtype}, expected uint8"
        )
    if blocks.shape != (*scales.shape, _BLOCK_BYTES):
        raise ValueError(
            f"blocks have shape {blocks.shape}, expected "
            f"{(*scales.shape, _BLOCK_BYTES)} by the scales"
        )
    table = _pairs(dtype)
    found = np.empty((scales.size, _BLOCK_BYTES), table.dtype)
    flat_blocks, flat_scales = blocks.reshape(found.shape), scales.reshape(-1, 1)
    # In pieces, because the indices take four times the room of the result.
    for start in range(0, scales.size, _PIECE):
        piece = slice(start, start + _PIECE)
        # The scale above, the two elements below: one look-up finds both products.
        index = (flat_scales[piece].astype(np.uint16) << 8) | flat_blocks[piece]
        found[piece] = table[index]
    shape = (*scales.shape[:-1], scales.shape[-1] * BLOCK_SIZE)
    return found.view(dtype).reshape(shape)


def _elements(code: np.ndarray) -> np.ndarray:
    """The values f64[...] of E2M1 codes, integers[...] from 0 to 15."""
    sign = np.where(code & 8, -1.0, 1.0)
    exponent, mantissa = (code >> 1) & 3, code & 1
    normal = np.ldexp(1.0 + 0.5 * mantissa, exponent - 1)
    # Exponent 0 has no leading one: the values are 0 and 0.5.
    return sign * np.where(exponent > 0, normal, 0.5 * mantissa)


@functools.cache
def _pairs(dtype: np.dtype) -> np.ndarray:
    """Both products of every (scale, byte), as one integer each, u[65536]."""
    scale = np.arange(256)[:, None, None]
    byte = np.arange(256)[:, None]
    codes = np.concatenate([byte & 15, byte >> 4], axis=1)  # [256, 2]
    values = np.ldexp(_elements(codes)[None], scale - 127)  # [256, 256, 2]
    values[255] = np.nan
    with np.errstate(over="ignore"):  # infinity, as documented
        values = values.astype(np.float32).astype(dtype)
    pair = np.dtype(f"u{2 * dtype.itemsize}")
    table = values.reshape(-1, 2).view(pair)[:, 0]
    table.flags.writeable = False
    return table
