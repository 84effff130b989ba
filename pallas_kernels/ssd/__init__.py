"""The recurrence of Mamba-2; see README.md beside this file for the maths."""

from pallas_kernels.ssd.api import choose, ssd, ssd_step
from pallas_kernels.ssd.reference import step_sizes


__all__ = ["choose", "ssd", "ssd_step", "step_sizes"]
