"""Batches of packed rows by index: what the iterators and their workers read.

The train stream is the rows of epoch 0, then of epoch 1, and so on; batch n is its rows
n B to (n + 1) B, and process p of P reads the p-th of P equal parts of it. The rows of
an epoch depend on the seed and the epoch only, so any batch can be built without the
batches before it. What a resumed stream cannot know without packing again is how
many rows the epochs before had, so an iterator's state tells its epoch's first row.

No jax here: worker processes import this module.
"""

from __future__ import annotations

import bisect
import copy
import dataclasses
import sys
import threading
from typing import Any

import numpy as np

from jaxaccel.data.corpus import TokenStore
from jaxaccel.data.mixture import Mixture
from jaxaccel.data.packing import Packing, pack


@dataclasses.dataclass(frozen=True, kw_only=True)
class StreamSpec:
    """What decides the rows of a stream, as in `DataConfig`."""

    seq_len: int
    batch_size: int
    packing: str
    window: int | None
    align: int
    max_docs: int | None
    overlong: str
    seed: int


class PackedStream:
    """Random access to the batches of one split."""

    def __init__(
        self,
        spec: StreamSpec,
        store: TokenStore,
        token_bytes: np.ndarray,
        documents: np.ndarray,
        mixture: Mixture | None,
        names: tuple[str, ...] | None = None,
    ):
        """Makes a stream.

        Args:
          spec: what decides the rows.
          store: the tokens of all documents.
          token_bytes: i32[vocab], bytes of text that each id stands for.
          documents: i64[n], the split's documents in the store, source after source.
          mixture: plan of the epochs over `documents`; None reads them once.
          names: of the documents of the store, for errors.
        """
        self._spec = spec
        self._store = store
        self._token_bytes = token_bytes.astype(np.float32)
        self._documents = documents
        self._mixture = mixture
        self._names = names
        self._lengths = store.lengths
        # The stream can be read from here on: an epoch, and its first row.
        self._base = (0, 0)
        self._ends: list[int] = []  # The row behind each epoch, from the base on.
        self._packed: dict[int, tuple[np.ndarray, Packing]] = {}
        self._lock = threading.RLock()

    def __getstate__(self) -> dict[str, Any]:
        state = dict(self.__dict__)
        # A lock cannot travel; the rows can be packed anew where they are needed.
        state.update(_packed={}, _lock=None)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _lock=threading.RLock())

    @property
    def num_batches(self) -> int:
        """Batches of the stream; as good as endless for a train split."""
        if self._mixture is not None:
            return sys.maxsize
        return -(-self.packing(0).num_rows // self._spec.batch_size)

    def packing(self, epoch: int) -> Packing:
        """How the rows of an epoch are packed.

        Raises:
          ValueError: no row is left, or a document is too long.
        """
        return self._epoch(epoch)[1]

    def position(self, batch: int) -> tuple[int, int]:
        """The epoch that a batch begins in, and that epoch's first row."""
        row = batch * self._spec.batch_size
        located = self._locate(row)
        return (0, 0) if located is None else (located[0], row - located[1])

    def based_at(self, epoch: int, first_row: int) -> PackedStream:
        """The same stream, to be read from an epoch on without the ones before it."""
        moved = copy.copy(self)
        moved._base, moved._ends = (epoch, first_row), []
        return moved

    def batch(self, index: int, part: int, parts: int) -> dict[str, np.ndarray]:
        """Builds one process's share of a batch.

        Args:
          index: of the batch, from 0.
          part: which process.
          parts: of how many; divides the batch size.

        Returns:
          The fields of a `PackedBatch`, i32 or f32 [batch_size / parts, seq_len]; rows
          past the end of a finite stream are all padding.
        """
        spec = self._spec
        count = spec.batch_size // parts
        shape = (count, spec.seq_len)
        tokens, targets, segments, positions = np.zeros((4, *shape), np.int32)
        first = index * spec.batch_size + part * count
        for row in range(count):
            located = self._locate(first + row)
            if located is not None:
                outs = (tokens[row], targets[row], segments[row], positions[row])
                self._fill(*located, *outs)
        mask = np.zeros(shape, np.float32)
        mask[:, :-1] = (segments[:, 1:] == segments[:, :-1]) & (segments[:, 1:] > 0)
        return {
            "tokens": tokens,
            "targets": targets,
            "segment_ids": segments,
            "positions": positions,
            "loss_mask": mask,
            "num_bytes": self._token_bytes[targets] * mask,
        }

    def _fill(
        self,
        epoch: int,
        row: int,
        tokens: np.ndarray,
        targets: np.ndarray,
        segments: np.ndarray,
        positions: np.ndarray,
    ) -> None:
        """Writes the pieces of one row into i32[seq_len] arrays."""
        documents, packing = self._epoch(epoch)
        begin, end = packing.row_starts[row : row + 2].tolist()
        for segment, piece in enumerate(range(begin, end), start=1):
            length = int(packing.length[piece])
            source = self._store.starts[documents[packing.document[piece]]]
            source += packing.start[piece]
            read = self._store.tokens[source : source + length]
            offset = int(packing.offset[piece])
            place = slice(offset, offset + length)
            tokens[place] = read
            targets[offset : offset + length - 1] = read[1:]
            segments[place] = segment
            positions[place] = np.arange(length)

    def _locate(self, row: int) -> tuple[int, int] | None:
        """The (epoch, row) of a row of the stream; None past a finite one's end."""
        if self._mixture is None:
            return (0, row) if row < self.packing(0).num_rows else None
        epoch, first = self._base
        if row < first:
            raise IndexError(f"row {row} lies before the stream's base at row {first}")
        with self._lock:
            ends = self._ends
            while not ends or ends[-1] <= row:
                rows = self.packing(epoch + len(ends)).num_rows
                ends.append((ends[-1] if ends else first) + rows)
            passed = bisect.bisect_right(ends, row)
        return epoch + passed, row - (ends[passed - 1] if passed else first)

    def _epoch(self, epoch: int) -> tuple[np.ndarray, Packing]:
        """Documents and packing of an epoch; the last two epochs are kept."""
        with self._lock:
            if epoch not in self._packed:
                self._packed[epoch] = self._pack(epoch)
                # Workers and a consumer behind them may stand in two epochs at once.
                for old in sorted(self._packed, key=lambda e: abs(e - epoch))[2:]:
                    del self._packed[old]
            return self._packed[epoch]

    def _pack(self, epoch: int) -> tuple[np.ndarray, Packing]:
        spec = self._spec
        documents = self._documents
        if self._mixture is not None:
            documents = documents[self._mixture.epoch(epoch, spec.seed)]
        names = None
        if self._names is not None and spec.overlong == "error":
            names = [self._names[document] for document in documents.tolist()]
        packing = pack(
            self._lengths[documents],
            spec.seq_len,
            algorithm=spec.packing,
            window=spec.window,
            align=spec.align,
            max_docs=spec.max_docs,
            overlong=spec.overlong,
            seed=[spec.seed, 2, epoch],
            names=names,
        )
        if not packing.num_rows:
            raise ValueError(
                f"no row is left of {len(documents)} documents under "
                f"overlong={spec.overlong!r} at seq_len={spec.seq_len}"
            )
        return documents, packing


@dataclasses.dataclass(frozen=True, kw_only=True)
class BatchSource:
    """One process's batches from a given one on, as grain reads them."""

    stream: PackedStream
    first: int
    process_index: int
    process_count: int

    def __len__(self) -> int:
        return self.stream.num_batches - self.first

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        batch = self.first + index
        return self.stream.batch(batch, self.process_index, self.process_count)
