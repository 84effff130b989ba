"""Serving with a memory whose table lies elsewhere: prompts read, by storage tier.

A dense stack of the 4B class reads packed prompts of real text. Without a memory; with
one whose table is on the device, in pinned memory that the device reads by itself, in
the host's memory with a thread that gathers one batch ahead or only when the batch is
due, with the most frequent rows on the device, or in a file with a cache. The table has
the same bytes in all of them, and results are compared before any speed is written.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import dataclasses
import functools
import os
import pathlib
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxaccel.benchmarks.engram_serving import (
    Models,
    Prompts,
    Serving,
    host_view,
    pinned,
    prompts,
    random_table,
    word_ids,
)
from jaxaccel.benchmarks.guards import implementations_used
from jaxaccel.core.host_table import HostTable, HotRows, MappedTable, save_table
from jaxaccel.nn.engram_host import HostEngramMemory
from jaxaccel.nn.engram_stats import coverage
from pallas_kernels._common.bench import digits
from pallas_kernels._common.dispatch import recorded_choices


TIERS = ("none", "device", "zero_copy", "staged", "staged_sync", "hot", "hot_sync")
FILE_TIERS = ("file", "file_sync")
"""`_sync`: a batch's rows are asked for when it is due, and waited for."""

TOLERANCE = 2e-2
"""Largest relative difference of a tier's hidden states, in bf16."""


def reader(merge: Callable[..., Any]) -> Callable[..., Any]:
    """Jitted (state, tokens, segments, table or rows) -> last hidden states, tokens."""

    @jax.jit
    def read(state, tokens, segments, *memory):
        model = merge(state, *memory)
        hidden = model(tokens, segments).hidden
        # The last token that is not padding.
        end = jnp.sum(segments > 0, axis=1, dtype=jnp.int32) - 1
        last = jnp.take_along_axis(hidden, end[:, None, None], axis=1)[:, 0]  # [B, D]
        best = jnp.argmax(model.unembed(last), axis=-1)
        return last, best.astype(jnp.int32)

    return read


@dataclasses.dataclass(kw_only=True)
class Round:
    """What one pass over all batches took.

    Attributes:
      seconds: from the first batch to the last result.
      waited: of them, for rows.
      tokens: that were read.
      outputs: last hidden states of each batch.
    """

    seconds: float
    waited: float
    tokens: int
    outputs: list[Any]


def one_round(
    read: Callable[..., Any],
    state: Any,
    batches: Sequence[Prompts],
    memory: HostEngramMemory | jax.Array | None,
    *,
    ahead: bool,
) -> Round:
    """Reads all batches.

    Args:
      read: of `reader`.
      state: the model's.
      batches: the prompts.
      memory: a table that the program reads, tables that the host reads, or none.
      ahead: whether rows of a batch are asked for while the one before is read.
    """
    outputs, waited = [], 0.0
    fixed = () if memory is None or isinstance(memory, HostEngramMemory) else (memory,)
    hosted = memory if isinstance(memory, HostEngramMemory) else None
    start = time.perf_counter()

    def ask(index: int) -> Any:
        if hosted is None or index == len(batches):
            return None
        return hosted.prefetch(batches[index].tokens, batches[index].segments)

    pending = ask(0) if ahead else None
    for index, batch in enumerate(batches):
        rows = fixed
        if hosted is not None:
            asked = time.perf_counter()
            if not ahead:
                pending = ask(index)
            assert pending is not None
            rows = (pending.rows(),)
            if not ahead:
                jax.block_until_ready(rows)
            waited += time.perf_counter() - asked
        outputs.append(read(state, batch.tokens, batch.segments, *rows))
        if ahead:
            # While the device reads this batch.
            pending = ask(index + 1)
        if not ahead or index:
            # A server knows the next prompts, not all of them.
            jax.block_until_ready(outputs[index if not ahead else index - 1])
    jax.block_until_ready(outputs[-1])
    seconds = time.perf_counter() - start
    return Round(
        seconds=seconds,
        waited=waited,
        tokens=sum(batch.count for batch in batches),
        outputs=[last for last, _ in outputs],
    )


