"""Products with biases and gated activations, and two layers, through Mosaic kernels.

Between forward and backward of the two layers lie their inputs and, of what is between
them, the result of the activation; both products if it is gated, whose result the
backward computes again on its way.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.grouped_matmul import kernel_fused, mosaic, tasks
from pallas_kernels.grouped_matmul.activation import parts_of, pull_back
from pallas_kernels.grouped_matmul.config_fused import MlpConfig
from pallas_kernels.grouped_matmul.config_mosaic import STEP, Config, Tile


# Of the gradient of a bias, which is a product with few columns.
_NARROW = Tile(block_m=64, block_n=256, split="columns")


def _forward_product(
    x,
    w,
    group_sizes,
    dtype: Any,
    tile: Tile,
    *,
    bias=None,
    scale=None,
    activation: str | None = None,
    saves: bool = False,
) -> tuple[jax.Array, ...]:
    experts, depth, columns = w.shape
    plan = kernel_fused.Forward(
        rows=x.shape[0],
        experts=experts,
        depth=depth,
        columns=columns // parts_of(activation),
        dtype=x.dtype,
        out_dtype=dtype,
        tile=tile,
        activation=activation,
        scaled=scale is not None,
        biased=bias is not None,
        saves=saves,
    )
    return kernel_fused.forward(plan, x, w, group_sizes, bias, scale)


def bias_gradient(
    dy, group_sizes, dtype: Any, scale: jax.Array | None = None
) -> jax.Array:
    """Sums of each expert's rows of dy [M, N], each times its scale f32[M]; [E, N].

    A product with a matrix of ones: its sums have one order, and a NaN of one expert
    stays there.
    """
    rows = dy.shape[0]
    if scale is None:
        left = jnp.ones((rows, STEP), dy.dtype)
        return mosaic.weight_sums(left, dy, group_sizes, jnp.float32, _NARROW)[
            :, 0
        ].astype(dtype)
    # A scale is the sum of two numbers of 16 bits, and the matrix has room for both.
    high = scale.astype(dy.dtype)
    low = (scale - high.astype(jnp.float32)).astype(dy.dtype)
    left = jnp.pad(jnp.stack([high, low], axis=1), ((0, 0), (0, STEP - 2)))
    sums = mosaic.weight_sums(left, dy, group_sizes, jnp.float32, _NARROW)
    return (sums[:, 0] + sums[:, 1]).astype(dtype)


def activated_product(
    x, w, bias, group_sizes, tile: Tile, activation: str
) -> tuple[jax.Array, jax.Array]:
    """Kernel form; arguments and results as in `pieces.activated_product`."""
    if bias is None and parts_of(activation) == 1:
        plain = Config(forward=tile)
        a = mosaic.grouped_matmul(x, w, group_sizes, x.dtype, plain, activation)
        return a, a
    results = _forward_product(
        x,
        w,
        group_sizes,
        x.dtype,
        tile,
        bias=bias,
        activation=activation,
        saves=parts_of(activation) > 1,
    )
    return results[0], results[-1]


def activation_gradient(
    dy,
    w,
    group_sizes,
    saved,
    scale: jax.Array | None,
    tile: Tile,
    activation: str,
    *,
    emits: bool,
) -> dict[str, jax.Array]:
    """Kernel form of `pieces.activation_gradient`; results as of `backward`."""
    experts, columns, depth = w.shape
    plan = kernel_fused.Backward(
        rows=dy.shape[0],
        experts=experts,
        depth=depth,
        columns=columns,
        dtype=dy.dtype,
        out_dtype=dy.dtype,
        tile=tile,
        activation=activation,
        scaled=scale is not None,
        emits=emits,
    )
    return kernel_fused.backward(plan, dy, w, group_sizes, saved, scale)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5, 6))
def grouped_matmul(
    x: jax.Array,
    w: jax.Array,
    bias: jax.Array | None,
    group_sizes: jax.Array,
    dtype: Any,
    config: Config,
    activation: str | None = None,
) -> jax.Array:
    """Kernel form; arguments and results as in `api.grouped_matmul`."""
    return _forward_product(
        x, w, group_sizes, dtype, config.forward, bias=bias, activation=activation
    )[0]


def _forward(x, w, bias, group_sizes, dtype, config, activation):
    results = _forward_product(
        x,
        w,
        group_sizes,
        dtype,
        config.forward,
        bias=bias,
        activation=activation,
        saves=parts_of(activation) > 1,
    )
    saved = None if activation is None else results[-1]
    return results[0], (x, w, bias, group_sizes, saved)


def _backward(dtype, config, activation, residuals, dy):
    del dtype
    x, w, bias, group_sizes, saved = residuals
    dy = pull_back(activation, saved, dy).astype(x.dtype)
    operands = x, w, group_sizes, dy, config
    d_bias = None if bias is None else bias_gradient(dy, group_sizes, bias.dtype)
    return (
        mosaic.data_gradient(*operands),
        mosaic.weight_gradient(*operands),
        d_bias,
        None,
    )


grouped_matmul.defvjp(_forward, _backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(7, 8))
def grouped_mlp(
    x: jax.Array,
    w_in: jax.Array,
    w_out: jax.Array,
    bias_in: jax.Array | None,
    bias_out: jax.Array | None,
    row_scale: jax.Array | None,
    group_sizes: jax.Array,
    config: MlpConfig,
    activation: str,
) -> jax.Array:
    """Kernel form; arguments and results as in `mlp.grouped_mlp`."""
    operands = x, w_in, w_out, bias_in, bias_out, row_scale, group_sizes
    return _mlp(operands, config, activation, saves=False)[0]


def _mlp(operands, config, activation, *, saves):
    """The result, and what is saved of the activation."""
    x, w_in, w_out, bias_in, bias_out, row_scale, group_sizes = operands
    first = x, w_in, bias_in, group_sizes
    if saves or (bias_in is None and parts_of(activation) == 1):
        hidden, saved = activated_product(*first, config.up, activation)
    else:
        up = Config(forward=config.up)
        saved = hidden = grouped_matmul(*first, x.dtype, up, activation)
    if bias_out is None and row_scale is None:
        down = Config(forward=config.down)
        return mosaic.grouped_matmul(hidden, w_out, group_sizes, x.dtype, down), saved
    (y,) = _forward_product(
        hidden,
        w_out,
        group_sizes,
        x.dtype,
        config.down,
        bias=bias_out,
        scale=row_scale,
    )
    return y, saved


def _mlp_forward(
    x, w_in, w_out, bias_in, bias_out, row_scale, group_sizes, config, activation
):
    operands = x, w_in, w_out, bias_in, bias_out, row_scale, group_sizes
    y, saved = _mlp(operands, config, activation, saves=True)
    return y, (operands, saved)


def _mlp_backward(config, activation, residuals, dy):
    (x, w_in, w_out, bias_in, bias_out, row_scale, group_sizes), saved = residuals
    _, d_ff, d_model = w_out.shape
    scale = None if row_scale is None else row_scale.astype(jnp.float32)
    gated = parts_of(activation) > 1
    # One side of the second matrix' gradient has the scale: the narrower one, if the
    # other need not be written anyway.
    emits = gated or (scale is not None and d_ff < d_model)
    found = activation_gradient(
        dy, w_out, group_sizes, saved, scale, config.back, activation, emits=emits
    )
    dz = found["dz"]
    left, right = found.get("scaled", saved), dy
    if scale is not None and not emits:
        right = (dy.astype(jnp.float32) * scale[:, None]).astype(dy.dtype)
    sizes = group_sizes
    return (
        mosaic.data_gradient(x, w_in, sizes, dz, Config(data=config.data)),
        mosaic.weight_sums(x, dz, sizes, w_in.dtype, config.weight_in),
        mosaic.weight_sums(left, right, sizes, w_out.dtype, config.weight_out),
        None if bias_in is None else bias_gradient(dz, sizes, bias_in.dtype),
        None if bias_out is None else bias_gradient(dy, sizes, bias_out.dtype, scale),
        _scale_gradient(found, dy, bias_out, row_scale, sizes),
        None,
    )


def _scale_gradient(found, dy, bias_out, row_scale, group_sizes) -> jax.Array | None:
    """Of y = scale * (a w + bias): the row sums of dy times what is scaled."""
    if row_scale is None:
        return None
    total = found["d_scale"]
    if bias_out is not None:
        experts = group_sizes.shape[0]
        owner = tasks.owners(group_sizes, dy.shape[0])
        bias = bias_out[jnp.minimum(owner, experts - 1)].astype(jnp.float32)
        more = jnp.sum(dy.astype(jnp.float32) * bias, axis=1)
        total = total + jnp.where(owner < experts, more, 0.0)
    return total.astype(row_scale.dtype)


grouped_mlp.defvjp(_mlp_forward, _mlp_backward)
