"""`tile_bounds` of `attention` against whole masks."""

import functools

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.attention import tile_bounds
from pallas_kernels.attention.tiles import INVALID, TILE


TIME = 300
MOST = 6  # documents
MASKS = {
    "causal": {"causal": True, "window": None},
    "window": {"causal": True, "window": 70},
    "window_one": {"causal": True, "window": 1},
    "full": {"causal": False, "window": None},
    "full_window": {"causal": False, "window": 100},
}


@functools.cache
def compiled(name, block_q, block_kv, prefix):
    def run(ids, is_prefix):
        return tile_bounds(
            batch=ids.shape[0],
            time=TIME,
            q_segment_ids=ids,
            kv_segment_ids=ids,
            is_prefix=is_prefix if prefix else None,
            block_q=block_q,
            block_kv=block_kv,
            **MASKS[name],
        )

    return jax.jit(run)


def allowed(ids, is_prefix, *, causal, window):
    """bool[B, T, S], pair by pair as `reference.py` has it."""
    query, key = np.arange(TIME)[:, None], np.arange(TIME)[None, :]
    mask = (ids[:, :, None] == ids[:, None, :]) & (ids != 0)[:, :, None]
    if causal:
        mask &= (key <= query) | is_prefix[:, None, :]
    if window is not None:
        mask &= query - key < window
    return mask


def check(bounds, mask, block_q, block_kv):
    """Tables say of every tile whether it has a pair, and claim no full one falsely."""
    padded = np.zeros((mask.shape[0], 384, 384), bool)
    padded[:, :TIME, :TIME] = mask
    start, stop = np.asarray(bounds.key_start), np.asarray(bounds.key_stop)
    key = np.arange(384)
    seen = (key >= start[..., None]) & (key < stop[..., None])
    np.testing.assert_array_equal(seen[:, :TIME], padded[:, :TIME])
    for table, view, block in (
        (bounds.q_tiles, padded, block_q),
        (bounds.kv_tiles, np.swapaxes(padded, 1, 2), block_kv),
    ):
        table = np.asarray(table)
        assert table.shape[1] == -(-TIME // block)
        for (row, outer), (first, last, inner, inner_stop) in zip(
            np.ndindex(table.shape[:2]), table.reshape(-1, 4), strict=True
        ):
            rows = view[row, outer * block : (outer + 1) * block]
            tiles = (
                rows.reshape(block, -1, TILE).swapaxes(0, 1).reshape(384 // TILE, -1)
            )
            some, full = np.nonzero(tiles.any(1))[0], np.nonzero(tiles.all(1))[0]
            want = (some[0], some[-1] + 1) if len(some) else (0, 0)
            assert (first, last) == want
            # All masks here have full tiles side by side.
            want = (full[0], full[-1] + 1) if len(full) else (first, first)
            assert (inner, inner_stop) == want
    for order, table in (
        (bounds.q_order, bounds.q_tiles),
        (bounds.kv_order, bounds.kv_tiles),
    ):
        work = np.asarray(table[..., 1] - table[..., 0]).reshape(-1)
        assert sorted(np.asarray(order)) == list(range(work.size))
        assert (np.diff(work[np.asarray(order)]) <= 0).all()


@st.composite
def rows(draw):
    """Documents of any lengths, padding between and around them, and prefixes."""
    ids, is_prefix = np.zeros((1, TIME), np.int32), np.zeros((1, TIME), bool)
    at, document = 0, 0
    for _ in range(draw(st.integers(0, MOST))):
        at += draw(st.sampled_from((0, 0, 1, 40)))
        length = draw(
            st.one_of(st.sampled_from((1, 63, 64, 65, 128)), st.integers(1, TIME))
        )
        document += draw(st.integers(1, 3))
        ids[0, at : at + length] = document
        is_prefix[0, at : at + draw(st.integers(0, length))] = True
        at += length
    return ids, is_prefix & (ids != 0)


@pytest.mark.parametrize(
    "name, block_q, block_kv, prefix",
    [
        ("causal", 64, 128, True),
        ("window", 128, 128, True),
        ("window_one", 192, 64, False),
        ("full", 128, 128, False),
        ("full_window", 64, 64, False),
    ],
)
def test_bounds_are_those_of_the_whole_mask(name, block_q, block_kv, prefix):
    run = compiled(name, block_q, block_kv, prefix)

    @settings(max_examples=12, deadline=None, derandomize=True, database=None)
    @given(rows())
    def equal(row):
        ids, is_prefix = row
        if not prefix:
            is_prefix = np.zeros_like(is_prefix)
        bounds = run(ids, is_prefix)
        check(bounds, allowed(ids, is_prefix, **MASKS[name]), block_q, block_kv)

    equal()


def test_queries_and_keys_may_have_their_own_rows():
    q_ids = np.array([[1] * 30 + [3] * 40 + [0] * 10, [2] * 80])
    kv_ids = np.array([[1] * 100 + [2] * 20 + [3] * 30, [0] * 5 + [1] * 145])
    sizes = {"batch": 2, "time": 80, "length": 150}
    run = jax.jit(functools.partial(tile_bounds, **sizes, causal=False))
    bounds = run(q_segment_ids=q_ids, kv_segment_ids=kv_ids)
    start, stop = (np.asarray(x)[:, :80] for x in (bounds.key_start, bounds.key_stop))
    seen = (np.arange(150) >= start[..., None]) & (np.arange(150) < stop[..., None])
    want = (q_ids[:, :, None] == kv_ids[:, None]) & (q_ids > 0)[:, :, None]
    np.testing.assert_array_equal(seen, want)
    assert not np.asarray(bounds.q_tiles)[1].any()


def test_rows_that_are_no_runs_are_marked():
    ids = np.array([[2, 2, 1, 1], [1, 2, 1, 2], [1, 0, 1, 1], [1, 1, 0, 2]])
    run = jax.jit(functools.partial(tile_bounds, batch=4, time=4))
    bounds = run(q_segment_ids=ids, kv_segment_ids=ids)
    start = np.asarray(bounds.key_start)
    assert (start[:3, :4] == INVALID).all()
    assert (start[3] != INVALID).all()
    assert not np.asarray(bounds.q_tiles)[:3].any()


def test_limits_are_named():
    with pytest.raises(ValueError, match="block_q is 96"):
        tile_bounds(batch=1, time=8, block_q=96)
    with pytest.raises(ValueError, match="T is 8 and S is 9"):
        tile_bounds(batch=1, time=8, length=9)
