"""Measures launch parameters of the kernels and writes the table of the best.

    python -m pallas_kernels.attention.tune --names gqa_8,qwen3_next,gpt_oss_window \
        --json pallas_kernels/tuned/nvidia_h200/attention.json

Each kernel is measured alone: forward, dq, and dk with dv; "bwd" is the whole backward,
by which the ways to do it are compared. Parameters whose result is
not the one of the heuristic's get no time, and the heuristic's result is compared with
XLA's by the benchmark and the tests. The table has one entry per head dim; of several
specs with one head dim, the last one counts. Each line says operations a second on all
pairs of the tiles that are visited, which is what the kernels compute.
"""

from __future__ import annotations

import argparse
import dataclasses
import pathlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from pallas_kernels._common import bench, timing, tuning
from pallas_kernels.attention import config_mosaic, mosaic, specs
from pallas_kernels.attention.config_mosaic import Config


KERNELS = ("fwd", "dq", "dkv", "bwd")
STORED: tuple[dict[str, Any], ...] = (
    {"backward": "stored"},
    {"backward": "stored", "scores_heads": 1},
    {"backward": "stored", "scores_stages": 3},
)
# What is tried of each kernel, by head dim; fields that are left out keep the first
# guess's value. Which fits neither registers nor shared memory is reported.
CANDIDATES: dict[str, dict[int, tuple[dict[str, Any], ...]]] = {
    "fwd": {
        64: (
            {},
            {"ping_pong": False},
            {"persistent": False},
            {"step_kv": 64, "slots": 8},
        ),
        128: (
            {},
            {"ping_pong": False},
            {"persistent": False},
            {"slots": 4},
            {"step_kv": 64, "slots": 8},
        ),
        256: (
            {},
            {"ping_pong": False},
            {"slots": 3},
            {"persistent": True, "slots": 3},
        ),
    },
    "dq": {
        64: ({}, {"dq_step_kv": 64, "dq_slots": 8}),
        128: ({}, {"dq_step_kv": 64}, {"dq_step_kv": 64, "dq_slots": 8}),
        256: ({}, {"dq_slots": 2}),
    },
    "dkv": {
        64: ({}, {"dkv_step_q": 128, "dkv_stages": 4}, {"dkv_stages": 3}),
        128: ({}, {"dkv_stages": 3}, {"dkv_stages": 2}, {"block_kv": 64}),
        256: ({}, {"dkv_stages": 1}),
    },
    "bwd": {
        64: ({}, *STORED, STORED[0] | {"scores_heads": 4, "scores_stages": 2}),
        128: ({}, *STORED, STORED[0] | {"scores_slots": 2, "dkv_stages": 3}),
        256: ({}, STORED[0]),
    },
}
# Of the whole backward those that are needed: all ways have one scale then.
PRODUCTS = {"fwd": 2, "dq": 3, "dkv": 4, "bwd": 5}


# Of the forward kernel alone: a whole backward leaves them as they were found.
FORWARD = ("step_kv", "slots", "ping_pong", "persistent")


def first_guess(head_dim: int) -> Config:
    """The heuristic's parameters with a backward of kernels that run on their own."""
    guess = config_mosaic.heuristic(head_dim=head_dim)
    return dataclasses.replace(guess, backward="recomputed")


def _configs(kernel: str, head_dim: int, best: Config) -> Iterator[Config]:
    """Candidates; of the whole backward, what was found before is the first."""
    guess = first_guess(head_dim)
    for change in CANDIDATES[kernel][head_dim]:
        if kernel == "bwd" and not change:
            yield best
        else:
            yield dataclasses.replace(guess, **change)


def _adopt(kernel: str, best: Config, winner: Config, guess: Config) -> Config:
    """What was found before with what a kernel's winner changed of the guess."""
    if kernel == "bwd":
        # Its parameters were measured together.
        return dataclasses.replace(winner, **{x: getattr(best, x) for x in FORWARD})
    fields = (field.name for field in dataclasses.fields(Config))
    changed = {x: getattr(winner, x) for x in fields}
    changed = {x: y for x, y in changed.items() if y != getattr(guess, x)}
    return dataclasses.replace(best, **changed)


