"""The public function: checks, then the implementation that was chosen."""

from __future__ import annotations

import functools
from typing import Any, Literal

import jax
import jax.numpy as jnp

from pallas_kernels._common import hw, interpret
from pallas_kernels._common.dispatch import Choice, Implementation, select
from pallas_kernels.causal_conv1d import config as configs
from pallas_kernels.causal_conv1d import reference, tables, xla


# Rows speak for 8192 tokens; how few are too few is a guess.
_PICKED_FROM = 1024


def choose(
    x: Any,
    weight: Any,
    *,
    bias: Any = None,
    implementation: Implementation | None = None,
    **options: Any,
) -> Choice:
    """Says what a call of `causal_conv1d` would run.

    Args:
      x, weight, bias: arrays or `jax.ShapeDtypeStruct`, as for `causal_conv1d`.
      implementation: the one asked for.
      **options: the other keywords of `causal_conv1d`, which decide nothing.

    Returns:
      The choice, with `Kernels` as its config if it is "mosaic".

    Raises:
      ValueError: x or weight has a shape that is not allowed.
      NotImplementedError: the named implementation cannot run this call.
    """
    del options
    if len(x.shape) != 3 or len(weight.shape) != 2:
        raise ValueError(
            f"x and weight have shapes {x.shape} and {weight.shape}, expected "
            "[B, T, D] and [W, D]"
        )
    refused, kernels = {}, None
    if reason := _mosaic_refusal(x, weight, bias):
        refused["mosaic"] = reason
    else:
        batch, time, dim = x.shape
        kernels = configs.Kernels(
            fwd=configs.pick(batch, time, dim, x.dtype, "fwd"),
            bwd=configs.pick(batch, time, dim, x.dtype, "bwd"),
        )
    short = f"T is below {_PICKED_FROM}, far from any measured row"
    return select(
        "causal_conv1d",
        implementation,
        refused,
        only_named={"mosaic": short} if x.shape[1] < _PICKED_FROM else None,
        config=kernels,
    )


def _mosaic_refusal(x: Any, weight: Any, bias: Any) -> str | None:
    """Why the kernels cannot run these inputs, `None` if they can."""
    if not (hw.is_hopper() or interpret.is_interpreting()):
        return f"the kernels need a Hopper GPU, this is {jax.default_backend()}"
    for name, array in (("weight", weight), ("bias", bias)):
        allowed = (jnp.dtype(jnp.float32), jnp.dtype(x.dtype))
        if array is not None and jnp.dtype(array.dtype) not in allowed:
            return f"{name}.dtype={array.dtype}, the kernels take float32 or {x.dtype}"
    batch, time, dim = x.shape
    return configs.refusal(batch, time, dim, weight.shape[0], x.dtype)


def _expect(name: str, array: Any, shape: tuple[int, ...], dtype: Any = None) -> None:
    if array.shape != shape:
        raise ValueError(f"{name} has shape {array.shape}, expected {shape}")
    if dtype is not None and array.dtype != dtype:
        raise ValueError(f"{name} has dtype {array.dtype}, expected {jnp.dtype(dtype)}")


def _check_borders(borders: tables.Borders, x: Any, width: int) -> None:
    """Refuses tables of another call, as far as shapes tell."""
    built = (*borders.place.shape, borders.time)
    called = (x.shape[0], width - 1, x.shape[1])
    if built != called:
        raise ValueError(
            f"borders were built for [B, W - 1, T] = {list(built)}, this call has "
            f"{list(called)}"
        )


def causal_conv1d(
    x: jax.Array,
    weight: jax.Array,
    *,
    bias: jax.Array | None = None,
    is_first: jax.Array | None = None,
    is_real: jax.Array | None = None,
    borders: tables.Borders | None = None,
    initial_state: jax.Array | None = None,
    activation: Literal["silu"] | None = None,
    implementation: Implementation | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Depthwise causal convolution over time, y_t = act(sum_w c_w x_(t-W+1+w) + b).

    Args:
      x: [B, T, D].
      weight: [W, D]; weight[W - 1] multiplies the current token.
      bias: [D].
      is_first: bool[B, T], whether a token begins a document: its window and those
        of later tokens don't reach further back.
      is_real: bool[B, T], false on padding, which the final state skips.
      borders: the tables that `document_borders` made of `is_first` and `is_real`, so
        that layers share them. "mosaic" takes the packing from there and from nowhere
        else, and makes them if `None`; the others take it from the arguments above.
      initial_state: [B, W - 1, D], the inputs before the row, dtype of x; zeros if
        `None`.
      activation: "silu" or `None`.
      implementation: "mosaic", "xla", "reference"; `None` takes the best that can.

    Returns:
      (y [B, T, D] of x's dtype, final_state [B, W - 1, D]: the last W - 1 raw inputs
      of the row's last document, zeros where it is younger than that). Sums are f32.

    Raises:
      ValueError: a shape, dtype or activation is not allowed.
      NotImplementedError: the named implementation cannot run this call.

    Source: Gated Delta Networks (arXiv 2412.06464), section 3.
    """
    choice = choose(x, weight, bias=bias, implementation=implementation)
    batch, time, dim = x.shape
    width = weight.shape[0]
    _expect("weight", weight, (width, dim))
    if width < 1:
        raise ValueError("weight has no taps, expected at least one")
    if activation not in ("silu", None):
        raise ValueError(f"activation is {activation!r}, allowed are 'silu' and None")
    if bias is not None:
        _expect("bias", bias, (dim,))
    if is_first is not None:
        _expect("is_first", is_first, (batch, time), jnp.bool_)
    if is_real is not None:
        _expect("is_real", is_real, (batch, time), jnp.bool_)
    if borders is not None:
        _check_borders(borders, x, width)
    if initial_state is None:
        initial_state = jnp.zeros((batch, width - 1, dim), x.dtype)
    _expect("initial_state", initial_state, (batch, width - 1, dim), x.dtype)
    if choice.implementation == "mosaic":
        # Imported on first use: Mosaic GPU takes a second that others need not pay.
        from pallas_kernels.causal_conv1d import mosaic

        if borders is None:
            borders = tables.document_borders(
                is_first, is_real, batch=batch, time=time, width=width
            )
        run = functools.partial(mosaic.causal_conv1d, choice.config, borders=borders)
    else:
        module = xla if choice.implementation == "xla" else reference
        run = functools.partial(
            module.causal_conv1d, is_first=is_first, is_real=is_real
        )
    return run(x, weight, bias=bias, initial_state=initial_state, activation=activation)
