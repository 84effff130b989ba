"""Rows of a table, 16-bit or in 8 bits with scales; see README.md beside this file."""

from pallas_kernels.engram_gather.api import choose, engram_gather


__all__ = ["choose", "engram_gather"]
