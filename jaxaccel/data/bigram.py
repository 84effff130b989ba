"""Bigram models: what a trained model must beat on held-out text.

Mind which: before any training, a model over n ids that stand for w bytes each costs
log(n) / w nats per byte, which for a BPE of 4,096 ids is less than a byte bigram costs.
There the token bigram is the baseline that shows learning.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from jaxaccel.data.corpus import Corpus


def byte_bigram_baseline(
    train_texts: Iterable[str | bytes], heldout_texts: Iterable[str | bytes]
) -> float:
    """Cross-entropy of an interpolated byte bigram on held-out text.

    Counts of byte pairs are smoothed by Witten-Bell interpolation with byte counts,
    which are smoothed by adding one: with c(a, b) the count of b after a and n(a) the
    number of different bytes seen after a,
    p(b | a) = (c(a, b) + n(a) p(b)) / (c(a) + n(a)). No pair crosses documents; the
    first byte of a document is predicted by p(b).

    Args:
      train_texts: documents to count, text or its UTF-8 bytes.
      heldout_texts: documents to predict; as bytes they may begin and end inside a
        character.

    Returns:
      Nats per byte of UTF-8.

    Raises:
      ValueError: the held-out documents hold no byte.
    """
    single, pairs, _ = _counts(train_texts)
    p_single = (single + 1.0) / (single.sum() + 256.0)  # [256]
    followers = np.count_nonzero(pairs, axis=1).astype(np.float64)  # [256]
    totals = pairs.sum(axis=1) + followers  # [256]
    smooth = pairs + followers[:, None] * p_single[None, :]  # [256, 256]
    seen = totals[:, None] > 0
    p_pair = np.where(
        seen, smooth / np.where(seen, totals[:, None], 1.0), p_single[None, :]
    )
    held, held_pairs, held_first = _counts(heldout_texts)
    if not held.sum():
        raise ValueError("the held-out documents hold no byte")
    nats = -np.sum(held_pairs * np.log(p_pair)) - np.sum(held_first * np.log(p_single))
    return float(nats / held.sum())


def token_bigram_baseline(corpus: Corpus) -> float:
    """Cross-entropy of an interpolated token bigram on the held-out split.

    The same smoothing as `byte_bigram_baseline`, over the corpus' own tokens. The first
    token of a document is given, as it is to a model.

    Args:
      corpus: a corpus with both splits.

    Returns:
      Nats per byte of UTF-8 that the predicted tokens stand for.

    Raises:
      ValueError: the held-out documents hold no byte to predict.
    """
    vocab = corpus.tokenizer.vocab_size
    before, after = _token_pairs(corpus, "train")
    single = np.bincount(after, minlength=vocab)  # [V]
    p_single = (single + 1.0) / (single.sum() + vocab)  # [V]
    keys, counts = np.unique(before * vocab + after, return_counts=True)  # [P]
    followers = np.bincount(keys // vocab, minlength=vocab)  # [V]
    totals = np.bincount(before, minlength=vocab) + followers  # [V]
    before, after = _token_pairs(corpus, "heldout")
    num_bytes = corpus.tokenizer.token_bytes()[after].sum()
    if not num_bytes:
        raise ValueError("the held-out documents hold no byte to predict")
    wanted = before * vocab + after  # [N]
    found = np.minimum(np.searchsorted(keys, wanted), max(len(keys) - 1, 0))
    seen = np.zeros(len(wanted))
    if len(keys):
        seen = np.where(keys[found] == wanted, counts[found], 0)
    # One more of p_single where the context is new, so that nothing divides by zero.
    new = (totals[before] == 0).astype(np.int64)
    smooth = seen + (followers[before] + new) * p_single[after]
    return float(-np.log(smooth / (totals[before] + new)).sum() / num_bytes)


def _token_pairs(corpus: Corpus, split: str) -> tuple[np.ndarray, np.ndarray]:
    """Neighbouring tokens of a split's documents: (i64[n], i64[n])."""
    store = corpus.store
    tokens = store.tokens.astype(np.int64)
    document = np.repeat(np.arange(len(corpus.names)), store.lengths)
    is_pair = (document[1:] == document[:-1]) & (
        corpus.heldout[document[1:]] == (split == "heldout")
    )
    return tokens[:-1][is_pair], tokens[1:][is_pair]


def _counts(
    texts: Iterable[str | bytes],
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Counts bytes i64[256], pairs i64[256, 256] and first bytes i64[256]."""
    single = np.zeros(256, np.int64)
    pairs = np.zeros(256 * 256, np.int64)
    first = np.zeros(256, np.int64)
    for text in texts:
        encoded = text.encode() if isinstance(text, str) else text
        data = np.frombuffer(encoded, np.uint8).astype(np.int64)
        if not data.size:
            continue
        single += np.bincount(data, minlength=256)
        first[data[0]] += 1
        # Unlike bincount, this costs nothing for the pairs that a short text lacks.
        np.add.at(pairs, data[:-1] * 256 + data[1:], 1)
    return single, pairs.reshape(256, 256), first
