"""`jaxaccel bench packing`: what packed rows cost to describe, and what they save.

    jaxaccel bench packing --gin_file experiments/gdn/h200.gin --json FILE
    jaxaccel bench packing --parts pack --gin_file experiments/gdn/h200.gin --json FILE

metadata  The forward pass of the model's layers, with the `PackingMetadata` built once
          against every layer building its own, over the same weights and rows. XLA
          merges equal work of several layers and moves it out of their loop where it
          can: "each_layer" leaves that to it, and in "each_layer_apart" every layer's
          ids depend on its input, so that nothing can be merged or moved.
pack      Real tokens over the tokens of all rows, by algorithm and length of the rows,
          of the corpus and of log-normal lengths.
train     Tokens a second of the training step, padding not counted: packed rows against
          rows of one document each. Both run the same compiled step, in turns.

No speed is written for a forward pass that gives something else, or for a loss that is
not finite. Rows of an earlier call stay in the file unless this one measures them
again.
"""

from __future__ import annotations

import argparse
import dataclasses
import pathlib
import statistics
import time as clock
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxaccel.benchmarks import results
from jaxaccel.benchmarks.guards import KernelMissing, implementations_used
from jaxaccel.benchmarks.step import Contender, add_options, compiled, ours, run_round
from jaxaccel.config.gin_utils import load_experiment
from jaxaccel.config.registry import Experiment
from jaxaccel.data.batch import PackedBatch, PackingMetadata, packing_metadata
from jaxaccel.data.corpus import Corpus
from jaxaccel.data.packing import ALGORITHMS, pack
from jaxaccel.data.pipeline import DataConfig, make_iterator, prepare
from jaxaccel.models.decoder import Decoder, init_decoder
from pallas_kernels._common import timing
from pallas_kernels._common.bench import digits, stamp
from pallas_kernels._common.dispatch import recorded_choices


PARTS = ("metadata", "pack", "train")
WAYS = ("once", "each_layer", "each_layer_apart")
ONE_PER_ROW = "one_per_row"
"""Beside the packing algorithms: every document in a row of its own, padded."""

TOLERANCE = 1e-2
"""Largest relative difference, in norm, of a forward pass from that of "once"."""


def _metadata(model: Decoder, segment_ids: jax.Array) -> PackingMetadata:
    """What `Decoder` builds of ids [B, T]."""
    batch, time = segment_ids.shape
    return packing_metadata(
        (batch, time),
        segment_ids=segment_ids,
        tables=model.packing_tables(batch, time),
    )


def _own_ids(segment_ids: jax.Array, x: jax.Array) -> jax.Array:
    """The ids, of which no compiler can know that they are the same in every layer."""
    return segment_ids + jnp.isnan(x[0, 0, 0]).astype(jnp.int32)


def layers_forward(graphdef: Any, way: str) -> Callable[..., jax.Array]:
    """The forward pass of all layers in one of the `WAYS`.

    Args:
      graphdef: of a `Decoder`.
      way: where the metadata is built.

    Returns:
      (state, tokens i32[B, T], segment_ids i32[B, T]) -> [B, T, D].
    """

    def run(state, tokens, segment_ids):
        model = nnx.merge(graphdef, state)
        once = _metadata(model, segment_ids) if way == "once" else None
        parts = [nnx.split(block) for block in model.layers]

        def period(x, states):
            for (block, _), own in zip(parts, states, strict=True):
                meta = once
                if meta is None:
                    apart = way == "each_layer_apart"
                    ids = _own_ids(segment_ids, x) if apart else segment_ids
                    meta = _metadata(model, ids)
                x, _, _ = nnx.merge(block, own)(x, meta)
            return x, None

        states = tuple(state for _, state in parts)
        x, _ = jax.lax.scan(period, model.embed(tokens), states)
        return model.final_norm(x)

    return run


