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
class PendingRecurrent:
    """Tokens that one Gated DeltaNet layer has seen but not kept.

    Attributes:
      cache: the state before them.
      tokens: what they would write.
    """

    cache: RecurrentCache
    tokens: Pending
