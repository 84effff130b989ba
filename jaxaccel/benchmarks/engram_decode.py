"""Serving with a memory, token by token: each step's rows follow from the last token.

No rows can be asked for ahead of a token that is not drawn yet, except by the device
itself, which so can read many tokens in one program. "staged_sync" shows what a host
costs that waits for the token, gathers, and copies; "none_sync" what it costs to wait
for each token without a memory, and to take the caches in and out of a program each
time. The steps read the text's own tokens, whatever was drawn, so that n-grams are of
real text; the caches hold zeros for what came before.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import functools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxaccel.benchmarks.engram_inference import compared
from jaxaccel.benchmarks.engram_serving import (
    Models,
    Serving,
    host_view,
    pinned,
    random_table,
    word_ids,
)
from jaxaccel.benchmarks.guards import implementations_used
from jaxaccel.core.host_table import HostTable
from jaxaccel.decoding.layer_loop import read_tokens
from jaxaccel.nn.engram_host import HostEngramMemory
from pallas_kernels._common.bench import digits
from pallas_kernels._common.dispatch import recorded_choices


TIERS = ("none", "device", "zero_copy", "none_sync", "staged_sync")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Decoding:
    """How tokens are read.

    Attributes:
      batch: rows B.
      held: tokens that the caches hold at first.
      slots: of the caches.
      tokens: of each row that a round reads.
      rounds: one to warm up.
    """

    batch: int = 128
    held: int = 256
    slots: int = 384
    tokens: int = 32
    rounds: int = 4

    def __post_init__(self):
        if self.held + self.tokens * self.rounds > self.slots:
            raise ValueError(
                f"held={self.held} and {self.rounds} rounds of {self.tokens} tokens "
                f"are more than slots={self.slots}"
            )


@dataclasses.dataclass(kw_only=True)
class Tier:
    """A way to decode, ready to run."""

    name: str
    step: Callable[..., Any]
    state: Any
    cache: Any
    memory: Any = None
    history: Any = None
    seconds: list[float] = dataclasses.field(default_factory=list)
    outputs: list[Any] = dataclasses.field(default_factory=list)
    runs: dict[str, str] = dataclasses.field(default_factory=dict)


def stepper(merge: Callable[..., Any], *, looped: bool) -> Callable[..., Any]:
    """Jitted (cache, state, tokens, memory) -> (hidden [B, D], drawn i32[B], cache).

    Args:
      merge: of `Models`.
      looped: tokens are i32[T, B], read one by one within the program; else i32[B].
    """

    def step(cache, model, tokens):
        ones = jnp.ones((tokens.shape[0], 1), jnp.int32)
        hidden, cache = read_tokens(model, tokens[:, None], ones, cache)
        best = jnp.argmax(model.unembed(hidden)[:, 0], axis=-1)
        return hidden[:, 0], best.astype(jnp.int32), cache

    @functools.partial(jax.jit, donate_argnums=0)
    def run(cache, state, tokens, *memory):
        model = merge(state, *memory)
        if not looped:
            return step(cache, model, tokens)

        def one(carry, own):
            return step(carry[2], model, own), None

        shapes = jax.eval_shape(lambda cache: step(cache, model, tokens[0]), cache)
        hidden, drawn = (jnp.zeros(x.shape, x.dtype) for x in shapes[:2])
        return jax.lax.scan(one, (hidden, drawn, cache), tokens)[0]

    return run


def first_cache(merge: Callable[..., Any], state: Any, decoding: Decoding) -> Any:
    """A cache that holds zeros in place of a text."""

    @jax.jit
    def build(state):
        cache = merge(state).init_cache(decoding.batch, decoding.slots)
        held = jnp.full_like(cache.length, decoding.held)
        return dataclasses.replace(cache, length=held)

    # Committed, as what a program that reads pinned memory returns: the second call
    # would be another program otherwise.
    return jax.device_put(build(state), jax.local_devices()[0])


def _padded(rows: jax.Array, slots: jax.Array) -> tuple[jax.Array, jax.Array]:
    """As many rows as there are lookups: one program, however many differ."""
    missing = slots.size - rows.shape[0]
    return (jnp.pad(rows, ((0, missing), (0, 0))) if missing > 0 else rows), slots


def one_round(tier: Tier, tokens: np.ndarray) -> None:
    """Reads i32[T, B]; a call a token where the host waits for each."""
    start, hidden = time.perf_counter(), None
    waits = tier.name.endswith("_sync")
    for row in tokens if waits else (tokens,):
        memory = () if tier.memory is None else (tier.memory,)
        if isinstance(tier.memory, HostEngramMemory):
            pending = tier.memory.prefetch(row[:, None], history=tier.history)
            tier.history = pending.history
            memory = (tuple(_padded(*rows) for rows in pending.rows()),)
        hidden, drawn, tier.cache = tier.step(tier.cache, tier.state, row, *memory)
        if waits:
            np.asarray(drawn)  # the next rows follow from it
    jax.block_until_ready(hidden)
    tier.seconds.append(time.perf_counter() - start)
    tier.outputs.append(hidden)


def tiers(
    serving: Serving, decoding: Decoding, names: Sequence[str], models: Models
) -> Iterator[Tier]:
    """Builds tiers one after the other, in the order of `TIERS`."""
    needs_table = bool(set(names) - {"none"})
    table, on_host = None, None
    with concurrent.futures.ThreadPoolExecutor(1) as worker:
        if needs_table:
            table = random_table(serving.num_rows, serving.engram.head_dim)
            if set(names) & {"zero_copy", "staged_sync"}:
                on_host = worker.submit(pinned, table)
        plain, memory = models.without_memory(), models.without_table()
        for name in TIERS:
            if name not in names:
                continue
            merge, state = plain if name.startswith("none") else memory
            looped = not name.endswith("_sync")
            tier = Tier(
                name=name,
                step=stepper(merge, looped=looped),
                state=state,
                cache=first_cache(merge, state, decoding),
            )
            if name == "device":
                tier.step = stepper(models.on_device()[0], looped=True)
                tier.memory = table
            elif name == "zero_copy":
                assert on_host is not None
                tier.step = stepper(models.zero_copy()[0], looped=True)
                tier.memory = on_host.result()
            elif name == "staged_sync":
                assert on_host is not None
                tier.step = stepper(models.gathered()[0], looped=False)
                store = HostTable(host_view(on_host.result()))
                tier.memory = HostEngramMemory(
                    serving.engram, serving.decoder.vocab_size, [store]
                )
                tier.history = np.full(
                    (decoding.batch, serving.engram.orders[-1] - 1), -1, np.int32
                )
            yield tier


def measure(
    serving: Serving, decoding: Decoding, names: Sequence[str]
) -> Iterator[list[dict[str, Any]]]:
    """Runs the tiers one after the other: their caches do not fit side by side.

    Args:
      serving: the model and its table.
      decoding: how tokens are read.
      names: of the tiers.

    Yields:
      Once, a row for each tier.
    """
    for name in names:
        if name not in TIERS:
            raise ValueError(
                f"bench engram: tier {name!r} is unknown, decoding has "
                f"{', '.join(TIERS)}"
            )
    count = decoding.tokens * decoding.rounds
    text = word_ids(serving.decoder.vocab_size, decoding.batch * count)
    text = text.reshape(decoding.batch, decoding.rounds, decoding.tokens)
    done = []
    for tier in tiers(serving, decoding, names, Models(serving)):
        began = time.perf_counter()
        with recorded_choices() as choices:
            for index in range(decoding.rounds):
                one_round(tier, np.ascontiguousarray(text[:, index].T))
        tier.runs = implementations_used(choices)
        tier.cache = None
        done.append(tier)
        took = time.perf_counter() - began
        print(f"{tier.name}: {took:.1f} s, compiling included", flush=True)
    yield rows_of(serving, decoding, done)


def rows_of(
    serving: Serving, decoding: Decoding, done: Sequence[Tier]
) -> list[dict[str, Any]]:
    """What is written of the tiers; see `measure`."""
    speeds = {
        tier.name: decoding.batch
        * decoding.tokens
        / statistics.median(tier.seconds[1:])
        for tier in done
    }
    first = next((t for t in done if not t.name.startswith("none")), None)
    rows = []
    for tier in done:
        want = None
        plain = tier.name.startswith("none")
        if first is not None and not plain and tier.name != first.name:
            want = first.outputs
        off, note = compared(tier.outputs, want)
        is_right = not note
        own = speeds[tier.name]
        loss = {
            f"loss_to_{name}": digits(1 - own / speeds[name], 3)
            for name in ("none", "device", "none_sync")
            if is_right and name in speeds and name != tier.name
        }
        rows.append(
            {
                "subject": "decode",
                "op": "tokens",
                "workload": f"{decoding.batch} rows, caches of {decoding.slots} "
                f"tokens, table of {serving.table_bytes / 1e9:.3g} GB",
                "implementation": tier.name,
                "dtype": serving.decoder.dtype,
                "table_gb": digits(serving.table_bytes / 1e9),
                "table_rows": serving.num_rows,
                "ms": digits(1e3 * decoding.batch / own) if is_right else None,
                "tokens_per_s": digits(own) if is_right else None,
                **loss,
                "apart": off,
                "runs": tier.runs,
                "timer": "host",
                "note": note,
            }
        )
        shown = ("implementation", "ms", "loss_to_none", "loss_to_device", "note")
        print({key: rows[-1].get(key) for key in shown})
    return rows


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds this subject's options."""
    defaults = Decoding()
    group = parser.add_argument_group("decode")
    group.add_argument(
        "--table_gb", type=float, default=69.0, help="size of the table, 1e9 bytes"
    )
    group.add_argument("--tiers", default=",".join(TIERS), help="separated by commas")
    group.add_argument("--batch", type=int, default=defaults.batch)
    group.add_argument("--slots", type=int, default=defaults.slots)
    group.add_argument("--tiny", action="store_true", help="a small model and table")


def run(options: argparse.Namespace) -> Iterator[list[dict[str, Any]]]:
    """The rows of the subject; see `add_arguments`."""
    serving = Serving.of_size(options.table_gb)
    decoding = Decoding(batch=options.batch, slots=options.slots)
    if options.tiny:
        serving = Serving.tiny()
        decoding = Decoding(batch=3, held=4, slots=16, tokens=4, rounds=3)
    yield from measure(serving, decoding, options.tiers.split(","))


def is_good(row: dict[str, Any]) -> bool:
    """Whether a row has a time, for the exit status."""
    return row["ms"] is not None
