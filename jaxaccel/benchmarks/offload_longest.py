"""The most layers, or tokens, whose gradients one device takes, by mode."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import gc
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax

from jaxaccel.benchmarks.offload_stack import (
    Contender,
    Stack,
    bytes_limit,
    compiled,
    is_out_of_memory,
    split_mode,
)
from pallas_kernels._common import timing
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


class Programs:
    """A mode's compiled programs by size, each compiled once.

    Args:
      sized: size -> the stack.
      name: the mode.
    """

    def __init__(self, sized: Callable[[int], Stack], name: str):
        self.sized, self.name = sized, name
        self._compiled: dict[int, Contender] = {}

    def __call__(self, size: int) -> Contender:
        if size not in self._compiled:
            self._compiled[size] = found = compiled(self.sized(size), self.name)
            needs = (
                f"{found.device_bytes / 2**30:.1f} GiB" if found.device_bytes else ""
            )
            print(f"{self.name} {size}: {needs} {found.note}", file=sys.stderr)
        return self._compiled[size]

    def forget(self) -> None:
        """Gives the programs' memory back."""
        self._compiled.clear()

    def largest(self, smallest: int, step: int, most: int) -> int:
        """The largest size that the device has room for, as compiled; nothing runs."""
        first, limit = smallest, bytes_limit()
        if limit:
            first = guess(lambda size: self(size).device_bytes or None, first, limit)
        return largest(lambda size: self(size).call is not None, first, step, most)


def longest(
    stack: Stack, modes: Sequence[str], axis: str, *, step: int, most: int
) -> Iterator[dict[str, Any]]:
    """The longest sequence, or the deepest stack, whose gradients one device takes.

    Compiled programs, of all modes side by side, tell what the device has room for;
    the largest is run, weights and gradients on the device, and if memory does not
    suffice after all, a smaller one.

    Args:
      stack: where the search begins.
      modes: see `benchmarks.offload`.
      axis: "tokens" or "layers".
      step: the granularity.
      most: the search ends there.

    Yields:
      One row a mode: the largest size, its memory, and the time of a second call.
    """

    def sized(size: int) -> Stack:
        if axis == "tokens":
            return dataclasses.replace(stack, tokens=size)
        return dataclasses.replace(stack, num_layers=size)

    for name in modes:
        split_mode(name)
    smallest = stack.tokens if axis == "tokens" else stack.num_layers
    programs = [Programs(sized, name) for name in modes]
    # It takes all memory: nothing can run beside it.
    with timing.alone():
        with concurrent.futures.ThreadPoolExecutor(len(modes)) as pool:
            sizes = pool.map(lambda of: of.largest(smallest, step, most), programs)
        for of, size in zip(programs, sizes, strict=True):
            compiled_size, ms, note = size, None, ""
            while size and (ms := second_call_ms(sized(size), of(size))) is None:
                size -= step
            if size < compiled_size:
                note = f"{compiled_size} fitted as compiled and ran out of memory"
            elif size == most:
                note = f"the end of the search, {most}"
            found = of(size) if size else Contender(name=of.name)
            of.forget()
            yield {
                "op": "offload_longest",
                "workload": f"most {axis}: {_without(axis, stack)}",
                "implementation": of.name,
                "dtype": stack.dtype,
                axis: size,
                "ms": digits(ms, 5) if ms else None,
                "tokens_per_s": digits(sized(size).tokens / ms * 1e3) if ms else None,
                "device_gib": digits(found.device_bytes / 2**30, 5),
                "host_gib": digits(found.host_bytes / 2**30, 5),
                "attention": stack.attention,
                "step": step,
                "note": note,
            }


def second_call_ms(stack: Stack, contender: Contender) -> float | None:
    """Time of the second of two calls: the first loads it and takes host memory.

    `None` where memory does not suffice.
    """
    if contender.call is None:
        return None
    try:
        ws, x = jax.block_until_ready(stack.arguments())
        jax.block_until_ready(contender.call(ws, x))
        start = time.perf_counter()
        jax.block_until_ready(contender.call(ws, x))
        return 1e3 * (time.perf_counter() - start)
    except jax.errors.JaxRuntimeError as error:
        if not is_out_of_memory(error):
            raise
        return None
    finally:
        # The frames of an error hold what was on the device.
        gc.collect()


def _without(axis: str, stack: Stack) -> str:
    """The name of a stack but for what is looked for."""
    parts = stack.workload.split(", ")
    found = parts[-1] if axis == "tokens" else parts[0]
    return ", ".join(part for part in parts if part != found)
