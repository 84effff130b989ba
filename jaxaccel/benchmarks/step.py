"""`jaxaccel bench step`: our training step against the same model in plain JAX.

Both steps run the same batches from the same parameters in one process, in turns, so
that clocks and temperature are shared. No speed is written if their losses differ.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import pathlib
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxaccel.benchmarks import plain_jax, results
from jaxaccel.benchmarks.guards import (
    KernelMissing,
    implementations_used,
    require_kernels,
)
from jaxaccel.config.gin_utils import load_experiment
from jaxaccel.config.registry import Experiment
from jaxaccel.core.devices import device_peak
from jaxaccel.core.tree import ModelParts, model_parts
from jaxaccel.data.batch import PackedBatch
from jaxaccel.data.pipeline import make_iterator, prepare
from jaxaccel.models.decoder import Decoder
from jaxaccel.models.describe import describe
from jaxaccel.training.optim import make_optimizer
from jaxaccel.training.step import make_init, make_train_step
from pallas_kernels._common import timing
from pallas_kernels._common.bench import digits, stamp
from pallas_kernels._common.dispatch import recorded_choices


LOSS_TOLERANCE = 2e-3
"""Largest relative difference between the two first losses, in bf16."""


@dataclasses.dataclass(kw_only=True)
class Contender:
    """A compiled step and its changing state.

    Attributes:
      name: "jaxaccel" or "plain_jax".
      advance: (state, batch) -> (state, loss), compiled, state donated.
      state: what `advance` takes and returns.
      compile_seconds: of tracing and compiling.
      peak_bytes: arguments, results and temporaries of the compiled step.
      runs: op -> implementation that was traced.
      losses: of the steps done so far.
      step_ms: device and host time of a step, one entry per round.
      dispatch_ms: host time until a step's call returned, one entry per round. On a
        GPU the calling thread also launches the step's kernels, and waits where more
        of them are queued than the device takes, unless `launches_elsewhere()`.
      call_ms: host time of a call with the same arguments and results that launches
        nothing: what the step's call costs beside its kernels.
    """

    name: str
    advance: Callable[[Any, Any], tuple[Any, jax.Array]]
    state: Any
    compile_seconds: float
    peak_bytes: int
    runs: dict[str, str] = dataclasses.field(default_factory=dict)
    losses: list[float] = dataclasses.field(default_factory=list)
    step_ms: list[float] = dataclasses.field(default_factory=list)
    dispatch_ms: list[float] = dataclasses.field(default_factory=list)
    call_ms: float | None = None


def launches_elsewhere() -> bool:
    """Whether the GPU runtime launches kernels on a thread of its own.

    jaxlib reads XLA_PYTHON_CLIENT_USE_TFRT_GPU_CLIENT when the process first uses the
    GPU; without it the thread that calls a step launches each of its kernels.
    """
    return os.environ.get("XLA_PYTHON_CLIENT_USE_TFRT_GPU_CLIENT", "0") == "1"


def untuned() -> dict[str, Any]:
    """Options to compile what is trained for its losses, and not for a speed.

    On a GPU XLA compiles every fusion by several of its emitters to try which is
    fastest, which takes longer than all the rest. Products are tuned all the same.
    """
    if jax.default_backend() != "gpu":
        return {}
    return {"xla_gpu_experimental_enable_fusion_autotuner": False}


def compiled(
    function: Any, *arguments: Any, options: Mapping[str, Any] | None = None
) -> tuple[Any, float, int]:
    """Compiles a jitted function; returns it, the seconds and its peak bytes."""
    start = time.perf_counter()
    # XLA tries variants of products on the card.
    with timing.together():
        done = function.lower(*arguments).compile(dict(options or {}))
    seconds = time.perf_counter() - start
    memory = done.memory_analysis()
    assert memory is not None
    peak = (
        memory.argument_size_in_bytes
        + memory.output_size_in_bytes
        - memory.alias_size_in_bytes
        + memory.temp_size_in_bytes
    )
    return done, seconds, peak


def ours(experiment: Experiment, batch: PackedBatch) -> tuple[Contender, ModelParts]:
    """Builds this project's step as the training loop runs it."""
    config, train = experiment.model.decoder(), experiment.train

    def build(key: jax.Array) -> Decoder:
        return Decoder(config, rngs=nnx.Rngs(key))

    parts = model_parts(lambda: build(jax.random.key(0)))
    optimizer = make_optimizer(train.optim, train.num_steps)
    state = jax.jit(make_init(build, optimizer, train))()
    step = jax.jit(make_train_step(parts, optimizer, train), donate_argnums=0)
    with recorded_choices() as choices:
        step, seconds, peak = compiled(step, state, batch)
    require_kernels(step.as_text(), experiment.require)

    def advance(state, batch):
        state, metrics = step(state, batch)
        return state, metrics["nats_per_token"]

    contender = Contender(
        name="jaxaccel",
        advance=advance,
        state=state,
        compile_seconds=seconds,
        peak_bytes=peak,
        runs=implementations_used(choices),
    )
    return contender, parts


