"""The training loop: data in, steps, evaluations, checkpoints, figures out."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import os
import pathlib
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from jaxaccel.core.distributed import from_first_process, processes_that_differ
from jaxaccel.core.sharding import (
    batch_sharding,
    check_divisible,
    check_heads,
    global_batch,
    make_mesh,
)
from jaxaccel.core.tree import ModelParts, model_parts
from jaxaccel.data.batch import PackedBatch
from jaxaccel.data.bigram import token_bigram_baseline
from jaxaccel.data.corpus import Corpus
from jaxaccel.data.pipeline import DataConfig, make_iterator, prepare
from jaxaccel.models.config import DecoderConfig
from jaxaccel.models.decoder import Decoder
from jaxaccel.models.with_engram import with_tokenizer
from jaxaccel.nn.router import MoEConfig
from jaxaccel.training.checkpoint import (
    CheckpointExtras,
    latest_checkpoint,
    read_metadata,
    repair_checkpoints,
    restore_checkpoint,
    save_checkpoint,
)
from jaxaccel.training.config import TrainConfig
from jaxaccel.training.evaluation import Heldout
from jaxaccel.training.guards import Profiler, save_bad_batch, termination
from jaxaccel.training.metrics import (
    METRICS_FILE,
    Console,
    MetricsWriter,
    Window,
    progress_line,
    read_metrics,
)
from jaxaccel.training.offload import (
    OffloadLadder,
    PlannedStep,
    check_pinned_limit,
    scan_sizes,
)
from jaxaccel.training.optim import host_state_bytes, make_optimizer
from jaxaccel.training.perf import (
    mean_document_length,
    peak_memory_bytes,
    throughput,
    training_flops_per_token,
)
from jaxaccel.training.step import (
    TrainState,
    make_init,
    make_train_step,
    state_shardings,
)


_LOGGER = logging.getLogger(__name__)

Sampler = Callable[[Decoder, Any], Sequence[str]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainResult:
    """How a run ended.

    Attributes:
      step: optimizer steps done.
      state: the last state.
      start_eval: held-out figures before the first step of this call, see `metrics`;
        empty without held-out text, or where a resumed run's checkpoint has none.
      final_eval: the same after the last step; empty if interrupted.
      baseline: byte and token bigram on held-out text, nats per byte.
      checkpoint: the last checkpoint.
      samples: what the sampler wrote.
      interrupted: a SIGTERM ended the run; its checkpoint is there to resume from.
    """

    step: int
    state: TrainState
    start_eval: dict[str, float]
    final_eval: dict[str, float]
    baseline: dict[str, float]
    checkpoint: pathlib.Path
    samples: tuple[str, ...]
    interrupted: bool


def train(
    config: TrainConfig,
    model_config: Any,
    data_config: DataConfig,
    workdir: str | os.PathLike[str],
    *,
    resume: bool = False,
    profile_steps: tuple[int, int] | None = None,
    sampler: Sampler | None = None,
    config_text: str | None = None,
    corpus_dir: str | os.PathLike[str] | None = None,
) -> TrainResult:
    """Trains a decoder.

    A SIGTERM ends the run after the step at hand: it writes a checkpoint and returns
    with `interrupted=True`. Exiting with status 143 then tells a scheduler that the run
    is to be resumed.

    Args:
      config: steps, optimizer, evaluation, checkpoints, mesh.
      model_config: a `DecoderConfig`, or a model's config with `.decoder()`.
      data_config: corpus, batch size and sequence length.
      workdir: folder of the run, shared by all processes.
      resume: go on from the newest checkpoint in `workdir`, bit for bit (on a GPU see
        `TrainConfig`). Without one the run starts over.
      profile_steps: (first, end): write a profiler trace of steps first to end - 1.
      sampler: (model, tokenizer) -> texts, called at the end.
      config_text: text that reproduces the run, kept in each checkpoint.
      corpus_dir: where the tokenised corpus is kept, for runs that share one; by
        default in `workdir`.

    Returns:
      How the run ended.

    Raises:
      ValueError: the configs don't fit each other or the devices, `workdir` holds a
        run and `resume` is false, or the checkpoint is of another run.
      FileNotFoundError: `resume` without a run in `workdir`.
      FloatingPointError: a loss or gradient is not finite; the batch is in
        `nan_batch.npz` in `workdir`.
      OSError: a checkpoint could not be written.
    """
    folder = pathlib.Path(workdir).absolute()
    _check_workdir(folder, resume)
    if config.compile_cache is not None:
        jax.config.update("jax_compilation_cache_dir", config.compile_cache)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    decoder = model_config
    if not isinstance(decoder, DecoderConfig):
        decoder = model_config.decoder()
    console = Console(is_quiet=jax.process_index() != 0)
    corpus = folder / "corpus" if corpus_dir is None else pathlib.Path(corpus_dir)
    run = _Run(config, decoder, data_config, folder, console, config_text, corpus)
    with contextlib.ExitStack() as stack:
        start = run.start(resume)
        stack.callback(run.close)
        stop = stack.enter_context(termination())
        with jax.set_mesh(run.mesh):
            return run.train(start, stop, profile_steps, sampler)


def _check_workdir(folder: pathlib.Path, resume: bool) -> None:
    holds_run = (folder / METRICS_FILE).is_file() or (folder / "checkpoints").is_dir()
    if jax.process_index() == 0:
        folder.mkdir(parents=True, exist_ok=True)
        if resume:
            repair_checkpoints(folder / "checkpoints")
    # A process that comes late would see what process 0 has written by then.
    holds_run = bool(from_first_process(holds_run))
    if resume and not holds_run:
        raise FileNotFoundError(f"{folder} holds no run to resume")
    if holds_run and not resume:
        raise ValueError(f"{folder} holds a run already; resume it, or choose another")


def _check_corpus(corpus: Corpus) -> None:
    if others := processes_that_differ(corpus.fingerprint):
        raise ValueError(
            f"processes {others} have another corpus than process 0; that of process "
            f"{jax.process_index()} is {corpus.fingerprint[:16]}"
        )


@dataclasses.dataclass(frozen=True)
class _Pending:
    """A step that the device may still be working on."""

    step: int
    metrics: jax.Array
    batch: PackedBatch


class _Run:
    """One call of `train`."""

    def __init__(
        self,
        config: TrainConfig,
        decoder: DecoderConfig,
        data_config: DataConfig,
        folder: pathlib.Path,
        console: Console,
        config_text: str | None,
        corpus_dir: pathlib.Path,
    ):
        self.config = config
        self.decoder = decoder
        self.data_config = data_config
        self.folder = folder
        self.checkpoints = folder / "checkpoints"
        self.console = console
        self.config_text = config_text
        self.mesh = make_mesh(config.mesh)
        self.devices = list(self.mesh.devices.flat)
        self._check_sizes()
        console.status("reading the corpus", is_progress=False)
        self.corpus: Corpus = prepare(data_config, corpus_dir)
        _check_corpus(self.corpus)
        vocab = self.corpus.tokenizer.vocab_size
        if decoder.vocab_size < vocab:
            raise ValueError(
                f"the model's vocab_size is {decoder.vocab_size}, the tokenizer has "
                f"{vocab} tokens"
            )
        self.decoder, self.classes = with_tokenizer(decoder, self.corpus.tokenizer)
        self.parts: ModelParts = model_parts(lambda: self._build(jax.random.key(0)))
        self.optimizer: optax.GradientTransformation = make_optimizer(
            config.optim, config.num_steps
        )
        self.last_eval: tuple[int, dict[str, float]] = (-1, {})
        self.resumed_from: pathlib.Path | None = None
        self.tokens_seen = 0.0
        self.train_seconds = 0.0
        self.writer: MetricsWriter | None = None
        self.iterator: Any = None
        self.baseline: dict[str, float] = {}

    def _check_sizes(self) -> None:
        rows, mesh = self.data_config.batch_size, self.mesh
        parts = mesh.shape["data"] * mesh.shape["fsdp"]
        accumulation = self.config.accumulation
        check_divisible("batch_size", rows, "accumulation", accumulation)
        check_divisible(
            "rows of a micro-batch", rows // accumulation, "data x fsdp", parts
        )
        if mesh.shape["tensor"] > 1 and not self.config.mesh.replicate_indivisible:
            check_heads(self.decoder, mesh.shape["tensor"])
        if self.config.mtp_loss_weight and not self.decoder.num_mtp_layers:
            raise ValueError(
                f"mtp_loss_weight is {self.config.mtp_loss_weight}, but the model has "
                "num_mtp_layers=0"
            )
        if self.config.max_seconds is not None and jax.process_count() > 1:
            raise ValueError("max_seconds needs a single process: clocks disagree")

    def _build(self, key: jax.Array) -> Decoder:
        model = Decoder(self.decoder, rngs=nnx.Rngs(key))
        if self.classes is not None:
            model.memory.ngrams.set_vocabulary(self.classes)
        return model

    # Setting up.

    def start(self, resume: bool) -> TrainState:
        """Makes or restores the state and opens everything that a run writes to."""
        config, mesh = self.config, self.mesh
        self.init = make_init(self._build, self.optimizer, config)
        abstract = jax.eval_shape(self.init)
        shardings = state_shardings(abstract, mesh, config)
        on_host = host_state_bytes(shardings.opt_state, abstract.opt_state)
        check_pinned_limit(on_host, config)
        found = latest_checkpoint(self.checkpoints) if resume else None
        state, data_state = self._first_state(found, abstract, shardings)
        if found is not None:
            self._go_on_from(found)
        self.iterator = make_iterator(
            self.corpus,
            self.data_config,
            "train",
            process_index=jax.process_index(),
            process_count=jax.process_count(),
            start=data_state,
        )
        if jax.process_index() == 0:
            self.writer = MetricsWriter(
                self.folder,
                start_step=None if found is None else int(state.step),
                tensorboard=config.tensorboard,
            )
        self.train_step: Any = PlannedStep(
            OffloadLadder(
                self.decoder,
                scan_sizes(self.decoder, self.data_config, config, mesh),
                config,
                reserved=on_host,
            ),
            functools.partial(self._jitted_step, shardings),
            lambda: self._first_state(found, abstract, shardings)[0],
        )
        self.heldout = Heldout(
            self.corpus, self.data_config, self.parts, config, self.mesh
        )
        if not self.heldout.batches:
            self.console.say("no held-out text: nothing will be evaluated")
        elif jax.process_index() == 0:
            self.baseline = self._baseline()
        if self.last_eval[1]:
            self._write("eval", *self.last_eval)
        return state

    def _first_state(
        self, found: pathlib.Path | None, abstract: TrainState, shardings: TrainState
    ) -> tuple[TrainState, Any]:
        """Makes or restores the state; the same one whenever it is called."""
        if found is None:
            self.console.status("initialising the model", is_progress=False)
            # On a CPU, optimising each random array takes far longer than drawing it,
            # once, can save.
            on_cpu = jax.default_backend() == "cpu"
            quick = {"xla_backend_optimization_level": 0} if on_cpu else None
            jitted = jax.jit(self.init, out_shardings=shardings)
            return jitted.lower().compile(compiler_options=quick)(), None
        template = jax.tree.map(
            lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
            abstract,
            shardings,
        )
        return restore_checkpoint(found, template, self.corpus.tokenizer, self.decoder)

    def _go_on_from(self, checkpoint: pathlib.Path) -> None:
        metadata = read_metadata(checkpoint)
        if metadata["metrics"]:
            self.last_eval = (metadata["step"], metadata["metrics"])
        progress = metadata.get("progress", {})
        self.tokens_seen = progress.get("tokens_seen", 0.0)
        self.train_seconds = progress.get("train_seconds", 0.0)
        self.resumed_from = checkpoint
        self.console.say(f"resumed from {self._shown(checkpoint)}")

    def _shown(self, path: pathlib.Path) -> pathlib.Path:
        """A path as people read it, who know the workdir."""
        return path.relative_to(self.folder)

    def _baseline(self) -> dict[str, float]:
        names = ("byte_bigram_nats_per_byte", "token_bigram_nats_per_byte")
        for row in read_metrics(self.folder):
            if row["kind"] == "baseline":
                return {name: row[name] for name in names}
        self.console.status("counting the bigram baselines", is_progress=False)
        values = self.heldout.byte_bigram(), token_bigram_baseline(self.corpus)
        baseline = dict(zip(names, values, strict=True))
        self._write("baseline", 0, baseline)
        return baseline

    def _jitted_step(self, shardings: TrainState, decoder: DecoderConfig) -> Any:
        """The step of the model as planned: `decoder` is ours in another memory."""
        replicated = NamedSharding(self.mesh, PartitionSpec())
        rate, parts = 0.0, self.parts
        if isinstance(decoder.mlp, MoEConfig):
            rate = decoder.mlp.bias_update_rate
        if decoder != self.decoder:
            parts = model_parts(lambda: Decoder(decoder, rngs=nnx.Rngs(0)))
        step = make_train_step(
            parts, self.optimizer, self.config, router_bias_rate=rate
        )
        names: list[str] = []

        def packed_step(state: TrainState, batch: PackedBatch):
            state, metrics = step(state, batch)
            names[:] = sorted(metrics)
            # One small array: reading it costs one transfer, not one a figure.
            return state, jnp.stack([metrics[name] for name in names])

        self.metric_names = names
        return jax.jit(
            packed_step,
            donate_argnums=0,
            in_shardings=(shardings, batch_sharding(self.mesh)),
            out_shardings=(shardings, replicated),
        )

    def close(self) -> None:
        """Ends workers and closes files."""
        if self.iterator is not None:
            self.iterator.close()
        if self.writer is not None:
            self.writer.close()

    # What happens between steps.

    def _write(self, kind: str, step: int, values: dict[str, Any]) -> None:
        if self.writer is not None:
            self.writer.write(kind, step, values)

    def evaluate(self, state: TrainState, step: int) -> dict[str, float]:
        """Held-out figures; prints and notes them."""
        if not self.heldout.batches or self.last_eval[0] == step:
            return self.last_eval[1]
        self.console.status(f"step {step}: evaluating", is_progress=False)
        values = self.heldout.evaluate(state)
        self._write("eval", step, values)
        text = f"step {step}: held-out {values['nats_per_byte']:.4f} nats/byte"
        if "ema_nats_per_byte" in values:
            text += f" (running mean {values['ema_nats_per_byte']:.4f})"
        if self.baseline:
            text += (
                f"; byte bigram {self.baseline['byte_bigram_nats_per_byte']:.4f} on "
                "the same text, token bigram "
                f"{self.baseline['token_bigram_nats_per_byte']:.4f} on all of it"
            )
        self.console.say(text)
        self.last_eval = (step, values)
        return values

    def checkpoint(self, state: TrainState, step: int) -> pathlib.Path:
        """Saves the state and where the data stands."""
        self.console.status(f"step {step}: writing a checkpoint", is_progress=False)
        is_evaluated = self.last_eval[0] == step
        extras = CheckpointExtras(
            model_config=self.decoder,
            tokenizer=self.corpus.tokenizer,
            data_state=self.iterator.get_state(),
            config_text=self.config_text,
            metrics=self.last_eval[1] if is_evaluated else {},
            progress={
                "tokens_seen": self.tokens_seen,
                "train_seconds": self.train_seconds,
            },
        )
        return save_checkpoint(
            self.checkpoints, state, extras, keep=self.config.keep_checkpoints
        )

    # The steps.

    def train(
        self,
        state: TrainState,
        stop: Callable[[int], bool],
        profile_steps: tuple[int, int] | None,
        sampler: Sampler | None,
    ) -> TrainResult:
        """Runs the steps that are left, then what ends a run."""
        config = self.config
        first = step = int(state.step)
        # A resumed run evaluates only where an uninterrupted one would.
        if self.resumed_from is None or self._due(step, config.eval_every):
            self.evaluate(state, step)
        start_eval = self.last_eval[1]
        window, pending = Window(), None
        began, seconds_before = time.perf_counter(), self.train_seconds
        interrupted = is_over = False
        profiler = Profiler(profile_steps, self.folder / "profile")
        self.console.status("compiling the step", is_progress=False)
        while step < config.num_steps and not is_over:
            profiler.before(step, state)
            state, pending, done = self._advance(state, step, window, pending)
            step += 1
            interrupted = stop(step)
            seconds = time.perf_counter() - began
            self.train_seconds = seconds_before + seconds
            is_over = interrupted or (
                config.max_seconds is not None and seconds >= config.max_seconds
            )
            is_last = is_over or step == config.num_steps
            if done is not None:
                self._collect(done, state, window)
            every = (config.log_every, config.eval_every, config.checkpoint_every)
            if is_last or self._due(step, *every):
                self._collect(pending, state, window)
                pending = None
            if step == first + 1 and pending is not None:
                # Speed is told without the time that the compiler took.
                jax.block_until_ready(state.step)
                window.restart(1)
            # A row at each checkpoint too: a resumed run then has the same rows.
            if is_last or self._due(step, config.log_every, config.checkpoint_every):
                self._log(step, window)
                window = Window()
            pause = time.perf_counter()
            if not is_last and self._due(step, config.eval_every):
                self.evaluate(state, step)
            if not is_last and self._due(step, config.checkpoint_every):
                self.checkpoint(state, step)
            window.paused += time.perf_counter() - pause
        profiler.close(state)
        final_eval = {} if interrupted else self.evaluate(state, step)
        path = self.resumed_from
        if path is None or step > first or final_eval != start_eval:
            path = self.checkpoint(state, step)
        samples: tuple[str, ...] = ()
        if sampler is not None and not interrupted:
            samples = self._sample(state, step, sampler)
        end = {"interrupted": interrupted, "train_seconds": self.train_seconds}
        self._write("end", step, end)
        self.console.say(
            f"{'interrupted' if interrupted else 'finished'} at step {step} after "
            f"{self.train_seconds:.1f} s; checkpoint {self._shown(path)}"
        )
        return TrainResult(
            step=step,
            state=state,
            start_eval=start_eval,
            final_eval=final_eval,
            baseline=self.baseline,
            checkpoint=path,
            samples=samples,
            interrupted=interrupted,
        )

    def _due(self, step: int, *every: int) -> bool:
        """Whether one of these periods, 0 for never, ends with this step."""
        return any(n and step % n == 0 for n in every)

    def _advance(
        self, state: TrainState, step: int, window: Window, pending: _Pending | None
    ) -> tuple[TrainState, _Pending, _Pending | None]:
        """Gives the device a step; returns the one before for its figures.

        The host fetches a batch while the device works on the step before, and reads
        figures one step late, so that the device always has work.
        """
        asked = time.perf_counter()
        host_batch = next(self.iterator)
        batch = global_batch(host_batch, self.mesh)
        if pending is None or pending.metrics.is_ready():  # pyrefly: ignore
            # An upper bound: the device ran dry at some moment since.
            window.starved += time.perf_counter() - asked
        with jax.profiler.StepTraceAnnotation("train", step_num=step):
            state, metrics = self.train_step(state, batch)
        return state, _Pending(step, metrics, host_batch), pending

    def _collect(self, done: _Pending, state: TrainState, window: Window) -> None:
        """Reads a step's figures; stops the run if they are not finite."""
        values = np.asarray(done.metrics)
        window.rows.append(values)
        if values[self.metric_names.index("finite")]:
            return
        figures = dict(zip(self.metric_names, values.tolist(), strict=True))
        path = save_bad_batch(self.folder, done.step, state, done.batch, figures)
        raise FloatingPointError(
            f"step {done.step}: loss is {figures['loss']}, gradient norm is "
            f"{figures['grad_norm']}; the batch and the parameters' norms are in {path}"
        )

    @functools.cached_property
    def _flops_per_token(self) -> float:
        length = self.data_config.seq_len
        if self.heldout.batches:
            length = mean_document_length(self.heldout.batches[0])
        return training_flops_per_token(
            self.decoder,
            length,
            with_mtp=bool(self.config.mtp_loss_weight),
        )

    def _log(self, step: int, window: Window) -> None:
        columns = dict(
            zip(self.metric_names, np.stack(window.rows).T.tolist(), strict=True)
        )
        tokens = columns.pop("tokens")
        del columns["finite"]
        row: dict[str, Any] = {k: float(np.mean(v)) for k, v in columns.items()}
        row["lr"] = columns["lr"][-1]
        timed = tokens[window.untimed :]
        speed = throughput(
            sum(timed), window.seconds, self._flops_per_token, self.devices
        )
        row |= dataclasses.asdict(speed)
        self.tokens_seen += sum(tokens)
        row["tokens_seen"] = self.tokens_seen
        row["seconds_per_step"] = window.seconds / len(timed)
        row["data_wait"] = min(window.starved / max(window.seconds, 1e-9), 1.0)
        row["peak_memory_bytes"] = peak_memory_bytes()
        self._write("train", step, row)
        self.console.status(progress_line(self.config.num_steps, step, row))

    def _sample(
        self, state: TrainState, step: int, sampler: Sampler
    ) -> tuple[str, ...]:
        self.console.status("drawing a sample", is_progress=False)
        model: Any = self.parts.merge(state.params, state.buffers)
        samples = tuple(sampler(model, self.corpus.tokenizer))
        for text in samples:
            self._write("sample", step, {"text": text})
            self.console.say(f"--- sample\n{text}")
        return samples
