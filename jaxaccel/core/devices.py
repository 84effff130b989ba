"""Peak rates of known devices, for utilisation figures."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class DevicePeak:
    """Published peaks of one device.

    Attributes:
      flops: dense bf16 FLOP/s with f32 accumulation.
      bandwidth: memory bytes/s.
    """

    flops: float
    bandwidth: float


# The longest name contained in the device kind wins. Vendors' data sheets, dense
# figures: a utilisation against them can be compared with papers.
_PEAKS = {
    "A100-SXM4-40GB": DevicePeak(flops=312e12, bandwidth=1.555e12),
    "A100-SXM4-80GB": DevicePeak(flops=312e12, bandwidth=2.039e12),
    "A100-PCIE-40GB": DevicePeak(flops=312e12, bandwidth=1.555e12),
    "A100 80GB PCIe": DevicePeak(flops=312e12, bandwidth=1.935e12),
    "H100 80GB HBM3": DevicePeak(flops=989e12, bandwidth=3.35e12),
    "H100 SXM": DevicePeak(flops=989e12, bandwidth=3.35e12),
    "H100 PCIe": DevicePeak(flops=756e12, bandwidth=2.0e12),
    "NVIDIA H200": DevicePeak(flops=989e12, bandwidth=4.8e12),
    "NVIDIA GH200 480GB": DevicePeak(flops=989e12, bandwidth=4.0e12),
    "NVIDIA B200": DevicePeak(flops=2250e12, bandwidth=8.0e12),
    "NVIDIA L4": DevicePeak(flops=121e12, bandwidth=0.3e12),
    "NVIDIA L40S": DevicePeak(flops=362e12, bandwidth=0.864e12),
    "GeForce RTX 4090": DevicePeak(flops=165e12, bandwidth=1.008e12),
    "TPU v4": DevicePeak(flops=275e12, bandwidth=1.2e12),
    "TPU v5 lite": DevicePeak(flops=197e12, bandwidth=0.819e12),
    "TPU v5p": DevicePeak(flops=459e12, bandwidth=2.765e12),
    "TPU v6 lite": DevicePeak(flops=918e12, bandwidth=1.64e12),
}


def device_peak(device_kind: str) -> DevicePeak | None:
    """The peaks of a device, or `None` for one that is not in the table.

    Args:
      device_kind: `jax.Device.device_kind`, such as "NVIDIA H200".

    Returns:
      Its peaks; `None` means that a utilisation has to be shown as "n/a".
    """
    words = f" {device_kind} "
    matches = [name for name in _PEAKS if f"{name} " in words]
    return _PEAKS[max(matches, key=len)] if matches else None
