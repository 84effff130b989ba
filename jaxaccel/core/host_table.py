"""Tables too large for a device: places to keep them behind one interface.

`DeviceTable` is on the device, `HostTable` in the host's memory, `PinnedTable` in
memory of the host that the device reads itself, `MappedTable` in a file, with the rows
that were read last in memory; `HotRows` keeps the most frequent rows of one of the
latter on the device. `prefetch(ids)` starts a gather of the rows, each once;
`Fetch.result` gives them on the device with the place of every lookup, the same bytes
whichever table it was.

All of them stand alone for now: a training step and decoding keep a model's tables on
the device, replicated, and nothing in the library makes a table of these. A caller
makes one for `nn.engram_host`.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import itertools
import json
import os
import pathlib
import threading
import time
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jaxaccel.core.memory import control_group_available, gib
from pallas_kernels.host_gather import host_gather


_FORMAT = "row-table-1"
_HEADER, _ROWS = "table.json", "rows.bin"
# Bytes that are written to a file at a time: a table on a device is never whole on the
# host.
_PIECE_BYTES = 2**28
# A gather thread is worth starting for this many rows.
_ROWS_PER_THREAD = 16_384


@dataclasses.dataclass(kw_only=True)
class TableStats:
    """What a table did so far.

    Attributes:
      fetches: calls of `prefetch`.
      lookups: ids asked for.
      rows: different rows of each fetch, summed.
      bytes: of those rows.
      cache_hits: rows that a `MappedTable` had in memory.
      gather_seconds: spent gathering and copying, beside the caller or not.
      wait_seconds: spent by callers waiting for a fetch to end.
    """

    fetches: int = 0
    lookups: int = 0
    rows: int = 0
    bytes: int = 0
    cache_hits: int = 0
    gather_seconds: float = 0.0
    wait_seconds: float = 0.0

    def __post_init__(self):
        self._lock = threading.Lock()

    def add(self, **amounts: float) -> None:
        """Adds to the named attributes; callers and workers do so at the same time."""
        with self._lock:
            for name, amount in amounts.items():
                setattr(self, name, getattr(self, name) + amount)


class Fetch:
    """Rows that are on their way."""

    def __init__(self, future: concurrent.futures.Future, stats: TableStats):
        """Use `prefetch`."""
        self._future, self._stats = future, stats

    def result(self) -> tuple[jax.Array, jax.Array]:
        """Waits for the rows.

        Returns:
          (rows [K, d] on the device, K a power of two, zeros behind the last row;
          slots i32, of the ids' shape: lookup i reads rows[slots[i]]).
        """
        began = time.perf_counter()
        rows = self._future.result()
        self._stats.add(wait_seconds=time.perf_counter() - began)
        return rows


class TableStore(Protocol):
    """What the tables have in common.

    Attributes:
      num_rows, width: N and d.
      dtype: of the rows.
      stats: what was done.
    """

    num_rows: int
    width: int
    dtype: np.dtype
    stats: TableStats

    def prefetch(self, ids: np.ndarray) -> Fetch: ...

    def close(self) -> None: ...


def unique_rows(ids: np.ndarray, num_rows: int) -> tuple[np.ndarray, np.ndarray, int]:
    """The rows of a fetch, each once.

    Args:
      ids: integers of any shape.
      num_rows: rows of the table.

    Returns:
      (ascending rows [n], slots i32 of the ids' shape, K: n raised to a power of two,
      so that few sizes are compiled for).

    Raises:
      ValueError: an id is no row.
    """
    ids = np.asarray(ids)
    if not np.issubdtype(ids.dtype, np.integer):
        raise ValueError(f"ids are {ids.dtype}, expected integers")
    outside = (ids < 0) | (ids >= num_rows)
    if outside.any():
        raise ValueError(
            f"row {ids[outside].flat[0]} is outside, allowed are 0 to {num_rows - 1}"
        )
    unique, slots = np.unique(ids, return_inverse=True)
    size = 1 << max(len(unique) - 1, 0).bit_length()
    return unique, slots.reshape(ids.shape).astype(np.int32), size


class _Direct:
    """A table whose rows the device gathers, when it gets there; see `TableStore`."""

    def __init__(self, rows: jax.Array, implementation: Any):
        self.num_rows, self.width = rows.shape
        self.dtype = np.dtype(rows.dtype)
        self.stats = TableStats()
        self._rows = rows
        self._gather = jax.jit(
            functools.partial(host_gather, implementation=implementation)
        )

    def prefetch(self, ids: np.ndarray) -> Fetch:
        """Starts the gather.

        Args:
          ids: integers of any shape, rows of the table.

        Returns:
          What to ask for the rows.

        Raises:
          ValueError: an id is no row.
        """
        began = time.perf_counter()
        unique, slots, size = unique_rows(ids, self.num_rows)
        # Behind the last row: one that isn't there, as zeros.
        padded = np.full(size, -1, np.int32)
        padded[: len(unique)] = unique
        rows = self._gather(self._rows, padded)
        _note(self.stats, ids, len(unique), self.width * self.dtype.itemsize, began)
        future: concurrent.futures.Future = concurrent.futures.Future()
        future.set_result((rows, jax.device_put(slots)))
        return Fetch(future, self.stats)

    def close(self) -> None:
        """Lets go of the table."""
        del self._rows


class PinnedTable(_Direct):
    """The whole table in pinned memory of the host; see `TableStore`.

    With the kernel ("mosaic") the device reads rows over the link without a copy: no
    thread of the host has a part in a fetch. The runtime may pin 64 GB unless
    `XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB` says more before it starts.
    """

    def __init__(
        self,
        rows: np.ndarray,
        *,
        budget_bytes: int | None = None,
        implementation: Any = None,
    ):
        """Copies the table into pinned memory.

        Args:
          rows: [N, d].
          budget_bytes: memory that the table may take; as much as it does by default.
          implementation: as of `pallas_kernels.host_gather`.

        Raises:
          ValueError: the table is larger.
        """
        if budget_bytes is not None:
            _check_budget(rows.nbytes, budget_bytes)
        place = jax.sharding.SingleDeviceSharding(
            jax.local_devices()[0], memory_kind="pinned_host"
        )
        super().__init__(jax.device_put(rows, place), implementation)


class DeviceTable(_Direct):
    """The whole table on the device; see `TableStore`."""

    def __init__(self, rows: jax.Array):
        """Takes the table [N, d]."""
        super().__init__(rows, "xla")


def _check_budget(size: int, budget: int) -> None:
    if size > budget:
        raise ValueError(
            f"a table of {gib(size)} is larger than the {gib(budget)} that it may take "
            "of the host's memory; keep it in a file (`MappedTable`)"
        )


def _note(stats: TableStats, ids: Any, rows: int, row_bytes: int, began: float) -> None:
    stats.add(
        fetches=1,
        lookups=np.size(ids),
        rows=rows,
        bytes=rows * row_bytes,
        gather_seconds=time.perf_counter() - began,
    )


class _Staged:
    """Gathers on a thread of its own into a buffer that every fetch writes again.

    A fetch ends when its copy to the device has: no consumer gets another step's rows,
    whether it keeps, donates or deletes what it got.
    """

    def __init__(self, num_rows: int, width: int, dtype: DTypeLike):
        self.num_rows, self.width = num_rows, width
        self.dtype = np.dtype(dtype)
        self.stats = TableStats()
        # One worker: fetches keep their order, and a cache has one writer.
        self._worker = concurrent.futures.ThreadPoolExecutor(1, "table_prefetch")
        self._buffer: np.ndarray | None = None

    def prefetch(self, ids: np.ndarray) -> Fetch:
        """Starts a gather beside the caller.

        Args:
          ids: integers of any shape, rows of the table.

        Returns:
          What to ask for the rows.

        Raises:
          ValueError: an id is no row.
        """
        unique, slots, size = unique_rows(ids, self.num_rows)
        return Fetch(self._worker.submit(self._fetch, unique, slots, size), self.stats)

    def _fetch(self, unique: np.ndarray, slots: np.ndarray, size: int):
        began = time.perf_counter()
        buffer = self._buffer
        # A device whose memory is the host's may keep the buffer instead of a copy.
        is_kept = jax.default_backend() == "cpu"
        if buffer is None or len(buffer) < size or is_kept:
            buffer = self._buffer = np.empty((size, self.width), self.dtype)
        rows = buffer[:size]
        self._gather(unique, rows[: len(unique)])
        rows[len(unique) :] = 0
        # Before anyone else has it: what was donated can no longer be waited for.
        on_device = jax.device_put(rows).block_until_ready()
        _note(self.stats, slots, len(unique), self.width * self.dtype.itemsize, began)
        return on_device, jax.device_put(slots)

    def _gather(self, unique: np.ndarray, out: np.ndarray) -> None:
        raise NotImplementedError

    def close(self) -> None:
        """Waits for what was started and ends the threads."""
        self._worker.shutdown()


class HostTable(_Staged):
    """The whole table in the host's memory; see `TableStore`."""

    def __init__(
        self,
        rows: np.ndarray,
        *,
        num_threads: int | None = None,
        budget_bytes: int | None = None,
    ):
        """Takes the table.

        Args:
          rows: [N, d]; of a file if it is mapped, which is read whole.
          num_threads: that gather; one for each processor by default.
          budget_bytes: memory that the table may take. By default as much as it does,
            or what the process's control group leaves a table that is still in a file.

        Raises:
          ValueError: the table is larger.
        """
        super().__init__(rows.shape[0], rows.shape[1], rows.dtype)
        is_mapped = isinstance(rows, np.memmap)
        budget = budget_bytes
        if budget is None and is_mapped:
            budget = control_group_available()
        if budget is not None:
            _check_budget(rows.nbytes, budget)
        self._rows = np.array(rows) if is_mapped else np.ascontiguousarray(rows)
        count = os.cpu_count() or 1 if num_threads is None else num_threads
        self._threads = concurrent.futures.ThreadPoolExecutor(count, "table_gather")
        self._num_threads = count

    def _gather(self, unique: np.ndarray, out: np.ndarray) -> None:
        parts = min(self._num_threads, 1 + len(unique) // _ROWS_PER_THREAD)
        cuts = [len(unique) * i // parts for i in range(parts + 1)]

        def part(start: int, stop: int) -> None:
            # The ids were checked; any other mode than "clip" gathers twice.
            np.take(
                self._rows,
                unique[start:stop],
                axis=0,
                out=out[start:stop],
                mode="clip",
            )

        jobs = [self._threads.submit(part, a, b) for a, b in itertools.pairwise(cuts)]
        for job in jobs:
            job.result()

    def close(self) -> None:
        """Waits for what was started and ends the threads."""
        super().close()
        self._threads.shutdown()


def save_table(
    folder: str | os.PathLike[str],
    rows: np.ndarray | jax.Array,
    *,
    description: Any = None,
) -> None:
    """Writes a table as a `MappedTable` reads it, in pieces.

    Args:
      folder: made if it isn't there.
      rows: [N, d] of any dtype, on the host or on a device.
      description: JSON that says what the rows belong to, a hash layout say.
    """
    path = pathlib.Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    header = {
        "format": _FORMAT,
        "shape": list(rows.shape),
        "dtype": np.dtype(rows.dtype).name,
        "description": description,
    }
    row_bytes = rows.shape[1] * np.dtype(rows.dtype).itemsize
    size = max(_PIECE_BYTES // max(row_bytes, 1), 1)
    with (path / _ROWS).open("wb") as file:
        for begin in range(0, rows.shape[0], size):
            count = min(size, rows.shape[0] - begin)
            if isinstance(rows, np.ndarray):
                piece = rows[begin : begin + count]
            else:
                # One program for all pieces of a size.
                piece = np.asarray(jax.lax.dynamic_slice_in_dim(rows, begin, count))
            np.ascontiguousarray(piece).view(np.uint8).tofile(file)
    # Last: a folder with a header is whole.
    (path / _HEADER).write_text(json.dumps(header), encoding="utf-8")


class MappedTable(_Staged):
    """A table in a file, larger than memory may be; see `TableStore`.

    Rows are read in ascending order. Those that were read last stay in memory, as many
    as the budget holds. What a fetch returns is a copy: rows that leave the cache are
    not taken from a step that still uses them.

    Attributes:
      description: what `save_table` was told.
      cache_rows: rows that memory holds at most.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        budget_bytes: int,
        description: Any = None,
    ):
        """Opens a table.

        Args:
          folder: of `save_table`.
          budget_bytes: memory for cached rows.
          description: what the rows must belong to; `None` takes any.

        Raises:
          FileNotFoundError: there is no table.
          ValueError: the file is damaged or of something else, or the budget does not
            hold a row.
        """
        path = pathlib.Path(folder)
        header = json.loads((path / _HEADER).read_text(encoding="utf-8"))
        if header.get("format") != _FORMAT:
            raise ValueError(f"{path} is no table of format {_FORMAT!r}")
        self.description = header["description"]
        if description is not None and description != self.description:
            raise ValueError(
                f"the table in {path} is of {_shown(self.description)}, expected "
                f"{_shown(description)}: every row would be a wrong one"
            )
        num_rows, width = header["shape"]
        super().__init__(num_rows, width, jnp.dtype(header["dtype"]))
        row_bytes = self.width * self.dtype.itemsize
        size = (path / _ROWS).stat().st_size
        if size != self.num_rows * row_bytes:
            raise ValueError(
                f"{path / _ROWS} has {size} bytes, {self.num_rows} rows of {row_bytes} "
                "bytes were written: it is damaged"
            )
        self.cache_rows = min(budget_bytes // row_bytes, self.num_rows)
        if self.cache_rows < 1:
            raise ValueError(
                f"budget_bytes={budget_bytes} must hold a row of {row_bytes} bytes"
            )
        raw = np.memmap(path / _ROWS, np.uint8, "r", shape=(self.num_rows, row_bytes))
        self._mapped = raw.view(self.dtype)
        self._cache = np.empty((self.cache_rows, self.width), self.dtype)
        # Cached rows ascending, with their places; and when each place was used last.
        self._ids = np.empty(0, np.int64)
        self._places = np.empty(0, np.int64)
        self._used = np.full(self.cache_rows, -1, np.int64)
        self._clock = 0
        self._lock = threading.Lock()

    def _gather(self, unique: np.ndarray, out: np.ndarray) -> None:
        with self._lock:
            self._clock += 1
            found = np.searchsorted(self._ids, unique)
            inside = found < len(self._ids)
            is_hit = np.zeros(len(unique), bool)
            is_hit[inside] = self._ids[found[inside]] == unique[inside]
            places = self._places[found[is_hit]]
            out[is_hit] = self._cache[places]
            self._used[places] = self._clock
            missing = unique[~is_hit]
            read = self._mapped[missing]
            out[~is_hit] = read
            self.stats.add(cache_hits=int(np.sum(is_hit)))
            self._keep(missing[: self.cache_rows], read[: self.cache_rows])

    def _keep(self, ids: np.ndarray, rows: np.ndarray) -> None:
        """Puts rows where the least recently used ones are."""
        if not len(ids):
            return
        count = len(ids)
        places = np.argpartition(self._used, count - 1)[:count]
        self._cache[places] = rows
        self._used[places] = self._clock
        stays = ~np.isin(self._places, places)
        ids = np.concatenate([self._ids[stays], ids])
        places = np.concatenate([self._places[stays], places])
        order = np.argsort(ids)
        self._ids, self._places = ids[order], places[order]


class HotRows:
    """Keeps a table's most frequent rows on the device; see `TableStore`.

    The set is chosen once, from counts of a text: nothing is replaced while a step
    runs, and the same ids give the same transfers again.

    Attributes:
      stats: those of the table behind, with the lookups that the set answered among
        `cache_hits`.
    """

    def __init__(self, store: TableStore, hot: np.ndarray):
        """Loads the set.

        Args:
          store: the table behind.
          hot: row numbers, as `nn.engram_stats.coverage` ranks them, say.

        Raises:
          ValueError: a row is none of the table's, or there is none.
        """
        self._hot = np.unique(np.asarray(hot))
        if not len(self._hot):
            raise ValueError("hot is empty, expected at least one row")
        self._store = store
        self.num_rows, self.width = store.num_rows, store.width
        self.dtype, self.stats = store.dtype, store.stats
        self._rows = store.prefetch(self._hot).result()[0][: len(self._hot)]
        self._join = jax.jit(lambda hot, cold: jnp.concatenate([hot, cold]))

    def prefetch(self, ids: np.ndarray) -> Fetch:
        """Starts fetching the rows that are not in the set.

        Raises:
          ValueError: an id is no row.
        """
        ids = np.asarray(ids)
        unique, slots, _ = unique_rows(ids, self.num_rows)
        place = np.minimum(np.searchsorted(self._hot, unique), len(self._hot) - 1)
        is_hot = self._hot[place] == unique
        cold = len(self._hot) + np.cumsum(~is_hot) - 1
        place = np.where(is_hot, place, cold).astype(np.int32)[slots]
        self.stats.add(cache_hits=int(np.sum(is_hot[slots])))
        return _Joined(self, self._store.prefetch(unique[~is_hot]), place)

    def close(self) -> None:
        """Closes the table behind."""
        self._store.close()


class _Joined(Fetch):
    """Hot rows in front of the fetched ones."""

    def __init__(self, table: HotRows, fetch: Fetch, slots: np.ndarray):
        self._table, self._fetch, self._slots = table, fetch, slots

    def result(self) -> tuple[jax.Array, jax.Array]:
        """See `Fetch.result`; K is not a power of two."""
        cold, _ = self._fetch.result()
        joined = self._table._join(self._table._rows, cold)
        return joined, jax.device_put(self._slots)


def _shown(description: Any) -> str:
    text = json.dumps(description)
    return text if len(text) < 60 else f"{text[:57]}..."
