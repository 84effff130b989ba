"""How the `segment_sum` kernel tiles, and which tiling a call gets."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp

from pallas_kernels._common import pieces, tuning


MAX_PIECES = 8  # of a thread, with their sums in registers

FLOATS = ("float32", "bfloat16", "float16")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """One tiling.

    Attributes:
      positions: sorted rows that one thread adds up, one after the other.
      unroll: rows whose loads are in flight together; divides `positions`.
    """

    positions: int = 16
    unroll: int = 2

    def __post_init__(self):
        if self.positions < 2 or self.unroll < 1 or self.positions % self.unroll:
            raise ValueError(
                f"positions={self.positions} and unroll={self.unroll}, allowed are at "
                "least 2 and a divisor of it"
            )


# What a tuning run tries.
CANDIDATES = tuple(
    Config(positions=positions, unroll=unroll)
    for positions in (8, 16, 32, 64)
    for unroll in (1, 2, 4)
)


def piece(dim: int, dtype: Any) -> int:
    """Values that a thread reads at once; 0 if rows are no multiple of 4 bytes."""
    return pieces.longest(dim, jnp.dtype(dtype).itemsize)


def strips(dim: int, dtype: Any) -> int:
    """Strips of a block: as few as give its threads equal shares."""
    return pieces.equal_shares(dim // piece(dim, dtype))


def table_key(dim: int, dtype: Any) -> str:
    """The key of a call in `tuned/<device>/segment_sum.json`."""
    return tuning.key(dim=dim, dtype=jnp.dtype(dtype).name)


def pick(dim: int, dtype: Any) -> Config:
    """The measured tiling where there is one, else a guess."""
    found = tuning.lookup("segment_sum", table_key(dim, dtype))
    if found is None:
        return Config()
    names = {field.name for field in dataclasses.fields(Config)}
    return Config(**{k: v for k, v in found.items() if k in names})


def refusal(count: int, dim: int, dtype: Any, num_segments: int) -> str | None:
    """Why the kernel cannot sum [count, dim], `None` if it can."""
    name = jnp.dtype(dtype).name
    if name not in FLOATS:
        return f"values.dtype={name}, the kernel takes {', '.join(FLOATS)}"
    if not count or not num_segments:
        return f"{count} rows and {num_segments} sums, the kernel takes one or more"
    if not dim or not piece(dim, dtype):
        return f"a row of {dim} {name} is no multiple of 4 bytes"
    share = strips(dim, dtype) * (dim // piece(dim, dtype)) // pieces.WARPGROUP
    if share > MAX_PIECES:
        return (
            f"a row of {dim} {name} gives a thread {share} pieces, its registers hold "
            f"the sums of {MAX_PIECES}"
        )
    if max(num_segments, count) >= 2**31 - pieces.WARPGROUP:
        return f"{num_segments} sums of {count} rows are counted in int32"
    return None
