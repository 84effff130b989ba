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
BARRIER_BYTES = 1024
# Registers per thread: the computing warpgroups and the one that copies, and then, of
# two, beside one that cleans.
REGISTERS = {2: (232, 232, 40), 3: (160, 160, 160, 32)}
CLEANING_REGISTERS = (224, 224, 24, 40)
# Sums that a warpgroup of so many has room for: 192 or 128 registers of each thread.
ACCUMULATORS = {2: 192 * 128, 3: 64 * 256}

SPLITS = ("rows", "columns", "tiles")
SHORT = (8, 16, 32)  # rows that a tile may have although a wgmma multiplies 64
_ALLOWED = {
    "split": SPLITS,
    "tail_rows": (8, 64),
    "computing": tuple(REGISTERS),
    "slots": (1, 2, 4),
    "cluster": (1, 2),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tile:
    """How one of the three products is cut; results don't depend on it.

    Attributes:
      block_m, block_n: rows and columns of the result that a block computes at a
        time. Of y and dx, a tile of 8, 16 or 32 rows is multiplied as 64, of which
        the others are neither read nor written: for decoding, where that many are
        an expert's.
      stages: pieces of the summed axis in shared memory.
      split: what the computing warpgroups share out: the "rows" of a tile, its
        "columns", or whole "tiles" in turn, so that one computes while the others
        write (each then has its part of the stages).
      computing: warpgroups that multiply, 2 or 3. With three a tile of 192 rows has
        64 for each: all rows of an expert that has few more than 128, which read its
        matrix once.
      eager: whether a piece's memory is free as soon as its products are done, before
        the next piece is waited for: a piece more is on its way, for products that
        wait for device memory.
      slots: buffers through which a warpgroup's results leave, 1, 2 or 4.
      cluster: neighbouring blocks, 1 or 2, that have the same rows of y or dx and the
        columns beside each other: each reads its part of the rows from the cache for
        both.
      cleans: whether a warpgroup of its own writes zeros over the rows of other experts
        that the weight gradient would sum, so that the computing ones neither do it nor
        wait for each other.
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
    computing: int = 2
    eager: bool = False
    slots: int = 2
    cluster: int = 1
    cleans: bool = False

    def __post_init__(self):
        for name, allowed in _ALLOWED.items():
            if (value := getattr(self, name)) not in allowed:
                raise ValueError(f"{name}={value}, allowed are {allowed}")
        shares = self._shares
        (rows, more_rows), (columns, more_columns) = (
            divmod(size, share)
            for size, share in zip((self.piece_rows, self.block_n), shares, strict=True)
        )
        if (
            rows % BAND
            or columns % 64
            or more_rows + more_columns
            or not rows
            or not 0 < columns <= 256
        ):
            raise ValueError(
                f"block_m={self.block_m}, block_n={self.block_n} with "
                f"split={self.split!r} gives each of {self.computing} warpgroups "
                f"{rows} x {columns}, allowed are multiples of 64 without a rest "
                "and at most 256 columns"
            )
        if rows * columns > (most := ACCUMULATORS[self.computing]):
            raise ValueError(
                f"a warpgroup would have {rows} x {columns} sums, its registers hold "
                f"{most}"
            )
        if self.stages < 2 * self.rings or self.stages % self.rings:
            raise ValueError(
                f"stages={self.stages}, allowed are multiples of {self.rings} from "
                f"{2 * self.rings} on"
            )
        if self.panel < 1:
            raise ValueError(f"panel={self.panel}, allowed are 1 and more")
        if self.cleans and self.computing > 2:
            raise ValueError(
                f"cleans=True with computing={self.computing}, allowed is 2: registers "
                "have no room for five warpgroups"
            )
        if self.cluster > 1 and self.is_short:
            raise ValueError(
                f"cluster={self.cluster} with block_m={self.block_m}, allowed are "
                f"multiples of {BAND}: fewer rows are not worth sharing"
            )

    @property
    def _shares(self) -> tuple[int, int]:
        """Into how many parts warpgroups share out the rows and the columns."""
        return (
            self.computing if self.split == "rows" else 1,
            self.computing if self.split == "columns" else 1,
        )

    @property
    def part(self) -> tuple[int, int]:
        """Rows and columns of the result that a warpgroup has at a time."""
        rows, columns = self._shares
        return self.piece_rows // rows, self.block_n // columns

    @property
    def accumulators(self) -> int:
        """Into how many a warpgroup divides the columns of its sums.

        One product may not name more registers than a block of four warpgroups starts
        with, however many its warpgroups ask for later.
        """
        return 2 if len(self.registers) > 3 and self.part[1] > 192 else 1

    @property
    def registers(self) -> tuple[int, ...]:
        """Per thread, of the computing warpgroups and then of the others."""
        return CLEANING_REGISTERS if self.cleans else REGISTERS[self.computing]

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
        return self.computing if self.split == "tiles" else 1

    @property
    def ring_stages(self) -> int:
        return self.stages // self.rings

    def smem_bytes(self) -> int:
        """Shared memory of a block."""
        pieces = self.stages * STEP * (self.piece_rows + self.block_n) * 2
        staging = self.computing * self.slots * BAND * LINE_BYTES
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
    if 128 * experts < rows <= 192 * experts and columns % 256 == 0:
        return WIDE[0]
    width = _width(columns)
    return Tile(block_m=128, block_n=width, stages=_stages(128, width))


def _weight(rows_per_expert: int, columns: int) -> Tile:
    if rows_per_expert <= 512:
        return Tile(
            block_m=128, block_n=128, split="tiles", stages=_stages(128, 128, 2)
        )
    width = _width(columns)
    return Tile(block_m=128, block_n=width, stages=_stages(128, width))


# For experts that have few more than 128 rows: one tile holds them all and reads their
# matrix once. Of two tiles of 128 each reads it, half of the second is no expert's, and
# a block that has second ones runs ahead of its neighbour, perhaps so far that the
# cache has lost the matrix in between.
WIDE = (
    Tile(block_m=192, block_n=256, stages=3, computing=3, eager=True),
    Tile(block_m=192, block_n=256, stages=3, computing=3, eager=True, cluster=2),
    Tile(block_m=192, block_n=256, stages=3, split="columns", eager=True),
    Tile(block_m=192, block_n=256, stages=3, split="columns", eager=True, cluster=2),
    Tile(block_m=192, block_n=192, stages=3, computing=3, eager=True),
    Tile(block_m=192, block_n=128, stages=4, computing=3, eager=True),
    Tile(block_m=256, block_n=128, stages=4, eager=True),
)

# For weight gradients of few rows: sums are so short that writing must overlap.
CLEANING = (
    Tile(block_m=128, block_n=256, stages=4, cleans=True),
    Tile(block_m=192, block_n=256, stages=3, split="columns", cleans=True),
    Tile(block_m=256, block_n=128, stages=4, cleans=True),
    Tile(block_m=128, block_n=128, stages=4, split="tiles", slots=4, cleans=True),
    Tile(block_m=192, block_n=128, stages=4, split="tiles", slots=4, cleans=True),
)

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
    Tile(block_m=128, block_n=256, stages=4, eager=True),
    Tile(block_m=128, block_n=256, stages=4, eager=True, cluster=2),
    Tile(block_m=128, block_n=128, stages=4, split="tiles", slots=4),
    Tile(block_m=192, block_n=128, stages=4, split="tiles", slots=4),
    *WIDE,
    *CLEANING,
)


def heuristic(*, rows: int, experts: int, in_dim: int, out_dim: int) -> Config:
    """Picks launch parameters from rows per expert, K and N.

    Args:
      rows, experts, in_dim, out_dim: M, E, K, N.

    Returns:
      The config.
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
