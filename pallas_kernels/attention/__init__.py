"""Grouped-query attention over packed segments; see README.md beside this file."""

from pallas_kernels.attention.api import attention, choose


__all__ = ["attention", "choose"]
