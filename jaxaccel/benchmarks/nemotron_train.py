"""A Nemotron's training step by several implementations, in turns.

See `jaxaccel.benchmarks.nemotron`.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jaxaccel.benchmarks.step import (
    LOSS_TOLERANCE,
    Contender,
    device_batches,
    ours,
    run_round,
)
from jaxaccel.config.gin_utils import load_experiment
from jaxaccel.config.registry import Experiment
from jaxaccel.core.devices import device_peak
from jaxaccel.models.describe import describe
from pallas_kernels._common.bench import digits


OPS = ("attention", "causal_conv1d", "grouped_matmul", "ssd")
"""Those that run what is measured; others choose for themselves."""

_OP = "nemotron_train_step"


def measure(
    gin_files: Sequence[Any],
    bindings: Sequence[str],
    *,
    implementations: Sequence[str],
    rounds: int,
    steps: int,
    before: Sequence[Mapping[str, Any]] = (),
) -> Iterator[dict[str, Any]]:
    """Measures the steps, which read the same batches from the same parameters.

    Args:
      gin_files: an experiment whose model is a `NemotronHConfig`.
      bindings: that override.
      implementations: of `OPS`; losses are compared with the first one's.
      before: rows of earlier calls. Where one is of this workload and has a speed,
        losses are compared with its own.
      rounds: turns of each, behind one that warms up.
      steps: steps in a turn.

    Yields:
      One row an implementation, and `None` for its `ms` if its loss is another.
    """
    experiment = load_experiment([str(file) for file in gin_files], list(bindings))
    batches = device_batches(experiment, steps)
    contenders: dict[str, Contender] = {}
    refused: dict[str, str] = {}
    for name in implementations:
        model: Any = experiment.model
        model = dataclasses.replace(model, implementation=dict.fromkeys(OPS, name))
        one = dataclasses.replace(experiment, model=model)
        try:
            contenders[name] = ours(one, batches[0])[0]
        except NotImplementedError as error:
            refused[name] = str(error)
    for _ in range(rounds + 1):
        for contender in contenders.values():
            run_round(contender, batches)
    workload = _workload(experiment)
    losses = [
        row["first_loss"]
        for row in before
        if (row["op"], row["workload"]) == (_OP, workload) and row["ms"]
    ]
    losses += [contender.losses[0] for contender in contenders.values()]
    for name in implementations:
        about = {
            "op": _OP,
            "workload": workload,
            "implementation": name,
            "dtype": experiment.model.decoder().dtype,
        }
        if name in refused:
            yield {**about, "ms": None, "note": f"no speed: {refused[name]}"}
            continue
        apart = abs(contenders[name].losses[0] / losses[0] - 1)
        yield about | _row(experiment, contenders[name], batches, apart)


def _workload(experiment: Experiment) -> str:
    config = experiment.model.decoder()
    size = describe(config, experiment.data.seq_len).total.params
    return (
        f"{size / 1e9:.2f} B parameters, {experiment.data.batch_size} x "
        f"{experiment.data.seq_len} tokens"
    )


def _row(
    experiment: Experiment, contender: Contender, batches: list[Any], apart: float
) -> dict[str, Any]:
    config = experiment.model.decoder()
    about = describe(config, experiment.data.seq_len)
    tokens = float(np.mean([np.sum(np.asarray(b.segment_ids) > 0) for b in batches]))
    times = contender.step_ms[1:]
    ms = statistics.median(times)
    flops = about.training_flops * tokens / ms * 1e3
    peak = device_peak(jax.devices()[0].device_kind)
    # Written so that NaN fails.
    agree = apart <= LOSS_TOLERANCE
    return {
        "ms": digits(ms, 5) if agree else None,
        "tokens_per_s": digits(tokens / ms * 1e3) if agree else None,
        "tflops": digits(flops / 1e12) if agree else None,
        "mfu": digits(flops / peak.flops) if agree and peak else None,
        "tokens": round(tokens),
        "parameters": about.total.params,
        "active_parameters": about.trunk.active_params,
        "peak_gib": digits(contender.peak_bytes / 2**30),
        "compile_s": digits(contender.compile_seconds),
        "rounds_ms": [digits(value, 5) for value in times],
        "first_loss": digits(contender.losses[0], 6),
        "last_loss": digits(contender.losses[-1], 6),
        "apart": digits(apart),
        "runs": contender.runs,
        "note": "" if agree else f"no speed: losses differ by {apart:.1e}",
    }
