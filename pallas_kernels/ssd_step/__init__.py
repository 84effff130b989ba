"""One token of a Mamba-2 layer; see README.md beside this file for the maths."""

from pallas_kernels.ssd_step.api import choose, ssd_step
from pallas_kernels.ssd_step.layer import Layer


__all__ = ["Layer", "choose", "ssd_step"]
