"""Attention of one token over chosen chunks; see README.md beside this file."""

from pallas_kernels.sparse_decode_attention.api import choose, sparse_decode_attention
from pallas_kernels.sparse_decode_attention.held import Held, Rotary


__all__ = ["Held", "Rotary", "choose", "sparse_decode_attention"]
