"""Rows in pieces of at most 16 bytes, what one thread moves at once."""

from __future__ import annotations

import math


WARPGROUP = 128  # threads
PIECE_BYTES = 16


def longest(dim: int, itemsize: int) -> int:
    """Values of the longest piece that divides a row.

    Args:
      dim: values of the row.
      itemsize: bytes of a value, as it is written.

    Returns:
      Their number; 0 if rows are no multiple of 4 bytes.
    """
    values = PIECE_BYTES // itemsize
    while values * itemsize >= 4:
        if dim % values == 0:
            return values
        values //= 2
    return 0


def equal_shares(row_pieces: int) -> int:
    """The fewest rows of so many pieces whose pieces the threads share equally."""
    return WARPGROUP // math.gcd(WARPGROUP, row_pieces)
