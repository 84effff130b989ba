"""Sizes of the tiled form."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """How the XLA form cuts the rows.

    Attributes:
      tile: rows per tile; a tile that holds rows of several experts is multiplied
        once for each.
      slab: tasks (tile, expert) that are multiplied at once; their gathered weights
        and weight gradients are alive together.
    """

    tile: int = 128
    slab: int = 16


# Bytes of gathered weights, or of f32 weight gradients, in one slab.
_SLAB_BYTES = 64 * 2**20


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
    # Half the mean group: about one tile in three is shared by two experts. Weight
    # gradients are added tile after tile, so large groups take larger tiles.
    largest = max(128, min(1024, 1 << max(0, (mean // 8).bit_length() - 1)))
    tile = min(largest, max(16, 1 << max(0, (mean // 2).bit_length())))
    weight_bytes = in_dim * out_dim * max(4, itemsize)
    return Config(tile=tile, slab=max(1, _SLAB_BYTES // weight_bytes))
