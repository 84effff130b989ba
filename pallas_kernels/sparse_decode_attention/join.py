"""Mosaic GPU kernel that joins the parts of each item, one launch instead of three."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels._common.matrix_columns import put_columns
from pallas_kernels.attention import kernel_fwd as flash
from pallas_kernels.attention import tensor_core as tc
from pallas_kernels.sparse_decode_attention.config import TILE, WARPGROUPS, Sizes


TOGETHER = 16  # parts that are read at once


def _join_kernel(*refs, sizes: Sizes, names: tuple[str, ...]):
    """A block joins 64 values of an item; it reads at once whatever has room."""
    named: dict[str, Any] = dict(zip(names, refs, strict=True))
    heads, shape = sizes.columns, (TILE, sizes.columns)
    number, piece = lax.axis_index("item"), lax.axis_index("piece")
    pieces = sizes.head_dim // TILE
    tiles, share = jnp.int32(sizes.tiles), jnp.int32(sizes.share)
    last = lax.div((number + 1) * tiles - 1, share)
    # Later parts may not be there.
    found = (last - lax.div(number * tiles, share) + 1) * WARPGROUPS
    base = number * (sizes.parts * WARPGROUPS)
    top = tc.full((heads,), flash.LOWEST, tc.PER_COLUMN)
    total = tc.full((heads,), 0.0, tc.PER_COLUMN)
    if "sinks" in named:
        sinks = named["sinks"].at[box(sizes, number)]
        top = tc.load_global(sinks, tc.PER_COLUMN) * flash.LOG2_E
        total = total + 1.0
    together = min(TOGETHER, sizes.parts * WARPGROUPS)

    def step(i, carry):
        acc, top, total = carry
        logs, parts = [], []
        for j in range(together):
            part = i * together + j
            place = base + jnp.minimum(part, found - 1)
            log = tc.load_global(named["lse"].at[place], tc.PER_COLUMN)
            logs.append(jnp.where(part < found, log, jnp.full_like(log, flash.LOWEST)))
            rows = pl.ds(piece * TILE, TILE)
            parts.append(tc.load_global(named["o"].at[place, rows]))
        largest = functools.reduce(jnp.maximum, logs, top)
        factor = jnp.exp2(top - largest)
        acc, total = acc * tc.per_column(factor, shape), total * factor
        for log, o in zip(logs, parts, strict=True):
            some = log > flash.LOWEST
            weight = jnp.where(some, jnp.exp2(log - largest), jnp.zeros_like(log))
            acc = acc + o * tc.per_column(weight, shape)
            total = total + weight
        return acc, largest, total

    steps = lax.div(found + together - 1, jnp.int32(together))
    carry = tc.full(shape, 0.0, tc.MATRIX), top, total
    acc, top, total = lax.fori_loop(0, steps, step, carry)
    some = total > 0
    acc = acc * tc.per_column(1.0 / jnp.where(some, total, 1.0), shape)
    lse = jnp.where(some, top / flash.LOG2_E + jnp.log(total), -jnp.inf)
    first = lax.rem(number, jnp.int32(sizes.splits)) * heads
    start = lax.div(number, jnp.int32(sizes.splits)) * sizes.group + first
    columns: dict[str, Any] = {
        "low": lax.rem(number * sizes.stride, jnp.int32(heads)),
        "count": jnp.minimum(sizes.group - first, heads),
    }
    place = start * pieces + piece
    put_columns(named["o_out"], acc, start=place, stride=pieces, **columns)

    @pl.when(piece == 0)
    def _():
        logs = tc.per_column(lse, shape)
        put_columns(named["lse_out"], logs, start=start, stride=1, **columns)


def join(
    sizes: Sizes, o: jax.Array, lse: jax.Array, sinks: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    """Joins the parts of all items.

    Args:
      sizes: of the call.
      o: f32[parts of all items * K, heads of an item], each by its own sum.
      lse: f32[parts of all items, heads of an item], logarithms of the sums, base 2;
        `flash.LOWEST` for a part that has nothing.
      sinks: [H] or `None`.

    Returns:
      o f32[B, H, K] and the natural logarithm of all sums, f32[B, H].
    """
    heads, count = sizes.columns, sizes.batch * sizes.heads
    inputs = {"o": o.reshape(-1, sizes.head_dim, heads), "lse": lse}
    if sinks is not None:
        sinks = jnp.broadcast_to(sinks.astype(jnp.float32), (sizes.batch, sizes.heads))
        inputs["sinks"] = by_item(sizes, sinks).reshape(-1, heads)
    body: Any = functools.partial(
        _join_kernel, sizes=sizes, names=(*inputs, "o_out", "lse_out")
    )
    pieces = sizes.head_dim // TILE
    o, lse = plgpu.kernel(
        body,
        out_type=(
            jax.ShapeDtypeStruct((count * pieces, TILE), jnp.float32),
            jax.ShapeDtypeStruct((count, 1), jnp.float32),
        ),
        grid=(sizes.items, pieces),
        grid_names=("item", "piece"),
        kernel_name="pk_sparse_decode_attention_join",
        compiler_params=tc.params(auto_barriers=False),
    )(*inputs.values())
    out = sizes.batch, sizes.heads
    return o.reshape(*out, sizes.head_dim), lse.reshape(out)


def by_item(sizes: Sizes, heads: jax.Array) -> jax.Array:
    """Puts query heads where the kernels look for those of an item.

    Args:
      sizes: of the call.
      heads: [B, H, ...].

    Returns:
      [boxes * heads of an item, ...]: item n has those from n * stride on, which lie in
      one box.
    """
    rest = heads.shape[2:]
    room = sizes.stride * sizes.splits - sizes.group
    if room:
        heads = heads.reshape(sizes.pairs, sizes.group, *rest)
        heads = jnp.pad(heads, ((0, 0), (0, room), *((0, 0) for _ in rest)))
    return heads.reshape(-1, *rest)


def box(sizes: Sizes, number: jax.Array) -> jax.Array:
    """The box of `by_item` in which an item has its heads."""
    return lax.div(number * sizes.stride, jnp.int32(sizes.columns))
