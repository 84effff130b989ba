"""The memory's experiments: facts, real text, ablations, streams, and what is told."""

import dataclasses
import json
import pathlib
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxaccel import benchmarks
from jaxaccel.benchmarks import engram_experiments as experiments
from jaxaccel.benchmarks.engram import RUN
from jaxaccel.config.engram_bench import (
    AblatedConfig,
    EngramBenchConfig,
    StreamsConfig,
    TextConfig,
)
from jaxaccel.config.gin_utils import load_config
from jaxaccel.data.pipeline import DataConfig
from jaxaccel.data.planted import PlantedConfig
from jaxaccel.data.sources import InMemorySource
from jaxaccel.models.qwen3_5_text import Qwen3_5TextConfig
from jaxaccel.models.with_engram import WithEngramConfig
from jaxaccel.nn.engram_config import EngramConfig
from jaxaccel.training.config import OptimConfig, TrainConfig
from jaxaccel.training.optim import make_optimizer
from jaxaccel.training.step import make_init, make_train_step


FOLDER = pathlib.Path(__file__).parents[2] / "experiments" / "engram"
TASK = PlantedConfig(
    num_facts=9,
    num_apart=9,
    num_names=3,
    num_answers=4,
    facts_per_row=3,
    apart_per_row=2,
    num_symbols=3,
    span=2,
)
FILES = sorted(
    path
    for path in FOLDER.glob("*.gin")
    if "base" not in path.stem and path.stem != "tiny"
)


def model(vocab_size=TASK.vocab_size, **changes):
    return Qwen3_5TextConfig.tiny(
        vocab_size=vocab_size,
        d_model=16,
        num_layers=1,
        pattern=("attention",),
        num_heads=2,
        num_kv_heads=1,
        head_dim=8,
        d_ff=16,
        implementation="xla",
        tie_embeddings=True,
        **changes,
    )


def engram(**changes):
    sizes = {"layers": (1,), "heads": 1, "head_dim": 4, "bases": 40, "pad_id": 0}
    return EngramConfig(**{**sizes, **changes})


def config(**changes):
    return EngramBenchConfig(
        **{
            "name": "test",
            "models": {
                "memory": WithEngramConfig(model=model(), engram=engram()),
                "none": model(),
            },
            "task": TASK,
            "optim": OptimConfig(warmup_steps=1),
            "num_steps": 2,
            "batch_size": 2,
            "num_seeds": 2,
            "steps_per_call": 1,
            "eval_batches": 1,
            **changes,
        }
    )


def test_facts_are_the_same_everywhere_and_spans_are_not():
    arrays = TASK.arrays()
    rows, kinds = jax.jit(TASK.rows, static_argnums=2)(arrays, jax.random.key(0), 50)
    rows, kinds = jax.tree.map(np.asarray, (rows, kinds))
    assert rows.tokens.shape == (50, TASK.seq_len) == (50, 25)
    assert rows.tokens.max() < TASK.vocab_size
    known = {
        kind: {(a, b): c for a, b, c in np.asarray(arrays[kind]).tolist()}
        for kind in ("fact", "apart")
    }
    assert len(known["fact"]) == len(known["apart"]) == 9
    spans = set()
    for tokens, targets, mask, kind in zip(
        rows.tokens, rows.targets, rows.loss_mask, kinds, strict=True
    ):
        for a, b, c in tokens[3:12].reshape(-1, 3).tolist():
            assert known["fact"][a, b] == c
        for a, x, y, b, c in tokens[12:22].reshape(-1, 5).tolist():
            assert known["apart"][a, b] == c
            assert 16 <= min(x, y) <= max(x, y) < 19
        assert tokens[1:3].tolist() == tokens[23:].tolist()
        spans.add(tuple(tokens[1:3].tolist()))
        np.testing.assert_array_equal(targets[:-1], tokens[1:])
        np.testing.assert_array_equal(mask, kind >= 0)
        # An answer comes next, or a symbol of the copy.
        assert all(12 <= x < 16 for x in targets[(kind == 0) | (kind == 1)])
        assert [np.sum(kind == i) for i in range(3)] == [3, 2, 2]
        assert targets[kind == 2].tolist() == tokens[23:].tolist()
    assert len(spans) == 9


