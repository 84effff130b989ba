"""What a training step spends on a table's rows, for tables of several sizes.

The same text looks rows up in each table: ranks drawn from Zipf's law, spread over the
rows by a hash. A step finds the rows that are different, gathers them, sums their
gradients, updates them and their moments, and writes them back; nothing of it should
grow with the table. The dense rival makes a gradient as large as the table and updates
every row.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxaccel.core.sparse_rows import gather_rows, plan_rows
from jaxaccel.training.sparse_table import (
    TableOptimConfig,
    TableOptimState,
    init_table_state,
    update_table,
)
from pallas_kernels._common.bench import digits
from pallas_kernels.engram_gather import engram_gather


GOAL = 1.3
"""Largest ratio of the times of the largest and the smallest table."""

KINDS = ("adam", "rowwise_adam")
"""Optimizers whose first step `wrong` knows."""

_RATE = 1e-3


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerBench:
    """What is measured.

    Attributes:
      sizes: rows N of the tables, ascending.
      lookups: M, of a step.
      width: d of a row, f32.
      exponent: of Zipf's law.
      kind: of `TableOptimConfig`, one of `KINDS`.
      dense_rows: tables of at most so many rows are trained densely too.
      rounds: timed calls in a row are repeated so often, one to warm up.
      calls: in a row.
    """

    sizes: tuple[int, ...] = (10**6, 10**7, 10**8)
    lookups: int = 1_048_576
    width: int = 80
    exponent: float = 1.2
    kind: str = "rowwise_adam"
    dense_rows: int = 10**7
    rounds: int = 6
    calls: int = 5

    def __post_init__(self):
        if not self.sizes or list(self.sizes) != sorted(set(self.sizes)):
            raise ValueError(f"sizes={self.sizes} must ascend, and not be empty")
        if self.kind not in KINDS:
            raise ValueError(
                f"kind={self.kind!r} is not measured, allowed are "
                f"{', '.join(map(repr, KINDS))}"
            )
        for name in ("lookups", "width", "calls"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be positive")
        if self.rounds < 2 or self.exponent <= 1:
            raise ValueError(
                f"rounds={self.rounds} and exponent={self.exponent}, allowed are at "
                "least 2, and more than 1"
            )

    @property
    def optim(self) -> TableOptimConfig:
        """The optimizer."""
        return TableOptimConfig(kind=self.kind)


def zipf_ids(bench: OptimizerBench, num_rows: int) -> np.ndarray:
    """Row numbers i32[M] of one text in a table; the first is the table's last row."""
    rng = np.random.default_rng(0)
    rank = rng.zipf(bench.exponent, bench.lookups).astype(np.uint64)
    # The finaliser of splitmix64: neighbouring ranks land far apart.
    with np.errstate(over="ignore"):
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            rank = (rank ^ (rank >> np.uint64(shift))) * np.uint64(factor)
        rank ^= rank >> np.uint64(31)
    ids = (rank % np.uint64(num_rows)).astype(np.int32)
    ids[0] = num_rows - 1
    return ids


Step = Callable[..., tuple[jax.Array, Any]]


def row_step(bench: OptimizerBench, implementation: Any) -> Step:
    """(table, state, ids, dy [M, d]) -> (table, state), by the rows that are read."""

    def step(table, state, ids, dy):
        plan = plan_rows(ids, table.shape[0])
        rows = gather_rows(table, plan.unique)
        lookup = functools.partial(engram_gather, implementation=implementation)
        _, pull_back = jax.vjp(lambda rows: lookup(rows, plan.slots), rows)
        (grads,) = pull_back(dy)
        return update_table(bench.optim, table, state, plan.unique, grads, _RATE)

    return step


