"""The plain-JAX model is our model, and tables hold what the files hold."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxaccel import benchmarks
from jaxaccel.benchmarks import render, results, step
from jaxaccel.config.registry import Experiment
from jaxaccel.core.tree import split_model
from jaxaccel.data.batch import packing_metadata
from jaxaccel.data.pipeline import DataConfig
from jaxaccel.data.sources import InMemorySource
from jaxaccel.models.decoder import Decoder
from jaxaccel.models.qwen3_5_text import Qwen3_5TextConfig
from jaxaccel.models.qwen3_next import Qwen3NextConfig
from jaxaccel.training.config import OptimConfig, TrainConfig


@pytest.fixture(scope="module")
def experiment():
    rng = np.random.default_rng(0)
    texts = tuple(
        " ".join(rng.choice(["alpha", "beta", "gamma", "delta"], size=40))
        for _ in range(30)
    )
    return Experiment(
        # Dense: the experts are compared in a forward pass, which compiles sooner.
        model=dataclasses.replace(
            Qwen3_5TextConfig.tiny(),
            vocab_size=300,
            num_layers=2,
            pattern=("gdn", "attention"),
        ),
        data=DataConfig(
            sources=(InMemorySource(texts=texts),),
            tokenizer="byte",
            vocab_size=300,
            seq_len=64,
            batch_size=2,
        ),
        train=TrainConfig(
            num_steps=10,
            loss_chunk=32,
            optim=OptimConfig(warmup_steps=2),
        ),
    )


def test_plain_jax_trains_the_same_model(experiment):
    rows = step.measure(experiment, workload="tiny", rounds=2, steps=2)
    ours, plain = rows
    assert [row["implementation"] for row in rows] == ["jaxaccel", "plain_jax"]
    assert ours["first_loss"] == pytest.approx(plain["first_loss"], rel=1e-5)
    # After four steps of the optimizer: gradients and updates agree too.
    assert ours["last_loss"] == pytest.approx(plain["last_loss"], rel=1e-4)
    assert ours["ms"] > 0
    assert ours["ratio"] > 0
    assert 0 < ours["host_call_ms"] < ours["ms"]
    assert ours["launches_elsewhere"] is False
    assert ours["mfu"] is None  # the peak of a CPU is not in the table


def test_plain_experts_are_our_experts():
    # Two periods of the layers that compile soonest: the others are trained above.
    config = Qwen3NextConfig.tiny(
        num_layers=2, pattern=("attention",), balance_loss_coef=0.5
    ).decoder()
    graphdef, shapes = nnx.split(
        nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0)))
    )
    # Drawn by NumPy, so that no program has to be compiled for it.
    rng = np.random.default_rng(0)
    state = jax.tree.map(
        lambda x: jnp.asarray(rng.normal(0.0, 0.2, x.shape).astype(x.dtype)), shapes
    )
    params, _ = split_model(nnx.merge(graphdef, state))
    tokens = jnp.arange(2 * 24, dtype=jnp.int32).reshape(2, 24) % config.vocab_size
    segments = jnp.asarray([[1] * 10 + [2] * 14, [1] * 20 + [0] * 4], jnp.int32)
    output = jax.jit(lambda state: nnx.merge(graphdef, state)(tokens, segments))(state)
    positions = packing_metadata(tokens.shape, segment_ids=segments).positions
    hidden, balance = jax.jit(
        lambda p: step.plain_jax.hidden_states(
            step.plain_jax.nested(p), tokens, segments, positions, config
        )
    )(params)
    real = np.asarray(segments) > 0
    np.testing.assert_allclose(
        np.asarray(hidden)[real], np.asarray(output.hidden)[real], atol=2e-5
    )
    np.testing.assert_allclose(balance, jnp.mean(output.aux.balance_loss), rtol=1e-5)


def contender(name, losses):
    return step.Contender(
        name=name,
        advance=lambda state, batch: (state, batch),
        state=None,
        compile_seconds=1.0,
        peak_bytes=2**30,
        losses=losses,
        step_ms=[9.0, 3.0, 5.0],
        dispatch_ms=[1.0, 0.5, 0.25],
    )


def test_the_first_round_warms_up(experiment):
    ours, _ = step.summary(
        experiment,
        contender("jaxaccel", [2.0]),
        contender("plain_jax", [2.0]),
        workload="x",
        tokens=100.0,
    )
    assert ours["ms"] == 4.0
    assert ours["tokens_per_s"] == 25_000
    assert ours["host_dispatch_ms"] == 0.25
    assert ours["peak_gib"] == 1.0
    assert ours["ratio"] == 1.0


def test_rows_say_which_thread_launches(experiment, monkeypatch):
    monkeypatch.setenv("XLA_PYTHON_CLIENT_USE_TFRT_GPU_CLIENT", "1")
    both = contender("jaxaccel", [2.0]), contender("plain_jax", [2.0])
    rows = step.summary(experiment, *both, workload="x", tokens=100.0)
    assert all(row["launches_elsewhere"] for row in rows)
    assert all(row["host_call_ms"] is None for row in rows)


def test_no_speed_is_written_for_another_loss(experiment):
    rows = step.summary(
        experiment,
        contender("jaxaccel", [2.0]),
        contender("plain_jax", [2.0 * 1.009]),
        workload="x",
        tokens=100.0,
    )
    assert all(row["ms"] is None and row["tflops"] is None for row in rows)
    assert all("losses differ" in row["note"] for row in rows)
    assert "ratio" not in rows[0]


def test_accumulation_is_refused(experiment):
    train = dataclasses.replace(experiment.train, accumulation=2)
    with pytest.raises(ValueError, match="accumulation=2"):
        step.measure(
            dataclasses.replace(experiment, train=train),
            workload="tiny",
            rounds=2,
            steps=1,
        )


def test_nested_parameters_keep_every_array():
    flat = {"a/b": jnp.ones(1), "a/c": jnp.zeros(2), "d": jnp.ones(3)}
    tree = step.plain_jax.nested(flat)
    assert tree["a"]["b"] is flat["a/b"]
    assert tree["a"]["c"] is flat["a/c"]
    assert tree["d"] is flat["d"]


def test_results_are_written_whole(tmp_path):
    path = tmp_path / "deep" / "rows.json"
    results.write(path, [{"ms": 1.0}])
    with pytest.raises(TypeError):
        results.write(path, [{"ms": object()}])
    assert json.loads(path.read_text()) == {"rows": [{"ms": 1.0}]}


def test_the_readme_holds_what_the_result_files_hold():
    readme = (render.ROOT / "README.md").read_text()
    assert render.rendered(readme) == readme, "run `uv run jaxaccel bench render`"


def test_a_readme_without_markers_is_refused():
    with pytest.raises(ValueError, match="BEGIN techniques"):
        render.rendered("no markers")


def test_an_unknown_benchmark_is_refused():
    with pytest.raises(ValueError, match="'stp' is unknown"):
        benchmarks.main(["stp"])
