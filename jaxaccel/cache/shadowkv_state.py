"""What ShadowKV keeps of a layer, and what it asks of a chunk."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from jaxaccel.cache.layer_state import LayerState


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class ShadowKVState(LayerState):
    """What `ShadowKVCacheConfig` keeps of a layer.

    W = G K is the width of all kv heads' keys together, C the places for chunks of c
    tokens, M the value slots, O the places for outliers, R the size of the ring.
    Chunks of the prompt have the numbers 0, 1, ...; those of generated tokens follow
    behind the longest prompt, with one number for all rows.

    Attributes:
      basis: [B, W, r], directions of the prompt's keys before the rotary embedding.
      rank_used: i32[B], directions that there are; the others are 0.
      a: [B, C, c, r], the chunks' keys in it.
      landmark: [B, G, C, K], the chunks' mean keys after the rotary embedding.
      excluded: bool[B, G, C], chunks that are not there, or kept as outliers.
      first: i32[B, C], position of the chunks' first tokens.
      values: [B, G, C, c K], in host memory where that is the tier.
      v_slot: [B, G, M, c K], some of them on the device.
      slot_chunk, slot_age: i32[B, G, M], see `SlotPlan`.
      out_k, out_v: [B, G, O, c, K], chunks kept as they are.
      out_count: i32[B], how many.
      ring_k, ring_v: [B, G, R, K], the newest tokens; token p is in slot p mod R.
      ring_a: [B, R, r], their keys in the basis.
      ring_residual: f32[B, R], the share of them that the basis misses.
      start: i32[B], tokens that are in chunks.
      seen_start, seen_outliers: i32[B], `start` and `out_count` at the last choice;
        what became a chunk after it is read from the ring, which has it still.
      length: i32[B], tokens read.
      next_chunk: i32[], the number of the next chunk of generated tokens.
      step: i32[], decoding steps.
      ids, is_chosen: i32 and bool[B, G, N], the last choice.
      energy: f32[B], the share of the prompt's keys that the basis holds, of squares.
      residual: f32[B], the largest share that it misses of a generated chunk.
      hits, misses: i32[B], chosen chunks that were in slots, and that were fetched.
    """

    basis: jax.Array
    rank_used: jax.Array
    a: jax.Array
    landmark: jax.Array
    excluded: jax.Array
    first: jax.Array
    values: jax.Array
    v_slot: jax.Array
    slot_chunk: jax.Array
    slot_age: jax.Array
    out_k: jax.Array
    out_v: jax.Array
    out_count: jax.Array
    ring_k: jax.Array
    ring_v: jax.Array
    ring_a: jax.Array
    ring_residual: jax.Array
    start: jax.Array
    seen_start: jax.Array
    seen_outliers: jax.Array
    length: jax.Array
    next_chunk: jax.Array
    step: jax.Array
    ids: jax.Array
    is_chosen: jax.Array
    energy: jax.Array
    residual: jax.Array
    hits: jax.Array
    misses: jax.Array

    EMPTY: ClassVar[dict[str, Any]] = {
        "excluded": True,
        "slot_chunk": -1,
        "slot_age": -1,
    }
    SHARED: ClassVar[tuple[str, ...]] = ("next_chunk", "step", "values", "v_slot")


def chunk_statistics(k: jax.Array) -> tuple[jax.Array, jax.Array]:
    """What a chunk's keys have in common, and how far one of them is from it.

    Args:
      k: [B, G, C, c, K], after the rotary embedding.

    Returns:
      f32[B, G, C, K], their mean, and f32[B, G, C], the smallest cosine between it and
      one of them; 0 where either is 0.
    """
    k = k.astype(jnp.float32)
    mean = jnp.mean(k, axis=3)
    dots = jnp.sum(k * mean[:, :, :, None], axis=-1)
    norms = jnp.linalg.norm(k, axis=-1) * jnp.linalg.norm(mean, axis=-1)[..., None]
    return mean, jnp.min(dots / jnp.where(norms > 0, norms, 1.0), axis=-1)