def test_frequent_facts_come_first():
    task = dataclasses.replace(TASK, exponent=2.0)
    reached = np.asarray(task.arrays()["fact_reached"])
    share = np.diff(reached, prepend=0)
    np.testing.assert_allclose(share[0] / share[2], 9, rtol=1e-5)
    assert reached[-1] == pytest.approx(1)


def text_task(**changes):
    words = [f"{a}{b} " for a in "abcdef" for b in "ghijkl"]
    rng = np.random.default_rng(0)
    texts = tuple("".join(rng.choice(words, 200)) for _ in range(8))
    data = DataConfig(
        sources=(InMemorySource(texts=texts),),
        tokenizer="byte",
        vocab_size=259,
        heldout_fraction=0.4,
    )
    return TextConfig(**{"data": data, "seq_len": 8, **changes})


@pytest.fixture(scope="module")
def text():
    return experiments.Text.read(text_task())


def text_config():
    """Real text, a memory of its tokenizer's classes, and none."""
    memory = WithEngramConfig(model=model(259), engram=engram(compress=True))
    return config(task=text_task(), models={"memory": memory, "none": model(259)})


def trained(name, text):
    small, arrays = text_config(), text.arrays()
    entry = small.models[name]
    contender = experiments.make_contender(name, entry, small, text, arrays)
    return experiments.train(contender, small, arrays)


@pytest.fixture(scope="module")
def with_memory(text):
    return trained("memory", text)


@pytest.fixture(scope="module")
def without_memory(text):
    return trained("none", text)


def test_seeds_differ_and_are_repeatable(without_memory, text):
    again = experiments.train(without_memory.contender, text_config(), text.arrays())
    np.testing.assert_array_equal(again.nats, without_memory.nats)
    assert (again.nats[0] != again.nats[1]).all()


def test_rows_tell_seeds_intervals_and_silence(with_memory, without_memory, text):
    small = text_config()
    memory = experiments.row_of(with_memory, None, small, text)
    none = experiments.row_of(without_memory, with_memory, small, text)
    assert memory["parameters"] > none["parameters"] > 1000
    assert memory["table_parameters"] == 4 * memory["table_rows"] > 4 * 80
    assert none["table_rows"] == 0
    for row in (memory, none):
        assert row["note"] == ""
        assert len(row["nats"]["by_seed"]) == len(row["curve"][0]) == 2
        low, high = row["nats"]["interval"]
        assert low <= row["nats"]["mean"] <= high
        assert row["nats_per_byte"]["mean"] > 0
        assert row["over_model"] == "memory"
    assert "silent_right" in memory["text"]
    assert "silent_right" not in none["text"]
    assert "over" not in memory
    over = np.subtract(none["nats"]["by_seed"], memory["nats"]["by_seed"])
    assert none["over"]["mean"] == pytest.approx(np.mean(over), abs=1e-3)


class Symbols:
    """A model to which any symbol, 16 to 18, is as likely, and more than all else."""

    def __call__(self, tokens, segments, positions):
        is_symbol = np.isin(np.arange(TASK.vocab_size), [16, 17, 18])
        logits = jnp.broadcast_to(is_symbol, (*tokens.shape, TASK.vocab_size))
        return types.SimpleNamespace(logits=logits.astype(jnp.float32))


def test_planted_kinds_are_asked_apart(without_memory):
    parts: Any = types.SimpleNamespace(merge=lambda params, buffers: Symbols())
    small = config(eval_batches=3)
    ask = experiments._question(parts, small, TASK, has_memory=False)
    sums = np.asarray(jax.jit(ask)(None, None, TASK.arrays()))[0]
    nats, right, count, num_bytes = sums
    # Six rows: 3 facts, 2 facts apart and 2 copied symbols each.
    np.testing.assert_array_equal(count, [18, 12, 12])
    np.testing.assert_array_equal(num_bytes, count)
    other = np.log(TASK.vocab_size - 3 + 3 * np.e)
    np.testing.assert_allclose(nats / count, [other, other, other - 1], rtol=1e-5)
    assert right[:2].tolist() == [0, 0]
    assert 0 < right[2] < 12
    both = np.stack([nats, nats]) / count
    outcome = dataclasses.replace(without_memory, nats=both, right=0 * both)
    row = experiments.row_of(outcome, None, small, TASK)
    assert row["workload"] == "PlantedConfig"
    assert row["apart"]["nats"]["mean"] == pytest.approx(other, rel=1e-4)
    assert row["copy"]["nats"]["mean"] == pytest.approx(other - 1, rel=1e-4)


