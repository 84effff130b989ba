"""Where documents begin, in the form that the Mosaic GPU kernels read."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.gated_delta_rule.config_mosaic import CHUNK


# A token whose document began before its chunk.
BEGAN_BEFORE = -1


def document_starts(is_first: jax.Array, chunk: int = CHUNK) -> jax.Array:
    """Index inside its chunk of the first token of each token's document.

    This is all that the kernels need of a packing: two tokens of a chunk belong to
    one document if and only if their starts are equal, and the state that enters a
    chunk reaches the tokens whose document `BEGAN_BEFORE`. It has a fixed shape and
    is built on the device, so that every packing runs the same executable; built once
    per batch, it serves all layers.

    Args:
      is_first: bool[B, T], whether a document begins at a token.
      chunk: tokens per chunk; the last one may be shorter.

    Returns:
      i32[B, T], from -1 (`BEGAN_BEFORE`) to chunk - 1.
    """
    batch, time = is_first.shape
    is_first = jnp.pad(is_first, ((0, 0), (0, -time % chunk)))
    within = jnp.arange(chunk, dtype=jnp.int32)[None, None, :]
    starts = jnp.where(is_first.reshape(batch, -1, chunk), within, BEGAN_BEFORE)
    return jax.lax.cummax(starts, axis=2).reshape(batch, -1)[:, :time]


def first_tokens(starts: jax.Array, chunk: int) -> jax.Array:
    """The `is_first` that `document_starts` made `starts` of."""
    within = jnp.arange(starts.shape[1], dtype=jnp.int32) % chunk
    return starts == within[None, :]


def padded(starts: jax.Array, time: int, chunk: int) -> jax.Array:
    """`starts` of as many tokens as `time`; those at the end begin no document."""
    tail = -starts.shape[1] % chunk
    starts = jnp.pad(starts, ((0, 0), (0, tail)), mode="edge")
    return jnp.pad(
        starts,
        ((0, 0), (0, time - starts.shape[1])),
        constant_values=BEGAN_BEFORE,
    )
