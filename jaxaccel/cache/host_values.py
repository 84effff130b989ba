"""Arrays in host memory: making them, and reading rows of them on the device.

The two ways in which a jitted program may touch such an array without a copy of the
whole: `lax.dynamic_update_slice` of a block (see `LayerState.put_block`), and
`pallas_kernels.host_gather` of rows.
"""

from __future__ import annotations

import functools
import logging
import math
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jaxaccel.core.memory import (
    PINNED_HOST,
    PINNED_LIMIT_VARIABLE,
    HostMemory,
    gib,
    host_memory,
    require_pinned_host,
)
from pallas_kernels._common.dispatch import Implementation
from pallas_kernels.host_gather import host_gather


type Tier = Literal["host", "device"]

_log = logging.getLogger("jaxaccel")


def choose_tier(asked: Tier | None, what: str) -> Tier:
    """Says where values are kept.

    Args:
      asked: the tier that a config names; `None` takes the host where it has memory of
        its own that the device can read, and says so.
      what: the setting, for messages.

    Raises:
      NotImplementedError: "host" is named, and the backend has no such memory.
    """
    if asked == "host":
        require_pinned_host(jax.local_devices()[:1], f"{what}='host'")
    if asked is not None:
        return asked
    memory = host_memory()
    if not memory.has_pinned_host:
        reason = f"{memory.device} has no memory of the kind {PINNED_HOST!r}"
    elif memory.is_shared:
        reason = f"the memory of {memory.device} is the host's"
    else:
        _announce(f"{what} is in the host's memory")
        return "host"
    _announce(f"{what} is on the device: {reason}")
    return "device"


@functools.cache
def _announce(text: str) -> None:
    _log.info("%s", text)


def check_host_budget(
    num_bytes: int, what: str, memory: HostMemory | None = None
) -> None:
    """Refuses what would not fit, before anything is allocated.

    Args:
      num_bytes: to be pinned.
      what: what they hold.
      memory: the host's, asked for if `None`.

    Raises:
      ValueError: names the bytes, the limit and what sets it.
    """
    memory = host_memory() if memory is None else memory
    if num_bytes > memory.pinned_limit:
        raise ValueError(
            f"{what} needs {gib(num_bytes)} of pinned host memory, the pool's limit is "
            f"{gib(memory.pinned_limit)}: set {PINNED_LIMIT_VARIABLE} to "
            f"{math.ceil(num_bytes / 2**30)} or more before JAX starts"
        )
    if memory.available is not None and num_bytes > memory.available:
        raise ValueError(
            f"{what} needs {gib(num_bytes)} of pinned host memory, this process may "
            f"take {gib(memory.available)} more"
        )


def empty_on_host(shape: tuple[int, ...], dtype: DTypeLike) -> jax.Array:
    """Zeros in pinned host memory; never on the device, outside of `jax.jit`."""
    device = jax.local_devices()[0]
    sharding = jax.sharding.SingleDeviceSharding(device, memory_kind=PINNED_HOST)
    return jax.device_put(np.zeros(shape, jnp.dtype(dtype)), sharding)


def fetch(
    table: jax.Array, rows: jax.Array, implementation: Implementation | None = None
) -> jax.Array:
    """Rows of an array in host memory or on the device, on the device.

    Args:
      table: [..., d].
      rows: i32[...], rows of the array as [N, d]; -1 for none, which gives zeros.
      implementation: of `pallas_kernels.host_gather`.

    Returns:
      [..., d].
    """
    flat = table.reshape(-1, table.shape[-1])  # no copy, in host memory either
    return host_gather(flat, rows, implementation=implementation)
