"""Matrix-vector products of decoding; see README.md beside this file."""

from pallas_kernels.gemv.api import MAX_ROWS, choose, gemv
from pallas_kernels.gemv.chain import Product, gemv_chain
from pallas_kernels.gemv.experts import expert_gemv


__all__ = ["MAX_ROWS", "Product", "choose", "expert_gemv", "gemv", "gemv_chain"]
