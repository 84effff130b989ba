"""The Gated DeltaNet recurrence; see README.md beside this file for the maths."""

from pallas_kernels.gated_delta_rule.api import (
    choose,
    gated_delta_rule,
    gated_delta_rule_step,
)
from pallas_kernels.gated_delta_rule.tables import document_starts


__all__ = ["choose", "document_starts", "gated_delta_rule", "gated_delta_rule_step"]
