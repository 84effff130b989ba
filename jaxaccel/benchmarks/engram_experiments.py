"""Experiments: models that differ in their memory, over seeds, on facts or real text.

All seeds of a model train side by side in one program, and models of one seed read the
same rows. Then held-out rows are asked for, with the memory and without: "silenced" is
the same model with a memory that adds nothing. What comes out are losses, no speeds.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import math
import statistics
import time as clock
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import jaxaccel.config.engram_bench  # noqa: F401  registers the configs
from jaxaccel.benchmarks.engram import RUN
from jaxaccel.benchmarks.engram_streams import StreamsModel
from jaxaccel.benchmarks.recall import interval
from jaxaccel.benchmarks.step import untuned
from jaxaccel.config.engram_bench import (
    AblatedConfig,
    EngramBenchConfig,
    StreamsConfig,
    TextConfig,
)
from jaxaccel.config.gin_utils import load_config
from jaxaccel.core.tree import ModelParts, model_parts
from jaxaccel.data.batch import PackedBatch
from jaxaccel.data.compressed_vocab import CompressedVocabulary, compressed_vocabulary
from jaxaccel.data.pipeline import prepare
from jaxaccel.models.decoder import Decoder
from jaxaccel.models.with_engram import with_tokenizer
from jaxaccel.nn.engram_stats import silenced
from jaxaccel.training.config import TrainConfig
from jaxaccel.training.optim import make_optimizer
from jaxaccel.training.step import TrainState, make_init, make_train_step
from pallas_kernels._common.bench import digits


@dataclasses.dataclass(frozen=True, kw_only=True)
class Text:
    """`TextConfig`, read: what a `PlantedConfig` offers.

    Attributes:
      config: the task.
      tokenizer: of the corpus.
      splits: tokens i32 of "train" and "heldout".
    """

    config: TextConfig
    tokenizer: Any
    splits: Mapping[str, np.ndarray]

    @classmethod
    def read(cls, config: TextConfig) -> Text:
        """Reads and tokenises the corpus.

        Raises:
          ValueError: a split is shorter than a row, or there are too many tokens.
        """
        corpus = prepare(config.data)
        splits = {}
        for split in ("train", "heldout"):
            found = [corpus.tokens(int(i)) for i in corpus.documents(split)]
            splits[split] = np.concatenate([*found, np.zeros(0, np.int32)])
            if len(splits[split]) <= config.seq_len:
                raise ValueError(
                    f"the {split} split has {len(splits[split])} tokens, a row needs "
                    f"{config.seq_len + 1}"
                )
        if corpus.tokenizer.vocab_size > config.vocab_size:
            raise ValueError(
                f"the tokenizer has {corpus.tokenizer.vocab_size} ids, "
                f"vocab_size={config.vocab_size}"
            )
        return cls(config=config, tokenizer=corpus.tokenizer, splits=splits)

    @property
    def kinds(self) -> tuple[str, ...]:
        """All targets are of one kind."""
        return ("text",)

    def arrays(self) -> dict[str, jax.Array]:
        """Both splits, and bytes of each token."""
        sizes = np.zeros(self.config.vocab_size, np.float32)
        sizes[: self.tokenizer.vocab_size] = self.tokenizer.token_bytes()
        arrays = {name: jnp.asarray(tokens) for name, tokens in self.splits.items()}
        return {**arrays, "bytes": jnp.asarray(sizes)}

    def rows(
        self, arrays: dict[str, jax.Array], key: jax.Array, batch: int
    ) -> tuple[PackedBatch, jax.Array]:
        """Pieces of the training text from random places on."""
        last = arrays["train"].shape[0] - self.config.seq_len - 1
        first = jax.random.randint(key, (batch,), 0, last + 1)
        return self._pieces(arrays, "train", first)

    def heldout(
        self, arrays: dict[str, jax.Array], index: jax.Array, batch: int
    ) -> tuple[PackedBatch, jax.Array]:
        """Pieces of the held-out text, from its beginning on; it begins anew."""
        length = self.config.seq_len
        count = (arrays["heldout"].shape[0] - 1) // length
        first = (index * batch + jnp.arange(batch, dtype=jnp.int32)) % count * length
        return self._pieces(arrays, "heldout", first)

    def _pieces(self, arrays, split, first):
        place = jnp.arange(self.config.seq_len + 1, dtype=jnp.int32)
        tokens = arrays[split][first[:, None] + place[None]]  # [B, T + 1]
        rows, targets = tokens[:, :-1], tokens[:, 1:]
        ones = jnp.ones(rows.shape, jnp.int32)
        return PackedBatch(
            tokens=rows,
            targets=targets,
            segment_ids=ones,
            positions=jnp.broadcast_to(place[None, :-1], rows.shape),
            loss_mask=ones.astype(jnp.float32),
            num_bytes=arrays["bytes"][targets],
        ), jnp.zeros(rows.shape, jnp.int32)


def builder(config: Any, tokenizer: Any) -> Callable[[jax.Array], nnx.Module]:
    """key -> a model.

    Args:
      config: a model's config, or one of `config.engram_bench`.
      tokenizer: whose classes a memory with `compress` hashes.
    """
    if isinstance(config, AblatedConfig):
        inner = builder(config.model, tokenizer)
        return lambda key: _zeroed(inner(key), config.zeroed)
    vocabulary: CompressedVocabulary | None = None
    if isinstance(config, StreamsConfig):
        streams, engram = config, config.engram
        if engram is not None and engram.compress:
            vocabulary = compressed_vocabulary(tokenizer)
            engram = dataclasses.replace(engram, pad_id=tokenizer.pad_id)
            engram = engram.with_vocabulary(vocabulary)
            streams = dataclasses.replace(config, engram=engram)

        def make(key: jax.Array) -> Any:
            return StreamsModel(streams, rngs=nnx.Rngs(key))

    else:
        decoder, vocabulary = with_tokenizer(config.decoder(), tokenizer)

        def make(key: jax.Array) -> Any:
            return Decoder(decoder, rngs=nnx.Rngs(key))

    def build(key: jax.Array) -> nnx.Module:
        model = make(key)
        if vocabulary is not None:
            model.memory.ngrams.set_vocabulary(vocabulary)
        return model

    return build


def _zeroed(model: nnx.Module, endings: Sequence[str]) -> nnx.Module:
    """The model with some parameters zero.

    Raises:
      ValueError: no parameter's name ends so.
    """
    graphdef, state = nnx.split(model)
    flat, found = [], set()
    for path, variable in nnx.to_flat_state(state):
        name = "/".join(map(str, path))
        ends = [ending for ending in endings if name.endswith(ending)]
        found.update(ends)
        if ends:
            variable = variable.replace(jnp.zeros_like(variable.get_value()))
        flat.append((path, variable))
    if missing := sorted(set(endings) - found):
        raise ValueError(
            f"AblatedConfig: zeroed names {missing}, which no parameter is"
        )
    return nnx.merge(graphdef, nnx.from_flat_state(flat))


@dataclasses.dataclass(kw_only=True)
class Contender:
    """A model ready to train.

    Attributes:
      name: of the model.
      parts: the model taken apart.
      begin: keys [seeds] -> the first states, leaves [seeds, ...].
      steps: (states, keys, arrays) -> (states, nats a target [seeds]), compiled.
      ask: (states, arrays) -> sums over held-out rows by kind, compiled; with the
        memory silenced a second time where there is one.
      compile_seconds: of all three.
    """

    name: str
    parts: ModelParts
    begin: Callable[..., Any]
    steps: Callable[..., Any]
    ask: Callable[..., Any]
    compile_seconds: float

    @property
    def table_parameters(self) -> int:
        """Those of the tables, which are among all."""
        return sum(leaf.size for leaf in _tables(self.parts).values())


def _tables(parts: ModelParts) -> dict[str, Any]:
    """The tables' rows by name."""
    named = {
        "/".join(map(str, path)): variable.get_value()
        for path, variable in nnx.to_flat_state(parts.buffers)
    }
    return {name: x for name, x in named.items() if name.endswith("table/rows")}


