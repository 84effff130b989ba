"""The first tokens and the newest ones."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jaxaccel.cache.attend import decode_attention, prompt_attention
from jaxaccel.cache.layer_state import (
    AttentionSpec,
    LayerState,
    Tokens,
    by_head,
    gather_tokens,
    ring_positions,
    rows_of,
)
from jaxaccel.cache.policy import CachePolicy, Selection


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class StreamingState(LayerState):
    """Sinks and a ring of recent tokens.

    Attributes:
      k: [B, G, num_sinks + window, K]; those of the sinks before the rotary embedding
        if they move, all others after it.
      v: [B, G, num_sinks + window, K].
      length: i32[B], tokens read.
    """

    k: jax.Array
    v: jax.Array
    length: jax.Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class StreamingCacheConfig(CachePolicy):
    """Keeps the first tokens of a row, the attention sinks, and the newest.

    With `num_sinks=0` this is sliding-window attention.

    Attributes:
      num_sinks: first tokens kept for good.
      window: newest tokens kept, the query itself among them.
      move_sinks: rotate the sinks to the places in front of the window, so that no
        distance exceeds what the cache holds, as the method is published; else they
        stay where they were.

    Source: StreamingLLM (arXiv 2309.17453), section 3.2.
    """

    num_sinks: int = 4
    window: int = 1020
    move_sinks: bool = True

    def __post_init__(self):
        super().__post_init__()
        self._require_positive("window")
        if self.num_sinks < 0:
            raise ValueError(
                f"StreamingCacheConfig: num_sinks={self.num_sinks} must not be negative"
            )

    def init(
        self, spec: AttentionSpec, batch: int, max_length: int, dtype: DTypeLike
    ) -> StreamingState:
        """As `CachePolicy.init`; the size does not depend on `max_length`."""
        del max_length
        slots = self.num_sinks + self.window
        shape = (batch, spec.num_kv_heads, slots, spec.head_dim)
        return StreamingState(
            k=jnp.zeros(shape, dtype),
            v=jnp.zeros(shape, dtype),
            length=jnp.zeros((batch,), jnp.int32),
        )

    def attend_prompt(
        self, tokens: Tokens, spec: AttentionSpec, implementation: Any = None
    ) -> jax.Array:
        """As `CachePolicy.attend_prompt`, with sinks as a decoding step has them."""
        return prompt_attention(
            tokens,
            spec,
            budget=self.prefill_budget,
            num_sinks=self.prefill_sinks,
            move_sinks=self.move_sinks,
            implementation=implementation,
        )

    def prefill(
        self, state: LayerState, tokens: Tokens, spec: AttentionSpec
    ) -> LayerState:
        """As `CachePolicy.prefill`; a prompt may have any length."""
        del spec
        count = tokens.count
        where = jnp.maximum(self._positions(count), 0)  # [B, slots]
        where = jnp.minimum(where, tokens.k.shape[1] - 1)[:, None, :]
        k = gather_tokens(by_head(tokens.k), where)
        if self.move_sinks:
            k_pre = gather_tokens(by_head(tokens.k_pre), where)
            k = jnp.concatenate(
                [k_pre[:, :, : self.num_sinks], k[:, :, self.num_sinks :]], axis=2
            )
        v = gather_tokens(by_head(tokens.v), where)
        return state.replace(k=k, v=v, length=count)

    def append(
        self, state: LayerState, tokens: Tokens, spec: AttentionSpec
    ) -> LayerState:
        """As `CachePolicy.append`; no token is lost that the window covers."""
        del spec
        length, is_real = state["length"], tokens.is_real[:, 0]
        sinks = self.num_sinks
        slot = jnp.where(
            length < sinks, length, sinks + jnp.mod(length - sinks, self.window)
        )
        slot = jnp.where(is_real, slot, sinks + self.window)  # [B]
        k = tokens.k[:, 0]
        if self.move_sinks:
            k = jnp.where((length < sinks)[:, None, None], tokens.k_pre[:, 0], k)
        where = (rows_of(length.shape[0]), slice(None), slot)
        state = state.put("k", where, k).put("v", where, tokens.v[:, 0])
        return state.replace(length=length + is_real.astype(jnp.int32))

    def attend(
        self,
        state: LayerState,
        tokens: Tokens,
        selection: Selection | None,
        spec: AttentionSpec,
    ) -> tuple[jax.Array, jax.Array]:
        """As `CachePolicy.attend`."""
        del selection
        length, k = state["length"], state["k"]
        positions = self._positions(length)
        if self.move_sinks and self.num_sinks:
            ahead = jnp.maximum(length - (self.num_sinks + self.window), 0)
            moved = positions[:, : self.num_sinks] + ahead[:, None]
            sinks = spec.rotated(k[:, :, : self.num_sinks], moved[:, None, :])
            k = jnp.concatenate([sinks, k[:, :, self.num_sinks :]], axis=2)
        valid = (positions >= 0)[:, None, :]
        return decode_attention(tokens.q, k, state["v"], valid, spec, tokens.sinks)

    def _positions(self, length: jax.Array) -> jax.Array:
        """i32[B, slots], the token in each slot, -1 where there is none."""
        sink = jnp.arange(self.num_sinks, dtype=jnp.int32)[None, :]
        sink = jnp.where(sink < length[:, None], sink, -1)
        ring = ring_positions(length, self.window, self.num_sinks)
        return jnp.concatenate([sink, ring], axis=1)
