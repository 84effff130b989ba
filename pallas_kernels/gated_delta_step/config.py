"""How the `gated_delta_step` kernel tiles the state, and which tiling a call gets."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp

from pallas_kernels._common import hw, tuning


HEAD_DIM = 128  # K and V
WARPGROUP = 128  # threads
MAX_GROUP = 8  # value heads that read one key head
MAX_WIDTH = 8  # taps of the convolution
MAX_TIME = 8  # tokens that are verified at once
PREPARED = 2  # tokens whose small vectors are in shared memory
BARRIER_BYTES = 1024  # of shared memory, kept for a block's barriers


def check_allowed(config: Any, allowed: Mapping[str, tuple[int, ...]]) -> None:
    """Refuses a launch parameter that is not among those of its name.

    Raises:
      ValueError: names the parameter, its value and what is allowed.
    """
    for name, values in allowed.items():
        if (value := getattr(config, name)) not in values:
            raise ValueError(
                f"{name}={value}, allowed are {', '.join(map(str, values))}"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """One tiling.

    Attributes:
      rows: rows of V in a tile of the state, 32, 64 or 128.
      stages: tiles in flight per computing warpgroup, at least 2.
      blocks_per_sm: blocks of the persistent grid on each SM.
      warpgroups: that compute, 1 or 2; each has heads and a ring of its own.
      part: rows of a tile that a warpgroup has in registers at a time, as many f32
        registers in each thread.
      row_threads: neighbouring threads that share a row of K, 8 or 16.
      auto_barriers: whether the compiler puts a barrier before and after each write
        to memory. No write of this kernel needs one: a thread writes where it alone
        has read, or `commit_smem` stands between.
    """

    rows: int = 64
    stages: int = 3
    blocks_per_sm: int = 1
    warpgroups: int = 2
    part: int = 64
    row_threads: int = 8
    auto_barriers: bool = True

    def __post_init__(self):
        allowed = {
            "rows": (32, 64, 128),
            "stages": (2, 3, 4, 5, 6, 7, 8),
            "blocks_per_sm": (1, 2, 3, 4),
            "warpgroups": (1, 2),
            "part": (16, 32, 64),
            "row_threads": (8, 16),
        }
        check_allowed(self, allowed)
        if self.rows % self.part:
            raise ValueError(
                f"part={self.part}, allowed are divisors of rows={self.rows}"
            )

    def shared_bytes(self, group: int, dtype: Any, state_dtype: Any) -> int:
        """Shared memory of an SM's blocks, with room for their barriers.

        Args:
          group: value heads that read one key head.
          dtype: of qkv.
          state_dtype: of the state.
        """
        item, state_item = jnp.dtype(dtype).itemsize, jnp.dtype(state_dtype).itemsize
        ring = self.warpgroups * self.stages * self.rows * state_item
        prepared = PREPARED * ((2 + group) * item + 3 * group * 4)
        results = self.warpgroups * 3 * item
        block = BARRIER_BYTES + HEAD_DIM * (ring + prepared + results)
        return self.blocks_per_sm * block

    def refusal(self, group: int, dtype: Any, state_dtype: Any) -> str | None:
        """Why this tiling cannot be launched, `None` if it can; as `shared_bytes`."""
        if group % self.warpgroups:
            return (
                f"warpgroups={self.warpgroups}, allowed are divisors of the {group} "
                "value heads that read a key head"
            )
        needed, limit = self.shared_bytes(group, dtype, state_dtype), hw.device()
        if needed > limit.smem_bytes:
            return (
                f"its tiling asks for {needed} bytes of shared memory, a block of "
                f"{limit.kind} has {limit.smem_bytes}"
            )
        return None


# (rows, stages, blocks_per_sm, warpgroups): rings of 96 to 192 KB on an SM.
_RINGS = (
    (128, 3, 1, 2),
    (64, 6, 1, 2),
    (64, 3, 1, 2),
    (32, 6, 1, 2),
    (64, 6, 1, 1),
    (64, 3, 2, 1),
)
# (ring, part, row_threads)
_SPLITS = (
    *((ring, part, 8) for ring in _RINGS for part in (32, 16)),
    (_RINGS[2], 64, 8),
    (_RINGS[2], 32, 16),
)
CANDIDATES = tuple(
    Config(
        rows=ring[0],
        stages=ring[1],
        blocks_per_sm=ring[2],
        warpgroups=ring[3],
        part=part,
        row_threads=row_threads,
        auto_barriers=False,
    )
    for ring, part, row_threads in _SPLITS
)


def heuristic(
    *, batch: int, key_heads: int, value_heads: int, dtype: Any, state_dtype: Any
) -> Config:
    """The tiling for sizes that were not measured.

    32 KB a tile either way, and all shared memory of an SM on its way at once that
    the small vectors of the value heads leave.
    """
    del batch
    group = value_heads // key_heads
    warpgroups, stages = (1, 6) if group % 2 else (2, 3)
    tiling = Config(
        rows=HEAD_DIM * 2 // jnp.dtype(state_dtype).itemsize,
        stages=stages,
        warpgroups=warpgroups,
        part=32,
        auto_barriers=False,
    )
    while tiling.stages > 2 and tiling.refusal(group, dtype, state_dtype):
        tiling = dataclasses.replace(tiling, stages=tiling.stages - 1)
    return tiling


def table_key(
    *, batch: int, key_heads: int, value_heads: int, dtype: Any, state_dtype: Any
) -> str:
    """The key of a call in `tuned/<device>/gated_delta_step.json`."""
    return tuning.key(
        batch=tuning.bucket(batch),
        key_heads=key_heads,
        value_heads=value_heads,
        dtype=jnp.dtype(dtype).name,
        state=jnp.dtype(state_dtype).name,
    )


def pick(
    *, batch: int, key_heads: int, value_heads: int, dtype: Any, state_dtype: Any
) -> Config:
    """The measured tiling where there is one, else a guess."""
    sizes = {
        "batch": batch,
        "key_heads": key_heads,
        "value_heads": value_heads,
        "dtype": dtype,
        "state_dtype": state_dtype,
    }
    found = tuning.lookup("gated_delta_step", table_key(**sizes))
    if found is None:
        return heuristic(**sizes)
    names = {field.name for field in dataclasses.fields(Config)}
    return Config(**{k: v for k, v in found.items() if k in names})


def refusal(
    *,
    batch: int,
    key_heads: int,
    value_heads: int,
    key_dim: int,
    value_dim: int,
    conv_width: int,
    dtype: Any,
    conv_dtype: Any,
    state_dtype: Any,
) -> str | None:
    """Why the kernel cannot run these sizes, `None` if it can."""
    if (key_dim, value_dim) != (HEAD_DIM, HEAD_DIM):
        return f"K = {key_dim}, V = {value_dim}, the kernel has K = V = {HEAD_DIM}"
    if batch < 1:
        return f"B = {batch}, the kernel has at least one row"
    if (group := value_heads // key_heads) > MAX_GROUP:
        return (
            f"{group} value heads read each key head, the kernel has 1 to {MAX_GROUP}"
        )
    if conv_width > MAX_WIDTH:
        return f"W = {conv_width} taps, the kernel has 2 to {MAX_WIDTH}"
    if (name := jnp.dtype(dtype).name) not in ("float32", "bfloat16"):
        return f"dtype = {name}, the kernel has float32 and bfloat16"
    if conv_dtype != dtype:
        return f"conv_pool.dtype = {conv_dtype}, the kernel takes qkv.dtype = {dtype}"
    if (name := jnp.dtype(state_dtype).name) not in ("float32", "bfloat16"):
        return f"state_pool.dtype = {name}, the kernel has float32 and bfloat16"
    return None


def verify_refusal(
    *,
    time: int,
    key_heads: int,
    entry: tuple[int, int, int],
    conv_width: int,
    dtype: Any,
    conv_dtype: Any,
    state_dtype: Any,
) -> str | None:
    """Why the kernels of T tokens cannot run these sizes; entry is (Hv, V, K)."""
    if time > MAX_TIME:
        return f"T = {time} tokens, the kernels have 1 to {MAX_TIME}"
    value_heads, value_dim, key_dim = entry
    return refusal(
        batch=1,
        key_heads=key_heads,
        value_heads=value_heads,
        key_dim=key_dim,
        value_dim=value_dim,
        conv_width=conv_width,
        dtype=dtype,
        conv_dtype=conv_dtype,
        state_dtype=state_dtype,
    )