def count_parameters(parts: ModelParts) -> int:
    """Parameters of a model, the tables' rows included."""
    leaves = [*jax.tree.leaves(parts.params), *_tables(parts).values()]
    return sum(leaf.size for leaf in leaves)


def seed_keys(config: EngramBenchConfig, purpose: int) -> jax.Array:
    """One key a seed; `purpose` tells parameters and training apart."""
    key = jax.random.fold_in(jax.random.key(config.seed), purpose)
    return jax.random.split(key, config.num_seeds)


def _question(
    parts: ModelParts, config: EngramBenchConfig, task: Any, *, has_memory: bool
) -> Callable[..., Any]:
    """(params, buffers, arrays) -> nats, right answers, targets, bytes, by kind."""
    kinds = jnp.arange(len(task.kinds), dtype=jnp.int32)

    def sums(params, buffers, rows, kind):
        model: Any = parts.merge(params, buffers)
        logits = model(rows.tokens, rows.segment_ids, rows.positions).logits
        logp = jax.nn.log_softmax(logits.astype(jnp.float32))
        of_target = jnp.take_along_axis(logp, rows.targets[..., None], axis=-1)[..., 0]
        right = (jnp.argmax(logits, axis=-1) == rows.targets).astype(jnp.float32)
        values = jnp.stack([-of_target, right, jnp.ones_like(right), rows.num_bytes])
        own = (kind[None] == kinds[:, None, None]).astype(jnp.float32)  # [K, B, T]
        return jnp.einsum("vbt,kbt->vk", values, own)

    def ask(params, buffers, arrays):
        def one(total, index):
            rows, kind = task.heldout(arrays, index, config.batch_size)
            found = [sums(params, buffers, rows, kind)]
            if has_memory:
                found.append(sums(silenced(params), buffers, rows, kind))
            return total + jnp.stack(found), None

        zero = jnp.zeros((1 + has_memory, 4, len(task.kinds)), jnp.float32)
        index = jnp.arange(config.eval_batches, dtype=jnp.int32)
        return jax.lax.scan(one, zero, index)[0]

    return ask


