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


def quest_pages(
    q: np.ndarray, k: np.ndarray, outside: int, *, page: int, chosen: int, scale: float
) -> list[np.ndarray]:
    """The pages that a query of Quest chooses.

    Args:
      q: [H, K].
      k: [N, G, K], after the rotation.
      outside: tokens of which pages are made, a last one perhaps of fewer.
      page: tokens per page.
      chosen: pages that are chosen.
      scale: factor on the scores.

    Returns:
      The numbers of the pages of each kv head.
    """
    groups = k.shape[1]
    repeats = q.shape[0] // groups
    pages = []
    for g in range(groups):
        bounds = []
        for start in range(0, outside, page):
            keys = k[start : start + page, g].astype(np.float64)
            bounds.append(
                max(
                    scale * np.maximum(head * keys.min(0), head * keys.max(0)).sum()
                    for head in q[g * repeats : (g + 1) * repeats]
                )
            )
        pages.append(np.argsort(-np.asarray(bounds), kind="stable")[:chosen])
    return pages


def quest_keep(
    pages: list[np.ndarray], length: int, *, page: int, local_window: int
) -> np.ndarray:
    """What a query of Quest reads, bool[G, N]: its pages, and the newest tokens."""
    keep = np.zeros((len(pages), length), bool)
    for g, own in enumerate(pages):
        for i in own:
            keep[g, i * page : (i + 1) * page] = True
    keep[:, max(length - local_window, 0) :] = True
    return keep


def snapkv_keep(
    q: np.ndarray,
    k: np.ndarray,
    prompt: int,
    *,
    budget: int,
    window: int,
    kernel: int,
    scale: float,
) -> np.ndarray:
    """What SnapKV keeps of a text, while none of its generated tokens is lost.

    Args:
      q: [N, H, K], after the rotation.
      k: [N, G, K].
      prompt: length of the prompt.
      budget: tokens kept of the prompt before its window.
      window: last tokens of the prompt.
      kernel: places over which weights are averaged.
      scale: factor on the scores.

    Returns:
      bool[G, N].
    """
    groups = k.shape[1]
    repeats = q.shape[1] // groups
    start = max(prompt - window, 0)
    keep = np.zeros((groups, k.shape[0]), bool)
    keep[:, start:] = True
    for g in range(groups):
        total = np.zeros(start)
        for t in range(start, prompt):
            for h in range(g * repeats, (g + 1) * repeats):
                total += weights(q[t, h], k[: t + 1, g], scale)[:start] / repeats
        pooled = (
            np.convolve(total, np.ones(kernel) / kernel, "same") if start else total
        )
        keep[g, np.argsort(-pooled, kind="stable")[:budget]] = True
    return keep


def h2o_keep(
    q: np.ndarray, k: np.ndarray, prompt: int, *, heavy: int, recent: int, scale: float
) -> np.ndarray:
    """What H2O holds when the last query of a text is read.

    Args:
      q: [N, H, K], after the rotation.
      k: [N, G, K].
      prompt: length of the prompt, whose queries see all before them.
      heavy: tokens kept for their weights.
      recent: newest tokens kept.
      scale: factor on the scores.

    Returns:
      bool[G, N].
    """
    length, groups = k.shape[:2]
    repeats = q.shape[1] // groups
    keep = np.zeros((groups, length), bool)
    for g in range(groups):
        mass = np.zeros(length)
        held: list[int] = []
        for t in range(length):
            held.append(t)
            if t >= prompt and len(held) > heavy + recent:
                old = [i for i in held if i <= t - recent]
                held.remove(min(old, key=lambda i: mass[i]))
            for h in range(g * repeats, (g + 1) * repeats):
                mass[held] += weights(q[t, h], k[held, g], scale)
            if t == prompt - 1:
                old = sorted(held[: max(prompt - recent, 0)], key=lambda i: -mass[i])
                held = sorted(old[:heavy]) + held[max(prompt - recent, 0) :]
        keep[g, held] = True
    return keep
