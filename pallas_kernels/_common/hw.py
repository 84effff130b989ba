"""Facts of the card that kernels are written for, and limits checked before a launch.

Every figure here is a limit of the architecture. Speeds are never stated: the
benchmark measures them in the same run that quotes them.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
from collections.abc import Iterator, Sequence

import jax


@dataclasses.dataclass(frozen=True, kw_only=True)
class Device:
    """What a kernel needs to know of a card.

    Attributes:
      kind: the name as the driver gives it, "NVIDIA H200".
      sms: streaming multiprocessors, the width of a persistent grid.
      smem_bytes: shared memory that one block may ask for.
      registers_per_thread: 32-bit registers for one thread of each warpgroup of a
        block, summed over its warpgroups.
    """

    kind: str
    sms: int
    smem_bytes: int
    registers_per_thread: int = 512

    @property
    def slug(self) -> str:
        """The folder of this card's tuned configs: "nvidia_h200"."""
        return self.kind.lower().replace(" ", "_")


H200 = Device(kind="NVIDIA H200", sms=132, smem_bytes=227 * 1024)

_assumed: contextvars.ContextVar[Device | None] = contextvars.ContextVar(
    "assumed_device", default=None
)


def device() -> Device:
    """The card that kernels are built for: the default one, else an H200."""
    if (assumed := _assumed.get()) is not None:
        return assumed
    if jax.default_backend() != "gpu":
        return H200
    card = jax.devices()[0]
    return Device(
        kind=card.device_kind, sms=card.core_count, smem_bytes=H200.smem_bytes
    )


def is_hopper() -> bool:
    """Whether Mosaic GPU kernels for Hopper can run on the default device."""
    if _assumed.get() is not None:
        return True
    if jax.default_backend() != "gpu":
        return False
    return str(jax.devices()[0].compute_capability) == "9.0"


@contextlib.contextmanager
def assume(card: Device = H200) -> Iterator[Device]:
    """Builds kernels for `card` although it is not here: lowering, compile-only."""
    token = _assumed.set(card)
    try:
        yield card
    finally:
        _assumed.reset(token)


def check_smem(bytes_: int, what: str = "this kernel") -> None:
    """Refuses a block that asks for more shared memory than there is.

    Raises:
      ValueError: `bytes_` is more than one block may have; both are named.
    """
    limit = device().smem_bytes
    if bytes_ > limit:
        raise ValueError(
            f"{what} asks for {bytes_} bytes of shared memory, a block of "
            f"{device().kind} has {limit}"
        )


def launch_registers(warpgroups: int) -> int:
    """Registers per thread that a block of so many warpgroups starts with."""
    return min(255, device().registers_per_thread // max(1, warpgroups)) // 8 * 8


def check_registers(per_warpgroup: Sequence[int]) -> None:
    """Refuses register requests that do not fit: on the card they never return.

    Args:
      per_warpgroup: what each warpgroup of the block gives to
        `plgpu.set_max_registers`, in registers per thread.

    Raises:
      ValueError: one is no multiple of 8 in [24, 240], or their sum is too large.
    """
    for request in per_warpgroup:
        if request % 8 or not 24 <= request <= 240:
            raise ValueError(
                f"a warpgroup asks for {request} registers per thread, allowed are "
                "multiples of 8 from 24 to 240"
            )
    # What a request adds comes from what the block was launched with, which is the
    # same multiple of 8 for each warpgroup: three have 504 together, not 512.
    count = len(per_warpgroup)
    total, limit = sum(per_warpgroup), count * launch_registers(count)
    if total > limit:
        requests = " + ".join(map(str, per_warpgroup))
        raise ValueError(
            f"warpgroups ask for {requests} = {total} registers per thread, a block "
            f"of {count} has {limit}; the card would hang"
        )
