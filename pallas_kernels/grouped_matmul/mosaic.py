"""The grouped product through Mosaic GPU kernels, with its gradients.

Saved between forward and backward are the inputs.
"""

from __future__ import annotations

import functools
from typing import Any

import jax

from pallas_kernels.grouped_matmul.config_mosaic import Config
from pallas_kernels.grouped_matmul.kernel import Product, product
from pallas_kernels.grouped_matmul.kernel_wgrad import (
    WeightGradient,
    weight_gradient,
)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def grouped_matmul(
    x: jax.Array,
    w: jax.Array,
    group_sizes: jax.Array,
    dtype: Any,
    config: Config,
) -> jax.Array:
    """Kernel form; arguments and results as in `api.grouped_matmul`."""
    experts, in_dim, out_dim = w.shape
    plan = Product(
        rows=x.shape[0],
        experts=experts,
        depth=in_dim,
        columns=out_dim,
        transposed=False,
        dtype=x.dtype,
        out_dtype=dtype,
        tile=config.forward,
    )
    return product(plan, x, w, group_sizes)


def _forward(x, w, group_sizes, dtype, config):
    return grouped_matmul(x, w, group_sizes, dtype, config), (x, w, group_sizes)


def _backward(dtype, config, residuals, dy):
    del dtype
    x, w, group_sizes = residuals
    experts, in_dim, out_dim = w.shape
    sizes = {"rows": x.shape[0], "experts": experts, "dtype": x.dtype}
    dy = dy.astype(x.dtype)
    data = Product(
        **sizes,
        depth=out_dim,
        columns=in_dim,
        transposed=True,
        out_dtype=x.dtype,
        tile=config.data,
    )
    weight = WeightGradient(
        **sizes,
        in_dim=in_dim,
        out_dim=out_dim,
        out_dtype=w.dtype,
        tile=config.weight,
    )
    dx = product(data, dy, w, group_sizes)
    return dx, weight_gradient(weight, x, dy, group_sizes), None


grouped_matmul.defvjp(_forward, _backward)
