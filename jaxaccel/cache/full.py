"""All tokens, in one block a row."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jaxaccel.cache.attend import decode_attention, held_attention
from jaxaccel.cache.layer_state import (
    AttentionSpec,
    LayerState,
    Tokens,
    by_head,
    rows_of,
)
from jaxaccel.cache.policy import CachePolicy, Selection, check_room


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class FullState(LayerState):
    """All keys and values; token p of a row is in slot p.

    Attributes:
      k: [B, G, S, K], after the rotary embedding.
      v: [B, G, S, K].
      length: i32[B], tokens held.
    """

    k: jax.Array
    v: jax.Array
    length: jax.Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class DenseCacheConfig(CachePolicy):
    """Keeps all tokens, and reads all of them at every step."""

    def init(
        self, spec: AttentionSpec, batch: int, max_length: int, dtype: DTypeLike
    ) -> FullState:
        """As `CachePolicy.init`."""
        return FullState(**empty_tokens(spec, batch, max_length, dtype))

    def prefill(
        self, state: LayerState, tokens: Tokens, spec: AttentionSpec
    ) -> LayerState:
        """As `CachePolicy.prefill`."""
        del spec
        return keep_prompt(self, state, tokens)

    def append(
        self, state: LayerState, tokens: Tokens, spec: AttentionSpec
    ) -> LayerState:
        """As `CachePolicy.append`."""
        del spec
        return keep_token(state, tokens)

    def attend(
        self,
        state: LayerState,
        tokens: Tokens,
        selection: Selection | None,
        spec: AttentionSpec,
    ) -> tuple[jax.Array, jax.Array]:
        """As `CachePolicy.attend`."""
        del selection
        if spec.decode is not None:
            return held_attention(state, tokens, spec, None)
        k, v, length = state["k"], state["v"], state["length"]
        slot = jnp.arange(k.shape[2], dtype=jnp.int32)
        valid = (slot[None, :] < length[:, None])[:, None, :]
        return decode_attention(tokens.q, k, v, valid, spec, tokens.sinks)


def empty_tokens(
    spec: AttentionSpec, batch: int, max_length: int, dtype: DTypeLike
) -> dict[str, jax.Array]:
    """The arrays of `FullState`."""
    shape = (batch, spec.num_kv_heads, max_length, spec.head_dim)
    return {
        "k": jnp.zeros(shape, dtype),
        "v": jnp.zeros(shape, dtype),
        "length": jnp.zeros((batch,), jnp.int32),
    }


def keep_prompt(policy: CachePolicy, state: LayerState, tokens: Tokens) -> LayerState:
    """Writes a prompt to the first slots; what padding leaves there is never read.

    Raises:
      ValueError: the prompt has more tokens than there are slots.
    """
    check_room(policy, tokens.k.shape[1], state.size("k")[2], "slots")
    state = state.put_block("k", by_head(tokens.k), (0, 0, 0, 0))
    state = state.put_block("v", by_head(tokens.v), (0, 0, 0, 0))
    return state.replace(length=tokens.count)


def keep_token(state: LayerState, tokens: Tokens) -> LayerState:
    """Writes one token a row behind those that it holds."""
    length, is_real = state["length"], tokens.is_real[:, 0]
    slot = jnp.where(is_real, length, state.size("k")[2])
    where = (rows_of(length.shape[0]), slice(None), slot)
    state = state.put("k", where, tokens.k[:, 0]).put("v", where, tokens.v[:, 0])
    return state.replace(length=length + is_real.astype(jnp.int32))
