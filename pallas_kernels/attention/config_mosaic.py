"""Sizes, limits and launch parameters of the Mosaic GPU kernels."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax.numpy as jnp

from pallas_kernels._common import tuning


ROWS = 64  # rows of a wgmma: what one warpgroup has of a block
HEAD_DIMS = (64, 128, 256)
DTYPES = ("bfloat16", "float16")
BACKWARDS = ("recomputed", "stored")

# Registers per thread of each warpgroup, by the number of computing ones; the last
# one copies. 512 in all is what a block has.
REGISTERS = {2: (240, 240, 24), 3: (160, 160, 160, 32)}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Launch parameters; results differ by the order of summation only.

    Attributes:
      warpgroups: computing ones of the forward and dq kernels, 64 queries each.
      step_kv: keys per step of the forward kernel.
      slots: tiles of K and V in shared memory of the forward kernel.
      ping_pong: whether warpgroups take turns at the tensor cores.
      persistent: whether the forward kernel has one block per SM that works through
        several blocks of queries, two of which are in shared memory.
      dq_step_kv, dq_slots: the same of the dq kernel.
      block_kv: keys of a block of the dk, dv kernel. 64 means that one warpgroup sums
        dk and one dv, which leaves room for head dim 256.
      dkv_step_q, dkv_stages: queries per step of the dk, dv kernel, and steps in
        shared memory.
      backward: "recomputed", or "stored" for a dk, dv kernel that writes dS to device
        memory and a dq kernel that only multiplies it with K (`kernel_bwd_stored`).
        It runs where dS of one row and kv head are within `scores_bytes`, and, of
        documents, where those of one row's are, which the device finds out. Else the
        other one does.
      scores_bytes: what dS may take in device memory at a time; below 4 GiB, as
        elements have 32-bit indices.
      scores_slots: places of a tile of dS that each warpgroup writes from.
      scores_heads: query heads of one kv head that a block of that dq kernel has, at
        most; they share its tiles of K.
      scores_stages: steps of it in shared memory, at most: less where fewer fit.
    """

    warpgroups: int = 2
    step_kv: int = 128
    slots: int = 4
    ping_pong: bool = True
    persistent: bool = False
    dq_step_kv: int = 64
    dq_slots: int = 4
    block_kv: int = 128
    dkv_step_q: int = 64
    dkv_stages: int = 3
    backward: str = "recomputed"
    scores_bytes: int = 9 << 28
    scores_slots: int = 1
    scores_heads: int = 2
    scores_stages: int = 5

    @property
    def block_q(self) -> int:
        """Queries of a block of the forward and dq kernels."""
        return self.warpgroups * ROWS

    def __post_init__(self):
        if self.warpgroups not in REGISTERS:
            raise ValueError(
                f"warpgroups={self.warpgroups}, allowed are {list(REGISTERS)}"
            )
        for name in ("step_kv", "dq_step_kv", "dkv_step_q"):
            # The inner direction of a product of 128-byte rows comes in 64s, and the
            # result of one has at most 256 columns.
            if (step := getattr(self, name)) not in (64, 128, 192, 256):
                raise ValueError(f"{name}={step}, allowed are 64, 128, 192 and 256")
        if self.block_kv not in (64, 128):
            raise ValueError(f"block_kv={self.block_kv}, allowed are 64 and 128")
        if self.block_q % self.dkv_step_q:
            raise ValueError(
                f"dkv_step_q={self.dkv_step_q}, allowed are divisors of the "
                f"{self.block_q} queries of a block"
            )
        if self.backward not in BACKWARDS:
            raise ValueError(
                f"backward={self.backward!r}, allowed are {', '.join(BACKWARDS)}"
            )
        if self.backward == "stored" and self.dkv_step_q != ROWS:
            raise ValueError(
                f"dkv_step_q={self.dkv_step_q}, backward='stored' has {ROWS}"
            )
        if not 0 < self.scores_bytes < 1 << 32:
            raise ValueError(
                f"scores_bytes={self.scores_bytes}, allowed are 1 to {(1 << 32) - 1}"
            )
        leasts = {"slots": 2, "dq_slots": 2, "dkv_stages": 1, "scores_stages": 1}
        leasts |= {"scores_slots": 1, "scores_heads": 1}
        for name, least in leasts.items():
            if (value := getattr(self, name)) < least:
                raise ValueError(f"{name}={value}, allowed are {least} and more")


