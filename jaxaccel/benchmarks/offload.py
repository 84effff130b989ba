"""`jaxaccel bench offload`: a stack's gradients, with layer inputs in each memory.

    jaxaccel bench offload --tokens 8192,16384,32768 --json FILE
    jaxaccel bench offload --longest tokens --json FILE
    jaxaccel bench offload --longest layers --tokens 32768 --json FILE

All modes run in one process, in turns, from the same weights. A mode is one of
`core.offload.MODES`; "MODE+graphs" compiles it with XLA's own flags, whose command
buffers (CUDA graphs) put copies in line with kernels, and "MODE+double" with
double-buffered loops. No speed is written for a mode whose gradients are not remat's.
Rows of an earlier call stay in the file unless this one measures them again.
"""

from __future__ import annotations

import argparse
import dataclasses
import pathlib
import statistics
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxaccel.benchmarks import results
from jaxaccel.benchmarks.offload_longest import longest
from jaxaccel.benchmarks.offload_stack import (
    Contender,
    Stack,
    apart,
    compiled_together,
    first_call,
    is_out_of_memory,
    split_mode,
)
from pallas_kernels._common import timing
from pallas_kernels._common.bench import digits, stamp


GRADIENT_TOLERANCE = 1e-2
"""Largest relative difference of a layer's gradient from remat's, in bf16."""

DEFAULT_MODES = (
    *("remat", "policy", "ring", "save"),
    *("remat+graphs", "policy+graphs", "ring+graphs"),
)


def measure(
    stack: Stack,
    modes: Sequence[str],
    *,
    rounds: int,
    link: dict[str, Any] | None = None,
) -> list[dict[str, Any]]:
    """Measures modes in turns; one row each.

    Args:
      stack: the layers.
      modes: see the module; "remat", which all are compared with, comes first.
      rounds: turns of each mode; the first warms up and is not counted.
      link: figures of the bus for the rows, see `link_speed`.

    Raises:
      ValueError: a mode is unknown, or the first one is not "remat".
    """
    if not modes or modes[0] != "remat":
        raise ValueError(f"bench offload: modes {list(modes)} must begin with 'remat'")
    for name in modes:
        split_mode(name)
    ws, x = stack.arguments()
    contenders, expected, first = [], None, ""
    with timing.together():
        compiled = compiled_together(stack, modes)
    for contender in compiled:
        name = contender.name
        with timing.together():
            prints = first_call(contender, ws, x)
        if expected is None and prints is not None:
            expected, first = prints, name
        if prints is not None and expected is not None:
            contender.apart = apart(prints, expected)
            if first != "remat":
                contender.note = f"remat did not fit: gradients compared with {first}"
        contenders.append(contender)
    with timing.alone():
        for _ in range(rounds):
            for contender in contenders:
                _run_round(contender, ws, x)
    return [_row(stack, c, contenders[0], link or {}) for c in contenders]


def _run_round(contender: Contender, ws: Any, x: jax.Array) -> None:
    """Times one call; a mode that runs out of memory is out."""
    if contender.call is None:
        return
    try:
        start = time.perf_counter()
        # The gradients, as large as the weights, are gone before the next mode's turn.
        jax.block_until_ready(contender.call(ws, x))
        contender.rounds_ms.append(1e3 * (time.perf_counter() - start))
    except jax.errors.JaxRuntimeError as error:
        if not is_out_of_memory(error):
            raise
        contender.call, contender.note = None, "out of memory after the first call"


def _row(
    stack: Stack, contender: Contender, remat: Contender, link: dict[str, Any]
) -> dict[str, Any]:
    difference, timed = contender.apart, contender.rounds_ms[1:]
    agrees = difference is not None and difference <= GRADIENT_TOLERANCE
    note = contender.note
    if difference is not None and not agrees:
        note = f"gradients differ by {difference:.1e}: no speed"
    ms = statistics.median(timed) if timed and agrees else None
    pairs = zip(timed, remat.rounds_ms[1:], strict=False)
    ratios = [a / b for a, b in pairs] if ms else []
    mode, _ = split_mode(contender.name)
    planned = stack.sizes.host_bytes(mode, stack.group if mode == "group" else 1)
    return {
        "op": "offload",
        "workload": stack.workload,
        "implementation": contender.name,
        "dtype": stack.dtype,
        "ms": digits(ms, 5) if ms else None,
        "tokens_per_s": digits(stack.tokens / ms * 1e3) if ms else None,
        "tflops": digits(stack.flops / ms / 1e9) if ms else None,
        "ratio": digits(statistics.median(ratios), 5) if ratios else None,
        "rounds_ms": [digits(t, 5) for t in timed],
        "device_gib": digits(contender.device_bytes / 2**30, 5),
        "host_gib": digits(contender.host_bytes / 2**30, 5),
        "planned_host_gib": digits(planned / 2**30, 5),
        "gradients_apart": None if difference is None else digits(difference, 2),
        "attention": stack.attention,
        "compile_s": digits(contender.compile_seconds),
        "note": note,
        **link,
    }


