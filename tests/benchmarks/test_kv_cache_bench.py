"""Caches are asked what dense attention knows, and timed over contexts never read."""

import dataclasses
import functools
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxaccel import benchmarks
from jaxaccel.benchmarks import (
    kv_cache,
    kv_cache_accuracy,
    kv_cache_check,
    kv_cache_throughput,
    ruler,
)
from jaxaccel.benchmarks.guards import KernelMissing
from jaxaccel.benchmarks.kv_cache_fill import fill
from jaxaccel.cache import shadowkv, shadowkv_attend
from jaxaccel.cache.full import DenseCacheConfig
from jaxaccel.cache.h2o import H2OCacheConfig
from jaxaccel.cache.plan import PolicyCache
from jaxaccel.cache.quest import QuestCacheConfig
from jaxaccel.cache.reads import tokens_read
from jaxaccel.cache.shadowkv import ShadowKVCacheConfig
from jaxaccel.cache.streaming import StreamingCacheConfig
from jaxaccel.config.gin_utils import load_config
from jaxaccel.config.kv_cache import KVCacheBenchConfig
from jaxaccel.config.ruler import RopeDecoderConfig, RulerBenchConfig
from jaxaccel.data.ruler import RulerConfig
from jaxaccel.models.decoder import init_decoder
from jaxaccel.training.config import OptimConfig
from pallas_kernels._common.bench import Ceilings
from pallas_kernels._common.dispatch import Choice


FOLDER = pathlib.Path(__file__).parents[2] / "experiments" / "kv_cache"
MODEL = RopeDecoderConfig(
    vocab_size=32,
    d_model=16,
    num_layers=1,
    num_heads=2,
    num_kv_heads=1,
    head_dim=8,
    d_ff=16,
    tie_embeddings=True,
    implementation="xla",
)


LIMITS = Ceilings(gbps=1.0, tflops=1.0)


@functools.cache
def spec_of_layer():
    decoder = MODEL.decoder()
    return jax.eval_shape(lambda: init_decoder(decoder)).layers[0].mixer.cache_spec


@functools.cache
def drawn(decoder, seed=0):
    """As `init_decoder`, by one program; no test changes the weights."""
    graphdef, _ = nnx.split(jax.eval_shape(lambda: init_decoder(decoder)))
    arrays = jax.jit(lambda: nnx.state(init_decoder(decoder, seed)))()
    return nnx.merge(graphdef, arrays)


@pytest.fixture(autouse=True)
def one_model(monkeypatch):
    monkeypatch.setattr(kv_cache_throughput, "init_decoder", drawn)


