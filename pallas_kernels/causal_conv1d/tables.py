"""Small integer tables that tell where documents begin and which inputs are kept."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp


WORD_TOKENS = 16  # two bits a token
MAX_REACH = 3


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=("reach", "place"),
    meta_fields=("time",),
)
@dataclasses.dataclass(frozen=True, kw_only=True)
class Borders:
    """What `document_borders` makes of a packing.

    Attributes:
      reach: of `packed_reach`, `None` where no document begins.
      place: of `last_inputs`, i32[B, W - 1].
      time: T.
    """

    reach: jax.Array | None
    place: jax.Array
    time: int


def document_borders(
    is_first: jax.Array | None,
    is_real: jax.Array | None,
    *,
    batch: int,
    time: int,
    width: int,
) -> Borders:
    """All that kernels need of a packing; built once per batch it serves all layers.

    Args:
      is_first, is_real: bool[B, T] or `None`, as in `api.causal_conv1d`.
      batch, time: B, T.
      width: W.

    Returns:
      The tables, of fixed shapes.
    """
    place = last_inputs(is_first, is_real, batch=batch, time=time, kept=width - 1)
    reach = None if is_first is None else packed_reach(is_first)
    return Borders(reach=reach, place=place, time=time)


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


def _largest(values: jax.Array, count: int) -> list[jax.Array]:
    """The `count` largest of [B, T] along T, largest first; -1 where there are fewer.

    One reduction instead of `count` that wait for each other: on a GPU, the launches
    would take longer than the work.
    """

    def merge(a, b):
        # The i-th largest of two sorted lists: j from one and i - j from the other.
        top = []
        for i in range(count):
            parts = [b[i], a[i]]
            parts += [jnp.minimum(a[j], b[i - 1 - j]) for j in range(i)]
            top.append(functools.reduce(jnp.maximum, parts))
        return tuple(top)

    nothing = jnp.int32(-1)
    operands = (values, *(jnp.full_like(values, nothing),) * (count - 1))
    return list(jax.lax.reduce(operands, (nothing,) * count, merge, (1,)))


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
      kept: W - 1, at least 1.

    Returns:
      i32[B, W - 1], oldest first: the last real tokens of the row's last document,
      which begins at the last `is_first`. Negative ones count back from the front of
      the row into the initial state; T stands for no input, which gives zeros.
    """
    token = jnp.arange(time, dtype=jnp.int32)[None]
    if is_real is None:
        newest = [jnp.full((batch,), time - 1 - i, jnp.int32) for i in range(kept)]
        # A border further back is in front of all of these.
        token = token[:, max(0, time - kept) :]
        is_first = None if is_first is None else is_first[:, max(0, time - kept) :]
    else:
        newest = []
        below = jnp.full((batch,), time, jnp.int32)
        for found in _largest(jnp.where(is_real, token, -1), kept):
            # Once the row has no more real tokens, the state follows backwards.
            below = jnp.where(found >= 0, found, jnp.minimum(below, 0) - 1)
            newest.append(below)
    place = jnp.stack(newest[::-1], axis=1)
    if is_first is None:
        return place
    borders = jnp.where(is_first, token, -kept)
    start = jnp.max(borders, axis=1, keepdims=True, initial=-kept)
    return jnp.where(place >= start, place, time)


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
