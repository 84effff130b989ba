"""Device timers: how long the kernels of one call take, without the host's part."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import functools
import os
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp


# Overwritten between cold runs; several times any card's L2.
FLUSH_BYTES = 256 * 1024**2

# Name and milliseconds of a launch.
Kernel = tuple[str, float]

# Names a file that processes sharing a card take turns with.
DEVICE_LOCK = "PALLAS_KERNELS_DEVICE_LOCK"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Timing:
    """One measured time.

    Attributes:
      ms: median over the runs, milliseconds.
      timer: "cupti" (time on the device) or "host" (many launches in a row, divided).
      cache: "warm" (the same inputs again) or "cold" (L2 overwritten before).
      kernels: milliseconds of each kernel by name, launches of one name together; empty
        where the timer does not see kernels, or not in the same order in every run.
    """

    ms: float
    timer: str
    cache: str
    kernels: dict[str, float] = dataclasses.field(default_factory=dict)


def takes_turns() -> bool:
    """Whether other processes may be measuring on this card."""
    return bool(os.environ.get(DEVICE_LOCK))


@contextlib.contextmanager
def _locked(how: int) -> Iterator[None]:
    path = os.environ.get(DEVICE_LOCK)
    if not path:
        yield
        return
    with open(f"{path}.queue", "w") as queue, open(path, "w") as file:
        # One waits at a time, so that those who share do not overtake, one after the
        # other, the one who wants to be alone.
        fcntl.flock(queue, fcntl.LOCK_EX)
        fcntl.flock(file, how)  # released with the file
        fcntl.flock(queue, fcntl.LOCK_UN)
        yield


def alone() -> contextlib.AbstractContextManager[None]:
    """One process measures at a time, if `DEVICE_LOCK` names a file.

    Compiling takes far longer than measuring, so others go on compiling meanwhile, as
    long as that needs nothing of the card. Must not be nested.
    """
    return _locked(fcntl.LOCK_EX)


def together() -> contextlib.AbstractContextManager[None]:
    """Keeps `alone` waiting: for what uses the card but is not measured.

    Must not be nested either: behind one who waits to be alone it would wait forever.
    """
    return _locked(fcntl.LOCK_SH)


def measure(
    fn: Callable[..., Any], args: tuple[Any, ...], runs: int = 20, *, cold: bool = True
) -> list[Timing]:
    """Times a jitted function warm and, where the device timer works, L2-cold.

    Args:
      fn: a jitted or compiled function.
      args: what to call it with.
      runs: how many timed calls.
      cold: whether to time it L2-cold, too.
    """
    jax.block_until_ready(fn(*args))
    if jax.default_backend() == "gpu":
        with contextlib.suppress(TimerUnavailable):
            times = [_warm(fn, args, runs)]
            return [*times, _cold(fn, args, runs)] if cold else times
    return [_host(fn, args)]


class TimerUnavailable(RuntimeError):
    """The device timer gave nothing that can be told apart by run."""


def _warm(fn, args, runs) -> Timing:
    with _recorded() as kernels:
        for _ in range(runs):
            jax.block_until_ready(fn(*args))
    return _timing(_per_run(kernels, runs), "warm")


@functools.partial(jax.jit, donate_argnums=0)
def _flush(buffer: jax.Array) -> jax.Array:
    return buffer + jnp.uint32(1)


def _cold(fn, args, runs) -> Timing:
    buffer = _flush(jnp.zeros(FLUSH_BYTES // 4, jnp.uint32))
    jax.block_until_ready(buffer)
    with _recorded() as kernels:
        buffer = jax.block_until_ready(_flush(buffer))
    of_flush = len(kernels)
    with _recorded() as kernels:
        for _ in range(runs):
            buffer = jax.block_until_ready(_flush(buffer))
            jax.block_until_ready(fn(*args))
    return _timing([run[of_flush:] for run in _per_run(kernels, runs)], "cold")


def _timing(per_run: list[list[Kernel]], cache: str) -> Timing:
    """Medians over runs of the same launches."""
    total = statistics.median(sum(ms for _, ms in run) for run in per_run)
    kernels: dict[str, float] = {}
    for launches in zip(*per_run, strict=True):
        name = launches[0][0]
        if any(other != name for other, _ in launches):
            kernels = {}  # in another order nothing tells which is which
            break
        ms = statistics.median(ms for _, ms in launches)
        kernels[name] = kernels.get(name, 0.0) + ms
    return Timing(ms=total, timer="cupti", cache=cache, kernels=kernels)


@contextlib.contextmanager
def _recorded() -> Iterator[list[Kernel]]:
    """Fills the list with name and milliseconds of each kernel launched inside.

    `mosaic.gpu.profiler.measure` calls its function once more before it starts, which
    would warm the cache, so its two primitives are used here.
    """
    try:  # absent from a jaxlib without GPU plugin
        from jax._src.lib import mosaic_gpu
    except ImportError as error:
        raise TimerUnavailable(str(error)) from error
    extension = mosaic_gpu._mosaic_gpu_ext
    kernels: list[Kernel] = []
    try:
        extension._cupti_init()
    except RuntimeError as error:  # another profiler holds the one subscription
        raise TimerUnavailable(str(error)) from error
    try:
        yield kernels
    finally:
        kernels.extend(extension._cupti_get_timings(True))


def _per_run(kernels: list[Kernel], runs: int) -> list[list[Kernel]]:
    if not kernels or len(kernels) % runs:
        raise TimerUnavailable(f"{len(kernels)} kernels were seen in {runs} runs")
    each = len(kernels) // runs
    return [kernels[i : i + each] for i in range(0, len(kernels), each)]


def _host(fn, args, seconds: float = 0.1) -> Timing:
    launches, elapsed = 1, 0.0
    while elapsed < seconds:
        launches = launches if not elapsed else min(4096, launches * 4)
        start = time.perf_counter()
        results = [fn(*args) for _ in range(launches)]
        jax.block_until_ready(results)
        elapsed = time.perf_counter() - start
        if launches == 4096:
            break
    return Timing(ms=elapsed / launches * 1e3, timer="host", cache="warm")
