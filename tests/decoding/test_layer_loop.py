"""The loop that carries the caches: the decoder's values, without its copies."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxaccel.cache.dense import KVCache, KVCacheOfLayer
from jaxaccel.data.batch import packing_metadata
from jaxaccel.decoding import generate as generate_lib
from jaxaccel.decoding.layer_loop import read_tokens
from jaxaccel.decoding.sampling import SamplingConfig
from jaxaccel.models.qwen3_5_text import Qwen3_5TextConfig


SLOTS = 256
ROWS = 4


@pytest.fixture(scope="module")
def model(random_model):
    config = Qwen3_5TextConfig.tiny(pattern=("gdn", "attention"), num_layers=8)
    return random_model(config.decoder())


def test_it_reads_as_the_decoder_does(model):
    graphdef, state = nnx.split(model)
    tokens = jax.random.randint(jax.random.key(0), (2, ROWS, 3), 0, 128)
    segments = jnp.asarray([[1, 1, 1], [0, 1, 1], [0, 0, 0], [1, 0, 0]], jnp.int32)

    def decoder(model, tokens, segments, cache):
        output = model(tokens, segments, cache=cache)
        return output.hidden, output.cache

    def twice(read):
        @jax.jit
        def run(state, tokens, segments, cache):
            return read(nnx.merge(graphdef, state), tokens, segments, cache)

        _, cache = run(state, tokens[0], segments, model.init_cache(ROWS, 16))
        return run(state, tokens[1], jnp.ones_like(segments), cache)

    expected, actual = twice(decoder), twice(read_tokens)
    assert jax.tree.structure(expected) == jax.tree.structure(actual)
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-6)


def test_a_decoding_step_copies_no_more_than_one_layer_of_the_cache(model):
    graphdef, state = nnx.split(model)
    carry = generate_lib._Carry(
        step=jnp.int32(1),
        last=jnp.zeros((ROWS,), jnp.int32),
        is_done=jnp.zeros((ROWS,), bool),
        tokens=jnp.zeros((ROWS, 16), jnp.int32),
        cache=model.init_cache(ROWS, SLOTS),
    )
    greedy = generate_lib.Draw(
        sampling=SamplingConfig(temperature=0.0), vocab_limit=128
    )
    keys = generate_lib.row_keys(0, ROWS)
    stops = jnp.asarray([-1], jnp.int32)
    compiled = generate_lib._decode.lower(
        graphdef, greedy, state, carry, keys, stops, jnp.int32(9)
    ).compile()
    memory = compiled.memory_analysis()
    assert memory is not None
    held = sum(leaf.nbytes for leaf in jax.tree.leaves(carry.cache))
    assert memory.alias_size_in_bytes >= held
    # Of four attention layers, one at a time is gathered and scored.
    assert memory.temp_size_in_bytes < held / 2


def test_one_layer_of_a_stacked_cache_is_that_layer():
    alone = KVCache.empty(2, 3, 1, 3, 3, jnp.float32)
    stacked = jax.tree.map(lambda leaf: jnp.stack([leaf] * 3), alone)
    k = jax.random.normal(jax.random.key(1), (2, 2, 1, 3))

    @jax.jit
    def append(cache):
        length = jnp.asarray([1, 0], jnp.int32)
        segments = jnp.asarray([[1, 1], [0, 1]])
        meta = packing_metadata((2, 2), segment_ids=segments, cached_length=length)
        cache = cache.append(k, -k, meta, length).truncate(length + 1)
        return (cache.k, cache.v, cache.positions), cache

    expected, _ = append(alone)
    actual, part = append(KVCacheOfLayer(stacked=stacked, index=jnp.int32(1)))
    for a, b in zip(actual, expected, strict=True):
        np.testing.assert_array_equal(a, b)
    after, before = jax.tree.leaves(part.stacked), jax.tree.leaves(stacked)
    for a, b in zip(after, before, strict=True):
        np.testing.assert_array_equal(np.asarray(a)[[0, 2]], np.asarray(b)[[0, 2]])


def test_a_truncated_cache_is_one_that_never_read_the_rest():
    numbers = jnp.arange(1.0, 7.0).reshape(2, 3, 1, 1)
    kept = jnp.asarray([0, 2], jnp.int32)

    @jax.jit
    def read_forget_and_read():
        cache = KVCache.empty(2, 4, 1, 1, 1, jnp.float32)
        meta = packing_metadata((2, 3))
        full = cache.append(numbers, numbers, meta, jnp.zeros((2,), jnp.int32))
        short = full.truncate(kept)
        meta = packing_metadata((2, 1), cached_length=kept)
        again = short.append(-numbers[:, :1], numbers[:, :1], meta, kept)
        return short.positions, again.positions, again.k

    short, again, k = read_forget_and_read()
    np.testing.assert_array_equal(short, [[-1] * 4, [0, 1, -1, -1]])
    np.testing.assert_array_equal(again, [[0, -1, -1, -1], [0, 1, 2, -1]])
    np.testing.assert_array_equal(k[1, :3, 0, 0], [4, 5, -4])
