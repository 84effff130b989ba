"""Sums of rows with equal ids, in one order; see README.md beside this file."""

from pallas_kernels.segment_sum.api import Order, choose, segment_sum, sort_ids


__all__ = ["Order", "choose", "segment_sum", "sort_ids"]
