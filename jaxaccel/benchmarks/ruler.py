"""`jaxaccel bench ruler`: trains a small model on the tasks that caches are asked.

    jaxaccel bench ruler --gin_file experiments/kv_cache/ruler_h200.gin \\
        --model runs/ruler --json FILE

Needles, variables and word counts (see `jaxaccel.data.ruler`) in contexts that grow
from phase to phase. Training ends with the last phase, with the time, or as soon as
every task is passed at the last phase's length, on rows of their own: those that are
reported end nothing. `jaxaccel bench kv_cache` then asks the
saved model through its caches: only where dense attention answers does a cache's
failure mean something. What comes out is accuracy, no speed.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import math
import pathlib
import time as clock
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import jaxaccel.config.ruler  # noqa: F401  registers the config
from jaxaccel.benchmarks import results
from jaxaccel.benchmarks.guards import implementations_used
from jaxaccel.benchmarks.step import add_options, compiled, untuned
from jaxaccel.config.gin_utils import load_config
from jaxaccel.config.ruler import RulerBenchConfig
from jaxaccel.core.tree import ModelParts, model_parts, split_model
from jaxaccel.data.ruler import QUESTION, is_right, ruler_batch, ruler_rows
from jaxaccel.models.decoder import Decoder
from jaxaccel.models.describe import describe
from jaxaccel.models.safetensors_io import (
    CheckpointReader,
    TensorSource,
    TensorSpec,
    write_checkpoint,
)
from jaxaccel.training.config import TrainConfig
from jaxaccel.training.optim import learning_rate, make_optimizer
from jaxaccel.training.step import TrainState, make_init, make_train_step
from pallas_kernels._common.bench import digits, stamp
from pallas_kernels._common.dispatch import recorded_choices


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trained:
    """A model after its run.

    Attributes:
      model: a `Decoder`.
      accuracy: share of rows of each task that dense attention answers, of rows that
        neither a step nor the end of training depends on.
      losses: nats a question, the mean over each call's steps.
      steps: steps made.
      last_lr: learning rate of the last of them.
      seconds: of all of it, compilation included.
      compile_seconds: of tracing and compiling.
      is_finite: whether every loss and gradient was.
      runs: op -> implementation that was traced.
    """

    model: Any
    accuracy: dict[str, float]
    losses: list[float]
    steps: int
    last_lr: float
    seconds: float
    compile_seconds: float
    is_finite: bool
    runs: dict[str, str]


def parts_of(config: RulerBenchConfig) -> ModelParts:
    """The model taken apart."""
    decoder = config.model.decoder()
    return model_parts(lambda: Decoder(decoder, rngs=nnx.Rngs(0)))


def task_key(config: RulerBenchConfig, name: str) -> jax.Array:
    """The key of a task's rows that are reported; training never draws from it."""
    return _of_task(config, name, 1)


def stopping_key(config: RulerBenchConfig, name: str) -> jax.Array:
    """The key of a task's rows that may end training, which are never reported."""
    return _of_task(config, name, 4)


def _of_task(config: RulerBenchConfig, name: str, purpose: int) -> jax.Array:
    base = jax.random.fold_in(jax.random.key(config.seed), purpose)
    return jax.random.fold_in(base, config.tasks.index(name))


def dense_accuracy(parts: ModelParts, config: RulerBenchConfig) -> Any:
    """A compiled-once (params, buffers, key of a task) -> accuracy of each by name.

    The key of a task is a function, `task_key` or `stopping_key`.
    """

    @jax.jit
    def ask(params, buffers, tokens, answers):
        model: Any = parts.merge(params, buffers)

        def rows(chunk):
            hidden = model(chunk).hidden[:, config.rows.context + QUESTION - 1 :]
            return model.unembed(hidden[:, ::QUESTION])

        # A few rows at a time, as activations of all of them would not be small.
        few = math.gcd(tokens.shape[0], 8)
        logits = jax.lax.map(rows, tokens.reshape(-1, few, tokens.shape[1]))
        return is_right(logits.reshape(*answers.shape[:2], -1), answers)

    @functools.partial(jax.jit, static_argnums=0)
    def drawn(task, key):
        return ruler_rows(config.rows, task, key, config.eval_rows)

    def all_tasks(params, buffers, key_of) -> dict[str, float]:
        found = {}
        for name in config.tasks:
            task = config.task(name)
            rows = drawn(task, key_of(config, name))
            right = ask(params, buffers, rows.tokens, rows.answers)
            right = jnp.all(right[:, : task.questions], axis=1)
            found[name] = float(jnp.mean(right.astype(jnp.float32)))
        return found

    return all_tasks


