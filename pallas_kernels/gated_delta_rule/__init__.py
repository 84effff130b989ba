"""The Gated DeltaNet recurrence; see README.md beside this file for the maths."""

from pallas_kernels.gated_delta_rule.api import choose, gated_delta_rule
from pallas_kernels.gated_delta_rule.api_segments import entry_gradients, summaries
from pallas_kernels.gated_delta_rule.segments import Summary, chain, chain_gradients
from pallas_kernels.gated_delta_rule.tables import document_starts


__all__ = [
    "Summary",
    "chain",
    "chain_gradients",
    "choose",
    "document_starts",
    "entry_gradients",
    "gated_delta_rule",
    "summaries",
]
