"""The recurrence token by token, as the Gated DeltaNet paper writes it."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def step(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    g: jax.Array,
    beta: jax.Array,
    state: jax.Array,
    *,
    scale: float,
) -> tuple[jax.Array, jax.Array]:
    """One token of the recurrence, all in f32.

    Args:
      q, k: f32[B, Hv, K], one query and key per value head.
      v: f32[B, Hv, V].
      g, beta: f32[B, Hv], log decay and writing strength.
      state: f32[B, Hv, V, K].
      scale: factor on the output.

    Returns:
      (o f32[B, Hv, V], state f32[B, Hv, V, K]).
    """
    state = jnp.exp(g)[:, :, None, None] * state
    error = beta[:, :, None] * (v - jnp.einsum("bhvk,bhk->bhv", state, k))
    state = state + jnp.einsum("bhv,bhk->bhvk", error, k)
    return scale * jnp.einsum("bhvk,bhk->bhv", state, q), state


def gated_delta_rule(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    g: jax.Array,
    beta: jax.Array,
    *,
    is_first: jax.Array,
    initial_state: jax.Array,
    scale: float,
) -> tuple[jax.Array, jax.Array]:
    """A scan over tokens; arguments and results as in `api.gated_delta_rule`."""
    group = v.shape[2] // k.shape[2]
    dtype = v.dtype
    # [B, T, Hv, K]: value head h reads key head h // group.
    q, k = (jnp.repeat(x.astype(jnp.float32), group, axis=2) for x in (q, k))
    v = v.astype(jnp.float32)

    def token(state, inputs):
        q, k, v, g, beta, first = inputs
        state = jnp.where(first[:, None, None, None], 0.0, state)
        o, state = step(q, k, v, g, beta, state, scale=scale)
        return state, o

    inputs = tuple(jnp.moveaxis(x, 1, 0) for x in (q, k, v, g, beta, is_first))
    state, o = jax.lax.scan(token, initial_state, inputs)
    return jnp.moveaxis(o, 0, 1).astype(dtype), state
