"""Packs documents of unequal length into rows of one length.

Best-fit-decreasing inside a window of documents: the longest first, each into the row
with the least free space that still holds it. The window bounds memory and keeps the
shuffle of the documents alive; rows are shuffled at the end, because a window's rows
come out sorted by length.
"""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np


ALGORITHMS = ("bfd", "first_fit", "next_fit")
OVERLONG = ("error", "truncate", "split", "drop")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Packing:
    """Rows of pieces of documents, in compressed form.

    Row r holds the pieces `row_starts[r]` to `row_starts[r + 1]`, in the order of their
    offsets.

    Attributes:
      row_length: T.
      row_starts: i64[R + 1], index of each row's first piece.
      document: i64[P], which document the piece is of.
      start: i64[P], where the piece begins inside its document.
      length: i64[P], tokens of the piece.
      offset: i64[P], where the piece begins inside its row.
      dropped_tokens: tokens that `overlong` left out.
    """

    row_length: int
    row_starts: np.ndarray
    document: np.ndarray
    start: np.ndarray
    length: np.ndarray
    offset: np.ndarray
    dropped_tokens: int = 0

    @property
    def num_rows(self) -> int:
        return len(self.row_starts) - 1

    @property
    def efficiency(self) -> float:
        """Real tokens over tokens of the rows, 1.0 where nothing is padded."""
        slots = self.num_rows * self.row_length
        return float(self.length.sum() / slots) if slots else 0.0

    @property
    def documents_per_row(self) -> float:
        return len(self.length) / self.num_rows if self.num_rows else 0.0

    def rows(self) -> Iterator[list[tuple[int, int, int]]]:
        """Yields each row as a list of (document, start, length)."""
        for begin, end in zip(self.row_starts[:-1], self.row_starts[1:], strict=True):
            columns = (self.document, self.start, self.length)
            yield list(zip(*(c[begin:end].tolist() for c in columns), strict=True))


def pack(
    lengths: Sequence[int] | np.ndarray,
    row_length: int,
    *,
    algorithm: str = "bfd",
    window: int | None = 1024,
    align: int = 1,
    max_docs: int | None = None,
    overlong: str = "error",
    seed: int | Sequence[int] | None = None,
    names: Sequence[str] | None = None,
) -> Packing:
    """Packs documents into rows.

    Args:
      lengths: i[N], tokens of each document, in the order they come; empty ones take
        no place.
      row_length: T, tokens of a row.
      algorithm: "bfd" (best fit, longest first), "first_fit" (the oldest row that has
        room, documents in order) or "next_fit" (only the newest row).
      window: pieces that are packed together; the rows of a window are closed at its
        end. None packs all at once. "next_fit" needs no window.
      align: every piece begins at a multiple of this, e.g. 64 where a kernel works in
        chunks of 64 tokens.
      max_docs: most pieces in a row; None sets no limit.
      overlong: what to do with a document longer than a row: "error" refuses it,
        "truncate" keeps its first `row_length` tokens, "split" cuts it into pieces of
        `row_length` and a rest, each a document of its own from there on, "drop"
        leaves it out.
      seed: of the shuffle of the rows; None keeps them in order.
      names: what the documents are called in errors.

    Returns:
      The packing.

    Raises:
      ValueError: an argument is not allowed, a length is negative, or a document is
        longer than a row under `overlong="error"`.
    """
    if algorithm not in ALGORITHMS:
        raise ValueError(f"algorithm is {algorithm!r}, allowed are {ALGORITHMS}")
    if overlong not in OVERLONG:
        raise ValueError(f"overlong is {overlong!r}, allowed are {OVERLONG}")
    for name, value in (("row_length", row_length), ("align", align)):
        if value < 1:
            raise ValueError(f"{name} is {value}, must be at least 1")
    for name, value in (("window", window), ("max_docs", max_docs)):
        if value is not None and value < 1:
            raise ValueError(f"{name} is {value}, must be None or at least 1")
    lengths = np.asarray(lengths, np.int64).reshape(-1)
    if (lengths < 0).any():
        index = int(np.argmax(lengths < 0))
        raise ValueError(
            f"{_name(index, names)} has length {lengths[index]}, must not be negative"
        )
    document, start, length = _pieces(lengths, row_length, overlong, names)
    row = np.zeros(len(length), np.int64)
    offset = np.zeros(len(length), np.int64)
    places = {"bfd": _best_fit, "first_fit": _first_fit, "next_fit": _next_fit}
    size = len(length) if window is None or algorithm == "next_fit" else window
    num_rows = 0
    for begin in range(0, len(length), max(size, 1)):
        part = slice(begin, begin + size)
        rows = _Rows(row_length, align, max_docs)
        row[part], offset[part] = places[algorithm](length[part], rows)
        row[part] += num_rows
        num_rows += rows.count
    if seed is not None:
        row = np.random.default_rng(seed).permutation(num_rows)[row]
    order = np.lexsort((offset, row))
    counts = np.bincount(row, minlength=num_rows)
    return Packing(
        row_length=row_length,
        row_starts=np.concatenate([[0], np.cumsum(counts)]).astype(np.int64),
        document=document[order],
        start=start[order],
        length=length[order],
        offset=offset[order],
        dropped_tokens=int(lengths.sum() - length.sum()),
    )


