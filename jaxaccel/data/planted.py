"""Facts that stand in a text and nowhere else, beside spans that are to be copied.

A fact is a pair of tokens and the answer behind it, the same wherever the pair occurs:
it can only be known by heart. A span of symbols at the end of a row is the one at its
beginning: it can only be copied, as no row has the span of another.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from jaxaccel.data.batch import PackedBatch


KINDS = ("fact", "copy")
"""Targets by number; -1 is none that counts."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlantedConfig:
    """Sizes of the text.

    Attributes:
      num_facts: facts F, of different pairs.
      num_names: tokens that stand first in a pair, and as many that stand second.
      num_answers: tokens behind a pair.
      exponent: the r-th fact occurs in proportion to r^-exponent.
      facts_per_row: pairs and answers of a row.
      num_symbols: tokens of the spans.
      span: symbols of a span.
    """

    num_facts: int = 16_384
    num_names: int = 256
    num_answers: int = 64
    exponent: float = 0.5
    facts_per_row: int = 32
    num_symbols: int = 64
    span: int = 15

    def __post_init__(self):
        for name in ("num_facts", "num_names", "num_answers", "facts_per_row"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be positive")
        if min(self.num_symbols, self.span) < 1 or self.exponent < 0:
            raise ValueError(
                f"num_symbols={self.num_symbols}, span={self.span} and "
                f"exponent={self.exponent}: the first two must be positive, the last "
                "not negative"
            )
        if self.num_facts > self.num_names**2:
            raise ValueError(
                f"num_facts={self.num_facts} is more than the {self.num_names**2} "
                f"pairs of num_names={self.num_names}"
            )

    @property
    def vocab_size(self) -> int:
        """First names, second names, answers, symbols and two marks."""
        return 2 * self.num_names + self.num_answers + self.num_symbols + 2

    @property
    def seq_len(self) -> int:
        """T of a row."""
        return 2 * (1 + self.span) + 3 * self.facts_per_row

    @property
    def kinds(self) -> tuple[str, ...]:
        """What targets are told apart by."""
        return KINDS

    def arrays(self) -> dict[str, jax.Array]:
        """The facts: i32[F, 3] tokens each, f32[F] how many are as frequent or more."""
        rng = np.random.default_rng(0)
        pairs = rng.choice(self.num_names**2, self.num_facts, replace=False)
        first, second = np.divmod(pairs, self.num_names)
        answers = rng.integers(0, self.num_answers, self.num_facts)
        facts = np.stack(
            [first, self.num_names + second, 2 * self.num_names + answers], axis=1
        )
        weights = np.arange(1, self.num_facts + 1, dtype=np.float64) ** -self.exponent
        reached = np.cumsum(weights) / np.sum(weights)
        return {
            "facts": jnp.asarray(facts, jnp.int32),
            "reached": jnp.asarray(reached, jnp.float32),
        }

    def rows(
        self, arrays: dict[str, jax.Array], key: jax.Array, batch: int
    ) -> tuple[PackedBatch, jax.Array]:
        """Draws rows; `loss_mask` is 1 where an answer or a copied symbol comes next.

        Args:
          arrays: of `arrays`.
          key: random key; equal keys give equal rows.
          batch: rows B.

        Returns:
          (one document a row, i32[B, T] numbers of `KINDS`).
        """
        spans, draws = jax.random.split(key)
        base = 2 * self.num_names + self.num_answers
        span = base + jax.random.randint(
            spans, (batch, self.span), 0, self.num_symbols, jnp.int32
        )
        unit = jax.random.uniform(draws, (batch, self.facts_per_row))
        found = jnp.searchsorted(arrays["reached"], unit).astype(jnp.int32)
        found = jnp.minimum(found, self.num_facts - 1)
        facts = arrays["facts"][found].reshape(batch, -1)
        marks = [
            jnp.full((batch, 1), base + self.num_symbols + i, jnp.int32) for i in (0, 1)
        ]
        tokens = jnp.concatenate([marks[0], span, facts, marks[1], span], axis=1)
        place = np.arange(self.seq_len)
        begin = 1 + self.span
        end = begin + 3 * self.facts_per_row
        is_fact = (begin <= place) & (place < end) & ((place - begin) % 3 == 1)
        is_copy = (end <= place) & (place < self.seq_len - 1)
        kinds = np.where(is_fact, 0, np.where(is_copy, 1, -1)).astype(np.int32)
        shape = tokens.shape
        mask = jnp.asarray(np.broadcast_to(kinds >= 0, shape), jnp.float32)
        positions = jnp.arange(self.seq_len, dtype=jnp.int32)[None]
        rows = PackedBatch(
            tokens=tokens,
            targets=jnp.pad(tokens[:, 1:], ((0, 0), (0, 1))),
            segment_ids=jnp.ones(shape, jnp.int32),
            positions=jnp.broadcast_to(positions, shape),
            loss_mask=mask,
            num_bytes=mask,
        )
        return rows, jnp.asarray(np.broadcast_to(kinds, shape))

    def heldout(
        self, arrays: dict[str, jax.Array], index: jax.Array, batch: int
    ) -> tuple[PackedBatch, jax.Array]:
        """As `rows`, of a text that no seed trains on."""
        return self.rows(
            arrays, jax.random.fold_in(jax.random.key(2**30), index), batch
        )
