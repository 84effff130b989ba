"""Training a model with a memory: equal to a dense table, flat in its size."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from training_runs import VOCAB, Toy, ToyOutput, ragged_batch

from jaxaccel.core.tree import model_parts
from jaxaccel.data.batch import packing_metadata
from jaxaccel.nn.engram_config import EngramConfig
from jaxaccel.nn.engram_memory import EngramMemory
from jaxaccel.training.config import OptimConfig, TrainConfig
from jaxaccel.training.optim import learning_rate, make_optimizer
from jaxaccel.training.step import (
    batch_totals,
    language_model_loss,
    make_init,
    make_train_step,
)
from jaxaccel.training.table_step import table_names


pytestmark = pytest.mark.usefixtures("quick_compile")

MEMORY = EngramConfig(
    layers=(1, 2),
    variant="v41",
    index_base=1,
    orders=(2,),
    heads=2,
    head_dim=4,
    bases=67,
    boundary="segment",
    seed=3,
)
# A small norm: the clipping is at work, over rows and dense parameters together.
OPTIM = OptimConfig(peak_lr=1e-2, warmup_steps=0, clip_norm=0.1)
NAMES = table_names(2)


@dataclasses.dataclass(frozen=True)
class Memorable:
    engram: EngramConfig


class ToyWithMemory(Toy):
    """What a decoder with a memory offers to the step; compiles at once."""

    def __init__(self, key, memory):
        super().__init__(key)
        self.config = Memorable(memory)
        self.memory = EngramMemory(memory, VOCAB, 16, rngs=nnx.Rngs(1))

    def __call__(self, tokens, segments=None, positions=None):
        meta = packing_metadata(tokens.shape, segment_ids=segments)
        reading = self.memory.read(tokens, meta)
        x = super().__call__(tokens).hidden
        for layer in range(2):
            x = jnp.tanh(reading.add(layer, x))
        return ToyOutput(hidden=x)


def config(**changes):
    return TrainConfig(num_steps=10, optim=OPTIM, **changes)


class ToyRun:
    """A model, its step and its first state."""

    def __init__(self, memory, config, *, is_abstract=False):
        def build(key):
            return ToyWithMemory(key, memory)

        optimizer = make_optimizer(config.optim, config.num_steps)
        self.config, self.parts = config, model_parts(lambda: build(jax.random.key(0)))
        step = make_train_step(self.parts, optimizer, config)
        self.jitted = jax.jit(step, donate_argnums=0)
        init = make_init(build, optimizer, config)
        self.state = jax.eval_shape(init) if is_abstract else jax.jit(init)()


@functools.cache
def run_of(accumulation=1):
    setup = config(accumulation=accumulation, ema_decay=0.5)
    return ToyRun(MEMORY, setup, is_abstract=accumulation > 1)


def fresh():
    return jax.tree.map(jnp.copy, run_of().state)


def test_equals_a_dense_table_on_the_rows_that_are_read():
    run, batch = run_of(), ragged_batch(8, 12)
    state = fresh()
    parts, schedule = run.parts, learning_rate(OPTIM, run.config.num_steps)

    @jax.jit
    def dense_gradients(params, tables, buffers):
        def loss(both):
            model = parts.merge(both[0], {**buffers, **both[1]})
            totals = batch_totals(batch)
            return language_model_loss(
                model, batch, totals, jax.random.key(0), run.config
            )[0]

        grads = jax.grad(loss)((params, tables))
        ids = parts.merge(params, buffers | tables).memory.lookups(
            batch.tokens, batch.segment_ids
        )
        return *grads, optax.tree.norm(grads), ids

    def split(buffers):
        tables = {n: buffers[n] for n in NAMES}
        return tables, {n: x for n, x in buffers.items() if n not in tables}

    tables, others = split(state.buffers)
    moments = {n: (np.zeros(t.shape), np.zeros(t.shape)) for n, t in tables.items()}
    b1, b2 = 0.9, 0.95
    for t in (1, 2):
        before = jax.tree.map(np.asarray, state.buffers)
        d_params, d_tables, norm, ids = dense_gradients(
            state.params, split(state.buffers)[0], others
        )
        rate = float(schedule(t - 1)) * MEMORY.table_lr_factor
        state, metrics = run.jitted(state, batch)
        assert float(norm) > 1.5 * OPTIM.clip_norm
        np.testing.assert_allclose(metrics["grad_norm"], norm, rtol=1e-5)
        num_rows = 0
        for index, name in enumerate(NAMES):
            read = np.unique(ids[:, :, index])
            num_rows += len(read)
            touched = np.isin(np.arange(len(before[name])), read)[:, None]
            g = np.asarray(d_tables[name], np.float64) * OPTIM.clip_norm / float(norm)
            m, v = moments[name]
            m = np.where(touched, b1 * m + (1 - b1) * g, m)
            v = np.where(touched, b2 * v + (1 - b2) * g * g, v)
            moments[name] = m, v
            step = m / (1 - b1**t) / (np.sqrt(v / (1 - b2**t)) + 1e-8)
            want = before[name] - np.where(touched, rate * step, 0.0)
            # Where g is rounding, its sign is all that Adam sees.
            sure = np.abs(m) > 1e-6
            np.testing.assert_allclose(
                np.asarray(state.buffers[name])[sure], want[sure], atol=2e-4
            )
            rest = np.broadcast_to(~touched, want.shape)
            assert sure.any()
            assert rest.any()
            np.testing.assert_array_equal(
                np.asarray(state.buffers[name])[rest], before[name][rest]
            )
        assert float(metrics["memory_rows"]) == num_rows
    # Dense parameters got the share of the joint norm.
    assert set(d_params) == set(state.params) == set(state.ema)
    assert not any(name in state.params for name in NAMES)


def test_micro_batches_add_up():
    batch = ragged_batch(8, 12)
    one, two = (run_of(n).jitted(fresh(), batch) for n in (1, 2))
    for name in NAMES:
        for a, b in zip(
            jax.tree.leaves(one[0].opt_state.tables[name]),
            jax.tree.leaves(two[0].opt_state.tables[name]),
            strict=True,
        ):
            np.testing.assert_allclose(a, b, rtol=2e-4, atol=1e-6)


def test_loss_falls_and_a_bad_step_changes_nothing():
    run, batch = run_of(), ragged_batch(8, 12)
    state, losses = fresh(), []
    for _ in range(5):
        state, metrics = run.jitted(state, batch)
        losses.append(float(metrics["loss"]))
    assert losses[-1] < losses[0] - 0.05
    kept = state.params, state.buffers, state.opt_state
    before = jax.tree.map(np.array, kept)
    # A token that has no class: its rows are NaN.
    bad = dataclasses.replace(
        batch, tokens=np.where(batch.tokens == 5, 99, batch.tokens)
    )
    state, metrics = run.jitted(state, bad)
    assert float(metrics["finite"]) == 0.0
    for a, b in zip(
        jax.tree.leaves((state.params, state.buffers, state.opt_state)),
        jax.tree.leaves(before),
        strict=True,
    ):
        np.testing.assert_array_equal(a, b)


def test_no_array_but_the_state_is_as_large_as_the_table():
    memory = dataclasses.replace(MEMORY, layers=(2,), bases=400_000)
    run = ToyRun(memory, config(), is_abstract=True)
    compiled = run.jitted.lower(run.state, ragged_batch(2, 8)).compile()
    num_rows = memory.layout(VOCAB).num_rows[0]
    assert compiled.memory_analysis().temp_size_in_bytes < num_rows * 4 * 4 / 50
    # Nothing but scatters, each in a fusion of its own, gives an array of that size.
    made = re.findall(rf"= \S*f32\[{num_rows},4\]\S* ([\w-]+)\(", compiled.as_text())
    assert {*made} == {"parameter", "scatter", "fusion"}
    assert made.count("fusion") == made.count("scatter") == 3


def test_moments_on_the_host_are_refused():
    with pytest.raises(ValueError, match="does not work with an n-gram memory"):
        ToyRun(MEMORY, config(optimizer_on_host=True), is_abstract=True)
