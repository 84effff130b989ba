"""The recall benchmark asks what can be known, trains seeds, and tells intervals."""

import dataclasses
import functools
import json
import pathlib
import statistics

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxaccel import benchmarks
from jaxaccel.benchmarks import recall
from jaxaccel.config.gin_utils import load_config
from jaxaccel.config.recall import RecallBenchConfig
from jaxaccel.models.describe import describe
from jaxaccel.models.qwen3_5_text import Qwen3_5TextConfig
from jaxaccel.training.config import OptimConfig


FOLDER = pathlib.Path(__file__).parents[2] / "experiments" / "recall"


def model(*pattern, **changes):
    return Qwen3_5TextConfig.tiny(
        vocab_size=9,
        d_model=16,
        num_layers=len(pattern),
        pattern=pattern,
        num_heads=2,
        num_kv_heads=2,
        head_dim=8,
        gdn_key_heads=2,
        gdn_key_dim=8,
        gdn_value_dim=8,
        d_ff=16,
        implementation="reference",
        **changes,
    )


def config(**changes):
    return RecallBenchConfig(
        **{
            "models": {"gdn": model("gdn")},
            "pairs": (2, 3, 5),
            "num_queries": 2,
            "num_keys": 6,
            "num_values": 3,
            "optim": OptimConfig(warmup_steps=1),
            "num_steps": 4,
            "batch_size": 6,
            "num_seeds": 2,
            "steps_per_call": 2,
            "eval_rows": 4,
            **changes,
        }
    )


def test_rows_of_each_number_of_pairs_can_be_answered():
    task = config()
    pairs = jnp.repeat(jnp.asarray(task.pairs, jnp.int32), 40)
    rows = jax.jit(functools.partial(recall.recall_rows, task))(
        jax.random.key(0), pairs
    )
    asked_once = recall.first_queries(task, rows, pairs)
    rows, asked_once = jax.tree.map(np.asarray, (rows, asked_once))
    assert rows.tokens.shape == (120, task.seq_len) == (120, 14)
    asked_first, asked_again = set(), set()
    for i, count in enumerate(pairs.tolist()):
        tokens = rows.tokens[i]
        table = dict(tokens[: 2 * count].reshape(-1, 2).tolist())
        queries = tokens[2 * count :].reshape(-1, 2).tolist()
        assert len(table) == count
        assert all(key < 6 <= value < 9 for key, value in table.items())
        assert all(table[key] == value for key, value in queries)
        assert len({key for key, _ in queries[:2]}) == 2
        places = np.arange(2 * count, 14, 2)
        for mask, want in ((rows, places), (asked_once, places[:2])):
            np.testing.assert_array_equal(np.flatnonzero(mask.loss_mask[i]), want)
        np.testing.assert_array_equal(
            rows.targets[i][places], [value for _, value in queries]
        )
        order = list(table)
        asked_first |= {(count, order.index(key)) for key, _ in queries[:2]}
        asked_again |= {(count, order.index(key)) for key, _ in queries[2:]}
    assert len(asked_first) == 2 + 3 + 5
    assert len(asked_again) == 2 + 3  # the longest rows have no room for more


def test_rows_of_a_run(monkeypatch, tmp_path):
    found = config()
    monkeypatch.setattr(recall, "load_config", lambda name, files, bindings: found)
    path = tmp_path / "rows.json"
    options = ["--gin_file", "a.gin", "--json", str(path), "--commit", "abc"]
    assert benchmarks.main(["recall", *options]) == 0
    rows = json.loads(path.read_text())["rows"]
    assert [(r["pairs"], r["seed"]) for r in rows] == [
        (pairs, seed) for pairs in (2, 3, 5) for seed in (0, 1, None)
    ]
    for i in range(0, 9, 3):
        *seeds, mean = rows[i : i + 3]
        values = [row["accuracy"] for row in seeds]
        assert all(0 <= value <= 1 for value in values)
        assert mean["accuracy"] == pytest.approx(statistics.mean(values), abs=1e-4)
        low, high = mean["interval"]
        assert 0 <= low <= mean["accuracy"] <= high <= 1
        # Two heads of 8 x 8 floats, and the convolution's last 3 inputs.
        assert mean["state_bytes"] == (2 * 64 + 3 * 48) * 4
        assert mean["kv_bytes"] == 0
        assert mean["commit"] == "abc"
        assert mean["runs"]["gated_delta_rule"] == "reference"


