"""Tables on device, host and in a file: the same bytes, and no row of another step."""

import json
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxaccel.core import host_table
from jaxaccel.core.host_table import (
    DeviceTable,
    HostTable,
    HotRows,
    MappedTable,
    save_table,
    unique_rows,
)


N, D = 64, 8
LAYOUT = {"vocab_size": 97, "multipliers": [["78284821251697249"]]}


def table_of(dtype, num_rows=N):
    rng = np.random.default_rng(0)
    bits = rng.integers(0, 2**16, (num_rows, D)).astype(np.float32)
    return (bits / 997).astype(jnp.dtype(dtype))


@pytest.fixture
def stores(tmp_path):
    """stores(dtype) makes one table of each kind."""
    made = []

    def make(dtype="bfloat16", **changes):
        rows = table_of(dtype)
        save_table(tmp_path / dtype, rows, description=LAYOUT)
        row_bytes = D * rows.dtype.itemsize
        budget = {"budget_bytes": 12 * row_bytes} | changes
        made[:] = [
            DeviceTable(jnp.asarray(rows)),
            HostTable(rows, num_threads=2),
            MappedTable(tmp_path / dtype, description=LAYOUT, **budget),
        ]
        return rows, made

    yield make
    for store in made:
        store.close()


def looked_up(fetch):
    rows, slots = fetch.result()
    return np.asarray(rows)[np.asarray(slots)]


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_all_tiers_give_the_same_bytes(stores, dtype):
    rows, (device, host, mapped) = stores(dtype)
    rng = np.random.default_rng(1)
    for i in range(8):
        # More rows than the cache holds; first and last of the table among them.
        ids = rng.integers(0, N, (3, 1 + 2 * i)).astype(np.int32)
        ids[0, 0], ids[1, 0] = 0, N - 1
        results = [store.prefetch(ids).result() for store in (device, host, mapped)]
        for got, slots in results:
            assert got.dtype == rows.dtype
            np.testing.assert_array_equal(slots, results[0][1])
            np.testing.assert_array_equal(
                np.asarray(got).view(np.uint8), np.asarray(results[0][0]).view(np.uint8)
            )
            np.testing.assert_array_equal(np.asarray(got)[np.asarray(slots)], rows[ids])
        assert len(results[0][0]) & (len(results[0][0]) - 1) == 0
    for store in (device, host, mapped):
        assert store.stats.fetches == 8
        assert store.stats.lookups == sum(3 * (1 + 2 * i) for i in range(8))
        assert store.stats.bytes == store.stats.rows * D * rows.dtype.itemsize
    assert mapped.cache_rows == 12 < N
    assert 0 < mapped.stats.cache_hits < mapped.stats.rows


@pytest.mark.parametrize("place", [np.asarray, jnp.asarray])
@pytest.mark.parametrize("piece_bytes", [1, 25 * D * 2, 2**20])
def test_a_table_is_written_in_pieces(tmp_path, monkeypatch, place, piece_bytes):
    rows = table_of("bfloat16")
    monkeypatch.setattr(host_table, "_PIECE_BYTES", piece_bytes)
    save_table(tmp_path, place(rows))
    written = np.fromfile(tmp_path / "rows.bin", rows.dtype).reshape(rows.shape)
    np.testing.assert_array_equal(written.view(np.uint8), rows.view(np.uint8))


def test_cache_keeps_what_was_read_last(stores):
    rows, (*_, mapped) = stores()
    mapped.prefetch(np.arange(12)).result()
    assert mapped.stats.cache_hits == 0
    mapped.prefetch(np.arange(6)).result()
    assert mapped.stats.cache_hits == 6
    # Six new rows push out those that were not read again.
    mapped.prefetch(np.arange(20, 26)).result()
    mapped.prefetch(np.arange(6)).result()
    assert mapped.stats.cache_hits == 12
    np.testing.assert_array_equal(looked_up(mapped.prefetch([6, 25])), rows[[6, 25]])
    assert mapped.stats.cache_hits == 13


def test_hot_rows_come_from_the_device(stores):
    rows, (_, host, mapped) = stores()
    for store in (host, mapped):
        hot = HotRows(store, np.array([9, 2, 63, 2]))
        assert store.stats.rows == 3
        for ids in ([[2, 9], [5, 63]], [[9, 9], [2, 2]], [[5, 6], [5, 8]]):
            np.testing.assert_array_equal(
                looked_up(hot.prefetch(np.array(ids))), rows[ids]
            )
        # Only rows outside of the set were fetched: 5, none, and 5, 6, 8.
        assert store.stats.rows == 3 + 1 + 0 + 3
        assert hot.stats is store.stats
        with pytest.raises(ValueError, match="row 64 is outside"):
            hot.prefetch(np.array([64]))
    assert host.stats.cache_hits == 3 + 4
    with pytest.raises(ValueError, match="hot is empty"):
        HotRows(host, np.array([], int))