def link_speed(num_bytes: int, repeats: int = 5) -> dict[str, float]:
    """Copies between pinned host memory and the device within a jit, in GB/s."""
    device = jax.local_devices()[0]
    on_device = jnp.zeros((num_bytes // 2,), jnp.bfloat16)

    def sharding(kind: str):
        return jax.sharding.SingleDeviceSharding(device, memory_kind=kind)

    def seconds(source: jax.Array, space: jax.memory.Space, kind: str) -> float:
        copy = jax.jit(lambda a: jax.device_put(a, space), out_shardings=sharding(kind))
        jax.block_until_ready(copy(source))
        times = []
        for _ in range(repeats):
            start = time.perf_counter()
            jax.block_until_ready(copy(source))
            times.append(time.perf_counter() - start)
        return min(times)

    on_host = jax.device_put(on_device, sharding("pinned_host"))
    to_host = seconds(on_device, jax.memory.Space.Host, "pinned_host")
    to_device = seconds(on_host, jax.memory.Space.Device, "device")
    return {
        "to_host_gbps": digits(num_bytes / to_host / 1e9),
        "to_device_gbps": digits(num_bytes / to_device / 1e9),
    }


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="jaxaccel bench offload",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    defaults = Stack()
    parser.add_argument(
        "--tokens", default=str(defaults.tokens), help="separated by commas"
    )
    for name in ("num_layers", "d_model", "d_ff", "num_heads", "num_kv_heads"):
        parser.add_argument(f"--{name}", type=int, default=getattr(defaults, name))
    parser.add_argument("--head_dim", type=int, default=defaults.head_dim)
    parser.add_argument("--dtype", default=defaults.dtype)
    parser.add_argument("--group", type=int, default=defaults.group)
    parser.add_argument(
        "--attention",
        # cuDNN's gradients differ from call to call, by more than a mode may change.
        default="mosaic" if jax.default_backend() == "gpu" else "xla",
        help='"cudnn", or an implementation of pallas_kernels.attention',
    )
    parser.add_argument("--modes", help="separated by commas, remat first")
    parser.add_argument("--rounds", type=int, default=8, help="one to warm up")
    parser.add_argument(
        "--longest", choices=("tokens", "layers"), help="search for the most of these"
    )
    parser.add_argument("--step", type=int, help="granularity of the search")
    parser.add_argument("--most", type=int, help="where the search ends")
    parser.add_argument("--commit", help="of the code, where git cannot say")
    parser.add_argument(
        "--json", type=pathlib.Path, required=True, help="where the rows go"
    )
    return parser


def main(argv: list[str]) -> int:
    """The command line; exit status 1 if a mode's gradients are not remat's."""
    options = _parser().parse_args(argv)
    fields = [
        field.name for field in dataclasses.fields(Stack) if field.name != "tokens"
    ]
    chosen = {name: getattr(options, name) for name in fields}
    stacks = [Stack(tokens=int(t), **chosen) for t in options.tokens.split(",")]
    about, rows = stamp(options.commit), []
    on_gpu = jax.default_backend() == "gpu"
    with timing.alone():
        link = link_speed(2**29) if on_gpu else {}
    for stack in stacks:
        if options.longest:
            is_tokens = options.longest == "tokens"
            modes = (options.modes or "save,remat,ring").split(",")
            found = longest(
                stack,
                modes,
                options.longest,
                step=options.step or (4096 if is_tokens else 4),
                most=options.most or (2**19 if is_tokens else 256),
            )
        else:
            modes = (options.modes or ",".join(DEFAULT_MODES)).split(",")
            found = measure(stack, modes, rounds=options.rounds, link=link)
        for row in found:
            print(row, flush=True)
            rows.append({**row, **about})
            # After each one: what comes later may not fit.
            results.update(options.json, rows, (*results.PLACE, "dtype", "attention"))
    return 1 if any("differ" in row["note"] for row in rows) else 0
