"""Short depthwise causal convolution; see README.md beside this file."""

from pallas_kernels.causal_conv1d.api import causal_conv1d, choose
from pallas_kernels.causal_conv1d.tables import Borders, document_borders


__all__ = ["Borders", "causal_conv1d", "choose", "document_borders"]
