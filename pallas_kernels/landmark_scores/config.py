"""How the `landmark_scores` kernel divides a row, and which way a call gets."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax.numpy as jnp

from pallas_kernels._common import hw, tuning


TILE = 64  # landmarks of a product, the rows of a wgmma
MULTIPLE = 8  # landmarks that a copy takes as one
COLUMNS = 8  # of a product: the fewest that a wgmma has
MAX_PARTS = 4  # tiles whose scores share a result
MAX_GROUP = 8  # query heads of a kv head
HEAD_DIMS = (64, 128, 256)
DTYPES = ("bfloat16", "float16")
CLUSTERS = (1, 2, 4, 8)
MIN_SLOTS = 4
# Of shared memory: barriers, and what sums over a warpgroup need.
OTHER_BYTES = 4096


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """One way to divide.

    Attributes:
      cluster: blocks that share a row; each keeps the scores of its part.
      slots: tiles of 64 landmarks in shared memory that are on their way.
    """

    cluster: int = 2
    slots: int = 5

    def __post_init__(self):
        if self.cluster not in CLUSTERS:
            raise ValueError(
                f"cluster={self.cluster}, allowed are {', '.join(map(str, CLUSTERS))}"
            )
        if self.slots < MIN_SLOTS:
            raise ValueError(f"slots={self.slots}, allowed are {MIN_SLOTS} and more")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes:
    """How a row falls into pieces.

    A product has 8 columns, and few models have 8 query heads for a kv head. With R
    heads, their queries stand in the columns 8 / R times, and of the products of as
    many tiles each gives some columns: one result holds the scores of all.

    Attributes:
      landmarks: of a row, C.
      group: query heads of a kv head, R.
      head_dim: K.
      cluster: blocks that share a row.
    """

    landmarks: int
    group: int
    head_dim: int
    cluster: int

    @property
    def heads(self) -> int:
        """Columns that a tile has in a result: R or the next power of two."""
        return max(COLUMNS // MAX_PARTS, 1 << (self.group - 1).bit_length())

    @property
    def parts(self) -> int:
        """Tiles of a result."""
        return COLUMNS // self.heads

    @property
    def tiles(self) -> int:
        """Of a row."""
        return -(-self.landmarks // TILE)

    @property
    def results(self) -> int:
        """Of a row."""
        return -(-self.tiles // self.parts)

    @property
    def share(self) -> int:
        """Results of a block; those of the last one may lie behind the row."""
        return max(2, -(-self.results // self.cluster))

    def shared_bytes(self, slots: int) -> int:
        """Shared memory of a block."""
        scores = self.share * TILE * COLUMNS * 4
        queries = 2 * COLUMNS * self.head_dim
        return scores + queries + slots * TILE * self.head_dim * 2 + OTHER_BYTES


def heuristic(*, rows: int, landmarks: int, group: int, head_dim: int) -> Config | None:
    """The way for sizes that were not measured, `None` if a row fits in no cluster.

    Of the clusters whose blocks hold their part, the one that leaves the fewest SMs
    without a row; then as many tiles on their way as have room.
    """
    limit, best = hw.device(), None
    for cluster in CLUSTERS:
        sizes = Sizes(
            landmarks=landmarks, group=group, head_dim=head_dim, cluster=cluster
        )
        if sizes.shared_bytes(MIN_SLOTS) > limit.smem_bytes:
            continue
        places = limit.sms // cluster
        busy = rows * cluster / (math.ceil(rows / places) * limit.sms)
        if best is None or busy > best[0]:
            room = limit.smem_bytes - sizes.shared_bytes(0)
            slots = room // (TILE * head_dim * 2)
            best = busy, Config(cluster=cluster, slots=min(slots, 8))
    return None if best is None else best[1]


def candidates(*, landmarks: int, group: int, head_dim: int) -> list[Config]:
    """What a tuning run tries: every cluster, with as many tiles as have room, or 4."""
    found = []
    for cluster in CLUSTERS:
        sizes = Sizes(
            landmarks=landmarks, group=group, head_dim=head_dim, cluster=cluster
        )
        room = hw.device().smem_bytes - sizes.shared_bytes(0)
        most = room // (TILE * head_dim * 2)
        if most >= MIN_SLOTS:
            counts = sorted({MIN_SLOTS, min(6, most), min(10, most)})
            found += [Config(cluster=cluster, slots=slots) for slots in counts]
    return found


def table_key(*, rows: int, landmarks: int, group: int, head_dim: int) -> str:
    """The key of a call in `tuned/<device>/landmark_scores.json`."""
    return tuning.key(
        rows=tuning.bucket(rows),
        landmarks=tuning.bucket(landmarks),
        group=group,
        head_dim=head_dim,
    )


def pick(**sizes: int) -> Config | None:
    """The measured way where there is one that fits, else a guess."""
    found = tuning.lookup("landmark_scores", table_key(**sizes))
    if found is not None:
        config = Config(cluster=found["cluster"], slots=found["slots"])
        division = Sizes(
            landmarks=sizes["landmarks"],
            group=sizes["group"],
            head_dim=sizes["head_dim"],
            cluster=config.cluster,
        )
        if division.shared_bytes(config.slots) <= hw.device().smem_bytes:
            return config
    return heuristic(**sizes)


def refusal(
    *,
    rows: int,
    landmarks: int,
    group: int,
    head_dim: int,
    dtypes: tuple[Any, ...],
    scale: float | None,
) -> str | None:
    """Why the kernel cannot score such landmarks, `None` if it can."""
    names = tuple(jnp.dtype(dtype).name for dtype in dtypes)
    if names[0] not in DTYPES or len(set(names)) != 1:
        return (
            f"q and landmarks are {' and '.join(names)}, the kernel takes one of "
            f"{', '.join(DTYPES)}"
        )
    if head_dim not in HEAD_DIMS:
        return f"K={head_dim}, the kernel takes {', '.join(map(str, HEAD_DIMS))}"
    if group > MAX_GROUP:
        return f"{group} query heads of a kv head, the kernel takes {MAX_GROUP}"
    if not rows or landmarks < TILE or landmarks % MULTIPLE:
        return (
            f"{rows} rows of {landmarks} landmarks, the kernel takes one row and more, "
            f"of {TILE} landmarks and more that are a multiple of {MULTIPLE}"
        )
    sizes = {"rows": rows, "landmarks": landmarks, "group": group}
    if pick(**sizes, head_dim=head_dim) is None:
        return (
            f"the scores of {landmarks} landmarks do not fit in the shared memory of "
            f"{CLUSTERS[-1]} blocks"
        )
    if scale is not None and not scale > 0:
        return f"scale = {scale}, the kernel has more than 0"
    return None
