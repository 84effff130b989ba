"""The attention as it is written: every key is made, then one softmax over all."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.sparse_decode_attention.held import Held, Rotary


_HIGHEST = jax.lax.Precision.HIGHEST


def rotated(k: jax.Array, positions: jax.Array, rotary: Rotary | None) -> jax.Array:
    """Keys f32[B, G, N, K] at positions i32[B, G, N]."""
    if rotary is None:
        return k
    per_position = jnp.asarray(np.array(rotary.frequencies), jnp.float32)
    angle = positions[..., None].astype(jnp.float32) * per_position[None, None, None]
    cos, sin = jnp.cos(angle) * rotary.factor, jnp.sin(angle) * rotary.factor
    one, two = jnp.split(k, 2, axis=-1)
    return jnp.concatenate([one * cos - two * sin, two * cos + one * sin], axis=-1)


def sparse_decode_attention(
    q: jax.Array,
    held: Held,
    ids: jax.Array,
    slots: jax.Array,
    count: jax.Array,
    *,
    rotary: Rotary | None,
    scale: float,
    logit_cap: float | None,
    sinks: jax.Array | None,
    layer: jax.Array | None,
) -> tuple[jax.Array, jax.Array]:
    """Arguments and results as in `api.sparse_decode_attention`."""
    held = held.of_layer(layer)
    batch, width = q.shape[0], q.shape[2]
    groups, chosen = ids.shape[1:]
    chunk = held.a.shape[2]
    row = jnp.arange(batch, dtype=jnp.int32)[:, None, None]
    head = jnp.arange(groups, dtype=jnp.int32)[None, :, None]
    k = jnp.einsum(
        "bgncr,bgkr->bgnck",
        held.a[row, ids].astype(jnp.float32),
        held.basis.astype(jnp.float32),
        precision=_HIGHEST,
    ).reshape(batch, groups, -1, width)
    offset = jnp.arange(chunk, dtype=jnp.int32)[None, None, None]
    positions = held.first[row, ids][..., None] + offset
    k = rotated(k, positions.reshape(batch, groups, -1), rotary)
    # As a cache would hold it.
    k = k.astype(held.ring_k.dtype)
    v = held.values[row, head, slots].reshape(batch, groups, -1, width)

    def tokens(x):
        return x.reshape(batch, groups, -1, width)

    valid = counted(held, count, chosen)
    k = jnp.concatenate([k, tokens(held.out_k), held.ring_k], axis=2)
    v = jnp.concatenate([v, tokens(held.out_v), held.ring_v], axis=2)
    return attend(q, k, v, valid, scale, logit_cap, sinks)


def counted(held: Held, count: jax.Array, chosen: int) -> jax.Array:
    """Which tokens count, bool[B, G, N c + O c + R]."""
    batch, groups, outliers, chunk = held.out_k.shape[-5:-1]
    ring = held.ring_valid.shape[1]

    def tokens(number, size):  # of the first `number` chunks, i32[B, 1 or G]
        place = jnp.arange(size * chunk, dtype=jnp.int32)[None, None]
        valid = place < number[..., None] * chunk
        return jnp.broadcast_to(valid, (batch, groups, size * chunk))

    parts = (
        tokens(count, chosen),
        tokens(held.out_count[:, None], outliers),
        jnp.broadcast_to(held.ring_valid[:, None], (batch, groups, ring)),
    )
    return jnp.concatenate(parts, axis=-1)


def attend(q, k, v, valid, scale, logit_cap, sinks):
    """One softmax over tokens [B, G, S] in any order, of which some count."""
    batch, heads, width = q.shape
    groups = k.shape[1]
    q, k, v = (x.astype(jnp.float32) for x in (q, k, v))
    q = q.reshape(batch, groups, heads // groups, width)
    s = scale * jnp.einsum("bgrk,bgsk->bgrs", q, k, precision=_HIGHEST)
    if logit_cap is not None:
        s = logit_cap * jnp.tanh(s / logit_cap)
    s = jnp.where(valid[:, :, None], s, -jnp.inf)
    top = jnp.max(s, axis=-1, keepdims=True)
    if sinks is not None:
        sinks = sinks.astype(jnp.float32).reshape(1, groups, -1, 1)
        top = jnp.maximum(top, sinks)
    top = jnp.where(top > -jnp.inf, top, 0.0)
    p = jnp.exp(s - top)
    total = jnp.sum(p, axis=-1, keepdims=True)
    if sinks is not None:
        total = total + jnp.exp(sinks - top)
    # What does not count may be NaN, which a product with 0 would keep.
    v = jnp.where(valid[..., None], v, 0.0)
    o = jnp.einsum("bgrs,bgsk->bgrk", p, v, precision=_HIGHEST)
    o = o / jnp.where(total > 0, total, 1.0)
    lse = jnp.where(total > 0, top + jnp.log(total), -jnp.inf)
    return o.reshape(batch, heads, width), lse.reshape(batch, heads)
