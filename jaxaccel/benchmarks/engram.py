"""`jaxaccel bench engram`: the memory's tables in training, in serving, in experiments.

    jaxaccel bench engram --only optimizer --json FILE
    jaxaccel bench engram --only inference --tiers none,device,zero_copy --json FILE
    jaxaccel bench engram --only experiment --gin_file experiments/engram/slots.gin \
        --json FILE

Rows of an earlier call stay in the file; those of the same name and run are replaced.
Options of a subject: `jaxaccel bench engram --only NAME --help`.
"""

from __future__ import annotations

import argparse
import importlib
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from jaxaccel.benchmarks import results
from pallas_kernels._common.bench import stamp


SUBJECTS = {
    "optimizer": "engram_optimizer",
    "inference": "engram_inference",
    "decode": "engram_decode",
    "experiment": "engram_experiments",
}
"""Subject -> its module, with `add_arguments`, `run` and `is_good`."""

RUN = ("workload", "steps", "batch", "seeds", "seed", "over_model")
"""What rows of one run have in common; an experiment's are compared within it alone."""

NAME = ("subject", "op", "implementation", "model", *RUN)
"""What tells rows apart."""


def of_one_run(rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Rows that may stand beside each other.

    Args:
      rows: of an experiment, of any runs.

    Returns:
      Those of the run with the most models; among equal ones of the longest training,
      then of the last.
    """
    runs: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for row in rows:
        runs.setdefault(tuple(row.get(key) for key in RUN), []).append(row)

    def size(run: list[Mapping[str, Any]]) -> tuple[int, int]:
        return len(run), run[0].get("steps") or 0

    return max(reversed(runs.values()), key=size, default=[])


def _subject(name: str) -> Any:
    return importlib.import_module(f"{__package__}.{SUBJECTS[name]}")


def main(argv: list[str]) -> int:
    """The command line; exit status 1 if a value was wrong or not finite."""
    first = argparse.ArgumentParser(add_help=False)
    first.add_argument("--only", choices=SUBJECTS)
    only = first.parse_known_args(argv)[0].only
    parser = argparse.ArgumentParser(
        prog="jaxaccel bench engram",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--only", choices=SUBJECTS, required=True, help="what is measured"
    )
    parser.add_argument("--commit", help="of the code, where git cannot say")
    parser.add_argument(
        "--json", type=pathlib.Path, required=True, help="where the rows go"
    )
    if only is None:
        parser.parse_args(argv)  # shows the help, or says what is missing
        return 2
    subject = _subject(only)
    subject.add_arguments(parser)
    options = parser.parse_args(argv)
    about, good = stamp(options.commit), True
    for rows in subject.run(options):
        rows = [{**row, **about} for row in rows]
        # After each part: a later one may fail.
        results.update(options.json, rows, NAME)
        good = good and all(map(subject.is_good, rows))
    return 0 if good else 1
