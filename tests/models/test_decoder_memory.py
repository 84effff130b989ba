"""A decoder with an n-gram memory in front of some layers."""

import dataclasses
from typing import Any
from unittest.mock import ANY

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxaccel.core.tree import model_parts, split_model
from jaxaccel.data.batch import packing_metadata
from jaxaccel.data.tokenizer import ByteTokenizer
from jaxaccel.models.config import DecoderConfig, Run
from jaxaccel.models.decoder import Decoder
from jaxaccel.models.with_engram import WithEngramConfig, with_tokenizer
from jaxaccel.nn.attention import AttentionConfig
from jaxaccel.nn.engram import NGramHash
from jaxaccel.nn.engram_config import EngramConfig
from jaxaccel.nn.engram_stats import gate_histogram, memory_gates, silenced
from jaxaccel.nn.mlp import MLPConfig


VOCAB, T = 29, 12
MATRICES = {"kernel", "embedding", "conv_kernel", "rows"}
MEMORY = EngramConfig(
    layers=(1, 3),
    index_base=0,
    heads=2,
    head_dim=4,
    bases=41,
    conv_width=3,
    boundary="segment",
)
PLAIN = DecoderConfig(
    vocab_size=VOCAB,
    d_model=12,
    num_layers=4,
    pattern=("attention",),
    attention=AttentionConfig(num_heads=2, num_kv_heads=1, head_dim=4),
    mlp=MLPConfig(d_ff=8),
)
CONFIG = dataclasses.replace(PLAIN, engram=MEMORY)


@pytest.fixture(scope="module")
def model():
    draw = np.random.default_rng(0)

    def leaf(path, abstract):
        name = [key.key for key in path if hasattr(key, "key")][-1]
        value = draw.normal(size=abstract.shape)
        if name in MATRICES:
            value *= abstract.shape[-2] ** -0.5
        else:
            value = 0.5 + 0.3 * value
        return jnp.asarray(value, abstract.dtype)

    graphdef, abstract = nnx.split(
        nnx.eval_shape(lambda: Decoder(CONFIG, rngs=nnx.Rngs(0)))
    )
    return nnx.merge(graphdef, jax.tree_util.tree_map_with_path(leaf, abstract))


@pytest.fixture(scope="module")
def full(model):
    """full(tokens, segments, model=model) -> logits, compiled once."""
    graphdef, _ = nnx.split(model)

    @jax.jit
    def run(state, tokens, segments):
        return nnx.merge(graphdef, state)(tokens, segments).logits

    return lambda tokens, segments, model=model: run(nnx.state(model), tokens, segments)


@pytest.fixture(scope="module")
def tokens():
    return jax.random.randint(jax.random.key(0), (2, T), 0, VOCAB, jnp.int32)


def test_memory_stands_between_runs():
    assert CONFIG.runs == tuple(Run(("attention",), n) for n in (1, 2, 1))
    # Layers 2 and 6 of eight, counted from 1, in a pattern of two.
    deep = dataclasses.replace(
        PLAIN,
        num_layers=8,
        pattern=("sliding_attention", "attention"),
        sliding_attention=dataclasses.replace(PLAIN.attention, window=3),
        engram=EngramConfig(layers=(2, 6), bases=41),
    )
    first, second = deep.pattern
    assert deep.runs == (
        Run((first,), 1),
        Run((second, first), 2),
        Run((second, first, second), 1),
    )
    assert deep.layer_types == deep.pattern * 4


def test_equals_the_layers_one_by_one(model, full, tokens):
    segments = jnp.asarray([[1] * 7 + [2] * 5, [1] * 11 + [0]], jnp.int32)

    @jax.jit
    def by_hand(tokens):
        meta = packing_metadata((2, T), segment_ids=segments)
        ids = model.memory.lookups(tokens, segments)
        x = model.embed(tokens)
        for layer, (position, row) in enumerate(CONFIG.layer_places):
            for index, place in enumerate(MEMORY.places):
                if place == layer:
                    y, _ = model.memory.layers[index](x, ids[:, :, index], meta)
                    x = x + y
            graphdef, state = nnx.split(model.layers[position])
            block = nnx.merge(graphdef, jax.tree.map(lambda a, r=row: a[r], state))
            x, _, _ = block(x, meta)
        return model.unembed(model.final_norm(x))

    want, got = by_hand(tokens), full(tokens, segments)
    real = np.asarray(segments) > 0
    np.testing.assert_allclose(got[real], want[real], rtol=2e-4, atol=2e-4)


