"""Mosaic GPU kernel of `segment_sum`: strips of sorted rows, and strips of strips.

Rows are visited in the order of their ids. A *strip* is a span of so many of them,
whatever their ids: a run of equal ids may be one row or all rows, the work of a strip
is the same. A thread has one piece of the columns of a strip, adds row after row to a
sum in registers, and writes the sum when the id changes. Each sum has one writer:

- a run that begins in a strip is written to the row of its id, as far as it lies there;
- what a strip has of a run that began in front of it is the strip's *head*, and goes to
  a row of the strip's own.

Heads of one run are neighbours, so they are summed by the same kernel, one strip for
many of them, until one strip has them all; each level's sums are added to the rows that
the level above wrote. The order of every sum follows from the ids alone: there are no
atomics, and the same call gives the same bits.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels._common import in_place, indexed
from pallas_kernels.segment_sum.config import Config, piece, strips


# Heads are few: long strips leave fewer levels.
HEAD_POSITIONS = 64
NOTHING = -1  # the key of a row that no sum has


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """The static part of a launch.

    Attributes:
      count, dim: rows and columns that are summed.
      num_segments: rows of sums.
      dtype: of the values.
      config: how to tile.
    """

    count: int
    dim: int
    num_segments: int
    dtype: Any
    config: Config

    @property
    def width(self) -> int:
        """Values of a piece."""
        return piece(self.dim, self.dtype)

    @property
    def row_pieces(self) -> int:
        return self.dim // self.width

    @property
    def block_strips(self) -> int:
        return strips(self.dim, self.dtype)

    @property
    def strips(self) -> int:
        """Strips with rows."""
        return -(-self.count // self.config.positions)

    @property
    def blocks(self) -> int:
        return -(-self.strips // self.block_strips)


def _segment_sum_kernel(*refs, plan: Plan):
    values_ref, keys_ref, *source_ref, sums_ref, heads_ref = refs
    config, width = plan.config, plan.width
    number = indexed.iota(plan.block_strips * plan.row_pieces)
    local = lax.div(number, jnp.int32(plan.row_pieces))
    column = (number - local * plan.row_pieces) * width
    strip = lax.axis_index("block") * plan.block_strips + local
    first = strip * config.positions

    def row(position):
        return jnp.clip(position, 0, plan.count - 1)

    def key(position):
        found = indexed.take(keys_ref, (row(position),))
        return jnp.where(position < plan.count, found, NOTHING)

    def values(position):
        place = row(position)
        if source_ref:
            place = indexed.take(source_ref[0], (place,))
        return indexed.take(values_ref, (place, column), width).astype(jnp.float32)

    def write(current, is_head, total, where):
        where = where & (current >= 0)
        row = jnp.where(current >= 0, current, 0)
        indexed.put(sums_ref, (row, column), total, where & ~is_head)
        own = jnp.minimum(strip, plan.strips - 1)
        indexed.put(heads_ref, (own, column), total, where & is_head)

    def step(i, carry):
        positions = [first + i * config.unroll + u for u in range(config.unroll)]
        # All loads are issued before the first one is needed.
        loaded = [(key(position), values(position)) for position in positions]
        current, is_head, total = carry
        for found, value in loaded:
            is_new = found != current
            write(current, is_head, total, is_new)
            wide = indexed.spread(is_new, width)
            total = jnp.where(wide, 0.0, total) + value
            is_head = is_head & (found == current)
            current = found
        return current, is_head, total

    current = key(first)
    before = jnp.where(first > 0, key(first - 1), NOTHING)
    is_head = current == before
    total = plgpu.layout_cast(
        jnp.zeros((*number.shape, width), jnp.float32), indexed.layout(width)
    )
    carry = (current, is_head, total)
    steps = config.positions // config.unroll
    current, is_head, total = lax.fori_loop(0, steps, step, carry)
    write(current, is_head, total, current >= 0)


def _level(
    plan: Plan, values: jax.Array, keys: jax.Array, source: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    """Sums f32[num_segments, d], and heads f32[strips, d] of the strips with one."""
    inputs = (values, keys) if source is None else (values, keys, source)
    kernel = plgpu.kernel(
        functools.partial(_segment_sum_kernel, plan=plan),
        out_type=jax.ShapeDtypeStruct((plan.strips, plan.dim), jnp.float32),
        grid=(plan.blocks,),
        grid_names=("block",),
        kernel_name="pk_segment_sum",
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane,
            unsafe_no_auto_barriers=True,  # threads share nothing
        ),
    )
    zeros = jnp.zeros((plan.num_segments, plan.dim), jnp.float32)
    heads, sums = in_place.update(kernel, inputs, zeros)
    return sums, heads


def segment_sum(
    config: Config,
    values: jax.Array,
    keys: jax.Array,
    source: jax.Array | None,
    num_segments: int,
) -> jax.Array:
    """Launches all levels.

    Args:
      config: how to tile the first.
      values: [M, d].
      keys: i32[M], row of each sum, equal ones side by side; -1 for what no sum has.
      source: i32[M], where in `values` the rows lie; `None` for where they are.
      num_segments: K.

    Returns:
      f32[K, d], zero where no key is.
    """
    plan = Plan(
        count=values.shape[0],
        dim=values.shape[1],
        num_segments=num_segments,
        dtype=jnp.dtype(values.dtype),
        config=config,
    )
    total, heads = _level(plan, values, keys, source)
    if plan.strips == 1:
        return total
    # A strip has a head if its first row's run began in front of it.
    opening = keys[:: config.positions]
    closing = keys[config.positions - 1 :: config.positions][: plan.strips - 1]
    no, number = jnp.zeros(1, bool), jnp.arange(plan.strips, dtype=jnp.int32)
    is_head = jnp.concatenate([no, opening[1:] == closing]) & (opening >= 0)
    goes_on = is_head[:-1] & (opening[1:] == opening[:-1])
    is_start = is_head & ~jnp.concatenate([no, goes_on])
    start = lax.cummax(jnp.where(is_start, number, NOTHING))
    head_keys = jnp.where(is_head, start, NOTHING)
    deeper = dataclasses.replace(config, positions=HEAD_POSITIONS)
    head_sums = segment_sum(deeper, heads, head_keys, None, plan.strips)
    # Each run's heads have one sum, where its first head is.
    target = jnp.where(is_start, opening, num_segments + number)
    return total.at[target].add(head_sums, mode="drop", unique_indices=True)
