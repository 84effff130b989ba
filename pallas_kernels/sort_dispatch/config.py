"""What the kernels of `sort_dispatch` can run, and with which launch parameters."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp

from pallas_kernels._common import pieces, tuning


FLOATS = ("float32", "bfloat16", "float16")
WARP = 32  # threads; `indexed`, which says so too, is imported with Mosaic only

# Scores of a token lie in the registers of a warp, so many in a thread.
MAX_SHARE = 32
# Ids of a token lie in as many registers of a warp's threads as there are warps of ids.
MAX_SLOTS = 128
# Of groups a thread keeps every score.
MAX_GROUPS = 32


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Launch parameters of the kernels that move rows.

    Attributes:
      copied: pieces of a thread of `permute`, whose loads are in flight together.
      summed: pieces of a thread of `combine`.
      unroll: slots of `combine` whose rows are in flight together.
    """

    copied: int = 4
    summed: int = 1
    unroll: int = 8

    def __post_init__(self):
        for name in ("copied", "summed", "unroll"):
            if getattr(self, name) < 1:
                raise ValueError(
                    f"{name}={getattr(self, name)}, allowed are positive numbers"
                )


# What a tuning run tries.
CANDIDATES = tuple(
    Config(copied=copied, summed=summed, unroll=unroll)
    for copied in (2, 4, 8)
    for summed, unroll in ((1, 4), (1, 8), (1, 16), (2, 4))
)


def table_key(slots: int, dim: int, dtype: Any) -> str:
    """The key of a call in `tuned/<device>/sort_dispatch.json`."""
    return tuning.key(slots=slots, dim=dim, dtype=jnp.dtype(dtype).name)


def pick(slots: int, dim: int, dtype: Any) -> Config:
    """The measured parameters where there are some, else a guess."""
    found = tuning.lookup("sort_dispatch", table_key(slots, dim, dtype))
    if found is None:
        return Config()
    names = {field.name for field in dataclasses.fields(Config)}
    return Config(**{k: v for k, v in found.items() if k in names})


def piece(dim: int, dtype: Any) -> int:
    """Values that a thread moves at once; 0 if rows are no multiple of 4 bytes."""
    return pieces.longest(dim, jnp.dtype(dtype).itemsize)


def rows_refusal(rows: int, dim: int, dtype: Any) -> str | None:
    """Why the kernels cannot move [rows, dim], `None` if they can."""
    name = jnp.dtype(dtype).name
    if name not in FLOATS:
        return f"dtype={name}, the kernels move {', '.join(FLOATS)}"
    if not dim or not piece(dim, dtype):
        return f"a row of {dim} {name} is no multiple of 4 bytes"
    if rows * (dim // piece(dim, dtype)) >= 2**31 - 2**16:
        return f"the pieces of {rows} rows of {dim} {name} are counted in int32"
    return None


def top_refusal(experts: int, top_k: int, num_groups: int) -> str | None:
    """Why the kernel cannot choose experts, `None` if it can."""
    if experts > WARP * MAX_SHARE:
        return (
            f"{experts} experts, a warp's registers hold the scores of "
            f"{WARP * MAX_SHARE}"
        )
    if top_k > MAX_SLOTS:
        return f"top_k={top_k}, the kernel chooses at most {MAX_SLOTS}"
    if num_groups > MAX_GROUPS:
        return f"num_groups={num_groups}, the kernel compares at most {MAX_GROUPS}"
    return None
