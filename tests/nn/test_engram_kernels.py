"""`Engram` through its kernels: what XLA's forms give, gradients too."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxaccel.data.batch import packing_metadata
from jaxaccel.nn.engram import Engram, GatheredRows
from jaxaccel.nn.engram_config import EngramConfig
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
