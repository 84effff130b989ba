"""The loop: learns, resumes bit for bit, stops on NaN and SIGTERM, notes figures."""

import contextlib
import dataclasses
import os
import shutil
import signal

import chex
import jax
import numpy as np
import pytest
from jax.experimental import multihost_utils
from training_runs import tiny_decoder

from jaxaccel.data.pipeline import DataConfig, prepare
from jaxaccel.data.sources import InMemorySource
from jaxaccel.nn.rope import RopeConfig
from jaxaccel.training import loop
from jaxaccel.training.checkpoint import (
    latest_checkpoint,
    load_checkpoint_model,
    read_metadata,
)
from jaxaccel.training.config import OptimConfig, TrainConfig
from jaxaccel.training.loop import train
from jaxaccel.training.metrics import read_metrics


pytestmark = pytest.mark.usefixtures("quick_compile")

WORDS = ("def ", "return ", "self.", "value", " = ", "(", ")", ":\n    ", "None\n")


def texts(count=40):
    rng = np.random.default_rng(0)
    return tuple("".join(rng.choice(WORDS, rng.integers(3, 40))) for _ in range(count))


DATA = DataConfig(
    sources=(InMemorySource(texts=texts()),),
    tokenizer="byte",
    seq_len=32,
    batch_size=4,
    heldout_fraction=0.2,
    prefetch=0,
)
# One part a layer: each run traces and compiles them anew.
MODEL = tiny_decoder(vocab_size=260, single_part=True)
CONFIG = TrainConfig(
    num_steps=7,
    optim=OptimConfig(peak_lr=1e-2, warmup_steps=2),
    ema_decay=0.9,
    log_every=2,
    eval_batches=2,
    checkpoint_every=3,
)


def plain(state):
    """A state with its key as numbers, on the host."""
    rng = jax.random.key_data(state.rng)
    return jax.tree.map(np.asarray, dataclasses.replace(state, rng=rng))


def without_clock(rows):
    timed = {
        "time",
        "data_wait",
        "mfu",
        "seconds_per_step",
        "tflops",
        "tokens_per_second",
        "train_seconds",
    }
    return [{k: v for k, v in row.items() if k not in timed} for row in rows]


@pytest.fixture(scope="module", autouse=True)
def cached_programs(compile_cache):
    jax.config.update("jax_compilation_cache_dir", compile_cache)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)


