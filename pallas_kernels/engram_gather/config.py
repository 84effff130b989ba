"""How the `engram_gather` kernel tiles, and which tiling a call gets."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp

from pallas_kernels._common import pieces, tuning
from pallas_kernels.engram_gather.reference import BLOCK


# Pieces of a thread whose loads are in flight together, where rows allow so few.
PIECES = 4

FLOATS = ("float32", "bfloat16", "float16")
NARROW = "float8_e4m3fn"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """One tiling.

    Attributes:
      rows: that a block gathers, such that its threads have equal shares.
    """

    rows: int

    def __post_init__(self):
        if self.rows < 1:
            raise ValueError(f"rows={self.rows}, allowed are positive numbers")


def piece(dim: int, dtype: Any) -> int:
    """Values that a thread moves at once; 0 if rows are no multiple of 4 bytes.

    A row of 8-bit values is read 8 values at a time: they leave as 16 bytes.
    """
    return pieces.longest(dim, max(2, jnp.dtype(dtype).itemsize))


def step(dim: int, dtype: Any) -> int:
    """Rows of a block are a multiple of this many."""
    return pieces.equal_shares(dim // piece(dim, dtype))


def heuristic(dim: int, dtype: Any) -> Config:
    """The tiling for rows of `dim` values that were not measured."""
    least = step(dim, dtype)
    share = least * (dim // piece(dim, dtype)) // pieces.WARPGROUP  # of a thread
    multiple = 1
    while 2 * multiple * share <= PIECES:
        multiple *= 2
    return Config(rows=least * multiple)


# What a tuning run tries, as multiples of the fewest rows.
MULTIPLES = (1, 2, 4, 8, 16)


def table_key(dim: int, dtype: Any) -> str:
    """The key of a call in `tuned/<device>/engram_gather.json`."""
    return tuning.key(dim=dim, dtype=jnp.dtype(dtype).name)


def pick(dim: int, dtype: Any, lookups: int) -> Config:
    """The measured tiling where there is one, else a guess.

    A block that does not divide the lookups costs a copy of the result: smaller ones
    are taken as long as there are any.
    """
    found = tuning.lookup("engram_gather", table_key(dim, dtype))
    least, rows = step(dim, dtype), heuristic(dim, dtype).rows
    if found is not None and found["rows"] % least == 0:
        rows = found["rows"]
    smaller = rows
    while lookups % smaller and smaller % (2 * least) == 0:
        smaller //= 2
    return Config(rows=rows if lookups % smaller else smaller)


def refusal(num_rows: int, dim: int, dtype: Any, lookups: int) -> str | None:
    """Why the kernel cannot gather rows of [num_rows, dim], `None` if it can."""
    name = jnp.dtype(dtype).name
    if name not in (*FLOATS, NARROW):
        return f"table.dtype={name}, the kernel takes {', '.join(FLOATS)}, {NARROW}"
    if not num_rows or not lookups:
        return f"{num_rows} rows and {lookups} lookups, the kernel takes one or more"
    if name == NARROW and dim % BLOCK:
        return f"d={dim} is no multiple of the {BLOCK} values that share a scale"
    if not dim or not piece(dim, dtype):
        return f"a row of {dim} {name} is no multiple of 4 bytes"
    return None
