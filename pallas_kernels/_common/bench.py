"""Benchmarks of ops: result first, then speed, peers and ceilings in one call.

An op takes part by a function `bench_cases(tag)` in its `specs.py` that yields one
`Case` per workload. `bench_command` has the command line.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import functools
import itertools
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp

from pallas_kernels._common import report, timing
from pallas_kernels._common.dispatch import UnknownImplementation
from pallas_kernels._common.testing import RELATIVE, assert_close
from pallas_kernels._common.testing import (
    assert_close_on_device as assert_close_on_device,
)


ROOT = report.ROOT
# Nobody times the reference, and tuning its products takes minutes.
_UNTUNED = {"xla_gpu_autotune_level": 0, "xla_gpu_enable_triton_gemm": False}

# What is measured if the command names none; an op without one of them skips it.
IMPLEMENTATIONS = ("mosaic", "xla")


@runtime_checkable
class TimedPeer(Protocol):
    """A peer that JAX cannot compile, such as a PyTorch one; it times itself.

    Attributes:
      note: what a reader must know of its times; "" if nothing.
    """

    note: str

    def results(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Runs it once.

        Args:
          args: the case's arguments, JAX arrays.

        Returns:
          JAX arrays: the reference's results, or as many of the first as are to be
          checked.
        """
        ...

    def measure(self, args: tuple[Any, ...]) -> list[timing.Timing]:
        """Times it, as `timing.measure` does for jitted functions."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One workload of an op.

    Attributes:
      workload: its name in the table; sizes and direction included.
      dtype: of the main input.
      arguments: random key -> the arguments of everything below.
      implementation: name -> the op as a function of the arguments.
      reference: what every result is compared with; called on float32 arguments.
      picked: what `implementation=None` would run, in words.
      bytes, flops: the least that must be moved and computed.
      peers: name -> () -> (function of the arguments or `TimedPeer`, version);
        ImportError if the peer is not installed.
      rel: largest relative Frobenius error; by dtype if not given.
    """

    workload: str
    dtype: str
    arguments: Callable[[jax.Array], tuple[Any, ...]]
    implementation: Callable[[str], Callable[..., Any]]
    reference: Callable[..., Any]
    picked: Callable[[], str]
    bytes: int
    flops: int
    peers: Mapping[str, Callable[[], tuple[Callable[..., Any] | TimedPeer, str]]]
    rel: float | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ceilings:
    """What this card did in this call, the speeds that floors are computed from.

    Attributes:
      gbps: a copy in device memory, bytes read and written, 1e9 bytes a second.
      tflops: bf16 8192^3 matrix product, 1e12 operations a second; 0 if not measured.
    """

    gbps: float
    tflops: float

    def floor_ms(self, case: Case) -> float:
        """The least time the case can take at these speeds."""
        compute = case.flops / (self.tflops * 1e9) if self.tflops else 0.0
        return max(case.bytes / (self.gbps * 1e6), compute)


