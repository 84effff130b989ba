"""Decoding token by token, as the Gated DeltaNet paper writes it, in f32.

Every function takes the rows that the slots name, not the pools; `pools.py` moves
them.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from pallas_kernels.gated_delta_step.layer import L2_EPS, Layer, Pending


def _convolved(layer: Layer, x: jax.Array, window: jax.Array) -> jax.Array:
    """SiLU of the convolution at the newest of [window, x], in x's dtype.

    Args:
      layer: its `conv_weight` [W, C].
      x: [B, C].
      window: [B, W - 1, C].

    Returns:
      [B, C].
    """
    inputs = jnp.concatenate([window.astype(x.dtype), x[:, None]], axis=1)
    z = jnp.einsum(
        "bwc,wc->bc",
        inputs.astype(jnp.float32),
        layer.conv_weight.astype(jnp.float32),
    )
    return jax.nn.silu(z).astype(x.dtype)


def _unit(x: jax.Array) -> jax.Array:
    square = jnp.sum(x.astype(jnp.float32) ** 2, axis=-1, keepdims=True)
    return (x.astype(jnp.float32) / jnp.sqrt(square + L2_EPS)).astype(x.dtype)


def _gates(layer: Layer, a: jax.Array, b: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Log decay g <= 0 and writing strength beta, f32[B, Hv] each."""
    g = -jnp.exp(layer.A_log)[None] * jax.nn.softplus(a + layer.dt_bias[None])
    beta = jax.nn.sigmoid(b)
    return g, 2.0 * beta if layer.negative_eigenvalues else beta


def _normed(layer: Layer, o: jax.Array, z: jax.Array) -> jax.Array:
    """The gated norm of o and z [B, Hv, V] over V."""
    u = o.astype(jnp.float32)
    rms = jnp.sqrt(jnp.mean(u**2, axis=-1, keepdims=True) + layer.norm_eps)
    y = u / rms * layer.norm_scale.astype(jnp.float32)[None, None]
    return (y * jax.nn.silu(z.astype(jnp.float32))).astype(o.dtype)


def step(
    layer: Layer,
    qkv: jax.Array,
    a: jax.Array,
    b: jax.Array,
    z: jax.Array,
    window: jax.Array,
    state: jax.Array,
    is_first: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array, Pending]:
    """One token.

    Args:
      layer: the parameters.
      qkv: [B, C].
      a, b: f32[B, Hv].
      z: [B, Hv * V].
      window: [B, W - 1, C], the raw inputs before this one.
      state: [B, Hv, V, K].
      is_first: bool[B], whether the state counts as zero.

    Returns:
      (y [B, Hv * V], the new window, the new state, what was written with T = 1).
    """
    batch, value_heads, value_dim, key_dim = state.shape
    d_key = layer.key_heads * key_dim
    q, k, v = jnp.split(_convolved(layer, qkv, window), (d_key, 2 * d_key), axis=-1)
    q, k = (_unit(x.reshape(batch, layer.key_heads, key_dim)) for x in (q, k))
    v = v.reshape(batch, value_heads, value_dim)
    g, beta = _gates(layer, a, b)
    group = value_heads // layer.key_heads
    # [B, Hv, K]: value head h reads key head h // group.
    q32, k32 = (jnp.repeat(x.astype(jnp.float32), group, axis=1) for x in (q, k))
    state = state.astype(jnp.float32)
    if is_first is not None:
        state = jnp.where(is_first[:, None, None, None], 0.0, state)
    state = jnp.exp(g)[:, :, None, None] * state
    missing = v.astype(jnp.float32) - jnp.einsum("bhvk,bhk->bhv", state, k32)
    written = beta[:, :, None] * missing
    state = state + jnp.einsum("bhv,bhk->bhvk", written, k32)
    o = key_dim**-0.5 * jnp.einsum("bhvk,bhk->bhv", state, q32)
    y = _normed(layer, o.astype(qkv.dtype), z.reshape(v.shape))
    window = jnp.concatenate([window, qkv[:, None].astype(window.dtype)], axis=1)
    pending = Pending(
        qkv=qkv[:, None],
        k=k[:, None],
        written=written[:, None],
        log_decay=g[:, None],
        is_first=None,
    )
    return y.reshape(batch, -1), window[:, 1:], state, pending


def verify(
    layer: Layer,
    qkv: jax.Array,
    a: jax.Array,
    b: jax.Array,
    z: jax.Array,
    window: jax.Array,
    state: jax.Array,
    is_first: jax.Array | None,
) -> tuple[jax.Array, Pending]:
    """`step` for each of T tokens; arguments and outputs with a T axis after B."""
    state = state.astype(jnp.float32)
    if is_first is not None:
        state = jnp.where(is_first[:, None, None, None], 0.0, state)

    def token(pools, tokens):
        y, window, state, pending = step(layer, *tokens, *pools)
        return (window, state), (y, pending)

    tokens = tuple(jnp.moveaxis(x, 1, 0) for x in (qkv, a, b, z))
    y, pending = jax.lax.scan(token, (window, state), tokens)[1]
    # [T, B, 1, ...] of each token.
    joined = jax.tree.map(lambda x: jnp.moveaxis(x[:, :, 0], 0, 1), pending)
    return jnp.moveaxis(y, 0, 1), dataclasses.replace(joined, is_first=is_first)


def commit(
    pending: Pending, accepted: jax.Array, window: jax.Array, state: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Writes the tokens before `accepted` one after the other.

    Args:
      pending: of `verify`.
      accepted: i32[B].
      window: [B, W - 1, C].
      state: [B, Hv, V, K].

    Returns:
      The new window, and the new state in f32.
    """
    group = pending.written.shape[2] // pending.k.shape[2]
    k = jnp.repeat(pending.k.astype(jnp.float32), group, axis=2)  # [B, T, Hv, K]

    state = state.astype(jnp.float32)

    def token(pools, inputs):
        window, state = pools
        x, k, written, g, taken = inputs
        shifted = jnp.concatenate([window[:, 1:], x[:, None]], axis=1)
        added = jnp.einsum("bhv,bhk->bhvk", written, k)
        updated = jnp.exp(g)[:, :, None, None] * state + added
        state = jnp.where(taken[:, None, None, None], updated, state)
        return (jnp.where(taken[:, None, None], shifted, window), state), None

    x = pending.qkv.astype(window.dtype)
    taken = jnp.arange(x.shape[1])[None] < accepted[:, None]
    inputs = (x, k, pending.written, pending.log_decay, taken)
    inputs = tuple(jnp.moveaxis(u, 1, 0) for u in inputs)
    return jax.lax.scan(token, (window, state), inputs)[0]
