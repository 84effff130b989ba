"""Small integer tables that tell where documents begin and which inputs are kept."""

from __future__ import annotations

import jax
import jax.numpy as jnp


WORD_TOKENS = 16  # two bits a token
MAX_REACH = 3


def packed_reach(is_first: jax.Array) -> jax.Array:
    """How many earlier inputs each token sees, 0 to 3, in two bits.

    3 stands for three or more; inputs in front of the row count, so that only
    `is_first` ever hides one.

    Args:
      is_first: bool[B, T].

    Returns:
      i32[B, ceil(T / 16)]; token t has bits 2 (t % 16) and up of word t // 16, and all
      bits behind the row are set.
    """
    batch, time = is_first.shape
    reach = jnp.full((batch, time), MAX_REACH, jnp.int32)
    for distance in range(MAX_REACH, 0, -1):
        # A border `distance - 1` tokens back hides what is `distance` back.
        border = jnp.pad(is_first, ((0, 0), (distance - 1, 0)))[:, :time]
        reach = jnp.where(border, distance - 1, reach)
    padding = ((0, 0), (0, -time % WORD_TOKENS))
    reach = jnp.pad(reach, padding, constant_values=MAX_REACH)
    shifts = 2 * jnp.arange(WORD_TOKENS, dtype=jnp.int32)[None, None]
    words = jnp.left_shift(reach.reshape(batch, -1, WORD_TOKENS), shifts)
    return jnp.sum(words, axis=2, dtype=jnp.int32)  # no two words share a bit


def last_inputs(
    is_first: jax.Array | None,
    is_real: jax.Array | None,
    *,
    batch: int,
    time: int,
    kept: int,
) -> jax.Array:
    """The tokens whose inputs are the final state.

    Args:
      is_first, is_real: bool[B, T] or `None`, as in `api.causal_conv1d`.
      batch, time: B, T.
      kept: W - 1.

    Returns:
      i32[B, W - 1], oldest first: the last real tokens of the row's last document,
      which begins at the last `is_first`. Negative ones count back from the front of
      the row into the initial state; T stands for no input, which gives zeros.
    """
    if is_first is None and is_real is None:
        place = time - kept + jnp.arange(kept, dtype=jnp.int32)
        return jnp.broadcast_to(place[None], (batch, kept))
    token = jnp.arange(time, dtype=jnp.int32)[None]
    start = jnp.full((batch,), -kept, jnp.int32)
    if is_first is not None:
        start = jnp.max(jnp.where(is_first, token, -kept), axis=1, initial=-kept)
    real = jnp.ones((batch, time), bool) if is_real is None else is_real
    places = []
    below = jnp.full((batch,), time, jnp.int32)
    for _ in range(kept):
        allowed = real & (token >= start[:, None]) & (token < below[:, None])
        found = jnp.max(jnp.where(allowed, token, -1), axis=1, initial=-1)
        # Once the row has no more real tokens, the state follows backwards.
        below = jnp.where(found >= 0, found, jnp.minimum(below, 0) - 1)
        places.append(jnp.where(below >= start, below, time))
    return jnp.stack(places[::-1], axis=1)


def take_inputs(x: jax.Array, state: jax.Array, place: jax.Array) -> jax.Array:
    """The inputs [B, W - 1, C] at what `last_inputs` gave.

    Args:
      x: [B, T, C].
      state: [B, W - 1, C], the inputs in front of x.
      place: i32[B, W - 1].
    """
    time, kept = x.shape[1], state.shape[1]
    if time == 0:
        return state
    inside = jnp.take_along_axis(x, jnp.clip(place, 0, time - 1)[:, :, None], axis=1)
    before = jnp.clip(place + kept, 0, kept - 1)
    front = jnp.take_along_axis(state, before[:, :, None], axis=1)
    place = place[:, :, None]
    rows = jnp.where(place < 0, front, inside)
    return jnp.where(place < time, rows, jnp.zeros_like(rows))


def add_at_inputs(
    dx: jax.Array, d_state: jax.Array, place: jax.Array, cotangent: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """The transpose of `take_inputs`, added to dx and d_state.

    Args:
      dx: [B, T, C].
      d_state: [B, W - 1, C].
      place: i32[B, W - 1].
      cotangent: [B, W - 1, C].

    Returns:
      dx and d_state, in their dtypes.
    """
    time, kept = dx.shape[1], d_state.shape[1]
    row = jnp.arange(dx.shape[0], dtype=jnp.int32)[:, None]
    outside = jnp.arange(kept, dtype=jnp.int32)[None]

    def add(target, index, size):
        # No two indices are equal, so the sum has one order.
        index = jnp.where((index >= 0) & (index < size), index, size + outside)
        return target.at[row, index].add(
            cotangent.astype(target.dtype), mode="drop", unique_indices=True
        )

    return add(dx, place, time), add(d_state, place + kept, kept)
