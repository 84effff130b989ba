"""A memory whose table has eight bits: the same output wherever the table is."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxaccel.core.host_table import HostTable
from jaxaccel.core.tree import model_parts
from jaxaccel.data.batch import packing_metadata
from jaxaccel.models.decoder import Decoder
from jaxaccel.models.describe import describe
from jaxaccel.models.qwen3_5_text import Qwen3_5TextConfig
from jaxaccel.models.with_engram import WithEngramConfig
from jaxaccel.nn.engram import EngramTable, HostRows
from jaxaccel.nn.engram_config import EngramConfig
from jaxaccel.nn.engram_host import HostEngramMemory, with_host_tables, with_rows
from jaxaccel.nn.engram_memory import EngramMemory
from jaxaccel.quant.mxfp8 import pack
from jaxaccel.training.config import TrainConfig
from jaxaccel.training.optim import make_optimizer
from jaxaccel.training.step import make_train_step


VOCAB, D, T = 30, 6, 9
CONFIG = EngramConfig(
    layers=(1,), heads=1, head_dim=128, bases=41, table_dtype="float8_e4m3fn"
)


class Model(nnx.Module):
    """What `with_rows` needs of a decoder."""

    def __init__(self, rngs):
        self.memory = EngramMemory(CONFIG, VOCAB, D, rngs=rngs)


@pytest.fixture(scope="module")
def model():
    return Model(nnx.Rngs(0))


@pytest.fixture(scope="module")
def packed(model):
    table = model.memory.layers[0].table
    return pack(np.asarray(table.rows[...]), np.asarray(table.scales[...]))


TOKENS = np.random.default_rng(0).integers(0, VOCAB, (2, T)).astype(np.int32)


@jax.jit
def run(model):
    x = jnp.asarray(np.random.default_rng(1).normal(size=(2, T, D)), jnp.float32)
    meta = packing_metadata((2, T))
    return model.memory.read(jnp.asarray(TOKENS), meta).add(0, x)


def test_the_table_holds_eight_bits_and_scales(model):
    table = model.memory.layers[0].table
    count = table.rows.shape[0]
    assert table.rows[...].dtype == jnp.float8_e4m3fn
    assert table.scales.shape == (count, 4)
    rows = table(jnp.arange(count, dtype=jnp.int32))
    assert rows.dtype == jnp.bfloat16
    assert np.std(np.asarray(rows, np.float32)) == pytest.approx(128**-0.5, rel=0.05)
    assert np.isnan(np.asarray(table(jnp.int32([count])), np.float32)).all()


def test_rows_from_the_host_give_the_bits_of_the_device(model, packed):
    want = run(model)
    with_store = HostEngramMemory(CONFIG, VOCAB, [HostTable(packed)])
    rows = with_store.prefetch(TOKENS).rows()
    np.testing.assert_array_equal(run(with_rows(model, rows)), want)
    pinned = jax.sharding.SingleDeviceSharding(
        jax.devices()[0], memory_kind="pinned_host"
    )
    table = jax.device_put(packed, pinned)
    np.testing.assert_array_equal(run(with_host_tables(model, (table,))), want)


@pytest.mark.gpu
def test_the_device_reads_eight_bits_from_the_host():
    config = dataclasses.replace(CONFIG, head_dim=256, bases=5003)
    rows = config.layout(VOCAB).num_rows[0]
    own = EngramTable(rows, 256, dtype=jnp.float8_e4m3fn, rngs=nnx.Rngs(0))
    table = pack(np.asarray(own.rows[...]), np.asarray(own.scales[...]))
    pinned = jax.sharding.SingleDeviceSharding(
        jax.devices()[0], memory_kind="pinned_host"
    )
    host = HostRows(jax.device_put(table, pinned), implementation="mosaic")
    ids = np.random.default_rng(2).integers(0, rows, (4, 50, 3)).astype(np.int32)
    ids[0, 0] = (0, rows - 1, rows)
    want = jax.jit(lambda own, ids: own(ids))(own, ids)
    got = jax.jit(lambda host, ids: host(ids))(host, ids)
    np.testing.assert_array_equal(
        np.asarray(got, np.float32), np.asarray(want, np.float32)
    )
    assert np.isnan(np.asarray(got[0, 0, 2], np.float32)).all()


def test_a_table_that_is_not_packed_is_refused():
    unpacked = np.zeros((CONFIG.layout(VOCAB).num_rows[0], 128), np.uint8)
    with pytest.raises(ValueError, match="expected"):
        HostEngramMemory(CONFIG, VOCAB, [HostTable(unpacked)])


def test_rows_must_be_whole_blocks():
    with pytest.raises(ValueError, match="head_dim=40"):
        dataclasses.replace(CONFIG, head_dim=40)


def test_it_is_counted_and_not_trained():
    small = Qwen3_5TextConfig.tiny()
    tiny = WithEngramConfig(model=small, engram=CONFIG)
    without = describe(dataclasses.replace(tiny, engram=None).decoder())
    rows = CONFIG.layout(small.vocab_size).num_rows[0]
    wide = dataclasses.replace(CONFIG, table_dtype="bfloat16")
    bytes_of = {
        config.table_dtype: describe(
            WithEngramConfig(model=small, engram=config).decoder()
        ).total.param_bytes
        for config in (CONFIG, wide)
    }
    difference = bytes_of["bfloat16"] - bytes_of["float8_e4m3fn"]
    assert difference == rows * (256 - 132)
    assert without.total.param_bytes < bytes_of["float8_e4m3fn"]
    config = TrainConfig(num_steps=200)
    parts = model_parts(lambda: Decoder(tiny.decoder(), rngs=nnx.Rngs(0)))
    with pytest.raises(ValueError, match="float8_e4m3fn' is read only"):
        make_train_step(parts, make_optimizer(config.optim, 200), config)
