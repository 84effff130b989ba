"""The step: accumulation, router bias, EMA, NaN, donation, multi-token prediction."""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from training_runs import Run, ragged_batch, routed_decoder

from jaxaccel.training.config import OptimConfig, TrainConfig
from jaxaccel.training.step import (
    BatchSums,
    second_next,
    update_router_biases,
)


pytestmark = pytest.mark.usefixtures("quick_compile")

OPTIM = OptimConfig(peak_lr=1e-2, warmup_steps=0)


def config(**changes):
    return TrainConfig(num_steps=10, optim=OPTIM, **changes)


@functools.cache
def routed(accumulation):
    """Experts and both heads, compiled once for all tests.

    Only the second head's block attends: fewer layers to compile.
    """
    return Run(
        routed_decoder(pattern=("moe",), single_part=True, num_mtp_layers=1),
        config(accumulation=accumulation, ema_decay=0.5, mtp_loss_weight=0.5),
        router_bias_rate=0.1,
        is_abstract=accumulation > 1,
    )


@functools.cache
def toy():
    """A step that compiles at once."""
    return Run({}, config())


def fresh(run):
    return jax.tree.map(jnp.copy, run.state)


def test_eight_micro_batches_of_one_equal_one_of_eight():
    """The model has no balance loss, which looks at one micro-batch at a time."""
    batch = ragged_batch(8, 12)
    assert len(set(batch.loss_mask.sum(axis=1))) > 3
    one, eight = (routed(n).jitted(fresh(routed(1)), batch) for n in (1, 8))
    # The first moment is the gradient: AdamW's step alone would hide its size.
    for whole, parts in (
        (one[0].opt_state, eight[0].opt_state),
        (one[0].buffers, eight[0].buffers),
        (one[1], eight[1]),
    ):
        chex.assert_trees_all_close(parts, whole, rtol=2e-4, atol=2e-6)


def test_loss_falls_on_one_batch():
    run, batch, losses = routed(1), ragged_batch(8, 12), []
    state = fresh(run)
    for _ in range(5):
        state, metrics = run.jitted(state, batch)
        losses.append(float(metrics["loss"]))
    assert losses[-1] < losses[0] - 0.05
    assert int(state.step) == 5
    assert float(metrics["nats_per_byte"]) == pytest.approx(
        float(metrics["nats_per_token"]) / 2
    )
    for name, ema in state.ema.items():
        assert ema.dtype == jnp.float32
        assert not np.array_equal(ema, state.params[name]), name
    bias = state.buffers["layers/0/mlp/router/bias"]
    assert bias.shape == (2, 4)
    assert (np.abs(bias) > 0).any()


def test_state_is_f32_under_bfloat16_parameters():
    run = Run({"dtype": "bfloat16"}, config(ema_decay=0.9))
    assert run.state.params["lm_head/kernel"].dtype == jnp.bfloat16
    before = jax.tree.map(lambda x: x.dtype, run.state)
    for leaf in jax.tree.leaves((run.state.opt_state, run.state.ema)):
        assert leaf.dtype in (jnp.float32, jnp.int32)
    state, _ = run.jitted(run.state, ragged_batch(8, 12))
    assert jax.tree.map(lambda x: x.dtype, state) == before


def test_nan_freezes_the_state():
    run = toy()
    batch = ragged_batch(8, 12)
    bad = dataclasses.replace(batch, tokens=batch.tokens + 10_000)
    state, _ = run.jitted(fresh(run), batch)
    good = jax.tree.map(np.asarray, state.params)
    state, metrics = run.jitted(state, bad)
    assert float(metrics["finite"]) == 0.0
    state, metrics = run.jitted(state, batch)
    assert float(metrics["finite"]) == 0.0
    assert int(state.step) == 1
    chex.assert_trees_all_equal(state.params, good)


def test_multi_token_prediction_adds_its_loss():
    run = routed(1)
    state, metrics = run.jitted(fresh(run), ragged_batch(8, 12))
    # Both heads start near the uniform distribution.
    assert float(metrics["mtp_nats_per_token"]) == pytest.approx(np.log(32), rel=0.3)
    want = float(metrics["nats_per_token"] + 0.5 * metrics["mtp_nats_per_token"])
    assert float(metrics["loss"]) == pytest.approx(want, rel=1e-3)
    assert np.abs(state.buffers["mtp/block/mlp/router/bias"]).max() > 0


def test_second_next_stays_inside_documents():
    batch = ragged_batch(3, 12)
    targets, weights = second_next(batch)
    for row, time in np.argwhere(np.asarray(weights) > 0):
        assert batch.segment_ids[row, time] == batch.segment_ids[row, time + 2]
        assert targets[row, time] == batch.tokens[row, time + 2]
    lengths = [
        np.count_nonzero(row == document)
        for row in batch.segment_ids
        for document in range(1, row.max() + 1)
    ]
    assert float(weights.sum()) == sum(max(length - 2, 0) for length in lengths)


def test_router_bias_moves_against_the_load_in_layer_order():
    zero = jnp.zeros(())
    # Two periods of two positions; expert 0 is full in period 0, position 1 only.
    counts = jnp.full((4, 3), 2, jnp.int32).at[1].set(jnp.array([6, 0, 0]))
    sums = BatchSums(
        loss=zero,
        nats=zero,
        correct=zero,
        bytes=zero,
        mtp_nats=zero,
        balance=zero,
        counts=counts,
        mtp_counts=None,
    )
    buffers = {
        f"layers/{i}/mlp/router/bias": jnp.zeros((2, 3), jnp.float32) for i in (0, 1)
    }
    new = update_router_biases(buffers, sums, 0.5)
    np.testing.assert_array_equal(new["layers/0/mlp/router/bias"], np.zeros((2, 3)))
    np.testing.assert_array_equal(
        new["layers/1/mlp/router/bias"], [[-0.5, 0.5, 0.5], [0, 0, 0]]
    )


def test_step_donates_its_state():
    run = toy()
    state = fresh(run)
    kernel = state.params["lm_head/kernel"]
    run.jitted(state, ragged_batch(8, 12))
    assert kernel.is_deleted()
