"""Sizes of the chunked form."""

from __future__ import annotations

import dataclasses

import jax


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """How the chunked XLA form works through the time axis.

    Attributes:
      chunk: tokens per chunk, a power of two from 16 to 256.
      group: chunks whose [C, C] matrices and entry states are alive at once; the
        backward recomputes them group by group from one saved state per group.
      save: keep inverses, entry states and written values of the forward instead of
        recomputing them in the backward.
    """

    chunk: int = 64
    group: int = 16
    save: bool = False


# Bytes of one f32 [chunks, B, Hv, C, C] matrix that a group may take; a group holds
# around ten arrays of that size at its peak. A GPU wants enough work per launch, a
# CPU wants what it works on to stay in its caches.
_GROUP_BYTES = {"cpu": 2 * 2**20}
_GROUP_BYTES_DEFAULT = 64 * 2**20
# What a layer may keep for the backward before recomputation is the better deal.
_SAVED_BYTES = 32 * 2**20


def heuristic(
    *,
    batch: int,
    time: int,
    value_heads: int,
    key_dim: int,
    value_dim: int,
    itemsize: int,
    chunk: int,
) -> Config:
    """Picks the group length and what to save from the sizes alone.

    Args:
      batch, time, value_heads, key_dim, value_dim: B, T, Hv, K, V.
      itemsize: bytes of an element of v.
      chunk: tokens per chunk.

    Returns:
      The config.
    """
    chunks = max(1, -(-time // chunk))
    per_chunk = batch * value_heads
    limit = _GROUP_BYTES.get(jax.default_backend(), _GROUP_BYTES_DEFAULT)
    most = max(1, limit // (4 * per_chunk * chunk * chunk))
    groups = -(-chunks // most)
    elements = chunks * per_chunk
    elements *= chunk * chunk + value_dim * key_dim + chunk * value_dim
    return Config(
        chunk=chunk,
        group=-(-chunks // groups),
        save=elements * itemsize <= _SAVED_BYTES,
    )
