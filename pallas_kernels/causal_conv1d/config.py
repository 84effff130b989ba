"""How the `causal_conv1d` kernels tile, and which tiling a call gets."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp

from pallas_kernels._common import hw, tuning
from pallas_kernels.causal_conv1d.tables import MAX_REACH


WARPGROUP = 128  # threads
BARRIER_BYTES = 1024  # 8 for each slot of the largest ring, 8 warpgroups * 16 stages
LINE = 256  # channels; an edge of what one tensor copy moves is no longer

SHORT = 64  # tokens of a strip whose length costs nothing

WIDTHS = (2, 3, 4)
CHANNELS = (256, 512, 1024)
ROWS = (1, 2, 4, 8, 16)  # a step lies inside one word of `tables.packed_reach`
DTYPES = ("float32", "bfloat16", "float16")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """One tiling.

    Attributes:
      time: tokens that a warpgroup walks over, a multiple of `rows`. Each reads W - 1
        tokens more; in the backward pass each writes a partial sum of the weight's
        gradient.
      channels: of a warpgroup, 2, 4 or 8 neighbouring ones for each thread.
      warpgroups: of a block, side by side along the channels. They share nothing, but
        a thread gets at most 512 / warpgroups registers.
      rows: tokens of a step: their loads are in flight together.
      stages: steps that asynchronous copies run ahead; 0 loads directly instead.
      branch: whether steps without a border skip the masks, at the price of a second
        copy of the loop's body.
    """

    time: int
    channels: int
    warpgroups: int = 1
    rows: int = 8
    stages: int = 0
    branch: bool = False

    def __post_init__(self):
        if self.channels not in CHANNELS or self.rows not in ROWS:
            raise ValueError(
                f"channels={self.channels} and rows={self.rows}, allowed are "
                f"{CHANNELS} and {ROWS}"
            )
        if self.time < 1 or self.time % self.rows or self.time < MAX_REACH:
            raise ValueError(
                f"time={self.time}, allowed are multiples of rows={self.rows} from "
                f"{MAX_REACH} on"
            )
        if not 0 <= self.stages <= 16 or not 1 <= self.warpgroups <= 8:
            raise ValueError(
                f"stages={self.stages} and warpgroups={self.warpgroups}, allowed are 0 "
                "to 16 and 1 to 8"
            )

    def ring_bytes(self, inputs: int, dtype: Any) -> int:
        """Shared memory of a block that reads `inputs` tensors, with its barriers."""
        if not self.stages:
            return 0
        tile = self.rows * self.channels * jnp.dtype(dtype).itemsize
        return inputs * self.warpgroups * self.stages * tile + BARRIER_BYTES


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kernels:
    """The tiling of each direction."""

    fwd: Config
    bwd: Config

    def __str__(self) -> str:
        return f"forward {self.fwd}, backward {self.bwd}"


def _time(batch: int, time: int, tiles: int, rows: int, resident: int) -> int:
    """Tokens of a strip so that strips fill the card once, `resident` on each SM."""
    strips = max(1, hw.device().sms * resident // (tiles * batch))
    least = max(rows, MAX_REACH + 1)
    return max(least, -(-time // (strips * rows)) * rows)


def heuristic(batch: int, time: int, dim: int, dtype: Any, direction: str) -> Config:
    """The tiling for a call that was not measured.

    Args:
      batch, time, dim: shape of x.
      dtype: of x.
      direction: "fwd" or "bwd".
    """
    # 8 bytes a thread: with 16, a thread's taps and window fill its registers.
    channels = LINE * 2 if dim % (2 * LINE) == 0 else LINE
    if jnp.dtype(dtype).itemsize == 4:
        channels = LINE
    tiles = dim // channels
    # More warpgroups would leave the backward's sums too few registers.
    warpgroups = next(n for n in (4, 2, 1) if tiles % n == 0)
    # The backward writes partial sums for each strip, so strips are as long as they
    # can be without an idle SM; a long strip also reads less in front of it.
    longest = _time(batch, time, tiles, 4, resident=4)
    if direction == "fwd" and longest >= SHORT:
        # Nothing is summed here: short strips end at about the same time.
        return Config(
            time=SHORT,
            channels=channels,
            warpgroups=warpgroups,
            rows=8,
            stages=3,
            branch=True,
        )
    return Config(
        time=longest,
        channels=channels,
        warpgroups=warpgroups,
        rows=4,
        stages=3,
        branch=True,
    )


def _candidates(shapes: tuple[tuple[int, ...], ...], times: tuple[int, ...]):
    names = ("channels", "warpgroups", "rows", "stages")
    return tuple(
        Config(time=time, branch=True, **dict(zip(names, shape, strict=True)))
        for shape in shapes
        for time in times
    )


# What a tuning run tries, by direction; those whose channels * warpgroups do not
# divide a call's channels do not apply to it.
CANDIDATES = {
    "fwd": _candidates(
        (
            (256, 1, 8, 0),
            (512, 1, 4, 0),
            (512, 1, 8, 0),
            (1024, 1, 8, 0),
            (1024, 4, 4, 0),
            (512, 1, 4, 4),
            (512, 4, 8, 3),
            (512, 8, 4, 3),
            (1024, 4, 4, 3),
        ),
        (64, 128, 256, 512),
    ),
    "bwd": _candidates(
        (
            (256, 1, 8, 0),
            (512, 4, 4, 0),
            (256, 1, 8, 3),
            (256, 8, 4, 3),
            (512, 1, 4, 3),
            (512, 4, 4, 3),
            (512, 4, 8, 2),
        ),
        (128, 256, 512, 1024),
    ),
}


def table_key(batch: int, time: int, dim: int, dtype: Any, direction: str) -> str:
    """The key of a call in `tuned/<device>/causal_conv1d.json`."""
    return tuning.key(
        direction=direction,
        batch=tuning.bucket(batch),
        time=tuning.bucket(time),
        dim=dim,
        dtype=jnp.dtype(dtype).name,
    )


def pick(batch: int, time: int, dim: int, dtype: Any, direction: str) -> Config:
    """The measured tiling where there is one, else a guess."""
    key = table_key(batch, time, dim, dtype, direction)
    found = tuning.lookup("causal_conv1d", key)
    if found is None:
        return heuristic(batch, time, dim, dtype, direction)
    names = {field.name for field in dataclasses.fields(Config)}
    return Config(**{k: v for k, v in found.items() if k in names})


def refusal(batch: int, time: int, dim: int, width: int, dtype: Any) -> str | None:
    """Why the kernels cannot run x [batch, time, dim], `None` if they can."""
    if jnp.dtype(dtype).name not in DTYPES:
        return f"x.dtype={dtype}, the kernels take {', '.join(DTYPES)}"
    if width not in WIDTHS:
        return f"W={width} taps, the kernels take {WIDTHS[0]} to {WIDTHS[-1]}"
    if not dim or dim % LINE:
        return f"{dim} channels are no positive multiple of {LINE}"
    if not batch or not time:
        return f"x has {batch} rows of {time} tokens, the kernels take one or more"
    return None
