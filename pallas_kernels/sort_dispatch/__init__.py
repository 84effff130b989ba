"""Sort-based routing of tokens to experts; see README.md beside this file."""

from pallas_kernels.sort_dispatch.api import (
    DispatchPlan,
    choose,
    combine,
    limit_rows,
    permute,
    row_weights,
    slot_values,
    sort_dispatch,
)


__all__ = [
    "DispatchPlan",
    "choose",
    "combine",
    "limit_rows",
    "permute",
    "row_weights",
    "slot_values",
    "sort_dispatch",
]
