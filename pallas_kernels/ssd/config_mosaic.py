"""Sizes, limits and launch parameters of the Mosaic GPU kernels."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp

from pallas_kernels._common import hw
from pallas_kernels.gated_delta_rule.config_mosaic import CHUNK


HEAD_DIM = 64  # V, rows of a state and of a wgmma
STATE_DIM = 128  # N
HEADS = 2  # of one group that a block carries, a warpgroup each
HEAD_TILE = 64  # heads that `kernel_prepare` has at a time
CHUNK_SIZES = (CHUNK, 2 * CHUNK)  # that a caller may ask for
STATE_SHAPE = (HEAD_DIM, STATE_DIM)
# Registers per thread of the warpgroups of a block that carries states.
REGISTERS = (184, 184, 120, 24)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Launch parameters.

    Attributes:
      segments: stretches of time of each row that run side by side; `None` lets
        `plan_segments` choose. One that does not divide a row's chunks of 64 tokens
        pads them, at the price of copies. A state that crosses from one segment to the
        next is rounded otherwise than inside one, so with more than one, a document's
        bits depend on where the borders fall.
      stages: chunks in shared memory at a time in the forward kernel, 2 or 3; changes
        no result. 2 where it keeps states for the gradient.
    """

    segments: int | None = None
    stages: int = 3

    def __post_init__(self):
        if self.segments is not None and self.segments < 1:
            raise ValueError(f"segments={self.segments}, allowed are >= 1 and None")
        if self.stages not in (2, 3):
            raise ValueError(f"stages={self.stages}, allowed are (2, 3)")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shapes:
    """Sizes of one call; V is 64 and N is 128.

    Attributes:
      batch, time, heads, groups: B, T, H, G; T is a multiple of 64.
      dtype: of x, b, c and y.
      segments: neighbouring rows that are one row of the caller's, cut in time.
      backward: whether these are kernels of the gradient. There a warpgroup computes
        beside its products what does not wait for them, and the compiler puts no
        barrier before and after each write to memory. No write needs one: `commit_smem`
        stands behind it, and a wait for the copy that read the place before. The
        forward's kernels are no faster so.
    """

    batch: int
    time: int
    heads: int
    groups: int
    dtype: Any
    segments: int = 1
    backward: bool = False

    @property
    def chunks(self) -> int:
        return self.time // CHUNK

    @property
    def group(self) -> int:
        """Heads that read one b and c."""
        return self.heads // self.groups

    @property
    def items(self) -> int:
        """Rows times heads."""
        return self.batch * self.heads

    @property
    def padded_heads(self) -> int:
        """Heads in the table of factors, those behind H without a meaning."""
        return -(-self.heads // HEAD_TILE) * HEAD_TILE

    @property
    def pairs(self) -> int:
        """Blocks that carry the states of all rows."""
        return self.items // HEADS


def shapes_of(x: Any, b: Any) -> Shapes:
    """Sizes that the kernels see of x [B, T, H, V] and b [B, T, G, N]."""
    batch, time, heads, _ = x.shape
    return Shapes(
        batch=batch,
        time=-(-time // CHUNK) * CHUNK,
        heads=heads,
        groups=b.shape[2],
        dtype=jnp.dtype(x.dtype),
    )


# A chunk of a summary moves b and x, one of the forward kernel c and y as well.
_SUMMARY_SHARE = 0.5
# What the further launch and the chain between segments cost, in chunks.
_LAUNCH_CHUNKS = 6
MAX_SEGMENTS = 16


def plan_segments(*, pairs: int, chunks: int) -> int:
    """How many segments a row should have by a model of the time it takes.

    A block holds an SM for itself, so the time is the number of turns in which the
    blocks of a launch run, times the chunks of each. One segment takes one launch of
    `pairs` blocks; S of them take one of (S - 1) `pairs` that summarise and one of
    S `pairs`. Only numbers that divide the chunks of a row come into question: others
    would pad, which copies x, b, c and y.

    Args:
      pairs: rows times heads, by `HEADS`.
      chunks: of a row.

    Returns:
      The number of segments, 1 if splitting saves less than a tenth.
    """

    def turns(blocks: int) -> int:
        return -(-blocks // hw.device().sms)

    def time(segments: int) -> float:
        length = chunks / segments
        total = turns(segments * pairs) * length
        if segments > 1:
            summaries = turns((segments - 1) * pairs)
            total += _SUMMARY_SHARE * summaries * length + _LAUNCH_CHUNKS
        return total

    most = min(chunks, MAX_SEGMENTS)
    best = min((x for x in range(1, most + 1) if chunks % x == 0), key=time)
    return best if time(best) < 0.9 * time(1) else 1


def refusal(x: Any, b: Any, chunk: int) -> str | None:
    """Why the kernels cannot run x [B, T, H, V] and b [B, T, G, N], else `None`."""
    _, time, heads, head_dim = x.shape
    groups, state_dim = b.shape[2:]
    for name, dim, allowed in (
        ("V", head_dim, HEAD_DIM),
        ("N", state_dim, STATE_DIM),
    ):
        if dim != allowed:
            return f"{name} = {dim}, the kernels have {allowed}"
    if time < 1:
        return f"T = {time}, the kernels have at least one token"
    if chunk not in CHUNK_SIZES:
        allowed = " and ".join(map(str, CHUNK_SIZES))
        return f"chunk_size = {chunk}, the kernels have {allowed}"
    if (dtype := jnp.dtype(x.dtype).name) not in ("bfloat16", "float16"):
        return f"dtype = {dtype}, the kernels have bfloat16 and float16"
    if (group := heads // groups) % HEADS:
        return f"{group} heads read each group, the kernels have multiples of {HEADS}"
    return None