def dense_step(bench: OptimizerBench) -> Step:
    """The same with a gradient of the whole table; every row moves."""
    config = bench.optim

    def step(table, state: TableOptimState, ids, dy):
        order = jnp.argsort(ids, stable=True)
        grads = jax.ops.segment_sum(
            dy[order], ids[order], table.shape[0], indices_are_sorted=True
        )
        count = state.count + 1
        steps = count.astype(jnp.float32)
        square = grads**2
        if config.kind == "rowwise_adam":
            square = jnp.mean(square, axis=-1)
        first = config.b1 * state.first + (1.0 - config.b1) * grads
        assert state.second is not None
        second = config.b2 * state.second + (1.0 - config.b2) * square
        root = jnp.sqrt(second / (1.0 - config.b2**steps))
        root = root[:, None] if config.kind == "rowwise_adam" else root
        change = first / (1.0 - config.b1**steps) / (root + config.eps)
        table = table - _RATE * config.lr_factor * change
        return table, TableOptimState(count=count, first=first, second=second)

    return step


@dataclasses.dataclass(kw_only=True)
class Contender:
    """A compiled step of one table and its changing state."""

    name: str
    num_rows: int
    unique: int
    step: Any
    carry: tuple[Any, Any]
    ids: jax.Array
    temp_bytes: int
    compile_seconds: float
    note: str
    rounds_ms: list[float] = dataclasses.field(default_factory=list)


def _first_row(
    bench: OptimizerBench, dy: jax.Array, ids: np.ndarray, row: int
) -> np.ndarray:
    """What the first step makes of a row that was zero, in float64."""
    config = bench.optim
    grad = np.asarray(dy[np.flatnonzero(ids == row)], np.float64).sum(axis=0)
    root = np.sqrt(np.mean(grad**2)) if config.kind == "rowwise_adam" else np.abs(grad)
    return -_RATE * config.lr_factor * grad / (root + config.eps)


