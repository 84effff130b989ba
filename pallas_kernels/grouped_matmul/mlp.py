"""The two layers of experts as one function, whose backward is fused."""

from __future__ import annotations

from typing import Any

import jax

from pallas_kernels._common.dispatch import Choice, Implementation, select
from pallas_kernels.grouped_matmul import api, config_fused, reference, xla
from pallas_kernels.grouped_matmul.activation import ACTIVATIONS, parts_of


def choose_mlp(
    x: Any,
    w_in: Any,
    w_out: Any,
    group_sizes: Any,
    *,
    activation: str,
    bias_in: Any = None,
    bias_out: Any = None,
    row_scale: Any = None,
    implementation: Implementation | None = None,
) -> Choice:
    """Says what a call of `grouped_mlp` would run; arguments as there.

    Arrays may be `jax.ShapeDtypeStruct`.
    """
    _check(x, w_in, w_out, group_sizes, activation, bias_in, bias_out, row_scale)
    parts = parts_of(activation)
    hidden = jax.ShapeDtypeStruct((x.shape[0], w_out.shape[1]), x.dtype)
    refused, config = {}, None
    if reason := (
        api.refusal(x, w_in, x.dtype, parts) or api.refusal(hidden, w_out, x.dtype)
    ):
        refused["mosaic"] = reason
    else:
        config = config_fused.pick(
            rows=x.shape[0],
            experts=w_in.shape[0],
            d_model=x.shape[1],
            d_ff=w_out.shape[1],
            parts=parts,
        )
    return select(
        "grouped_mlp",
        implementation,
        refused,
        only_named=api.FUSED_ONLY_NAMED,
        config=config,
    )


def _check(x, w_in, w_out, group_sizes, activation, bias_in, bias_out, row_scale):
    if activation not in ACTIVATIONS:
        raise ValueError(
            f"activation is {activation!r}, expected one of {', '.join(ACTIVATIONS)}"
        )
    api.check_product(x, w_in, group_sizes, bias_in, ("x", "w_in", "bias_in"))
    d_ff, odd = divmod(w_in.shape[2], parts_of(activation))
    want = (w_in.shape[0], d_ff, x.shape[1])
    if odd or w_out.shape != want:
        raise ValueError(
            f"w_in and w_out have shapes {w_in.shape} and {w_out.shape}, expected "
            f"[E, D, {parts_of(activation)} F] and [E, F, D] with {activation!r}"
        )
    hidden = jax.ShapeDtypeStruct((x.shape[0], d_ff), x.dtype)
    names = "x", "w_out", "bias_out"
    api.check_product(hidden, w_out, group_sizes, bias_out, names)
    api.check_scale(row_scale, x.shape[0])


def grouped_mlp(
    x: jax.Array,
    w_in: jax.Array,
    w_out: jax.Array,
    group_sizes: jax.Array,
    *,
    activation: str,
    bias_in: jax.Array | None = None,
    bias_out: jax.Array | None = None,
    row_scale: jax.Array | None = None,
    implementation: Implementation | None = None,
) -> jax.Array:
    """Sends each group of consecutive rows through its expert's two layers.

    y_m = s_m (act(x_m w_in + b_in) w_out + b_out)

    With the weights of a router as s, the rows of a token need only be added, and
    their gradient is ds_m = sum_f a_mf (dy_m w_out^T)_f + dy_m b_out: y is not kept
    for it.

    Args:
      x: [M, D], rows sorted by expert.
      w_in: [E, D, F], or [E, D, 2F] of gate, then up, for a gated activation; dtype
        of x.
      w_out: [E, F, D], dtype of x.
      group_sizes: i32[E], rows of each expert, in order; their sum is at most M.
      activation: "relu2", "swiglu" or "clamped_swiglu", as for `grouped_matmul`.
      bias_in, bias_out: [E, F] or [E, 2F], and [E, D]; or `None`.
      row_scale: [M], s; `None` for ones.
      implementation: "mosaic", "xla", "reference" or `None`, which does not pick
        "mosaic" yet. It has x in bf16 or f16 and D and F in multiples of 64.

    Returns:
      [M, D] of x's dtype. Rows past the sum of `group_sizes` are exactly 0 and get no
      gradient; an expert without rows gets gradients of exactly 0; a NaN in one
      expert's rows or weights stays with that expert.

    Raises:
      ValueError: a shape or dtype is not allowed.
      NotImplementedError: the named implementation cannot run this call.

    Source: SonicMoE (arXiv 2512.14080), for the order of the backward.
    """
    options = {
        "activation": activation,
        "bias_in": bias_in,
        "bias_out": bias_out,
        "row_scale": row_scale,
    }
    choice = choose_mlp(
        x, w_in, w_out, group_sizes, **options, implementation=implementation
    )
    if choice.implementation == "mosaic":
        # Imported on first use: Mosaic GPU takes a second that CPU users need not pay.
        from pallas_kernels.grouped_matmul import mosaic_fused

        return mosaic_fused.grouped_mlp(
            x,
            w_in,
            w_out,
            bias_in,
            bias_out,
            row_scale,
            group_sizes,
            choice.config,
            activation,
        )
    if choice.implementation == "reference":
        return reference.grouped_mlp(x, w_in, w_out, group_sizes, **options)
    hidden = jax.ShapeDtypeStruct((x.shape[0], w_out.shape[1]), x.dtype)
    configs = api.xla_config(x, w_in), api.xla_config(hidden, w_out)
    return xla.grouped_mlp(x, w_in, w_out, group_sizes, configs, **options)