def apart(got: Sequence[Any], want: Sequence[Any]) -> float:
    """The largest relative difference of two runs' outputs; NaN if there is one."""

    def one(a, b):
        a, b = np.asarray(a, np.float32), np.asarray(b, np.float32)
        return float(np.linalg.norm(a - b) / np.linalg.norm(b))

    # Not `max`, which passes over a NaN that is not the first.
    return float(np.max([one(a, b) for a, b in zip(got, want, strict=True)]))


def compared(
    got: Sequence[Any], want: Sequence[Any] | None
) -> tuple[float | None, str]:
    """Holds a run's outputs against another's.

    Args:
      got: outputs of the run.
      want: of the other; `None` if there is none, then they must be finite.

    Returns:
      (`apart`, `None` without another run or if it is not finite; what is wrong with
      the outputs, "" if nothing).
    """
    if not all(np.isfinite(np.asarray(x, np.float32)).all() for x in got):
        return None, "hidden states are not finite"
    if want is None:
        return None, ""
    off = apart(got, want)
    # A NaN is not within the tolerance.
    note = "" if off <= TOLERANCE else f"hidden states differ by {off:.2g}"
    return (digits(off) if np.isfinite(off) else None), note


@dataclasses.dataclass(kw_only=True)
class Tier:
    """A way to serve, ready to run.

    Attributes:
      name: of `TIERS` or `FILE_TIERS`.
      read, state: the program and the model's arrays.
      memory: as of `one_round`.
      stats: what the store says of itself, by a function.
      hot: rows that are on the device.
    """

    name: str
    read: Any
    state: Any
    memory: Any = None
    stats: Callable[[], dict[str, Any]] = dict
    hot: np.ndarray | None = None
    rounds: list[Round] = dataclasses.field(default_factory=list)
    runs: dict[str, str] = dataclasses.field(default_factory=dict)
    first_seconds: float = 0.0

    def compile(self, batches: Sequence[Prompts]) -> None:
        """Compiles for each number of rows that these batches come with."""
        if not isinstance(self.memory, HostEngramMemory):
            return
        config, example = self.memory.config, batches[0]
        kept = np.zeros(0, np.int64) if self.hot is None else self.hot
        counts = set()
        for batch in batches:
            ids, _ = self.memory.lookups(batch.tokens, batch.segments)
            cold = len(np.setdiff1d(ids, kept))
            counts.add(len(kept) + (1 << max(cold - 1, 0).bit_length()))
        slots = jnp.zeros((*example.tokens.shape, config.num_columns), jnp.int32)
        with recorded_choices() as choices:
            for count in counts:
                rows = jnp.zeros((count, config.head_dim), config.table_dtype)
                own = ((rows, slots),)
                self.read(self.state, example.tokens, example.segments, own)
        self.runs = implementations_used(choices)

    def run(self, batches: Sequence[Prompts]) -> None:
        """One more round; waits that a sync tier has show in its time."""
        ahead = not self.name.endswith("_sync")
        began = time.perf_counter()
        with recorded_choices() as choices:
            done = one_round(self.read, self.state, batches, self.memory, ahead=ahead)
        if not self.rounds:
            self.first_seconds = time.perf_counter() - began
            self.runs = implementations_used(choices) or self.runs
        self.rounds.append(done)


def _forget_cached(folder: pathlib.Path) -> None:
    """Lets the system drop what it has of a table's file in memory."""
    for path in folder.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _hosted(serving: Serving, store: Any) -> HostEngramMemory:
    return HostEngramMemory(serving.engram, serving.decoder.vocab_size, [store])


def _stats_of(store: Any) -> Callable[[], dict[str, Any]]:
    def stats():
        found = store.stats
        fetches = max(found.fetches, 1)
        return {
            "rows_per_batch": digits(found.rows / fetches),
            "row_hit_share": digits(found.cache_hits / max(found.rows, 1)),
            "gather_ms": digits(1e3 * found.gather_seconds / fetches),
        }

    return stats


