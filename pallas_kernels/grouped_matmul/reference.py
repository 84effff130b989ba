"""Loops over experts, each over all rows, with the others' rows set to zero."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.grouped_matmul.activation import activate, between


def grouped_matmul(
    x: jax.Array,
    w: jax.Array,
    group_sizes: jax.Array,
    *,
    dtype: jnp.dtype,
    activation: str | None = None,
    bias: jax.Array | None = None,
) -> jax.Array:
    """Arguments and results as in `api.grouped_matmul`."""
    y = jnp.zeros((x.shape[0], w.shape[2]), jnp.float32)
    for expert, mine in enumerate(_mine(group_sizes, x.shape[0])):
        rows = jnp.where(mine, x.astype(jnp.float32), 0.0)
        product = jnp.einsum("mk,kn->mn", rows, w[expert].astype(jnp.float32))
        if bias is not None:
            product = product + bias[expert][None].astype(jnp.float32)
        y = jnp.where(mine, product, y)
    return activate(activation, y).astype(dtype)


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
) -> jax.Array:
    """Arguments and results as in `mlp.grouped_mlp`."""
    f32 = jnp.dtype(jnp.float32)
    hidden = grouped_matmul(
        x, w_in, group_sizes, dtype=f32, activation=activation, bias=bias_in
    )
    y = grouped_matmul(hidden, w_out, group_sizes, dtype=f32, bias=bias_out)
    if row_scale is not None:
        routed = jnp.arange(x.shape[0]) < jnp.sum(group_sizes)
        scale = jnp.where(routed, row_scale.astype(f32), 0.0)
        y = y * scale[:, None]
    return y.astype(x.dtype)


def activation_gradient(
    dy: jax.Array,
    w: jax.Array,
    group_sizes: jax.Array,
    saved: jax.Array,
    scale: jax.Array | None,
    activation: str,
) -> tuple[jax.Array, jax.Array | None, jax.Array]:
    """Arguments and results as in `pieces.activation_gradient`, in a tuple."""
    transposed = jnp.swapaxes(w, 1, 2)
    f32 = jnp.dtype(jnp.float32)
    da = grouped_matmul(dy, transposed, group_sizes, dtype=f32)
    routed = jnp.arange(dy.shape[0]) < jnp.sum(group_sizes)
    return between(routed, da, saved, scale, activation)


def weight_gradient(
    x: jax.Array, dy: jax.Array, group_sizes: jax.Array, into: jax.Array
) -> jax.Array:
    """Arguments and results as in `pieces.weight_gradient`; `into` is given."""
    sums = []
    for mine in _mine(group_sizes, x.shape[0]):
        rows, dys = (jnp.where(mine, v.astype(jnp.float32), 0.0) for v in (x, dy))
        sums.append(jnp.einsum("mk,mn->kn", rows, dys))
    return (into.astype(jnp.float32) + jnp.stack(sums)).astype(into.dtype)


def _mine(group_sizes: jax.Array, rows: int) -> list[jax.Array]:
    """Which rows are each expert's, bool[M, 1]."""
    index = jnp.arange(rows)
    ends = jnp.cumsum(group_sizes)
    starts = ends - group_sizes
    return [
        ((starts[expert] <= index) & (index < ends[expert]))[:, None]
        for expert in range(group_sizes.shape[0])
    ]
