"""The hash as the paper has it: 64-bit integers, one token after the other."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.engram_hash.host import STOP
from pallas_kernels.engram_hash.layout import HashLayout


def _stopped(window: jax.Array) -> jax.Array:
    """Everything behind a `STOP` is one too."""
    lowest = jax.lax.cummin(window, axis=1)
    return jnp.where(lowest < 0, STOP, window)


def engram_hash(
    tokens: jax.Array,
    layout: HashLayout,
    *,
    is_first: jax.Array | None,
    is_last: jax.Array | None,
    is_dead: jax.Array | None,
    is_real: jax.Array | None,
    history: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """A scan that carries the window; arguments and results as in `api.engram_hash`."""

    def flags(array: jax.Array | None, default: bool) -> jax.Array:
        return jnp.full(tokens.shape, default) if array is None else array

    def token(past, inputs):
        own, first, last, dead, real = inputs  # [B] each
        past = jnp.where(first[:, None], STOP, past)  # [B, N - 1], newest first
        own = jnp.where(dead, STOP, own)
        window = _stopped(jnp.concatenate([own[:, None], past], axis=1))
        window = jnp.where(real[:, None], window, STOP)
        own = jnp.where(last, STOP, own)
        pushed = _stopped(jnp.concatenate([own[:, None], past], axis=1)[:, :-1])
        return jnp.where(real[:, None], pushed, past), window

    inputs = (
        tokens,
        *(flags(a, False) for a in (is_first, is_last, is_dead)),
        flags(is_real, True),
    )
    past, windows = jax.lax.scan(
        token, history[:, ::-1], tuple(jnp.moveaxis(a, 1, 0) for a in inputs)
    )
    windows = jnp.moveaxis(windows, 0, 1)  # [B, T, N]
    x = jnp.where(windows < 0, layout.pad_id, windows)
    return _rows(x, layout), past[:, ::-1]


def _rows(x: jax.Array, layout: HashLayout) -> jax.Array:
    """id_(t,n,h) = (xor_(i<n) x_(t-i) m_i) mod p_(n,h) + offset_(n,h)."""
    with jax.enable_x64(True):
        x = jax.lax.convert_element_type(x, jnp.int64)
        layers = []
        for layer in range(layout.num_layers):
            columns = []
            for place, order in enumerate(layout.orders):
                mix = jnp.zeros(x.shape[:2], jnp.int64)
                for i in range(order):
                    m = jnp.int64(layout.multipliers[layer][i])
                    mix = jnp.bitwise_xor(mix, x[..., i] * m)
                for head in range(layout.heads):
                    c = place * layout.heads + head
                    p = jnp.int64(layout.primes[layer][c])
                    start = jnp.int64(int(layout.offsets[layer, c]))
                    columns.append(jax.lax.rem(mix, jnp.full_like(mix, p)) + start)
            layers.append(jnp.stack(columns, axis=-1))
        ids = jnp.stack(layers, axis=2)  # [B, T, L, C]
        return jax.lax.convert_element_type(ids, jnp.int32)