@jax.jit
def _apart(got: jax.Array, want: jax.Array, is_real: jax.Array) -> jax.Array:
    """Relative difference in norm over real tokens."""
    mask = is_real[:, :, None].astype(jnp.float32)
    want = want.astype(jnp.float32) * mask
    difference = got.astype(jnp.float32) * mask - want
    return jnp.linalg.norm(difference) / jnp.linalg.norm(want)


def in_turns(
    calls: Mapping[str, Callable[[], Any]], *, rounds: int, steps: int
) -> dict[str, list[float]]:
    """Times calls in turns, so that clocks and temperature are shared.

    Args:
      calls: what to time, by name.
      rounds: turns of each; the first warms up and is not counted.
      steps: calls in a turn.

    Returns:
      Milliseconds of a call, host time included, one entry a round.
    """
    found: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            start = clock.perf_counter()
            jax.block_until_ready([call() for _ in range(steps)][-1])
            found[name].append(1e3 * (clock.perf_counter() - start) / steps)
    return {name: times[1:] for name, times in found.items()}


def metadata_rows(
    experiment: Experiment,
    batch: PackedBatch,
    *,
    workload: str,
    rounds: int,
    steps: int,
) -> list[dict[str, Any]]:
    """Measures the layers' forward pass in all `WAYS`, and the building alone.

    Args:
      experiment: its model is measured.
      batch: packed rows.
      workload: name for the rows.
      rounds: turns of each way; the first warms up and is not counted.
      steps: calls in a turn.

    Returns:
      One row for the building and one per way; `ratio` is its time over that of
      "once", and `ms` is `None` where it gave something else.
    """
    config = experiment.model.decoder()
    graphdef, state = nnx.split(init_decoder(config, experiment.train.seed))
    shape = batch.tokens.shape
    sizes = f"B {shape[0]}, T {shape[1]}, {config.num_layers} layers"
    programs: dict[str, tuple[Any, tuple[Any, ...], dict[str, str]]] = {}

    def add(name: str, function: Callable[..., Any], *arguments: Any) -> None:
        with recorded_choices() as choices:
            program, _, _ = compiled(jax.jit(function), *arguments)
        programs[name] = program, arguments, implementations_used(choices)

    model = nnx.merge(graphdef, state)
    add("build_alone", lambda ids: _metadata(model, ids), batch.segment_ids)
    for way in WAYS:
        forward = layers_forward(graphdef, way)
        add(way, forward, state, batch.tokens, batch.segment_ids)
    outputs = {way: programs[way][0](*programs[way][1]) for way in WAYS}
    is_real = batch.segment_ids > 0
    differs = {w: float(_apart(outputs[w], outputs["once"], is_real)) for w in WAYS}
    del outputs
    calls = {name: lambda p=p, a=a: p(*a) for name, (p, a, _) in programs.items()}
    with timing.alone():
        times = in_turns(calls, rounds=rounds, steps=steps)
        on_device = {
            name: timing.measure(program, arguments, runs=steps, cold=False)[0]
            for name, (program, arguments, _) in programs.items()
        }
    about = {
        "op": "packing_metadata",
        "workload": f"{workload}, {sizes}",
        "dtype": config.dtype,
        "tables": [str(table) for table in model.packing_tables(*shape)],
    }
    rows = []
    for name, (_, _, runs) in programs.items():
        difference = differs.get(name)
        # Written so that NaN fails.
        agrees = difference is None or difference <= TOLERANCE
        row = {
            **about,
            "implementation": name,
            "ms": digits(statistics.median(times[name]), 5) if agrees else None,
            "device_ms": digits(on_device[name].ms, 5) if agrees else None,
            "timer": on_device[name].timer,
            "rounds_ms": [digits(t, 5) for t in times[name]],
            "apart": difference,
            "runs": runs,
            "note": "" if agrees else f"outputs differ by {difference:.1e}: no speed",
        }
        if agrees and difference is not None:
            pairs = zip(times[name], times["once"], strict=True)
            row["ratio"] = digits(statistics.median(a / b for a, b in pairs), 5)
        rows.append(row)
    return rows


