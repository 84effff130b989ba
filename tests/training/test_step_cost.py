"""What the framework costs: compile time over depth, host time of a step."""

import time

import jax
import pytest
from training_runs import Run, ragged_batch, tiny_decoder

from jaxaccel.training.config import OptimConfig, TrainConfig


pytestmark = pytest.mark.usefixtures("quick_compile")

CONFIG = TrainConfig(num_steps=10, optim=OptimConfig(warmup_steps=0))


def deep(layers):
    return Run(tiny_decoder(num_layers=layers), CONFIG, is_abstract=True)


def compile_seconds(run, batch) -> float:
    # Time of this process's processors: what else the machine does is not counted.
    start = time.process_time()
    jax.jit(run.step, donate_argnums=0).lower(run.state, batch).compile()
    return time.process_time() - start


def test_compile_time_does_not_grow_with_depth():
    batch = ragged_batch(2, 8)
    shallow, deeper = deep(12), deep(48)
    text = [r.jitted.lower(r.state, batch).as_text() for r in (shallow, deeper)]
    assert len(text[1].splitlines()) == len(text[0].splitlines())
    seconds = [[], []]
    for _ in range(3):
        seconds[0].append(compile_seconds(shallow, batch))
        seconds[1].append(compile_seconds(deeper, batch))
        if min(seconds[1]) <= 1.3 * min(seconds[0]):
            return
    raise AssertionError(f"12 layers {seconds[0]} s, 48 layers {seconds[1]} s")


def test_a_step_costs_the_host_at_most_a_millisecond():
    run = Run(tiny_decoder(num_layers=48), CONFIG)
    batch = jax.device_put(ragged_batch(2, 8))
    state, _ = run.jitted(run.state, batch)
    seconds = []
    for _ in range(60):
        jax.block_until_ready(state)
        start = time.perf_counter()
        state, _ = run.jitted(state, batch)
        seconds.append(time.perf_counter() - start)
        if seconds[-1] <= 1e-3:
            return
    raise AssertionError(f"the fastest of {len(seconds)} calls took {min(seconds)} s")