def _name(index: int, names: Sequence[str] | None) -> str:
    return f"document {index}" if names is None else f"document {names[index]!r}"


def _pieces(
    lengths: np.ndarray, row_length: int, overlong: str, names: Sequence[str] | None
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Cuts documents to what fits a row: (document, start, length), i64[P] each."""
    document = np.arange(len(lengths), dtype=np.int64)
    is_long = lengths > row_length
    if overlong == "error" and is_long.any():
        index = int(np.argmax(is_long))
        raise ValueError(
            f"{_name(index, names)} has {lengths[index]} tokens, a row holds "
            f"{row_length}; overlong='truncate', 'split' or 'drop' allows it"
        )
    if overlong == "drop":
        document = document[~is_long]
    if overlong == "split":
        repeats = np.maximum(-(-lengths // row_length), 1)
        document = np.repeat(document, repeats)
        first = np.repeat(np.cumsum(repeats) - repeats, repeats)
        start = (np.arange(len(document)) - first) * row_length
    else:
        start = np.zeros(len(document), np.int64)
    length = np.minimum(lengths[document] - start, row_length)
    filled = length > 0
    return document[filled], start[filled], length[filled]


class _Rows:
    """Open rows of a window: where the next piece would begin in each."""

    def __init__(self, row_length: int, align: int, max_docs: int | None):
        self.row_length = row_length
        self.align = align
        self.max_docs = max_docs
        self.count = 0
        self._begin: list[int] = []
        self._pieces: list[int] = []

    def open(self) -> int:
        """Adds an empty row and returns its index."""
        self._begin.append(0)
        self._pieces.append(0)
        self.count += 1
        return self.count - 1

    def add(self, row: int, length: int) -> tuple[int, int]:
        """Puts a piece into a row; returns its offset and the free space behind it."""
        offset = self._begin[row]
        begin = -(-(offset + length) // self.align) * self.align
        self._begin[row] = begin
        self._pieces[row] += 1
        is_full = self.max_docs is not None and self._pieces[row] >= self.max_docs
        return offset, 0 if is_full else max(self.row_length - begin, 0)


def _best_fit(length: np.ndarray, rows: _Rows) -> tuple[np.ndarray, np.ndarray]:
    """Longest first, each into the fullest row that holds it."""
    row = np.zeros(len(length), np.int64)
    offset = np.zeros(len(length), np.int64)
    # Sorted distinct free spaces, and the rows of each: a search and a pop per piece.
    spaces: list[int] = []
    rows_of: dict[int, list[int]] = {}
    for index in np.argsort(-length, kind="stable").tolist():
        size = int(length[index])
        found = bisect.bisect_left(spaces, size)
        if found == len(spaces):
            chosen = rows.open()
        else:
            space = spaces[found]
            chosen = rows_of[space].pop()
            if not rows_of[space]:
                del rows_of[space], spaces[found]
        row[index] = chosen
        offset[index], free = rows.add(chosen, size)
        if free > 0:
            if free not in rows_of:
                rows_of[free] = []
                bisect.insort(spaces, free)
            rows_of[free].append(chosen)
    return row, offset


def _first_fit(length: np.ndarray, rows: _Rows) -> tuple[np.ndarray, np.ndarray]:
    """In order, each into the oldest row that holds it."""
    row = np.zeros(len(length), np.int64)
    offset = np.zeros(len(length), np.int64)
    free = np.zeros(len(length), np.int64)
    for index, size in enumerate(length.tolist()):
        fits = free[: rows.count] >= size
        chosen = int(np.argmax(fits)) if fits.any() else rows.open()
        row[index] = chosen
        offset[index], free[chosen] = rows.add(chosen, size)
    return row, offset


def _next_fit(length: np.ndarray, rows: _Rows) -> tuple[np.ndarray, np.ndarray]:
    """In order, each into the newest row or else into a new one."""
    row = np.zeros(len(length), np.int64)
    offset = np.zeros(len(length), np.int64)
    free = 0
    for index, size in enumerate(length.tolist()):
        chosen = rows.count - 1 if size <= free else rows.open()
        row[index] = chosen
        offset[index], free = rows.add(chosen, size)
    return row, offset
