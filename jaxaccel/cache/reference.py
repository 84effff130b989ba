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


def shadowkv_chunks(
    k: np.ndarray,
    prompt: int,
    *,
    chunk: int,
    local_window: int,
    num_outliers: int,
    num_sinks: int,
) -> tuple[np.ndarray, np.ndarray]:
    """Which tokens are in chunks, and which chunks are outliers.

    Args:
      k: [N, G, K], after the rotation, up to the query; the first `prompt` of them were
        read together, the others one by one.
      prompt: length of the prompt.
      chunk: tokens of a chunk.
      local_window: newest tokens that are in no chunk, at least.
      num_outliers: outliers of the prompt.
      num_sinks: first chunks that are outliers.

    Returns:
      i64[C], the chunks' first tokens, and bool[G, C].
    """
    first = max(prompt // chunk - local_window // chunk, 0) * chunk
    starts = list(range(0, first, chunk))
    closeness = np.full((k.shape[1], len(starts)), -2.0)
    for i, start in enumerate(starts[num_sinks:], num_sinks):
        keys = k[start : start + chunk].astype(np.float64)  # [c, G, K]
        mean = keys.mean(0)
        norms = np.linalg.norm(keys, axis=-1) * np.linalg.norm(mean, axis=-1)
        closeness[:, i] = ((keys * mean).sum(-1) / norms).min(0)
    outlier = np.zeros(closeness.shape, bool)
    order = np.argsort(closeness, axis=1, kind="stable")[:, :num_outliers]
    np.put_along_axis(outlier, order, True, axis=1)
    for step in range(1, k.shape[0] - prompt + 1):
        if step % chunk == 0 and prompt + step - first >= local_window + chunk:
            starts.append(first)
            first += chunk
    grown = np.zeros((k.shape[1], len(starts)), bool)
    grown[:, : outlier.shape[1]] = outlier
    return np.asarray(starts, np.int64), grown


def shadowkv_keep(
    q: np.ndarray,
    k: np.ndarray,
    starts: np.ndarray,
    outlier: np.ndarray,
    *,
    chunk: int,
    chosen: int,
    scale: float,
) -> np.ndarray:
    """What a query reads.

    Args:
      q: [H, K].
      k: [N, G, K], after the rotation.
      starts: i64[C], see `shadowkv_chunks`.
      outlier: bool[G, C].
      chunk: tokens of a chunk.
      chosen: chunks that the landmarks choose.
      scale: factor on the scores.

    Returns:
      bool[G, N]: outliers, chosen chunks, and all tokens that are in no chunk.
    """
    groups = k.shape[1]
    repeats = q.shape[0] // groups
    keep = np.zeros((groups, k.shape[0]), bool)
    keep[:, len(starts) * chunk :] = True
    for g in range(groups):
        own = np.flatnonzero(~outlier[g])
        means = [k[starts[i] : starts[i] + chunk, g].mean(0) for i in own]
        read = list(np.flatnonzero(outlier[g]))
        if means:
            heads = q[g * repeats : (g + 1) * repeats]
            p = np.max(
                [weights(head, np.array(means), scale) for head in heads], axis=0
            )
            read += list(own[np.argsort(-p, kind="stable")[:chosen]])
        for i in read:
            keep[g, starts[i] : starts[i] + chunk] = True
    return keep
