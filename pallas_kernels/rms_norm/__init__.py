"""Root-mean-square norm: plain, zero-centred, gated, in groups."""

from pallas_kernels.rms_norm.api import rms_norm


__all__ = ["rms_norm"]