def test_measuring_goes_through_the_models_in_turn(
    with_memory, without_memory, monkeypatch
):
    done = {"memory": with_memory, "none": without_memory}
    monkeypatch.setattr(experiments, "make_contender", lambda name, *_: name)
    monkeypatch.setattr(experiments, "train", lambda name, *_: done[name])
    small = dataclasses.replace(text_config(), fit_slots=True)
    # No line goes through tables of one size.
    ((memory,), (none,)) = experiments.measure(small, jobs=2)
    assert [memory["model"], none["model"]] == ["memory", "none"]
    shared = {tuple(row[key] for key in RUN) for row in (memory, none)}
    assert shared == {("TextConfig", 2, 2, 2, 0, "memory")}
    # Models that are named: held against the first of them.
    other = dataclasses.replace(small, models={"none": small.models["none"]})
    ((alone,),) = experiments.measure(other)
    assert alone["over_model"] == "none"
    assert "over" not in alone


def test_pieces_of_text_are_in_their_split():
    task = experiments.Text.read(text_task())
    arrays = task.arrays()
    rows, _ = jax.jit(task.rows, static_argnums=2)(arrays, jax.random.key(0), 4)
    train = task.splits["train"].tolist()
    for tokens, targets in zip(
        rows.tokens.tolist(), rows.targets.tolist(), strict=True
    ):
        assert tokens[1:] == targets[:-1]
        assert any(
            train[i : i + 8] == tokens
            for i in range(len(train))
            if train[i] == tokens[0]
        )
    held, _ = jax.jit(task.heldout, static_argnums=2)(arrays, jnp.int32(1), 2)
    want = task.splits["heldout"][16:32].reshape(2, 8)
    np.testing.assert_array_equal(held.tokens, want)
    # A byte is one; the end of a document is none.
    assert set(np.unique(held.num_bytes)) <= {0.0, 1.0}


def test_a_split_that_is_too_short_is_named():
    with pytest.raises(ValueError, match=r"split has \d+ tokens, a row needs 100001"):
        experiments.Text.read(text_task(seq_len=100_000))


def made(config):
    """A model's graph and its arrays, which one program draws."""
    build, key = experiments.builder(config, None), jax.random.key(0)
    graphdef, _ = nnx.split(nnx.eval_shape(lambda: build(key)))
    return graphdef, jax.jit(lambda key: nnx.state(build(key)))(key)


@pytest.mark.parametrize("streams", [1, 4])
def test_streams_have_a_memory_with_their_own_keys_or_one(streams):
    own = StreamsConfig(model=model(), streams=4, engram=engram(streams=streams))
    graphdef, arrays = made(own)
    tokens = np.arange(10, dtype=np.int32).reshape(2, 5)
    run = jax.jit(lambda arrays: nnx.merge(graphdef, arrays)(tokens).logits)
    got = run(arrays)
    layer = nnx.merge(graphdef, arrays).memory.layers[0]
    assert layer.query_norm.scale.shape == (streams, 16)
    kernel = arrays["memory"]["layers"][0]["kv_proj"]["kernel"]
    kernel[...] = jnp.zeros_like(kernel[...])
    assert np.abs(run(arrays) - got).max() > 1e-4


def test_streams_go_through_a_training_step_with_a_table():
    own = StreamsConfig(model=model(), streams=2, engram=engram(streams=2))
    build = experiments.builder(own, None)
    optim = OptimConfig(warmup_steps=1)
    train_config = TrainConfig(num_steps=2, optim=optim)
    optimizer = make_optimizer(optim, 2)
    parts = experiments.model_parts(lambda: build(jax.random.key(0)))
    step = make_train_step(parts, optimizer, train_config)
    state = jax.eval_shape(make_init(build, optimizer, train_config))
    rows, _ = jax.eval_shape(lambda: TASK.rows(TASK.arrays(), jax.random.key(0), 2))
    after, metrics = jax.eval_shape(step, state, rows)
    assert jax.tree.structure(after) == jax.tree.structure(state)
    assert metrics["memory_rows"].shape == ()


