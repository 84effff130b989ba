"""Sizes, limits and launch parameters of the Mosaic GPU kernels."""

from __future__ import annotations

import dataclasses
import enum
from typing import Any

import jax.numpy as jnp


CHUNK = 64  # rows of a wgmma: other chunk lengths would need other kernels
HEAD_DIM = 128  # K and V
MAX_GROUP = 4  # value heads that read one key head
SQUARE = (CHUNK, CHUNK)

STAGES = 2  # chunks in shared memory: one is read while the next arrives
STATE_WARPGROUPS = 2
HALF = HEAD_DIM // STATE_WARPGROUPS  # rows of the transposed state in each of them


class Warpgroup(enum.IntEnum):
    """What the warpgroups behind the state's do in the kernels that carry a state."""

    MIX = 2
    COPY = 3


# Registers per thread of each warpgroup; 512 in all is what a block has.
REGISTERS = (192, 192, 104, 24)
# exp is 0 in f32 from -104 on, so this floor of the log decay changes no result, but
# it keeps sums over a chunk precise.
MIN_LOG_DECAY = -110.0


class Gate(enum.IntEnum):
    """Rows of the table of a chunk's per-token factors, in the order of the table.

    TOTAL is the sum of log2 decays from the later of the chunk's and the document's
    start up to and including a token. ENTER is the decay of the state that enters
    the chunk, 0 for documents that begin inside. LEAVE is the decay from after a
    token to the chunk's exit, 0 for documents that end inside. BETA is the writing
    strength, START the index of the document's first token (-1: before the chunk).
    """

    TOTAL = 0
    ENTER = 1
    LEAVE = 2
    BETA = 3
    START = 4


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Launch parameters that results don't depend on.

    Attributes:
      grads_warpgroups: of a block of `kernel_grads`, 2 or 4.
    """

    grads_warpgroups: int = 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shapes:
    """Sizes of one call.

    Attributes:
      batch, time, key_heads, value_heads, key_dim, value_dim: B, T, Hk, Hv, K, V;
        T is a multiple of 64.
      dtype: of q, k, v and o.
    """

    batch: int
    time: int
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    dtype: Any

    @property
    def chunks(self) -> int:
        return self.time // CHUNK

    @property
    def group(self) -> int:
        return self.value_heads // self.key_heads

    @property
    def items(self) -> int:
        """Rows times value heads: what runs side by side."""
        return self.batch * self.value_heads


def heuristic(shapes: Shapes) -> Config:
    """Picks launch parameters: the same for all sizes so far."""
    del shapes
    return Config()


def refusal(
    *,
    time: int,
    key_heads: int,
    value_heads: int,
    key_dim: int,
    value_dim: int,
    chunk: int,
    dtype: Any,
) -> str | None:
    """Why the kernels cannot run these sizes, `None` if they can."""
    if (key_dim, value_dim) != (HEAD_DIM, HEAD_DIM):
        return f"K = {key_dim}, V = {value_dim}, the kernels have K = V = {HEAD_DIM}"
    if time < 1:
        return f"T = {time}, the kernels have at least one token"
    if chunk != CHUNK:
        return f"chunk_size = {chunk}, the kernels have {CHUNK}"
    if jnp.dtype(dtype).name not in ("bfloat16", "float16"):
        return f"dtype = {jnp.dtype(dtype).name}, the kernels have bfloat16 and float16"
    if (group := value_heads // key_heads) > MAX_GROUP:
        return (
            f"{group} value heads read each key head, the kernels have 1 to {MAX_GROUP}"
        )
    return None
