"""A benchmark in several processes: compiling is most of its time, measuring little."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

from pallas_kernels._common import report, timing


def run_in_jobs(
    op: str,
    order: Sequence[str],
    arguments: Sequence[str],
    jobs: int,
    save: Callable[[dict[str, Any]], None],
) -> dict[str, Any]:
    """`bench_command.run` by processes that compile side by side and measure in turn.

    Args:
      op: its name.
      order: names of the workloads.
      arguments: of this command, without `--jobs` and `--json`.
      jobs: how many processes.
      save: called with what there is, again and again.

    Returns:
      What `run` does, workloads in the same order; the ceilings are the first's.

    Raises:
      RuntimeError: a process ended without the rows of its workloads.
    """
    jobs = min(jobs, len(order))
    with tempfile.TemporaryDirectory() as folder:
        files = [pathlib.Path(folder, f"{i}.json") for i in range(jobs)]
        threads = max(1, (os.cpu_count() or 1) // jobs)
        flags = f"--xla_gpu_force_compilation_parallelism={threads}"
        environment = {
            timing.DEVICE_LOCK: str(pathlib.Path(folder, "lock")),
            # All of them keep arrays on the card at a time.
            "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
            **os.environ,
            "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {flags}",
        }
        command = [sys.executable, "-m", "pallas_kernels.bench", *arguments]
        children = [
            subprocess.Popen(
                [*command, "--share", f"{i}/{jobs}", "--json", str(files[i])],
                env=environment,
                cwd=report.ROOT,
            )
            for i in range(jobs)
        ]
        results: dict[str, Any] = {}
        running = True
        try:
            while running:
                running = any(child.poll() is None for child in children)
                parts = [json.loads(f.read_text()) for f in files if f.exists()]
                if parts:
                    rows = [row for part in parts for row in part["rows"]]
                    rows.sort(key=lambda row: order.index(row["workload"]))
                    results = {"ceilings": parts[0]["ceilings"], "rows": rows}
                    save(results)
                time.sleep(0.5 if running else 0.0)
        finally:
            for child in children:
                if child.poll() is None:
                    child.terminate()
    # An exit status of 1 may be a wrong result or an uncaught error.
    measured = {row["workload"] for row in results.get("rows", ())}
    if missing := [workload for workload in order if workload not in measured]:
        codes = [child.returncode for child in children]
        raise RuntimeError(
            f"bench {op}: processes ended with {codes} and left out {missing}"
        )
    return results
