"""`Engram` through its kernels: what XLA's forms give, gradients too."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxaccel.data.batch import packing_metadata
from jaxaccel.nn.engram import Engram, GatheredRows, HostRows
from jaxaccel.nn.engram_config import EngramConfig
from jaxaccel.nn.engram_host import with_host_tables
from jaxaccel.nn.engram_memory import EngramMemory
from pallas_kernels._common import hw
from pallas_kernels._common.dispatch import recorded_choices
from pallas_kernels._common.interpret import interpreted
from pallas_kernels._common.testing import assert_close


D, G, ROWS = 128, 2, 40
CONFIG = EngramConfig(
    layers=(1,), heads=2, head_dim=4, bases=37, streams=G, variant="paper"
)
KERNELS = (("engram_gate", "mosaic"), ("engram_gather", "mosaic"))


def output(engram, h, ids, meta):
    return (engram(h, ids, meta)[0],)


def gradients(engram, h, ids, meta):
    """y and the gradients of the streams and the rows."""

    def loss(h, rows):
        twin = nnx.merge(*nnx.split(engram))
        twin.table = GatheredRows(rows, ids)
        y, _ = twin(h, ids, meta)
        return jnp.sum(jnp.sin(y)), y

    grads, y = jax.grad(loss, argnums=(0, 1), has_aux=True)(h, engram.table.rows[...])
    return y, *grads


@pytest.mark.parametrize(
    ("variant", "step"), [("paper", output), ("v41", gradients)], ids=["paper", "v41"]
)
def test_kernels_give_what_xla_gives(build, variant, step):
    config = dataclasses.replace(CONFIG, variant=variant)
    rng = np.random.default_rng(0)
    h = jnp.asarray(rng.standard_normal((1, 3, G, D)), jnp.float32)
    ids = jnp.asarray(rng.integers(0, ROWS, (1, 3, config.num_columns)), jnp.int32)
    segments = jnp.array([[1, 2, 0]], jnp.int32)
    meta = packing_metadata((1, 3), segment_ids=segments)
    results = {}
    for name, setting in (("xla", "xla"), ("mosaic", KERNELS)):
        engram = build(
            lambda rngs, setting=setting: Engram(
                config, D, ROWS, implementation=setting, rngs=rngs
            )
        )
        card = dataclasses.replace(hw.H200, sms=1)
        with hw.assume(card), interpreted(), recorded_choices() as choices:
            results[name] = jax.jit(step)(engram, h, ids, meta)
        picked = {(c.op, c.implementation) for c in choices}
        assert {("engram_gate", name), ("engram_gather", name)} <= picked
    names = ("y", "dh", "drows")[: len(results["xla"])]
    for what, got, want in zip(names, results["mosaic"], results["xla"], strict=True):
        assert_close(got, want, rel=2e-5, name=what)
        assert np.asarray(want).any()


def tables_of(memory, kind):
    place = jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind=kind)
    return [jax.device_put(e.table.rows[...], place) for e in memory.layers]


class Model(nnx.Module):
    """What `with_host_tables` needs of a decoder."""

    def __init__(self, rngs):
        self.memory = EngramMemory(CONFIG, 30, D, rngs=rngs)


@jax.jit
def added(model, x, tokens):
    meta = packing_metadata(tokens.shape)
    return model.memory.read(tokens, meta).add(0, x)


def test_a_table_in_the_host_s_memory_gives_the_same_bits(build):
    model = build(Model)
    x = jax.random.normal(jax.random.key(0), (1, 3, G, D))
    tokens = jnp.array([[5, 29, 5]], jnp.int32)
    want = added(model, x, tokens)
    assert np.asarray(want - x).any()
    served = with_host_tables(model, tables_of(model.memory, "pinned_host"))
    table = served.memory.layers[0].table.rows[...]
    assert table.sharding.memory_kind == "pinned_host"
    np.testing.assert_array_equal(added(served, x, tokens), want)
    # The interpreter has no memory of the host.
    tables = tables_of(model.memory, "device")
    with interpreted():
        served = with_host_tables(
            model, tables, implementation=(("host_gather", "mosaic"),)
        )
        np.testing.assert_array_equal(added(served, x, tokens), want)
    with pytest.raises(ValueError, match="shorter"):
        with_host_tables(model, [])


def test_a_row_that_there_is_not_is_nan_as_on_the_device():
    rows = jnp.ones((4, 8))
    ids = jnp.array([[[0, 4, -1, 2**31 - 1]]], jnp.int32)
    missing = np.isnan(np.asarray(HostRows(rows)(ids))).all(axis=-1)
    assert missing.tolist() == [[[False, True, True, True]]]
