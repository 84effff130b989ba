"""The public function: checks, then the implementation that was chosen."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels._common import hw, interpret
from pallas_kernels._common.dispatch import Choice, Implementation, select
from pallas_kernels.host_gather import config as configs
from pallas_kernels.host_gather import reference, xla


_ON_DEVICE = {"mosaic": "the table is on the device, rows speak for the host's memory"}


def choose(
    table: Any, ids: Any, *, implementation: Implementation | None = None
) -> Choice:
    """Says what a call of `host_gather` would run.

    Args:
      table, ids: arrays or `jax.ShapeDtypeStruct`, as for the function.
      implementation: the one asked for.

    Returns:
      The choice, with a `Config` if it is "mosaic".

    Raises:
      ValueError: a shape or dtype is not allowed.
      NotImplementedError: the named implementation cannot run this call.
    """
    if len(table.shape) != 2:
        raise ValueError(f"table is {table.dtype}{list(table.shape)}, expected [N, d]")
    if ids.dtype != jnp.int32:
        raise ValueError(f"ids are {ids.dtype}{list(ids.shape)}, expected int32[...]")
    num_rows, dim = table.shape
    refused, config = {}, None
    if not (hw.is_hopper() or interpret.is_interpreting()):
        refused["mosaic"] = (
            f"the kernel needs a Hopper GPU, this is {jax.default_backend()}"
        )
    elif reason := configs.refusal(num_rows, dim, table.dtype, math.prod(ids.shape)):
        refused["mosaic"] = reason
    else:
        config = configs.pick(table.shape[1], table.dtype)
    return select(
        "host_gather",
        implementation,
        refused,
        only_named={} if _is_on_host(table) else _ON_DEVICE,
        config=config,
    )


def _is_on_host(table: Any) -> bool:
    if isinstance(table, jax.ShapeDtypeStruct):  # whose type says nothing of it
        return getattr(table.sharding, "memory_kind", None) == "pinned_host"
    return jax.typeof(table).memory_space == jax.memory.Space.Host


def host_gather(
    table: jax.Array, ids: jax.Array, *, implementation: Implementation | None = None
) -> jax.Array:
    """Rows of a table that stays in the host's memory, y_i = table[id_i].

    Not differentiable: such tables are read only.

    Args:
      table: [N, d] of any dtype, in the memory kind "pinned_host" or on the device.
      ids: i32[...], on the device.
      implementation: "mosaic" (the card reads the rows itself), "xla" (the host
        gathers, then they are copied), "reference" (the whole table is copied); `None`
        takes the best that can.

    Returns:
      [..., d] on the device, zeros for an id that is no row.

    Raises:
      ValueError: a shape or dtype is not allowed.
      NotImplementedError: the named implementation cannot run this call.

    Source: Engram (arXiv 2601.07372), section 2, whose tables lie in the host's memory.
    """
    choice = choose(table, ids, implementation=implementation)
    if choice.implementation != "mosaic":
        module = xla if choice.implementation == "xla" else reference
        return module.host_gather(table, ids)
    # Imported on first use: Mosaic GPU takes a second that others need not pay.
    from pallas_kernels.host_gather import kernel

    flat, config = ids.reshape(-1), choice.config
    # What a last step lacks is no row, and thrown away.
    missing = -flat.size % config.rows
    padded = jnp.pad(flat, (0, missing), constant_values=-1)
    rows = kernel.host_gather(config, table, padded)
    return rows[: flat.size].reshape(*ids.shape, table.shape[1])
