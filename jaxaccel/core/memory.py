"""What host memory a device may use, as far as it is known before using it."""

from __future__ import annotations

import dataclasses
import os
import pathlib
from typing import Any

import jax


PINNED_HOST = "pinned_host"
"""The kind of memory that copies overlap with; JAX's name for it."""

PINNED_LIMIT_VARIABLE = "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"
_DEFAULT_PINNED_LIMIT = 64 * 2**30

# GPUs whose memory is the host's own: moving an array there frees nothing. What is in
# `jax.Device.device_kind`; JAX does not tell the property itself.
_INTEGRATED = ("GB10", "Orin", "Thor", "Xavier")


@dataclasses.dataclass(frozen=True, kw_only=True)
class HostMemory:
    """The host's memory as one device sees it.

    Attributes:
      device: the device's kind, for messages.
      has_pinned_host: whether the backend has memory of the kind "pinned_host".
      is_shared: whether the device's own memory is the host's.
      pinned_limit: most bytes that the backend pins in this process.
      available: bytes that this process may still take, `None` if nobody says.
    """

    device: str
    has_pinned_host: bool
    is_shared: bool
    pinned_limit: int
    available: int | None = None


def host_memory(device: jax.Device | None = None) -> HostMemory:
    """Asks a device, the first one by default, and the operating system.

    Several processes have to come to the same plan, and the memory that each has left
    differs: `available` is `None` then.
    """
    device = jax.local_devices()[0] if device is None else device
    kinds = {memory.kind for memory in device.addressable_memories()}
    is_integrated = any(name in device.device_kind for name in _INTEGRATED)
    return HostMemory(
        device=device.device_kind,
        has_pinned_host=PINNED_HOST in kinds,
        is_shared=device.platform == "cpu" or is_integrated,
        pinned_limit=pinned_limit(),
        available=control_group_available() if jax.process_count() == 1 else None,
    )


def pinned_limit() -> int:
    """Bytes of the pool that XLA pins host memory from.

    Raises:
      ValueError: the variable that sets it is no whole number of GiB.
    """
    text = os.environ.get(PINNED_LIMIT_VARIABLE)
    if text is None:
        return _DEFAULT_PINNED_LIMIT
    if not text.strip().isdecimal():
        raise ValueError(f"{PINNED_LIMIT_VARIABLE}={text!r} is no whole number of GiB")
    return int(text) * 2**30


def control_group_available(
    folder: pathlib.Path = pathlib.Path("/sys/fs/cgroup"),
) -> int | None:
    """Bytes left under the limit of this process's control group, `None` for no limit.

    The limit, and not the machine's free memory: virtual machines that grow on demand
    tell too little of the latter.
    """
    try:
        limit = (folder / "memory.max").read_text().strip()
        used = (folder / "memory.current").read_text().strip()
    except OSError:
        return None
    if not (limit.isdecimal() and used.isdecimal()):
        return None
    return max(int(limit) - int(used), 0)


def require_pinned_host(devices: Any, what: str) -> None:
    """Refuses devices without pinned host memory.

    Args:
      devices: those that hold the arrays.
      what: the setting that needs it.

    Raises:
      NotImplementedError: names the setting, the device and the memories it has.
    """
    for device in devices:
        kinds = sorted({memory.kind for memory in device.addressable_memories()})
        if PINNED_HOST not in kinds:
            raise NotImplementedError(
                f"{what} needs memory of the kind {PINNED_HOST!r}, which "
                f"{device.device_kind} does not have: it has {', '.join(kinds)}"
            )


def gib(num_bytes: float) -> str:
    """Bytes as people read them."""
    if num_bytes < 2**29:
        return f"{num_bytes / 2**20:.3g} MiB"
    return f"{num_bytes / 2**30:.4g} GiB"
