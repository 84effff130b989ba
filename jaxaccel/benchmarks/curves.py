"""`jaxaccel bench curves`: one training run by several implementations, step by step.

    jaxaccel bench curves --gin_file=experiments/gdn/h200.gin \
        --variant 'kernels=' \
        --variant 'xla=Qwen3NextConfig.implementation = "xla"' --json FILE

All variants read the same batches. The first one also runs with further seeds of its
parameters: how far these are apart is the noise that other variants are held against.
"""

from __future__ import annotations

import argparse
import dataclasses
import pathlib
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

from jaxaccel.benchmarks import results
from jaxaccel.benchmarks.guards import implementations_used
from jaxaccel.benchmarks.step import add_options
from jaxaccel.benchmarks.trained import throughput, train_once
from jaxaccel.config.gin_utils import load_experiment
from pallas_kernels._common.bench import digits, stamp
from pallas_kernels._common.dispatch import recorded_choices


# Figures of the "train" rows that are kept, where a run has them.
KEPT = (
    "nats_per_token",
    "grad_norm",
    "router_max_violation",
    "router_min_load",
    "router_dead_experts",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """A finished run.

    Attributes:
      variant: its name.
      seed: of its parameters.
      curves: figure of `KEPT` -> values by logged step; "step" has the steps.
      heldout: nats per byte at the end.
      tokens_per_s: median over the logged windows but the first.
      runs: op -> implementation that was traced.
    """

    variant: str
    seed: int
    curves: Mapping[str, Sequence[float]]
    heldout: float
    tokens_per_s: float
    runs: Mapping[str, str]


def parse_variant(text: str) -> tuple[str, list[str]]:
    """ "name=binding; binding" -> the name and the bindings, none if empty.

    Raises:
      ValueError: there is no name, or no "=" behind it.
    """
    name, equals, bindings = text.partition("=")
    if not equals or not name.strip():
        raise ValueError(f"--variant {text!r}, expected NAME=BINDING; BINDING ...")
    parts = (part.strip() for part in bindings.split(";"))
    return name.strip(), [part for part in parts if part]


def run_once(
    gin_files: Sequence[str],
    bindings: Sequence[str],
    variant: str,
    seed: int,
    corpus_dir: pathlib.Path,
) -> Run:
    """Trains once; the corpus is kept in `corpus_dir`.

    Raises:
      ValueError: a loss that was logged is not finite.
    """
    experiment = load_experiment(list(gin_files), list(bindings))
    with recorded_choices() as choices:
        outcome, rows = train_once(experiment, seed, corpus_dir)
    curves = kept_curves(rows)
    if "nats_per_token" not in curves:
        raise ValueError(f"{variant}: a loss that was logged is not finite")
    return Run(
        variant=variant,
        seed=seed,
        curves=curves,
        heldout=outcome.final_eval["nats_per_byte"],
        tokens_per_s=throughput(rows),
        runs=implementations_used(choices),
    )


def kept_curves(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[float]]:
    """The figures of `KEPT` that all "train" rows have, and their steps as "step"."""
    curves = {"step": [row["step"] for row in rows]}
    for name in KEPT:
        values = [row[name] for row in rows if row.get(name) is not None]
        if len(values) == len(rows):
            curves[name] = [digits(value, 5) for value in values]
    return curves


def distance(a: Run, b: Run) -> float:
    """Mean distance of two loss curves over the last half of their rows.

    Args:
      a, b: runs that logged the same steps.

    Returns:
      Mean of |difference| of "nats_per_token".

    Raises:
      ValueError: they logged other steps.
    """
    if a.curves["step"] != b.curves["step"]:
        raise ValueError(f"runs of {a.variant} and {b.variant} logged other steps")
    pairs = list(
        zip(a.curves["nats_per_token"], b.curves["nats_per_token"], strict=True)
    )
    return statistics.mean(abs(x - y) for x, y in pairs[len(pairs) // 2 :])


def summarise(runs: Sequence[Run], workload: str) -> list[dict[str, Any]]:
    """Rows of runs, each held against the first variant's.

    Args:
      runs: those of the first variant first, beginning with the seed that the others
        have.
      workload: name for the rows.

    Returns:
      A row per run. "apart" is the distance from the first run, "noise" the least
      distance between seeds of the first variant, `None` with one seed, and
      "within_noise" whether "apart" is no more than that; where it is not, there is
      no "tokens_per_s".

    Raises:
      ValueError: two variants ran the same program, so one is held against itself.
    """
    programs: dict[str, Mapping[str, str]] = {}
    for run in runs:
        for variant, program in programs.items():
            if variant != run.variant and program == run.runs:
                raise ValueError(
                    f"variants {variant!r} and {run.variant!r} ran the same "
                    f"implementations: {dict(program)}"
                )
        programs[run.variant] = run.runs
    first = runs[0]
    seeds = [run for run in runs if run.variant == first.variant]
    between = [distance(a, b) for i, a in enumerate(seeds) for b in seeds[i + 1 :]]
    noise = min(between) if between else None
    rows = []
    for run in runs:
        other = run.variant != first.variant
        apart = distance(first, run) if other else None
        agrees = None if apart is None or noise is None else apart <= noise
        rows.append(
            {
                "op": "curves",
                "workload": workload,
                "implementation": run.variant,
                "seed": run.seed,
                "steps": run.curves["step"][-1],
                "heldout": digits(run.heldout, 5),
                "tokens_per_s": None if agrees is False else digits(run.tokens_per_s),
                "apart": None if apart is None else digits(apart),
                "noise": None if noise is None else digits(noise),
                "within_noise": agrees,
                "runs": dict(run.runs),
                "curves": {name: list(x) for name, x in run.curves.items()},
            }
        )
    return rows


def main(argv: list[str]) -> int:
    """The command line; exit status 1 if a variant is farther apart than seeds are."""
    parser = argparse.ArgumentParser(prog="jaxaccel bench curves", description=__doc__)
    add_options(parser)
    parser.add_argument(
        "--variant",
        action="append",
        required=True,
        help="NAME=BINDING; BINDING ...: repeatedly, what the others are held "
        "against first",
    )
    parser.add_argument(
        "--seeds", default="0,1", help="of the first variant; the others run the first"
    )
    options = parser.parse_args(argv)
    variants = [parse_variant(text) for text in options.variant]
    seeds = [int(seed) for seed in options.seeds.split(",")]
    workload = pathlib.PurePath(options.gin_file[0]).with_suffix("").as_posix()
    about, runs, rows = stamp(options.commit), [], []
    with tempfile.TemporaryDirectory() as corpus_dir:
        for index, (name, bindings) in enumerate(variants):
            for seed in seeds if index == 0 else seeds[:1]:
                run = run_once(
                    options.gin_file,
                    [*options.gin_bindings, *bindings],
                    name,
                    seed,
                    pathlib.Path(corpus_dir),
                )
                runs.append(run)
                rows = [{**row, **about} for row in summarise(runs, workload)]
                results.write(options.json, rows)
                shown = {k: v for k, v in rows[-1].items() if k not in about}
                print({k: v for k, v in shown.items() if k not in ("curves", "runs")})
    return 1 if any(row["within_noise"] is False for row in rows) else 0
