"""How many documents of each source an epoch holds, and in which order."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np


ENDS = ("first_exhausted", "all_exhausted")
UNITS = ("tokens", "documents")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mixture:
    """A plan that can tell the documents of any epoch without the epochs before it.

    Each source is an endless stream of its documents, shuffled anew for each pass over
    the source; epoch e takes the next `draws[i]` documents of source i's stream. So no
    document comes a second time before each of its source has come once, whatever the
    weights are and wherever an epoch ends.

    Attributes:
      sizes: documents of each source.
      draws: documents of each source in an epoch.
    """

    sizes: tuple[int, ...]
    draws: tuple[int, ...]

    def epoch(self, epoch: int, seed: int) -> np.ndarray:
        """Documents of an epoch in shuffled order.

        Args:
          epoch: which one, from 0.
          seed: of the shuffles, not negative.

        Returns:
          i64[sum(draws)], indices into the sources' documents laid end to end.
        """
        first = np.concatenate([[0], np.cumsum(self.sizes)])
        drawn = []
        for source, size in enumerate(self.sizes):
            draws = self.draws[source]
            begin, end = epoch * draws, (epoch + 1) * draws
            while begin < end:
                number, offset = divmod(begin, size)
                order = np.random.default_rng([seed, 0, source, number])
                taken = order.permutation(size)[offset : offset + end - begin]
                drawn.append(taken + first[source])
                begin += len(taken)
        documents = np.concatenate(drawn).astype(np.int64)
        return np.random.default_rng([seed, 1, epoch]).permutation(documents)


def make_mixture(
    num_documents: Sequence[int],
    num_tokens: Sequence[int],
    *,
    weights: Sequence[float] | None = None,
    unit: str = "tokens",
    end: str = "first_exhausted",
) -> Mixture:
    """Plans an epoch.

    Args:
      num_documents: documents of each source.
      num_tokens: tokens of each source.
      weights: share of each source in any scale; None takes every document of every
        source once an epoch.
      unit: "tokens" makes the weights shares of tokens (to the accuracy of each
        source's mean document), "documents" shares of documents.
      end: where an epoch ends. "first_exhausted": when the first source is used up, so
        that nothing repeats inside an epoch and larger sources go on in the next one.
        "all_exhausted": when the last source is used up; smaller ones repeat.

    Returns:
      The plan.

    Raises:
      ValueError: a weight, the unit or the end is not allowed, or a source that has
        weight has no document.
    """
    if unit not in UNITS:
        raise ValueError(f"weight unit is {unit!r}, allowed are {UNITS}")
    if end not in ENDS:
        raise ValueError(f"mixture end is {end!r}, allowed are {ENDS}")
    sizes = tuple(num_documents)
    if weights is None:
        if not sum(sizes):
            raise ValueError("there is no document to draw from")
        return Mixture(sizes=sizes, draws=sizes)
    if len(weights) != len(sizes):
        raise ValueError(f"{len(weights)} weights for {len(sizes)} sources")
    if min(weights) < 0 or not np.isfinite(weights).all() or sum(weights) <= 0:
        raise ValueError(
            f"weights are {tuple(weights)}, must be finite and at least 0, not all 0"
        )
    rates = np.zeros(len(sizes))
    for source, weight in enumerate(weights):
        if weight > 0 and not sizes[source]:
            raise ValueError(f"source {source} has weight {weight} but no document")
        if weight > 0:
            mean = num_tokens[source] / sizes[source] if unit == "tokens" else 1.0
            rates[source] = weight / max(mean, 1e-9)
    drawn = rates > 0
    lasts = np.array(sizes)[drawn] / rates[drawn]
    until = lasts.min() if end == "first_exhausted" else lasts.max()
    # Rounding must not make a source that ends the epoch miss or repeat a document.
    draws = np.maximum(np.rint(rates * until), drawn).astype(np.int64)
    return Mixture(sizes=sizes, draws=tuple(draws.tolist()))
