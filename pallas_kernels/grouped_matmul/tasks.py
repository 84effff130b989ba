"""Tables of what the Mosaic GPU kernels do, made on the device from group sizes."""

from __future__ import annotations

import enum
import functools

import jax
import jax.numpy as jnp

from pallas_kernels.grouped_matmul.config_mosaic import ALIGN


# (ends of groups, indices) -> the group of each index. Unrolled: a loop would be
# several launches for each of its dozen steps.
owner_of = functools.partial(jnp.searchsorted, side="right", method="scan_unrolled")


class Column(enum.IntEnum):
    """Columns of the table of `row_tiles`, in its order.

    EXPERT is the tile's expert, E for rows of none. BASE is the table row of the
    expert's first tile and TILES how many it has. Its rows are those from START up to
    END.
    """

    EXPERT = 0
    BASE = 1
    TILES = 2
    START = 3
    END = 4


def table_length(rows: int, experts: int, block_m: int) -> int:
    """Tiles that are always enough for `rows` rows of `experts` experts and of none.

    A group of n rows has at most (n + ALIGN - 1 + block_m - 1) / block_m tiles.
    """
    groups = min(experts + 1, rows)
    return (rows + groups * (block_m + ALIGN - 2)) // block_m


def row_tiles(
    group_sizes: jax.Array, rows: int, block_m: int
) -> tuple[jax.Array, jax.Array]:
    """Tiles of `block_m` rows, expert by expert, then the rows of no expert.

    An expert's first tile starts at its first row rounded down to a multiple of
    `ALIGN`, so neighbouring experts share a few rows of a tile and nothing else; an
    expert without rows has no tile.

    Args:
      group_sizes: i32[E], their sum at most `rows`.
      rows: M.
      block_m: rows of a tile.

    Returns:
      (table i32[L, len(Column)], count i32[1] of its rows that hold a tile); L is
      static, and rows behind the count repeat the last group.
    """
    starts, ends, tiles = _groups(group_sizes, rows, block_m)
    tile_ends = jnp.cumsum(tiles)
    length = table_length(rows, group_sizes.shape[0], block_m)
    group = owner_of(tile_ends, jnp.arange(length, dtype=jnp.int32))
    group = jnp.minimum(group, ends.shape[0] - 1).astype(jnp.int32)
    columns = {
        Column.EXPERT: group,
        Column.BASE: (tile_ends - tiles)[group],
        Column.TILES: tiles[group],
        Column.START: starts[group],
        Column.END: ends[group],
    }
    table = jnp.stack([columns[name] for name in Column], axis=1)
    return table.astype(jnp.int32), tile_ends[-1:].astype(jnp.int32)


def place_in_tiles(
    group_sizes: jax.Array, rows: int, block_m: int
) -> tuple[jax.Array, jax.Array]:
    """Where each row is among the rows of all tiles of `row_tiles`, one after another.

    Args:
      group_sizes, rows, block_m: as there.

    Returns:
      (place i32[M], is_routed bool[M]: whether the row is an expert's).
    """
    starts, _, tiles = _groups(group_sizes, rows, block_m)
    tile_starts = jnp.cumsum(tiles) - tiles
    owner = owners(group_sizes, rows)
    first = (starts // ALIGN * ALIGN)[owner]
    place = tile_starts[owner] * block_m + jnp.arange(rows) - first
    return place.astype(jnp.int32), owner < group_sizes.shape[0]


def owners(group_sizes: jax.Array, rows: int) -> jax.Array:
    """The expert of each row, E for a row of none; i32[M]."""
    row = jnp.arange(rows, dtype=jnp.int32)
    return owner_of(jnp.cumsum(group_sizes), row).astype(jnp.int32)


def _groups(
    group_sizes: jax.Array, rows: int, block_m: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """First row, row behind the last and number of tiles of each expert and of none."""
    routed = jnp.sum(group_sizes)
    nobody = jnp.maximum(rows - routed, 0).astype(jnp.int32)
    sizes = jnp.concatenate([group_sizes, nobody[None]])
    ends = jnp.cumsum(sizes)
    starts = ends - sizes
    first = starts // ALIGN * ALIGN
    tiles = jnp.where(sizes > 0, -(-(ends - first) // block_m), 0)
    return starts, ends, tiles


def bounds(group_sizes: jax.Array) -> jax.Array:
    """First row and the row behind the last of each expert, i32[E, 2]."""
    ends = jnp.cumsum(group_sizes)
    return jnp.stack([ends - group_sizes, ends], axis=1).astype(jnp.int32)
