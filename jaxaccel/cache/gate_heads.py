"""Gated attention whose gate is computed first: closed heads need no attention.

The gate of y = g * attention(q) is known before the attention is, and an output of
attention is a mean of values. So a head whose gate is small cannot matter, whatever its
query looks for: |y| <= max(g) max|v|. What gates did at earlier steps says nothing of
the kind; attention's scores depend on the query alone.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from jaxaccel.cache.attend import decode_attention
from jaxaccel.cache.layer_state import AttentionSpec


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class GatedHeads:
    """Gated attention, and what was not computed for it.

    Attributes:
      y: f32[B, H, K], gate times attention; 0 in heads that were skipped.
      is_skipped: bool[B, H].
      bound: f32[B, H], the most by which an element of y is wrong; 0 in other heads.
      is_unread: bool[B, G], kv heads whose query heads were all skipped: only their
        keys and values need not be read.
    """

    y: jax.Array
    is_skipped: jax.Array
    bound: jax.Array
    is_unread: jax.Array


def largest_values(v: jax.Array, valid: jax.Array) -> jax.Array:
    """The largest magnitude of any value of a kv head.

    Kept between steps, a new token costs one comparison: the larger of the former
    number and the token's own.

    Args:
      v: [B, G, N, K].
      valid: bool[B, 1 or G, N].

    Returns:
      f32[B, G], 0 where nothing is valid.
    """
    size = jnp.max(jnp.abs(v.astype(jnp.float32)), axis=-1)
    return jnp.max(jnp.where(valid, size, 0.0), axis=-1)


def attend_open_heads(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    valid: jax.Array,
    gate: jax.Array,
    largest: jax.Array,
    spec: AttentionSpec,
    tolerance: float,
) -> GatedHeads:
    """Gated attention of one query a row, without heads that cannot matter.

    A head is skipped if its gate times the largest value of its kv head is at most the
    tolerance: this is also the bound of what is lost, of each element of its output;
    after an output projection with rows w of that head, of |w| sqrt(K) times as much.
    Shapes are fixed, so it is a kernel's to make use of the masks.

    Args:
      q: [B, 1, H, K].
      k, v: [B, G, N, K].
      valid: bool[B, 1 or G, N].
      gate: f32[B, H, K], behind its sigmoid.
      largest: f32[B, G], see `largest_values`.
      spec: the layer.
      tolerance: the most that an element may be wrong by, at least 0; with 0 the result
        is that of all heads.

    Returns:
      The result.

    Raises:
      ValueError: the tolerance is negative.
    """
    if tolerance < 0:
        raise ValueError(f"tolerance={tolerance} must not be negative")
    batch, groups = k.shape[:2]
    repeats = spec.num_heads // groups
    per_head = jnp.repeat(largest, repeats, axis=1)  # [B, H]
    error = jnp.max(jnp.abs(gate), axis=-1) * per_head
    is_skipped = error <= tolerance
    o, _ = decode_attention(q, k, v, valid, spec)
    y = jnp.where(is_skipped[..., None], 0.0, gate * o[:, 0])
    return GatedHeads(
        y=y,
        is_skipped=is_skipped,
        bound=jnp.where(is_skipped, error, 0.0),
        is_unread=jnp.all(is_skipped.reshape(batch, groups, repeats), axis=-1),
    )