def theirs(
    experiment: Experiment, params: dict[str, jax.Array], batch: dict[str, jax.Array]
) -> Contender:
    """Builds the plain step from a copy of our parameters."""
    config, train = experiment.model.decoder(), experiment.train
    optimizer = make_optimizer(train.optim, train.num_steps)
    step = plain_jax.make_step(config, optimizer, chunk=train.loss_chunk)
    params = jax.tree.map(jnp.copy, params)
    opt_state = jax.jit(optimizer.init)(params)
    step, seconds, peak = compiled(step, params, opt_state, batch)

    def advance(state, batch):
        params, opt_state, loss = step(*state, batch)
        return (params, opt_state), loss

    return Contender(
        name="plain_jax",
        advance=advance,
        state=(params, opt_state),
        compile_seconds=seconds,
        peak_bytes=peak,
    )


def run_round(contender: Contender, batches: list[Any]) -> None:
    """Runs one step per batch and notes times and losses."""
    state, losses, dispatch = contender.state, [], []
    start = time.perf_counter()
    for batch in batches:
        called = time.perf_counter()
        state, loss = contender.advance(state, batch)
        dispatch.append(time.perf_counter() - called)
        losses.append(loss)
    jax.block_until_ready((state, losses))
    total = time.perf_counter() - start
    contender.state = state
    contender.losses += [float(loss) for loss in losses]
    contender.step_ms.append(1e3 * total / len(batches))
    contender.dispatch_ms.append(1e3 * statistics.median(dispatch))


def time_empty_call(contender: Contender, batch: Any, calls: int = 50) -> None:
    """Sets `call_ms`: the median over calls that hand the state through."""

    def nothing(state, batch):
        del batch
        return state

    call = jax.jit(nothing, donate_argnums=0, keep_unused=True)
    state, seconds = contender.state, []
    for _ in range(calls):
        jax.block_until_ready(state)
        start = time.perf_counter()
        state = call(state, batch)
        seconds.append(time.perf_counter() - start)
    contender.state = state
    contender.call_ms = 1e3 * statistics.median(seconds)


def device_batches(experiment: Experiment, count: int) -> list[PackedBatch]:
    """Takes the first batches of the training stream and puts them on the device."""
    corpus = prepare(experiment.data)
    stream = make_iterator(corpus, experiment.data, split="train")
    return [jax.tree.map(jnp.asarray, next(stream)) for _ in range(count)]


def measure(
    experiment: Experiment, *, workload: str, rounds: int, steps: int
) -> list[dict[str, Any]]:
    """Measures both steps.

    Args:
      experiment: model, data and training config; accumulation must be 1.
      workload: name for the rows.
      rounds: turns that each contender gets; the first warms up and is not counted.
      steps: steps in a turn.

    Returns:
      One row per contender. `ms` is the median over rounds, `None` if the losses
      disagreed; `ratio` on our row is our time over the plain one's.

    Raises:
      ValueError: the experiment accumulates gradients.
      KernelMissing: a kernel of `experiment.require` is not in our step.
    """
    if experiment.train.accumulation != 1:
        raise ValueError(
            f"bench step: accumulation={experiment.train.accumulation}, allowed is 1"
        )
    batches = device_batches(experiment, steps)
    plain_batches = [dataclasses.asdict(batch) for batch in batches]
    mine, parts = ours(experiment, batches[0])
    del parts
    plain = theirs(experiment, mine.state.params, plain_batches[0])
    with timing.alone():
        for _ in range(rounds):
            run_round(mine, batches)
            run_round(plain, plain_batches)
        time_empty_call(mine, batches[0])
        time_empty_call(plain, plain_batches[0])
    tokens = float(np.mean([np.sum(np.asarray(b.segment_ids) > 0) for b in batches]))
    return summary(experiment, mine, plain, workload=workload, tokens=tokens)