def log_normal_lengths(
    count: int = 20_000, *, median: int = 600, sigma: float = 1.0, seed: int = 0
) -> np.ndarray:
    """i64[N], lengths as those of web documents, at least 16 tokens."""
    draw = np.random.default_rng(seed).lognormal(np.log(median), sigma, count)
    return np.maximum(draw.astype(np.int64), 16)


def pack_rows(
    data: DataConfig, lists: Mapping[str, np.ndarray], row_lengths: Sequence[int]
) -> list[dict[str, Any]]:
    """Packs lists of lengths by every algorithm.

    Args:
      data: its window, alignment and what it does with overlong documents are used.
      lists: lengths of documents i64[N], by name.
      row_lengths: tokens of a row.

    Returns:
      One row per list, row length and algorithm, and one for a document per row;
      `ratio` is the efficiency over that of the latter.
    """
    rows = []
    for name, lengths in lists.items():
        for row_length in row_lengths:
            of_one = None
            for algorithm in (ONE_PER_ROW, *ALGORITHMS):
                alone = algorithm == ONE_PER_ROW
                start = clock.perf_counter()
                packing = pack(
                    lengths,
                    row_length,
                    algorithm="next_fit" if alone else algorithm,
                    window=data.window,
                    align=data.align,
                    max_docs=1 if alone else data.max_docs,
                    overlong=data.overlong,
                )
                ms = 1e3 * (clock.perf_counter() - start)
                of_one = of_one or packing.efficiency
                rows.append(
                    {
                        "op": "pack",
                        "workload": f"{name}, {len(lengths)} documents, T {row_length}",
                        "implementation": algorithm,
                        "efficiency": digits(packing.efficiency, 5),
                        "ratio": digits(packing.efficiency / of_one),
                        "documents_per_row": digits(packing.documents_per_row),
                        "rows": packing.num_rows,
                        "dropped_tokens": packing.dropped_tokens,
                        "window": data.window,
                        "align": data.align,
                        "ms": digits(ms),
                        "timer": "host",
                    }
                )
    return rows


def _first_batches(corpus: Corpus, data: DataConfig, count: int) -> list[PackedBatch]:
    with make_iterator(corpus, data, split="train") as stream:
        return [jax.tree.map(jnp.asarray, next(stream)) for _ in range(count)]


def _real_tokens(batches: Sequence[PackedBatch]) -> float:
    """Tokens of a batch that are not padding, the mean over batches."""
    return float(np.mean([np.sum(np.asarray(b.segment_ids) > 0) for b in batches]))


def train_rows(
    experiment: Experiment,
    batches: Mapping[str, list[PackedBatch]],
    *,
    workload: str,
    rounds: int,
    contender: Contender | None = None,
) -> list[dict[str, Any]]:
    """Trains on kinds of rows in turns.

    Args:
      experiment: model and training config.
      batches: batches of one shape by kind, the baseline first.
      workload: name for the rows.
      rounds: turns of each kind; the first warms up and is not counted.
      contender: the compiled step, built from the experiment if `None`.

    Returns:
      One row per kind; `tokens_per_s` counts real tokens, `ratio` is that over the
      baseline's, and both are `None` where a loss was not finite.

    Raises:
      KernelMissing: a kernel of `experiment.require` is not in the step.
    """
    if contender is None:
        contender, _ = ours(experiment, next(iter(batches.values()))[0])
    times: dict[str, list[float]] = {kind: [] for kind in batches}
    losses: dict[str, list[float]] = {kind: [] for kind in batches}
    with timing.alone():
        for _ in range(rounds):
            for kind, some in batches.items():
                run_round(contender, some)
                times[kind].append(contender.step_ms[-1])
                losses[kind] += contender.losses[-len(some) :]
    rows: list[dict[str, Any]] = []
    for kind, some in batches.items():
        timed, tokens = times[kind][1:], _real_tokens(some)
        is_finite = bool(np.isfinite(losses[kind]).all())
        ms = statistics.median(timed)
        speed = tokens / ms * 1e3 if is_finite else None
        first = rows[0]["tokens_per_s"] if rows else speed
        shape = some[0].tokens.shape
        documents = [np.max(np.asarray(b.segment_ids), axis=1) for b in some]
        rows.append(
            {
                "op": "train_packed",
                "workload": f"{workload}, B {shape[0]}, T {shape[1]}",
                "implementation": kind,
                "dtype": experiment.model.decoder().dtype,
                "ms": digits(ms, 5) if is_finite else None,
                "tokens_per_s": speed and digits(speed),
                "ratio": digits(speed / first) if speed and first else None,
                "efficiency": digits(tokens / np.prod(shape), 5),
                "documents_per_row": digits(float(np.mean(documents))),
                "rounds_ms": [digits(t, 5) for t in timed],
                "first_loss": digits(losses[kind][0], 6),
                "last_loss": digits(losses[kind][-1], 6),
                "peak_gib": digits(contender.peak_bytes / 2**30),
                "runs": contender.runs,
                "note": "" if is_finite else "a loss is not finite: no speed",
            }
        )
    return rows


