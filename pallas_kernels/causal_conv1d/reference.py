"""The convolution as a loop over output tokens' windows, in f32."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def causal_conv1d(
    x: jax.Array,
    weight: jax.Array,
    *,
    bias: jax.Array | None,
    is_first: jax.Array | None,
    is_real: jax.Array | None,
    initial_state: jax.Array,
    activation: str | None,
) -> tuple[jax.Array, jax.Array]:
    """A scan over tokens that carries the window; as in `api.causal_conv1d`."""
    batch, time, _ = x.shape
    if is_first is None:
        is_first = jnp.zeros((batch, time), bool)
    if is_real is None:
        is_real = jnp.ones((batch, time), bool)
    taps = weight.astype(jnp.float32)
    offset = 0.0 if bias is None else bias.astype(jnp.float32)[None, :]

    def token(carry, inputs):
        window, state = carry  # [B, W - 1, D] each
        x, first, real = inputs
        window = jnp.where(first[:, None, None], jnp.zeros_like(window), window)
        state = jnp.where(first[:, None, None], jnp.zeros_like(state), state)
        window = jnp.concatenate([window, x[:, None]], axis=1)  # [B, W, D]
        z = jnp.einsum("bwd,wd->bd", window.astype(jnp.float32), taps) + offset
        y = z * jax.nn.sigmoid(z) if activation == "silu" else z
        shifted = jnp.concatenate([state, x[:, None]], axis=1)[:, 1:]
        state = jnp.where(real[:, None, None], shifted, state)
        return (window[:, 1:], state), y.astype(x.dtype)

    inputs = tuple(jnp.moveaxis(a, 1, 0) for a in (x, is_first, is_real))
    (_, state), y = jax.lax.scan(token, (initial_state, initial_state), inputs)
    return jnp.moveaxis(y, 0, 1), state
