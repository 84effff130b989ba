"""The attention as XLA runs it well: 16-bit keys of the chosen chunks, one softmax."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.sparse_decode_attention.held import Held, Rotary
from pallas_kernels.sparse_decode_attention.reference import attend, counted, rotated


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
    width = q.shape[2]
    batch, groups, chosen = ids.shape
    chunk = held.a.shape[-2]
    row = jnp.arange(batch, dtype=jnp.int32)[:, None, None]
    head = jnp.arange(groups, dtype=jnp.int32)[None, :, None]

    def take(array: jax.Array, *where: Any) -> jax.Array:
        # Of all layers' arrays, without a copy of the layer's.
        return array[where] if layer is None else array[(layer, *where)]

    k = jnp.einsum(
        "bgncr,bgkr->bgnck",
        take(held.a, row, ids),
        held.basis,
        preferred_element_type=jnp.float32,
    ).reshape(batch, groups, -1, width)
    offset = jnp.arange(chunk, dtype=jnp.int32)[None, None, None]
    positions = held.first[row, ids][..., None] + offset
    k = rotated(k, positions.reshape(batch, groups, -1), rotary)
    v = take(held.values, row, head, slots)
    out = held.of_layer(layer)

    def tokens(x):
        return x.reshape(batch, groups, -1, width)

    keys = [k.astype(held.ring_k.dtype), tokens(out.out_k), held.ring_k]
    values = [tokens(v), tokens(out.out_v), held.ring_v]
    return attend(
        q,
        jnp.concatenate(keys, axis=2),
        jnp.concatenate(values, axis=2),
        counted(held, count, chosen),
        scale,
        logit_cap,
        sinks,
    )