@pytest.fixture(scope="module")
def uninterrupted(quick_compile, cached_programs, tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    samples = []

    def sampler(model, tokenizer):
        samples.append((model.config, tokenizer.vocab_size))
        return ["a sample"]

    result = train(CONFIG, MODEL, DATA, folder, sampler=sampler, config_text="text")
    assert samples == [(MODEL, 259)]
    return folder, result


def test_a_run_learns_and_notes_it(uninterrupted):
    folder, result = uninterrupted
    assert (result.step, result.interrupted) == (7, False)
    assert result.final_eval["nats_per_byte"] < result.start_eval["nats_per_byte"]
    assert result.samples == ("a sample",)
    assert result.checkpoint == latest_checkpoint(folder / "checkpoints")
    rows = read_metrics(folder)
    kinds = [row["kind"] for row in rows]
    assert kinds == [
        "baseline",
        *("eval", "train", "train", "train", "train", "train"),
        *("eval", "sample", "end"),
    ]
    # Every second step, at each checkpoint, and at the end.
    assert [r["step"] for r in rows if r["kind"] == "train"] == [2, 3, 4, 6, 7]
    last = [r for r in rows if r["kind"] == "train"][-1]
    for name in ("loss", "grad_norm", "lr", "tokens_per_second", "tflops"):
        assert last[name] > 0, name
    assert last["mfu"] is None
    assert 0 <= last["data_wait"] <= 1
    baseline = rows[0]["byte_bigram_nats_per_byte"]
    assert result.baseline["byte_bigram_nats_per_byte"] == baseline
    assert 0 < baseline < np.log(256)
    model, _ = load_checkpoint_model(folder)
    assert model.config == MODEL


def a_sample(model, tokenizer):
    return ["a sample"]


@contextlib.contextmanager
def killed_after(monkeypatch, step):
    """Ends the process of a run, as far as a test can, after a step."""

    class Kill(BaseException):
        pass

    advance = loop._Run._advance

    def dying(self, state, at, *rest):
        if at == step:
            raise Kill
        return advance(self, state, at, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(loop._Run, "_advance", dying)
        with pytest.raises(Kill):
            yield


def test_resume_after_kills_is_bit_for_bit(uninterrupted, tmp_path, monkeypatch):
    folder, want = uninterrupted
    # Before the first checkpoint: the next life starts over.
    with killed_after(monkeypatch, 2):
        train(CONFIG, MODEL, DATA, tmp_path)
    assert latest_checkpoint(tmp_path / "checkpoints") is None
    step = int(np.random.default_rng().integers(3, 7))
    with killed_after(monkeypatch, step):
        train(CONFIG, MODEL, DATA, tmp_path, resume=True)
    saved = read_metadata(latest_checkpoint(tmp_path / "checkpoints"))
    got = train(CONFIG, MODEL, DATA, tmp_path, resume=True, sampler=a_sample)
    chex.assert_trees_all_equal(plain(got.state), plain(want.state))
    assert got.final_eval == want.final_eval
    # Also the figures read as if nothing had happened.
    theirs, ours = read_metrics(folder), read_metrics(tmp_path)
    assert without_clock(ours) == without_clock(theirs)
    # The clock of the life before runs on.
    assert ours[-1]["train_seconds"] > saved["progress"]["train_seconds"] > 0


def test_resuming_a_finished_run_changes_nothing(uninterrupted, tmp_path, capsys):
    folder, want = uninterrupted
    shutil.copytree(folder, tmp_path / "run")
    before = read_metrics(folder)
    capsys.readouterr()
    got = train(CONFIG, MODEL, DATA, tmp_path / "run", resume=True, sampler=a_sample)
    assert got.final_eval == want.final_eval
    chex.assert_trees_all_equal(plain(got.state), plain(want.state))
    after = read_metrics(tmp_path / "run")
    assert without_clock(after) == without_clock(before)
    assert after[-1]["train_seconds"] == before[-1]["train_seconds"]
    assert got.checkpoint == tmp_path / "run" / "checkpoints" / "00000007"
    for name in ("metadata.json", "model/_METADATA"):
        files = [c / name for c in (got.checkpoint, want.checkpoint)]
        assert files[0].stat().st_mtime_ns == files[1].stat().st_mtime_ns
    # What people read says where in the workdir, not where the workdir is.
    said = capsys.readouterr().err
    assert said.splitlines()[0] == "resumed from checkpoints/00000007"
    assert said.splitlines()[-1].endswith("; checkpoint checkpoints/00000007")
    assert str(tmp_path) not in said


def test_sigterm_writes_a_checkpoint_and_returns(uninterrupted, tmp_path, monkeypatch):
    _, want = uninterrupted
    advance = loop._Run._advance

    def signalled(self, state, at, *rest):
        if at == 4:
            os.kill(os.getpid(), signal.SIGTERM)
        return advance(self, state, at, *rest)

    before = signal.getsignal(signal.SIGTERM)
    with monkeypatch.context() as patch:
        patch.setattr(loop._Run, "_advance", signalled)
        result = train(CONFIG, MODEL, DATA, tmp_path)
    assert (result.step, result.interrupted) == (5, True)
    assert result.checkpoint.name == "00000005"
    assert signal.getsignal(signal.SIGTERM) == before
    got = train(CONFIG, MODEL, DATA, tmp_path, resume=True)
    chex.assert_trees_all_equal(plain(got.state), plain(want.state))


@pytest.fixture(scope="module")
def poisoned(quick_compile, cached_programs, tmp_path_factory):
    """The folder of a run that was profiled before a batch made its loss NaN."""
    folder = tmp_path_factory.mktemp("poisoned")
    fetch = loop.global_batch

    def poison(batch, mesh):
        if np.asarray(batch.segment_ids).max() and poison.calls == 3:
            batch = dataclasses.replace(batch, tokens=batch.tokens + 1000)
        poison.calls += 1
        return fetch(batch, mesh)

    poison.calls = 0
    config = dataclasses.replace(CONFIG, checkpoint_every=0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "global_batch", poison)
        with pytest.raises(FloatingPointError, match=r"step 3: loss is nan"):
            train(config, MODEL, DATA, folder, profile_steps=(1, 2))
    return folder


def test_nan_stops_the_run_and_saves_the_batch(poisoned):
    saved = np.load(poisoned / "nan_batch.npz")
    assert saved["step"] == 3
    assert saved["batch/tokens"].shape == (4, 32)
    assert np.isnan(saved["metrics/loss"])
    assert np.isfinite(saved["param_norm/lm_head/kernel"])


def test_profile_steps_write_a_trace_with_named_layers(poisoned):
    traces = list((poisoned / "profile").rglob("*.xplane.pb"))
    assert len(traces) == 1
    assert b"layer_0_attention" in traces[0].read_bytes()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"config": {"accumulation": 3}},
            "batch_size is 4, .*'accumulation' of size 3",
        ),
        ({"config": {"mtp_loss_weight": 0.1}}, "num_mtp_layers=0"),
        ({"model": {"vocab_size": 100}}, "vocab_size is 100, the tokenizer has 259"),
    ],
)
def test_configs_that_do_not_fit(tmp_path, changes, message):
    config = dataclasses.replace(CONFIG, **changes.get("config", {}))
    model = dataclasses.replace(MODEL, **changes.get("model", {}))
    with pytest.raises(ValueError, match=message):
        train(config, model, DATA, tmp_path)


