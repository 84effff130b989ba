"""The public function: checks, then the implementation that was chosen."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels._common import hw, interpret
from pallas_kernels._common.dispatch import Choice, Implementation, select
from pallas_kernels.grouped_matmul import (
    config_fused,
    config_mosaic,
    reference,
    xla,
)
from pallas_kernels.grouped_matmul.activation import ACTIVATIONS, parts_of
from pallas_kernels.grouped_matmul.config import Config, heuristic


# Rows speak for 160 and more rows an expert; how few are too few is a guess.
_PICKED_FROM = 64
# What `kernel_fused` does, and sums into what is there.
FUSED_ONLY_NAMED = {"mosaic": "no measured row speaks for the fused kernels yet"}


def choose(
    x: Any,
    w: Any,
    group_sizes: Any,
    *,
    bias: Any = None,
    preferred_element_type: Any = None,
    activation: str | None = None,
    implementation: Implementation | None = None,
) -> Choice:
    """Says what a call of `grouped_matmul` would run; arguments as there.

    Arrays may be `jax.ShapeDtypeStruct`.
    """
    dtype = _check(x, w, group_sizes, preferred_element_type, activation, bias)
    sizes = sizes_of(x, w)
    refused, config = {}, None
    if reason := refusal(x, w, dtype, parts_of(activation)):
        refused["mosaic"] = reason
    else:
        config = config_mosaic.pick(**sizes)
        if parts_of(activation) > 1:
            config = config_fused.with_pairs(config, **sizes)
    return select(
        "grouped_matmul",
        implementation,
        refused,
        only_named=FUSED_ONLY_NAMED
        if is_fused(bias, activation)
        else only_named(**sizes),
        config=config,
    )


def only_named(*, rows: int, experts: int, **widths: int) -> dict[str, str]:
    """Which implementations of the plain products run by name only, and why."""
    del widths
    if rows >= _PICKED_FROM * experts:
        return {}
    return {
        "mosaic": f"{rows} rows of {experts} experts are fewer than {_PICKED_FROM} "
        "each, far from any measured row"
    }


def is_fused(bias: Any, activation: str | None) -> bool:
    """Whether a product needs the kernels of `kernel_fused`."""
    return bias is not None or parts_of(activation) > 1


def sizes_of(x: Any, w: Any) -> dict[str, int]:
    """M, E, K and N of a product, as configs name them."""
    experts, in_dim, out_dim = w.shape
    return {
        "rows": x.shape[0],
        "experts": experts,
        "in_dim": in_dim,
        "out_dim": out_dim,
    }


def refusal(x: Any, w: Any, out_dtype: Any, parts: int = 1) -> str | None:
    """Why the kernels cannot multiply these here, `None` if they can.

    Args:
      x, w: as for `grouped_matmul`.
      out_dtype: of the result.
      parts: products that the activation takes, 1 or 2.
    """
    if not (hw.is_hopper() or interpret.is_interpreting()):
        return f"the kernels need a Hopper GPU, this is {jax.default_backend()}"
    if reason := config_mosaic.refusal(
        **sizes_of(x, w), dtype=x.dtype, out_dtype=out_dtype
    ):
        return reason
    if (columns := w.shape[2]) % (64 * parts):
        return f"N = {columns} of gate and up, the kernels have multiples of 128"
    return None


def xla_config(x: Any, w: Any) -> Config:
    """How the XLA form cuts a product."""
    return heuristic(**sizes_of(x, w), itemsize=w.dtype.itemsize)


def check_product(
    x: Any, w: Any, group_sizes: Any, bias: Any, names: tuple[str, str, str]
) -> None:
    """Refuses shapes and dtypes that do not belong together.

    Args:
      x, w, group_sizes, bias: as for `grouped_matmul`.
      names: what messages call x, w and the bias.

    Raises:
      ValueError: naming what is wrong.
    """
    if x.ndim != 2 or w.ndim != 3 or x.shape[1] != w.shape[1]:
        raise ValueError(
            f"{names[0]} and {names[1]} have shapes {x.shape} and {w.shape}, expected "
            "[M, K] and [E, K, N]"
        )
    if x.dtype != w.dtype:
        raise ValueError(
            f"{names[1]} has dtype {w.dtype}, expected {names[0]}'s, {x.dtype}"
        )
    if group_sizes.shape != w.shape[:1] or group_sizes.dtype != jnp.int32:
        raise ValueError(
            f"group_sizes is {group_sizes.dtype}{list(group_sizes.shape)}, expected "
            f"int32[{w.shape[0]}]"
        )
    if bias is not None:
        want = w.shape[0], w.shape[2]
        if bias.shape != want or not jnp.issubdtype(bias.dtype, jnp.floating):
            raise ValueError(
                f"{names[2]} is {bias.dtype}{list(bias.shape)}, expected floats "
                f"{list(want)}"
            )


def check_scale(row_scale: Any, rows: int) -> None:
    """Refuses a scale that is not one float a row; there need not be one."""
    if row_scale is None:
        return
    if row_scale.shape != (rows,) or not jnp.issubdtype(row_scale.dtype, jnp.floating):
        raise ValueError(
            f"row_scale is {row_scale.dtype}{list(row_scale.shape)}, expected floats "
            f"[{rows}]"
        )


def _check(
    x: Any,
    w: Any,
    group_sizes: Any,
    preferred_element_type: Any,
    activation: Any,
    bias: Any,
) -> Any:
    """The result's dtype, if the arguments are allowed."""
    if activation is not None and activation not in ACTIVATIONS:
        raise ValueError(
            f"activation is {activation!r}, expected None or one of "
            f"{', '.join(ACTIVATIONS)}"
        )
    check_product(x, w, group_sizes, bias, ("x", "w", "bias"))
    if w.shape[2] % parts_of(activation):
        raise ValueError(
            f"N = {w.shape[2]} with activation={activation!r}, expected a multiple of 2"
        )
    if preferred_element_type is None:
        preferred_element_type = x.dtype
    return jnp.dtype(preferred_element_type)


