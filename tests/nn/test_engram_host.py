"""A memory whose tables are on the host: the same ids, and the same output."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxaccel.core.host_table import HostTable, HotRows, MappedTable, save_table
from jaxaccel.data.batch import packing_metadata
from jaxaccel.data.compressed_vocab import CompressedVocabulary
from jaxaccel.nn.engram_config import EngramConfig
from jaxaccel.nn.engram_host import HostEngramMemory, with_rows
from jaxaccel.nn.engram_memory import EngramMemory


VOCAB, D, T = 30, 6, 9
VOCABULARY = CompressedVocabulary(
    token_map=(np.arange(VOCAB) // 2).astype(np.int32),
    size=VOCAB // 2,
    tokenizer="t",
    unicode_version="15.0.0",
)
CONFIG = EngramConfig(
    layers=(1, 2), heads=2, head_dim=4, bases=41, boundary="segment", eos_id=3
).with_vocabulary(VOCABULARY)


class Model(nnx.Module):
    """What `with_rows` needs of a decoder."""

    def __init__(self, rngs):
        self.memory = EngramMemory(CONFIG, VOCAB, D, rngs=rngs)
        self.memory.ngrams.set_vocabulary(VOCABULARY)


@pytest.fixture(scope="module")
def model():
    return Model(nnx.Rngs(0))


@pytest.fixture
def host(model, tmp_path):
    tables = [np.asarray(e.table.rows[...]) for e in model.memory.layers]
    save_table(tmp_path, tables[1])
    hot = HotRows(HostTable(tables[0]), np.arange(0, 20))
    stores = [hot, MappedTable(tmp_path, budget_bytes=256)]
    yield HostEngramMemory(CONFIG, VOCAB, stores, vocabulary=VOCABULARY)
    for store in stores:
        store.close()


def text():
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, VOCAB, (2, T)).astype(np.int32)
    segments = np.array([[1] * 4 + [2] * 5, [1] * 7 + [0] * 2], np.int32)
    return tokens, segments


@pytest.mark.parametrize("boundary", ["none", "eos", "segment"])
def test_ids_are_those_of_the_device(model, host, boundary):
    config = dataclasses.replace(CONFIG, boundary=boundary)
    stores = host._stores
    host = HostEngramMemory(config, VOCAB, stores, vocabulary=VOCABULARY)
    memory = EngramMemory(config, VOCAB, D, rngs=nnx.Rngs(0))
    memory.ngrams.set_vocabulary(VOCABULARY)
    tokens, segments = text()
    for given in (None, segments):
        ids, _ = host.lookups(tokens, given)
        np.testing.assert_array_equal(ids, memory.lookups(tokens, given))
    # In two calls, the second of a single token.
    whole, _ = host.lookups(tokens)
    first, history = host.lookups(tokens[:, :-1])
    last, _ = host.lookups(tokens[:, -1:], history=history)
    np.testing.assert_array_equal(np.concatenate([first, last], axis=1), whole)


def test_output_is_bit_for_bit_that_of_tables_on_the_device(model, host):
    tokens, segments = text()
    x = jnp.asarray(np.random.default_rng(1).normal(size=(2, T, D)), jnp.float32)

    @jax.jit
    def run(model, x):
        meta = packing_metadata((2, T), segment_ids=jnp.asarray(segments))
        reading = model.memory.read(jnp.asarray(tokens), meta)
        return reading.add(1, reading.add(0, x))

    want = run(model, x)
    pending = host.prefetch(tokens, segments)
    served = with_rows(model, pending.rows())
    np.testing.assert_array_equal(run(served, x), want)
    # The tables themselves are no part of what runs.
    sizes = {leaf.shape for leaf in jax.tree.leaves(nnx.state(served))}
    assert not sizes & {(rows, 4) for rows in host.layout.num_rows}
    assert hasattr(model.memory.layers[0].table, "rows")


def test_rematerialised_gradients_are_the_same(model):
    tokens, _ = text()
    graphdef, params, rest = nnx.split(model, nnx.Param, ...)
    x = jnp.ones((2, T, D))

    def loss(params, x, remat):
        memory = nnx.merge(graphdef, params, rest).memory
        reading = memory.read(jnp.asarray(tokens), packing_metadata((2, T)))
        return jnp.sum(jnp.sin(reading.add(0, x, remat=remat)))

    gradient = jax.jit(jax.grad(loss, argnums=(0, 1)), static_argnums=2)
    kept, again = gradient(params, x, False), gradient(params, x, True)
    for a, b in zip(jax.tree.leaves(again), jax.tree.leaves(kept), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
    assert max(float(jnp.abs(a).max()) for a in jax.tree.leaves(kept)) > 0.01
    jaxpr = str(jax.make_jaxpr(loss, static_argnums=2)(params, x, True))
    assert "remat" in jaxpr or "checkpoint" in jaxpr


def test_what_does_not_belong_together_is_refused(host):
    stores = host._stores
    with pytest.raises(ValueError, match="every row number would be wrong"):
        HostEngramMemory(CONFIG, VOCAB, stores)
    with pytest.raises(ValueError, match="tables have rows and widths"):
        HostEngramMemory(CONFIG, VOCAB, stores[:1], vocabulary=VOCABULARY)
    with pytest.raises(ValueError, match="token id 30 is outside"):
        host.prefetch(np.array([[VOCAB]]))
