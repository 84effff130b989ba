"""A training run inside a benchmark, in a folder that goes with it."""

from __future__ import annotations

import dataclasses
import pathlib
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

from jaxaccel.config.registry import Experiment
from jaxaccel.training.loop import TrainResult, train
from jaxaccel.training.metrics import read_metrics


def train_once(
    experiment: Experiment, seed: int, corpus_dir: pathlib.Path
) -> tuple[TrainResult, list[dict[str, Any]]]:
    """Trains with a seed of parameters; the order of the data is the config's own.

    Args:
      experiment: model, data and training config.
      seed: of parameters and training.
      corpus_dir: where the tokenised corpus is kept between runs.

    Returns:
      How the run ended, and its "train" rows of metrics.
    """
    config = dataclasses.replace(experiment.train, seed=seed)
    with tempfile.TemporaryDirectory() as folder:
        workdir = pathlib.Path(folder) / "run"
        outcome = train(
            config, experiment.model, experiment.data, workdir, corpus_dir=corpus_dir
        )
        rows = [row for row in read_metrics(workdir) if row["kind"] == "train"]
    return outcome, rows


def throughput(rows: Sequence[Mapping[str, Any]]) -> float:
    """Median tokens a second over "train" rows, the first one left out."""
    speeds = [row["tokens_per_second"] for row in rows]
    return statistics.median(speeds[1:] or speeds)
