"""State of a layer whose memory does not grow with the text."""

from __future__ import annotations

import dataclasses
from typing import Self

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class RecurrentCache:
    """State of one Gated DeltaNet layer.

    Attributes:
      conv: [B, W - 1, C], the last inputs of the short convolution, newest last.
      state: f32[B, Hv, V, K], the associative memory.
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
    ) -> Self:
        """Makes the state before any token; `dtype` is that of `conv` alone."""
        return cls(
            conv=jnp.zeros((batch, conv_width - 1, channels), dtype),
            state=jnp.zeros((batch, num_value_heads, value_dim, key_dim), jnp.float32),
        )
