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
from pallas_kernels._common import timing
from pallas_kernels._common.bench import digits


OPS = ("attention", "causal_conv1d", "grouped_matmul", "ssd")
"""Those that run what is measured; others choose for themselves."""

LAST_TOLERANCE = 1e-2
"""Largest relative difference between the last losses: steps make roundings grow."""

_OP = "nemotron_train_step"
_UNCHECKED = (
    'no speed: unchecked: "xla" has no losses of as many rounds and steps, neither in '
    "this call nor in the file"
)


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
      implementations: of `OPS`; the first and the last losses are compared with those
        of "xla".
      before: rows of earlier calls, whose "xla" is taken where this call has none.
      rounds: turns of each, behind one that warms up.
      steps: steps in a turn.

    Yields:
      One row an implementation, and `None` for its `ms` if its losses are others, or
      if there is nothing that they can be compared with.
    """
    experiment = load_experiment([str(file) for file in gin_files], list(bindings))
    workload = {
        "op": _OP,
        "workload": _workload(experiment),
        "dtype": experiment.model.decoder().dtype,
        "rounds": rounds,
        "steps": steps,
    }
    losses = _earlier(before, workload)
    checked = losses is not None or "xla" in implementations
    batches = device_batches(experiment, steps) if checked else []
    contenders: dict[str, Contender] = {}
    refused: dict[str, str] = {}
    for name in implementations if checked else ():
        model: Any = experiment.model
        model = dataclasses.replace(model, implementation=dict.fromkeys(OPS, name))
        one = dataclasses.replace(experiment, model=model)
        try:
            contenders[name] = ours(one, batches[0])[0]
        except NotImplementedError as error:
            refused[name] = f"no speed: not available: {error}"
    with timing.alone():
        for _ in range(rounds + 1):
            for contender in contenders.values():
                run_round(contender, batches)
    if "xla" in contenders:
        losses = contenders["xla"].losses
    for name in implementations:
        about = {**workload, "implementation": name}
        if losses is None or name in refused:
            yield {**about, "ms": None, "note": refused.get(name, _UNCHECKED)}
        else:
            yield about | _row(experiment, contenders[name], batches, losses)


def _earlier(
    before: Sequence[Mapping[str, Any]], workload: Mapping[str, Any]
) -> list[float] | None:
    """First and last loss of "xla" in a row of the same workload that has a speed."""
    same = {**workload, "implementation": "xla"}.items()
    for row in before:
        if same <= row.items() and row["ms"]:
            return [row["first_loss"], row["last_loss"]]
    return None


def _workload(experiment: Experiment) -> str:
    config = experiment.model.decoder()
    size = describe(config, experiment.data.seq_len).total.params
    return (
        f"{size / 1e9:.2f} B parameters, {experiment.data.batch_size} x "
        f"{experiment.data.seq_len} tokens"
    )


def _row(
    experiment: Experiment,
    contender: Contender,
    batches: list[Any],
    expected: Sequence[float],
) -> dict[str, Any]:
    config = experiment.model.decoder()
    about = describe(config, experiment.data.seq_len)
    tokens = float(np.mean([np.sum(np.asarray(b.segment_ids) > 0) for b in batches]))
    apart, at_last = (abs(contender.losses[i] / expected[i] - 1) for i in (0, -1))
    # Written so that NaN fails.
    agree = apart <= LOSS_TOLERANCE and at_last <= LAST_TOLERANCE
    speed: dict[str, Any] = dict.fromkeys(("ms", "tokens_per_s", "tflops", "mfu"))
    if agree:
        times = contender.step_ms[1:]
        ms = statistics.median(times)
        flops = about.training_flops * tokens / ms * 1e3
        peak = device_peak(jax.devices()[0].device_kind)
        speed = {
            "ms": digits(ms, 5),
            "tokens_per_s": digits(tokens / ms * 1e3),
            "tflops": digits(flops / 1e12),
            "mfu": digits(flops / peak.flops) if peak else None,
            "rounds_ms": [digits(value, 5) for value in times],
        }
    wrong = f"no speed: losses differ by {apart:.1e} at first, by {at_last:.1e} at last"
    return speed | {
        "tokens": round(tokens),
        "parameters": about.total.params,
        "active_parameters": about.trunk.active_params,
        "peak_gib": digits(contender.peak_bytes / 2**30),
        "compile_s": digits(contender.compile_seconds),
        "first_loss": digits(contender.losses[0], 6),
        "last_loss": digits(contender.losses[-1], 6),
        "apart": digits(apart),
        "apart_at_last": digits(at_last),
        "runs": contender.runs,
        "note": "" if agree else wrong,
    }
