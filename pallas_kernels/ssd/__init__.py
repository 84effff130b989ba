"""The recurrence of Mamba-2; see README.md beside this file for the maths."""

from pallas_kernels.ssd.api import choose, ssd
from pallas_kernels.ssd.reference import ssd_step, step_sizes


__all__ = ["choose", "ssd", "ssd_step", "step_sizes"]