def test_a_later_prefetch_takes_no_rows_from_a_running_step(stores):
    rows, tables = stores(budget_bytes=4 * D * 2)
    for store in tables:
        running = store.prefetch(np.arange(4)).result()
        # More fetches than there are buffers, none of them waited for.
        later = [store.prefetch(np.arange(4 * i, 4 * i + 4)) for i in range(1, 8)]
        for i, fetch in enumerate(later, start=1):
            np.testing.assert_array_equal(looked_up(fetch), rows[4 * i : 4 * i + 4])
        got = np.asarray(running[0])[np.asarray(running[1])]
        np.testing.assert_array_equal(got, rows[:4])


class Late:
    """An array whose copy to the device starts when somebody waits for it."""

    def __init__(self, rows):
        self._rows, self._arrived, self._is_donated = rows, None, False

    def block_until_ready(self):
        assert not self._is_donated, "a donated array was waited for"
        self.arrive()
        return self

    def arrive(self):
        if self._arrived is None:
            self._arrived = self._rows.copy()
        return self._arrived

    def donate(self):
        self._is_donated = True

    def is_deleted(self):
        return self._is_donated


def test_a_donated_fetch_keeps_its_rows(stores, monkeypatch):
    rows, (_, *tables) = stores()
    # On a device with memory of its own, a fetch's buffer is written again.
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax, "device_put", Late)
    for store in tables:
        fetched = []
        for start in range(0, N, 4):
            got, _ = store.prefetch(np.arange(start, start + 4)).result()
            got.donate()
            fetched.append(got.arrive)
        for i, arrive in enumerate(fetched):
            np.testing.assert_array_equal(arrive(), rows[4 * i : 4 * i + 4])


def test_prefetch_runs_beside_the_caller(stores):
    rows, (_, host, mapped) = stores()
    for store in (host, mapped):
        gather, may_go, thread = store._gather, threading.Event(), []

        def slow(*args, gather=gather, may_go=may_go, thread=thread):
            assert may_go.wait(10)
            thread.append(threading.current_thread())
            gather(*args)

        store._gather = slow
        fetch = store.prefetch(np.arange(5))  # returns though nothing was gathered
        assert not thread
        may_go.set()
        np.testing.assert_array_equal(looked_up(fetch), rows[:5])
        assert thread[0] is not threading.current_thread()
        assert store.stats.wait_seconds > 0


def test_many_rows_are_gathered_by_several_threads():
    rows = table_of("float32", num_rows=40_000)
    host = HostTable(rows, num_threads=3)
    ids = np.random.default_rng(0).permutation(40_000)
    np.testing.assert_array_equal(looked_up(host.prefetch(ids)), rows[ids])
    host.close()


def test_rows_serve_the_modules_lookup(stores):
    from jaxaccel.nn.engram import GatheredRows

    rows, tables = stores("float32")
    ids = np.random.default_rng(0).integers(0, N, (2, 5, 4)).astype(np.int32)
    for store in tables:
        lookup = jax.jit(lambda rows, slots: GatheredRows(rows, slots)(slots))
        np.testing.assert_array_equal(lookup(*store.prefetch(ids).result()), rows[ids])


def test_what_is_wrong_is_said(tmp_path, stores):
    rows, tables = stores()
    for store in tables:
        with pytest.raises(ValueError, match="row 64 is outside"):
            store.prefetch(np.array([3, 64]))
        with pytest.raises(ValueError, match="row -1 is outside"):
            store.prefetch(np.array([-1]))
    with pytest.raises(ValueError, match="expected integers"):
        unique_rows(np.array([1.0]), N)
    with pytest.raises(ValueError, match=r"larger than the 0\.000488 MiB"):
        HostTable(rows, budget_bytes=512)
    folder = tmp_path / "bfloat16"
    with pytest.raises(ValueError, match="must hold a row of 16 bytes"):
        MappedTable(folder, budget_bytes=15)
    other = LAYOUT | {"vocab_size": 96}
    with pytest.raises(ValueError, match="every row would be a wrong one"):
        MappedTable(folder, budget_bytes=1024, description=other)
    with (folder / "rows.bin").open("ab") as file:
        file.write(b"0")
    with pytest.raises(ValueError, match="it is damaged"):
        MappedTable(folder, budget_bytes=1024)
    (folder / "table.json").write_text(json.dumps({"format": "x"}))
    with pytest.raises(ValueError, match="is no table of format"):
        MappedTable(folder, budget_bytes=1024)
    with pytest.raises(FileNotFoundError):
        MappedTable(tmp_path / "absent", budget_bytes=1024)