def test_workdir_is_not_overwritten(uninterrupted, tmp_path):
    folder, _ = uninterrupted
    with pytest.raises(ValueError, match="holds a run already"):
        train(CONFIG, MODEL, DATA, folder)
    with pytest.raises(FileNotFoundError, match="no run to resume"):
        train(CONFIG, MODEL, DATA, tmp_path, resume=True)


def test_resume_refuses_another_model(uninterrupted):
    folder, _ = uninterrupted
    model = dataclasses.replace(MODEL, d_model=8)
    with pytest.raises(ValueError, match="of another run"):
        train(CONFIG, model, DATA, folder, resume=True)
    # All arrays have the shapes that they had.
    attention = dataclasses.replace(MODEL.attention, rope=RopeConfig(theta=5e3))
    model = dataclasses.replace(MODEL, attention=attention)
    with pytest.raises(ValueError, match=r"attention\.rope\.theta is .*5000\.0 here"):
        train(CONFIG, model, DATA, folder, resume=True)


class TestSeveralProcesses:
    """What the second of two processes does; `first` is what process 0 tells."""

    @pytest.fixture(autouse=True)
    def second_of_two(self, monkeypatch):
        monkeypatch.setattr(jax, "process_count", lambda: 2)
        monkeypatch.setattr(jax, "process_index", lambda: 1)

    @pytest.mark.parametrize(
        ("first", "resume", "error"),
        [
            (0, False, None),
            (0, True, FileNotFoundError),
            (1, False, ValueError),
            (1, True, None),
        ],
    )
    def test_process_0_decides_what_a_workdir_holds(
        self, monkeypatch, tmp_path, first, resume, error
    ):
        name = "broadcast_one_to_all"
        monkeypatch.setattr(multihost_utils, name, lambda _: np.int32(first))
        # By now process 0 may have written anything.
        if not first:
            (tmp_path / "metrics.jsonl").write_text("")
        refused = pytest.raises(error) if error else contextlib.nullcontext()
        with refused:
            loop._check_workdir(tmp_path, resume)

    @pytest.mark.parametrize("is_same", [True, False])
    def test_all_processes_need_one_corpus(self, monkeypatch, tmp_path, is_same):
        corpus = prepare(DATA, tmp_path)

        def gather(own):
            return np.stack([own if is_same else own + np.uint8(1), own])

        monkeypatch.setattr(multihost_utils, "process_allgather", gather)
        refused = pytest.raises(ValueError, match=r"processes \[1\] have another")
        with contextlib.nullcontext() if is_same else refused:
            loop._check_corpus(corpus)
