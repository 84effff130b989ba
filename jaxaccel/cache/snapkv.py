"""The prompt's tokens that its last queries look at, and what comes after them."""

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
    ring_positions,
    rows_of,
)
from jaxaccel.cache.policy import CachePolicy, Selection, padded_to


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class SnapKVState(LayerState):
    """The kept tokens of the prompt, and a ring of those from its last ones on.

    Attributes:
      k, v: [B, G, budget, K], the chosen tokens, in their order.
      positions: i32[B, G, budget], where they stood, -1 where there is none.
      ring_k, ring_v: [B, G, window + generated, K]; token p is in slot p mod the size.
      start: i32[B], the first token that is in the ring.
      length: i32[B], tokens read.
    """

    k: jax.Array
    v: jax.Array
    positions: jax.Array
    ring_k: jax.Array
    ring_v: jax.Array
    start: jax.Array
    length: jax.Array

    EMPTY: ClassVar[dict[str, Any]] = {"positions": -1}


@dataclasses.dataclass(frozen=True, kw_only=True)
class SnapKVCacheConfig(CachePolicy):
    """Keeps what the last queries of a prompt attend to, chosen once.

    Attributes:
      budget: tokens kept of the prompt, those of the window apart, per row and kv head.
      window: last tokens of the prompt, which are kept and whose queries choose.
      kernel: places over which their weights are averaged, odd: what stands beside a
        chosen token is likely kept, too.
      generated: generated tokens kept; the oldest make room for more.

    Source: SnapKV (arXiv 2404.14469), section 4; weights are averaged over the query
    heads of a kv head, which keeps one set of tokens for all of them.
    """

    budget: int = 256
    window: int = 64
    kernel: int = 5
    generated: int = 1024

    def __post_init__(self):
        super().__post_init__()
        self._require_positive("budget", "window", "kernel", "generated")
        if self.kernel % 2 == 0:
            raise ValueError(f"SnapKVCacheConfig: kernel={self.kernel} must be odd")

    def init(
        self, spec: AttentionSpec, batch: int, max_length: int, dtype: DTypeLike
    ) -> SnapKVState:
        """As `CachePolicy.init`; the size does not depend on `max_length`."""
        del max_length
        heads = (batch, spec.num_kv_heads)
        kept = (*heads, self.budget, spec.head_dim)
        ring = (*heads, self.window + self.generated, spec.head_dim)
        return SnapKVState(
            k=jnp.zeros(kept, dtype),
            v=jnp.zeros(kept, dtype),
            positions=jnp.full(kept[:3], -1, jnp.int32),
            ring_k=jnp.zeros(ring, dtype),
            ring_v=jnp.zeros(ring, dtype),
            start=jnp.zeros((batch,), jnp.int32),
            length=jnp.zeros((batch,), jnp.int32),
        )

    def prefill(
        self, state: LayerState, tokens: Tokens, spec: AttentionSpec
    ) -> LayerState:
        """As `CachePolicy.prefill`; a prompt may have any length."""
        count, time = tokens.count, tokens.k.shape[1]
        start = jnp.maximum(count - self.window, 0)
        token = jnp.arange(time, dtype=jnp.int32)
        is_prefix = (token[None, :] < start[:, None])[:, None, :]  # [B, 1, T]
        weights = self._observed_weights(tokens, start, spec)  # [B, G, T]
        pooled = _average(jnp.where(is_prefix, weights, 0.0), self.kernel)
        pooled = jnp.where(is_prefix, pooled, -jnp.inf)
        where, valid = best(pooled, min(self.budget, time))
        k, v = by_head(tokens.k), by_head(tokens.v)
        state = state.put_block("k", gather_tokens(k, where), (0, 0, 0, 0))
        state = state.put_block("v", gather_tokens(v, where), (0, 0, 0, 0))
        positions = padded_to(jnp.where(valid, where, -1), self.budget, 2, value=-1)
        ring = jnp.clip(
            ring_positions(count, self.window + self.generated), 0, time - 1
        )
        return state.replace(
            positions=positions,
            ring_k=gather_tokens(k, ring[:, None, :]),
            ring_v=gather_tokens(v, ring[:, None, :]),
            start=start,
            length=count,
        )

    def _observed_weights(
        self, tokens: Tokens, start: jax.Array, spec: AttentionSpec
    ) -> jax.Array:
        """What the last queries attend to, f32[B, G, T], summed over them."""
        time = tokens.k.shape[1]
        place = start[:, None] + jnp.arange(self.window, dtype=jnp.int32)[None, :]
        is_query = place < tokens.count[:, None]  # [B, window]
        index = jnp.minimum(place, time - 1)[:, :, None, None]
        q = jnp.take_along_axis(tokens.q, index, axis=1)
        scores = scores_of(q, by_head(tokens.k), spec)  # [B, G, R, window, T]
        token = jnp.arange(time, dtype=jnp.int32)[None, None, :]
        seen = (token <= place[:, :, None])[:, None, None]
        scores = jnp.where(seen, scores, -jnp.inf)
        weights = jax.nn.softmax(scores, axis=-1)
        weights = jnp.where(is_query[:, None, None, :, None], weights, 0.0)
        return jnp.mean(jnp.sum(weights, axis=3), axis=2)

    def append(
        self, state: LayerState, tokens: Tokens, spec: AttentionSpec
    ) -> LayerState:
        """As `CachePolicy.append`; no token is lost that is to be kept."""
        del spec
        length, is_real = state["length"], tokens.is_real[:, 0]
        size = self.window + self.generated
        slot = jnp.where(is_real, jnp.mod(length, size), size)
        where = (rows_of(length.shape[0]), slice(None), slot)
        state = state.put("ring_k", where, tokens.k[:, 0])
        state = state.put("ring_v", where, tokens.v[:, 0])
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
        kept = state["positions"] >= 0
        ring = ring_positions(state["length"], self.window + self.generated)
        in_ring = (ring >= 0) & (ring >= state["start"][:, None])
        in_ring = jnp.broadcast_to(in_ring[:, None], (*kept.shape[:2], ring.shape[1]))
        return decode_attention(
            tokens.q,
            jnp.concatenate([state["k"], state["ring_k"]], axis=2),
            jnp.concatenate([state["v"], state["ring_v"]], axis=2),
            jnp.concatenate([kept, in_ring], axis=2),
            spec,
            tokens.sinks,
        )


def _average(x: jax.Array, kernel: int) -> jax.Array:
    """The mean over `kernel` places around each of [B, G, T], 0 beyond the ends."""
    half = kernel // 2
    padded = jnp.pad(x, ((0, 0), (0, 0), (half, half)))
    places = [padded[..., i : i + x.shape[-1]] for i in range(kernel)]
    return sum(places[1:], places[0]) / kernel