@pytest.fixture(autouse=True, scope="module")
def fast_compile():
    """Compiling takes most of the time here; running takes next to none."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


def config(**changes):
    return RulerBenchConfig(
        **{
            "model": MODEL,
            "rows": RulerConfig(
                context=32,
                num_questions=1,
                num_words=8,
                num_keys=8,
                num_values=4,
                most_pairs=2,
            ),
            "phases": ((16, 4, 2),),
            "train_questions": 2,
            "steps_per_call": 1,
            "optim": OptimConfig(warmup_steps=1),
            "tasks": ("single",),
            "task_keys": 2,
            "eval_rows": 4,
            "budgets": (0.25, 1.0),
            "outliers": 1,
            "local_window": 8,
            **changes,
        }
    )


def test_a_run_trains_saves_and_tells(monkeypatch, tmp_path):
    found = config()
    monkeypatch.setattr(ruler, "load_config", lambda name, files, bindings: found)
    make = ruler.dense_accuracy

    def passes_at_once(parts, config):
        ask = make(parts, config)

        def asked(params, buffers, key_of):
            if key_of is ruler.stopping_key:
                return {"single": 1.0}
            assert key_of is ruler.task_key
            return ask(params, buffers, key_of)

        return asked

    monkeypatch.setattr(ruler, "dense_accuracy", passes_at_once)
    path, folder = tmp_path / "rows.json", tmp_path / "model"
    options = ["--gin_file", "a.gin", "--json", str(path), "--model", str(folder)]
    assert benchmarks.main(["ruler", *options, "--commit", "abc"]) == 0
    (row,) = json.loads(path.read_text())["rows"]
    # What ends the run is not what is reported, and it ends before the last step.
    assert (row["workload"], row["steps"], row["commit"]) == ("single", 1, "abc")
    assert (row["planned_steps"], row["last_lr"]) == (2, found.optim.peak_lr / 2)
    assert row["accuracy"] < 1
    assert not row["discriminative"]
    keys = [key_of(found, "single") for key_of in (ruler.task_key, ruler.stopping_key)]
    assert not np.array_equal(*map(jax.random.key_data, keys))
    model = ruler.load(found, folder)
    first = drawn(MODEL.decoder())
    assert not np.array_equal(model.embed.embedding[...], first.embed.embedding[...])
    other = config(model=dataclasses.replace(MODEL, tie_embeddings=False))
    with pytest.raises(ValueError, match="holds another model"):
        ruler.load(other, folder)


@pytest.fixture(scope="module")
def asker():
    task, model = config(), drawn(MODEL.decoder(), 3)
    return task, kv_cache_accuracy.Asker(task, ruler.parts_of(task), model)


def test_a_budget_for_everything_loses_nothing(asker):
    task, asker = asker
    dense = kv_cache_accuracy.Asked(
        sweep="dense", method="dense", policy=DenseCacheConfig(), setting=1.0
    )
    plan = list(kv_cache_accuracy.plan(task, ["budget"]))
    assert plan[0] == dense
    policy = kv_cache_accuracy.shadowkv(task, 32, rank=8)
    whole = dataclasses.replace(dense, sweep="budget", method="shadowkv", policy=policy)
    few = dataclasses.replace(
        whole,
        method="streaming",
        policy=StreamingCacheConfig(num_sinks=1, window=8),
        is_aware=True,
    )
    asker._rows["places"] = []
    rows = [asker.ask(asked)[0] for asked in (dense, whole, few)]
    for row in rows[:2]:
        assert row["output_error"] < 1e-5
        assert row["mass"] == pytest.approx(1, abs=1e-5)
        assert row["recall"] == 1
        assert row["accuracy"] == row["dense"] == rows[0]["accuracy"]
        # A model that learned nothing: its cells say nothing of a cache.
        assert not row["discriminative"]
    assert rows[2]["output_error"] > 1e-3
    assert rows[2]["recall"] < 1
    assert 0 < rows[1]["hit_rate"] < 1
    # 2 x 8 floats of a token and layer, and a row more for the questions.
    size = 64 * 36 / 32 + 4 / 32
    assert rows[0]["device_bytes_per_token"] == pytest.approx(size, rel=1e-3)
    assert rows[1]["host_bytes_per_token"] > 32
    text = kv_cache_accuracy.table(rows)
    assert "streaming aware" in text
    assert "(" in text


def test_places_that_are_read_are_those_of_the_cache():
    spec = spec_of_layer()
    policy = StreamingCacheConfig(num_sinks=2, window=3)
    state = policy.init(spec, 2, 16, jnp.float32)
    state = dataclasses.replace(state, length=jnp.asarray([4, 10]))
    read = np.asarray(tokens_read(policy, state, None, 12))[:, 0]
    assert [np.flatnonzero(row).tolist() for row in read] == [
        [0, 1, 2, 3],
        [0, 1, 7, 8, 9],
    ]
    h2o = H2OCacheConfig(heavy=1, recent=2)
    state = h2o.init(spec, 1, 16, jnp.float32)
    state = dataclasses.replace(
        state, positions=jnp.asarray([[[5, -1, 9]]]), length=jnp.asarray([10])
    )
    read = np.asarray(tokens_read(h2o, state, None, 12))[0, 0]
    assert np.flatnonzero(read).tolist() == [5, 9]


def bench(**changes):
    shadowkv = ShadowKVCacheConfig(
        budget=16, chunk=4, rank=4, num_outliers=2, local_window=8, values="device"
    )
    return KVCacheBenchConfig(
        **{
            "model": MODEL,
            "methods": {"dense": DenseCacheConfig(), "shadowkv": shadowkv},
            "batches": {"dense": (2,), "shadowkv": (2,)},
            "context": 64,
            "steps": 2,
            "calls": 1,
            **changes,
        }
    )


def test_filled_caches_hold_what_a_read_context_leaves():
    spec = spec_of_layer()
    quest = QuestCacheConfig(budget=16, page=4, local_window=8)
    cache = PolicyCache.init([quest] * 2, spec, 2, 72, jnp.float32)
    (state,) = fill(cache, 64, seed=0).states
    assert state.length.tolist() == [[64, 64], [64, 64]]
    pages = np.asarray(state.k[:, :, :, :64]).reshape(2, 2, 1, 16, 4, 8)
    np.testing.assert_array_equal(state.low[:, :, :, :16], pages.min(axis=4))
    np.testing.assert_array_equal(state.high[:, :, :, :16], pages.max(axis=4))
    assert np.isinf(state.low[:, :, :, 16:]).all()
    assert 0.9 < np.std(state.k[:, :, :, :64]) < 1.1
    policy = bench().methods["shadowkv"]
    cache = PolicyCache.init([policy] * 2, spec, 2, 72, jnp.float32)
    (state,) = fill(cache, 64, seed=0).states
    # 16 chunks, of which the last 2 are the window and 2 are outliers.
    assert (~state.excluded).sum(axis=-1).tolist() == [[[12], [12]], [[12], [12]]]
    assert state.first[0, 0, :4].tolist() == [0, 4, 8, 12]
    assert state.start.tolist() == [[56, 56], [56, 56]]
    assert state.next_chunk.tolist() == [16, 16]


def test_throughput_rows_keep_those_of_others(monkeypatch, tmp_path):
    found = bench()
    monkeypatch.setattr(kv_cache, "load_config", lambda *arguments: found)
    monkeypatch.setattr(kv_cache_throughput, "ceilings", lambda: LIMITS)
    path = tmp_path / "rows.json"
    earlier = [
        {"method": name, "batch": batch}
        for name, batch in (("quest", 2), ("dense", 1), ("dense", 2))
    ]
    path.write_text(json.dumps({"rows": earlier}))
    options = ["kv_cache", "--only=throughput", "--gin_file=a.gin", f"--json={path}"]
    assert benchmarks.main([*options, "--methods=dense", "--commit=abc"]) == 0
    *others, row = json.loads(path.read_text())["rows"]
    # Another batch of the same cache may have been the last of a run cut short.
    assert others == earlier[:2]
    assert row["ms"] > 0
    assert len(row["calls_ms"]) == found.calls
    assert (row["same_units"], row["note"]) == (1, "")
    assert row["output_error"] < 1e-5
    assert row["tokens_per_s"] == pytest.approx(2 / row["ms"] * 1e3, rel=0.01)
    # Of 2 rows, 64 tokens of 8 floats, twice.
    assert row["cache_bytes"] == 2 * 64 * 8 * 4 * 2
    assert row["full_fits_device"]
    with pytest.raises(ValueError, match="'snapkv' is unknown, allowed are dense"):
        kv_cache_throughput.chosen(found, ["snapkv"])
    assert jax.devices()[0].platform in ("cpu", "gpu")


def zeros(attend):
    def wrong(*args, **options):
        return jax.tree.map(jnp.zeros_like, attend(*args, **options))

    return wrong


def first_chunks(best):
    def wrong(scores, count, implementation=None):
        _, valid = best(scores, count, implementation)
        ids = jnp.broadcast_to(jnp.arange(count, dtype=jnp.int32), valid.shape)
        # The op is wrong where it is named alone.
        return (ids, valid) if implementation == "reference" else best(scores, count)

    return wrong


def test_a_cache_that_chooses_other_chunks_is_wrong(monkeypatch):
    monkeypatch.setattr(shadowkv, "best", first_chunks(shadowkv.best))
    policy = dataclasses.replace(bench().methods["shadowkv"], top_k="reference")
    spec = spec_of_layer()
    # Over the chunks that it chose, attention is right.
    with pytest.raises(kv_cache_check.WrongResult, match=r"% .* relative error 0,"):
        kv_cache_check.compare_step(
            policy,
            spec,
            layers=1,
            batch=1,
            context=64,
            room=bench().room,
            dtype="float32",
            seed=0,
        )


def test_a_cache_whose_kernel_is_wrong_has_no_speed(monkeypatch):
    monkeypatch.setattr(kv_cache_throughput, "ceilings", lambda: LIMITS)
    monkeypatch.setattr(shadowkv_attend, "attend", zeros(shadowkv_attend.attend))
    policy = dataclasses.replace(bench().methods["shadowkv"], attention="xla")
    found = bench(methods={"shadowkv": policy}, batches={"shadowkv": (1, 2)})
    rows = list(kv_cache_throughput.measure(found))
    assert [row["batch"] for row in rows] == [1, 2]
    for row in rows:
        assert row["note"].startswith("no speed: ")
        assert "relative error 1, limit 2e-05" in row["note"]
        for time in ("ms", "tokens_per_s", "share_of_floor", "calls_ms"):
            assert row[time] is None
        assert row["note"] in kv_cache_throughput.line(row)


def test_a_kernel_that_cannot_run_ends_no_other_cache(monkeypatch, tmp_path):
    named = dataclasses.replace(bench().methods["shadowkv"], landmarks="mosaic")
    found = bench(
        methods={"named": named, "dense": DenseCacheConfig()},
        batches={"named": (1,), "dense": (1,)},
    )
    monkeypatch.setattr(kv_cache, "load_config", lambda *arguments: found)
    monkeypatch.setattr(kv_cache_throughput, "ceilings", lambda: LIMITS)
    compare = kv_cache_throughput.compare_step

    def compared(policy, *args, **options):
        return compare(policy, *args, **options) if policy is named else {}

    monkeypatch.setattr(kv_cache_throughput, "compare_step", compared)
    monkeypatch.setattr(kv_cache_throughput, "_timed", lambda *arguments: {"ms": 1.0})
    monkeypatch.setattr(kv_cache_throughput, "line", lambda row: row["note"])
    path = tmp_path / "rows.json"
    options = ["--only=throughput", "--gin_file=a.gin", f"--json={path}"]
    assert kv_cache.main(options) == 1
    refused, dense = json.loads(path.read_text())["rows"]
    assert refused["note"].startswith("no speed: not available: landmark_scores: ")
    assert (refused["ms"], dense["ms"]) == (None, 1)

    def broken(*arguments):
        raise ValueError("a mistake in the program")

    # Only memory that is short is a row's note.
    monkeypatch.setattr(kv_cache_throughput, "_timed", broken)
    with pytest.raises(ValueError, match="a mistake"):
        kv_cache.main([*options, "--methods=dense"])


def test_named_kernels_must_be_in_the_program():
    choices = [
        Choice(op="top_k_select", implementation="mosaic", source=source)
        for source in ("automatic", "named")
    ]
    kv_cache_check.require_named("", choices[:1])
    with pytest.raises(KernelMissing, match="pk_top_k_select"):
        kv_cache_check.require_named("", choices)


@pytest.mark.parametrize(
    "make, bad, text",
    [
        (config, {"phases": ((16, 4, 3),), "steps_per_call": 2}, "no multiple of"),
        (config, {"phases": ()}, r"phases=\(\)"),
        (config, {"tasks": ("riddle",)}, "allowed are 'single'"),
        (config, {"budgets": (0.5, 0.25)}, "must ascend"),
        (config, {"eval_rows": 0}, "eval_rows=0"),
        (config, {"rows": RulerConfig()}, "vocab_size=32, the tasks have 452"),
        (bench, {"batches": {"dense": (1,)}}, "must name the same"),
        (bench, {"batches": {"dense": (2, 1), "shadowkv": (1,)}}, r"'dense' are \(2"),
        (bench, {"repeat": 1.5}, "repeat=1.5"),
        (bench, {"context": 0}, "context=0"),
    ],
)
def test_impossible_runs_are_refused(make, bad, text):
    with pytest.raises(ValueError, match=text):
        make(**bad)


def test_a_model_and_a_known_sweep_are_asked_for(monkeypatch):
    monkeypatch.setattr(kv_cache, "load_config", lambda *arguments: config())
    options = ["--only=accuracy", "--gin_file=a.gin", "--json=b.json"]
    with pytest.raises(ValueError, match="needs --model"):
        kv_cache.main(options)
    with pytest.raises(ValueError, match="sweep 'width' is unknown"):
        list(kv_cache_accuracy.plan(config(), ["width"]))


@pytest.mark.parametrize(
    "file, root",
    [
        ("ruler_h200", "RulerBenchConfig"),
        ("ruler_tiny", "RulerBenchConfig"),
        ("throughput_h200", "KVCacheBenchConfig"),
        ("throughput_tiny", "KVCacheBenchConfig"),
    ],
)
def test_committed_files_can_be_read(file, root):
    found = load_config(root, [FOLDER / f"{file}.gin"])
    sweeps = kv_cache_accuracy.SWEEPS
    if root == "RulerBenchConfig":
        policies = [asked.policy for asked in kv_cache_accuracy.plan(found, sweeps)]
        assert any(isinstance(p, QuestCacheConfig) for p in policies)
        room, model = found.room, found.model
    else:
        policies, room, model = found.methods.values(), found.room, found.model
    decoder = model.decoder()
    spec = jax.eval_shape(lambda: init_decoder(decoder)).layers[0].mixer.cache_spec
    for policy in policies:
        # What needs a GPU, its memories or its kernels, cannot be checked here.
        if getattr(policy, "values", None) != "host" and "mosaic" not in str(policy):
            policy.check(spec, room)
