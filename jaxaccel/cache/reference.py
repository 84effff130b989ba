"""What the caches compute, one row and one query at a time, in plain NumPy.

Nothing here has fixed shapes or keeps a state: every function looks at the whole text
up to the query. Keys and values are f64, so that what differs from a cache is the
cache's rounding.
"""

from __future__ import annotations

import numpy as np


def attend(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    keep: np.ndarray,
    scale: float,
    logit_cap: float | None = None,
    sinks: np.ndarray | None = None,
) -> np.ndarray:
    """Softmax attention of one query over the tokens that are kept.

    Args:
      q: [H, K].
      k: [N, G, K].
      v: [N, G, K].
      keep: bool[G, N].
      scale: factor on the scores.
      logit_cap: as in `AttentionSpec`.
      sinks: [H], logits that take weight and give nothing, or `None`.

    Returns:
      f64[H, K]; 0 where nothing is kept.
    """
    heads, groups = q.shape[0], k.shape[1]
    out = np.zeros((heads, v.shape[2]))
    for h in range(heads):
        g = h // (heads // groups)
        p = weights(
            q[h], k[keep[g], g], scale, logit_cap, None if sinks is None else sinks[h]
        )
        out[h] = p @ v[keep[g], g].astype(np.float64)
    return out


def weights(
    q: np.ndarray,
    k: np.ndarray,
    scale: float,
    logit_cap: float | None = None,
    sink: float | None = None,
) -> np.ndarray:
    """Softmax weights f64[N] of one query [K] on keys [N, K]."""
    scores = scale * k.astype(np.float64) @ q.astype(np.float64)
    if logit_cap is not None:
        scores = logit_cap * np.tanh(scores / logit_cap)
    logits = scores if sink is None else np.append(scores, sink)
    if logits.size == 0:
        return logits
    p = np.exp(logits - logits.max())
    return (p / p.sum())[: scores.size]


def streaming_keep(length: int, num_sinks: int, window: int) -> np.ndarray:
    """bool[N]: the first tokens and the newest."""
    token = np.arange(length)
    return (token < num_sinks) | (token >= length - window)


def streaming_positions(length: int, num_sinks: int, window: int) -> np.ndarray:
    """i64[N]: where the keys stand when the sinks move to the front of the window."""
    token = np.arange(length)
    ahead = max(length - num_sinks - window, 0)
    return np.where(token < num_sinks, token + ahead, token)
