"""Tiles of rows, a table of (tile, expert) tasks, and batched products over it."""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.grouped_matmul.config import Config


class _Tasks(NamedTuple):
    """The pairs of a tile and an expert with rows in it, expert by expert.

    tile, expert i32[L]; mine bool[L, tile rows], which of the tile's rows are the
    expert's, all false for the unused tasks at the end; task, place i32[M] and
    routed bool[M]: the task that computes a row, and the row's place in its tile.
    """

    tile: jax.Array
    expert: jax.Array
    mine: jax.Array
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
    expert = jnp.searchsorted(task_ends, index, side="right").astype(jnp.int32)
    used = expert < experts
    expert = jnp.minimum(expert, experts - 1)
    tile = jnp.where(used, first[expert] + index - task_starts[expert], 0)
    row = tile[:, None] * config.tile + jnp.arange(config.tile, dtype=jnp.int32)[None]
    mine = (starts[expert][:, None] <= row) & (row < ends[expert][:, None])

    row = jnp.arange(rows, dtype=jnp.int32)
    owner = jnp.searchsorted(ends, row, side="right").astype(jnp.int32)
    routed = owner < experts
    owner = jnp.minimum(owner, experts - 1)
    task = task_starts[owner] + row // config.tile - first[owner]
    return _Tasks(
        tile=tile,
        expert=expert,
        mine=mine & used[:, None],
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
) -> jax.Array:
    """Rows times their experts' matrices; rows of no expert are exactly 0."""
    tiled, w = _tiled(x, config), jnp.asarray(w)

    def slab(operands):
        tile, expert = operands
        return jnp.einsum(
            subscripts,
            tiled[tile],
            w[expert],
            preferred_element_type=jnp.float32,
            precision=_precision(x.dtype),
        ).astype(dtype)

    products = jax.lax.map(slab, _slabs(config, tasks.tile, tasks.expert))
    products = products.reshape(-1, products.shape[-1])  # [L * tile rows, N]
    # A gather takes each row from the one task that owns it: what other experts
    # made of the same tile, NaN included, stays behind.
    rows = products[tasks.task * config.tile + tasks.place]
    return jnp.where(tasks.routed[:, None], rows, jnp.zeros((), dtype))


def _weight_gradient(
    config: Config,
    tasks: _Tasks,
    x: jax.Array,
    dy: jax.Array,
    experts: int,
) -> jax.Array:
    """f32[E, K, N]; tasks are added one after another, so the order never changes."""
    x_tiles, dy_tiles = _tiled(x, config), _tiled(dy, config)
    before = jnp.concatenate([jnp.full((1,), -1, jnp.int32), tasks.expert[:-1]])
    begins = tasks.expert != before

    def one(carry, task):
        total, dw = carry
        product, expert, begins = task
        total = jnp.where(begins, 0.0, total) + product
        # The last write of an expert holds its whole sum.
        dw = jax.lax.dynamic_update_index_in_dim(dw, total, expert, 0)
        return (total, dw), None

    def slab(carry, operands):
        tile, expert, mine, begins = operands
        # Both sides are selected: 0 * NaN would carry one expert's NaN to another.
        mine = mine[:, :, None]
        xs = jnp.where(mine, x_tiles[tile], jnp.zeros((), x.dtype))
        dys = jnp.where(mine, dy_tiles[tile], jnp.zeros((), dy.dtype))
        products = jnp.einsum(
            "lmk,lmn->lkn",
            xs,
            dys,
            preferred_element_type=jnp.float32,
            precision=_precision(x.dtype),
        )
        return jax.lax.scan(one, carry, (products, expert, begins))

    shape = (x.shape[1], dy.shape[1])
    carry = (jnp.zeros(shape, jnp.float32), jnp.zeros((experts, *shape), jnp.float32))
    operands = _slabs(config, tasks.tile, tasks.expert, tasks.mine, begins)
    (_, dw), _ = jax.lax.scan(slab, carry, operands)
    return dw


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def grouped_matmul(
    x: jax.Array,
    w: jax.Array,
    group_sizes: jax.Array,
    dtype: jnp.dtype,
    config: Config,
) -> jax.Array:
    """Arguments and results as in `api.grouped_matmul`."""
    tasks = _tasks(group_sizes, x.shape[0], config)
    return _multiply("lmk,lkn->lmn", config, tasks, x, w, dtype)


def _forward(x, w, group_sizes, dtype, config):
    return grouped_matmul(x, w, group_sizes, dtype, config), (x, w, group_sizes)


def _backward(dtype, config, residuals, dy):
    del dtype
    x, w, group_sizes = residuals
    tasks = _tasks(group_sizes, x.shape[0], config)
    dy = dy.astype(x.dtype)
    dx = _multiply("lmn,lkn->lmk", config, tasks, dy, w, x.dtype)
    dw = _weight_gradient(config, tasks, x, dy, w.shape[0])
    return dx, dw.astype(w.dtype), None


grouped_matmul.defvjp(_forward, _backward)
