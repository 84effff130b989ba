"""Grouped-query attention over packed segments; see README.md beside this file."""

from pallas_kernels.attention.api import attention, attention_with_lse, choose
from pallas_kernels.attention.config_mosaic import tiling
from pallas_kernels.attention.tiles import TileBounds, tile_bounds


__all__ = [
    "TileBounds",
    "attention",
    "attention_with_lse",
    "choose",
    "tile_bounds",
    "tiling",
]
