"""How the `rms_norm` kernels tile, and which tiling a call gets."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels._common import hw, tuning


WARPGROUP = 128  # threads

THREADS = (1, 2, 4, 8, 16, 32, 64, 128)

# Elements of a row that one thread may hold. The backward pass has four float32
# arrays of them in registers: x, dy, the factor and its gradient.
MAX_ELEMENTS = 40
TILE_BYTES = 8 * 1024


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """One tiling.

    Attributes:
      threads: neighbouring threads that share a row; a power of two, 1 to 128.
      rows: rows of a tile, a multiple of `128 // threads`.
      stages: tiles in flight per block by bulk copies; 0 loads directly instead.
      blocks_per_sm: blocks of the persistent grid on each SM.
      bulk_store: results leave through shared memory, not from registers.
    """

    threads: int
    rows: int
    stages: int = 4
    blocks_per_sm: int = 2
    bulk_store: bool = False

    def __post_init__(self):
        if self.threads not in THREADS:
            raise ValueError(
                f"threads={self.threads}, allowed are powers of two from 1 to 128"
            )
        if self.rows < 1 or self.rows % (WARPGROUP // self.threads):
            raise ValueError(
                f"rows={self.rows}, allowed are multiples of 128 // threads = "
                f"{WARPGROUP // self.threads}"
            )
        if not 0 <= self.stages <= 16 or not 1 <= self.blocks_per_sm <= 16:
            raise ValueError(
                f"stages={self.stages} and blocks_per_sm={self.blocks_per_sm}, "
                "allowed are 0 to 16 and 1 to 16"
            )


def vector_width(width: int, threads: int, dtype: Any) -> int:
    """Neighbouring elements that one thread moves at once, 16 bytes at best; 0 if
    `threads` threads cannot share `width` elements in steps of 4 bytes."""
    itemsize = jnp.dtype(dtype).itemsize
    vector = 16 // itemsize
    while vector * itemsize >= 4:
        if width % (threads * vector) == 0:
            return vector
        vector //= 2
    return 0


def row_threads(rows: int, width: int, dtype: Any) -> int:
    """Threads that should share a row of a call; 0 if no split of it works.

    Whole 16-byte pieces come first, then at most 32 elements a thread. Below one warp
    more threads put more of a row into one memory request; beyond it they only cost
    an exchange through shared memory.
    """

    def cost(threads: int) -> tuple[int, int, int]:
        vector = vector_width(width, threads, dtype)
        return -vector, max(0, width // threads - 32), abs(threads.bit_length() - 6)

    fitting = [
        threads
        for threads in THREADS
        if vector_width(width, threads, dtype)
        and width // threads <= MAX_ELEMENTS
        and rows % (WARPGROUP // threads) == 0
    ]
    return min(fitting, key=cost, default=0)


def heuristic(rows: int, width: int, dtype: Any, direction: str, gated: bool) -> Config:
    """The tiling for rows of `width` elements that were not measured.

    Args:
      rows: how many; a tile's rows divide it.
      width: elements of a row.
      dtype: of x.
      direction: "fwd" or "bwd".
      gated: whether a gate is read as well.
    """
    threads = row_threads(rows, width, dtype)
    height = WARPGROUP // threads
    tile = height
    row_bytes = width * jnp.dtype(dtype).itemsize
    while rows % (2 * tile) == 0 and 2 * tile * row_bytes <= TILE_BYTES:
        tile *= 2
    # A grid with fewer tiles than SMs would leave some idle.
    while tile > height and rows // tile < hw.device().sms:
        tile //= 2
    stages = 3
    inputs = (1 if direction == "fwd" else 2) + gated
    resident = hw.device().smem_bytes // (inputs * stages * tile * row_bytes)
    # One block is four warps: several hide each other's reductions. The backward
    # pass has registers for about three.
    wanted = 4 if direction == "fwd" else 3
    return Config(
        threads=threads,
        rows=tile,
        stages=stages,
        blocks_per_sm=max(1, min(wanted, resident)),
    )


def table_key(rows: int, width: int, dtype: Any, direction: str, gated: bool) -> str:
    """The key of a call in `tuned/<device>/rms_norm.json`."""
    return tuning.key(
        direction=direction,
        rows=tuning.bucket(rows),
        width=width,
        dtype=jnp.dtype(dtype).name,
        gated=int(gated),
    )


def pick(rows: int, width: int, dtype: Any, direction: str, gated: bool) -> Config:
    """The measured tiling where there is one that divides `rows`, else a guess."""
    found = tuning.lookup("rms_norm", table_key(rows, width, dtype, direction, gated))
    if found is not None:
        names = {field.name for field in dataclasses.fields(Config)}
        config = Config(**{k: v for k, v in found.items() if k in names})
        if rows % config.rows == 0:
            return config
    return heuristic(rows, width, dtype, direction, gated)


def refusal(rows: int, width: int, dtype: Any) -> str | None:
    """Why the kernels cannot tile [rows, width], `None` if they can."""
    if jax.__version_info__ >= (0, 12):
        # Mosaic GPU 0.12 refuses the 32-byte loads of a float32 scale.
        return f"the kernels lower with jax 0.11, this is jax {jax.__version__}"
    if (row_bytes := width * jnp.dtype(dtype).itemsize) % 128:
        return f"a row of {row_bytes} bytes is no multiple of 128, as copies need"
    splits = [t for t in THREADS if vector_width(width, t, dtype)]
    if (elements := width // splits[-1]) > MAX_ELEMENTS:
        return (
            f"a row of {width} elements is {elements} for each of {splits[-1]} "
            f"threads, their registers hold {MAX_ELEMENTS}"
        )
    height = WARPGROUP // splits[-1]
    if rows == 0 or rows % height:
        return f"{rows} rows are no positive multiple of {height}"
    return None


def xla_is_faster(
    rows: int, width: int, dtype: Any, direction: str, gated: bool
) -> bool:
    """Whether XLA's fusion was measured to beat the kernel at this size."""
    found = tuning.lookup("rms_norm", table_key(rows, width, dtype, direction, gated))
    return found is not None and bool(found.get("xla_is_faster", False))
