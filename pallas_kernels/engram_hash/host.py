"""The hash in numpy with 64-bit integers, for loaders that know tokens ahead."""

from __future__ import annotations

import numpy as np

from pallas_kernels.engram_hash.layout import HashLayout


STOP = -1
"""In a window or history: nothing can be seen here or further back."""


def windows_on_host(
    tokens: np.ndarray,
    width: int,
    *,
    is_first: np.ndarray | None = None,
    is_last: np.ndarray | None = None,
    is_dead: np.ndarray | None = None,
    is_real: np.ndarray | None = None,
    history: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """What each token looks back at; token by token if padding stands inside of a row.

    Args:
      tokens: [B, T] compressed ids.
      width: N, the token itself and N - 1 before it.
      is_first, is_last, is_dead, is_real: bool[B, T], see `api.engram_hash`.
      history: [B, N - 1].

    Returns:
      (windows i64[B, T, N], newest first, `STOP` where nothing is seen; the history
      behind the last token i32[B, N - 1], newest last).
    """
    batch, time = tokens.shape

    def flags(array: np.ndarray | None, default: bool) -> np.ndarray:
        return np.full((batch, time), default) if array is None else np.asarray(array)

    first, last, dead = (flags(a, False) for a in (is_first, is_last, is_dead))
    real = flags(is_real, True)
    if history is None:
        history = np.full((batch, width - 1), STOP)
    if np.all(real[:, 1:] <= real[:, :-1]):
        return _windows_at_once(tokens, first, last, dead, real, np.asarray(history))
    # Newest first, while the loop runs.
    past = np.asarray(history, np.int64)[:, ::-1].copy()
    windows = np.full((batch, time, width), STOP, np.int64)
    for t in range(time):
        past[first[:, t]] = STOP
        own = np.where(dead[:, t], STOP, tokens[:, t].astype(np.int64))
        window = np.concatenate([own[:, None], past], axis=1)
        window = _stopped(window)
        windows[real[:, t], t] = window[real[:, t]]
        own = np.where(last[:, t], STOP, own)
        pushed = _stopped(np.concatenate([own[:, None], past], axis=1)[:, :-1])
        past = np.where(real[:, t, None], pushed, past)
    return windows, past[:, ::-1].astype(np.int32)


def _windows_at_once(tokens, first, last, dead, real, history):
    """`windows_on_host` of rows whose padding, if any, is behind their tokens."""
    batch, time = tokens.shape
    width = history.shape[1] + 1
    own = np.where(dead, STOP, tokens.astype(np.int64))
    left = np.where(last, STOP, own)  # what later tokens see of it
    row = np.concatenate([history.astype(np.int64), left], axis=1)
    # Documents begun up to each place of that row: a token sees its own one alone.
    begun = np.pad(np.cumsum(first, axis=1), ((0, 0), (width - 1, 0)))

    def back(array: np.ndarray, places: np.ndarray) -> np.ndarray:
        return np.take_along_axis(array, places, axis=1)

    windows = np.full((batch, time, width), STOP, np.int64)
    windows[:, :, 0] = own
    for i in range(1, width):
        seen = slice(width - 1 - i, width - 1 - i + time)
        same = begun[:, seen] == begun[:, width - 1 :]
        windows[:, :, i] = np.where(same, row[:, seen], STOP)
    windows = np.where(real[:, :, None], _stopped(windows), STOP)
    count = np.sum(real, axis=1, keepdims=True)
    ends = count + np.arange(width - 2, -1, -1)  # newest first
    past = np.where(back(begun, ends) == begun[:, -1:], back(row, ends), STOP)
    return windows, _stopped(past)[:, ::-1].astype(np.int32)


def _stopped(window: np.ndarray) -> np.ndarray:
    """Everything behind a `STOP` on the last axis is one too."""
    seen = np.logical_and.accumulate(window >= 0, axis=-1)
    return np.where(seen, window, STOP)


def hash_on_host(
    tokens: np.ndarray,
    layout: HashLayout,
    *,
    token_map: np.ndarray | None = None,
    is_first: np.ndarray | None = None,
    is_last: np.ndarray | None = None,
    is_dead: np.ndarray | None = None,
    is_real: np.ndarray | None = None,
    history: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """`api.engram_hash` in numpy: same arguments, same bits.

    Returns:
      (ids i32[B, T, L, C], history i32[B, N - 1]).

    Raises:
      ValueError: a token is outside of the map or of the compressed vocabulary.
    """
    tokens = np.asarray(tokens)
    allowed = layout.vocab_size if token_map is None else len(token_map)
    outside = (tokens < 0) | (tokens >= allowed)
    if outside.any():
        raise ValueError(
            f"token id {tokens[outside][0]} is outside, allowed are 0 to {allowed - 1}"
        )
    if token_map is not None:
        tokens = np.asarray(token_map)[tokens]
    windows, history = windows_on_host(
        tokens,
        layout.max_order,
        is_first=is_first,
        is_last=is_last,
        is_dead=is_dead,
        is_real=is_real,
        history=history,
    )
    x = np.where(windows < 0, layout.pad_id, windows)  # i64[B, T, N]
    ids = [
        _mixed(x, layout, layer) + layout.offsets[layer]
        for layer in range(layout.num_layers)
    ]
    return np.stack(ids, axis=2).astype(np.int32), history


def _mixed(x: np.ndarray, layout: HashLayout, layer: int) -> np.ndarray:
    """i64[B, T, C]: the rows within the columns."""
    products = x * np.asarray(layout.multipliers[layer], np.int64)
    mixes = np.bitwise_xor.accumulate(products, axis=-1)
    mixes = mixes[..., np.asarray(layout.orders) - 1]  # [B, T, orders]
    primes = np.asarray(layout.primes[layer], np.int64).reshape(len(layout.orders), -1)
    return (mixes[..., None] % primes).reshape(*x.shape[:2], -1)
