"""Sizes of a call, how the kernel divides it, and what it can take."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax.numpy as jnp

from pallas_kernels._common import hw


TILE = 64  # tokens of a product
CHUNK = 8  # tokens of a chunk: what a copy takes as one
CHUNKS = TILE // CHUNK  # of a tile
COLUMNS = 32  # of the tiles in which keys and their rows in the basis are laid out
WARPGROUPS = 2  # that compute
HEADS = (8, 16)  # query heads that one item may have, with those of padding
HEAD_DIMS = (64, 128)
MAX_GROUP = 64  # query heads of a kv head
DTYPES = ("bfloat16", "float16")
# Registers per thread of two computing warpgroups and the one that copies.
REGISTERS = (200, 200, 104)
OTHER_BYTES = 4096


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """One way to divide.

    Attributes:
      slots: tiles in shared memory, of each computing warpgroup.
    """

    slots: int = 2

    def __post_init__(self):
        if self.slots < 2:
            raise ValueError(f"slots={self.slots}, allowed are 2 and more")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes:
    """Of a call.

    Attributes:
      batch, heads, kv_heads, head_dim: B, H, G, K.
      rank: r.
      chunk, chunks: c and C.
      chosen, places, outliers, ring: N, M, O, R.
    """

    batch: int
    heads: int
    kv_heads: int
    head_dim: int
    rank: int
    chunk: int
    chunks: int
    chosen: int
    places: int
    outliers: int
    ring: int

    @property
    def group(self) -> int:
        """Query heads of a kv head."""
        return self.heads // self.kv_heads

    @property
    def columns(self) -> int:
        """Query heads of an item, with those of padding."""
        return HEADS[0] if self.group <= HEADS[0] else HEADS[1]

    @property
    def splits(self) -> int:
        """Items of a kv head: more than 16 query heads are told apart."""
        return -(-self.group // self.columns)

    @property
    def pairs(self) -> int:
        """Kv heads of all rows."""
        return self.batch * self.kv_heads

    @property
    def items(self) -> int:
        return self.pairs * self.splits

    @property
    def stride(self) -> int:
        """Query heads from one item to the next, as the kernel reads them.

        Small groups stay side by side, so that nothing is copied to make room.
        """
        packed = not self.columns % self.group and not self.batch * self.heads % 8
        return self.group if packed else self.columns

    @property
    def sections(self) -> tuple[int, int, int]:
        """Tiles of chosen chunks, of outliers, of the ring."""
        counts = self.chosen, self.outliers, self.ring // CHUNK
        first, second, third = (-(-count // CHUNKS) for count in counts)
        return first, second, third

    @property
    def tiles(self) -> int:
        """Of an item."""
        return sum(self.sections)

    @property
    def share(self) -> int:
        """Tiles of a block, neighbours in the order of items."""
        return -(-self.items * self.tiles // hw.device().sms)

    @property
    def blocks(self) -> int:
        return -(-self.items * self.tiles // self.share)

    @property
    def parts(self) -> int:
        """Blocks that an item may be divided among."""
        return -(-(self.tiles - 1) // self.share) + 1

    def first_block(self, item: Any) -> Any:
        """The first block that has tiles of an item."""
        return item * self.tiles // self.share

    def shared_bytes(self, slots: int) -> int:
        """Shared memory of a block."""
        width, tiles = self.head_dim, WARPGROUPS * slots
        tile = TILE * (max(self.rank, width) + width)
        queries, weights = 2 * self.columns * width, WARPGROUPS * self.columns * TILE
        halves = tiles * tile + queries + weights + width * self.rank
        words = tiles * CHUNKS * width + WARPGROUPS * 32 * self.columns
        return 2 * halves + 4 * words + OTHER_BYTES


def heuristic(sizes: Sizes) -> Config:
    """As many tiles as have room."""
    slots = 2
    while slots < 4 and sizes.shared_bytes(slots + 1) <= hw.device().smem_bytes:
        slots += 1
    return Config(slots=slots)


def refusal(sizes: Sizes, dtypes: tuple[Any, ...], scale: float | None) -> str | None:
    """Why the kernel cannot run such a call, `None` if it can."""
    names = sorted({jnp.dtype(dtype).name for dtype in dtypes})
    if len(names) != 1 or names[0] not in DTYPES:
        return f"arrays are {' and '.join(names)}, the kernel takes one of " + (
            ", ".join(DTYPES)
        )
    if sizes.head_dim not in HEAD_DIMS:
        return f"K={sizes.head_dim}, the kernel takes {', '.join(map(str, HEAD_DIMS))}"
    if sizes.chunk != CHUNK:
        return f"chunks of {sizes.chunk} tokens, the kernel takes {CHUNK}"
    for name, size, multiple in (
        ("rank", sizes.rank, COLUMNS),
        ("ring", sizes.ring, CHUNK),
    ):
        if not size or size % multiple:
            return f"{name}={size}, the kernel takes multiples of {multiple}"
    if sizes.group > MAX_GROUP:
        return f"{sizes.group} query heads of a kv head, the kernel takes {MAX_GROUP}"
    counts = sizes.batch, sizes.chosen, sizes.places, sizes.outliers
    if not math.prod(counts):
        return (
            f"B={sizes.batch}, {sizes.chosen} chosen chunks, {sizes.places} places and "
            f"{sizes.outliers} outliers, the kernel takes one and more of each"
        )
    if (size := sizes.shared_bytes(2)) > (limit := hw.device()).smem_bytes:
        return (
            f"r={sizes.rank} asks for {size} bytes of shared memory, a block of "
            f"{limit.kind} has {limit.smem_bytes}"
        )
    if scale is not None and not scale > 0:
        return f"scale = {scale}, the kernel has more than 0"
    return None
