"""How the `engram_gate` kernels tile, and which tiling a call gets."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp

from pallas_kernels._common import hw, tuning
from pallas_kernels._common.pieces import PIECE_BYTES, WARPGROUP


STREAMS = (1, 2, 4)
DTYPES = ("float32", "bfloat16", "float16")
# Of a token that one thread has: it keeps the gain's, or those of its gradient beside
# what it computes with.
MAX_ELEMENTS = {"fwd": 160, "bwd": 80}
BARRIER_BYTES = 2048  # with room for reductions


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """One tiling.

    Attributes:
      stages: tokens that copies run ahead, the one at work among them.
      blocks_per_sm: blocks of the persistent grid on each SM.
    """

    stages: int
    blocks_per_sm: int

    def __post_init__(self):
        if not 1 <= self.stages <= 8 or not 1 <= self.blocks_per_sm <= 4:
            raise ValueError(
                f"stages={self.stages} and blocks_per_sm={self.blocks_per_sm}, allowed "
                "are 1 to 8 and 1 to 4"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kernels:
    """The tiling of each direction; without one XLA computes the gradient."""

    fwd: Config
    bwd: Config | None

    def __str__(self) -> str:
        return f"forward {self.fwd}, backward {self.bwd or 'xla'}"


def threads(streams: int) -> int:
    """Neighbouring threads that share a stream of a token."""
    return WARPGROUP // streams


def piece(streams: int, dim: int, dtype: Any) -> int:
    """Values that a thread reads at once; 0 if no split of a stream works."""
    itemsize = jnp.dtype(dtype).itemsize
    values = PIECE_BYTES // itemsize
    while values * itemsize >= 4:
        if dim % (threads(streams) * values) == 0:
            return values
        values //= 2
    return 0


def stage_bytes(
    streams: int, dim: int, dtype: Any, out_dtype: Any, direction: str
) -> int:
    """Shared memory for one token: streams, keys, value, and back dy."""
    row = (2 * streams + 1) * jnp.dtype(dtype).itemsize
    if direction == "bwd":
        row += streams * jnp.dtype(out_dtype).itemsize
    return row * dim


def fixed_bytes(streams: int, dim: int, direction: str) -> int:
    """Shared memory beside the rings: barriers, and back the gain."""
    return BARRIER_BYTES + (4 * streams * dim if direction == "bwd" else 0)


def heuristic(
    streams: int, dim: int, dtype: Any, out_dtype: Any, direction: str
) -> Config:
    """The tiling for a call that was not measured."""
    stage = stage_bytes(streams, dim, dtype, out_dtype, direction)
    fixed = fixed_bytes(streams, dim, direction)
    room = hw.device().smem_bytes
    # Two blocks hide each other's reductions, if both can have a token ahead.
    blocks = 2
    stages = (room // blocks - fixed) // stage
    if stages < 2:
        blocks, stages = 1, (room - fixed) // stage
    return Config(stages=max(1, min(4, stages)), blocks_per_sm=blocks)


# What a tuning run tries.
CANDIDATES = tuple(
    Config(stages=stages, blocks_per_sm=blocks)
    for blocks in (1, 2, 3)
    for stages in (1, 2, 3, 4)
)


def table_key(
    streams: int, dim: int, dtype: Any, out_dtype: Any, direction: str
) -> str:
    """The key of a call in `tuned/<device>/engram_gate.json`."""
    return tuning.key(
        direction=direction,
        streams=streams,
        dim=dim,
        dtype=jnp.dtype(dtype).name,
        out=jnp.dtype(out_dtype).name,
    )


def pick(streams: int, dim: int, dtype: Any, out_dtype: Any, direction: str) -> Config:
    """The measured tiling where there is one, else a guess."""
    call = (streams, dim, dtype, out_dtype, direction)
    found = tuning.lookup("engram_gate", table_key(*call))
    if found is None:
        return heuristic(*call)
    names = {field.name for field in dataclasses.fields(Config)}
    return Config(**{k: v for k, v in found.items() if k in names})


def refusal(
    tokens: int, streams: int, dim: int, dtype: Any, out_dtype: Any, direction: str
) -> str | None:
    """Why a kernel cannot run [tokens, streams, dim], `None` if it can."""
    name = jnp.dtype(dtype).name
    if name not in DTYPES:
        return f"h.dtype={name}, the kernels take {', '.join(DTYPES)}"
    if not tokens:
        return "there are no tokens"
    if streams not in STREAMS:
        return f"G={streams} streams, the kernels take {STREAMS}"
    if not dim or not piece(streams, dim, dtype):
        return (
            f"D={dim} {name} does not split into {threads(streams)} threads in steps "
            "of 4 bytes"
        )
    if (row := dim * jnp.dtype(dtype).itemsize) % 128:
        return f"a row of {row} bytes is no multiple of 128, as copies need"
    elements, most = streams * dim // WARPGROUP, MAX_ELEMENTS[direction]
    if elements > most:
        return (
            f"{streams} streams of {dim} are {elements} elements for each thread, "
            f"their registers hold {most}"
        )
    need = stage_bytes(streams, dim, dtype, out_dtype, direction)
    need += fixed_bytes(streams, dim, direction)
    if need > (room := hw.device().smem_bytes):
        return f"a token takes {need} bytes of shared memory, a block has {room}"
    return None
