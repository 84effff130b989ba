"""The caches of all layers of a decoder."""

from __future__ import annotations

import dataclasses
from typing import Self

import jax
import jax.numpy as jnp

from jaxaccel.cache.dense import KVCache
from jaxaccel.cache.plan import PolicyCache
from jaxaccel.cache.recurrent import RecurrentCache


LayerCache = KVCache | RecurrentCache | PolicyCache


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class DecoderCache:
    """What a decoder has read so far; each row holds one document.

    Attributes:
      layers: one cache per position of the layer pattern, every leaf with a leading
        [num_periods] axis, as the scan over periods takes it.
      length: i32[B], real tokens read.
    """

    layers: tuple[LayerCache, ...]
    length: jax.Array

    def reset(self, rows: jax.Array) -> Self:
        """Empties some rows, so that new documents can start in them.

        Args:
          rows: bool[B], true where the row is to be emptied.

        Returns:
          The cache with those rows as `init_cache` made them.
        """

        def clear(leaf, empty):
            mask = rows.reshape((1, -1) + (1,) * (leaf.ndim - 2))
            return jnp.where(mask, jnp.asarray(empty, leaf.dtype), leaf)

        def cleared(layer):
            if isinstance(layer, PolicyCache):
                return layer.reset(rows)
            if isinstance(layer, KVCache):
                return KVCache(
                    k=clear(layer.k, 0),
                    v=clear(layer.v, 0),
                    positions=clear(layer.positions, -1),
                )
            return RecurrentCache(
                conv=clear(layer.conv, 0), state=clear(layer.state, 0)
            )

        return dataclasses.replace(
            self,
            layers=tuple(map(cleared, self.layers)),
            length=jnp.where(rows, 0, self.length),
        )