def summary(
    experiment: Experiment,
    mine: Contender,
    plain: Contender,
    *,
    workload: str,
    tokens: float,
) -> list[dict[str, Any]]:
    """Makes rows of what was measured; see `measure`.

    Args:
      experiment: what was run.
      mine: our contender after its rounds.
      plain: the plain one after its rounds.
      workload: name for the rows.
      tokens: real tokens of a step, padding left out.
    """
    apart = abs(mine.losses[0] / plain.losses[0] - 1.0)
    agree = apart <= LOSS_TOLERANCE
    config = experiment.model.decoder()
    about = describe(config, experiment.data.seq_len)
    peak = device_peak(jax.devices()[0].device_kind)
    rows = []
    for contender in (mine, plain):
        ms = statistics.median(contender.step_ms[1:])
        flops = about.training_flops * tokens / ms * 1e3
        rows.append(
            {
                "op": "train_step",
                "workload": workload,
                "implementation": contender.name,
                "dtype": config.dtype,
                "ms": digits(ms, 5) if agree else None,
                "tokens_per_s": digits(tokens / ms * 1e3) if agree else None,
                "tflops": digits(flops / 1e12) if agree else None,
                "mfu": digits(flops / peak.flops) if agree and peak else None,
                "peak_gib": digits(contender.peak_bytes / 2**30),
                "host_dispatch_ms": digits(min(contender.dispatch_ms[1:])),
                "host_call_ms": contender.call_ms and digits(contender.call_ms),
                "launches_elsewhere": launches_elsewhere(),
                "compile_s": digits(contender.compile_seconds),
                "rounds_ms": [digits(t, 5) for t in contender.step_ms[1:]],
                "first_loss": digits(contender.losses[0], 6),
                "last_loss": digits(contender.losses[-1], 6),
                "parameters": about.total.params,
                "runs": contender.runs,
                "note": "" if agree else f"losses differ by {apart:.1e}: no speed",
            }
        )
    if agree:
        pairs = zip(mine.step_ms[1:], plain.step_ms[1:], strict=True)
        rows[0]["ratio"] = digits(statistics.median(a / b for a, b in pairs))
    return rows


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options that the system benchmarks share."""
    parser.add_argument(
        "--gin_file", action="append", required=True, help="may be given repeatedly"
    )
    parser.add_argument(
        "--gin_bindings", action="append", default=[], help="bindings that override"
    )
    parser.add_argument("--commit", help="of the code, where git cannot say")
    parser.add_argument(
        "--json", type=pathlib.Path, required=True, help="where the rows go"
    )


def main(argv: list[str]) -> int:
    """The command line; exit status 1 if losses disagree or a kernel is missing."""
    parser = argparse.ArgumentParser(prog="jaxaccel bench step", description=__doc__)
    add_options(parser)
    parser.add_argument(
        "--rounds", type=int, default=6, help="turns of each step, one to warm up"
    )
    parser.add_argument("--steps", type=int, default=8, help="steps in a turn")
    options = parser.parse_args(argv)
    experiment = load_experiment(options.gin_file, options.gin_bindings)
    workload = pathlib.PurePath(options.gin_file[0]).with_suffix("").as_posix()
    try:
        rows = measure(
            experiment, workload=workload, rounds=options.rounds, steps=options.steps
        )
    except KernelMissing as error:
        print(f"nothing is measured: {error}")
        return 1
    about = stamp(options.commit)
    rows = [{**row, **about} for row in rows]
    results.write(options.json, rows)
    for row in rows:
        print({k: v for k, v in row.items() if k not in about})
    return 0 if all(row["ms"] is not None for row in rows) else 1
