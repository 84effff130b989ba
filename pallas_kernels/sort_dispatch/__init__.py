"""Sort-based routing of tokens to experts; see README.md beside this file."""

from pallas_kernels.sort_dispatch.api import (
    DispatchPlan,
    choose,
    combine,
    permute,
    sort_dispatch,
)


__all__ = ["DispatchPlan", "choose", "combine", "permute", "sort_dispatch"]
