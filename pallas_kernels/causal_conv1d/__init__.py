"""Short depthwise causal convolution; see README.md beside this file."""

from pallas_kernels.causal_conv1d.api import causal_conv1d, choose


__all__ = ["causal_conv1d", "choose"]
