"""`tile_bounds` of `attention` against whole masks."""

import functools

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.attention import tile_bounds
from pallas_kernels.attention.tiles import INVALID, TILE, key_intervals


TIME = 300
MOST = 6  # documents
# causal, window, block_q, block_kv, and whether there are prefixes
MASKS = (
    (True, None, 64, 128, True),
    (True, 70, 128, 128, True),
    (True, 1, 192, 64, False),
    (False, None, 128, 128, False),
    (False, 100, 64, 64, False),
)


@jax.jit
def all_bounds(ids, is_prefix):
    """The bounds of each of `MASKS`; one program, whose masks share their searches."""
    return [
        tile_bounds(
            batch=ids.shape[0],
            time=TIME,
            q_segment_ids=ids,
            kv_segment_ids=ids,
            is_prefix=is_prefix if prefix else None,
            block_q=block_q,
            block_kv=block_kv,
            causal=causal,
            window=window,
        )
        for causal, window, block_q, block_kv, prefix in MASKS
    ]


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
    check_pairs(bounds, padded, block_kv)
    for order, table in (
        (bounds.q_order, bounds.q_tiles),
        (bounds.kv_order, bounds.kv_tiles),
    ):
        work = np.asarray(table[..., 1] - table[..., 0]).reshape(-1)
        assert sorted(np.asarray(order)) == list(range(work.size))
        assert (np.diff(work[np.asarray(order)]) <= 0).all()


def check_pairs(bounds, mask, block_kv):
    """Pairs have their own places in a list that is long enough, and none is missing.

    Args:
      mask: bool[B, T', S'], padded to tiles.
      block_kv: keys of a block.
    """
    first_pair, kv_tiles = np.asarray(bounds.first_pair), np.asarray(bounds.kv_tiles)
    tile_keys = np.asarray(bounds.tile_keys)
    per = block_kv // TILE
    for row in range(mask.shape[0]):
        places = {
            (block, tile): first_pair[row, block] + tile
            for block, (first, stop) in enumerate(kv_tiles[row, :, :2])
            for tile in range(first, stop)
        }
        assert sorted(places.values()) == list(range(len(places)))
        assert len(places) <= bounds.most_pairs
        for tile, (first, stop) in enumerate(tile_keys[row]):
            seen = mask[row, tile * TILE : (tile + 1) * TILE].any(0)
            seen = np.nonzero(seen.reshape(-1, TILE).any(1))[0]
            want = (seen[0], seen[-1] + 1) if len(seen) else (0, 0)
            assert (first, stop) == want
            assert all((x // per, tile) in places for x in range(first, stop))


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


@settings(max_examples=12, deadline=None, derandomize=True, database=None)
@given(rows())
def test_bounds_are_those_of_the_whole_mask(row):
    ids, is_prefix = row
    for options, bounds in zip(MASKS, all_bounds(ids, is_prefix), strict=True):
        causal, window, block_q, block_kv, prefix = options
        marked = is_prefix if prefix else np.zeros_like(is_prefix)
        mask = allowed(ids, marked, causal=causal, window=window)
        check(bounds, mask, block_q, block_kv)


def test_queries_and_keys_may_have_their_own_rows():
    """And any ids, the largest of i32 among them."""
    two, three = 2**30, 2**31 - 1
    q_ids = np.array([[1] * 30 + [three] * 40 + [0] * 10, [two] * 80], np.int32)
    kv_ids = np.array(
        [[1] * 95 + [0] * 5 + [two] * 20 + [three] * 28 + [0] * 2, [0] * 5 + [1] * 145],
        np.int32,
    )
    run = functools.partial(
        key_intervals,
        batch=2,
        time=80,
        length=150,
        causal=False,
        window=None,
        is_prefix=None,
    )
    start, stop = jax.jit(run)(q_segment_ids=q_ids, kv_segment_ids=kv_ids)
    start, stop = np.asarray(start), np.asarray(stop)
    seen = (np.arange(150) >= start[..., None]) & (np.arange(150) < stop[..., None])
    want = (q_ids[:, :, None] == kv_ids[:, None]) & (q_ids > 0)[:, :, None]
    np.testing.assert_array_equal(seen, want)


def test_rows_that_intervals_cannot_say_are_marked():
    """Documents that are no runs, and prefixes that are not at their start."""
    four = [
        *([2, 2, 1, 1], [1, 2, 1, 2], [1, 0, 1, 1], [1, 1, 1, 1], [0, 1, 1, 1]),
        *([1, 1, 0, 2], [1, 1, 2, 2], [1, 0, 0, 2]),
    ]
    ids = np.zeros((8, TIME), np.int32)
    ids[:, :4] = four
    is_prefix = np.zeros((8, TIME), bool)
    is_prefix[3, 1:4] = is_prefix[4, 2] = True
    # At the starts of two documents, and padding, which has none.
    is_prefix[6, [0, 2]] = is_prefix[7, [2, 3]] = True
    for row in range(8):
        for options, bounds in zip(
            MASKS, all_bounds(ids[row, None], is_prefix[row, None]), strict=True
        ):
            marked = np.asarray(bounds.key_start)[0, :TIME] == INVALID
            has_prefix = options[-1]
            assert marked.all() if row < (5 if has_prefix else 3) else not marked.any()
            assert not (marked.any() and np.asarray(bounds.q_tiles).any())

    # A row of one document, without ids.
    run = functools.partial(
        key_intervals,
        batch=8,
        time=TIME,
        length=TIME,
        q_segment_ids=None,
        kv_segment_ids=None,
        causal=True,
        window=None,
    )
    start, _ = jax.jit(run)(is_prefix=is_prefix)
    np.testing.assert_array_equal(
        (np.asarray(start) == INVALID).all(axis=1), [0, 0, 0, 1, 1, 0, 1, 1]
    )


@pytest.mark.parametrize(
    "mask, most",
    [
        # Blocks of keys 0, 128 and 256 of 5 tiles of queries, in blocks of 6.
        ({}, 6 + 4 + 2),
        ({"causal": False}, 3 * 6),
        ({"window": 65}, 3 + 3 + 2),
        ({"window": 66}, 4 + 4 + 2),
        ({"window": 66, "causal": False}, 4 + 6 + 6),
    ],
)
def test_how_many_pairs_there_can_be(mask, most):
    make = functools.partial(tile_bounds, batch=1, time=TIME, **mask)
    assert jax.eval_shape(make).most_pairs == most


def test_a_prefix_is_seen_from_before():
    make = functools.partial(tile_bounds, batch=1, time=TIME)
    is_prefix = jax.ShapeDtypeStruct((1, TIME), bool)
    assert jax.eval_shape(make, is_prefix=is_prefix).most_pairs == 3 * 6


def test_limits_are_named():
    with pytest.raises(ValueError, match="block_q is 96"):
        tile_bounds(batch=1, time=8, block_q=96)
    with pytest.raises(ValueError, match="T is 8 and S is 9"):
        tile_bounds(batch=1, time=8, length=9)