def train(config: RulerBenchConfig) -> Trained:
    """Trains the model phase by phase.

    Args:
      config: model, tasks and run.

    Returns:
      What became of it.
    """
    start = clock.perf_counter()
    decoder = config.model.decoder()
    train_config = TrainConfig(num_steps=config.num_steps, optim=config.optim)
    parts = parts_of(config)
    optimizer = make_optimizer(config.optim, config.num_steps)
    step = make_train_step(parts, optimizer, train_config)

    def build(key: jax.Array) -> Decoder:
        return Decoder(decoder, rngs=nnx.Rngs(key))

    state: TrainState = jax.jit(make_init(build, optimizer, train_config))()
    key = jax.random.fold_in(jax.random.key(config.seed), 2)
    ask = dense_accuracy(parts, config)
    losses: list[float] = []
    compile_seconds, runs = 0.0, {}

    limit = math.inf if config.max_seconds is None else config.max_seconds
    ends = [limit * (i + 1) / len(config.phases) for i in range(len(config.phases))]

    def age() -> float:
        return clock.perf_counter() - start

    for number, (context, batch, num_steps) in enumerate(config.phases):
        rows_config = config.training_rows(context)

        def steps(state, key, rows_config=rows_config, batch=batch):
            def one(state, _):
                drawn = jax.random.fold_in(key, state.step)
                rows = ruler_batch(rows_config, drawn, batch)
                state, metrics = step(state, rows)
                return state, metrics["nats_per_token"]

            state, nats = jax.lax.scan(one, state, length=config.steps_per_call)
            return state, jnp.mean(nats)

        with recorded_choices() as choices:
            call, seconds, _ = compiled(
                jax.jit(steps, donate_argnums=0), state, key, options=untuned()
            )
        compile_seconds += seconds
        runs = implementations_used(choices)
        is_last = number + 1 == len(config.phases)
        for done in range(num_steps // config.steps_per_call):
            if done and age() > ends[number]:
                break
            state, loss = call(state, key)
            losses.append(float(loss))
            told = (
                f"{age():6.1f} s  context {context}: {losses[-1]:.3f} nats a question"
            )
            passed = False
            if is_last:
                found = ask(state.params, state.buffers, stopping_key)
                told += "  " + _told(found)
                passed = min(found.values()) >= config.passes
            print(told, flush=True)
            if passed:
                break
    made = int(state.step)
    rate = learning_rate(config.optim, config.num_steps)
    return Trained(
        model=parts.merge(state.params, state.buffers),
        accuracy=ask(state.params, state.buffers, task_key),
        losses=losses,
        steps=made,
        last_lr=float(rate(made - 1)),
        seconds=age(),
        compile_seconds=compile_seconds,
        is_finite=bool(state.finite),
        runs=runs,
    )


def _told(accuracy: Mapping[str, float]) -> str:
    return " ".join(f"{name} {100 * value:.0f}" for name, value in accuracy.items())


def save(model: Any, folder: pathlib.Path) -> None:
    """Writes parameters to `folder/model.safetensors`."""
    params, buffers = split_model(model)
    tensors = []
    for name, array in {**params, **buffers}.items():
        held = np.asarray(array)
        spec = TensorSpec(held.shape, held.dtype)
        tensors.append(TensorSource(name, spec, lambda held=held: held))
    write_checkpoint(folder, tensors, {}, max_shard_bytes=2**32)


def load(config: RulerBenchConfig, folder: pathlib.Path) -> Any:
    """Reads what `save` wrote.

    Raises:
      FileNotFoundError: there is nothing.
      ValueError: the parameters are not those of the config's model.
    """
    parts = parts_of(config)
    params, buffers = (
        {"/".join(map(str, path)) for path, _ in nnx.to_flat_state(state)}
        for state in (parts.params, parts.buffers)
    )
    reader = CheckpointReader(folder)
    if set(reader.specs) != params | buffers:
        raise ValueError(f"{folder} holds another model than the config's")
    held = {name: jnp.asarray(reader.read(name)) for name in reader.specs}
    return parts.merge(
        {name: held[name] for name in params}, {name: held[name] for name in buffers}
    )


def rows_of(config: RulerBenchConfig, trained: Trained) -> list[dict[str, Any]]:
    """One row a task."""
    decoder = config.model.decoder()
    about = {
        "op": "ruler",
        "implementation": "jaxaccel",
        "dtype": decoder.dtype,
        "parameters": describe(decoder, config.rows.context).total.params,
        "layers": decoder.num_layers,
        "context": config.rows.context,
        "phases": [list(phase) for phase in config.phases],
        "steps": trained.steps,
        "planned_steps": config.num_steps,
        # A run that time or success ends early may not have come to its decay.
        "last_lr": digits(trained.last_lr),
        "train_s": digits(trained.seconds),
        "compile_s": digits(trained.compile_seconds),
        "last_nats": digits(trained.losses[-1]) if trained.losses else None,
        "eval_rows": config.eval_rows,
        "runs": trained.runs,
        "note": "" if trained.is_finite else "a loss or gradient was not finite",
    }
    return [
        {
            **about,
            "workload": name,
            "pairs": config.task(name).pairs,
            "accuracy": digits(value, 5),
            "discriminative": value >= config.passes,
        }
        for name, value in trained.accuracy.items()
    ]


def main(argv: list[str]) -> int:
    """The command line; exit status 1 if the run was not finite."""
    parser = argparse.ArgumentParser(
        prog="jaxaccel bench ruler",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_options(parser)
    parser.add_argument(
        "--model", type=pathlib.Path, help="folder that the trained model goes to"
    )
    options = parser.parse_args(argv)
    config = load_config("RulerBenchConfig", options.gin_file, options.gin_bindings)
    trained = train(config)
    if options.model is not None:
        save(trained.model, options.model)
    about = stamp(options.commit)
    results.write(options.json, [{**r, **about} for r in rows_of(config, trained)])
    print(f"{trained.seconds:.0f} s: {_told(trained.accuracy)}")
    return 0 if trained.is_finite else 1