def grouped_matmul(
    x: jax.Array,
    w: jax.Array,
    group_sizes: jax.Array,
    *,
    bias: jax.Array | None = None,
    preferred_element_type: Any = None,
    activation: str | None = None,
    implementation: Implementation | None = None,
) -> jax.Array:
    """Multiplies each group of consecutive rows with its own matrix.

    Args:
      x: [M, Kd], rows sorted by expert.
      w: [E, Kd, N], dtype of x.
      group_sizes: i32[E], rows of each expert, in order; their sum is at most M.
      bias: [E, N], added to the f32 sums of each expert's rows; or `None`.
      preferred_element_type: dtype of the result, x's if `None`; sums are f32.
      activation: applied to the f32 sums z, with their bias. "relu2" gives
        max(z, 0)^2; the product itself is then neither written nor saved. With
        "swiglu", g sigmoid(g) u, and "clamped_swiglu",
        (u' + 1) g' sigmoid(1.702 g') of g' = min(g, 7) and u' = u within +-7, w's
        columns are those of the gate g, then those of u: N is 2F.
      implementation: "mosaic", "xla", "reference" or `None`. "mosaic" has x and w in
        bf16 or f16, K and N multiples of 64, and results of x's dtype or f32; any M
        (copied first if no multiple of 8) and groups of any size. `None` does not
        pick it yet.

    Returns:
      [M, N], or [M, F] of a gated activation. Rows past the sum of `group_sizes` are
      exactly 0 and get no gradient; an expert without rows gets a gradient of exactly
      0; a NaN in one expert's rows or weights stays with that expert.

    Raises:
      ValueError: a shape or dtype is not allowed.
      NotImplementedError: the named implementation cannot run this call.
    """
    choice = choose(
        x,
        w,
        group_sizes,
        bias=bias,
        preferred_element_type=preferred_element_type,
        activation=activation,
        implementation=implementation,
    )
    dtype = _check(x, w, group_sizes, preferred_element_type, activation, bias)
    if choice.implementation == "mosaic":
        # Imported on first use: Mosaic GPU takes a second that CPU users need not pay.
        from pallas_kernels.grouped_matmul import mosaic, mosaic_fused

        rest = group_sizes, dtype, choice.config, activation
        if is_fused(bias, activation):
            return mosaic_fused.grouped_matmul(x, w, bias, *rest)
        return mosaic.grouped_matmul(x, w, *rest)
    if choice.implementation == "reference":
        return reference.grouped_matmul(
            x, w, group_sizes, dtype=dtype, activation=activation, bias=bias
        )
    config = xla_config(x, w)
    return xla.grouped_matmul(x, w, bias, group_sizes, dtype, config, activation)
