"""A table cut over the devices of a mesh axis, and the exchange of its rows.

Device i of E has rows i N/E to (i + 1) N/E. Each device first finds its own batch's
different rows: the rows that all texts read would overload their owner otherwise. Then

- requests go to their owners, rows come back, through blocks of a fixed capacity
  (`all_to_all`, on every backend);
- where any device has more rows for one owner than a block holds, the devices count
  them, and all of them gather all requests, answer their own and add the answers up
  (`all_gather`, `psum_scatter`): E times the traffic, and exact.

Gradients of rows take the same way back to the owner, which adds them up.

It stands alone for now: a training step replicates its tables, and nothing in the
library calls this.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from jaxaccel.core.sharding import check_divisible
from jaxaccel.core.sparse_rows import RowPlan, gather_rows, plan_rows, take_rows


@dataclasses.dataclass(frozen=True, kw_only=True)
class TableSharding:
    """Where a table and its lookups lie.

    Attributes:
      mesh: the devices.
      axis: mesh axis over which both the table's rows and the lookups' first axis lie.
      num_rows: rows N of the whole table, without what `pad_rows` added.
      capacity: rows that a device may ask of one owner, as a multiple of what even
        requests would need; more are fetched the other way.
    """

    mesh: Any
    axis: str
    num_rows: int
    capacity: float = 1.25

    def __post_init__(self):
        if self.axis not in self.mesh.shape:
            raise ValueError(
                f"axis={self.axis!r} is none of the mesh's {tuple(self.mesh.shape)}"
            )
        if self.capacity <= 0:
            raise ValueError(f"capacity={self.capacity} must be positive")

    @property
    def parts(self) -> int:
        """E, devices along the axis."""
        return self.mesh.shape[self.axis]

    @property
    def rows_per_part(self) -> int:
        """Rows of one device, the last device's padding among them."""
        return -(-self.num_rows // self.parts)

    def block_rows(self, unique: int) -> int:
        """Rows of one block of the exchange, for a device with so many places."""
        return min(unique, math.ceil(self.capacity * unique / self.parts))

    @property
    def rows_spec(self) -> PartitionSpec:
        """Of arrays whose first axis lies on the mesh axis."""
        return PartitionSpec(self.axis)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class ShardedRows:
    """Rows of a batch on the devices that read them.

    Attributes:
      rows: [E U, d], device i's rows in part i.
      plan: of each device: `unique` [E U], `slots` of the ids' shape, within the
        device's part, `count` and `num_missing` [E].
      overflow: i32[], rows beyond the blocks, over all devices; if it is not 0, all
        rows came the other way.
    """

    rows: jax.Array
    plan: RowPlan
    overflow: jax.Array


def pad_rows(table: np.ndarray | jax.Array, parts: int) -> Any:
    """A table [N, ...] with zero rows behind it, so that `parts` divide it.

    Checkpoints hold the table without them: they restore under any number of parts.
    """
    missing = -len(table) % parts
    pad = ((0, missing),) + ((0, 0),) * (table.ndim - 1)
    library = np if isinstance(table, np.ndarray) else jnp
    return library.pad(table, pad)


def _sharded(function: Any, sharding: TableSharding, in_specs: Any, out_specs: Any):
    return jax.shard_map(
        function,
        mesh=sharding.mesh,
        in_specs=in_specs,
        out_specs=out_specs,
        # The ways of an exchange give equal results, which the checker cannot know.
        check_vma=False,
    )


def fetch_rows(
    table: jax.Array, ids: jax.Array, sharding: TableSharding
) -> ShardedRows:
    """Brings a batch's rows to the devices that read them.

    Args:
      table: [E ceil(N / E), d], of `pad_rows`.
      ids: i32[B, ...]; E divides B.
      sharding: where both lie.

    Returns:
      The rows.

    Raises:
      ValueError: the table's or the batch's size is another.
    """
    expected = sharding.rows_per_part * sharding.parts
    if table.shape[0] != expected:
        raise ValueError(
            f"the table has {table.shape[0]} rows, {sharding.num_rows} rows over "
            f"{sharding.parts} devices are {expected}; see pad_rows"
        )
    check_divisible(
        "the batch",
        ids.shape[0],
        sharding.axis,
        sharding.parts,
        advice="choose another mesh or another number of rows",
    )

    def device(part: jax.Array, ids: jax.Array):
        plan = plan_rows(ids, sharding.num_rows)
        rows, overflow = _exchange(part, plan.unique, sharding)
        plan = dataclasses.replace(
            plan, count=plan.count[None], num_missing=plan.num_missing[None]
        )
        return ShardedRows(rows=rows, plan=plan, overflow=overflow)

    spec = sharding.rows_spec
    out = ShardedRows(
        rows=spec,  # pyrefly: ignore
        plan=RowPlan(unique=spec, slots=spec, count=spec, num_missing=spec),  # pyrefly: ignore
        overflow=PartitionSpec(),  # pyrefly: ignore
    )
    return _sharded(device, sharding, (spec, spec), out)(table, ids)


def look_up(rows: jax.Array, slots: jax.Array, sharding: TableSharding) -> jax.Array:
    """[B, ..., d]: each lookup's row; differentiable in `rows`.

    Args:
      rows: [E U, d], `ShardedRows.rows`.
      slots: i32[B, ...], `ShardedRows.plan.slots`.
      sharding: where both lie.
    """
    spec = sharding.rows_spec
    return _sharded(take_rows, sharding, (spec, spec), spec)(rows, slots)


def owner_gradients(
    unique: jax.Array, grads: jax.Array, sharding: TableSharding
) -> tuple[jax.Array, jax.Array]:
    """Takes gradients to the owners of their rows; inside of `shard_map`.

    Args:
      unique: i32[U], rows that this device read.
      grads: [U, d].
      sharding: where the table lies.

    Returns:
      (i32[K] rows of this device's part that any device read, counted within it, as
      `RowPlan.unique`; f32[K, d], their gradients summed over devices).
    """
    axis, parts = sharding.axis, sharding.parts
    most = min(parts * unique.size, sharding.rows_per_part)
    grads = grads.astype(jnp.float32)
    block = sharding.block_rows(unique.size)
    start, overflow = _starts(unique, block, sharding)

    def summed(ids: jax.Array, grads: jax.Array):
        plan = plan_rows(_local(ids, sharding), sharding.rows_per_part, capacity=most)
        order = jnp.argsort(plan.slots.reshape(-1), stable=True)
        total = jax.ops.segment_sum(
            grads.reshape(-1, grads.shape[-1])[order],
            plan.slots.reshape(-1)[order],
            most,
            indices_are_sorted=True,
            mode="drop",
        )
        return plan.unique, total

    def by_blocks():
        ids, place = _blocks(unique, start, block, sharding)
        sent = gather_rows(grads, place)  # [E, block, d]
        swap = functools.partial(
            lax.all_to_all, axis_name=axis, split_axis=0, concat_axis=0
        )
        return summed(swap(ids), swap(sent))

    def by_gathering():
        return summed(lax.all_gather(unique, axis), lax.all_gather(grads, axis))

    return lax.cond(overflow == 0, by_blocks, by_gathering)


def _exchange(part: jax.Array, unique: jax.Array, sharding: TableSharding):
    """(rows [U, d] of ascending ids, rows of all devices beyond their blocks)."""
    axis = sharding.axis
    block = sharding.block_rows(unique.size)
    start, overflow = _starts(unique, block, sharding)
    swap = functools.partial(
        lax.all_to_all, axis_name=axis, split_axis=0, concat_axis=0
    )

    def by_blocks():
        ids, _ = _blocks(unique, start, block, sharding)
        answers = gather_rows(part, _local(swap(ids), sharding))  # [E, block, d]
        answers = swap(answers)
        owner = jnp.minimum(unique // sharding.rows_per_part, sharding.parts - 1)
        offset = jnp.arange(unique.size, dtype=jnp.int32) - start[owner]
        rows = answers[owner, jnp.minimum(offset, block - 1)]
        return jnp.where((unique < sharding.num_rows)[:, None], rows, 0)

    def by_gathering():
        asked = _local(lax.all_gather(unique, axis), sharding)  # [E, U]
        answers = gather_rows(part, asked)  # zeros where another device has the row
        return lax.psum_scatter(answers, axis, scatter_dimension=0, tiled=False)

    return lax.cond(overflow == 0, by_blocks, by_gathering), overflow


def _starts(unique: jax.Array, block: int, sharding: TableSharding):
    """Where each owner's rows begin, i32[E + 1], and rows beyond the blocks, i32[]."""
    borders = np.arange(sharding.parts + 1) * sharding.rows_per_part
    borders[-1] = sharding.num_rows
    borders = np.minimum(borders, sharding.num_rows).astype(np.int32)
    # Ascending rows lie owner by owner.
    start = jnp.searchsorted(unique, jnp.asarray(borders)).astype(jnp.int32)
    beyond = jnp.sum(jnp.maximum(jnp.diff(start) - block, 0), dtype=jnp.int32)
    return start, lax.psum(beyond, sharding.axis)


def _blocks(unique: jax.Array, start: jax.Array, block: int, sharding: TableSharding):
    """(ids i32[E, block] for each owner, -1 in free places; places in `unique`)."""
    place = start[:-1, None] + jnp.arange(block, dtype=jnp.int32)[None]
    is_used = place < start[1:, None]
    place = jnp.where(is_used, place, unique.size)
    return gather_rows(unique, place, -1), place


def _local(ids: jax.Array, sharding: TableSharding) -> jax.Array:
    """Row numbers within this device's part; no row's where another device has it."""
    size = sharding.rows_per_part
    first = lax.axis_index(sharding.axis) * size
    is_here = (ids >= first) & (ids < first + size) & (ids < sharding.num_rows)
    return jnp.where(is_here, ids - first, size).astype(jnp.int32)
