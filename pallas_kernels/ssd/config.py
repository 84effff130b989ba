"""Sizes of the chunked form."""

from __future__ import annotations

import dataclasses

import jax


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """How the chunked XLA form works through the time axis.

    Attributes:
      chunk: tokens per chunk, a power of two of at least 16.
      group: chunks whose [C, C] matrices and states are alive at once; where there
        are several groups, the backward computes each of them again.
    """

    chunk: int = 64
    group: int = 16


# Bytes of one f32 [chunks, B, H, C, C] matrix that a group may take. A GPU wants
# enough work per launch, a CPU wants what it works on to stay in its caches.
_GROUP_BYTES = {"cpu": 2 * 2**20}
_GROUP_BYTES_DEFAULT = 64 * 2**20


def heuristic(*, batch: int, time: int, heads: int, chunk: int) -> Config:
    """Picks the group length from the sizes alone.

    Args:
      batch, time, heads: B, T, H.
      chunk: tokens per chunk.

    Returns:
      The config.
    """
    chunks = max(1, -(-time // chunk))
    limit = _GROUP_BYTES.get(jax.default_backend(), _GROUP_BYTES_DEFAULT)
    most = max(1, limit // (4 * batch * heads * chunk * chunk))
    groups = -(-chunks // most)
    return Config(chunk=chunk, group=-(-chunks // groups))