def test_what_begins_at_zero_stays_there():
    zeroed = ("query_norm/scale", "memory/layers/0/key_norm/scale", "conv_norm/scale")
    ablated = AblatedConfig(model=config().models["memory"], zeroed=zeroed)
    graphdef, arrays = made(ablated)
    built: Any = nnx.merge(graphdef, arrays)
    graphdef, params, rest = nnx.split(built, nnx.Param, ...)
    tokens = np.arange(8, dtype=np.int32).reshape(2, 4)

    @jax.jit
    @jax.grad
    def gradient(params):
        logits = nnx.merge(graphdef, params, rest)(tokens).logits
        return jnp.sum(jnp.sin(logits))

    memory = gradient(params)["memory"]["layers"][0]
    for name in ("query_norm", "key_norm", "conv_norm"):
        assert not np.asarray(memory[name]["scale"][...]).any()
    assert not np.asarray(memory["conv_kernel"][...]).any()
    assert np.asarray(memory["kv_proj"]["kernel"][...]).any()
    # A gate of one half.
    ids = jnp.zeros((1, 3, 2), jnp.int32)
    gates = jax.jit(built.memory.layers[0].gates)(jnp.ones((1, 3, 16)), ids)
    np.testing.assert_array_equal(gates, np.full((1, 3, 1), 0.5, np.float32))


def test_what_there_is_not_cannot_be_zeroed():
    ablated = AblatedConfig(model=model(), zeroed=("query_norm/scale",))
    with pytest.raises(ValueError, match="query_norm/scale"):
        nnx.eval_shape(lambda: experiments.builder(ablated, None)(jax.random.key(0)))


def test_a_line_through_the_losses():
    rows = [
        {
            **{"subject": "experiment", "op": "slots"},
            **dict.fromkeys(RUN, 2),
            "table_rows": rows,
            "nats": {"by_seed": [loss, loss]},
        }
        for rows, loss in ((0, 9.0), (2**10, 2.0), (2**12, 1.9), (2**14, 1.8))
    ]
    line = experiments.slots_fit(rows)
    assert line["nats_per_doubling"] == pytest.approx(-0.05)
    assert {line[key] for key in RUN} == {2}
    assert line["r_squared"] == pytest.approx(1)


def test_models_of_different_sizes_are_refused():
    small = config(equal_within=0.01)
    with pytest.raises(ValueError, match=r"equal_within=0\.01"):
        next(experiments.measure(small))


def test_configs_that_do_not_fit_are_named():
    with pytest.raises(ValueError, match="vocab_size=30"):
        config(models={"other": model(30)})
    with pytest.raises(ValueError, match=r"engram\.streams=2"):
        StreamsConfig(model=model(), streams=4, engram=engram(streams=2))
    with pytest.raises(ValueError, match="num_seeds=1"):
        config(num_seeds=1)
    with pytest.raises(ValueError, match="apart_per_row=0 must be at least 1"):
        PlantedConfig(apart_per_row=0)
    with pytest.raises(ValueError, match="num_facts=10"):
        PlantedConfig(num_facts=10, num_names=3)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_files_describe_experiments_of_equal_sizes_where_they_must(path):
    loaded = load_config("EngramBenchConfig", [path])
    assert loaded.name == path.stem
    if not loaded.equal_within:
        return
    sizes = []
    for entry in list(loaded.models.values())[:2]:
        built = experiments.builder(entry, None)
        parts = experiments.model_parts(lambda b=built: b(jax.random.key(0)))
        sizes.append(experiments.count_parameters(parts))
    assert sizes[1] == pytest.approx(sizes[0], rel=loaded.equal_within)


def test_the_command_trains_the_models_that_are_named(tmp_path, monkeypatch):
    seen = []

    def measure(config, *, jobs):
        seen.append((config.name, tuple(config.models), jobs))
        yield [{"op": config.name, "model": "x", "note": ""}]

    monkeypatch.setattr(experiments, "measure", measure)
    out = tmp_path / "rows.json"
    argv = ["engram", "--only", "experiment", "--json", str(out), "--commit", "abc"]
    argv += ["--gin_file", str(FOLDER / "slots.gin"), "--jobs", "3"]
    with pytest.raises(ValueError, match="no model other"):
        benchmarks.main([*argv, "--models", "none,other"])
    assert benchmarks.main([*argv, "--models", "rows_4k,none"]) == 0
    assert seen == [("slots", ("rows_4k", "none"), 3)]
    assert json.loads(out.read_text())["rows"][0]["commit"] == "abc"