def _most_frequent(serving: Serving, hosted: HostEngramMemory) -> np.ndarray:
    """Rows of the table that a part of the text behind the prompts reads most."""
    vocab, size = serving.decoder.vocab_size, serving.rows * serving.length
    skip = serving.rounds * serving.batches * size
    text = word_ids(vocab, skip + 64 * size)[skip:]
    ids, _ = hosted.lookups(text.reshape(-1, serving.length))
    _, ranked = coverage(ids)
    return ranked[: serving.hot_rows]


def _hot_stats(
    hosted: HostEngramMemory, hot: np.ndarray, serving: Serving
) -> dict[str, Any]:
    """Share of a round's lookups that the rows on the device answer."""
    found = []
    for batch in prompts(serving):
        ids, _ = hosted.lookups(batch.tokens, batch.segments)
        found.append(np.isin(ids[batch.segments > 0], hot).ravel())
    share = float(np.mean(np.concatenate(found)))
    return {"hot_rows": len(hot), "hot_share": digits(share)}


def make_tiers(
    serving: Serving,
    names: Sequence[str],
    models: Models,
    closing: contextlib.ExitStack,
) -> Iterator[Tier]:
    """Builds tiers one after the other; those that need no table on the host first.

    Args:
      serving: what is served.
      names: of the tiers.
      models: of the stack.
      closing: closes stores and folders.

    Yields:
      The tiers, in the order of `TIERS` and `FILE_TIERS`.
    """
    if "none" in names:
        merge, state = models.without_memory()
        yield Tier(name="none", read=reader(merge), state=state)
    if set(names) <= {"none"}:
        return
    table = random_table(serving.num_rows, serving.engram.head_dim)
    on_host = None
    if set(names) & {"zero_copy", "staged", "staged_sync", "hot", "hot_sync"}:
        # Pinning pages takes longest: others compile and run meanwhile.
        worker = concurrent.futures.ThreadPoolExecutor(1)
        closing.callback(worker.shutdown)
        on_host = worker.submit(pinned, table)
    if "device" in names:
        merge, state = models.on_device()
        yield Tier(name="device", read=reader(merge), state=state, memory=table)
    if on_host is not None:
        began = time.perf_counter()
        on_host = on_host.result()
        print(f"waited {time.perf_counter() - began:.1f} s for pinned memory")
    if "zero_copy" in names:
        merge, state = models.zero_copy()
        yield Tier(name="zero_copy", read=reader(merge), state=state, memory=on_host)
    merge, state = models.gathered()
    read = reader(merge)
    for kind in ("staged", "hot"):
        for name in (kind, f"{kind}_sync"):
            if name not in names:
                continue
            assert on_host is not None
            store: Any = HostTable(host_view(on_host))
            closing.callback(store.close)
            tier = _of_store(name, serving, store, read, state)
            if kind == "hot":
                tier.hot = hot = _most_frequent(serving, tier.memory)
                tier.stats = functools.partial(_hot_stats, tier.memory, hot, serving)
                tier.memory = _hosted(serving, HotRows(store, hot))
            yield tier
    if set(names) & set(FILE_TIERS):
        folder = pathlib.Path(closing.enter_context(tempfile.TemporaryDirectory()))
        # In pieces from the device, if there is no copy on the host yet.
        save_table(folder, table if on_host is None else host_view(on_host))
        for name in FILE_TIERS:
            if name in names:
                _forget_cached(folder)
                store = MappedTable(folder, budget_bytes=serving.cache_bytes)
                closing.callback(store.close)
                yield _of_store(name, serving, store, read, state)


def _of_store(name: str, serving: Serving, store: Any, read: Any, state: Any) -> Tier:
    memory = _hosted(serving, store)
    return Tier(
        name=name, read=read, state=state, memory=memory, stats=_stats_of(store)
    )


