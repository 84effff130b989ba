"""W shifted multiply-adds over the whole sequence, in f32."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp


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


def _last_real(
    extended: jax.Array, run: jax.Array, is_real: jax.Array, width: int
) -> jax.Array:
    """The last W - 1 real inputs of the last document, zeros where it is younger."""
    kept = width - 1
    # Rank among the real tokens; the state's rows count as real and come first.
    real = jnp.pad(is_real, ((0, 0), (kept, 0)), constant_values=True)
    rank = jnp.cumsum(real.astype(jnp.int32), axis=1)  # [B, W - 1 + T]
    total = rank[:, -1:]
    wanted = total - jnp.arange(kept - 1, -1, -1, dtype=jnp.int32)[None]
    # [B, W - 1]: the first place that reaches a rank is the token of that rank.
    place = jnp.sum(rank[:, None, :] < wanted[:, :, None], axis=2, dtype=jnp.int32)
    last = jnp.max(jnp.where(real, run, 0), axis=1)
    same = jnp.take_along_axis(run, place, axis=1) == last[:, None]
    rows = jnp.take_along_axis(extended, place[:, :, None], axis=1)
    return jnp.where(same[:, :, None], rows, jnp.zeros_like(rows))


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
    if is_real is None:
        is_real = jnp.ones(x.shape[:2], bool)
    if run is None:
        run = jnp.zeros(extended.shape[:2], jnp.int32)
    return y, _last_real(extended, run, is_real, width)
