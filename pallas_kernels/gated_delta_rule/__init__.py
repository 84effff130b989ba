"""The Gated DeltaNet recurrence; see README.md beside this file for the maths."""

from pallas_kernels.gated_delta_rule.api import (
    choose,
    gated_delta_rule,
    gated_delta_rule_step,
)


__all__ = ["choose", "gated_delta_rule", "gated_delta_rule_step"]
