"""The grouped product through Mosaic GPU kernels, with its gradients.

Saved between forward and backward are the inputs and, with an activation, the result.
"""

from __future__ import annotations

import functools
from typing import Any

import jax

from pallas_kernels.grouped_matmul import kernel_wgrad
from pallas_kernels.grouped_matmul.activation import pull_back
from pallas_kernels.grouped_matmul.config_mosaic import Config, Tile
from pallas_kernels.grouped_matmul.kernel import Product, product


def _product(
    x,
    w,
    group_sizes,
    dtype: Any,
    tile: Tile,
    *,
    transposed: bool,
    activation: str | None = None,
) -> jax.Array:
    depth, columns = w.shape[:0:-1] if transposed else w.shape[1:]
    plan = Product(
        rows=x.shape[0],
        experts=w.shape[0],
        depth=depth,
        columns=columns,
        transposed=transposed,
        dtype=x.dtype,
        out_dtype=dtype,
        tile=tile,
        activation=activation,
    )
    return product(plan, x, w, group_sizes)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4, 5))
def grouped_matmul(
    x: jax.Array,
    w: jax.Array,
    group_sizes: jax.Array,
    dtype: Any,
    config: Config,
    activation: str | None = None,
) -> jax.Array:
    """Kernel form; arguments and results as in `api.grouped_matmul`."""
    return _product(
        x,
        w,
        group_sizes,
        dtype,
        config.forward,
        transposed=False,
        activation=activation,
    )


def data_gradient(x, w, group_sizes, dy, config: Config) -> jax.Array:
    """dx of x's dtype; dy [M, N] of x's dtype, the rest as for `grouped_matmul`."""
    return _product(dy, w, group_sizes, x.dtype, config.data, transposed=True)


def weight_gradient(x, w, group_sizes, dy, config: Config) -> jax.Array:
    """dw of w's dtype; dy [M, N] of x's dtype, the rest as for `grouped_matmul`."""
    return weight_sums(x, dy, group_sizes, w.dtype, config.weight)


def weight_sums(
    x, dy, group_sizes, dtype: Any, tile: Tile, into: jax.Array | None = None
) -> jax.Array:
    """dw [E, K, N] of `dtype` for x [M, K] and dy [M, N]; added to `into`, if given."""
    plan = kernel_wgrad.WeightGradient(
        rows=x.shape[0],
        experts=group_sizes.shape[0],
        in_dim=x.shape[1],
        out_dim=dy.shape[1],
        dtype=x.dtype,
        out_dtype=dtype,
        tile=tile,
        accumulates=into is not None,
    )
    return kernel_wgrad.weight_gradient(plan, x, dy, group_sizes, into)


def _forward(x, w, group_sizes, dtype, config, activation):
    y = grouped_matmul(x, w, group_sizes, dtype, config, activation)
    return y, (x, w, group_sizes, None if activation is None else y)


def _backward(dtype, config, activation, residuals, dy):
    del dtype
    x, w, group_sizes, y = residuals
    dy = pull_back(activation, y, dy)
    operands = x, w, group_sizes, dy.astype(x.dtype), config
    return data_gradient(*operands), weight_gradient(*operands), None


grouped_matmul.defvjp(_forward, _backward)
