"""The tokens that got the most attention so far, and the newest."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jaxaccel.cache.attend import decode_attention, scores_of
from jaxaccel.cache.choose import best
from jaxaccel.cache.layer_state import (
    AttentionSpec,
    LayerState,
    Tokens,
    by_head,
    gather_tokens,
    rows_of,
)
from jaxaccel.cache.policy import CachePolicy, Selection, padded_to


# Queries of a prompt whose weights are added up at a time: what is held is this many
# rows of the attention matrix.
_BLOCK = 128


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class H2OState(LayerState):
    """Tokens that a kv head keeps, in any order.

    Attributes:
      k, v: [B, G, heavy + recent, K].
      positions: i32[B, G, heavy + recent], -1 where a slot is empty.
      mass: f32[B, G, heavy + recent], the attention that a token got, of all queries
        and of all heads of the group.
      length: i32[B], tokens read.
    """

    k: jax.Array
    v: jax.Array
    positions: jax.Array
    mass: jax.Array
    length: jax.Array

    EMPTY: ClassVar[dict[str, Any]] = {"positions": -1}


@dataclasses.dataclass(frozen=True, kw_only=True)
class H2OCacheConfig(CachePolicy):
    """Keeps heavy hitters and recent tokens; the lightest of the others goes.

    Attributes:
      heavy: tokens kept for the attention that they got, per row and kv head.
      recent: newest tokens kept, the query itself among them.

    Source: H2O (arXiv 2306.14048), algorithm 1, with one set of tokens for the query
    heads of a kv head.
    """

    heavy: int = 512
    recent: int = 512

    def __post_init__(self):
        super().__post_init__()
        self._require_positive("heavy", "recent")

    def init(
        self, spec: AttentionSpec, batch: int, max_length: int, dtype: DTypeLike
    ) -> H2OState:
        """As `CachePolicy.init`; the size does not depend on `max_length`."""
        del max_length
        slots = (batch, spec.num_kv_heads, self.heavy + self.recent)
        return H2OState(
            k=jnp.zeros((*slots, spec.head_dim), dtype),
            v=jnp.zeros((*slots, spec.head_dim), dtype),
            positions=jnp.full(slots, -1, jnp.int32),
            mass=jnp.zeros(slots, jnp.float32),
            length=jnp.zeros((batch,), jnp.int32),
        )

    def prefill(
        self, state: LayerState, tokens: Tokens, spec: AttentionSpec
    ) -> LayerState:
        """As `CachePolicy.prefill`; a prompt may have any length.

        The mass is that of queries that see all before them, whatever
        `prefill_budget` says.
        """
        count, time = tokens.count, tokens.k.shape[1]
        mass = prompt_mass(tokens, spec)  # [B, G, T]
        token = jnp.arange(time, dtype=jnp.int32)
        old = (token[None, :] < (count - self.recent)[:, None])[:, None, :]
        heavy, is_heavy = best(jnp.where(old, mass, -jnp.inf), min(self.heavy, time))
        heavy = padded_to(heavy, self.heavy, 2)
        is_heavy = padded_to(is_heavy, self.heavy, 2, value=False)
        newest = jnp.arange(-self.recent, 0, dtype=jnp.int32)[None, :] + count[:, None]
        newest = jnp.broadcast_to(newest[:, None], (*heavy.shape[:2], self.recent))
        where = jnp.concatenate([heavy, newest], axis=2)
        held = jnp.concatenate([is_heavy, newest >= 0], axis=2)
        where = jnp.clip(where, 0, time - 1)
        return state.replace(
            k=gather_tokens(by_head(tokens.k), where),
            v=gather_tokens(by_head(tokens.v), where),
            positions=jnp.where(held, where, -1),
            mass=jnp.where(held, gather_tokens(mass, where), 0.0),
            length=count,
        )

    def append(
        self, state: LayerState, tokens: Tokens, spec: AttentionSpec
    ) -> LayerState:
        """As `CachePolicy.append`: in an empty slot, or over the lightest old token."""
        del spec
        is_real = tokens.is_real[:, 0]
        length = state["length"] + is_real.astype(jnp.int32)
        positions = state["positions"]
        batch, heads, slots = positions.shape
        is_old = positions < (length - self.recent)[:, None, None]
        weight = jnp.where(is_old, state["mass"], jnp.inf)
        weight = jnp.where(positions < 0, -jnp.inf, weight)
        slot = jnp.where(is_real[:, None], jnp.argmin(weight, axis=-1), slots)  # [B, G]
        where = (rows_of(batch)[:, None], rows_of(heads)[None, :], slot)
        place = jnp.broadcast_to(tokens.positions, (batch, heads))
        state = state.put("k", where, tokens.k[:, 0]).put("v", where, tokens.v[:, 0])
        state = state.put("positions", where, place)
        state = state.put("mass", where, jnp.zeros(slot.shape, jnp.float32))
        return state.replace(length=length)

    def select(
        self, state: LayerState, tokens: Tokens, spec: AttentionSpec
    ) -> tuple[None, LayerState]:
        """Adds the weights of this query; all that is held is read."""
        scores = scores_of(tokens.q, state["k"], spec)
        valid = (state["positions"] >= 0)[:, :, None, None]
        weights = _softmax(jnp.where(valid, scores, -jnp.inf), tokens.sinks)
        weights = jnp.sum(weights, axis=(2, 3))
        weights = jnp.where(tokens.is_real[:, :, None], weights, 0.0)
        return None, state.replace(mass=state["mass"] + weights)

    def attend(
        self,
        state: LayerState,
        tokens: Tokens,
        selection: Selection | None,
        spec: AttentionSpec,
    ) -> tuple[jax.Array, jax.Array]:
        """As `CachePolicy.attend`."""
        del selection
        valid = state["positions"] >= 0
        k, v = state["k"], state["v"]
        return decode_attention(tokens.q, k, v, valid, spec, tokens.sinks)


def prompt_mass(tokens: Tokens, spec: AttentionSpec) -> jax.Array:
    """The attention that each token of a prompt gets, f32[B, G, T].

    Args:
      tokens: the prompt, real tokens in front.
      spec: the layer.

    Returns:
      The sum over all queries and over the query heads of each kv head.
    """
    batch, time = tokens.k.shape[:2]
    size = min(_BLOCK, time)
    blocks = -(-time // size)
    q = padded_to(tokens.q, blocks * size, 1).reshape(batch, blocks, size, -1)
    q = jnp.swapaxes(q.reshape(*q.shape[:3], spec.num_heads, -1), 0, 1)
    k, count = by_head(tokens.k), tokens.count
    token = jnp.arange(time, dtype=jnp.int32)[None, None, :]

    def add(mass, block):
        number, q = block
        place = number * size + jnp.arange(size, dtype=jnp.int32)
        seen = (token <= place[None, :, None])[:, None, None]
        weights = _softmax(
            jnp.where(seen, scores_of(q, k, spec), -jnp.inf), tokens.sinks
        )
        is_query = place[None, :] < count[:, None]  # [B, size]
        weights = jnp.where(is_query[:, None, None, :, None], weights, 0.0)
        return mass + jnp.sum(weights, axis=(2, 3)), None

    empty = jnp.zeros((batch, spec.num_kv_heads, time), jnp.float32)
    numbers = jnp.arange(blocks, dtype=jnp.int32)
    return jax.lax.scan(add, empty, (numbers, q))[0]


def _softmax(scores: jax.Array, sinks: jax.Array | None) -> jax.Array:
    """Weights of f32[B, G, R, T, N] beside learned sinks f32[H]; 0 where masked."""
    largest = jnp.max(scores, axis=-1, keepdims=True)
    if sinks is not None:
        sinks = sinks.astype(jnp.float32).reshape(1, *scores.shape[1:3], 1, 1)
        largest = jnp.maximum(largest, sinks)
    largest = jnp.where(jnp.isfinite(largest), largest, 0.0)
    p = jnp.exp(scores - largest)
    total = jnp.sum(p, axis=-1, keepdims=True)
    if sinks is not None:
        total = total + jnp.exp(sinks - largest)
    return p / jnp.where(total > 0, total, 1.0)
