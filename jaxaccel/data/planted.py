"""Facts that stand in a text and nowhere else, beside spans that are to be copied.

A fact is a pair of tokens and the answer behind it, the same wherever the pair occurs:
it can only be known by heart. Tokens of a pair that are neighbours are an n-gram that a
hash can look up; where random symbols stand between them they are not, and the model's
weights must know the answer. A span of symbols at the end of a row is the one at its
beginning: it can only be copied, as no row has the span of another.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from jaxaccel.data.batch import PackedBatch


KINDS = ("fact", "apart", "copy")
"""Targets by number; -1 is none that counts."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlantedConfig:
    """Sizes of the text.

    Attributes:
      num_facts: facts F of neighbours, of different pairs.
      num_apart: facts of pairs that stand apart.
      num_names: tokens that stand first in a pair, and as many that stand second.
      num_answers: tokens behind a pair.
      exponent: the r-th fact of its kind occurs in proportion to r^-exponent.
      facts_per_row: facts of neighbours in a row.
      apart_per_row: facts of pairs apart in a row.
      gap: symbols between those.
      num_symbols: tokens of the spans.
      span: symbols of a span.
    """

    num_facts: int = 32_768
    num_apart: int = 4096
    num_names: int = 256
    num_answers: int = 64
    exponent: float = 0.5
    facts_per_row: int = 17
    apart_per_row: int = 9
    gap: int = 2
    num_symbols: int = 64
    span: int = 15

    def __post_init__(self):
        least = {
            "num_facts": 1,
            "num_apart": 1,
            "num_names": 1,
            "num_answers": 1,
            "facts_per_row": 1,
            # Nothing could be told of a kind without targets.
            "apart_per_row": 1,
            "gap": 1,
            "num_symbols": 1,
            "span": 1,
            "exponent": 0,
        }
        for name, value in least.items():
            if getattr(self, name) < value:
                raise ValueError(
                    f"{name}={getattr(self, name)} must be at least {value}"
                )
        for name in ("num_facts", "num_apart"):
            if getattr(self, name) > self.num_names**2:
                raise ValueError(
                    f"{name}={getattr(self, name)} is more than the "
                    f"{self.num_names**2} pairs of num_names={self.num_names}"
                )

    @property
    def vocab_size(self) -> int:
        """First and second names of both kinds, answers, symbols and two marks."""
        return 4 * self.num_names + self.num_answers + self.num_symbols + 2

    @property
    def seq_len(self) -> int:
        """T of a row."""
        apart = (3 + self.gap) * self.apart_per_row
        return 2 * (1 + self.span) + 3 * self.facts_per_row + apart

    @property
    def kinds(self) -> tuple[str, ...]:
        """What targets are told apart by."""
        return KINDS

    def arrays(self) -> dict[str, jax.Array]:
        """Facts i32[F, 3] of both kinds, and f32[F] the share of those up to each."""
        rng, found = np.random.default_rng(0), {}
        for index, (kind, count) in enumerate(
            (("fact", self.num_facts), ("apart", self.num_apart))
        ):
            pairs = rng.choice(self.num_names**2, count, replace=False)
            first, second = np.divmod(pairs, self.num_names)
            begin = 2 * index * self.num_names
            answers = 4 * self.num_names + rng.integers(0, self.num_answers, count)
            tokens = [begin + first, begin + self.num_names + second, answers]
            weights = np.arange(1, count + 1, dtype=np.float64) ** -self.exponent
            reached = np.cumsum(weights) / np.sum(weights)
            found[kind] = jnp.asarray(np.stack(tokens, axis=1), jnp.int32)
            found[f"{kind}_reached"] = jnp.asarray(reached, jnp.float32)
        return found

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
        keys = jax.random.split(key, 4)
        base = 4 * self.num_names + self.num_answers

        def symbols(key, *shape):
            return base + jax.random.randint(
                key, (batch, *shape), 0, self.num_symbols, jnp.int32
            )

        def facts(kind, key, count):
            unit = jax.random.uniform(key, (batch, count))
            place = jnp.searchsorted(arrays[f"{kind}_reached"], unit)
            place = jnp.minimum(place, arrays[kind].shape[0] - 1)
            return arrays[kind][place]  # [B, count, 3]

        span = symbols(keys[0], self.span)
        near = facts("fact", keys[1], self.facts_per_row)
        apart = facts("apart", keys[2], self.apart_per_row)
        between = symbols(keys[3], self.apart_per_row, self.gap)
        apart = jnp.concatenate([apart[..., :1], between, apart[..., 1:]], axis=-1)
        marks = [
            jnp.full((batch, 1), base + self.num_symbols + i, jnp.int32) for i in (0, 1)
        ]
        parts = [
            *(marks[0], span, near.reshape(batch, -1), apart.reshape(batch, -1)),
            *(marks[1], span),
        ]
        tokens = jnp.concatenate(parts, axis=1)
        # The number of the kind where its target comes next.
        nothing = np.full(1 + self.span, -1)
        near_kinds = np.tile([-1, 0, -1], self.facts_per_row)
        apart_kinds = np.tile(
            [-1] * (1 + self.gap) + [1, -1], self.apart_per_row
        ).astype(np.int64)
        copied = np.array([2] * self.span + [-1])
        kinds = np.concatenate([nothing, near_kinds, apart_kinds, copied])
        kinds = kinds.astype(np.int32)
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
