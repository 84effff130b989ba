"""One matrix product per expert over sorted rows; see README.md beside this file."""

from pallas_kernels.grouped_matmul.api import choose, grouped_matmul


__all__ = ["choose", "grouped_matmul"]
