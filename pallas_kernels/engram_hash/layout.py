"""Multipliers and primes of the hash: all that a checkpoint's row numbers depend on."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Sequence
from typing import Any, Self

import numpy as np


FORMAT = "engram-hash-1"
# Witnesses that decide primality below 3,215,031,751.
_WITNESSES = (2, 3, 5, 7)
_LAYER_STEP = 10007


def is_prime(n: int) -> bool:
    """Miller-Rabin, exact for n < 2^31."""
    if n < 2:
        return False
    for p in _WITNESSES:
        if n % p == 0:
            return n == p
    odd, twos = n - 1, 0
    while odd % 2 == 0:
        odd, twos = odd // 2, twos + 1
    for witness in _WITNESSES:
        x = pow(witness, odd, n)
        if x in (1, n - 1):
            continue
        for _ in range(twos - 1):
            x = x * x % n
            if x == n - 1:
                break
        else:
            return False
    return True


@dataclasses.dataclass(frozen=True, kw_only=True)
class HashLayout:
    """Which row each n-gram has, for all layers with a table.

    A layer's table is one array: its columns follow each other, orders ascending, the
    heads of an order in turn, and column c takes `primes[layer][c]` rows.

    Attributes:
      vocab_size: number V' of compressed ids.
      pad_id: compressed id that stands where no token can be looked back at.
      orders: lengths of the n-grams, ascending, from 2 up.
      multipliers: [L][N], N the largest order; one for each token of the window.
      primes: [L][C], C = orders x heads.

    Source: Engram (arXiv 2601.07372) and its published demo.
    """

    vocab_size: int
    pad_id: int
    orders: tuple[int, ...]
    multipliers: tuple[tuple[int, ...], ...]
    primes: tuple[tuple[int, ...], ...]

    def __post_init__(self):
        if not 1 <= self.vocab_size < 2**31:
            raise ValueError(
                f"vocab_size is {self.vocab_size}, allowed are 1 to 2^31 - 1"
            )
        if not 0 <= self.pad_id < self.vocab_size:
            raise ValueError(
                f"pad_id is {self.pad_id}, allowed are 0 to {self.vocab_size - 1}"
            )
        if not self.orders or any(
            b <= a for a, b in itertools.pairwise((1, *self.orders))
        ):
            raise ValueError(f"orders are {self.orders}, expected ascending, from 2 up")
        if len(self.multipliers) != len(self.primes):
            raise ValueError(
                f"{len(self.multipliers)} layers of multipliers, {len(self.primes)} "
                "of primes"
            )
        for layer, (row, primes) in enumerate(
            zip(self.multipliers, self.primes, strict=True)
        ):
            self._check_layer(layer, row, primes)

    def _check_layer(self, layer: int, row: Sequence[int], primes: Sequence[int]):
        if len(row) != self.max_order:
            raise ValueError(
                f"layer {layer} has {len(row)} multipliers, orders {self.orders} need "
                f"{self.max_order}"
            )
        for m in row:
            # Then no product exceeds 63 bits, and no sum of them changes sign.
            if m < 1 or m % 2 == 0 or m * (self.vocab_size - 1) >= 2**63:
                raise ValueError(
                    f"multiplier {m} of layer {layer} must be odd and below 2^63 / V'"
                )
        if not primes or len(primes) % len(self.orders):
            raise ValueError(
                f"layer {layer} has {len(primes)} columns, expected a multiple of "
                f"{len(self.orders)} orders"
            )
        for p in primes:
            if not is_prime(p) or p >= 2**31:
                raise ValueError(f"{p} of layer {layer} is no prime below 2^31")
        if sum(primes) >= 2**31:
            raise ValueError(
                f"layer {layer} has {sum(primes)} rows, row numbers are int32"
            )

    @classmethod
    def create(
        cls,
        *,
        vocab_size: int,
        pad_id: int,
        layer_ids: Sequence[int],
        orders: Sequence[int] = (2, 3),
        heads: int = 8,
        bases: int | Sequence[int] = 646_400,
        seed: int = 0,
    ) -> HashLayout:
        """Draws multipliers and searches primes, as published checkpoints do.

        Args:
          vocab_size: V'; the multipliers depend on it.
          pad_id: compressed id of padding.
          layer_ids: the layers as the checkpoint counts them: their numbers seed the
            multipliers, and their order decides the primes.
          orders: lengths of the n-grams.
          heads: columns per order.
          bases: rows per column at least, one number or one for each order.
          seed: of the multipliers.

        Returns:
          The layout.

        Raises:
          ValueError: a setting is not allowed.
        """
        orders = tuple(orders)
        bases = (bases,) * len(orders) if isinstance(bases, int) else tuple(bases)
        if len(bases) != len(orders):
            raise ValueError(f"bases are {bases}, expected one for each of {orders}")
        if heads < 1 or min(bases) < 2:
            raise ValueError(f"heads={heads} and bases={bases} must be >= 1 and >= 2")
        if len(set(layer_ids)) != len(tuple(layer_ids)):
            raise ValueError(f"layer_ids {tuple(layer_ids)} name a layer twice")
        bound = max(1, ((2**63 - 1) // vocab_size) // 2)
        multipliers, primes, seen = [], [], set()
        for layer in layer_ids:
            rng = np.random.default_rng(seed + _LAYER_STEP * layer)
            drawn = rng.integers(0, bound, size=max(orders), dtype=np.int64)
            multipliers.append(tuple(2 * int(r) + 1 for r in drawn))
            row = []
            for base in bases:
                candidate = base - 1
                for _ in range(heads):
                    candidate += 1
                    while candidate in seen or not is_prime(candidate):
                        candidate += 1
                    seen.add(candidate)
                    row.append(candidate)
            primes.append(tuple(row))
        return cls(
            vocab_size=vocab_size,
            pad_id=pad_id,
            orders=orders,
            multipliers=tuple(multipliers),
            primes=tuple(primes),
        )

    @property
    def max_order(self) -> int:
        """N, tokens of the longest n-gram."""
        return self.orders[-1]

    @property
    def num_layers(self) -> int:
        """L."""
        return len(self.primes)

    @property
    def num_columns(self) -> int:
        """C, rows that each token reads."""
        return len(self.primes[0])

    @property
    def heads(self) -> int:
        """Columns of one order."""
        return self.num_columns // len(self.orders)

    @property
    def num_rows(self) -> tuple[int, ...]:
        """Rows of each layer's table."""
        return tuple(sum(row) for row in self.primes)

    @functools.cached_property
    def offsets(self) -> np.ndarray:
        """i64[L, C], the first row of each column."""
        sizes = np.asarray(self.primes, np.int64)
        return np.cumsum(sizes, axis=1) - sizes

    def layer(self, index: int) -> Self:
        """The layout of one layer alone, counted from 0."""
        return dataclasses.replace(
            self,
            multipliers=(self.multipliers[index],),
            primes=(self.primes[index],),
        )

    def to_json(self) -> dict[str, Any]:
        """As JSON values; multipliers as text, which no reader rounds to a double."""
        return {
            "format": FORMAT,
            "vocab_size": self.vocab_size,
            "pad_id": self.pad_id,
            "orders": list(self.orders),
            "multipliers": [[str(m) for m in row] for row in self.multipliers],
            "primes": [list(row) for row in self.primes],
        }

    @classmethod
    def from_json(cls, data: Any) -> HashLayout:
        """Reads what `to_json` made.

        Raises:
          ValueError: it is something else, or multipliers are numbers.
        """
        if not isinstance(data, dict) or data.get("format") != FORMAT:
            raise ValueError(f"this is no hash layout of format {FORMAT!r}")
        fields = {"vocab_size", "pad_id", "orders", "multipliers", "primes"}
        if missing := sorted(fields - set(data)):
            raise ValueError(f"the hash layout lacks {missing}")
        for m in itertools.chain(*data["multipliers"]):
            if not (isinstance(m, str) and m.isdecimal()):
                raise ValueError(
                    f"multiplier {m!r} must be a decimal string: numbers of JSON lose "
                    "digits beyond 2^53"
                )
        return cls(
            vocab_size=data["vocab_size"],
            pad_id=data["pad_id"],
            orders=tuple(data["orders"]),
            multipliers=tuple(tuple(int(m) for m in r) for r in data["multipliers"]),
            primes=tuple(tuple(row) for row in data["primes"]),
        )