def rows_of(serving: Serving, tiers: Sequence[Tier]) -> list[Any]:
    """What is written of the tiers; see `measure`."""
    by_name = {tier.name: tier for tier in tiers}
    with_memory = [tier for tier in tiers if tier.name != "none"]
    first = with_memory[0] if with_memory else None

    def speed(name: str) -> float | None:
        if name not in by_name:
            return None
        return statistics.median(r.tokens / r.seconds for r in by_name[name].rounds[1:])

    rows = []
    for tier in tiers:
        want = None
        if first is not None and tier.name not in ("none", first.name):
            want = first.rounds[-1].outputs
        off, note = compared(tier.rounds[-1].outputs, want)
        is_right = not note
        own = speed(tier.name)
        assert own is not None
        timed = tier.rounds[1:]
        loss = {
            f"loss_to_{name}": digits(1 - own / other, 3)
            for name in ("none", "device")
            if is_right and (other := speed(name)) and tier.name != name
        }
        is_plain = tier.name == "none"
        batch_ms = 1e3 / serving.batches
        rows.append(
            {
                "subject": "inference",
                "op": "prompts",
                "workload": f"{serving.batches} x {serving.rows} x {serving.length}, "
                f"prompts of {serving.prompt[0]} to {serving.prompt[1]} tokens, table "
                f"of {serving.table_bytes / 1e9:.3g} GB",
                "implementation": tier.name,
                "dtype": serving.decoder.dtype,
                "table_gb": digits(serving.table_bytes / 1e9),
                "table_rows": serving.num_rows,
                "row_bytes": serving.table_bytes // serving.num_rows,
                "lookups_per_token": 0 if is_plain else serving.engram.num_columns,
                "tokens": sum(r.tokens for r in timed),
                "ms": digits(batch_ms * statistics.median(r.seconds for r in timed))
                if is_right
                else None,
                "tokens_per_s": digits(own) if is_right else None,
                "tokens_per_s_by_round": [
                    digits(r.tokens / r.seconds) for r in timed if is_right
                ],
                **loss,
                "wait_ms": digits(
                    batch_ms * statistics.median(r.waited for r in timed)
                ),
                "apart": off,
                **tier.stats(),
                "first_round_s": digits(tier.first_seconds),
                "runs": tier.runs,
                "timer": "host",
                "note": note,
            }
        )
    return rows


def measure(serving: Serving, names: Sequence[str]) -> Iterator[list[dict[str, Any]]]:
    """Runs the tiers in turns.

    Args:
      serving: what is served.
      names: of the tiers.

    Yields:
      Once, a row for each tier: `loss_to_none` is 1 - its throughput in units of that
      without a memory, `loss_to_device` of that with the table on the device.
    """
    for name in names:
        if name not in (*TIERS, *FILE_TIERS):
            raise ValueError(
                f"bench engram: tier {name!r} is unknown, allowed are "
                f"{', '.join((*TIERS, *FILE_TIERS))}"
            )
    # Other prompts in every round: a cache must not have seen them.
    rounds = [prompts(serving, part) for part in range(serving.rounds)]
    models = Models(serving)
    with contextlib.ExitStack() as closing:
        tiers = []
        for tier in make_tiers(serving, names, models, closing):
            tier.compile([batch for batches in rounds for batch in batches])
            tier.run(rounds[0])
            print(f"{tier.name}: ready after {tier.first_seconds:.1f} s", flush=True)
            tiers.append(tier)
        for batches in rounds[1:]:
            for tier in tiers:
                tier.run(batches)
        rows = rows_of(serving, tiers)
    for row in rows:
        shown = ("implementation", "tokens_per_s", "loss_to_none", "loss_to_device")
        print({key: row.get(key) for key in (*shown, "wait_ms", "note")})
    yield rows


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds this subject's options."""
    group = parser.add_argument_group("inference")
    group.add_argument(
        "--table_gb", type=float, default=69.0, help="size of the table, 1e9 bytes"
    )
    group.add_argument(
        "--tiers",
        default=",".join(TIERS),
        help=f"separated by commas, out of {', '.join((*TIERS, *FILE_TIERS))}",
    )
    group.add_argument("--rounds", type=int, default=3, help="one to warm up")
    group.add_argument("--tiny", action="store_true", help="a small model and table")


def run(options: argparse.Namespace) -> Iterator[list[dict[str, Any]]]:
    """The rows of the subject; see `add_arguments`."""
    serving = Serving.of_size(options.table_gb, rounds=options.rounds)
    if options.tiny:
        serving = Serving.tiny()
    yield from measure(serving, options.tiers.split(","))


def is_good(row: dict[str, Any]) -> bool:
    """Whether a row has a time, for the exit status."""
    return row["ms"] is not None
