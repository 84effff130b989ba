"""Attention of new tokens over a cache; see README.md beside this file."""

from pallas_kernels.decode_attention.api import choose, decode_attention
from pallas_kernels.decode_attention.config import MAX_TIME, padded_group


__all__ = ["MAX_TIME", "choose", "decode_attention", "padded_group"]
