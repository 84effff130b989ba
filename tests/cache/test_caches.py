"""Caches: where tokens land, and emptying single rows."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxaccel.cache.decoder import DecoderCache
from jaxaccel.cache.dense import KVCache
from jaxaccel.cache.recurrent import RecurrentCache
from jaxaccel.data.batch import packing_metadata


def _append(cache, numbers, real, length):
    numbers = jnp.asarray(numbers, jnp.float32)
    length = jnp.asarray(length, jnp.int32)
    meta = packing_metadata(
        numbers.shape,
        segment_ids=jnp.asarray(real, jnp.int32),
        cached_length=length,
    )
    k = numbers[:, :, None, None]
    return jax.jit(KVCache.append)(cache, k, -k, meta, length)


def test_rows_stay_dense_under_left_and_right_padding():
    cache = KVCache.empty(3, 6, 1, 1, 1, jnp.float32)
    cache = _append(
        cache,
        [[1, 2, 3], [0, 4, 5], [6, 0, 0]],
        [[1, 1, 1], [0, 1, 1], [1, 0, 0]],
        [0, 0, 0],
    )
    # Row 1 adds nothing: a sequence that has ended.
    cache = _append(
        cache,
        [[7, 8, 9], [0, 0, 0], [0, 0, 5]],
        [[1, 1, 1], [0, 0, 0], [0, 0, 1]],
        [3, 2, 1],
    )
    keys = [[1, 2, 3, 7, 8, 9], [4, 5, 0, 0, 0, 0], [6, 5, 0, 0, 0, 0]]
    np.testing.assert_array_equal(cache.k[..., 0, 0], keys)
    np.testing.assert_array_equal(cache.v[..., 0, 0], -np.array(keys))
    np.testing.assert_array_equal(
        cache.positions,
        [[0, 1, 2, 3, 4, 5], [0, 1, -1, -1, -1, -1], [0, 1, -1, -1, -1, -1]],
    )


def test_tokens_past_the_last_slot_are_dropped():
    cache = KVCache.empty(1, 2, 1, 1, 1, jnp.float32)
    cache = _append(cache, [[1, 2, 3]], [[1, 1, 1]], [0])
    np.testing.assert_array_equal(cache.k[0, :, 0, 0], [1, 2])


def test_cache_keeps_its_dtype():
    cache = KVCache.empty(1, 2, 1, 1, 1, jnp.bfloat16)
    assert _append(cache, [[1]], [[1]], [0]).k.dtype == jnp.bfloat16
    recurrent = RecurrentCache.empty(2, 4, 3, 1, 5, 6, jnp.bfloat16)
    assert recurrent.conv.shape == (2, 3, 3)
    assert recurrent.conv.dtype == jnp.bfloat16
    assert recurrent.state.shape == (2, 1, 5, 6)
    assert recurrent.state.dtype == jnp.float32
    low = RecurrentCache.empty(2, 4, 3, 1, 5, 6, jnp.float32, jnp.bfloat16)
    assert low.state.dtype == jnp.bfloat16
    assert low.conv.dtype == jnp.float32


def test_reset_empties_the_named_rows_alone():
    def filled(periods, empty):
        return jax.tree.map(
            lambda leaf: jnp.ones((periods, *leaf.shape), leaf.dtype), empty
        )

    fresh = (
        KVCache.empty(2, 3, 1, 1, 1, jnp.float32),
        RecurrentCache.empty(2, 4, 3, 1, 5, 6, jnp.float32, jnp.bfloat16),
    )
    layers = tuple(filled(2, empty) for empty in fresh)
    cache = DecoderCache(layers=layers, length=jnp.array([3, 3], jnp.int32))
    cleared = cache.reset(jnp.array([True, False]))
    np.testing.assert_array_equal(cleared.length, [0, 3])
    for got, old, empty in zip(
        jax.tree.leaves(cleared.layers),
        jax.tree.leaves(layers),
        jax.tree.leaves(fresh),
        strict=True,
    ):
        np.testing.assert_array_equal(got[:, 1], old[:, 1])
        np.testing.assert_array_equal(got[:, 0], np.stack([empty[0]] * 2))
