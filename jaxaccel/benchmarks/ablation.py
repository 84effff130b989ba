"""`jaxaccel bench ablation`: trains configs that differ in one thing, over seeds."""

from __future__ import annotations

import argparse
import pathlib
import statistics
import tempfile
from typing import Any

from jaxaccel.benchmarks import results
from jaxaccel.benchmarks.curves import kept_curves
from jaxaccel.benchmarks.step import add_options
from jaxaccel.benchmarks.trained import throughput, train_once
from jaxaccel.config.gin_utils import load_experiment
from jaxaccel.models.describe import describe
from pallas_kernels._common.bench import digits, stamp


def measure(
    gin_file: str, bindings: list[str], seeds: list[int], corpus_dir: pathlib.Path
) -> dict[str, Any]:
    """Trains one config with each seed.

    Args:
      gin_file: the config.
      bindings: further gin bindings.
      seeds: of parameters and training; the data order is the config's own, so that
        all configs of an ablation read the same rows.
      corpus_dir: where the tokenised corpus is kept between runs.

    Returns:
      A row: held-out nats per byte by seed and their mean, parameters, tokens, speed,
      and "curves": figures of `curves.KEPT` by seed and logged step.
    """
    heldout, speeds, curves = [], [], []
    experiment = load_experiment([gin_file], bindings)
    for seed in seeds:
        outcome, rows = train_once(experiment, seed, corpus_dir)
        heldout.append(outcome.final_eval["nats_per_byte"])
        speeds.append(throughput(rows))
        curves.append(kept_curves(rows))
    config = experiment.model.decoder()
    about = describe(config, experiment.data.seq_len)
    batch = experiment.data.batch_size * experiment.data.seq_len
    return {
        "op": "ablation",
        "workload": pathlib.PurePath(gin_file).stem,
        "implementation": "jaxaccel",
        "dtype": config.dtype,
        "parameters": about.total.params,
        "steps": experiment.train.num_steps,
        "tokens": batch * experiment.train.num_steps,
        "seeds": seeds,
        "heldout_by_seed": [digits(value, 5) for value in heldout],
        "heldout": digits(statistics.mean(heldout), 5),
        "tokens_per_s": digits(statistics.mean(speeds)),
        "curves": {
            name: values if name == "step" else [own.get(name) for own in curves]
            for name, values in curves[0].items()
        },
    }


def main(argv: list[str]) -> int:
    """The command line; rows are written as each config ends."""
    parser = argparse.ArgumentParser(
        prog="jaxaccel bench ablation", description=__doc__
    )
    add_options(parser)
    parser.add_argument("--seeds", default="0,1", help="separated by commas")
    options = parser.parse_args(argv)
    seeds = [int(seed) for seed in options.seeds.split(",")]
    about, rows = stamp(options.commit), []
    with tempfile.TemporaryDirectory() as corpus_dir:
        for gin_file in options.gin_file:
            row = measure(
                gin_file, options.gin_bindings, seeds, pathlib.Path(corpus_dir)
            )
            rows.append({**row, **about})
            results.write(options.json, rows)
            print({k: v for k, v in rows[-1].items() if k != "curves"})
    return 0
