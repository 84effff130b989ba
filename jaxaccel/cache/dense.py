"""Keys and values kept whole, one slot a token."""

from __future__ import annotations

import dataclasses
from typing import Protocol, Self

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike


class TokenPlaces(Protocol):
    """What a cache must know of the tokens; `PackingMetadata` has it."""

    @property
    def is_real(self) -> jax.Array:
        """bool[B, T], false on padding."""
        ...

    @property
    def positions(self) -> jax.Array:
        """i32[B, T], index inside the document."""
        ...


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class KVCache:
    """Keys and values of one attention layer; each row holds one document.

    Attributes:
      k: [B, S, G, K], after the rotary embedding.
      v: [B, S, G, V].
      positions: i32[B, S], position of the token in a slot, -1 where it is empty.
    """

    k: jax.Array
    v: jax.Array
    positions: jax.Array

    @classmethod
    def empty(
        cls,
        batch: int,
        max_length: int,
        num_kv_heads: int,
        key_dim: int,
        value_dim: int,
        dtype: DTypeLike,
    ) -> Self:
        """Makes an empty cache with S = `max_length` slots."""
        shape = (batch, max_length, num_kv_heads)
        return cls(
            k=jnp.zeros((*shape, key_dim), dtype),
            v=jnp.zeros((*shape, value_dim), dtype),
            positions=jnp.full((batch, max_length), -1, jnp.int32),
        )

    def append(
        self, k: jax.Array, v: jax.Array, meta: TokenPlaces, length: jax.Array
    ) -> Self:
        """Writes the real tokens behind those already held.

        The n-th real token of row b goes to slot length[b] + n, wherever padding
        stands, so rows of unequal length stay dense. Tokens past the last slot are
        dropped: the shapes are static, so the caller must not exceed `max_length`.

        Args:
          k: [B, T, G, K].
          v: [B, T, G, V].
          meta: what is real, and the positions.
          length: i32[B], tokens held before.

        Returns:
          The cache with the tokens in it.
        """
        slots = self.k.shape[1]
        rank = jnp.cumsum(meta.is_real.astype(jnp.int32), axis=1) - 1
        slot = jnp.where(meta.is_real, length[:, None] + rank, slots)  # [B, T]
        row = jnp.broadcast_to(jnp.arange(slot.shape[0])[:, None], slot.shape)

        def write(into, what):
            return into.at[row, slot].set(what.astype(into.dtype), mode="drop")

        return dataclasses.replace(
            self,
            k=write(self.k, k),
            v=write(self.v, v),
            positions=write(self.positions, meta.positions),
        )
