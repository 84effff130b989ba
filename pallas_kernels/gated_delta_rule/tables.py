"""Where documents begin, in the form that the Mosaic GPU kernels read."""

from __future__ import annotations

import jax
import jax.numpy as jnp


# A token whose document began before its chunk.
BEGAN_BEFORE = -1


def document_starts(is_first: jax.Array, chunk: int) -> jax.Array:
    """Index inside its chunk of the first token of each token's document.

    This is all that the kernels need of a packing: two tokens of a chunk belong to
    one document if and only if their starts are equal, and the state that enters a
    chunk reaches the tokens whose document `BEGAN_BEFORE`. It has a fixed shape and
    is built on the device, so that every packing runs the same executable.

    Args:
      is_first: bool[B, T], whether a document begins at a token.
      chunk: tokens per chunk, divides T.

    Returns:
      i32[B, T], from -1 (`BEGAN_BEFORE`) to chunk - 1.
    """
    batch, time = is_first.shape
    if time % chunk:
        raise ValueError(f"T = {time} is no multiple of the chunk of {chunk} tokens")
    within = jnp.arange(chunk, dtype=jnp.int32)[None, None, :]
    starts = jnp.where(is_first.reshape(batch, -1, chunk), within, BEGAN_BEFORE)
    return jax.lax.cummax(starts, axis=2).reshape(batch, time)
