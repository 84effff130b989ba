"""Measures the tilings of `config.CANDIDATES` and writes the table of the best.

    python -m pallas_kernels.causal_conv1d.tune --json \
        pallas_kernels/tuned/nvidia_h200/causal_conv1d.json

A tiling whose result is not XLA's gets no time. Sizes are those of the "perf" specs.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import pathlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax

from pallas_kernels._common import bench, trial, tuning
from pallas_kernels.causal_conv1d import config, kernel, mosaic, specs, tables, xla


def _calls(
    spec: specs.Spec,
) -> dict[str, tuple[Callable[..., Any], Callable[..., Any]]]:
    """direction -> (kernel (tiling, *args), the same from XLA (*args))."""

    def parts(args):
        x, weight, bias, is_first, state, dy, _ = args
        bias = bias if spec.bias else None
        is_first = is_first if spec.documents else None
        table = None if is_first is None else tables.packed_reach(is_first)
        return x, weight, bias, is_first, state, table, dy

    def exact(*args):
        x, weight, bias, is_first, state, _, dy = parts(args)

        def op(x, weight, state, bias):
            return xla.causal_conv1d(
                x,
                weight,
                bias=bias,
                is_first=is_first,
                is_real=None,
                initial_state=state,
                activation="silu",
            )[0]

        y, pull = jax.vjp(op, x, weight, state, bias)
        return y, pull(dy)

    def fwd(tiling, *args):
        x, weight, bias, _, state, table, _ = parts(args)
        plan = mosaic.plan_of(tiling, True, x, weight, bias, table)
        return kernel.causal_conv1d_fwd(plan, x, weight, state, bias, table)

    def bwd(tiling, *args):
        x, weight, bias, _, state, table, dy = parts(args)
        plan = mosaic.plan_of(tiling, True, x, weight, bias, table)
        return kernel.causal_conv1d_bwd(plan, x, weight, state, bias, table, dy)

    return {
        "fwd": (fwd, lambda *args: exact(*args)[0]),
        "bwd": (bwd, lambda *args: exact(*args)[1]),
    }


def _tilings(spec: specs.Spec, direction: str) -> Iterator[config.Config]:
    """What applies to a call, the heuristic's tiling first."""
    shape = (spec.batch, spec.time, spec.dim)
    guess = config.heuristic(*shape, spec.dtype, direction)
    yield guess
    for tiling in config.CANDIDATES[direction]:
        divides = spec.dim % (tiling.channels * tiling.warpgroups) == 0
        if divides and tiling.time < 2 * spec.time and tiling != guess:
            yield tiling


def tune(
    spec: specs.Spec, directions: Sequence[str] = ("fwd", "bwd")
) -> dict[str, dict[str, Any]]:
    """The best tiling of one size.

    Args:
      spec: the size.
      directions: "fwd", "bwd" or both.

    Returns:
      Table key -> the tiling's fields and its time "ms".
    """
    args = jax.jit(spec.arguments)(jax.random.key(0))
    entries = {}
    for direction in directions:
        make, exact = _calls(spec)[direction]
        want = jax.jit(exact)(*args)
        print(
            f"{spec.name} {spec.batch}x{spec.time}x{spec.dim} {direction}", flush=True
        )
        times: dict[config.Config, float] = {}

        def add(tiling, make=make, want=want, times=times):
            fn = functools.partial(make, tiling)
            ms = trial.milliseconds(tiling, fn, args, want, whole=True)
            if ms is not None:
                times[tiling] = ms

        for tiling in _tilings(spec, direction):
            add(tiling)
        if not times:
            continue
        best = min(times, key=lambda tiling: times[tiling])
        if spec.documents:
            add(dataclasses.replace(best, branch=not best.branch))
            best = min(times, key=lambda tiling: times[tiling])
        key = config.table_key(spec.batch, spec.time, spec.dim, spec.dtype, direction)
        entries[key] = dataclasses.asdict(best) | {"ms": bench.digits(times[best])}
    return entries


def main(argv: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m pallas_kernels.causal_conv1d.tune")
    parser.add_argument("--json", type=pathlib.Path, required=True)
    parser.add_argument("--specs", default="perf", help="ci, model or perf")
    parser.add_argument("--names", help="of specs, separated by commas; default all")
    options = parser.parse_args(argv)
    about = bench.stamp()
    entries: dict[str, dict[str, Any]] = {}
    for spec in specs.specs(options.specs):
        size = (spec.batch, spec.time, spec.dim, spec.dtype)
        if options.names and spec.name not in options.names.split(","):
            continue
        if config.table_key(*size, "fwd") in entries:
            continue  # the same size with documents
        entries |= tune(spec)
        tuning.write(options.json, about, entries)


if __name__ == "__main__":
    main()
