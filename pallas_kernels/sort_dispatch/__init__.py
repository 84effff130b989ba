"""Sort-based routing of tokens to experts; see README.md beside this file."""

from pallas_kernels.sort_dispatch.api import (
    DispatchPlan,
    choose,
    chosen_scores,
    combine,
    limit_rows,
    permute,
    row_weights,
    slot_values,
    sort_dispatch,
    spread,
    top_experts,
)


__all__ = [
    "DispatchPlan",
    "choose",
    "chosen_scores",
    "combine",
    "limit_rows",
    "permute",
    "row_weights",
    "slot_values",
    "sort_dispatch",
    "spread",
    "top_experts",
]
