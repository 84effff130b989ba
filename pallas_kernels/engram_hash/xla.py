"""The hash in 32-bit integers, all tokens at once.

Products have 63 bits. They are kept as two 32-bit halves, and the remainder of the
pair is taken a few bits at a time, which needs no wider type.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.engram_hash.host import STOP
from pallas_kernels.engram_hash.layout import HashLayout


def hash_windows(windows: list[jax.Array], layout: HashLayout) -> jax.Array:
    """Row numbers i32[B, T, L, C] from what each token looks back at.

    Args:
      windows: N arrays u32[B, T], the i-th holds the compressed id i tokens before.
      layout: multipliers and primes of L layers.
    """
    layers = [_rows(windows, layout, layer) for layer in range(layout.num_layers)]
    return jnp.stack(layers, axis=2)


def windows(
    tokens: jax.Array,
    *,
    is_first: jax.Array | None,
    is_last: jax.Array | None,
    is_dead: jax.Array | None,
    is_real: jax.Array | None,
    history: jax.Array,
) -> tuple[list[jax.Array], jax.Array]:
    """What each token looks back at.

    Padding is passed over: real tokens first move together, so that the i-th token
    before another is always i places before it.

    Args:
      tokens: i32[B, T] compressed ids.
      is_first, is_last, is_dead, is_real: bool[B, T], see `api.engram_hash`.
      history: i32[B, N - 1].

    Returns:
      (N arrays i32[B, T], the i-th holds the token i before, `STOP` where none is
      seen; the new history).
    """
    batch, time = tokens.shape
    kept = history.shape[1]
    own = tokens if is_dead is None else jnp.where(is_dead, STOP, tokens)
    # What later tokens see of this one.
    seen = own if is_last is None else jnp.where(is_last, STOP, own)
    count = jnp.full((batch, 1), time, jnp.int32)
    if is_real is not None:
        order = jnp.argsort(~is_real, axis=1, stable=True).astype(jnp.int32)
        move = functools.partial(jnp.take_along_axis, indices=order, axis=1)
        own, seen = move(own), move(seen)
        is_first = None if is_first is None else move(is_first)
        count = jnp.sum(is_real, axis=1, keepdims=True, dtype=jnp.int32)
    row = jnp.concatenate([history, seen], axis=1)  # [B, N - 1 + T]
    document = None
    if is_first is not None:
        document = jnp.cumsum(is_first.astype(jnp.int32), axis=1)
        document = jnp.pad(document, ((0, 0), (kept, 0)))

    visible = own >= 0
    found = [own]
    for i in range(1, kept + 1):
        before = row[:, kept - i : kept - i + time]
        visible = visible & (before >= 0)
        if document is not None:
            there = document[:, kept - i : kept - i + time]
            visible = visible & (there == document[:, kept:])
        found.append(jnp.where(visible, before, STOP))
    if is_real is not None:
        place = jnp.maximum(jnp.cumsum(is_real.astype(jnp.int32), axis=1) - 1, 0)
        found = [
            jnp.where(is_real, jnp.take_along_axis(w, place, axis=1), STOP)
            for w in found
        ]
    return found, _last(row, document, count, kept)


def _last(
    row: jax.Array, document: jax.Array | None, count: jax.Array, kept: int
) -> jax.Array:
    """i32[B, N - 1]: the window of the token that will follow, newest last."""
    visible = jnp.ones(count.shape, bool)
    history = []
    newest = count + (kept - 1)  # [B, 1]
    for i in range(kept):
        before = jnp.take_along_axis(row, newest - i, axis=1)
        visible = visible & (before >= 0)
        if document is not None:
            there = jnp.take_along_axis(document, newest - i, axis=1)
            here = jnp.take_along_axis(document, newest, axis=1)
            visible = visible & (there == here)
        history.append(jnp.where(visible, before, STOP))
    if not history:
        return row[:, :0]
    return jnp.concatenate(history[::-1], axis=1)


def multiply_high(a: jax.Array, b: jax.Array) -> jax.Array:
    """The upper half of u32 * u32, by 16-bit limbs, which every backend can."""
    low = jnp.uint32(0xFFFF)
    a0, a1, b0, b1 = a & low, a >> 16, b & low, b >> 16
    p01, p10 = a0 * b1, a1 * b0
    middle = ((a0 * b0) >> 16) + (p01 & low) + (p10 & low)
    return a1 * b1 + (p01 >> 16) + (p10 >> 16) + (middle >> 16)


def remainder(high: jax.Array, low: jax.Array, primes: Any) -> jax.Array:
    """(high 2^32 + low) mod p in u32, long division a few bits at a time.

    Args:
      high, low: u32[...].
      primes: u32[...] that broadcasts to them, all below 2^31, known when traced.

    Returns:
      u32[...].
    """
    widest = int(np.max(np.asarray(primes))).bit_length()
    step = 32 - widest
    primes = jnp.asarray(primes)
    rest, left = high % primes, 32
    while left:
        bits = min(step, left)
        left -= bits
        digit = (low >> left) & jnp.uint32((1 << bits) - 1)
        rest = ((rest << bits) | digit) % primes
    return rest


def _rows(x: list[jax.Array], layout: HashLayout, layer: int) -> jax.Array:
    """i32[B, T, C]: the row numbers of one layer."""
    high = low = jnp.zeros(x[0].shape, jnp.uint32)
    columns = []
    primes = np.asarray(layout.primes[layer], np.uint32)
    primes = primes.reshape(len(layout.orders), 1, 1, layout.heads)
    for i, m in enumerate(layout.multipliers[layer]):
        m_high, m_low = jnp.uint32(m >> 32), jnp.uint32(m & 0xFFFFFFFF)
        # No carry is lost: the whole product is below 2^63.
        low = low ^ (x[i] * m_low)
        high = high ^ (multiply_high(x[i], m_low) + x[i] * m_high)
        if i + 1 in layout.orders:
            own = primes[layout.orders.index(i + 1)]
            columns.append(remainder(high[..., None], low[..., None], own))
    ids = jnp.concatenate(columns, axis=-1).astype(jnp.int32)
    offsets = jnp.asarray(layout.offsets[layer].astype(np.int32))
    return ids + offsets[None, None, :]