def heuristic(*, head_dim: int) -> Config:
    """Picks launch parameters that fit registers and shared memory.

    Args:
      head_dim: K = V.

    Returns:
      The config.
    """
    # Two products fewer, for dS of at most `scores_bytes` in device memory.
    once = functools.partial(Config, backward="stored")
    if head_dim == 256:
        # 64 queries of f32 sums are 128 registers; a tile of 64 keys is 32 KB.
        return once(
            step_kv=64, slots=4, dq_step_kv=64, dq_slots=3, block_kv=64, dkv_stages=2
        )
    if head_dim == 128:
        # Products of 64 x 64 from shared memory read it as fast as it can be read.
        return once(persistent=True, slots=5, dq_step_kv=128, dkv_stages=4)
    return once(persistent=True, slots=8, dq_step_kv=128, dq_slots=6, dkv_stages=6)


def table_key(head_dim: int) -> str:
    """The key of a head dim in `tuned/<device>/attention.json`."""
    return tuning.key(head_dim=head_dim)


def pick(*, head_dim: int) -> Config:
    """The measured config where there is one, else the heuristic's."""
    config = heuristic(head_dim=head_dim)
    found = tuning.lookup("attention", table_key(head_dim))
    if found is None:
        return config
    names = {field.name for field in dataclasses.fields(Config)}
    return dataclasses.replace(config, **{k: v for k, v in found.items() if k in names})


def tiling(head_dim: int) -> dict[str, int]:
    """The blocks that `tile_bounds` needs to know: block_q and block_kv."""
    config = pick(head_dim=head_dim)
    return {"block_q": config.block_q, "block_kv": config.block_kv}


def with_blocks(
    config: Config, *, head_dim: int, block_q: int, block_kv: int
) -> Config:
    """The config with the blocks that bounds were built for.

    Raises:
      ValueError: the sums of such blocks do not fit the registers.
    """
    q_sizes = (128, 192) if head_dim == 64 else (128,)
    kv_sizes = (64,) if head_dim == 256 else (64, 128)
    if block_q not in q_sizes or block_kv not in kv_sizes:
        raise ValueError(
            f"bounds have blocks of {block_q} queries and {block_kv} keys, allowed for "
            f"head dim {head_dim} are {q_sizes} and {kv_sizes}; see "
            f"attention.tiling({head_dim})"
        )
    if (block_q, block_kv) == (config.block_q, config.block_kv):
        return config
    step = config.dkv_step_q if block_q % config.dkv_step_q == 0 else ROWS
    return dataclasses.replace(
        config, warpgroups=block_q // ROWS, block_kv=block_kv, dkv_step_q=step
    )


def padded_length(config: Config, length: int) -> int:
    """S that the blocks and steps of all kernels divide."""
    whole = math.lcm(config.step_kv, config.dq_step_kv, config.block_kv)
    return -(-length // whole) * whole


def refusal(
    *,
    time: int,
    length: int,
    heads: int,
    key_dim: int,
    value_dim: int,
    dtype: Any,
    scale: float | None,
    has_positions: bool,
) -> str | None:
    """Why the kernels cannot run a call, `None` if they can."""
    if has_positions:
        return "positions are given, the kernels compare indices in the row"
    if key_dim != value_dim or key_dim not in HEAD_DIMS:
        return f"K = {key_dim}, V = {value_dim}, the kernels have K = V of {HEAD_DIMS}"
    if jnp.dtype(dtype).name not in DTYPES:
        return f"dtype = {jnp.dtype(dtype).name}, the kernels have {', '.join(DTYPES)}"
    if time < 1 or length < 1 or heads < 1:
        return f"T = {time}, S = {length}, H = {heads}, the kernels have at least one"
    if scale is not None and not scale > 0:
        return f"scale = {scale}, the kernels have more than 0"
    return None
