"""The convolution through Mosaic GPU kernels, with its gradient.

The kernels give y and the gradients of x, weight, bias and the initial state. The
final state is W - 1 inputs of each row, and stays with XLA in both directions.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.causal_conv1d import kernel, tables
from pallas_kernels.causal_conv1d.config import Config, Kernels


def plan_of(config: Config, silu: bool, x, weight, bias, table) -> kernel.Plan:
    """The static part of a launch; arrays as for `kernel.causal_conv1d_fwd`."""
    batch, time, dim = x.shape
    return kernel.Plan(
        batch=batch,
        time=time,
        dim=dim,
        width=weight.shape[0],
        dtype=jnp.dtype(x.dtype),
        has_bias=bias is not None,
        packed=table is not None,
        silu=silu,
        config=config,
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _conv(kernels: Kernels, silu: bool, x, weight, bias, state, table, place):
    plan = plan_of(kernels.fwd, silu, x, weight, bias, table)
    y = kernel.causal_conv1d_fwd(plan, x, weight, state, bias, table)
    return y, tables.take_inputs(x, state, place)


def _conv_fwd(kernels: Kernels, silu: bool, *arguments: Any):
    return _conv(kernels, silu, *arguments), arguments


def _conv_bwd(kernels: Kernels, silu: bool, arguments: Any, cotangents: Any):
    x, weight, bias, state, table, place = arguments
    dy, d_final = cotangents
    plan = plan_of(kernels.bwd, silu, x, weight, bias, table)
    dx, dweight, d_state, dbias = kernel.causal_conv1d_bwd(
        plan, x, weight, state, bias, table, dy
    )
    dx, d_state = tables.add_at_inputs(dx, d_state, place, d_final)
    dweight = dweight.astype(weight.dtype)
    if bias is not None and dbias is not None:
        dbias = dbias.astype(bias.dtype)
    return dx, dweight, dbias, d_state, None, None


_conv.defvjp(_conv_fwd, _conv_bwd)


def causal_conv1d(
    kernels: Kernels,
    x: jax.Array,
    weight: jax.Array,
    *,
    bias: jax.Array | None,
    borders: tables.Borders,
    initial_state: jax.Array,
    activation: str | None,
) -> tuple[jax.Array, jax.Array]:
    """Kernel form; arguments and results as in `api.causal_conv1d`."""
    return _conv(
        *(kernels, activation == "silu", x, weight, bias, initial_state),
        *(borders.reach, borders.place),
    )
