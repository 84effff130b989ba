"""The largest scores of a row, exactly; see README.md beside this file."""

from pallas_kernels.top_k_select.api import choose, top_k_select


__all__ = ["choose", "top_k_select"]
