"""Batched products: y and dx over a table of tiles and experts, dw over experts."""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.grouped_matmul.activation import (
    activate,
    between,
    parts_of,
    pull_back,
)
from pallas_kernels.grouped_matmul.config import Config
from pallas_kernels.grouped_matmul.tasks import owner_of


class _Tasks(NamedTuple):
    """The pairs of a tile and an expert with rows in it, expert by expert.

    tile, expert i32[L], 0 and E - 1 for the unused tasks at the end; task, place i32[M]
    and routed bool[M]: the task that computes a row, and the row's place in its tile.
    """

    tile: jax.Array
    expert: jax.Array
    task: jax.Array
    place: jax.Array
    routed: jax.Array


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def _tasks(group_sizes: jax.Array, rows: int, config: Config) -> _Tasks:
    experts = group_sizes.shape[0]
    tiles = -(-rows // config.tile)
    ends = jnp.cumsum(group_sizes)
    starts = ends - group_sizes
    first = starts // config.tile
    count = jnp.where(group_sizes > 0, (ends - 1) // config.tile - first + 1, 0)
    task_ends = jnp.cumsum(count)
    task_starts = task_ends - count
    # Each expert but the first can share at most one tile with those before it.
    length = tiles + experts - 1
    length = _round_up(length, min(config.slab, length))
    index = jnp.arange(length, dtype=jnp.int32)
    expert = owner_of(task_ends, index).astype(jnp.int32)
    used = expert < experts
    expert = jnp.minimum(expert, experts - 1)
    tile = jnp.where(used, first[expert] + index - task_starts[expert], 0)
    row = jnp.arange(rows, dtype=jnp.int32)
    owner = owner_of(ends, row).astype(jnp.int32)
    routed = owner < experts
    owner = jnp.minimum(owner, experts - 1)
    task = task_starts[owner] + row // config.tile - first[owner]
    return _Tasks(
        tile=tile,
        expert=expert,
        task=jnp.where(routed, task, 0),
        place=row % config.tile,
        routed=routed,
    )


def _tiled(x: jax.Array, config: Config) -> jax.Array:
    """[M, D] to [tiles, tile rows, D]."""
    padded = _round_up(x.shape[0], config.tile)
    x = jnp.pad(x, ((0, padded - x.shape[0]), (0, 0)))
    return x.reshape(-1, config.tile, x.shape[1])


def _slabs(config: Config, *arrays: jax.Array) -> tuple[jax.Array, ...]:
    length = arrays[0].shape[0]
    size = min(config.slab, length)
    return tuple(a.reshape(length // size, size, *a.shape[1:]) for a in arrays)


def _precision(dtype: jnp.dtype) -> jax.lax.Precision:
    # Without HIGHEST a GPU multiplies f32 operands as tf32.
    if dtype == jnp.float32:
        return jax.lax.Precision.HIGHEST
    return jax.lax.Precision.DEFAULT


def _multiply(
    subscripts: str,
    config: Config,
    tasks: _Tasks,
    x: jax.Array,
    w: jax.Array,
    dtype: jnp.dtype,
    activation: str | None = None,
    bias: jax.Array | None = None,
    *,
    keeps: bool = False,
) -> tuple[jax.Array, ...]:
    """Rows times their experts' matrices; rows of no expert are exactly 0.

    With `keeps`, the product before the activation is a second result.
    """
    tiled, w = _tiled(x, config), jnp.asarray(w)

    def slab(operands):
        tile, expert = operands
        product = jnp.einsum(
            subscripts,
            tiled[tile],
            w[expert],
            preferred_element_type=jnp.float32,
            precision=_precision(x.dtype),
        )
        if bias is not None:
            product = product + bias[expert][:, None].astype(jnp.float32)
        results = activate(activation, product), product
        return tuple(v.astype(dtype) for v in results[: 2 if keeps else 1])

    def by_row(results):
        results = results.reshape(-1, results.shape[-1])  # [L * tile rows, N]
        # A gather takes each row from the one task that owns it: what other experts
        # made of the same tile, NaN included, stays behind.
        rows = results[tasks.task * config.tile + tasks.place]
        return jnp.where(tasks.routed[:, None], rows, jnp.zeros((), dtype))

    results = jax.lax.map(slab, _slabs(config, tasks.tile, tasks.expert))
    return tuple(by_row(v) for v in results)


def _rows(x: jax.Array, first: jax.Array, count: jax.Array, window: int) -> jax.Array:
    """`window` rows of x from each of `first` on, zeros behind the first `count`.

    Selected, not multiplied: 0 * NaN would carry one expert's NaN to another.

    Args:
      x: [M, D].
      first, count: i32[...].

    Returns:
      [..., window, D].
    """
    shape = (*first.shape, window)
    place = jax.lax.broadcasted_iota(jnp.int32, shape, first.ndim)
    rows = x[jnp.minimum(first[..., None] + place, x.shape[0] - 1)]
    mine = place < count[..., None]
    return jnp.where(mine[..., None], rows, jnp.zeros((), x.dtype))


def weight_gradient(
    config: Config, group_sizes: jax.Array, x: jax.Array, dy: jax.Array
) -> jax.Array:
    """f32[E, K, N], each expert's rows added in the same order every time.

    The first `window` rows of an expert, which are nearly always all of them, are one
    product of a batch. What larger experts have beyond that is added piece by piece,
    in a loop that takes no turn if there is nothing.
    """
    experts, window = group_sizes.shape[0], config.window
    ends = jnp.cumsum(group_sizes)
    starts = ends - group_sizes
    multiply = functools.partial(
        jnp.einsum,
        preferred_element_type=jnp.float32,
        precision=_precision(x.dtype),
    )

    def slab(operands):
        first, size = operands
        xs, dys = (_rows(v, first, size, window) for v in (x, dy))
        return multiply("emk,emn->ekn", xs, dys)

    slabs = (experts // config.experts, config.experts)
    dw = jax.lax.map(slab, (starts.reshape(slabs), group_sizes.reshape(slabs)))
    dw = dw.reshape(experts, x.shape[1], dy.shape[1])
    if window >= x.shape[0]:
        return dw

    left = jnp.maximum(group_sizes - window, 0)
    pieces = -(-left // config.overflow)
    piece_ends = jnp.cumsum(pieces)

    def add(piece, dw):
        expert = jnp.sum(piece_ends <= piece, dtype=jnp.int32)
        before = piece - (piece_ends[expert] - pieces[expert])
        passed = before * config.overflow
        first = starts[expert] + window + passed
        xs, dys = (
            _rows(v, first, left[expert] - passed, config.overflow) for v in (x, dy)
        )
        total = dw[expert] + multiply("mk,mn->kn", xs, dys)
        return jax.lax.dynamic_update_index_in_dim(dw, total, expert, 0)

    return jax.lax.fori_loop(0, piece_ends[-1], add, dw)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5, 6))
def grouped_matmul(
    x: jax.Array,
    w: jax.Array,
    bias: jax.Array | None,
    group_sizes: jax.Array,
    dtype: jnp.dtype,
    config: Config,
    activation: str | None = None,
) -> jax.Array:
    """Arguments and results as in `api.grouped_matmul`."""
    tasks = _tasks(group_sizes, x.shape[0], config)
    return _multiply("lmk,lkn->lmn", config, tasks, x, w, dtype, activation, bias)[0]


def _forward(x, w, bias, group_sizes, dtype, config, activation):
    tasks = _tasks(group_sizes, x.shape[0], config)
    keeps = parts_of(activation) > 1
    results = _multiply(
        "lmk,lkn->lmn", config, tasks, x, w, dtype, activation, bias, keeps=keeps
    )
    saved = None if activation is None else results[-1]
    return results[0], (x, w, bias, group_sizes, saved)


def _backward(dtype, config, activation, residuals, dy):
    del dtype
    x, w, bias, group_sizes, saved = residuals
    dy = pull_back(activation, saved, dy)
    tasks = _tasks(group_sizes, x.shape[0], config)
    dy = dy.astype(x.dtype)
    (dx,) = _multiply("lmn,lkn->lmk", config, tasks, dy, w, x.dtype)
    dw = weight_gradient(config, group_sizes, x, dy).astype(w.dtype)
    if bias is None:
        return dx, dw, None, None
    ones = jnp.ones((x.shape[0], 1), x.dtype)
    d_bias = weight_gradient(config, group_sizes, ones, dy)[:, 0]
    return dx, dw, d_bias.astype(bias.dtype), None


grouped_matmul.defvjp(_forward, _backward)


def activated_product(
    x: jax.Array,
    w: jax.Array,
    bias: jax.Array | None,
    group_sizes: jax.Array,
    config: Config,
    activation: str,
) -> tuple[jax.Array, jax.Array]:
    """Arguments and results as in `pieces.activated_product`."""
    tasks = _tasks(group_sizes, x.shape[0], config)
    keeps = parts_of(activation) > 1
    dtype = jnp.dtype(x.dtype)
    results = _multiply(
        "lmk,lkn->lmn", config, tasks, x, w, dtype, activation, bias, keeps=keeps
    )
    return results[0], results[-1]


def activation_gradient(
    dy: jax.Array,
    w: jax.Array,
    group_sizes: jax.Array,
    saved: jax.Array,
    scale: jax.Array | None,
    config: Config,
    activation: str,
) -> tuple[jax.Array, jax.Array | None, jax.Array]:
    """Arguments and results as in `pieces.activation_gradient`, in a tuple."""
    tasks = _tasks(group_sizes, dy.shape[0], config)
    f32 = jnp.dtype(jnp.float32)
    (da,) = _multiply("lmn,lkn->lmk", config, tasks, dy, w, f32)
    return between(tasks.routed, da, saved, scale, activation)


def grouped_mlp(
    x: jax.Array,
    w_in: jax.Array,
    w_out: jax.Array,
    group_sizes: jax.Array,
    configs: tuple[Config, Config],
    *,
    activation: str,
    bias_in: jax.Array | None = None,
    bias_out: jax.Array | None = None,
    row_scale: jax.Array | None = None,
) -> jax.Array:
    """Arguments and results as in `mlp.grouped_mlp`; one config for each product."""
    first, second = configs
    dtype = jnp.dtype(x.dtype)
    hidden = grouped_matmul(x, w_in, bias_in, group_sizes, dtype, first, activation)
    if row_scale is None:
        return grouped_matmul(hidden, w_out, bias_out, group_sizes, dtype, second)
    f32 = jnp.dtype(jnp.float32)
    y = grouped_matmul(hidden, w_out, bias_out, group_sizes, f32, second)
    routed = jnp.arange(x.shape[0]) < jnp.sum(group_sizes)
    scale = jnp.where(routed, row_scale.astype(f32), 0.0)
    return (y * scale[:, None]).astype(dtype)
