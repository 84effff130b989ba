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
    # Short rows gain more from skipping future keys than they lose to more blocks.
    return Config(block=256 if 256 < time <= 512 else 512)
