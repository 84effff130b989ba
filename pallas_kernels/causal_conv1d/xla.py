"""W shifted multiply-adds over the whole sequence, in f32."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from pallas_kernels.causal_conv1d import tables


@functools.partial(jax.checkpoint, static_argnums=(4,))
def _convolve(
    extended: jax.Array,
    weight: jax.Array,
    bias: jax.Array | None,
    run: jax.Array | None,
    activation: str | None,
) -> jax.Array:
    """The taps; rematerialised, so that no f32 copy of x is kept for the backward.

    Args:
      extended: [B, W - 1 + T, D], the state in front of x.
      weight: [W, D].
      bias: [D] or `None`.
      run: i32[B, W - 1 + T], documents counted from the state's 0; `None` if one.
      activation: "silu" or `None`.

    Returns:
      [B, T, D].
    """
    width = weight.shape[0]
    time = extended.shape[1] - width + 1
    taps = weight.astype(jnp.float32)
    z = jnp.zeros((), jnp.float32)
    for tap in range(width):
        term = extended[:, tap : tap + time].astype(jnp.float32) * taps[None, None, tap]
        if run is not None and tap < width - 1:
            same = run[:, tap : tap + time] == run[:, width - 1 :]
            term = jnp.where(same[:, :, None], term, 0.0)
        z = z + term if tap else term
    if bias is not None:
        z = z + bias.astype(jnp.float32)[None, None, :]
    if activation == "silu":
        z = z * jax.nn.sigmoid(z)
    return z.astype(extended.dtype)


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
    """Arguments and results as in `api.causal_conv1d`."""
    width = weight.shape[0]
    extended = jnp.concatenate([initial_state, x], axis=1)
    run = None
    if is_first is not None:
        run = jnp.cumsum(is_first.astype(jnp.int32), axis=1)
        run = jnp.pad(run, ((0, 0), (width - 1, 0)))
    y = _convolve(extended, weight, bias, run, activation)
    if width == 1:
        return y, initial_state
    if is_first is None and is_real is None:
        return y, extended[:, x.shape[1] :]
    place = tables.last_inputs(
        is_first, is_real, batch=x.shape[0], time=x.shape[1], kept=width - 1
    )
    return y, tables.take_inputs(x, initial_state, place)
