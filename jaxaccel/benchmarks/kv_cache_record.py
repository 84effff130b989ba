"""Queries, keys and values of a whole prompt, layer by layer, as dense attention has
them."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jaxaccel.cache.decoder import DecoderCache
from jaxaccel.cache.layer_state import AttentionSpec, LayerState, Tokens
from jaxaccel.cache.plan import PolicyCache
from jaxaccel.cache.policy import CachePolicy
from jaxaccel.decoding.cached import read_prompts


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Record(LayerState):
    """What a layer's attention was given; with all layers, a leading axis of them.

    Attributes:
      q: [B, T, H, K] after the rotary embedding.
      k_pre, k: [B, T, G, K] before and after it.
      v: [B, T, G, K].
    """

    q: jax.Array
    k_pre: jax.Array
    k: jax.Array
    v: jax.Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class _RecordConfig(CachePolicy):
    """Keeps a prompt as it came, and attends densely."""

    def init(
        self, spec: AttentionSpec, batch: int, max_length: int, dtype: Any
    ) -> Record:
        """As `CachePolicy.init`."""
        kv = (batch, max_length, spec.num_kv_heads, spec.head_dim)
        return Record(
            q=jnp.zeros((batch, max_length, spec.num_heads, spec.head_dim), dtype),
            **{name: jnp.zeros(kv, dtype) for name in ("k_pre", "k", "v")},
        )

    def prefill(
        self, state: LayerState, tokens: Tokens, spec: AttentionSpec
    ) -> LayerState:
        """As `CachePolicy.prefill`."""
        del spec
        return state.replace(**{n: getattr(tokens, n) for n in Record.names()})


def record_prompt(model: Any, tokens: jax.Array) -> Record:
    """Reads rows by dense attention and keeps what its layers were given.

    Args:
      model: a `Decoder` of attention layers of one kind.
      tokens: i32[B, T], without padding.

    Returns:
      Arrays [layers, B, T, ...].
    """
    batch, time = tokens.shape
    spec, config = model.layers[0].mixer.cache_spec, model.config
    policies = [_RecordConfig()] * config.num_layers
    layer = PolicyCache.init(policies, spec, batch, time, config.compute_dtype)
    cache = DecoderCache(layers=(layer,), length=jnp.zeros((batch,), jnp.int32))
    _, cache = read_prompts(model, tokens, jnp.ones_like(tokens), cache)
    after = cache.layers[0]
    assert isinstance(after, PolicyCache)
    held = after.states[0]
    assert isinstance(held, Record)
    return held


def layer_tokens(record: Record, layer: jax.Array, where: jax.Array) -> Tokens:
    """Tokens i32[T] of every row of one layer, as a cache is given them.

    Queries before the rotary embedding, which only a prompt's own attention would ask
    for, are those after it.
    """

    def take(name: str) -> jax.Array:
        held = jax.lax.dynamic_index_in_dim(
            getattr(record, name), layer, keepdims=False
        )
        return held[:, where]

    q, k_pre, k, v = (take(name) for name in ("q", "k_pre", "k", "v"))
    shape = q.shape[:2]
    return Tokens(
        q_pre=q,
        k_pre=k_pre,
        q=q,
        k=k,
        v=v,
        positions=jnp.broadcast_to(where, shape),
        is_real=jnp.ones(shape, bool),
    )
