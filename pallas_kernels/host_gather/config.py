"""How the `host_gather` kernel reads, and which way a call gets."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp

from pallas_kernels._common import pieces, tuning
from pallas_kernels._common.pieces import PIECE_BYTES, WARPGROUP


# Bytes of rows that a warpgroup has on their way: a multiple of what the link holds
# while one answer comes, over all blocks.
FLIGHT_BYTES = 8 * 1024
MAX_ROW_BYTES = 16 * 1024  # registers
MAX_PIECES = 8  # of a thread, of rows that a warpgroup does not share


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """One way to read.

    Attributes:
      blocks: of the grid. The link is slow beside the card: few fill it, and leave
        the other SMs to who computes meanwhile.
      rows: whose loads a block has on their way together.
    """

    blocks: int = 32
    rows: int = 4

    def __post_init__(self):
        if self.blocks < 1 or not 1 <= self.rows <= 128:
            raise ValueError(
                f"blocks={self.blocks} and rows={self.rows}, allowed are at least 1, "
                "and 1 to 128"
            )


def piece(dim: int, dtype: Any) -> int:
    """Values that a thread reads at once; 0 if 128 threads cannot share a row."""
    values = max(1, PIECE_BYTES // jnp.dtype(dtype).itemsize)
    while values:
        if dim % (WARPGROUP * values) == 0:
            return values
        values //= 2
    return 0


def short_piece(dim: int, dtype: Any) -> int:
    """Values that a thread reads at once of a row that 128 threads cannot share.

    Returns:
      0 if rows are no multiple of 4 bytes, or of values that have no select.
    """
    itemsize = jnp.dtype(dtype).itemsize
    return pieces.longest(dim, itemsize) if itemsize > 1 else 0


def short_rows(dim: int, dtype: Any) -> int:
    """Rows of a step, such that threads have equal shares of such rows."""
    return pieces.equal_shares(dim // short_piece(dim, dtype))


def candidates(dim: int, dtype: Any) -> list[Config]:
    """What a tuning run tries for rows of `dim` values."""
    rows = (2, 4, 8, 16) if piece(dim, dtype) else (short_rows(dim, dtype),)
    return [
        Config(blocks=blocks, rows=count)
        for blocks in (8, 16, 32, 64, 132)
        for count in rows
    ]


def row_bytes(dim: int, dtype: Any) -> int:
    return dim * jnp.dtype(dtype).itemsize


def heuristic(dim: int, dtype: Any) -> Config:
    """The way for rows that were not measured."""
    if not piece(dim, dtype):
        return Config(rows=short_rows(dim, dtype))
    rows = FLIGHT_BYTES // row_bytes(dim, dtype)
    return Config(rows=max(1, min(8, rows)))


def table_key(dim: int, dtype: Any) -> str:
    """The key of a call in `tuned/<device>/host_gather.json`."""
    return tuning.key(row_bytes=row_bytes(dim, dtype), dtype=jnp.dtype(dtype).name)


def pick(dim: int, dtype: Any) -> Config:
    """The measured way where there is one, else a guess."""
    found = tuning.lookup("host_gather", table_key(dim, dtype))
    if found is None:
        return heuristic(dim, dtype)
    names = {field.name for field in dataclasses.fields(Config)}
    return Config(**{k: v for k, v in found.items() if k in names})


def refusal(num_rows: int, dim: int, dtype: Any, lookups: int) -> str | None:
    """Why the kernel cannot gather rows of [num_rows, dim], `None` if it can."""
    if not num_rows or not lookups:
        return f"{num_rows} rows and {lookups} lookups, the kernel takes one or more"
    if not dim or not (piece(dim, dtype) or short_piece(dim, dtype)):
        return (
            f"rows of {dim} {jnp.dtype(dtype).name} are no multiple of the {WARPGROUP} "
            "threads that share one, nor of 4 bytes of wider values"
        )
    if not piece(dim, dtype):
        share = short_rows(dim, dtype) * dim // short_piece(dim, dtype) // WARPGROUP
        if share > MAX_PIECES:
            return (
                f"a step of rows of {dim} gives a thread {share} pieces, its "
                f"registers hold {MAX_PIECES}"
            )
    if (size := row_bytes(dim, dtype)) > MAX_ROW_BYTES:
        return f"a row of {size} bytes is more than the {MAX_ROW_BYTES} of registers"
    return None
