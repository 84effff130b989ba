"""The public function: checks, then the implementation that was chosen."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels._common import hw, interpret
from pallas_kernels._common.dispatch import Choice, Implementation, select
from pallas_kernels.engram_gather import config as configs
from pallas_kernels.engram_gather import reference, xla
from pallas_kernels.segment_sum import api as sums


# Near the fewest lookups of a row, by the table's dtype.
MEASURED_LOOKUPS = {"bfloat16": 2**12, "float8_e4m3fn": 2**18}


def choose(
    table: Any,
    ids: Any,
    *,
    scale: Any = None,
    implementation: Implementation | None = None,
) -> Choice:
    """Says what a call of `engram_gather` would run.

    Args:
      table, ids, scale: arrays or `jax.ShapeDtypeStruct`, as for the function.
      implementation: the one asked for.

    Returns:
      The choice, with a `Config` if it is "mosaic".

    Raises:
      ValueError: a shape or dtype is not allowed.
      NotImplementedError: the named implementation cannot run this call.
    """
    _check(table, ids, scale)
    num_rows, dim = table.shape
    refused, config = {}, None
    if not (hw.is_hopper() or interpret.is_interpreting()):
        refused["mosaic"] = (
            f"the kernel needs a Hopper GPU, this is {jax.default_backend()}"
        )
    elif reason := configs.refusal(num_rows, dim, table.dtype, math.prod(ids.shape)):
        refused["mosaic"] = reason
    else:
        config = configs.pick(dim, table.dtype, math.prod(ids.shape))
    only_named, lookups = {}, math.prod(ids.shape)
    least = MEASURED_LOOKUPS.get(jnp.dtype(table.dtype).name)
    if least is None or lookups < least:
        size = f"{lookups} lookups in a table of {table.dtype}"
        only_named["mosaic"] = f"no measured row is near {size}"
    return select(
        "engram_gather",
        implementation,
        refused,
        only_named=only_named,
        config=config,
    )


def _check(table: Any, ids: Any, scale: Any) -> None:
    if len(table.shape) != 2 or not jnp.issubdtype(table.dtype, jnp.floating):
        raise ValueError(
            f"table is {table.dtype}{list(table.shape)}, expected float[N, d]"
        )
    if ids.dtype != jnp.int32:
        raise ValueError(f"ids are {ids.dtype}{list(ids.shape)}, expected int32[...]")
    is_narrow = jnp.dtype(table.dtype).itemsize == 1
    if is_narrow != (scale is not None):
        raise ValueError(
            f"a table of {table.dtype} is given with"
            f"{'out' if scale is None else ''} scale, expected one for 8-bit rows only"
        )
    if scale is None:
        return
    num_rows, dim = table.shape
    expected = (num_rows, dim // reference.BLOCK)
    allowed = ("uint8", "float8_e8m0fnu")
    if (
        dim % reference.BLOCK
        or scale.shape != expected
        or jnp.dtype(scale.dtype).name not in allowed
    ):
        raise ValueError(
            f"scale is {scale.dtype}{list(scale.shape)} for a table {list(table.shape)}"
            f", expected {' or '.join(allowed)}[N, d / {reference.BLOCK}]"
        )


def engram_gather(
    table: jax.Array,
    ids: jax.Array,
    *,
    scale: jax.Array | None = None,
    implementation: Implementation | None = None,
) -> jax.Array:
    """Rows of a table, y_i = table[id_i], or table[id_i] 2^(scale[id_i] - 127).

    Differentiable in a table without scales: its gradient adds up the rows of equal ids
    in their order, as `segment_sum` does, and is as large as the table. Tables that
    train are read through the rows of a batch (`jaxaccel.core.sparse_rows`). Rows that
    the kernel of `segment_sum` refuses have their gradient from XLA, whatever is named.

    Args:
      table: [N, d], float32, bfloat16 or float16; with `scale`, float8_e4m3fn.
      ids: i32[...].
      scale: exponents of 32 neighbouring values each, biased by 127, u8[N, d / 32] or
        float8_e8m0fnu; 255 is NaN.
      implementation: "mosaic", "xla", "reference"; `None` takes the best that can.

    Returns:
      [..., d] in the table's dtype; bfloat16 with `scale`, rounded once. An id that is
      no row gives NaN.

    Raises:
      ValueError: a shape or dtype is not allowed.
      NotImplementedError: the named implementation cannot run this call.

    Source: Engram (arXiv 2601.07372), section 2; OCP Microscaling Formats (MX) v1.0
    for the scales.
    """
    choice = choose(table, ids, scale=scale, implementation=implementation)
    if scale is None:
        return _gather(choice, table, ids)
    if scale.dtype != jnp.uint8:
        scale = jax.lax.bitcast_convert_type(scale, jnp.uint8)
    return _run(choice, table, ids, scale)


def _run(choice: Choice, table: Any, ids: Any, scale: Any) -> jax.Array:
    if choice.implementation != "mosaic":
        module = xla if choice.implementation == "xla" else reference
        return module.engram_gather(table, ids, scale=scale)
    # Imported on first use: Mosaic GPU takes a second that others need not pay.
    from pallas_kernels.engram_gather import kernel

    plan = kernel.Plan(
        num_rows=table.shape[0],
        dim=table.shape[1],
        dtype=jnp.dtype(table.dtype),
        out_dtype=jnp.dtype(table.dtype if scale is None else jnp.bfloat16),
        config=choice.config,
    )
    flat = ids.reshape(-1)
    # What a last block lacks is looked up too, and thrown away.
    missing = -flat.size % plan.config.rows
    rows = kernel.engram_gather(plan, table, jnp.pad(flat, (0, missing)), scale)
    return rows[: flat.size].reshape(*ids.shape, plan.dim)


def _gather(choice: Choice, table: jax.Array, ids: jax.Array) -> jax.Array:
    """The lookup with its gradient; `choice` runs the forward pass."""

    @jax.custom_vjp
    def gather(table, ids):
        return _run(choice, table, ids, None)

    def forward(table, ids):
        # An empty array tells the backward pass shape and dtype without the table.
        return gather(table, ids), (ids, jnp.zeros((table.shape[0], 0), table.dtype))

    def backward(residuals, dy):
        ids, like = residuals
        dy, num_rows = dy.reshape(ids.size, -1), like.shape[0]
        runs = choice.implementation == "mosaic"
        runs = runs and sums.mosaic_refusal(dy, num_rows) is None
        # Rows of the sum, not of the gather, say where its kernel is picked.
        own = "mosaic" if choice.source == "named" else None
        total = sums.segment_sum(
            dy, ids.reshape(-1), num_rows, implementation=own if runs else "xla"
        )
        return total.astype(like.dtype), np.zeros(ids.shape, jax.dtypes.float0)

    gather.defvjp(forward, backward)
    return gather(table, ids)
