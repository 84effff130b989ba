"""Measures the tilings of `config.CANDIDATES` and writes the table of the best.

    python -m pallas_kernels.gated_delta_step.tune --json \
        pallas_kernels/tuned/nvidia_h200/gated_delta_step.json

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
import jax.numpy as jnp

from pallas_kernels._common import bench, timing, tuning
from pallas_kernels.gated_delta_step import api, config, kernel, specs


def tilings(spec: specs.Spec) -> Iterator[config.Config]:
    """What applies to a size, the heuristic's tiling first."""
    guess = config.heuristic(
        batch=spec.batch,
        key_heads=spec.key_heads,
        value_heads=spec.value_heads,
        dtype=spec.dtype,
        state_dtype=spec.state_dtype,
    )
    yield guess
    group = spec.value_heads // spec.key_heads
    for tiling in config.CANDIDATES:
        refused = tiling.refusal(group, spec.dtype, spec.state_dtype)
        if refused is None and tiling != guess:
            yield tiling


def size(spec: specs.Spec) -> str:
    """What `--only` looks in."""
    return f"B{spec.batch} {spec.state_dtype} state"


def step(spec: specs.Spec, tiling: config.Config) -> Callable[..., Any]:
    """The kernel with a tiling, as a function of the spec's arguments."""

    def op(qkv, a, b, z, layer, conv_pool, state_pool):
        slots = jnp.arange(spec.batch, dtype=jnp.int32)
        return kernel.gated_delta_step(
            tiling, qkv, a, b, z, layer, conv_pool, state_pool, slots, None
        )

    return specs.run(spec, op)


def measured(
    spec: specs.Spec, tiling: config.Config, args: Sequence[Any], want: Any
) -> float | None:
    """Milliseconds of one tiling, `None` if it cannot run or its result is wrong."""
    timed = specs.InPlace(step(spec, tiling))
    try:
        timed.compile(tuple(args))
        with timing.alone():
            got = timed.results(tuple(args))
            for index, (a, b) in enumerate(zip(got, want, strict=True)):
                # On the device, as the host takes longer for these than the tuning.
                name = f"result {index}"
                bench.assert_close_on_device(a, b, rel=1e-2, name=name, whole=True)
            del got
            ms = timed.measure(tuple(args))[0].ms
    except (AssertionError, RuntimeError, ValueError) as error:
        print(f"  {tiling}: {str(error).splitlines()[0]}", flush=True)
        return None
    print(f"  {ms:9.4f} ms  {tiling}", flush=True)
    return ms


def tune(spec: specs.Spec) -> dict[str, dict[str, Any]]:
    """The best tiling of one size: table key -> the tiling's fields and time "ms"."""
    args = spec.arguments(jax.random.key(0))
    op = functools.partial(api.gated_delta_step, implementation="xla")
    want = jax.jit(specs.run(spec, op))(*args)
    print(f"{spec.name} {size(spec)}", flush=True)
    times: dict[config.Config, float] = {}
    for tiling in tilings(spec):
        if (ms := measured(spec, tiling, args, want)) is not None:
            times[tiling] = ms
    if not times:
        return {}
    best = min(times, key=lambda tiling: times[tiling])
    key = config.table_key(
        batch=spec.batch,
        key_heads=spec.key_heads,
        value_heads=spec.value_heads,
        dtype=spec.dtype,
        state_dtype=spec.state_dtype,
    )
    return {key: dataclasses.asdict(best) | {"ms": bench.digits(times[best])}}


def main(argv: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m pallas_kernels.gated_delta_step.tune"
    )
    parser.add_argument("--json", type=pathlib.Path, required=True)
    parser.add_argument("--specs", default="perf", help="ci, model or perf")
    parser.add_argument(
        "--only", default="", help='part of a size such as "B256 bfloat16 state"'
    )
    options = parser.parse_args(argv)
    about = bench.stamp()
    entries: dict[str, dict[str, Any]] = {}
    for spec in specs.specs(options.specs):
        if options.only not in size(spec):
            continue
        entries |= tune(spec)
        tuning.write(options.json, about, entries)
    if not entries:
        parser.error(f"--only {options.only!r} leaves nothing to measure")


if __name__ == "__main__":
    main()