def measure(
    experiment: Experiment,
    *,
    workload: str,
    parts: Sequence[str] = PARTS,
    row_lengths: Sequence[int],
    rounds: int,
    steps: int,
) -> Iterator[list[dict[str, Any]]]:
    """Measures part by part.

    Args:
      experiment: model, data and training config.
      workload: name for the rows.
      parts: of `PARTS`.
      row_lengths: for the part "pack".
      rounds: turns of what is timed; the first warms up and is not counted.
      steps: calls or training steps in a turn.

    Yields:
      The rows of each part.

    Raises:
      ValueError: a part is unknown.
      KernelMissing: a kernel of `experiment.require` is not in the training step.
    """
    for part in parts:
        if part not in PARTS:
            raise ValueError(
                f"bench packing: part {part!r} is unknown, allowed are "
                f"{', '.join(PARTS)}"
            )
    data = experiment.data
    corpus = prepare(data)
    packed = _first_batches(corpus, data, steps)
    if "metadata" in parts:
        yield metadata_rows(
            experiment, packed[0], workload=workload, rounds=rounds, steps=steps
        )
    if "pack" in parts:
        documents = corpus.documents("train")
        lists = {
            "corpus": corpus.store.lengths[documents],
            "log-normal, median 600, sigma 1": log_normal_lengths(),
        }
        yield pack_rows(data, lists, row_lengths)
    if "train" in parts:
        one_each = dataclasses.replace(data, max_docs=1)
        kinds = {
            ONE_PER_ROW: _first_batches(corpus, one_each, steps),
            data.packing: packed,
        }
        yield train_rows(experiment, kinds, workload=workload, rounds=rounds)


def main(argv: list[str]) -> int:
    """The command line; exit status 1 if something has no speed."""
    parser = argparse.ArgumentParser(
        prog="jaxaccel bench packing",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_options(parser)
    parser.add_argument(
        "--parts", default=",".join(PARTS), help="separated by commas; all by default"
    )
    parser.add_argument(
        "--row_lengths",
        default="1024,2048,4096,8192",
        help="tokens of a row for the part pack, separated by commas",
    )
    parser.add_argument("--rounds", type=int, default=8, help="turns, one to warm up")
    parser.add_argument("--steps", type=int, default=8, help="calls in a turn")
    options = parser.parse_args(argv)
    experiment = load_experiment(options.gin_file, options.gin_bindings)
    about, rows = stamp(options.commit), []
    measured = measure(
        experiment,
        workload=pathlib.PurePath(options.gin_file[0]).with_suffix("").as_posix(),
        parts=options.parts.split(","),
        row_lengths=[int(length) for length in options.row_lengths.split(",")],
        rounds=options.rounds,
        steps=options.steps,
    )
    try:
        for some in measured:
            for row in some:
                print(row, flush=True)
            # After each part: a later one may fail.
            rows += [{**row, **about} for row in some]
            results.update(options.json, rows)
    except KernelMissing as error:
        print(f"the training step is not measured: {error}")
        return 1
    return 0 if all(row["ms"] is not None for row in rows) else 1
