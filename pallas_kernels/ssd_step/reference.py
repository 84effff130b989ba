"""A token as the Mamba-2 paper writes it, in f32.

Every function takes the rows that the slots name, not the pools.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.ssd.reference import step_sizes, update
from pallas_kernels.ssd_step.layer import Layer


class Token(NamedTuple):
    """What the state takes and is read along, f32.

    x [B, H, V]; step [B, H]; b, c [B, H, N], one of each per head.
    """

    x: jax.Array
    step: jax.Array
    b: jax.Array
    c: jax.Array


def convolved(
    layer: Layer, xbc: jax.Array, dt: jax.Array, window: jax.Array, entry: tuple
) -> tuple[Token, jax.Array]:
    """The convolution with SiLU at the newest of [window, xbc], and step sizes.

    Args:
      layer: the parameters.
      xbc: [B, C].
      dt: f32[B, H].
      window: [B, W - 1, C].
      entry: (H, V, N).

    Returns:
      The token, and the new window.
    """
    heads, dim, size = entry
    batch, groups = xbc.shape[0], layer.groups
    inputs = jnp.concatenate([window.astype(xbc.dtype), xbc[:, None]], axis=1)
    total = jnp.einsum(
        "bwc,wc->bc",
        inputs.astype(jnp.float32),
        layer.conv_weight.astype(jnp.float32),
    )
    total = total + layer.conv_bias.astype(jnp.float32)[None]
    # Rounded, as the layer rounds it over whole sequences.
    channels = jax.nn.silu(total).astype(xbc.dtype).astype(jnp.float32)
    borders = (heads * dim, heads * dim + groups * size)
    x, b, c = jnp.split(channels, borders, axis=-1)
    b, c = (
        jnp.repeat(m.reshape(batch, groups, size), heads // groups, axis=1)
        for m in (b, c)
    )
    step = step_sizes(dt, layer.dt_bias, dt_limit=layer.dt_limit)
    token = Token(x=x.reshape(batch, heads, dim), step=step, b=b, c=c)
    return token, inputs[:, 1:].astype(window.dtype)


def normed(layer: Layer, y: jax.Array, z: jax.Array) -> jax.Array:
    """The norm over each group's channels behind the gate: y f32, z [B, H * V]."""
    u = y.astype(z.dtype).astype(jnp.float32) * jax.nn.silu(z.astype(jnp.float32))
    by_group = u.reshape(z.shape[0], layer.groups, -1)
    square = jnp.mean(by_group**2, axis=-1, keepdims=True)
    u = (by_group * jax.lax.rsqrt(square + layer.norm_eps)).reshape(z.shape)
    return (u * layer.norm_scale.astype(jnp.float32)[None]).astype(z.dtype)


def step(
    layer: Layer,
    xbc: jax.Array,
    dt: jax.Array,
    z: jax.Array,
    window: jax.Array,
    state: jax.Array,
    is_first: jax.Array | None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """One token.

    Args:
      layer: the parameters.
      xbc: [B, C].
      dt: f32[B, H].
      z: [B, H * V].
      window: [B, W - 1, C], the raw inputs before this one.
      state: [B, H, V, N].
      is_first: bool[B], whether the state counts as zero.

    Returns:
      (y [B, H * V], the new window, the new state f32).
    """
    token, window = convolved(layer, xbc, dt, window, state.shape[1:])
    before = state.astype(jnp.float32)
    if is_first is not None:
        before = jnp.where(is_first[:, None, None, None], 0.0, before)
    a = -jnp.exp(layer.A_log)
    y, state = update(token.x, token.step, a, token.b, token.c, before)
    y = y + layer.D[None, :, None] * token.x
    return normed(layer, y.reshape(z.shape), z), window, state