def wrong(bench: OptimizerBench, table: jax.Array, dy: jax.Array, ids: Any) -> str:
    """What is wrong with a table of zeros after its first step, "" if nothing.

    The last row, the one that is read most often, one that is read at random, and one
    that is not read at all, if there is one.
    """
    found, counts = np.unique(ids, return_counts=True)
    rows = [table.shape[0] - 1, found[np.argmax(counts)], found[len(found) // 2]]
    for row in map(int, rows):
        got, want = np.asarray(table[row]), _first_row(bench, dy, ids, row)
        off = np.linalg.norm(got - want) / np.linalg.norm(want)
        if not off < 2e-3:
            return f"row {row} is {off:.2g} off its value after one step"
    unread = np.setdiff1d(np.arange(min(table.shape[0], len(found) + 1)), found)
    if len(unread) and np.asarray(table[int(unread[0])]).any():
        return f"row {unread[0]} was not read, and moved"
    return ""


def contend(
    bench: OptimizerBench, num_rows: int, name: str, dy: jax.Array
) -> Contender:
    """Compiles a step, makes a table of zeros, and runs and checks its first step."""
    step = (
        dense_step(bench)
        if name == "dense"
        else row_step(bench, None if name == "picked" else name)
    )
    ids = zipf_ids(bench, num_rows)

    def build():
        table = jnp.zeros((num_rows, bench.width), jnp.float32)
        return table, init_table_state(bench.optim, table)

    table, state = jax.jit(build)()
    on_device = jnp.asarray(ids)
    start = time.perf_counter()
    run = jax.jit(step, donate_argnums=(0, 1))
    run = run.lower(table, state, on_device, dy).compile()
    seconds = time.perf_counter() - start
    memory = run.memory_analysis()
    table, state = run(table, state, on_device, dy)
    return Contender(
        name=name,
        num_rows=num_rows,
        unique=len(np.unique(ids)),
        step=run,
        carry=(table, state),
        ids=on_device,
        temp_bytes=0 if memory is None else memory.temp_size_in_bytes,
        compile_seconds=seconds,
        note=wrong(bench, table, dy, ids),
    )


def _time(bench: OptimizerBench, contenders: Sequence[Contender], dy: Any) -> None:
    """Rounds of calls, in turns, so that clocks and temperature are shared."""
    for _ in range(bench.rounds):
        for contender in contenders:
            carry = jax.block_until_ready(contender.carry)
            start = time.perf_counter()
            for _ in range(bench.calls):
                carry = contender.step(*carry, contender.ids, dy)
            contender.carry = jax.block_until_ready(carry)
            seconds = time.perf_counter() - start
            contender.rounds_ms.append(1e3 * seconds / bench.calls)


def measure(
    bench: OptimizerBench, implementations: Sequence[str]
) -> Iterator[list[dict[str, Any]]]:
    """Measures all tables.

    Args:
      bench: what is measured.
      implementations: "xla", "mosaic" or "picked", of the sum of equal rows'
        gradients; "dense" for tables up to `dense_rows`.

    Yields:
      For each implementation a row for each table; `ratio` is to the time with the
      smallest table, `None` where that has none; there is no time where a value was
      wrong.
    """
    dy = jax.random.normal(jax.random.key(0), (bench.lookups, bench.width), jnp.float32)
    for name in implementations:
        yield _measure_one(bench, name, dy)


def _measure_one(
    bench: OptimizerBench, name: str, dy: jax.Array
) -> list[dict[str, Any]]:
    """The rows of an implementation; all of its tables are gone when it returns."""
    rows = []
    sizes = [n for n in bench.sizes if name != "dense" or n <= bench.dense_rows]
    # The largest first: it finds the device's memory whole.
    contenders = [contend(bench, n, name, dy) for n in reversed(sizes)][::-1]
    _time(bench, contenders, dy)
    # Without a right value there is no time.
    times = [[] if c.note else c.rounds_ms[1:] for c in contenders]
    medians = [statistics.median(rounds) if rounds else None for rounds in times]
    first = medians[0] if medians else None
    for contender, rounds, ms in zip(contenders, times, medians, strict=True):
        rows.append(
            {
                "subject": "optimizer",
                "op": f"table {bench.kind} step",
                "workload": f"{bench.lookups} Zipf({bench.exponent}) lookups of "
                f"{contender.num_rows} x {bench.width}",
                "implementation": name,
                "dtype": "float32",
                "table_rows": contender.num_rows,
                "unique_rows": contender.unique,
                "ms": None if ms is None else digits(ms),
                "ratio": digits(ms / first) if ms and first else None,
                "rounds_ms": [digits(x) for x in rounds],
                "temp_gib": digits(contender.temp_bytes / 2**30),
                "compile_s": digits(contender.compile_seconds),
                "timer": "host",
                "note": contender.note,
            }
        )
        print({k: rows[-1][k] for k in ("workload", "implementation", "ms", "note")})
    return rows


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds this subject's options."""
    defaults = OptimizerBench()
    group = parser.add_argument_group("optimizer")
    group.add_argument(
        "--sizes",
        default=",".join(map(str, defaults.sizes)),
        help="rows of the tables, separated by commas",
    )
    group.add_argument("--lookups", type=int, default=defaults.lookups)
    group.add_argument(
        "--kind", choices=KINDS, default=defaults.kind, help="of the optimizer"
    )
    group.add_argument(
        "--sums",
        default="xla,mosaic,dense" if jax.default_backend() == "gpu" else "xla,dense",
        help='separated by commas: "xla", "mosaic", "picked", "dense"',
    )


def run(options: argparse.Namespace) -> Iterator[list[dict[str, Any]]]:
    """The rows of the subject; see `add_arguments`."""
    bench = OptimizerBench(
        sizes=tuple(int(n) for n in options.sizes.split(",")),
        lookups=options.lookups,
        kind=options.kind,
    )
    return measure(bench, options.sums.split(","))


def is_good(row: dict[str, Any]) -> bool:
    """Whether a row has a time, for the exit status."""
    return row["ms"] is not None
