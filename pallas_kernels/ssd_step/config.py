"""How the `ssd_step` kernel tiles the state, and what it cannot run."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp

from pallas_kernels._common import hw
from pallas_kernels.gated_delta_step.config import (
    BARRIER_BYTES,
    PREPARED,
    check_allowed,
)


HEAD_DIM = 64  # V
STATE_DIM = 128  # N
VECTOR = 128  # channels that a warpgroup handles at a time
GROUPS_OF = (2, 4, 8, 16)  # heads per group
MAX_WIDTH = 8  # taps of the convolution


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """One tiling; a tile is the state of a head.

    Attributes:
      stages: tiles in flight per computing warpgroup, at least 2.
      blocks_per_sm: blocks of the persistent grid on each SM.
      warpgroups: that compute, 1 or 2; each has heads and a ring of its own.
      part: rows of a tile that a warpgroup has in registers at a time, as many f32
        registers in each thread.
      row_threads: neighbouring threads that share a row of N, 8 or 16.
      auto_barriers: whether the compiler puts a barrier before and after each write
        to memory. No write of this kernel needs one: a thread writes where it alone
        has read, or `commit_smem` stands between.
    """

    stages: int = 2
    blocks_per_sm: int = 1
    warpgroups: int = 2
    part: int = 32
    row_threads: int = 8
    auto_barriers: bool = False

    def __post_init__(self):
        allowed = {
            "stages": (2, 3, 4, 5, 6),
            "blocks_per_sm": (1, 2, 3, 4),
            "warpgroups": (1, 2),
            "part": (16, 32, 64),
            "row_threads": (8, 16),
        }
        check_allowed(self, allowed)

    def shared_bytes(self, group: int, dtype: Any, state_dtype: Any) -> int:
        """Shared memory of an SM's blocks, with room for their barriers.

        Args:
          group: heads per group.
          dtype: of xbc.
          state_dtype: of the state.
        """
        item, state_item = jnp.dtype(dtype).itemsize, jnp.dtype(state_dtype).itemsize
        ring = self.warpgroups * self.stages * HEAD_DIM * state_item
        vectors = group // 2
        prepared = PREPARED * ((2 + vectors) * item + (3 + 2 * vectors) * 4)
        results = PREPARED * vectors * 4 + self.warpgroups * 4
        block = BARRIER_BYTES + VECTOR * (ring + prepared + results)
        return self.blocks_per_sm * block

    def refusal(self, group: int, dtype: Any, state_dtype: Any) -> str | None:
        """Why this tiling cannot be launched, `None` if it can; as `shared_bytes`."""
        if group % (2 * self.warpgroups):
            return (
                f"warpgroups={self.warpgroups}, allowed are those that have an even "
                f"number of the {group} heads of a group each"
            )
        needed, limit = self.shared_bytes(group, dtype, state_dtype), hw.device()
        if needed > limit.smem_bytes:
            return (
                f"its tiling asks for {needed} bytes of shared memory, a block of "
                f"{limit.kind} has {limit.smem_bytes}"
            )
        return None


def heuristic(*, group: int, dtype: Any, state_dtype: Any) -> Config:
    """The tiling for sizes that were not measured: all the stages that fit."""
    warpgroups = 1 if group == 2 else 2
    tiling = Config(stages=6, warpgroups=warpgroups)
    while tiling.stages > 2 and tiling.refusal(group, dtype, state_dtype):
        tiling = dataclasses.replace(tiling, stages=tiling.stages - 1)
    return tiling


def refusal(
    *,
    batch: int,
    entry: tuple[int, int, int],
    groups: int,
    conv_width: int,
    dtype: Any,
    conv_dtype: Any,
    state_dtype: Any,
) -> str | None:
    """Why the kernel cannot run these sizes, `None` if it can; entry is (H, V, N)."""
    heads, dim, size = entry
    if (dim, size) != (HEAD_DIM, STATE_DIM):
        return (
            f"V = {dim}, N = {size}, the kernel has V = {HEAD_DIM} and N = {STATE_DIM}"
        )
    if batch < 1:
        return f"B = {batch}, the kernel has at least one row"
    if (group := heads // groups) not in GROUPS_OF:
        allowed = ", ".join(map(str, GROUPS_OF))
        return f"{group} heads read each group, the kernel has {allowed}"
    if conv_width > MAX_WIDTH:
        return f"W = {conv_width} taps, the kernel has 2 to {MAX_WIDTH}"
    if (name := jnp.dtype(dtype).name) not in ("float32", "bfloat16"):
        return f"dtype = {name}, the kernel has float32 and bfloat16"
    if conv_dtype != dtype:
        return f"conv_pool.dtype = {conv_dtype}, the kernel takes xbc.dtype = {dtype}"
    if (name := jnp.dtype(state_dtype).name) not in ("float32", "bfloat16"):
        return f"state_pool.dtype = {name}, the kernel has float32 and bfloat16"
    return None
