"""Attention with forget gates: chunks that are forgotten need not be read.

Scores are q.k + c_t - c_j with c the running sum of the gates' logarithms, which never
grows. So no score of a chunk can be above |q| max|k| + c_t - c_end, and one that is far
below the newest tokens' scores is below them in the softmax, too. Chunks are skipped
only if all of them together cannot weigh more than a tolerance.
"""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp

from jaxaccel.cache.attend import scores_of
from jaxaccel.cache.layer_state import AttentionSpec


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class ForgetfulAttention:
    """Attention over the chunks that were kept, and what is known of the others.

    Attributes:
      o: f32[B, H, K].
      is_pruned: bool[B, H, C], chunks that were skipped.
      bound: f32[B, H], the most weight that skipped tokens can have together: o is
        wrong by at most this times the largest distance between two values.
      is_unread: bool[B, G, C], chunks that all query heads of a kv head skipped: only
        their keys and values need not be read.
    """

    o: jax.Array
    is_pruned: jax.Array
    bound: jax.Array
    is_unread: jax.Array


def largest_keys(k: jax.Array, chunk: int) -> jax.Array:
    """The largest length of a key in each chunk, f32[B, G, C], of k [B, G, C c, K]."""
    length = jnp.linalg.norm(k.astype(jnp.float32), axis=-1)
    return jnp.max(length.reshape(*length.shape[:2], -1, chunk), axis=-1)


def attend_unforgotten(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    decay: jax.Array,
    length: jax.Array,
    largest: jax.Array,
    spec: AttentionSpec,
    *,
    chunk: int,
    tolerance: float,
) -> ForgetfulAttention:
    """Attention of the newest token of each row, without forgotten chunks.

    The newest chunk is always read; its largest score m is a lower bound of the
    softmax's normaliser. A chunk is skipped where no score of it can be above
    m + log(tolerance / tokens). Shapes are fixed, so it is a kernel's to make use of
    the masks.

    Args:
      q: [B, 1, H, K], of token `length` - 1.
      k, v: [B, G, N, K] with N = C `chunk`; what stands behind `length` is not used.
      decay: f32[B, H, N], running sums of log(forget gate), which must not grow along
        N; the token's own gate is in it.
      length: i32[B], tokens held, at least 1.
      largest: f32[B, G, C], see `largest_keys`.
      spec: the layer, without a cap on scores.
      chunk: tokens per chunk.
      tolerance: the most weight that may be lost, in 0..1; with 0 the result is that
        of all chunks.

    Returns:
      The result.

    Raises:
      ValueError: the tolerance is not in 0..1, or N is no multiple of `chunk`.
      NotImplementedError: the layer caps its scores.

    Source: Forgetting Transformer (arXiv 2503.02130) for the scores, adaptive
    computation pruning (arXiv 2504.06949) for skipping by a bound.
    """
    if not 0 <= tolerance < 1:
        raise ValueError(f"tolerance={tolerance}, allowed are 0 up to below 1")
    batch, groups, total, _ = k.shape
    if total % chunk:
        raise ValueError(f"keys are N={total} tokens, no multiple of chunk={chunk}")
    if spec.logit_cap is not None:
        raise NotImplementedError(
            f"scores with logit_cap={spec.logit_cap} are not bounded here"
        )
    repeats = spec.num_heads // groups
    token = jnp.arange(total, dtype=jnp.int32)
    is_held = token[None, :] < length[:, None]  # [B, N]
    now = jnp.take_along_axis(decay, (length - 1)[:, None, None], axis=2)  # [B, H, 1]
    past = jnp.where(is_held[:, None], now - decay, -jnp.inf)  # [B, H, N]
    scores = scores_of(q, k, spec)[:, :, :, 0].reshape(batch, spec.num_heads, total)
    scores = jnp.where(is_held[:, None], scores + past, -jnp.inf)

    newest = (length - 1) // chunk  # [B]
    of_chunk = token // chunk
    is_newest = (of_chunk[None, :] == newest[:, None])[:, None]
    floor = jnp.max(jnp.where(is_newest, scores, -jnp.inf), axis=-1)  # [B, H]

    query = jnp.linalg.norm(q[:, 0].astype(jnp.float32), axis=-1)  # [B, H]
    reach = abs(spec.scale) * query[..., None] * jnp.repeat(largest, repeats, axis=1)
    # Within a chunk the last token is forgotten least.
    least = now - decay.reshape(batch, spec.num_heads, -1, chunk)[..., -1]
    most = reach + least  # [B, H, C]
    number = jnp.arange(total // chunk, dtype=jnp.int32)
    is_older = (number[None, :] < newest[:, None])[:, None]
    limit = -math.inf if tolerance == 0 else math.log(tolerance)
    limit = floor + limit - jnp.log(length.astype(jnp.float32))[:, None]
    is_pruned = is_older & (most <= limit[..., None])

    kept = jnp.where(jnp.repeat(is_pruned, chunk, axis=-1), -jnp.inf, scores)
    weights = jax.nn.softmax(kept, axis=-1)
    grouped = weights.reshape(batch, groups, repeats, total)
    values = jnp.where(is_held[:, None, :, None], v, jnp.zeros((), v.dtype))
    o = jnp.einsum("bgrn,bgnk->bgrk", grouped, values.astype(jnp.float32))
    lost = jnp.where(is_pruned, chunk * jnp.exp(most - floor[..., None]), 0.0)
    by_group = is_pruned.reshape(batch, groups, repeats, -1)
    return ForgetfulAttention(
        o=o.reshape(batch, spec.num_heads, -1),
        is_pruned=is_pruned,
        bound=jnp.sum(lost, axis=-1),
        is_unread=jnp.all(by_group, axis=2),
    )
