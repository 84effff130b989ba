"""Sizes, limits and launch parameters of the `decode_attention` kernel."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp

from pallas_kernels._common import hw, tuning
from pallas_kernels.decode_attention.held import Sizes


ROWS = 64  # rows of a wgmma, queries and heads that read a kv head
HEAD_DIMS = (64, 128, 256)
DTYPES = ("bfloat16", "float16")
MAX_TIME = 8  # new tokens of a row
MAX_GROUP = 16  # query heads that read a kv head
PAGES = (16, 32)  # what a page may be if not a multiple of 64

# Registers per thread of each warpgroup, by the number of computing ones; the last
# one copies. Their sum is what a block has.
REGISTERS = {1: (240, 24), 2: (240, 240, 24), 3: (152, 152, 152, 40)}
_BARRIER_BYTES = 1024
# step_kv, slots and q_places: tiles of 16 KB, or of 32 KB.
_BY_HEAD_DIM = {64: (128, 6, 2), 128: (64, 6, 2), 256: (64, 3, 1)}


def padded_group(group: int) -> int:
    """Heads of each kv head that the kernel reads where one new token has `group`.

    Args:
      group: H / G.

    Returns:
      What `q` may have, see `heads` of `decode_attention`: whole tiles of 8 rows.
    """
    return -(-group // 8) * 8


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Launch parameters; results differ by the order of summation only.

    Attributes:
      unit: tokens of an item, which one block sums up; a multiple of
        `warpgroups * step_kv`. Items begin at multiples of it, so a row's sums do not
        depend on other rows, nor on how many there are.
      step_kv: tokens of a tile.
      slots: tiles of keys and values in shared memory for each computing warpgroup, at
        least 2.
      warpgroups: computing ones of a block, which take its tiles by turns.
      q_places: items whose queries are in shared memory, 1 or 2.
    """

    unit: int = 1024
    step_kv: int = 64
    slots: int = 6
    warpgroups: int = 2
    q_places: int = 2

    def __post_init__(self):
        if self.warpgroups not in REGISTERS:
            raise ValueError(
                f"warpgroups={self.warpgroups}, allowed are {list(REGISTERS)}"
            )
        if self.step_kv not in (64, 128):
            raise ValueError(f"step_kv={self.step_kv}, allowed are 64 and 128")
        if self.slots < 2:
            raise ValueError(f"slots={self.slots}, allowed are 2 and more")
        if self.q_places not in (1, 2):
            raise ValueError(f"q_places={self.q_places}, allowed are 1 and 2")
        least = self.warpgroups * self.step_kv
        if self.unit < least or self.unit % least:
            raise ValueError(
                f"unit={self.unit}, allowed are multiples of warpgroups * step_kv = "
                f"{least}"
            )

    def shared_bytes(self, head_dim: int) -> int:
        """Shared memory of a block, with room for its barriers."""
        rows = self.q_places * ROWS + self.warpgroups * self.slots * self.step_kv
        return rows * head_dim * 2 + _BARRIER_BYTES

    def refusal(self, sizes: Sizes) -> str | None:
        """Why these parameters cannot be launched, `None` if they can."""
        step, page = self.step_kv, sizes.page
        if page and page % step and step % page:
            return f"step_kv={step} and pages of {page} tokens do not divide each other"
        if sizes.length < step:
            return f"S = {sizes.length}, the kernel has at least step_kv = {step}"
        if self.warpgroups == 3 and sizes.head_dim == 256:
            return "warpgroups=3, head dim 256 leaves registers for 2"
        needed, card = self.shared_bytes(sizes.head_dim), hw.device()
        if needed > card.smem_bytes:
            return (
                f"slots={self.slots} ask for {needed} bytes of shared memory, a block "
                f"of {card.kind} has {card.smem_bytes}"
            )
        return None


def heuristic(sizes: Sizes) -> Config:
    """Picks launch parameters by the sizes of a cache, whatever the batch is.

    One full row alone is to keep all blocks busy, but for units that would be too
    short for what each costs at its end.

    Args:
      sizes: of the call; its batch is not looked at.

    Returns:
      The config.
    """
    step, slots, q_places = _BY_HEAD_DIM[sizes.head_dim]
    if sizes.length < step or (sizes.page and sizes.page % step and step % sizes.page):
        step, slots = 64, 2 * slots
    least = 2 * step
    per_head = max(1, hw.device().sms // sizes.kv_heads)
    unit = -(-sizes.length // per_head)
    unit = -(-max(256, min(1024, unit)) // least) * least
    return Config(unit=unit, step_kv=step, slots=slots, q_places=q_places)


def table_key(sizes: Sizes) -> str:
    """The key of a call in `tuned/<device>/decode_attention.json`: no batch."""
    return tuning.key(
        head_dim=sizes.head_dim,
        kv_heads=sizes.kv_heads,
        length=tuning.bucket(sizes.length),
    )


def pick(sizes: Sizes) -> Config:
    """The measured config where there is one that fits, else the heuristic's."""
    found = tuning.lookup("decode_attention", table_key(sizes))
    if found is not None and (config := Config(**found)).refusal(sizes) is None:
        return config
    return heuristic(sizes)


def refusal(sizes: Sizes, dtype: Any, scale: float | None) -> str | None:
    """Why the kernel cannot run a call, `None` if it can."""
    if sizes.head_dim not in HEAD_DIMS:
        return f"K = {sizes.head_dim}, the kernel has {HEAD_DIMS}"
    if (name := jnp.dtype(dtype).name) not in DTYPES:
        return f"dtype = {name}, the kernel has {', '.join(DTYPES)}"
    if sizes.batch < 1 or sizes.time < 1:
        return f"B = {sizes.batch}, T = {sizes.time}, the kernel has at least one"
    if sizes.time > MAX_TIME:
        return f"T = {sizes.time} new tokens, the kernel has 1 to {MAX_TIME}"
    if sizes.group > MAX_GROUP:
        return (
            f"{sizes.group} query heads read each kv head, the kernel has 1 to "
            f"{MAX_GROUP}"
        )
    if sizes.page and sizes.page % 64 and sizes.page not in PAGES:
        allowed = ", ".join(map(str, PAGES))
        return (
            f"pages of {sizes.page} tokens, the kernel has {allowed} and multiples "
            "of 64"
        )
    if sizes.length < 64:
        return f"S = {sizes.length}, the kernel has at least 64"
    if not sizes.page and sizes.length % 8:
        return f"S = {sizes.length}, the kernel has multiples of 8: copies take 8 rows"
    if scale is not None and not scale > 0:
        return f"scale = {scale}, the kernel has more than 0"
    return None
