"""Routers in training: what a step reports of them, and the loss of the whole batch."""

import pathlib
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from training_runs import Run, ragged_batch

from jaxaccel.config.gin_utils import load_experiment
from jaxaccel.core.tree import model_parts
from jaxaccel.nn.router import RouterAux, RouterLoad
from jaxaccel.training import step as step_module
from jaxaccel.training.config import OptimConfig, TrainConfig
from jaxaccel.training.step import (
    BatchSums,
    make_init,
    make_train_step,
    update_router_biases,
)


pytestmark = pytest.mark.usefixtures("quick_compile")

MOE = pathlib.Path(__file__).parents[2] / "experiments" / "moe"


class Loads(nnx.Module):
    """Two layers of two experts that only remember loads."""

    def __init__(self):
        self.w = nnx.Param(jnp.ones(()))
        block = nnx.Module()
        block.mlp = nnx.Module()
        block.mlp.router = nnx.Module()
        block.mlp.router.load = RouterLoad(jnp.zeros((2, 2), jnp.int32))
        self.layers = nnx.List([block])


def test_a_micro_batch_sees_the_counts_of_those_before_it():
    """Micro-batch i sends i + 1 rows to expert 0 of layer 0 and one to the others."""
    config = TrainConfig(num_steps=2, accumulation=4, optim=OptimConfig(warmup_steps=0))
    parts, optimizer = model_parts(Loads), optax.sgd(0.0)

    def loss(model, batch, totals, rng, config):
        seen = model.layers[0].mlp.router.load[...].astype(jnp.float32)
        zero = jnp.zeros((), jnp.float32)
        counts = jnp.ones((2, 2), jnp.int32).at[0, 0].set(batch.tokens[0, 0] + 1)
        value = model.w[...] * jnp.sum(seen * jnp.array([[1.0, 10.0], [100.0, 0.0]]))
        return value, BatchSums(
            loss=value,
            nats=zero,
            correct=zero,
            bytes=zero,
            mtp_nats=zero,
            balance=zero,
            counts=counts,
            mtp_counts=None,
            overflow=jnp.array([3, 0]),
        )

    state = make_init(lambda key: Loads(), optimizer, config)()
    batch = ragged_batch(4, 6)
    tokens = np.zeros((4, 6), np.int32) + np.arange(4, dtype=np.int32)[:, None]
    batch.tokens[...] = tokens
    step = jax.jit(make_train_step(parts, optimizer, config, loss=loss))
    for _ in range(2):  # every step begins with none
        state, metrics = step(state, batch)
        # Before micro-batches 0 to 3: 0, 1, 3, 6 rows of expert 0, and 0, 1, 2, 3.
        assert float(metrics["loss"]) == (0 + 1 + 3 + 6) + 110 * (0 + 1 + 2 + 3)
    assert not np.any(state.buffers["layers/0/mlp/router/load"])
    assert update_router_biases(state.buffers, None, 0.1).keys() == state.buffers.keys()
    # Rows: 10 + 4 in layer 0, 4 + 4 in layer 1; 12 of them found no room.
    assert float(metrics["router_overflow"]) == pytest.approx(12 / 22)
    assert float(metrics["router_max_violation"]) == pytest.approx(2 * 10 / 14 - 1)
    assert float(metrics["router_min_load"]) == pytest.approx(2 * 4 / 14)
    assert float(metrics["router_dead_experts"]) == 0


class Dropping:
    """Stands for a model whose two layers and extra block drop 2, 1 and 4 rows."""

    unembed = None

    def __call__(self, *batch):
        self.hidden = jnp.zeros((*batch[0].shape, 1))
        return SimpleNamespace(hidden=self.hidden, aux=self.aux([2, 1]))

    def mtp_hidden(self, *batch):
        return self.hidden[:, :-1], self.aux(4)

    def aux(self, overflow):
        overflow = jnp.array(overflow)
        zeros = jnp.zeros(overflow.shape)
        return RouterAux(
            counts=jnp.ones((*overflow.shape, 5), jnp.int32),
            balance_loss=zeros,
            z_loss=zeros,
            entropy=zeros,
            max_violation=zeros,
            overflow=overflow,
        )


def test_rows_that_the_extra_block_drops_are_reported(monkeypatch):
    zero = jnp.zeros(())
    sums = SimpleNamespace(loss=zero, nats=zero, correct=zero)
    monkeypatch.setattr(step_module, "chunked_cross_entropy", lambda *_, **__: sums)
    config, batch = TrainConfig(num_steps=1, mtp_loss_weight=0.5), ragged_batch(2, 6)
    totals = step_module.batch_totals(batch)
    _, found = step_module.language_model_loss(Dropping(), batch, totals, zero, config)
    np.testing.assert_array_equal(found.overflow, [2, 1, 4])
    metrics = step_module._metrics(found, totals, config)
    assert float(metrics["router_overflow"]) == pytest.approx(7 / 15)


def test_a_step_of_the_committed_latent_model_traces():
    """Every shape and dtype of its step, gradients and report, without running it.

    Of its layers one, which all have the same mixture.
    """
    layers = ["pattern = ('attention',)", "num_layers = 1"]
    experiment = load_experiment(
        [MOE / "tiny_latent.gin"], [f"LatentHybridConfig.{line}" for line in layers]
    )
    decoder, config = experiment.model.decoder(), experiment.train
    run = Run(decoder, config, is_abstract=True, router_bias_rate=1e-2)
    state, metrics = jax.eval_shape(run.step, run.state, ragged_batch(4, 64))
    assert jax.tree.map(lambda x: (x.shape, x.dtype), state) == jax.tree.map(
        lambda x: (x.shape, x.dtype), run.state
    )
    names = "balance_loss", "entropy", "max_violation", "min_load", "dead_experts"
    assert {f"router_{name}" for name in (*names, "overflow")} <= set(metrics)
    assert all(x.shape == () and x.dtype == jnp.float32 for x in metrics.values())
    assert state.params["layers/0/mlp/latent_in/kernel"].shape == (1, 64, 32)
    assert state.params["layers/0/mlp/w_in"].shape == (1, 16, 32, 64)
    assert state.buffers["layers/0/mlp/router/bias"].shape == (1, 16)
