"""`jaxaccel bench recall`: how many pairs models of equal size can remember.

    jaxaccel bench recall --gin_file experiments/recall/h200.gin --json FILE

Multi-query associative recall (Arora et al. 2023, Zoology, arXiv:2312.04927, section
3.2): a row names pairs of a key and a value, then asks for the values of some keys.
Attention looks them up. A delta-rule layer has to hold them in its state, a V x K
matrix per head: it can keep at most K keys apart, and reads a mixture of values once
there are more pairs than its heads and layers have room for.

Each model trains on rows with all numbers of pairs at once, several seeds side by side
in one program, so that the host does next to nothing; then each number is asked for
on its own. Models of one seed read the same rows. What comes out is accuracy, no speed.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import statistics
import time as clock
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import jaxaccel.config.recall  # noqa: F401  registers the config
from jaxaccel.benchmarks import results
from jaxaccel.benchmarks.guards import implementations_used
from jaxaccel.benchmarks.step import add_options, compiled, untuned
from jaxaccel.config.gin_utils import load_config
from jaxaccel.config.recall import RecallBenchConfig
from jaxaccel.core.tree import ModelParts, model_parts
from jaxaccel.data.batch import PackedBatch
from jaxaccel.data.recall import recall_accuracy
from jaxaccel.models.config import DecoderConfig
from jaxaccel.models.decoder import Decoder
from jaxaccel.models.describe import describe
from jaxaccel.training.config import TrainConfig
from jaxaccel.training.optim import make_optimizer
from jaxaccel.training.step import TrainState, make_init, make_train_step
from pallas_kernels._common.bench import digits, stamp
from pallas_kernels._common.dispatch import recorded_choices


# Student's t with n - 1 degrees of freedom: 97.5 % lie below.
_QUANTILES = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306),
    *(2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131),
)


def interval(values: Sequence[float]) -> tuple[float, float]:
    """The 95 % interval of a mean, by Student's t.

    Args:
      values: two to 16 of them, one a seed.

    Returns:
      Its ends.
    """
    mean, count = statistics.mean(values), len(values)
    half = _QUANTILES[count - 2] * statistics.stdev(values) / math.sqrt(count)
    return mean - half, mean + half


def recall_rows(
    config: RecallBenchConfig, key: jax.Array, pairs: jax.Array
) -> PackedBatch:
    """Rows of one length that hold different numbers of pairs.

    The fewer pairs a row has, the more is left of it for queries: all of it is used,
    and easy rows teach most.

    Args:
      config: the task.
      key: random key; equal keys give equal rows.
      pairs: i32[B], pairs of each row, `config.num_queries` to the last of
        `config.pairs`.

    Returns:
      One document a row, `key value ... query answer ...`, of `config.seq_len` tokens.
      The first `config.num_queries` queries ask for different keys, further ones for
      any. `loss_mask` is 1 at the queries alone.
    """
    most, first = config.pairs[-1], config.num_queries
    places = most + first

    def row(key, count):
        keys = jax.random.split(key, 4)
        names = jax.random.permutation(keys[0], config.num_keys)[:most]
        values = config.num_keys + jax.random.randint(
            keys[1], (most,), 0, config.num_values
        )
        # The places of the largest of random numbers: without replacement, and
        # among the row's own pairs.
        order = jax.random.uniform(keys[2], (most,))
        order = jnp.where(jnp.arange(most) < count, order, -1.0)
        asked = jax.lax.top_k(order, first)[1]
        again = jax.random.randint(keys[3], (places,), 0, count)
        place = jnp.arange(places)
        query = jnp.where(
            place < count + first, asked[jnp.clip(place - count, 0, first - 1)], again
        )
        source = jnp.where(place < count, jnp.minimum(place, most - 1), query)
        table = jnp.stack([names, values], axis=1).astype(jnp.int32)  # [most, 2]
        return table[source].reshape(-1), jnp.repeat(place >= count, 2)  # [T]

    tokens, asks = jax.vmap(row)(jax.random.split(key, pairs.shape[0]), pairs)
    time = jnp.arange(config.seq_len, dtype=jnp.int32)[None]
    mask = (asks & (time % 2 == 0)).astype(jnp.float32)
    return PackedBatch(
        tokens=tokens,
        targets=jnp.pad(tokens[:, 1:], ((0, 0), (0, 1))),
        segment_ids=jnp.ones(tokens.shape, jnp.int32),
        positions=jnp.broadcast_to(time, tokens.shape),
        loss_mask=mask,
        num_bytes=mask,
    )


def first_queries(
    config: RecallBenchConfig, rows: PackedBatch, pairs: jax.Array
) -> PackedBatch:
    """The same rows with a `loss_mask` at their first `config.num_queries` queries.

    A query that comes again has its answer behind the first one: only these ask for
    what a state of this size held on to.
    """
    end = 2 * (pairs[:, None] + config.num_queries)
    time = jnp.arange(config.seq_len, dtype=jnp.int32)[None]
    return dataclasses.replace(
        rows, loss_mask=jnp.where(time < end, rows.loss_mask, 0.0)
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trained:
    """A model after its runs.

    Attributes:
      parts: the model taken apart.
      state: of all seeds, leaves [seeds, ...].
      losses: f32[calls, seeds], nats a query, the mean over each call's steps.
      compile_seconds: of tracing and compiling the training program.
      seconds: of its calls.
      runs: op -> implementation that was traced.
    """

    parts: ModelParts
    state: TrainState
    losses: np.ndarray
    compile_seconds: float
    seconds: float
    runs: dict[str, str]


def _seed_keys(config: RecallBenchConfig, purpose: int) -> jax.Array:
    """One key a seed; `purpose` tells parameters, training and evaluation apart."""
    key = jax.random.fold_in(jax.random.key(config.seed), purpose)
    return jax.random.split(key, config.num_seeds)


def train(decoder: DecoderConfig, config: RecallBenchConfig) -> Trained:
    """Trains all seeds of a model side by side.

    Args:
      decoder: the model.
      config: the task and the run.

    Returns:
      What became of it.
    """

    def build(key: jax.Array) -> Decoder:
        return Decoder(decoder, rngs=nnx.Rngs(key))

    train_config = TrainConfig(num_steps=config.num_steps, optim=config.optim)
    parts = model_parts(lambda: build(jax.random.key(0)))
    optimizer = make_optimizer(config.optim, config.num_steps)
    step = make_train_step(parts, optimizer, train_config)
    share = config.batch_size // len(config.pairs)
    pairs = jnp.repeat(jnp.asarray(config.pairs, jnp.int32), share)

    def first_state(key):
        return make_init(lambda _: build(key), optimizer, train_config)()

    def steps(state, key):
        def one(state, _):
            rows = recall_rows(config, jax.random.fold_in(key, state.step), pairs)
            state, metrics = step(state, rows)
            return state, metrics["nats_per_token"]

        state, losses = jax.lax.scan(one, state, length=config.steps_per_call)
        return state, jnp.mean(losses)

    state = jax.jit(jax.vmap(first_state))(_seed_keys(config, 0))
    keys = _seed_keys(config, 1)
    with recorded_choices() as choices:
        call, compile_seconds, _ = compiled(
            jax.jit(jax.vmap(steps), donate_argnums=0), state, keys, options=untuned()
        )
    losses, start = [], clock.perf_counter()
    for _ in range(config.num_steps // config.steps_per_call):
        state, loss = call(state, keys)
        losses.append(np.asarray(loss))
        print(f"  nats a query {np.mean(losses[-1]):.3f}", flush=True)
    return Trained(
        parts=parts,
        state=state,
        losses=np.stack(losses),
        compile_seconds=compile_seconds,
        seconds=clock.perf_counter() - start,
        runs=implementations_used(choices),
    )


def accuracies(trained: Trained, config: RecallBenchConfig) -> np.ndarray:
    """Share of right answers, f32[count of `config.pairs`, seeds]."""

    def one(params, buffers, key, pairs):
        model: Any = trained.parts.merge(params, buffers)
        counts = jnp.broadcast_to(pairs, (config.eval_rows,))
        rows = first_queries(config, recall_rows(config, key, counts), counts)
        output = model(rows.tokens)
        return recall_accuracy(output.logits, rows)

    ask = jax.jit(jax.vmap(one, in_axes=(0, 0, 0, None)))
    state, keys = trained.state, _seed_keys(config, 2)
    return np.stack(
        [
            np.asarray(ask(state.params, state.buffers, keys, jnp.int32(pairs)))
            for pairs in config.pairs
        ]
    )


def _check_equal(config: RecallBenchConfig) -> None:
    sizes = {
        name: describe(model.decoder(), config.seq_len).total.params
        for name, model in config.models.items()
    }
    least, most = min(sizes.values()), max(sizes.values())
    if most - least > config.equal_within * least:
        raise ValueError(
            f"bench recall: parameters {sizes} differ by more than "
            f"equal_within={config.equal_within}"
        )


def rows_of(
    name: str,
    decoder: DecoderConfig,
    trained: Trained,
    found: np.ndarray,
    config: RecallBenchConfig,
) -> list[dict[str, Any]]:
    """The rows of one model: one a seed, and their mean with `seed` `None`.

    Args:
      name: of the model.
      decoder: its sizes.
      trained: its runs.
      found: f32[count of `config.pairs`, seeds].
      config: the task.
    """
    cost = describe(decoder, config.seq_len).total
    is_finite = bool(np.all(np.asarray(trained.state.finite)))
    gdn = decoder.gdn
    about = {
        "op": "recall",
        "implementation": "jaxaccel",
        "model": name,
        "dtype": decoder.dtype,
        "parameters": cost.params,
        "state_bytes": cost.state_bytes,
        "keys_per_head": None if gdn is None else gdn.key_dim,
        "pattern": list(decoder.pattern),
        "layers": decoder.num_layers,
        "steps": config.num_steps,
        "batch": config.batch_size,
        "queries": config.num_queries,
        "eval_rows": config.eval_rows,
        "train_s": digits(trained.seconds),
        "compile_s": digits(trained.compile_seconds),
        "runs": trained.runs,
        "note": "" if is_finite else "a loss or gradient was not finite",
    }
    rows = []
    for pairs, values in zip(config.pairs, found.astype(float).tolist(), strict=True):
        tokens = config.task(pairs).seq_len
        of_pairs = {
            **about,
            "workload": f"recall, {pairs} pairs",
            "pairs": pairs,
            "kv_bytes": tokens * cost.kv_bytes_per_token,
        }
        rows += [
            {**of_pairs, "seed": seed, "accuracy": digits(value, 5)}
            for seed, value in enumerate(values)
        ]
        low, high = interval(values)
        rows.append(
            {
                **of_pairs,
                "seed": None,
                "seeds": len(values),
                "accuracy": digits(statistics.mean(values), 5),
                # An accuracy is a share, which the quantile does not know.
                "interval": [digits(max(low, 0.0), 5), digits(min(high, 1.0), 5)],
            }
        )
    return rows


def measure(config: RecallBenchConfig) -> Iterator[list[dict[str, Any]]]:
    """Trains and asks each model in turn.

    Args:
      config: models, task and run.

    Yields:
      The rows of a model. Means behind the first model's carry `over`, by how much
      each seed is above the first model's, and `over_interval`.

    Raises:
      ValueError: the models' sizes differ too much.
    """
    _check_equal(config)
    first: np.ndarray | None = None
    for name, model in config.models.items():
        decoder = model.decoder()
        print(f"{name}: {'-'.join(decoder.pattern)}", flush=True)
        trained = train(decoder, config)
        found = accuracies(trained, config)
        rows = rows_of(name, decoder, trained, found, config)
        if first is not None:
            over = (found - first).astype(float).tolist()
            means = [row for row in rows if row["seed"] is None]
            for row, values in zip(means, over, strict=True):
                row["over"] = digits(statistics.mean(values), 5)
                row["over_interval"] = [digits(end, 5) for end in interval(values)]
        first = found if first is None else first
        yield rows


def main(argv: list[str]) -> int:
    """The command line; exit status 1 if a run was not finite."""
    parser = argparse.ArgumentParser(
        prog="jaxaccel bench recall",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_options(parser)
    options = parser.parse_args(argv)
    config = load_config("RecallBenchConfig", options.gin_file, options.gin_bindings)
    about, rows = stamp(options.commit), []
    for some in measure(config):
        for row in some:
            if row["seed"] is None:
                print(
                    f"  {row['pairs']:4d} pairs: {100 * row['accuracy']:5.1f} % right, "
                    f"95 % interval {row['interval']}",
                    flush=True,
                )
        rows += [{**row, **about} for row in some]
        # After each model: a later one may fail.
        results.write(options.json, rows)
    return 1 if any(row["note"] for row in rows) else 0
