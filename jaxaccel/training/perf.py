"""Throughput and utilisation of a run."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np

from jaxaccel.core.devices import device_peak
from jaxaccel.data.batch import PackedBatch
from jaxaccel.models.config import DecoderConfig
from jaxaccel.models.describe import describe


def mean_document_length(batch: PackedBatch) -> int:
    """Length T of equal documents whose tokens would see as many keys as these.

    A token at position p of its document sees p + 1 keys, on average (T + 1) / 2.
    Counting attention with the row length instead would credit a packed run with work
    that it does not do.

    Args:
      batch: host arrays [B, T].

    Returns:
      Tokens, at least 1.
    """
    real = np.asarray(batch.segment_ids) > 0
    if not real.any():
        return 1
    keys = np.asarray(batch.positions)[real].mean() + 1.0
    return max(1, round(2.0 * keys - 1.0))


def training_flops_per_token(
    config: DecoderConfig, document_length: int, *, with_mtp: bool = False
) -> float:
    """Matrix-product operations of one token's forward and backward pass.

    Args:
      config: the model.
      document_length: tokens of the documents that attention is counted for.
      with_mtp: whether the run trains the multi-token prediction block.

    Returns:
      FLOP; see `models.describe` for what is counted. Rematerialisation is not.
    """
    description = describe(config, document_length)
    if with_mtp:
        return description.training_flops
    return 3.0 * description.trunk.forward_flops


@dataclasses.dataclass(frozen=True, kw_only=True)
class Throughput:
    """Speed over a stretch of steps.

    Attributes:
      tokens_per_second: over all devices.
      tflops: TFLOP/s of one device.
      mfu: fraction of the device's published peak, `None` for an unknown device.
    """

    tokens_per_second: float
    tflops: float
    mfu: float | None


def throughput(
    tokens: float, seconds: float, flops_per_token: float, devices: list[jax.Device]
) -> Throughput:
    """Speed of `tokens` in `seconds` on the devices of a mesh."""
    rate = tokens / max(seconds, 1e-9)
    flops = rate * flops_per_token / len(devices)
    peak = device_peak(devices[0].device_kind)
    return Throughput(
        tokens_per_second=rate,
        tflops=flops / 1e12,
        mfu=None if peak is None else flops / peak.flops,
    )


def peak_memory_bytes() -> int | None:
    """Largest memory in use on this process's first device; `None` if unknown."""
    stats = jax.local_devices()[0].memory_stats()
    return None if stats is None else stats.get("peak_bytes_in_use")
