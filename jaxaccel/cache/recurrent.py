"""State of a layer whose memory does not grow with the text."""

from __future__ import annotations

import dataclasses
from typing import Self

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels.gated_delta_step import Pending


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class RecurrentCache:
    """State of one Gated DeltaNet layer.

    Attributes:
      conv: [B, W - 1, C], the last inputs of the short convolution, newest last.
      state: [B, Hv, V, K], the associative memory, f32 or bf16.
    """

    conv: jax.Array
    state: jax.Array

    @classmethod
    def empty(
        cls,
        batch: int,
        conv_width: int,
        channels: int,
        num_value_heads: int,
        value_dim: int,
        key_dim: int,
        dtype: DTypeLike,
        state_dtype: DTypeLike = jnp.float32,
    ) -> Self:
        """Makes the state before any token; `dtype` is that of `conv` alone."""
        return cls(
            conv=jnp.zeros((batch, conv_width - 1, channels), dtype),
            state=jnp.zeros((batch, num_value_heads, value_dim, key_dim), state_dtype),
        )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class RecurrentCacheOfLayer:
    """One layer's part of a `RecurrentCache` of several layers; used in its place.

    A kernel that updates the state where it is can so do with the arrays of all layers
    that a loop carries, without a copy of a layer's part.

    Attributes:
      stacked: the cache, every array with a leading [num_periods] axis.
      index: i32[], the layer's row of that axis.
    """

    stacked: RecurrentCache
    index: jax.Array

    @property
    def row(self) -> RecurrentCache:
        """The layer's part, read."""
        return jax.tree.map(
            lambda leaf: jax.lax.dynamic_index_in_dim(leaf, self.index, keepdims=False),
            self.stacked,
        )

    def replace(self, row: RecurrentCache) -> Self:
        """The same with the layer's part replaced."""
        stacked = jax.tree.map(
            lambda leaf, part: jax.lax.dynamic_update_index_in_dim(
                leaf, part, self.index, 0
            ),
            self.stacked,
            row,
        )
        return dataclasses.replace(self, stacked=stacked)

    @property
    def pools(self) -> RecurrentCache:
        """All layers' parts as pools [num_periods * B, ...]; no copy."""
        return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), self.stacked)

    @property
    def slots(self) -> jax.Array:
        """i32[B], where the layer's rows are in `pools`."""
        batch = self.stacked.state.shape[1]
        first = self.index.astype(jnp.int32) * batch
        return first + jnp.arange(batch, dtype=jnp.int32)

    def with_pools(self, conv: jax.Array, state: jax.Array) -> Self:
        """The same with new pools."""
        stacked = RecurrentCache(
            conv=conv.reshape(self.stacked.conv.shape),
            state=state.reshape(self.stacked.state.shape),
        )
        return dataclasses.replace(self, stacked=stacked)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class PendingRecurrent:
    """Tokens that one Gated DeltaNet layer has seen but not kept.

    Attributes:
      cache: the state before them.
      tokens: what they would write.
    """

    cache: RecurrentCache
    tokens: Pending