def ceilings(size: int = 1024**3, matrix: int = 8192) -> Ceilings:
    """Measures the copy bandwidth and the bf16 matrix product of this device."""
    if jax.default_backend() != "gpu":
        size, matrix = 16 * 1024**2, 256
    source = jnp.zeros(size // 4, jnp.uint32)
    copy = jax.jit(lambda x: x ^ jnp.uint32(1))
    with timing.alone():
        copy_ms = timing.measure(copy, (source,))[0].ms
    del source
    # Not ones: a product of equal numbers draws less power and runs faster.
    square = jax.random.normal(jax.random.key(0), (matrix, matrix), jnp.bfloat16)
    product = jax.jit(lambda a, b: jnp.dot(a, b, precision=jax.lax.Precision.DEFAULT))
    with timing.alone():
        product_ms = timing.measure(product, (square, square))[0].ms
    return Ceilings(
        gbps=2 * size / copy_ms / 1e6, tflops=2 * matrix**3 / product_ms / 1e9
    )


# Larger results are compared on the device: NumPy takes minutes for some workloads.
_ON_DEVICE = 2**22


def _compare(got: jax.Array, want: jax.Array, rel: float | None, name: str) -> None:
    large = got.size > _ON_DEVICE and jnp.issubdtype(got.dtype, jnp.floating)
    if large and got.shape == want.shape:
        rel = RELATIVE[got.dtype.name] if rel is None else rel
        assert_close_on_device(got, want, rel=rel, name=name)
    else:
        assert_close(got, want, rel=rel, name=name)


def _exact(args: tuple[Any, ...]) -> tuple[Any, ...]:
    def widened(a):
        return a.astype(jnp.float32) if jnp.issubdtype(a.dtype, jnp.floating) else a

    return jax.tree.map(widened, args)


def _exact_types(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """What `_exact` gives, without its values but those that it leaves as they are.

    An array knows its memory, which may be the host's; a type says nothing of it.
    """
    return jax.tree.map(
        lambda exact, a: a if exact.dtype == a.dtype else exact,
        *(jax.eval_shape(_exact, args), args),
    )


def check(
    case: Case,
    got: Any,
    args: tuple[Any, ...],
    reference: Callable[..., Any],
    *,
    prefix: bool = False,
) -> str | None:
    """What is wrong with a result, `None` if it is the reference's.

    Args:
      case: the workload.
      got: the result.
      args: what it was computed from.
      reference: the case's, compiled.
      prefix: whether `got` may hold only the first of the reference's results.
    """
    want = jax.tree.leaves(reference(*_exact(args)))
    leaves = jax.tree.leaves(got)
    if prefix:
        want = want[: len(leaves)]
    try:
        for index, (a, b) in enumerate(zip(leaves, want, strict=True)):
            rel = case.rel
            if rel is None and a.dtype == jnp.float32 != jnp.dtype(case.dtype):
                rel = 1e-4  # f32 gradients of 16-bit inputs: other order of summation
            _compare(a, b, rel, f"result {index}")
    except AssertionError as error:
        return str(error)
    return None


def measure_case(
    case: Case,
    limits: Ceilings,
    peers: list[str],
    implementations: list[str] | None = None,
) -> Iterator[dict[str, Any]]:
    """Yields the rows of one workload: implementation x peer x cache state.

    Args:
      case: the workload.
      limits: what floors are computed from.
      peers: names of those to compare with.
      implementations: names of those to measure; `None` for those of
        `IMPLEMENTATIONS` that the op has.
    """
    return measure_prepared(prepare(case, peers, implementations), limits)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prepared:
    """A workload whose contenders are compiled.

    Attributes:
      case: the workload.
      picked: what `implementation=None` would run, in words.
      named: whether the caller asked for these implementations.
      ours, rivals: name -> contender, or the run that it will never make.
      reference: the compiled reference, `None` if nothing can run.
    """

    case: Case
    picked: str
    named: bool
    ours: Mapping[str, _Contender | _Run]
    rivals: Mapping[str, _Contender | _Run]
    reference: Callable[..., Any] | None


def prepare(
    case: Case, peers: list[str], implementations: list[str] | None = None
) -> Prepared:
    """Does everything of a workload that takes the host's time; as `measure_case`."""
    names = IMPLEMENTATIONS if implementations is None else implementations
    ours: dict[str, _Contender | _Run] = {}
    rivals: dict[str, _Contender | _Run] = {}
    reference, doing = None, "no arguments"
    # Compiling and peers' tuning are most of a run: say what takes the time.
    laps = [("", time.monotonic())]

    def done(name: str) -> None:
        laps.append((name, time.monotonic()))

    try:
        with timing.together():
            args = jax.block_until_ready(case.arguments(jax.random.key(0)))
        doing = "no reference"
        reference = (
            jax.jit(case.reference)
            .lower(*_exact_types(args))
            .compile(compiler_options=_UNTUNED)
        )
        done("reference")
    except RuntimeError as error:  # such as memory that does not suffice
        refused = _Run({}, "", f"{doing}: {_reason(error)}")
        ours = dict.fromkeys(names, refused)
    else:
        for name in names:
            ours[name] = _made(functools.partial(_ours, case, name), args)
            done(name)
        for name, make in case.peers.items():
            if name in peers and name not in ours:
                rivals[name] = _made(make, args, rival=True)
                done(name)
    steps = [f"{b[0]} {b[1] - a[1]:.0f} s" for a, b in itertools.pairwise(laps)]
    if steps:
        print(f"{case.workload}: ready after {', '.join(steps)}", flush=True)
    return Prepared(
        case=case,
        picked=case.picked(),
        named=implementations is not None,
        ours=ours,
        rivals=rivals | {name: ours[name] for name in ours if name in peers},
        reference=reference,
    )


def _compile(fn: Callable[..., Any], args: tuple[Any, ...]) -> Callable[..., Any]:
    """Compiles a contender, and keeps measurements waiting if that tries variants.

    XLA tunes products and calls of libraries on the card; a program of Mosaic kernels
    and loops alone is compiled on the host only.
    """
    lowered = jax.jit(fn).lower(*args)
    text = lowered.as_text()
    tuned = any(word in text for word in ("dot_general", "convolution", "cudnn"))
    with timing.together() if tuned else contextlib.nullcontext():
        return lowered.compile()


def measure_prepared(prepared: Prepared, limits: Ceilings) -> Iterator[dict[str, Any]]:
    """Yields the rows of a prepared workload; as `measure_case`."""
    case, runs = prepared.case, {}
    contenders = {**prepared.rivals, **prepared.ours}
    with timing.alone():
        try:
            args = case.arguments(jax.random.key(0)) if prepared.reference else ()
        except RuntimeError as error:  # others may have the memory by now
            refused = _Run({}, "", f"no arguments: {_reason(error)}")
            args, contenders = (), dict.fromkeys(contenders, refused)
        for name, contender in contenders.items():
            runs[name] = _time(prepared, contender, args)
    for name in prepared.ours:
        ours = runs[name]
        if ours.unknown and not prepared.named:
            continue
        against = {p: runs[p] for p in prepared.rivals if p != name and ours.times}
        against = against or {None: None}
        for peer, theirs in against.items():
            for cache in ours.times or {"warm": None}:
                yield _row(
                    case, limits, prepared.picked, name, ours, peer, theirs, cache
                )


@dataclasses.dataclass(frozen=True)
class _Run:
    times: Mapping[str, timing.Timing]
    version: str
    note: str
    unknown: bool = False  # the op has no such implementation


def _ours(case: Case, name: str) -> tuple[Callable[..., Any], str]:
    return case.implementation(name), jax.__version__


@dataclasses.dataclass(frozen=True)
class _Compiled:
    fn: Callable[..., Any]
    note: str = ""

    def results(self, args: tuple[Any, ...]) -> Any:
        return jax.block_until_ready(self.fn(*args))

    def measure(self, args: tuple[Any, ...]) -> list[timing.Timing]:
        return timing.measure(self.fn, args)


@dataclasses.dataclass(frozen=True)
class _Contender:
    timed: Any  # a `TimedPeer` or `_Compiled`
    version: str
    rival: bool

    @property
    def failures(self) -> type[Exception] | tuple[type[Exception], ...]:
        # Somebody else's code may fail in any way, and must not cost the other rows.
        # NotImplementedError and out of memory are RuntimeErrors.
        return Exception if self.rival else (ImportError, RuntimeError)


def _made(
    make: Callable[[], tuple[Callable[..., Any] | TimedPeer, str]],
    args: tuple[Any, ...],
    rival: bool = False,
) -> _Contender | _Run:
    failures = _Contender(None, "", rival).failures
    version = ""
    try:
        fn, version = make()
        if isinstance(fn, TimedPeer):
            timed: Any = fn
            with timing.together():
                timed.results(args)  # it compiles and tunes on first use
        else:
            timed = _Compiled(_compile(fn, args))
    except UnknownImplementation as error:
        return _Run({}, version, f"did not run: {error}", unknown=True)
    except failures as error:
        return _Run({}, version, f"did not run: {_reason(error)}")
    return _Contender(timed, version, rival)


def _time(
    prepared: Prepared, contender: _Contender | _Run, args: tuple[Any, ...]
) -> _Run:
    if isinstance(contender, _Run):
        return contender
    timed, version, reference = contender.timed, contender.version, prepared.reference
    assert reference is not None
    doing = "did not run"
    try:
        got = timed.results(args)
        doing = "could not be checked"
        prefix = not isinstance(timed, _Compiled)
        wrong = check(prepared.case, got, args, reference, prefix=prefix)
        if wrong is not None:
            return _Run({}, version, f"wrong result: {wrong}")
        del got  # its memory is wanted by the calls that are timed
        doing = "could not be timed"
        times = timed.measure(args)
    except contender.failures as error:
        return _Run({}, version, f"{doing}: {_reason(error)}")
    return _Run({t.cache: t for t in times}, version, timed.note)


def _reason(error: BaseException, length: int = 200) -> str:
    """The start of an error's message: XLA's may go on for pages."""
    lines = str(error).splitlines() or [type(error).__name__]
    return lines[0] if len(lines[0]) <= length else lines[0][: length - 3] + "..."


def _row(case, limits, picked, name, ours, peer, theirs, cache) -> dict[str, Any]:
    time = ours.times.get(cache)
    peer_time = None if theirs is None else theirs.times.get(cache)
    ms = None if time is None else time.ms
    peer_ms = None if peer_time is None else peer_time.ms
    floor = limits.floor_ms(case)
    notes = [ours.note, f"{peer} {theirs.note}" if theirs and theirs.note else ""]
    return {
        "workload": case.workload,
        "implementation": name,
        "dtype": case.dtype,
        "ms": _digits(ms),
        "tflops": _digits(case.flops / ms / 1e9 if ms and case.flops else None),
        "gbps": _digits(case.bytes / ms / 1e6 if ms else None),
        "floor_ms": _digits(floor),
        "share_of_ceiling": _digits(floor / ms if ms else None),
        "peer": peer,
        "peer_version": theirs.version if theirs else None,
        "peer_ms": _digits(peer_ms),
        "ratio": _digits(peer_ms / ms if ms and peer_ms else None),
        "timer": time.timer if time else None,
        "peer_timer": peer_time.timer if peer_time else None,
        "cache": cache,
        "picked": picked,
        "kernels": _kernels(time),
        "note": "; ".join(filter(None, notes)),
    }


def _kernels(time: timing.Timing | None) -> dict[str, float]:
    """Milliseconds by kernel; of one kernel they are those of the row."""
    found = {} if time is None else time.kernels
    return {n: digits(ms, 3) for n, ms in found.items()} if len(found) > 1 else {}


def digits(value: float, count: int = 4) -> float:
    """Rounds to significant digits."""
    return float(f"{value:.{count}g}")


def _digits(value: float | None) -> float | None:
    return None if value is None else digits(value)


def stamp(commit: str | None = None) -> dict[str, Any]:
    """Device, jax version, date and commit of a measurement made now.

    Args:
      commit: of the code, where git cannot say.
    """
    return {
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "commit": commit or _commit(),
    }


def _commit() -> str | None:
    try:
        answer = subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
        )
    except FileNotFoundError:
        return None
    return answer.stdout.strip() or None
