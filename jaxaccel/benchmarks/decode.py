"""`jaxaccel bench decode`: what each step of making decoding fast is worth.

A model continues prompts greedily, step after step of `decoding.waterfall`, in one
process: random ones with random weights, or held-out text with those of a run. A step
whose tokens are not those of the first one has no speed. Beside the speeds stands the
limit of this card: the time a copy would take that moves the weights, states, keys and
values that a token must read and write, at the bandwidth that the same run measures.

Rows of other batch sizes stay in the file, those of the same are replaced together.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import os
import pathlib
import statistics
import time
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx

from jaxaccel.benchmarks import results
from jaxaccel.benchmarks.decode_programs import (
    Compiled,
    Launch,
    Weights,
    build,
    prefill,
    reference_tokens,
    refusals,
    same_program,
)
from jaxaccel.benchmarks.guards import KernelMissing, require_kernels
from jaxaccel.benchmarks.step import add_options
from jaxaccel.cache.dense import KVCache
from jaxaccel.config.gin_utils import load_config
from jaxaccel.core.tree import num_bytes
from jaxaccel.decoding.waterfall import DecodeBenchConfig, Settings, settings
from pallas_kernels._common import timing
from pallas_kernels._common.bench import Ceilings, ceilings, digits, stamp


@dataclasses.dataclass(frozen=True, kw_only=True)
class Traffic:
    """Bytes that one token of every row must move, at the least.

    Attributes:
      weights: parameters that are read, once for all rows; of an embedding table that
        is no output layer, the rows that are looked up.
      state: recurrent states and convolution inputs, read and written.
      kv: keys and values of the tokens so far, read, and of the new one, written.
    """

    weights: int
    state: int
    kv: int

    @property
    def total(self) -> int:
        return self.weights + self.state + self.kv


def traffic(weights: Weights, batch: int, context: int) -> Traffic:
    """Counts what a token moves.

    Args:
      weights: the model.
      batch: rows B.
      context: tokens that each row holds.
    """
    config = weights.config
    model = weights.model
    read = num_bytes(weights.state)
    if config.num_mtp_layers:
        read -= num_bytes(nnx.split(model.mtp)[1])
    if not config.tie_embeddings:
        table = num_bytes(nnx.split(model.embed)[1])
        read -= table - batch * table // config.vocab_size
    state = kv = 0
    cache = jax.eval_shape(lambda: model.init_cache(batch, 1))
    for layer in cache.layers:
        if isinstance(layer, KVCache):
            kv += (context + 1) * num_bytes((layer.k, layer.v))
        else:
            state += 2 * num_bytes(layer)
    return Traffic(weights=read, state=state, kv=kv)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Agreement:
    """How a step's tokens compare with those of the first step.

    Attributes:
      same: share of the tokens before a row's first difference.
      gap: over rows that differ, the largest difference between the first step's
        logits of the two tokens, as a share of the logits' standard deviation; 0 if
        none differs, infinite where those logits are not finite.
    """

    same: float
    gap: float


def compare(expected: np.ndarray, logits: np.ndarray, tokens: np.ndarray) -> Agreement:
    """Compares tokens [B, N] with those expected, which came from logits [B, N, V]."""
    differs = expected != tokens
    first = np.where(differs.any(axis=1), differs.argmax(axis=1), expected.shape[1])
    gap = 0.0
    for row in np.flatnonzero(first < expected.shape[1]):
        scores = logits[row, first[row]].astype(np.float64)
        if not np.isfinite(scores).all():
            gap = np.inf
            break
        chosen = scores[tokens[row, first[row]]]
        gap = max(gap, (scores.max() - chosen) / max(scores.std(), 1e-30))
    return Agreement(same=float(first.sum() / expected.size), gap=float(gap))


def measure(config: DecodeBenchConfig) -> Iterator[dict[str, Any]]:
    """Measures every step at every batch size.

    Args:
      config: what to measure.

    Yields:
      One row per step: `ms` is the time from a row's token to its next, `None` where
      the step could not run or was wrong, with the reason in `note`.
    """
    limits = ceilings()
    is_trained = config.checkpoint is not None
    weights = Weights.trained(config) if is_trained else Weights.random(config)
    plan = settings(config, refusals(config))
    with timing.together():
        built, expected = _prepare(config, weights, plan)
    for batch in config.batches:
        # The argmax of NaN is a token like any other, on which all steps agree.
        is_finite = bool(np.isfinite(expected[batch][1]).all())
        first_ms: float | None = None
        for step in plan:
            row = _about(config, weights, step, batch, limits)
            if not is_finite:
                note = "no speed: the first step's logits are not finite"
                yield {**row, "note": note}
                continue
            launch = built.get((batch, step))
            with timing.alone():
                row |= _measured(config, step, launch, expected[batch])
            if row["ms"] is not None:
                first_ms = first_ms or row["ms"]
                row["tokens_per_s"] = digits(batch * 1e3 / row["ms"])
                row["share_of_limit"] = digits(row["floor_ms"] / row["ms"], 3)
                row["times_first"] = digits(first_ms / row["ms"], 3)
            yield row


def _prepare(
    config: DecodeBenchConfig, weights: Weights, plan: Sequence[Settings]
) -> tuple[
    dict[tuple[int, Settings], concurrent.futures.Future[dict[Settings, Compiled]]],
    dict[int, tuple[np.ndarray, np.ndarray]],
]:
    """Everything that is compiled: it takes longer than all that is timed.

    Returns:
      By batch and step the launches of its program's steps, for each step that is
      available; and by batch the first step's tokens and logits.
    """
    prompts = {batch: weights.prompts(config, batch) for batch in config.batches}
    # Copies that all steps of a layout share, made before they are asked for at once.
    layouts = {step.layers for step in plan}
    if "unrolled" in layouts:
        jax.block_until_ready(weights.by_layer)
    if "python" in layouts:
        jax.block_until_ready(weights.layers)
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        # Once, before the programs that begin from it.
        list(pool.map(lambda x: prefill(weights, x, config), prompts.values()))
        # Plain eager JAX compiles hundreds of small programs for each batch size.
        expected = {
            batch: pool.submit(reference_tokens, weights, plan[0], x, config)
            for batch, x in prompts.items()
        }
        programs: dict[Settings, list[Settings]] = {}
        for step in plan:
            if not step.unavailable:
                programs.setdefault(same_program(step), []).append(step)
        built = {}
        for batch, x in prompts.items():
            for steps in programs.values():
                found = pool.submit(build, weights, steps, x, config)
                built |= {(batch, step): found for step in steps}
    return built, {batch: found.result() for batch, found in expected.items()}


def _measured(
    config: DecodeBenchConfig,
    step: Settings,
    built: concurrent.futures.Future[dict[Settings, Compiled]] | None,
    expected: tuple[np.ndarray, np.ndarray],
) -> dict[str, Any]:
    """What a row says of a step besides `_about`."""
    # Where kernels are required, a machine without them must not pass.
    needed = step.needs_kernels and config.require
    verdict = "no speed" if needed else "not available"
    if built is None:
        return {"note": f"{verdict}: {step.unavailable}"}
    try:
        launch = built.result()[step]
        if isinstance(launch, jax.errors.JaxRuntimeError):
            raise launch
    except NotImplementedError as error:
        return {"note": f"{verdict}: {error}"}
    row = {
        "runs": launch.runs,
        "temp_bytes": launch.temp_bytes,
        "kernels": sorted(launch.kernels),
        "note": _left_out(step, launch),
    }
    if step.needs_kernels:
        try:
            require_kernels(launch.text, config.require)
        except KernelMissing as error:
            return {**row, "note": f"no speed: {error}"}
    tokens = launch.run(launch.start(), config.check_tokens)
    found = compare(*expected, tokens[:, : config.check_tokens])
    row |= {"same_tokens": digits(found.same), "logit_gap": digits(found.gap)}
    # Written so that NaN fails.
    if not found.gap <= config.logit_tolerance:
        return {**row, "note": "no speed: other tokens than those of the first step"}
    milliseconds = _time(launch, _timed_tokens(config, step), config.rounds)
    row |= {
        "ms": digits(statistics.median(milliseconds)),
        "rounds_ms": [digits(value) for value in milliseconds],
    }
    if launch.acceptance is not None:
        row |= _acceptance(launch)
    return row


def _left_out(step: Settings, launch: Launch) -> str:
    """Ops of `fused` of which the program has none, or not as they were named."""
    of_drafts = () if step.num_drafts else ("gated_delta_verify",)
    missing = [
        op
        for op, implementation in step.fused
        if op not in of_drafts and implementation not in launch.runs.get(op, "")
    ]
    return f"runs without {', '.join(missing)}" if missing else ""


def _about(
    config: DecodeBenchConfig,
    weights: Weights,
    step: Settings,
    batch: int,
    limits: Ceilings,
) -> dict[str, Any]:
    context = config.prompt_length + _timed_tokens(config, step) // 2
    moved = traffic(weights, batch, context)
    return {
        "op": "decode",
        "workload": f"batch {batch}, {context} tokens held",
        "implementation": step.step,
        "dtype": weights.config.dtype,
        "parameters": weights.num_parameters,
        "weights": "random" if weights.tokenizer is None else "trained",
        "batch": batch,
        "ms": None,
        "tokens_per_s": None,
        "share_of_limit": None,
        "weight_bytes": moved.weights,
        "state_bytes": moved.state,
        "kv_bytes": moved.kv,
        "bytes_per_token": moved.total // batch,
        "floor_ms": digits(moved.total / limits.gbps / 1e6),
        "copy_gbps": digits(limits.gbps),
        "settings": {
            key: value
            for key, value in dataclasses.asdict(step).items()
            if key not in ("step", "unavailable", "needs_kernels")
        },
        "note": "",
    }


def _acceptance(launch: Launch) -> dict[str, Any]:
    found = launch.acceptance
    assert found is not None
    return {
        "acceptance": digits(found.rate),
        "tokens_per_pass": digits(found.tokens_per_pass),
        "accepted_histogram": list(found.histogram),
    }


def _timed_tokens(config: DecodeBenchConfig, step: Settings) -> int:
    return config.new_tokens if step.jit else config.op_by_op_tokens


def _time(launch: Launch, tokens: int, rounds: int) -> list[float]:
    """Milliseconds a token of each round, host and device together."""
    found = []
    for _ in range(rounds):
        carry = jax.block_until_ready(launch.start())
        start = time.perf_counter()
        launch.run(carry, tokens)
        found.append(1e3 * (time.perf_counter() - start) / tokens)
    return found


def _line(row: dict[str, Any]) -> str:
    text = f"{row['workload']:32s} {row['implementation']:16s} "
    if row["ms"] is None:
        return text + row["note"]
    text += (
        f"{row['ms']:9.3f} ms {row['tokens_per_s']:10.1f} tokens/s "
        f"{100 * row['share_of_limit']:5.1f} % of the limit, "
        f"x{row['times_first']:.2f}"
    )
    if "acceptance" in row:
        text += f", {row['tokens_per_pass']:.2f} tokens a pass"
    return text + f"  {row['runs']}"


def main(argv: list[str]) -> int:
    """The command line; exit status 1 if a step was wrong or missed a kernel."""
    parser = argparse.ArgumentParser(prog="jaxaccel bench decode", description=__doc__)
    add_options(parser)
    options = parser.parse_args(argv)
    config = load_config("DecodeBenchConfig", options.gin_file, options.gin_bindings)
    name = pathlib.PurePath(options.gin_file[0]).with_suffix("").as_posix()
    about = stamp(options.commit)
    rows = []
    for row in measure(config):
        row["workload"] = f"{name}, {row['workload']}"
        rows.append({**row, **about})
        print(_line(row), flush=True)
        # After each: a run that is cut short leaves what it measured.
        results.update(options.json, rows, ("op", "workload"))
    return 1 if any(row["note"].startswith("no speed") for row in rows) else 0