def make_contender(
    name: str, model: Any, config: EngramBenchConfig, task: Any, arrays: Any
) -> Contender:
    """Compiles a model's programs.

    Args:
      name: of the model.
      model: its config.
      config: the experiment.
      task: what is read.
      arrays: of the task.
    """
    start = clock.perf_counter()
    build = builder(model, getattr(task, "tokenizer", None))
    train_config = TrainConfig(num_steps=config.num_steps, optim=config.optim)
    parts = model_parts(lambda: build(jax.random.key(0)))
    optimizer = make_optimizer(config.optim, config.num_steps)
    step = make_train_step(parts, optimizer, train_config)

    def first_state(key: jax.Array) -> TrainState:
        return make_init(lambda _: build(key), optimizer, train_config)()

    def steps(state, key, arrays):
        def one(state, _):
            own = jax.random.fold_in(key, state.step)
            rows, _ = task.rows(arrays, own, config.batch_size)
            state, metrics = step(state, rows)
            return state, metrics["nats_per_token"]

        state, losses = jax.lax.scan(one, state, length=config.steps_per_call)
        return state, jnp.mean(losses)

    ask = _question(parts, config, task, has_memory=bool(_tables(parts)))
    keys = seed_keys(config, 1)
    begin = jax.jit(jax.vmap(first_state))
    states = jax.eval_shape(begin, keys)
    run = jax.jit(jax.vmap(steps, in_axes=(0, 0, None)), donate_argnums=0)
    answer = jax.jit(jax.vmap(ask, in_axes=(0, 0, None)))
    options = untuned()
    asked = answer.lower(states.params, states.buffers, arrays)
    return Contender(
        name=name,
        parts=parts,
        begin=begin.lower(keys).compile(options),
        steps=run.lower(states, keys, arrays).compile(options),
        ask=asked.compile(options),
        compile_seconds=clock.perf_counter() - start,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """What became of a model's seeds.

    Attributes:
      contender: the model.
      nats, right: f64[seeds, kinds], nats a held-out target, and share of those that
        had the largest logit.
      per_byte: f64[seeds], nats a byte of all targets.
      silent_nats, silent_right: the same without the memory, `None` where it has none.
      curve: f32[calls, seeds], training losses.
      seconds: of training.
      is_finite: whether all losses and gradients were.
    """

    contender: Contender
    nats: np.ndarray
    right: np.ndarray
    per_byte: np.ndarray
    silent_nats: np.ndarray | None
    silent_right: np.ndarray | None
    curve: np.ndarray
    seconds: float
    is_finite: bool


def train(contender: Contender, config: EngramBenchConfig, arrays: Any) -> Outcome:
    """Trains all seeds of a model, and asks."""
    states = contender.begin(seed_keys(config, 0))
    keys, curve, start = seed_keys(config, 1), [], clock.perf_counter()
    for _ in range(config.num_steps // config.steps_per_call):
        states, loss = contender.steps(states, keys, arrays)
        curve.append(np.asarray(loss))
    seconds = clock.perf_counter() - start
    sums = np.asarray(contender.ask(states.params, states.buffers, arrays), np.float64)
    nats, right, count, num_bytes = (sums[:, :, i] for i in range(4))  # [seeds, 2, K]
    has_memory = sums.shape[1] > 1
    return Outcome(
        contender=contender,
        nats=nats[:, 0] / count[:, 0],
        right=right[:, 0] / count[:, 0],
        per_byte=nats[:, 0].sum(axis=-1) / num_bytes[:, 0].sum(axis=-1),
        silent_nats=nats[:, 1] / count[:, 1] if has_memory else None,
        silent_right=right[:, 1] / count[:, 1] if has_memory else None,
        curve=np.stack(curve),
        seconds=seconds,
        is_finite=bool(np.all(np.asarray(states.finite))),
    )


def _of_seeds(values: np.ndarray) -> dict[str, Any]:
    """Seeds' values, their mean and its 95 % interval."""
    found = [float(value) for value in values]
    return {
        "by_seed": [digits(value, 5) for value in found],
        "mean": digits(statistics.mean(found), 5),
        "interval": [digits(end, 5) for end in interval(found)],
    }


def row_of(
    outcome: Outcome, first: Outcome | None, config: EngramBenchConfig, task: Any
) -> dict[str, Any]:
    """What is written of a model.

    Args:
      outcome: of the model.
      first: of the model that others are held against, `None` for that one itself.
      config: the experiment.
      task: what was read.

    Returns:
      A row; `nats` has "by_seed", "mean" and "interval" of the mean over all kinds,
      `over` the same of its difference from the first model's, seed by seed, which is
      named in `over_model`; see `engram.of_one_run`.
    """
    contender = outcome.contender
    row: dict[str, Any] = {
        "subject": "experiment",
        "op": config.name,
        "workload": type(config.task).__name__,
        "implementation": "jaxaccel",
        "model": contender.name,
        "dtype": "float32",
        "parameters": count_parameters(contender.parts),
        "table_parameters": contender.table_parameters,
        "table_rows": sum(x.shape[0] for x in _tables(contender.parts).values()),
        "seeds": config.num_seeds,
        "steps": config.num_steps,
        "batch": config.batch_size,
        "seed": config.seed,
        "over_model": (first or outcome).contender.name,
        "nats": _of_seeds(outcome.nats.mean(axis=-1)),
        "nats_per_byte": _of_seeds(outcome.per_byte),
        "curve": [[digits(float(x), 5) for x in call] for call in outcome.curve],
        "train_s": digits(outcome.seconds),
        "compile_s": digits(contender.compile_seconds),
        "note": "" if outcome.is_finite else "a loss or gradient was not finite",
    }
    if first is not None:
        row["over"] = _of_seeds((outcome.nats - first.nats).mean(axis=-1))
    for index, kind in enumerate(task.kinds):
        found = {"nats": outcome.nats, "right": outcome.right}
        if outcome.silent_nats is not None and outcome.silent_right is not None:
            found["silent_nats"] = outcome.silent_nats
            found["silent_right"] = outcome.silent_right
        row[kind] = {key: _of_seeds(value[:, index]) for key, value in found.items()}
    return row


def slots_fit(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """A line through the seeds' losses over log2 of the tables' rows.

    Args:
      rows: of a run's models; those without a table are left out.

    Returns:
      A row with `nats_per_doubling` and `r_squared`.
    """
    points = [
        (math.log2(row["table_rows"]), value)
        for row in rows
        if row["table_rows"]
        for value in row["nats"]["by_seed"]
    ]
    x, y = np.asarray(points, np.float64).T
    slope, base = np.polyfit(x, y, 1)
    rest = np.sum((y - slope * x - base) ** 2)
    return {
        **{key: rows[0][key] for key in ("subject", "op", *RUN)},
        "implementation": "jaxaccel",
        "model": "line",
        "nats_per_doubling": digits(float(slope)),
        "nats_at_one_row": digits(float(base)),
        "r_squared": digits(float(1 - rest / np.sum((y - y.mean()) ** 2))),
        "note": "",
    }


def check_equal(config: EngramBenchConfig, tokenizer: Any) -> None:
    """Refuses models of different sizes, where they must be equal.

    Raises:
      ValueError: their parameters differ by more than `equal_within`.
    """
    if not config.equal_within:
        return
    sizes = {}
    for name, model in config.models.items():
        build = builder(model, tokenizer)
        parts = model_parts(lambda build=build: build(jax.random.key(0)))
        sizes[name] = count_parameters(parts)
    least, most = min(sizes.values()), max(sizes.values())
    if most - least > config.equal_within * least:
        raise ValueError(
            f"bench engram: parameters {sizes} differ by more than "
            f"equal_within={config.equal_within}"
        )


def measure(
    config: EngramBenchConfig, *, jobs: int = 1
) -> Iterator[list[dict[str, Any]]]:
    """Trains and asks each model in turn.

    Args:
      config: the experiment.
      jobs: models that are compiled at the same time.

    Yields:
      The row of a model; last, with `fit_slots` and tables of more than one size, that
      of the line.

    Raises:
      ValueError: the models' sizes differ too much.
    """
    task = config.task
    if isinstance(task, TextConfig):
        task = Text.read(task)
    check_equal(config, getattr(task, "tokenizer", None))
    arrays, start = task.arrays(), clock.perf_counter()

    def make(item: tuple[str, Any]) -> Contender:
        return make_contender(*item, config, task, arrays)

    rows, first = [], None
    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        # One model trains while those behind it are compiled; `train_s` is no speed.
        for contender in pool.map(make, config.models.items()):
            ready = clock.perf_counter() - start
            outcome = train(contender, config, arrays)
            row = row_of(outcome, first, config, task)
            first = outcome if first is None else first
            rows.append(row)
            _show(row, task, ready)
            yield [row]
    sizes = {row["table_rows"] for row in rows if row["table_rows"]}
    if config.fit_slots and len(sizes) > 1:
        line = slots_fit(rows)
        print(line)
        yield [line]


def _show(row: Mapping[str, Any], task: Any, ready: float) -> None:
    text = f"{row['model']}: {row['parameters'] / 1e6:.2f} M, {row['nats']['mean']:.4f}"
    if "over" in row:
        text += f", over the first {row['over']['mean']:+.4f} {row['over']['interval']}"
    for kind in task.kinds:
        own = row[kind]
        text += f"; {kind} {100 * own['right']['mean']:.1f} %"
        if "silent_right" in own:
            text += f" (silent {100 * own['silent_right']['mean']:.1f} %)"
    print(f"{text}; compiled at {ready:.0f} s, {row['train_s']} s", flush=True)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds this subject's options."""
    group = parser.add_argument_group("experiment")
    group.add_argument(
        "--gin_file", action="append", required=True, help="may be given repeatedly"
    )
    group.add_argument(
        "--gin_bindings", action="append", default=[], help="bindings that override"
    )
    group.add_argument(
        "--models",
        help="separated by commas; the first is what others are held against",
    )
    group.add_argument(
        "--jobs", type=int, default=1, help="models compiled at the same time"
    )


def run(options: argparse.Namespace) -> Iterator[list[dict[str, Any]]]:
    """The rows of the subject; see `add_arguments`."""
    config = load_config("EngramBenchConfig", options.gin_file, options.gin_bindings)
    if options.models:
        names = options.models.split(",")
        if unknown := sorted(set(names) - set(config.models)):
            raise ValueError(
                f"bench engram: no model {', '.join(unknown)}, allowed are "
                f"{', '.join(config.models)}"
            )
        chosen = {name: config.models[name] for name in names}
        config = dataclasses.replace(config, models=chosen)
    yield from measure(config, jobs=options.jobs)


def is_good(row: Mapping[str, Any]) -> bool:
    """Whether a run was finite, for the exit status."""
    return not row["note"]