def test_a_silenced_memory_adds_exactly_nothing(model, full, tokens):
    """The sensitivity test's two models, and where the memory's gates stand."""
    params, buffers = split_model(model)
    parts = model_parts(lambda: model)
    silent: Any = parts.merge(silenced(params), buffers)
    meta, segments = packing_metadata((2, T)), jnp.ones((2, T), jnp.int32)

    @jax.jit
    def gates_and_silence(state, tokens):
        whole = nnx.merge(nnx.graphdef(model), state)
        reading = silent.memory.read(tokens, meta)
        x = silent.embed(tokens)
        return memory_gates(whole, tokens), reading.add(1, x) - x

    gates, added = gates_and_silence(nnx.state(model), tokens)
    assert np.all(np.asarray(added) == 0)
    assert [g.shape for g in gates] == [(2, T, 1)] * 2
    for g in gates:
        assert np.all((np.asarray(g) > 0) & (np.asarray(g) < 1))
        assert np.std(np.asarray(g)) > 0.01
        assert gate_histogram(g, np.ones((2, T), bool))[0].sum() == 2 * T
    # The memory is no decoration.
    change = np.asarray(full(tokens, segments, silent) - full(tokens, segments))
    assert np.abs(change).max() > 0.1


def test_packed_documents_do_not_see_each_other(full, tokens):
    segments = jnp.asarray([[1] * 7 + [2] * 5] * 2, jnp.int32)
    packed = full(tokens, segments)
    alone = full(
        jnp.roll(tokens, -7, axis=1), jnp.asarray([[1] * 5 + [0] * 7] * 2, jnp.int32)
    )
    np.testing.assert_allclose(packed[:, 7:], alone[:, :5], rtol=2e-4, atol=2e-4)


def test_reading_in_pieces_equals_reading_at_once(model, full, tokens):
    want = full(tokens, jnp.ones((2, T), jnp.int32))
    graphdef, state = nnx.split(model)

    @jax.jit
    def step(tokens, segments, cache):
        out = nnx.merge(graphdef, state)(tokens, segments, cache=cache)
        return out.logits, out.cache

    width, start, cache = 5, 0, model.init_cache(2, T)
    fresh = cache
    for length in (5, 1, 2, 4):
        piece = tokens[:, start : start + length]
        left = width - length
        logits, cache = step(
            jnp.pad(piece, ((0, 0), (0, left))),
            jnp.pad(jnp.ones_like(piece), ((0, 0), (0, left))),
            cache,
        )
        np.testing.assert_allclose(
            logits[:, :length], want[:, start : start + length], rtol=5e-4, atol=5e-4
        )
        start += length
    cleared = cache.reset(jnp.asarray([True, False]))
    assert cleared.length.tolist() == [0, T]
    np.testing.assert_array_equal(cleared.memory.history[0], fresh.memory.history[0])
    np.testing.assert_array_equal(cleared.memory.history[1], cache.memory.history[1])


def test_configs_that_cannot_be():
    class Model:
        def decoder(self):
            return PLAIN

    made = WithEngramConfig(model=Model(), engram=MEMORY).decoder()
    assert made == CONFIG
    assert WithEngramConfig(model=Model(), engram=None).decoder() == PLAIN
    with pytest.raises(ValueError, match="the model has 4 layers"):
        WithEngramConfig(model=Model(), engram=EngramConfig(layers=(7,))).decoder()
    with pytest.raises(ValueError, match="the decoder has 1 stream"):
        dataclasses.replace(PLAIN, engram=dataclasses.replace(MEMORY, streams=4))


def test_a_tokenizers_classes_are_hashed():
    compressing = dataclasses.replace(MEMORY, compress=True)
    unset = dataclasses.replace(PLAIN, vocab_size=260, engram=compressing)
    with pytest.raises(ValueError, match="needs the classes of a tokenizer"):
        nnx.eval_shape(lambda: Decoder(unset, rngs=nnx.Rngs(0)))
    config, vocabulary = with_tokenizer(unset, ByteTokenizer())
    ngrams = NGramHash(config.engram, config.vocab_size)
    ngrams.set_vocabulary(vocabulary)
    meta = packing_metadata((1, 3))
    ids = [
        ngrams(jnp.asarray([list(text)], jnp.int32), meta)[0]
        for text in (b"The", b"tHE", b"tho")
    ]
    np.testing.assert_array_equal(ids[0], ids[1])
    assert np.any(np.asarray(ids[0] != ids[2]))
    assert with_tokenizer(config, ByteTokenizer()) == (config, ANY)
    assert with_tokenizer(PLAIN, ByteTokenizer()) == (PLAIN, None)
