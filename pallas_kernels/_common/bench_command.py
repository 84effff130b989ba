"""The benchmark command.

    python -m pallas_kernels.bench OP [--peers NAME,...] [--specs TAG] --json FILE
    python -m pallas_kernels.bench [OP] --render

`--render` rewrites the tables in the ops' README files from
`experiments/results/<op>_h200.json`.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import importlib
import json
import os
import pathlib
import time
from collections.abc import Callable, Mapping
from typing import Any

from pallas_kernels import _OPS
from pallas_kernels._common import bench, jobs, overlap, report, timing


# How long a process that shares the card compiles before it measures.
PREPARE_SECONDS = 60.0
PLACE = ("workload", "implementation", "peer", "cache")
"""What tells rows apart."""


def _cases(op: str, tags: str, only: str = "") -> list[bench.Case]:
    """The workloads of some tags whose names contain one of the texts of `only`."""
    specs = importlib.import_module(f"pallas_kernels.{op}.specs")
    cases = [case for tag in tags.split(",") for case in specs.bench_cases(tag)]
    return [c for c in cases if any(text in c.workload for text in only.split(","))]


@overlap.one_by_one()
def run(
    op: str,
    tag: str,
    peers: list[str],
    implementations: list[str] | None = None,
    commit: str | None = None,
    save: Callable[[dict[str, Any]], None] | None = None,
    share: tuple[int, int] = (0, 1),
    only: str = "",
) -> dict[str, Any]:
    """Measures an op.

    Args:
      op: its name.
      tag: of the specs to measure; several separated by commas.
      peers, implementations: as for `bench.measure_case`.
      commit: of the code; asked of git if not given.
      save: called with what there is after each workload, so that a run that is cut
        short leaves its rows.
      share: (i, n): every n-th workload, from i on.
      only: texts separated by commas; workloads have one of them in their names.

    Returns:
      `{"ceilings": {...}, "rows": [...]}`; a row whose result was wrong, or that could
      not run, has `"ms": None` and says why in `"note"`.
    """
    pending = _cases(op, tag, only)[share[0] :: share[1]]
    make = functools.partial(
        bench.prepare, peers=peers, implementations=implementations
    )
    about = bench.stamp(commit)
    limits: bench.Ceilings | None = None
    rows: list[dict[str, Any]] = []
    results: dict[str, Any] = {"ceilings": about, "rows": rows}
    # Peers tune on the card, so much of it comes before any measuring there.
    seconds = PREPARE_SECONDS if timing.takes_turns() else 0.0
    while pending:
        prepared, start = [], time.monotonic()
        while pending and (not prepared or time.monotonic() - start < seconds):
            prepared.append(make(pending.pop(0)))
        if limits is None:
            limits = bench.ceilings()
            results["ceilings"] = {**dataclasses.asdict(limits), **about}
        for workload in prepared:
            for row in bench.measure_prepared(workload, limits):
                rows.append({"op": op, **row, **about})
                print(_line(rows[-1]), flush=True)
            if save is not None:
                save(results)
    return results


def _line(row: Mapping[str, Any]) -> str:
    text = f"{row['workload']:48s} {row['implementation']:7s} {row['cache']:4s} "
    if row["ms"] is None:
        return text + row["note"]
    text += (
        f"{row['ms']:9.4f} ms {row['gbps']:7.1f} GB/s {row['share_of_ceiling']:5.2f}"
    )
    if row["ratio"]:
        text += f"  {row['peer']} {row['peer_ms']:9.4f} ms, x{row['ratio']:.2f}"
    return text + (f"  ({row['note']})" if row["note"] else "")


def main(argv: list[str] | None = None) -> int:
    """The command line; returns the exit status, 1 if a result was wrong."""
    parser = argparse.ArgumentParser(prog="python -m pallas_kernels.bench")
    parser.add_argument("op", nargs="?", choices=_OPS)
    parser.add_argument("--peers", default="xla", help="names, separated by commas")
    parser.add_argument("--specs", default="perf", help="ci, model, perf; with commas")
    parser.add_argument(
        "--implementations",
        help=f"default: those of {','.join(bench.IMPLEMENTATIONS)} that the op has",
    )
    parser.add_argument("--json", type=pathlib.Path, help="where the rows go")
    parser.add_argument("--commit", help="of the code, where git cannot say")
    parser.add_argument(
        "--jobs", type=int, default=1, help="processes that compile side by side"
    )
    parser.add_argument("--only", default="", help="parts of names of workloads")
    parser.add_argument("--share", default="0/1", help="I/N: every N-th workload")
    parser.add_argument(
        "--append",
        action="store_true",
        help="keep the file's rows that this call does not measure again; only one "
        "call at a time may write a file",
    )
    parser.add_argument("--render", action="store_true", help="rewrite README tables")
    options = parser.parse_args(argv)
    if options.render:
        report.render([options.op] if options.op else list(_OPS))
        return 0
    if options.op is None or options.json is None:
        parser.error("OP and --json FILE are needed to measure")
    names = options.implementations

    if not _cases(options.op, options.specs, options.only):
        parser.error(
            f"{options.op} has no workload of --specs {options.specs} whose name has "
            f"--only {options.only!r} in it"
        )
    kept: list[dict[str, Any]] = []
    if options.append and options.json.is_file():
        kept = json.loads(options.json.read_text())["rows"]

    def save(results: dict[str, Any]) -> None:
        results = {**results, "rows": report.joined(kept, results["rows"], PLACE)}
        # A reader never sees half a file.
        options.json.parent.mkdir(parents=True, exist_ok=True)
        part = options.json.with_suffix(".part")
        part.write_text(json.dumps(results, indent=1) + "\n")
        part.replace(options.json)

    if options.jobs > 1:
        arguments = [options.op, "--peers", options.peers, "--specs", options.specs]
        arguments += ["--only", options.only]
        if names is not None:
            arguments += ["--implementations", names]
        if options.commit:
            arguments += ["--commit", options.commit]
        # Naming the workloads may start a backend here, which must leave the card's
        # memory to the jobs.
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
        cases = _cases(options.op, options.specs, options.only)
        order = [case.workload for case in cases]
        results = jobs.run_in_jobs(options.op, order, arguments, options.jobs, save)
    else:
        first, step = options.share.split("/")
        results = run(
            options.op,
            options.specs,
            [name for name in options.peers.split(",") if name],
            None if names is None else names.split(","),
            options.commit,
            save,
            (int(first), int(step)),
            options.only,
        )
    save(results)
    wrong = [r for r in results["rows"] if "wrong result" in r["note"]]
    return 1 if wrong else 0
