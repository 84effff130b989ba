"""Keys and values kept whole, one slot a token."""

from __future__ import annotations

import dataclasses
from typing import Any, Protocol, Self

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels.decode_attention import decode_attention
from pallas_kernels.rope_append import rope_append


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
        row, slot = _places(meta, length, self.k.shape[1])

        def write(into, what):
            return into.at[row, slot].set(what.astype(into.dtype), mode="drop")

        return dataclasses.replace(
            self,
            k=write(self.k, k),
            v=write(self.v, v),
            positions=write(self.positions, meta.positions),
        )

    def rope_append(
        self,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        meta: TokenPlaces,
        length: jax.Array,
        **options: Any,
    ) -> tuple[jax.Array, Self]:
        """`append` of tokens whose queries and keys are still to be normed and rotated.

        Args:
          q: [B, T, H, K].
          k, v: [B, T, G, K].
          meta, length: as for `append`.
          **options: of `pallas_kernels.rope_append`; `layer` if the arrays of this
            cache have an axis of layers.

        Returns:
          The queries as that op gives them, and the cache with the tokens in it.
        """
        _, slots = _places(meta, length, self.k.shape[-3])
        q, keys, values, positions = rope_append(
            *(q, k, v, slots, self.k, self.v),
            positions=meta.positions,
            position_cache=self.positions,
            **options,
        )
        assert positions is not None  # a cache of them was given
        new = {"k": keys, "v": values, "positions": positions}
        return q, dataclasses.replace(self, **new)

    def attend(self, q: jax.Array, held: jax.Array, **options: Any) -> jax.Array:
        """Attention of the newest token of each row over the first tokens.

        Args:
          q: [B, 1, H, K], of the cache's dtype.
          held: i32[B], how many of a row's tokens it sees, 0 for none.
          **options: of `pallas_kernels.decode_attention`.

        Returns:
          [B, 1, H, K], exactly 0 for a query that sees none.
        """
        return decode_attention(q, self.k, self.v, held, **options)[0]

    def truncate(self, length: jax.Array) -> Self:
        """Forgets the tokens behind the first ones.

        Their keys and values stay where they are, as in every empty slot, until
        `append` writes over them.

        Args:
          length: i32[B], tokens that each row keeps.

        Returns:
          The cache in which slots from `length` on are empty.
        """
        return dataclasses.replace(self, positions=_truncated(self.positions, length))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class KVCacheOfLayer:
    """One layer's part of a `KVCache` that holds several layers; used in its place.

    It writes into the arrays of all layers, so that a loop over layers that carries
    them can update them where they are, without a copy of a layer's part.

    Attributes:
      stacked: the cache, every array with a leading [num_periods] axis.
      index: i32[], the layer's row of that axis.
    """

    stacked: KVCache
    index: jax.Array

    @property
    def k(self) -> jax.Array:
        """[B, S, G, K]."""
        return self._row(self.stacked.k)

    @property
    def v(self) -> jax.Array:
        """[B, S, G, V]."""
        return self._row(self.stacked.v)

    @property
    def positions(self) -> jax.Array:
        """i32[B, S]."""
        return self._row(self.stacked.positions)

    def append(
        self, k: jax.Array, v: jax.Array, meta: TokenPlaces, length: jax.Array
    ) -> Self:
        """As `KVCache.append`."""
        row, slot = _places(meta, length, self.stacked.k.shape[2])

        def write(into, what):
            return into.at[self.index, row, slot].set(
                what.astype(into.dtype), mode="drop"
            )

        stacked = KVCache(
            k=write(self.stacked.k, k),
            v=write(self.stacked.v, v),
            positions=write(self.stacked.positions, meta.positions),
        )
        return dataclasses.replace(self, stacked=stacked)

    def rope_append(
        self,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        meta: TokenPlaces,
        length: jax.Array,
        **options: Any,
    ) -> tuple[jax.Array, Self]:
        """As `KVCache.rope_append`; the layer's part is written where it is."""
        q, stacked = self.stacked.rope_append(
            *(q, k, v, meta, length), layer=self.index, **options
        )
        return q, dataclasses.replace(self, stacked=stacked)

    def attend(self, q: jax.Array, held: jax.Array, **options: Any) -> jax.Array:
        """As `KVCache.attend`; the layer's part is read where it is."""
        k, v = self.stacked.k, self.stacked.v
        return decode_attention(q, k, v, held, layer=self.index, **options)[0]

    def truncate(self, length: jax.Array) -> Self:
        """As `KVCache.truncate`."""
        positions = jax.lax.dynamic_update_index_in_dim(
            self.stacked.positions, _truncated(self.positions, length), self.index, 0
        )
        stacked = dataclasses.replace(self.stacked, positions=positions)
        return dataclasses.replace(self, stacked=stacked)

    def _row(self, array: jax.Array) -> jax.Array:
        return jax.lax.dynamic_index_in_dim(array, self.index, keepdims=False)


def _places(
    meta: TokenPlaces, length: jax.Array, slots: int
) -> tuple[jax.Array, jax.Array]:
    """Row and slot of each token, i32[B, T] both; padding gets a slot that is none."""
    rank = jnp.zeros_like(meta.positions)
    if rank.shape[1] > 1:  # a sum of one would be a launch of its own
        rank = jnp.cumsum(meta.is_real.astype(jnp.int32), axis=1) - 1
    slot = jnp.where(meta.is_real, length[:, None] + rank, slots)  # [B, T]
    return jnp.broadcast_to(jnp.arange(slot.shape[0])[:, None], slot.shape), slot


def _truncated(positions: jax.Array, length: jax.Array) -> jax.Array:
    """Positions i32[B, S] with -1 in the slots from `length` on."""
    slot = jnp.arange(positions.shape[1], dtype=jnp.int32)
    return jnp.where(slot[None, :] < length[:, None], positions, jnp.int32(-1))
