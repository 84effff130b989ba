"""Attention of new tokens over a cache; see README.md beside this file."""

from pallas_kernels.decode_attention.api import choose, decode_attention


__all__ = ["choose", "decode_attention"]
