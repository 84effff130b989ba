"""The public function: checks, then the implementation that was chosen."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels._common import hw, interpret
from pallas_kernels._common.dispatch import Choice, Implementation, select
from pallas_kernels.grouped_matmul import config_mosaic, reference, xla
from pallas_kernels.grouped_matmul.activation import ACTIVATIONS
from pallas_kernels.grouped_matmul.config import heuristic


_ONLY_NAMED = {"mosaic": "no measured row speaks for it yet"}


def choose(
    x: Any,
    w: Any,
    group_sizes: Any,
    *,
    preferred_element_type: Any = None,
    activation: str | None = None,
    implementation: Implementation | None = None,
) -> Choice:
    """Says what a call of `grouped_matmul` would run; arguments as there.

    Arrays may be `jax.ShapeDtypeStruct`.
    """
    dtype = _check(x, w, group_sizes, preferred_element_type, activation)
    sizes = {
        "rows": x.shape[0],
        "experts": w.shape[0],
        "in_dim": w.shape[1],
        "out_dim": w.shape[2],
    }
    refused, config = {}, None
    if not (hw.is_hopper() or interpret.is_interpreting()):
        refused["mosaic"] = (
            f"the kernels need a Hopper GPU, this is {jax.default_backend()}"
        )
    elif reason := config_mosaic.refusal(**sizes, dtype=x.dtype, out_dtype=dtype):
        refused["mosaic"] = reason
    else:
        config = config_mosaic.pick(**sizes)
    return select(
        "grouped_matmul",
        implementation,
        refused,
        only_named=_ONLY_NAMED,
        config=config,
    )


def _check(
    x: Any, w: Any, group_sizes: Any, preferred_element_type: Any, activation: Any
) -> Any:
    """The result's dtype, if the arguments are allowed."""
    if activation is not None and activation not in ACTIVATIONS:
        raise ValueError(
            f"activation is {activation!r}, expected None or one of "
            f"{', '.join(ACTIVATIONS)}"
        )
    if x.ndim != 2 or w.ndim != 3 or x.shape[1] != w.shape[1]:
        raise ValueError(
            f"x and w have shapes {x.shape} and {w.shape}, expected [M, K] and "
            "[E, K, N]"
        )
    if x.dtype != w.dtype:
        raise ValueError(f"w has dtype {w.dtype}, expected x's, {x.dtype}")
    if group_sizes.shape != w.shape[:1] or group_sizes.dtype != jnp.int32:
        raise ValueError(
            f"group_sizes is {group_sizes.dtype}{list(group_sizes.shape)}, expected "
            f"int32[{w.shape[0]}]"
        )
    if preferred_element_type is None:
        preferred_element_type = x.dtype
    return jnp.dtype(preferred_element_type)


def grouped_matmul(
    x: jax.Array,
    w: jax.Array,
    group_sizes: jax.Array,
    *,
    preferred_element_type: Any = None,
    activation: str | None = None,
    implementation: Implementation | None = None,
) -> jax.Array:
    """Multiplies each group of consecutive rows with its own matrix.

    Args:
      x: [M, Kd], rows sorted by expert.
      w: [E, Kd, N], dtype of x.
      group_sizes: i32[E], rows of each expert, in order; their sum is at most M.
      preferred_element_type: dtype of the result, x's if `None`; sums are f32.
      activation: "relu2" gives max(x w, 0)^2, applied to the f32 sums; the product
        itself is then neither written nor saved.
      implementation: "mosaic", "xla", "reference" or `None`. "mosaic" has x and w in
        bf16 or f16, K and N multiples of 64, and results of x's dtype or f32; any M
        (copied first if no multiple of 8) and groups of any size. `None` does not
        pick it yet.

    Returns:
      [M, N]. Rows past the sum of `group_sizes` are exactly 0 and get no gradient;
      an expert without rows gets a gradient of exactly 0; a NaN in one expert's rows
      or weights stays with that expert.

    Raises:
      ValueError: a shape or dtype is not allowed.
      NotImplementedError: the named implementation cannot run this call.
    """
    choice = choose(
        x,
        w,
        group_sizes,
        preferred_element_type=preferred_element_type,
        activation=activation,
        implementation=implementation,
    )
    dtype = _check(x, w, group_sizes, preferred_element_type, activation)
    if choice.implementation == "mosaic":
        # Imported on first use: Mosaic GPU takes a second that CPU users need not pay.
        from pallas_kernels.grouped_matmul import mosaic

        return mosaic.grouped_matmul(
            x, w, group_sizes, dtype, choice.config, activation
        )
    if choice.implementation == "reference":
        return reference.grouped_matmul(
            x, w, group_sizes, dtype=dtype, activation=activation
        )
    config = heuristic(
        rows=x.shape[0],
        experts=w.shape[0],
        in_dim=w.shape[1],
        out_dim=w.shape[2],
        itemsize=w.dtype.itemsize,
    )
    return xla.grouped_matmul(x, w, group_sizes, dtype, config, activation)
