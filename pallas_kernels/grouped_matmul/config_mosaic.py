"""Sizes, limits and launch parameters of the Mosaic GPU kernels."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp

from pallas_kernels._common import hw, tuning


STEP = 64  # of the summed axis: one 128-byte row of shared memory in 16 bits
BAND = 64  # rows of a wgmma
ALIGN = 8  # rows that a copy into shared memory starts at a multiple of
LINE_BYTES = 128  # of a row of the buffer that results leave through
SLOTS = 2  # such buffers of each computing warpgroup
COMPUTING = 2  # warpgroups
ACCUMULATORS = 64 * 256  # of one warpgroup: 128 registers of each thread
BARRIER_BYTES = 1024
# Registers per thread: two computing warpgroups and the one that copies.
REGISTERS = (232, 232, 40)

SPLITS = ("rows", "columns", "tiles")
SHORT = (8, 16, 32)  # rows that a tile may have although a wgmma multiplies 64


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tile:
    """How one of the three products is cut; results don't depend on it.

    Attributes:
      block_m, block_n: rows and columns of the result that a block computes at a
        time. Of y and dx, a tile of 8, 16 or 32 rows is multiplied as 64, of which
        the others are neither read nor written: for decoding, where that many are
        an expert's.
      stages: pieces of the summed axis in shared memory.
      split: what the two computing warpgroups share out: the "rows" of a tile, its
        "columns", or whole "tiles" in turn, so that one computes while the other
        writes (each then has half of the stages).
      panel: tiles of an expert's rows that pass all columns before the next rows.
      swizzled: whether results are swizzled on their way through shared memory.
      tail_rows: rows of the pieces in which the weight gradient looks for rows of
        other experts, 8 or 64.
    """

    block_m: int = 128
    block_n: int = 256
    stages: int = 4
    split: str = "rows"
    panel: int = 16
    swizzled: bool = True
    tail_rows: int = 8

    def __post_init__(self):
        if self.split not in SPLITS:
            raise ValueError(f"split={self.split!r}, allowed are {SPLITS}")
        rows, columns = self.part
        if rows % BAND or columns % 64 or not rows or not 0 < columns <= 256:
            raise ValueError(
                f"block_m={self.block_m}, block_n={self.block_n} with "
                f"split={self.split!r} gives a warpgroup {rows} x {columns}, allowed "
                "are multiples of 64 and at most 256 columns"
            )
        if rows * columns > ACCUMULATORS:
            raise ValueError(
                f"a warpgroup would have {rows} x {columns} sums, its registers hold "
                f"{ACCUMULATORS}"
            )
        if self.stages < 2 * self.rings or self.stages % self.rings:
            raise ValueError(
                f"stages={self.stages}, allowed are multiples of {self.rings} from "
                f"{2 * self.rings} on"
            )
        if self.panel < 1 or self.tail_rows not in (8, 64):
            raise ValueError(
                f"panel={self.panel} and tail_rows={self.tail_rows}, allowed are at "
                "least 1, and 8 or 64"
            )

    @property
    def part(self) -> tuple[int, int]:
        """Rows and columns of the result that a warpgroup has at a time."""
        return (
            self.piece_rows // (COMPUTING if self.split == "rows" else 1),
            self.block_n // (COMPUTING if self.split == "columns" else 1),
        )

    @property
    def is_short(self) -> bool:
        """Whether the tile has fewer rows than are multiplied."""
        return self.block_m in SHORT

    @property
    def piece_rows(self) -> int:
        """Rows of a tile that shared memory has room for."""
        return BAND if self.is_short else self.block_m

    @property
    def rings(self) -> int:
        """Streams of pieces: each warpgroup its own, or one that both read."""
        return COMPUTING if self.split == "tiles" else 1

    @property
    def ring_stages(self) -> int:
        return self.stages // self.rings

    def smem_bytes(self) -> int:
        """Shared memory of a block."""
        pieces = self.stages * STEP * (self.piece_rows + self.block_n) * 2
        staging = COMPUTING * SLOTS * BAND * LINE_BYTES
        return pieces + staging + BARRIER_BYTES


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """How the three products are cut.

    Attributes:
      forward, data, weight: y, dx and dw.
    """

    forward: Tile = Tile()
    data: Tile = Tile()
    weight: Tile = Tile()


# Cost of a column of the result at each width, relative to the widest: a narrow tile
# reads more of the other operand for each product.
_COST = {256: 1.0, 192: 1.04, 128: 1.12}


def _width(columns: int) -> int:
    """The `block_n` that wastes least on the last block of columns."""

    def cost(width: int) -> float:
        return -(-columns // width) * width * _COST[width]

    return min(_COST, key=cost)


def _stages(block_m: int, block_n: int, rings: int = 1, most: int = 6) -> int:
    """As many as fit, at most `most`."""
    empty = Tile(block_m=128, block_n=256, stages=2).smem_bytes()
    empty -= 2 * STEP * (128 + 256) * 2
    room = hw.H200.smem_bytes - empty
    fit = min(most, room // (STEP * (block_m + block_n) * 2))
    return fit // rings * rings


def few_rows(rows: int, experts: int, columns: int) -> Tile:
    """The tile for products whose weights' way from memory is what takes time.

    Args:
      rows, experts: M, E; at most 64 rows an expert.
      columns: of the result.
    """
    mean = -(-rows // experts)
    # An expert's rows begin up to 7 rows behind its tile: 16 hold 9 of them, which
    # a mean of 4 exceeds once in a hundred experts, and 32 hold 25.
    height = 16 if mean <= 4 else 32 if mean <= 12 else 64
    # Tiles for all blocks: a few rows reach few experts.
    narrow = min(rows, experts) * -(-columns // 256) < 2 * hw.H200.sms
    width = 128 if narrow else 256
    stages = _stages(64, width, most=8)
    return Tile(block_m=height, block_n=width, split="columns", stages=stages)


def _product(rows: int, experts: int, depth: int, columns: int) -> Tile:
    if rows <= 64 * experts and columns >= 128:
        return few_rows(rows, experts, columns)
    if depth <= 512:
        # Writing takes about as long as so short a sum: it must overlap.
        return Tile(
            block_m=128, block_n=128, split="tiles", stages=_stages(128, 128, 2)
        )
    width = _width(columns)
    return Tile(block_m=128, block_n=width, stages=_stages(128, width))


def _weight(rows_per_expert: int, columns: int) -> Tile:
    if rows_per_expert <= 512:
        return Tile(
            block_m=128, block_n=128, split="tiles", stages=_stages(128, 128, 2)
        )
    width = _width(columns)
    return Tile(block_m=128, block_n=width, stages=_stages(128, width))


# What a tuning run tries for each product.
CANDIDATES = (
    Tile(block_m=128, block_n=256, stages=4),
    Tile(block_m=128, block_n=192, stages=4),
    Tile(block_m=128, block_n=128, stages=6),
    Tile(block_m=128, block_n=256, stages=4, split="columns"),
    Tile(block_m=64, block_n=256, stages=4, split="columns"),
    Tile(block_m=64, block_n=128, stages=8, split="columns"),
    Tile(block_m=128, block_n=128, stages=6, split="tiles"),
    Tile(block_m=64, block_n=256, stages=4, split="tiles"),
    Tile(block_m=64, block_n=128, stages=8, split="tiles"),
    Tile(block_m=16, block_n=256, stages=4, split="columns"),
    Tile(block_m=16, block_n=128, stages=8, split="columns"),
    Tile(block_m=32, block_n=128, stages=8, split="columns"),
)


def heuristic(*, rows: int, experts: int, in_dim: int, out_dim: int) -> Config:
    """Picks launch parameters from rows per expert, K and N.

    Args:
      rows, experts, in_dim, out_dim: M, E, K, N.

    Returns:
      The config; no choice in it was measured yet.
    """
    mean = -(-rows // experts)
    return Config(
        forward=_product(rows, experts, in_dim, out_dim),
        data=_product(rows, experts, out_dim, in_dim),
        weight=_weight(mean, out_dim),
    )


def table_key(
    product: str, *, rows: int, experts: int, in_dim: int, out_dim: int
) -> str:
    """The key of a product in `tuned/<device>/grouped_matmul.json`.

    Args:
      product: "forward", "data" or "weight".
      rows, experts, in_dim, out_dim: M, E, K, N; of the first two only rows per expert
        count.
    """
    mean = max(1, -(-rows // experts))
    return tuning.key(
        product=product, mean=tuning.bucket(mean), in_dim=in_dim, out_dim=out_dim
    )


def pick(**sizes: int) -> Config:
    """The measured tiles where there are some, else a guess; arguments as above."""
    guess = heuristic(**sizes)
    names = {field.name for field in dataclasses.fields(Tile)}
    measured = {}
    for field in dataclasses.fields(Config):
        found = tuning.lookup("grouped_matmul", table_key(field.name, **sizes))
        if found is not None:
            tile = {k: v for k, v in found.items() if k in names}
            measured[field.name] = Tile(**tile)
    return dataclasses.replace(guess, **measured)


def refusal(
    *, rows: int, experts: int, in_dim: int, out_dim: int, dtype: Any, out_dtype: Any
) -> str | None:
    """Why the kernels cannot run these sizes, `None` if they can."""
    if (name := jnp.dtype(dtype).name) not in ("bfloat16", "float16"):
        return f"dtype = {name}, the kernels have bfloat16 and float16"
    results = (name, "float32")
    if (out := jnp.dtype(out_dtype).name) not in results:
        return f"the result's dtype = {out}, the kernels have {' and '.join(results)}"
    if in_dim % STEP or out_dim % STEP or not in_dim or not out_dim:
        return f"K = {in_dim}, N = {out_dim}, the kernels have multiples of {STEP}"
    if not rows or not experts:
        return f"M = {rows}, E = {experts}, the kernels have at least one of each"
    if (tasks := (rows // 64 + 2 * experts) * (in_dim + out_dim) // 64) >= 2**31:
        return f"about {tasks} tiles, the kernels count fewer than 2**31"
    return None
