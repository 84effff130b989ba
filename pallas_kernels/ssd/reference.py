"""The recurrence token by token, as the Mamba-2 paper writes it."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp


NO_LIMIT = (0.0, math.inf)


def step_sizes(
    dt: jax.Array,
    dt_bias: jax.Array | None = None,
    *,
    dt_limit: tuple[float, float] = NO_LIMIT,
    is_real: jax.Array | None = None,
) -> jax.Array:
    """`clip(softplus(dt + dt_bias), *dt_limit)`, zero on padding.

    The one place where step sizes are made, for whole rows and single tokens alike.

    Args:
      dt: f32[..., H], before the softplus.
      dt_bias: f32[H].
      dt_limit: least and largest step size.
      is_real: bool[...], false on padding, whose step of exactly zero neither decays
        the state nor writes to it.

    Returns:
      f32[..., H].
    """
    if dt_bias is not None:
        dt = dt + dt_bias.reshape((1,) * (dt.ndim - 1) + dt_bias.shape)
    dt = jax.nn.softplus(dt)
    low, high = dt_limit
    if low > 0:
        dt = jnp.maximum(dt, low)
    if high < math.inf:
        dt = jnp.minimum(dt, high)
    if is_real is None:
        return dt
    return jnp.where(is_real[..., None], dt, 0.0)


def update(
    x: jax.Array,
    dt: jax.Array,
    a: jax.Array,
    b: jax.Array,
    c: jax.Array,
    state: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """One token of the recurrence without the skip, all in f32.

    Args:
      x: f32[B, H, V].
      dt: f32[B, H], step sizes.
      a: f32[H].
      b, c: f32[B, H, N], one of each per head.
      state: f32[B, H, V, N].

    Returns:
      (y f32[B, H, V], state f32[B, H, V, N]).
    """
    decay = jnp.exp(dt * a[None, :])[:, :, None, None]
    written = jnp.einsum("bhv,bhn->bhvn", dt[:, :, None] * x, b)
    state = decay * state + written
    return jnp.einsum("bhvn,bhn->bhv", state, c), state


def ssd(
    x: jax.Array,
    dt: jax.Array,
    a: jax.Array,
    b: jax.Array,
    c: jax.Array,
    *,
    is_first: jax.Array,
    initial_state: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """A scan over tokens.

    Args:
      x: [B, T, H, V].
      dt: f32[B, T, H], step sizes as `step_sizes` makes them.
      a: f32[H].
      b, c: [B, T, G, N].
      is_first: bool[B, T].
      initial_state: f32[B, H, V, N].

    Returns:
      (y f32[B, T, H, V] without the skip, state f32[B, H, V, N]).
    """
    group = x.shape[2] // b.shape[2]
    x = x.astype(jnp.float32)
    # [B, T, H, N]: head h reads group h // (H / G).
    b, c = (jnp.repeat(m.astype(jnp.float32), group, axis=2) for m in (b, c))

    def token(state, inputs):
        x, dt, b, c, first = inputs
        state = jnp.where(first[:, None, None, None], 0.0, state)
        y, state = update(x, dt, a, b, c, state)
        return state, y

    inputs = tuple(jnp.moveaxis(m, 1, 0) for m in (x, dt, b, c, is_first))
    state, y = jax.lax.scan(token, initial_state, inputs)
    return jnp.moveaxis(y, 0, 1), state
