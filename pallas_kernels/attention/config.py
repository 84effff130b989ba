"""Sizes of the blockwise form."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """How the XLA form cuts the queries.

    Attributes:
      block: queries per block; scores of one block against its keys are alive at a
        time, in f32.
    """

    block: int = 512


def heuristic(*, time: int) -> Config:
    """Picks the block from the number of queries.

    Args:
      time: T.

    Returns:
      The config.
    """
    # Two blocks of a short row already skip a quarter of the pairs, and their scores
    # stay in a cache; more blocks would cost compilation.
    half = 1 << max(0, (time - 1) // 2).bit_length()
    return Config(block=min(512, max(64, half)))
