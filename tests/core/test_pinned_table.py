"""A table in pinned memory: the bytes of the other tables, and its own limits."""

import numpy as np
import pytest

from jaxaccel.core.host_table import DeviceTable, HostTable, HotRows, PinnedTable
from pallas_kernels._common.interpret import interpreted


N, D = 64, 128


@pytest.fixture
def rows():
    rng = np.random.default_rng(0)
    return rng.integers(-(2**15), 2**15, (N, D)).astype(np.int16)


def test_it_gives_what_a_table_on_the_device_gives(rows):
    pinned, device = PinnedTable(rows), DeviceTable(rows)
    assert pinned._rows.sharding.memory_kind == "pinned_host"
    rng = np.random.default_rng(1)
    for i in range(4):
        ids = rng.integers(0, N, (3, 1 + 2 * i)).astype(np.int32)
        ids[0, 0], ids[1, 0] = 0, N - 1
        for got, want in zip(
            pinned.prefetch(ids).result(), device.prefetch(ids).result(), strict=True
        ):
            assert got.sharding.memory_kind == "device"
            np.testing.assert_array_equal(got, want)
    assert pinned.stats.rows == device.stats.rows
    assert pinned.stats.bytes == pinned.stats.rows * 2 * D
    pinned.close()


def test_the_kernel_pads_with_zeros(rows):
    device = DeviceTable(rows)
    with interpreted():
        # The interpreter has no memory of the host: the rows lie on the device.
        kernel = PinnedTable(rows, implementation="mosaic")
        kernel._rows = device._rows
        ids = np.array([[5, 63, 5], [0, 5, 7], [9, 9, 9]])
        got, slots = kernel.prefetch(ids).result()
    assert got.shape == (8, D)
    np.testing.assert_array_equal(np.asarray(got)[np.asarray(slots)], rows[ids])
    assert not np.asarray(got)[5:].any()


def test_hot_rows_stand_in_front_of_it(rows):
    hot = HotRows(PinnedTable(rows), np.array([9, 2]))
    ids = np.array([[2, 9], [5, 63]])
    got, slots = hot.prefetch(ids).result()
    np.testing.assert_array_equal(np.asarray(got)[np.asarray(slots)], rows[ids])


@pytest.mark.parametrize("table", [PinnedTable, HostTable])
def test_a_table_larger_than_its_budget_is_refused(rows, table):
    with pytest.raises(ValueError, match="larger than the"):
        table(rows, budget_bytes=rows.nbytes - 1)
    table(rows, budget_bytes=rows.nbytes).close()


def test_an_id_that_is_no_row_is_named(rows):
    with pytest.raises(ValueError, match="row 64 is outside"):
        PinnedTable(rows).prefetch(np.array([64]))


@pytest.mark.gpu
def test_the_kernel_on_the_card(rows):
    pinned = PinnedTable(rows, implementation="mosaic")
    ids = np.random.default_rng(2).integers(0, N, (40, 3))
    for _ in range(20):
        got, slots = pinned.prefetch(ids).result()
        np.testing.assert_array_equal(np.asarray(got)[np.asarray(slots)], rows[ids])
