"""The most layers, or tokens, whose gradients one device takes, by mode."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import gc
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax

from jaxaccel.benchmarks.offload_stack import (
    Contender,
    Stack,
    bytes_limit,
    contend,
    device_bytes,
    gradient_function,
    is_out_of_memory,
    split_mode,
)
from pallas_kernels._common.bench import digits


def largest(fits: Callable[[int], bool], first: int, step: int, most: int) -> int:
    """The largest multiple of a step that fits, 0 for none.

    Strides from `first` are one step, two, four: a good guess costs two trials.

    Args:
      fits: must be monotone.
      first: where to begin, rounded down to a multiple.
      step: the granularity.
      most: never tried beyond.

    Returns:
      The largest that fits, and of which the next one does not, or is beyond `most`.
    """
    end = most // step  # in steps, as all below
    low, high, stride = 0, end + 1, 1  # low fits, high does not
    probe = min(max(first // step, 1), end)
    while high - low > 1:
        if fits(probe * step):
            low = probe
        else:
            high = probe
        if low and high <= end:
            probe = (low + high) // 2
        else:
            probe = min(low + stride, end) if low else max(high - stride, 1)
            stride *= 2
    return low * step


def _needs(stack: Stack, name: str) -> int | None:
    """Bytes of device memory of a mode, as compiled; nothing runs.

    `None` if the backend does not say, or could not even compile it.
    """
    arguments = jax.eval_shape(stack.arguments)
    try:
        call = gradient_function(stack, name).lower(*arguments).compile()
    except jax.errors.JaxRuntimeError as error:
        if not is_out_of_memory(error):
            raise
        return None
    memory = call.memory_analysis()
    return None if memory is None else device_bytes(memory)


def guess(needs: Callable[[int], int | None], first: int, limit: int) -> int:
    """The size whose bytes reach a limit, if they grow as a straight line.

    Args:
      needs: size -> bytes, `None` if not known.
      first: a size; the line goes through it and its double.
      limit: bytes that there are.

    Returns:
      The size, `first` if nothing is known.
    """
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        one, two = pool.map(needs, (first, 2 * first))
    if one is None or two is None or two <= one:
        return first
    return max(first, int(first + (limit - one) * first / (two - one)))


def longest(
    stack: Stack, modes: Sequence[str], axis: str, *, step: int, most: int
) -> list[dict[str, Any]]:
    """The longest sequence, or the deepest stack, whose gradients one device takes.

    Compiled programs of two sizes tell where to begin. A candidate from there on is
    run, weights and gradients on the device, unless its program asks for more than
    there is.

    Args:
      stack: where the search begins.
      modes: see `benchmarks.offload`.
      axis: "tokens" or "layers".
      step: the granularity.
      most: the search ends there.

    Returns:
      One row a mode: the largest size, its memory, and the time of a second call.
    """

    def sized(size: int) -> Stack:
        if axis == "tokens":
            return dataclasses.replace(stack, tokens=size)
        return dataclasses.replace(stack, num_layers=size)

    rows, smallest = [], stack.tokens if axis == "tokens" else stack.num_layers
    limit = bytes_limit()
    for name in modes:
        split_mode(name)
        best: dict[int, Contender] = {}
        first = smallest
        if limit:
            first = guess(lambda n, name=name: _needs(sized(n), name), first, limit)

        def fits(size: int, name=name, best=best) -> bool:
            found = _try(sized(size), name)
            if found is not None:
                best[size] = found
            return found is not None

        size = largest(fits, first, step, most)
        contender = best.get(size, Contender(name=name))
        best.clear()  # programs of other sizes
        ms = _second_call_ms(sized(size), contender)
        rows.append(
            {
                "op": "offload_longest",
                "workload": f"most {axis}: {_without(axis, stack)}",
                "implementation": name,
                "dtype": stack.dtype,
                axis: size,
                "ms": digits(ms, 5) if ms else None,
                "tokens_per_s": digits(sized(size).tokens / ms * 1e3) if ms else None,
                "device_gib": digits(contender.device_bytes / 2**30, 5),
                "host_gib": digits(contender.host_bytes / 2**30, 5),
                "attention": stack.attention,
                "step": step,
                "note": f"the end of the search, {most}" if size == most else "",
            }
        )
    return rows


def _without(axis: str, stack: Stack) -> str:
    """The name of a stack but for what is looked for."""
    parts = stack.workload.split(", ")
    found = parts[-1] if axis == "tokens" else parts[0]
    return ", ".join(part for part in parts if part != found)


def _second_call_ms(stack: Stack, contender: Contender) -> float | None:
    """Of a mode that ran before: the first call loads it and takes host memory."""
    if contender.call is None:
        return None
    ws, x = jax.block_until_ready(stack.arguments())
    start = time.perf_counter()
    jax.block_until_ready(contender.call(ws, x))
    return 1e3 * (time.perf_counter() - start)


def _try(stack: Stack, name: str) -> Contender | None:
    """Compiles and calls a mode once; `None` where memory does not suffice."""
    try:
        contender, _ = contend(stack, name, *stack.arguments(), compare=False)
        return None if contender.call is None else contender
    except jax.errors.JaxRuntimeError as error:
        if not is_out_of_memory(error):
            raise
        return None
    finally:
        # The frames of an error hold what was on the device.
        gc.collect()
