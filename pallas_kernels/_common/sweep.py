"""The command that measures an op's tilings and writes the table of the best.

An op says what it can try, as `Sweep`s of one of its specs; `main` runs them, prints a
line for each tiling, and keeps the best of each where `tuning.lookup` finds it.
"""

from __future__ import annotations

import argparse
import dataclasses
import pathlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax

from pallas_kernels._common import bench, trial, tuning


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sweep:
    """The tilings of one kernel at one size.

    Attributes:
      key: of the table.
      tilings: frozen dataclasses, what to try.
      make: tiling -> the kernel as a function of the spec's arguments.
      exact: the right results, a function of the same arguments.
    """

    key: str
    tilings: Iterable[Any]
    make: Callable[[Any], Callable[..., Any]]
    exact: Callable[..., Any]


def best(sweep: Sweep, args: tuple[Any, ...]) -> dict[str, Any] | None:
    """The fields of the fastest tiling with its time "ms"; `None` if none is right."""
    want = jax.tree.leaves(jax.jit(sweep.exact)(*args))
    times = {}
    for tiling in sweep.tilings:
        ms = trial.milliseconds(tiling, sweep.make(tiling), args, want, whole=True)
        if ms is not None:
            times[tiling] = ms
    if not times:
        return None
    found = min(times, key=lambda tiling: times[tiling])
    return dataclasses.asdict(found) | {"ms": bench.digits(times[found])}


def main(
    op: str,
    specs: Callable[[str], Iterable[Any]],
    sweeps: Callable[[Any], Iterable[Sweep]],
    argv: Sequence[str] | None = None,
) -> None:
    """The command line of `python -m pallas_kernels.<op>.tune`.

    Args:
      op: the op's name.
      specs: tag -> specs, each with a `name` and `arguments(key)`.
      sweeps: spec -> what to try for it; a key that was measured is not measured again.
      argv: arguments; those of the process by default.
    """
    parser = argparse.ArgumentParser(prog=f"python -m pallas_kernels.{op}.tune")
    parser.add_argument("--json", type=pathlib.Path, required=True)
    parser.add_argument("--specs", default="perf", help="ci, model or perf")
    parser.add_argument("--names", help="of specs, separated by commas; default all")
    options = parser.parse_args(argv)
    names = options.names.split(",") if options.names else None
    about = bench.stamp()
    entries: dict[str, dict[str, Any]] = {}
    for spec in specs(options.specs):
        left = [sweep for sweep in sweeps(spec) if sweep.key not in entries]
        if not left or (names is not None and spec.name not in names):
            continue
        args = spec.arguments(jax.random.key(0))
        for sweep in left:
            print(f"{spec.name} {sweep.key}", flush=True)
            if (found := best(sweep, args)) is not None:
                entries[sweep.key] = found
                tuning.write(options.json, about, entries)
    if not entries:
        parser.error(
            f"nothing was measured: no spec of {options.specs!r} is called "
            f"{options.names!r}, or no tiling was right"
        )
