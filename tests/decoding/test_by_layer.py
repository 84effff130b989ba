"""A decoder with arrays for each layer reads as `Decoder` does."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxaccel.decoding.by_layer import LayeredDecoder
from jaxaccel.models.decoder import Decoder
from jaxaccel.models.nemotron_h import NemotronHConfig
from jaxaccel.nn.engram_config import EngramConfig


B, T, SLOTS = 2, 5, 8
# Two runs of layers, one of them scanned twice.
CONFIG = NemotronHConfig.tiny(pattern="MEME*").decoder()


def small(config=CONFIG, **changes):
    return dataclasses.replace(config, **changes)


def tokens(count):
    return jnp.asarray(np.random.default_rng(0).integers(0, 128, (B, count)))


def assert_same(got, want, atol=2e-5):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, atol=atol)


def test_reads_as_the_decoder_does(random_model):
    model = random_model(CONFIG, 3)
    layered = LayeredDecoder(CONFIG)
    parameters = layered.split(model)
    graphdef, state = nnx.split(model)
    text = tokens(T + 1).astype(jnp.int32)

    @jax.jit
    def whole(state):
        model = nnx.merge(graphdef, state)
        first = model(text[:, :T], cache=model.init_cache(B, SLOTS))
        return first, model(text[:, T:], cache=first.cache)

    @jax.jit
    def by_layer(parameters):
        first = layered.read(parameters, text[:, :T], layered.init_cache(B, SLOTS))
        second = layered.read(parameters, text[:, T:], first.cache)
        best, _ = layered.next_token(parameters, text[:, T], first.cache)
        return first, second, layered.unembed(parameters, second.hidden), best

    (first, second), (a, b, logits, best) = whole(state), by_layer(parameters)
    assert_same(a.hidden, first.hidden)
    assert_same(b.hidden, second.hidden)
    assert_same(logits, second.logits)
    np.testing.assert_array_equal(best, jnp.argmax(second.logits[:, 0], axis=-1))
    assert_same(b.cache.length, second.cache.length)
    # Each layer's part, in order: stacked by position there.
    pairs = zip(CONFIG.layer_types, CONFIG.layer_places, strict=True)
    mixing = [(kind, place) for kind, place in pairs if kind in ("mamba", "attention")]
    positions = sorted({position for _, (position, _) in mixing})
    for part, (_, (position, row)) in zip(b.cache.layers, mixing, strict=True):
        stacked = second.cache.layers[positions.index(position)]
        assert_same(part, jax.tree.map(lambda leaf, row=row: leaf[row], stacked))
    np.testing.assert_array_equal(np.stack(b.counts), second.aux.counts)


def test_parameters_are_those_of_the_decoder():
    for tied in (False, True):
        config = small(tie_embeddings=tied, param_dtype="bfloat16")
        layered = LayeredDecoder(config)
        drawn = jax.eval_shape(layered.init, jax.random.key(1))
        model = nnx.eval_shape(lambda config=config: Decoder(config, rngs=nnx.Rngs(0)))
        sizes = (
            sorted((leaf.size, leaf.dtype) for leaf in jax.tree.leaves(tree))
            for tree in (drawn.ends, nnx.split(model)[1])
        )
        assert set(next(sizes)) <= set(next(sizes))
        total, want = (
            sum(leaf.size for leaf in jax.tree.leaves(tree))
            for tree in (drawn, nnx.split(model)[1])
        )
        assert total == want


def test_every_layer_is_drawn_alone():
    config = small(num_layers=2, pattern=("mamba", "mamba"), param_dtype="bfloat16")
    drawn = jax.jit(LayeredDecoder(config).init)(jax.random.key(1))
    one, other = (
        layer["mixer"]["out_proj"]["kernel"][...].astype(jnp.float32)
        for layer in drawn.layers
    )
    assert not jnp.array_equal(one, other)
    # The deviation that the depth asks for.
    want = (config.num_layers * config.mamba.d_inner) ** -0.5
    assert jnp.std(one) == pytest.approx(want, rel=0.1)


def test_a_memory_is_refused():
    with pytest.raises(NotImplementedError, match="a model with a memory"):
        LayeredDecoder(small(engram=EngramConfig()))
