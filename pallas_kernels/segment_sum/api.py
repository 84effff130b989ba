"""The public function: checks, then the implementation that was chosen."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels._common import hw, interpret
from pallas_kernels._common.dispatch import Choice, Implementation, select
from pallas_kernels.segment_sum import config as configs
from pallas_kernels.segment_sum import reference, xla


MEASURED_ROWS = 2**18  # a quarter of what rows have
MEASURED_DTYPES = ("bfloat16", "float32")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Order:
    """The rows in the order of their ids.

    Attributes:
      ids: i32[M], ascending; what is dropped has `num_segments` and comes last.
      source: i32[M], where each row was; equal ids keep their order.
    """

    ids: jax.Array
    source: jax.Array


def sort_ids(ids: jax.Array, num_segments: int) -> Order:
    """Sorts ids i32[M] once, for all sums over them; see `segment_sum`."""
    is_kept = (ids >= 0) & (ids < num_segments)
    iota = jnp.arange(ids.size, dtype=jnp.int32)
    ordered, source = jax.lax.sort(
        (jnp.where(is_kept, ids, num_segments), iota), num_keys=1, is_stable=True
    )
    return Order(ids=ordered, source=source)


def choose(
    values: Any,
    ids: Any,
    num_segments: int,
    *,
    implementation: Implementation | None = None,
    **options: Any,
) -> Choice:
    """Says what a call of `segment_sum` would run.

    Args:
      values, ids: arrays or `jax.ShapeDtypeStruct`, as for the function.
      num_segments: K.
      implementation: the one asked for.
      **options: its other keywords, which decide nothing.

    Returns:
      The choice, with a `Config` if it is "mosaic".

    Raises:
      ValueError: a shape or dtype is not allowed.
      NotImplementedError: the named implementation cannot run this call.
    """
    del options
    if len(values.shape) != 2 or not jnp.issubdtype(values.dtype, jnp.floating):
        raise ValueError(
            f"values are {values.dtype}{list(values.shape)}, expected float[M, d]"
        )
    if ids.shape != values.shape[:1] or ids.dtype != jnp.int32:
        raise ValueError(
            f"ids are {ids.dtype}{list(ids.shape)}, expected "
            f"int32{list(values.shape[:1])}"
        )
    if num_segments < 0:
        raise ValueError(f"num_segments={num_segments}, expected at least 0")
    refused, config = {}, None
    if reason := mosaic_refusal(values, num_segments):
        refused["mosaic"] = reason
    else:
        config = configs.pick(values.shape[1], values.dtype)
    only_named = {}
    count, dtype = values.shape[0], jnp.dtype(values.dtype).name
    if count < MEASURED_ROWS or dtype not in MEASURED_DTYPES:
        size = f"{dtype}[{count}, d]"
        only_named["mosaic"] = f"no measured row is near {size}"
    return select(
        "segment_sum", implementation, refused, only_named=only_named, config=config
    )


def mosaic_refusal(values: Any, num_segments: int) -> str | None:
    """Why the kernel cannot run these inputs, `None` if it can."""
    if not (hw.is_hopper() or interpret.is_interpreting()):
        return f"the kernel needs a Hopper GPU, this is {jax.default_backend()}"
    count, dim = values.shape
    return configs.refusal(count, dim, values.dtype, num_segments)


def segment_sum(
    values: jax.Array,
    ids: jax.Array,
    num_segments: int,
    *,
    order: Order | None = None,
    implementation: Implementation | None = None,
) -> jax.Array:
    """Adds up the rows of each id, y_k = sum of values_i with id_i = k.

    Differentiable in the values. "mosaic" adds in an order that the ids alone decide:
    the same call gives the same bits.

    Args:
      values: [M, d], any float dtype.
      ids: i32[M]; rows whose id is not in [0, K) are dropped.
      num_segments: K.
      order: what `sort_ids` made of the same ids, so that several sums share it.
      implementation: "mosaic", "xla", "reference"; `None` takes the best that can.

    Returns:
      f32[K, d], zero for an id without rows.

    Raises:
      ValueError: a shape or dtype is not allowed.
      NotImplementedError: the named implementation cannot run this call.

    Source: the gradient of a lookup; Engram (arXiv 2601.07372), section 2.
    """
    choice = choose(values, ids, num_segments, implementation=implementation)
    if order is not None and not order.ids.shape == order.source.shape == ids.shape:
        raise ValueError(
            f"order has {list(order.ids.shape)} ids and {list(order.source.shape)} "
            f"places, expected {list(ids.shape)}"
        )
    if choice.implementation != "reference" and order is None:
        order = sort_ids(ids, num_segments)

    @jax.custom_vjp
    def total(values, ids, order):
        return _run(choice, values, ids, num_segments, order)

    def forward(values, ids, order):
        # An empty array tells the backward pass the dtype without keeping the values.
        return total(values, ids, order), (ids, order, jnp.zeros(0, values.dtype))

    def backward(residuals, dy):
        ids, order, like = residuals
        ids_ = jnp.where(ids < 0, num_segments, ids)
        dvalues = jnp.take(dy, ids_, axis=0, mode="fill", fill_value=0)
        none = jax.tree.map(
            lambda x: np.zeros(x.shape, jax.dtypes.float0), (ids, order)
        )
        return dvalues.astype(like.dtype), *none

    total.defvjp(forward, backward)
    return total(values, ids, order)


def _run(
    choice: Choice, values: Any, ids: Any, num_segments: int, order: Order | None
) -> jax.Array:
    if choice.implementation == "reference":
        return reference.segment_sum(values, ids, num_segments)
    assert order is not None
    if choice.implementation == "xla":
        return xla.segment_sum(values, order.ids, order.source, num_segments)
    # Imported on first use: Mosaic GPU takes a second that others need not pay.
    from pallas_kernels.segment_sum import kernel

    keys = jnp.where(order.ids < num_segments, order.ids, kernel.NOTHING)
    return kernel.segment_sum(choice.config, values, keys, order.source, num_segments)
