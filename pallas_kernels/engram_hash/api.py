"""The public function: checks, then the implementation that was chosen."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels._common import hw, interpret
from pallas_kernels._common.dispatch import Choice, Implementation, select
from pallas_kernels.engram_hash import reference, xla
from pallas_kernels.engram_hash.host import STOP
from pallas_kernels.engram_hash.layout import HashLayout


_ONLY_NAMED = {"mosaic": "a row speaks for one size alone"}


def choose(
    *args: Any, implementation: Implementation | None = None, **options: Any
) -> Choice:
    """Says what a call of `engram_hash` would run.

    Args:
      *args: arrays or `jax.ShapeDtypeStruct`, as for the function.
      implementation: the one asked for.
      **options: other keywords.

    Returns:
      The choice.
    """
    del options
    refused = {}
    if not (hw.is_hopper() or interpret.is_interpreting()):
        refused["mosaic"] = (
            f"the kernel needs a Hopper GPU, this is {jax.default_backend()}"
        )
    elif args and not math.prod(args[0].shape):
        refused["mosaic"] = "there are no tokens"
    return select("engram_hash", implementation, refused, only_named=_ONLY_NAMED)


def empty_history(batch: int, layout: HashLayout) -> jax.Array:
    """The history before any token, i32[B, N - 1]."""
    return jnp.full((batch, layout.max_order - 1), STOP, jnp.int32)


def engram_hash(
    tokens: jax.Array,
    layout: HashLayout,
    *,
    token_map: jax.Array | None = None,
    is_first: jax.Array | None = None,
    is_last: jax.Array | None = None,
    is_dead: jax.Array | None = None,
    is_real: jax.Array | None = None,
    history: jax.Array | None = None,
    implementation: Implementation | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Row numbers of the n-grams that end at each token.

    id_(t,n,h) = (xor_(i<n) x_(t-i) m_i) mod p_(n,h) + offset_(n,h)

    Where token t - i cannot be looked back at, the padding id stands for it and for all
    that is older.

    Args:
      tokens: i32[B, T], ids below `layout.vocab_size`, or below the map's length.
      layout: multipliers and primes of L layers.
      token_map: i32[V], compressed id of each token; `None` if `tokens` are compressed.
      is_first: bool[B, T], tokens that look back at nothing.
      is_last: bool[B, T], tokens that no later one looks back at or beyond; their own
        n-grams are whole.
      is_dead: bool[B, T], tokens without a text, an image's: as `is_last`, and their
        own n-grams are padding.
      is_real: bool[B, T], false on padding, which is passed over.
      history: i32[B, N - 1], what an earlier call returned; `None` starts a text.
      implementation: "mosaic", "xla", "reference"; `None` takes the best that can.

    Returns:
      (ids i32[B, T, L, C], history i32[B, N - 1], newest last, -1 where nothing is
      seen). The history of a row without real tokens stays.

    Raises:
      ValueError: a shape or dtype is not allowed.
      NotImplementedError: the named implementation cannot run this call.

    Source: Engram (arXiv 2601.07372), section 2.
    """
    if tokens.ndim != 2 or tokens.dtype != jnp.int32:
        raise ValueError(
            f"tokens are {tokens.dtype}{list(tokens.shape)}, expected int32[B, T]"
        )
    flags = {
        "is_first": is_first,
        "is_last": is_last,
        "is_dead": is_dead,
        "is_real": is_real,
    }
    for name, array in flags.items():
        if array is not None and (
            array.shape != tokens.shape or array.dtype != jnp.bool_
        ):
            raise ValueError(
                f"{name} is {array.dtype}{list(array.shape)}, expected "
                f"bool{list(tokens.shape)}"
            )
    if history is None:
        history = empty_history(tokens.shape[0], layout)
    expected = (tokens.shape[0], layout.max_order - 1)
    if history.shape != expected or history.dtype != jnp.int32:
        raise ValueError(
            f"history is {history.dtype}{list(history.shape)}, expected "
            f"int32{list(expected)}"
        )
    choice = choose(tokens, layout, implementation=implementation)
    if token_map is not None:
        if token_map.ndim != 1 or token_map.dtype != jnp.int32:
            raise ValueError(
                f"token_map is {token_map.dtype}{list(token_map.shape)}, expected "
                "int32[V]"
            )
        tokens = jnp.take(token_map, tokens, axis=0, mode="clip")
    if choice.implementation == "reference":
        return reference.engram_hash(tokens, layout, history=history, **flags)
    hash_windows = xla.hash_windows
    if choice.implementation == "mosaic":
        # Imported on first use: Mosaic GPU takes a second that others need not pay.
        from pallas_kernels.engram_hash import kernel

        hash_windows = kernel.engram_hash
    found, history = xla.windows(tokens, history=history, **flags)
    found = [jnp.where(w < 0, layout.pad_id, w).astype(jnp.uint32) for w in found]
    return hash_windows(found, layout), history