def test_seeds_train_apart_and_the_loss_falls():
    task = config(
        pairs=(2,),
        num_keys=2,
        num_steps=20,
        steps_per_call=10,
        optim=OptimConfig(peak_lr=0.03, warmup_steps=1),
        models={},
    )
    decoder = model("gdn")
    trained = recall.train(dataclasses.replace(decoder, vocab_size=5).decoder(), task)
    assert trained.losses.shape == (2, 2)
    assert np.all(trained.losses[1] < trained.losses[0])
    assert trained.losses[0, 0] != trained.losses[0, 1]
    assert np.asarray(trained.state.step).tolist() == [20, 20]
    kernel = trained.state.params["embed/embedding"]
    assert np.any(np.asarray(kernel[0]) != np.asarray(kernel[1]))


def test_the_second_model_is_compared_seed_by_seed(monkeypatch):
    models = {"gdn": model("gdn", "gdn"), "hybrid": model("gdn", "attention")}
    task = config(models=models, equal_within=0.1)
    right = iter(
        np.asarray(values, np.float32)
        for values in ([[0.5, 0.7]] * 3, [[0.6, 0.9], [1.0, 1.0], [0.5, 0.7]])
    )
    monkeypatch.setattr(recall, "train", lambda decoder, config: trained)
    monkeypatch.setattr(recall, "accuracies", lambda trained, config: next(right))
    trained = recall.Trained(
        parts=None,  # type: ignore
        state=_Finite(),  # type: ignore
        losses=np.zeros((1, 2)),
        compile_seconds=1.0,
        seconds=1.0,
        runs={},
    )
    gdn, hybrid = recall.measure(task)
    assert "over" not in gdn[2]
    means = [row for row in hybrid if row["seed"] is None]
    assert [row["over"] for row in means] == [
        pytest.approx(v, abs=1e-4) for v in (0.15, 0.4, 0.0)
    ]
    low, high = means[0]["over_interval"]
    # 0.1 and 0.2: half of their distance times the quantile 12.706.
    assert (low, high) == pytest.approx((0.15 - 0.6353, 0.15 + 0.6353), abs=1e-3)
    assert means[1]["interval"] == [1.0, 1.0]
    assert means[0]["kv_bytes"] == 8 * 2 * 2 * 8 * 4


class _Finite:
    finite = np.asarray([True, True])


def test_models_of_other_sizes_are_refused():
    wide = model("gdn", "attention", gdn_value_heads=4)
    task = config(models={"gdn": model("gdn", "gdn"), "wide": wide})
    with pytest.raises(ValueError, match=r"parameters .*equal_within=0\.01"):
        next(recall.measure(task))


@pytest.mark.parametrize("name", ["h200", "tiny"])
def test_committed_models_have_equally_many_parameters(name):
    task = load_config("RecallBenchConfig", [FOLDER / f"{name}.gin"])
    recall._check_equal(task)
    gdn, hybrid = (
        describe(m.decoder(), task.seq_len).total for m in task.models.values()
    )
    assert list(task.models) == ["gdn", "hybrid"]
    assert gdn.kv_bytes_per_token == 0 < hybrid.kv_bytes_per_token
    assert hybrid.state_bytes < gdn.state_bytes
    # What it is about: the most pairs are more than a head can keep apart.
    assert task.pairs[-1] > task.models["gdn"].gdn_key_dim


@pytest.mark.parametrize(
    "bad, text",
    [
        ({"pairs": (3, 2)}, "ascend"),
        ({"num_seeds": 1}, "num_seeds=1"),
        ({"num_seeds": 17}, "num_seeds=17"),
        ({"batch_size": 7}, "batch_size=7 must be a multiple of 3"),
        ({"num_steps": 5}, "num_steps=5 must be a multiple of 2"),
        ({"num_queries": 3}, "num_queries=3.*num_pairs=2"),
        ({"num_values": 4}, "vocab_size=9, the task has 10"),
    ],
)
def test_impossible_runs_are_refused(bad, text):
    with pytest.raises(ValueError, match=text):
        config(**bad)
