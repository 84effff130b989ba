"""What a hashed memory does: collisions, occupied rows, coverage, gates, silence."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.engram_hash import HashLayout, hash_on_host


@dataclasses.dataclass(frozen=True, kw_only=True)
class HeadStats:
    """One column of a table, for M different n-grams.

    Attributes:
      order, head, rows: of the column.
      collided: share of n-grams whose row another one has as well.
      expected_collided: the same of a random hash, 1 - exp(-(M - 1) / rows).
      occupied: share of rows that some n-gram has.
      expected_occupied: the same of a random hash, 1 - exp(-M / rows).
    """

    order: int
    head: int
    rows: int
    collided: float
    expected_collided: float
    occupied: float
    expected_occupied: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class CollisionStats:
    """One order of a table.

    Attributes:
      heads: one entry for each column.
      heads_collided: i64[H + 1], n-grams by the number of their heads that another
        n-gram, whichever, has the row of.
      indistinct: n-grams that share all heads with one other.
    """

    heads: tuple[HeadStats, ...]
    heads_collided: np.ndarray
    indistinct: int


def collision_stats(
    grams: np.ndarray, layout: HashLayout, *, layer: int = 0
) -> CollisionStats:
    """Counts the collisions of n-grams.

    Args:
      grams: [M, n] compressed ids, oldest first; repeated ones count once.
      layout: the hash.
      layer: of its tables, counted from 0.

    Returns:
      What was counted.

    Raises:
      ValueError: the hash has no n-grams of that length, or there are none.
    """
    order = grams.shape[1]
    if order not in layout.orders:
        raise ValueError(f"n-grams of {order} tokens: the hash has {layout.orders}")
    if not len(grams):
        raise ValueError("there are no n-grams to count")
    grams = np.unique(grams, axis=0)
    columns = slice(
        layout.orders.index(order) * layout.heads,
        (layout.orders.index(order) + 1) * layout.heads,
    )
    ids, _ = hash_on_host(grams.astype(np.int32), layout.layer(layer))
    ids = ids[:, -1, 0, columns]  # [M, H]
    shared = np.zeros(len(grams), np.int64)
    heads, total = [], len(grams)
    for head, rows in enumerate(layout.primes[layer][columns]):
        _, inverse, counts = np.unique(
            ids[:, head], return_inverse=True, return_counts=True
        )
        collided = counts[inverse] > 1
        shared += collided
        heads.append(
            HeadStats(
                order=order,
                head=head,
                rows=rows,
                collided=float(np.mean(collided)),
                expected_collided=-float(np.expm1(-(total - 1) / rows)),
                occupied=len(counts) / rows,
                expected_occupied=-float(np.expm1(-total / rows)),
            )
        )
    _, counts = np.unique(ids, axis=0, return_counts=True)
    return CollisionStats(
        heads=tuple(heads),
        heads_collided=np.bincount(shared, minlength=layout.heads + 1),
        indistinct=int(np.sum(counts[counts > 1])),
    )


def coverage(
    ids: np.ndarray, shares: Sequence[float] = (0.5, 0.9, 0.99)
) -> tuple[dict[float, int], np.ndarray]:
    """How few rows most lookups read: what a cache of hot rows would hold.

    Args:
      ids: row numbers of a text, any shape.
      shares: of all lookups.

    Returns:
      (share -> rows that are enough for it, the most frequent first; those rows, most
      frequent first, the smaller number first where two are read equally often).

    Raises:
      ValueError: a share is not in (0, 1].
    """
    for share in shares:
        if not 0.0 < share <= 1.0:
            raise ValueError(f"share {share} must be above 0 and at most 1")
    rows, counts = np.unique(ids, return_counts=True)
    ranked = np.argsort(-counts, kind="stable")
    reached = np.cumsum(counts[ranked])
    needed = {
        share: int(np.searchsorted(reached, share * reached[-1] - 1e-9)) + 1
        for share in shares
    }
    return needed, rows[ranked]


def memory_gates(
    model: Any, tokens: jax.Array, segments: jax.Array | None = None
) -> tuple[jax.Array, ...]:
    """The gates of each of a decoder's memories on a text.

    Args:
      model: a `Decoder` with a memory.
      tokens: i32[B, T].
      segments: i32[B, T] as the decoder takes them.

    Returns:
      f32[B, T, G] for each layer with a memory.
    """
    output = model(tokens, segments, output_hidden_states=True)
    ids = model.memory.lookups(tokens, segments)
    places = model.config.engram.places
    return tuple(
        engram.gates(output.hidden_states[place], ids[:, :, index])
        for index, (engram, place) in enumerate(
            zip(model.memory.layers, places, strict=True)
        )
    )


def gate_histogram(
    gates: jax.typing.ArrayLike, is_real: jax.typing.ArrayLike, *, bins: int = 20
) -> tuple[np.ndarray, np.ndarray]:
    """Counts gates by size.

    Args:
      gates: f32[B, T, G].
      is_real: bool[B, T], false on padding, which doesn't count.
      bins: equal parts of 0 to 1.

    Returns:
      (i64[G, bins], f64[bins + 1] their borders).
    """
    real = np.asarray(gates)[np.asarray(is_real)]  # [tokens, G]
    borders = np.linspace(0.0, 1.0, bins + 1)
    counts = [np.histogram(stream, borders)[0] for stream in real.T]
    return np.stack(counts), borders


def silenced(params: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
    """A decoder's named parameters with a memory that adds exactly nothing.

    Args:
      params: arrays by name, see `core.tree`.

    Returns:
      The same with the projections of memories zero.

    Raises:
      ValueError: there is no memory.
    """
    names = [n for n in params if n.startswith("memory/layers/") and "/kv_proj/" in n]
    if not names:
        raise ValueError("these are parameters of a model without a memory")
    return {**params, **{name: jnp.zeros_like(params[name]) for name in names}}
