"""Rows of a table in the host's memory; see README.md beside this file."""

from pallas_kernels.host_gather.api import choose, host_gather


__all__ = ["choose", "host_gather"]
