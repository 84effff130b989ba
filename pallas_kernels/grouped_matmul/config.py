"""Sizes of the XLA form."""

from __future__ import annotations

import dataclasses
import math


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """How the XLA form cuts the rows.

    Attributes:
      tile: rows per tile; a tile that holds rows of several experts is multiplied
        once for each.
      slab: tasks (tile, expert) that are multiplied at once; their gathered weights
        are alive together.
      window: rows of each expert that the weight gradient multiplies in batches.
      experts: of a batch, a divisor of E; their windows and gradients are alive
        together.
      overflow: rows at a time of what an expert has beyond the window.
    """

    tile: int = 128
    slab: int = 16
    window: int = 128
    experts: int = 1
    overflow: int = 2048


# Bytes of gathered weights in one slab, and of f32 weight gradients with their rows.
_SLAB_BYTES = 64 * 2**20
_GRADIENT_BYTES = 256 * 2**20
_MAX_WINDOW = 16384
_OVERFLOW = 2048


def heuristic(
    *, rows: int, experts: int, in_dim: int, out_dim: int, itemsize: int
) -> Config:
    """Picks the sizes.

    Args:
      rows, experts, in_dim, out_dim: M, E, K, N.
      itemsize: bytes of an element of w.

    Returns:
      The config.
    """
    mean = -(-rows // experts)
    # Half the mean group: about one tile in three is shared by two experts.
    largest = max(128, min(1024, 1 << max(0, (mean // 8).bit_length() - 1)))
    tile = min(largest, max(16, 1 << max(0, (mean // 2).bit_length())))
    weight_bytes = in_dim * out_dim * max(4, itemsize)
    # Rows routed at random exceed the mean by four standard deviations in one group of
    # thirty thousand.
    window = min(mean + 4 * math.isqrt(mean), rows, _MAX_WINDOW)
    window = max(16, _round_up(window, 16))
    row_bytes = window * (in_dim + out_dim) * itemsize
    most = max(1, _GRADIENT_BYTES // (weight_bytes + row_bytes))
    divisors = (d for d in range(1, experts + 1) if experts % d == 0)
    return Config(
        tile=tile,
        slab=max(1, _SLAB_BYTES // weight_bytes),
        window=window,
        experts=max(d for d in divisors if d <= most),
        overflow=min(_OVERFLOW, _round_up(rows, 16)),
    )


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