def _call(spec: specs.Spec, kernel: str, config: Config) -> Callable[..., Any]:
    """The kernel as a function of q, k, v, o, lse and do.

    o and lse are the forward kernel's, whose blocks of queries `config` must have; all
    results are padded.

    Raises:
      ValueError: the parameters do not fit.
    """
    blocks = {"block_q": config.block_q, "block_kv": config.block_kv}
    bounds = specs.bounds_of(spec, blocks)

    def run(q, k, v, o, lse, do):
        plan = mosaic.plan_of(
            *(q, k),
            scale=spec.dim**-0.5,
            logit_cap=spec.logit_cap,
            bounds=bounds,
            config=config,
        )
        q, k, v = (
            mosaic.pad_queries(plan, q),
            mosaic.pad_keys(plan, k),
            mosaic.pad_keys(plan, v),
        )
        if kernel == "fwd":
            return mosaic.attention_fwd(
                plan, mosaic.forward_inputs(q, k, v, None, bounds)
            )
        do = mosaic.pad_queries(plan, do)
        inputs = mosaic.backward_inputs(q, k, v, o, lse, do, None, bounds)
        if kernel == "bwd":
            return mosaic.gradients(plan, inputs, bounds)
        if kernel == "dq":
            return mosaic.attention_dq(plan, inputs | mosaic.by_query(bounds))
        return mosaic.attention_dkv(plan, inputs | mosaic.by_key(bounds))

    return run


def _visited_flops(spec: specs.Spec, kernel: str, config: Config) -> float:
    """Operations of the tiles that a kernel multiplies."""
    blocks = {"block_q": config.block_q, "block_kv": config.block_kv}
    bounds = specs.bounds_of(spec, blocks)
    table, block, step = {
        "fwd": (bounds.q_tiles, config.block_q, config.step_kv),
        "dq": (bounds.q_tiles, config.block_q, config.dq_step_kv),
        "dkv": (bounds.kv_tiles, config.block_kv, config.dkv_step_q),
        "bwd": (bounds.kv_tiles, config.block_kv, config.dkv_step_q),
    }[kernel]
    table, per = np.asarray(table), step // 64
    steps = int(np.sum(-(-table[..., 1] // per) - table[..., 0] // per))
    # One more where two warpgroups compute the weights of the same keys.
    products = PRODUCTS[kernel] + (kernel == "dkv" and config.block_kv == 64)
    return 2.0 * products * steps * step * block * spec.dim * spec.heads


def _measured(
    spec: specs.Spec, kernel: str, config: Config, args: tuple[Any, ...], want: Any
) -> tuple[float | None, Any]:
    """Milliseconds, `None` if it cannot run or is wrong; and its result."""
    try:
        fn = jax.jit(_call(spec, kernel, config)).lower(*args).compile()
        with timing.alone():
            got = fn(*args)
            for index, (a, b) in enumerate(
                zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=False)
            ):
                name = f"result {index}"
                bench.assert_close_on_device(a, b, rel=1e-2, name=name, whole=True)
            ms = timing.measure(fn, args, cold=False)[0].ms
    except (AssertionError, RuntimeError, ValueError) as error:
        print(f"  {config}: {str(error).splitlines()[0]}", flush=True)
        return None, None
    tflops = _visited_flops(spec, kernel, config) / ms / 1e9
    print(f"  {ms:9.4f} ms {tflops:6.1f} TFLOP/s  {config}", flush=True)
    return ms, got


def tune(spec: specs.Spec, kernels: Sequence[str] = KERNELS) -> dict[str, Any]:
    """The best parameters of one size, of all kernels together.

    Args:
      spec: the size; its sinks are left out.
      kernels: those to measure; the others keep the heuristic's parameters.

    Returns:
      The fields of the `Config`, and the time of each kernel as "<kernel>_ms".
    """
    q, k, v, _, _, do = jax.jit(spec.arguments)(jax.random.key(0))
    guess = first_guess(spec.dim)
    o, lse = jax.jit(_call(spec, "fwd", guess))(q, k, v, None, None, None)
    args = (q, k, v, o, lse, do)
    best, times = guess, {}
    for kernel in kernels:
        print(f"{spec.name} {kernel}", flush=True)
        want = None
        found: dict[Config, float] = {}
        for config in _configs(kernel, spec.dim, best):
            ms, got = _measured(spec, kernel, config, args, want)
            if ms is not None:
                want = got if want is None else want
                found[config] = ms
        if not found:
            continue
        winner = min(found, key=lambda config: found[config])
        best = _adopt(kernel, best, winner, guess)
        times[f"{kernel}_ms"] = bench.digits(found[winner])
    return dataclasses.asdict(best) | times


def main(argv: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m pallas_kernels.attention.tune")
    parser.add_argument("--json", type=pathlib.Path, required=True)
    parser.add_argument("--specs", default="perf", help="model or perf")
    parser.add_argument("--names", help="of specs, separated by commas; default all")
    parser.add_argument("--kernels", default=",".join(KERNELS))
    options = parser.parse_args(argv)
    about = bench.stamp()
    entries: dict[str, dict[str, Any]] = {}
    for spec in specs.specs(options.specs):
        if options.names and spec.name not in options.names.split(","):
            continue
        key = config_mosaic.table_key(spec.dim)
        entries[key] = tune(spec, options.kernels.split(","))
        tuning.write(options.json, about, entries)


if __name__ == "__main__":
    main()
