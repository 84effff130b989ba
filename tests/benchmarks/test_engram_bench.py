"""The memory's benchmarks check what they time, and keep rows of earlier calls."""

import contextlib
import dataclasses
import functools
import itertools
import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxaccel import benchmarks
from jaxaccel.benchmarks import (
    engram,
    engram_decode,
    engram_inference,
    engram_optimizer,
    engram_serving,
    results,
)
from jaxaccel.benchmarks.engram_optimizer import OptimizerBench
from jaxaccel.benchmarks.engram_serving import Serving


SMALL = OptimizerBench(
    sizes=(300, 5000), lookups=256, width=8, dense_rows=300, rounds=2, calls=1
)


# No tier changes the weights; they are drawn once for all tests.
models_of = functools.cache(engram_serving.Models)


@pytest.fixture
def serving(monkeypatch):
    for subject in (engram_inference, engram_decode):
        monkeypatch.setattr(subject, "Models", models_of)
    text = np.random.default_rng(0).zipf(1.5, 2000).astype(np.int32) % 256
    monkeypatch.setattr(engram_serving, "text_ids", lambda vocab_size: text)
    tiny = Serving.tiny()
    return dataclasses.replace(
        tiny,
        decoder=dataclasses.replace(tiny.decoder, num_layers=1, d_model=16),
        engram=dataclasses.replace(tiny.engram, layers=(1,)),
        length=48,
        batches=2,
    )


def test_one_text_looks_up_in_tables_of_every_size():
    small, large = (engram_optimizer.zipf_ids(SMALL, n) for n in SMALL.sizes)
    assert (small[0], large[0]) == (299, 4999)
    assert 0 <= small.min() <= small.max() < 300
    # Lookups that are equal in a table without collisions are equal in any.
    order = np.argsort(large[1:], kind="stable")
    same = large[1:][order][1:] == large[1:][order][:-1]
    again = small[1:][order]
    assert same.any()
    assert (again[1:] == again[:-1])[same].mean() > 0.9


@pytest.mark.parametrize("kind", ["adam", "rowwise_adam"])
def test_the_row_step_and_the_dense_one_are_checked_and_timed(kind):
    bench = dataclasses.replace(SMALL, kind=kind)
    by_rows, dense = engram_optimizer.measure(bench, ("xla", "dense"))
    assert [row["table_rows"] for row in by_rows] == [300, 5000]
    assert [row["table_rows"] for row in dense] == [300]
    for row in (*by_rows, *dense):
        assert row["note"] == ""
        assert row["ms"] > 0
    assert by_rows[0]["ratio"] == 1.0


def test_a_wrong_row_has_no_time():
    dy = jax.random.normal(jax.random.key(0), (SMALL.lookups, SMALL.width))
    ids = engram_optimizer.zipf_ids(SMALL, 5000)
    step = jax.jit(engram_optimizer.row_step(SMALL, "xla"))
    table = jnp.zeros((5000, SMALL.width), jnp.float32)
    state = engram_optimizer.init_table_state(SMALL.optim, table)
    table, _ = step(table, state, jnp.asarray(ids), dy)
    assert engram_optimizer.wrong(SMALL, table, dy, ids) == ""
    off = table.at[4999].multiply(1.01)
    assert "row 4999" in engram_optimizer.wrong(SMALL, off, dy, ids)
    unread = int(np.setdiff1d(np.arange(300), ids)[0])
    moved = table.at[unread].set(1.0)
    assert "was not read" in engram_optimizer.wrong(SMALL, moved, dy, ids)


def test_a_smallest_table_that_is_wrong_leaves_no_ratio(monkeypatch):
    def wrong(bench, table, dy, ids):
        return "row 7 is off" if table.shape[0] == 300 else ""

    monkeypatch.setattr(engram_optimizer, "wrong", wrong)
    ((small, large),) = engram_optimizer.measure(SMALL, ("xla",))
    assert (small["ms"], small["rounds_ms"], small["ratio"]) == (None, [], None)
    assert small["note"] == "row 7 is off"
    assert not engram_optimizer.is_good(small)
    assert large["ms"] == large["rounds_ms"][0] > 0
    assert large["ratio"] is None


def test_sizes_and_kinds_that_are_not_measured_are_named():
    with pytest.raises(ValueError, match=r"sizes=\(5, 3\)"):
        OptimizerBench(sizes=(5, 3))
    with pytest.raises(
        ValueError, match=r"'sinkhorn_momentum'.*'adam', 'rowwise_adam'"
    ):
        OptimizerBench(kind="sinkhorn_momentum")


def test_prompts_are_pieces_of_the_text(serving):
    batches = engram_serving.prompts(serving)
    assert len(batches) == 2
    low, high = serving.prompt
    for batch in batches:
        assert batch.tokens.shape == batch.segments.shape == (2, 48)
        for row in batch.segments:
            assert row.any()
            counts = np.bincount(row)[1:]
            assert ((low <= counts) & (counts <= high)).all()
    other = engram_serving.prompts(serving, 1)
    assert (other[0].tokens != batches[0].tokens).any()


def test_frequent_words_have_small_numbers(monkeypatch):
    some = list(itertools.islice(engram_serving.StdlibSource(), 20))
    monkeypatch.setattr(engram_serving, "StdlibSource", lambda: some)
    # What others read of all documents is kept apart.
    fresh = functools.cache(engram_serving.text_ids.__wrapped__)
    monkeypatch.setattr(engram_serving, "text_ids", fresh)
    ids = engram_serving.text_ids(300)
    counts = np.bincount(ids, minlength=300)
    assert ids.dtype == np.int32
    assert (np.diff(counts[:299]) <= 0).all()
    assert len(engram_serving.word_ids(300, len(ids) + 5)) == len(ids) + 5


def test_a_view_of_pinned_memory_has_its_bytes():
    table = engram_serving.random_table(50, 8)
    view = engram_serving.host_view(engram_serving.pinned(table))
    np.testing.assert_array_equal(view, np.asarray(table))
    assert 0.1 < np.std(np.asarray(table, np.float32)) / 8**-0.5 < 1.1


def test_the_table_has_the_size_that_is_asked_for():
    serving = Serving.of_size(69.0)
    assert 69.0e9 <= serving.table_bytes < 69.1e9
    assert serving.table_bytes // serving.num_rows == 1024


@pytest.mark.parametrize(
    "names", [("none", "device", "hot"), ("zero_copy", "staged_sync", "file")]
)
def test_tiers_give_equal_results(serving, names):
    (rows,) = engram_inference.measure(serving, names)
    assert [row["implementation"] for row in rows] == list(names)
    for row in rows:
        assert row["note"] == ""
        assert row["tokens_per_s"] > 0
    assert rows[-1]["apart"] < 1e-3
    if "none" in names:
        assert rows[0]["lookups_per_token"] == 0
        assert "loss_to_device" in rows[0]
        assert 0 < rows[-1]["hot_share"] < 1
    else:
        assert rows[-1]["wait_ms"] > 0
        assert rows[-1]["rows_per_batch"] > 1


class NoModel:
    def gathered(self):
        return print, None


@pytest.mark.parametrize("names", [("file",), ("staged", "file_sync")])
def test_a_table_for_a_file_is_never_copied_whole(serving, monkeypatch, names):
    saved, save_table = [], engram_inference.save_table

    def save(folder, rows):
        saved.append(rows)
        save_table(folder, rows)

    monkeypatch.setattr(engram_inference, "save_table", save)
    models: Any = NoModel()
    with contextlib.ExitStack() as closing:
        tiers = engram_inference.make_tiers(serving, names, models, closing)
        assert [tier.name for tier in tiers] == list(names)
    (rows,) = saved
    if len(names) == 1:
        assert isinstance(rows, jax.Array)
    else:
        assert not rows.flags.owndata
    assert rows.shape == (serving.num_rows, serving.engram.head_dim)


def test_decoding_gives_the_tokens_hidden_states_from_each_tier(serving):
    decoding = engram_decode.Decoding(batch=2, held=3, slots=8, tokens=2, rounds=2)
    names = ("device", "staged_sync")
    (rows,) = engram_decode.measure(serving, decoding, names)
    assert [row["note"] for row in rows] == ["", ""]
    # One program for all tokens, and a call a token.
    assert rows[1]["apart"] < 1e-3
    assert "loss_to_device" in rows[1]


def rows_of_outputs(serving, *outputs):
    """Rows of tiers whose batches gave these values, by prompts and token by token."""
    prompts, tokens = [], []
    arrays = [[np.full(4, x, np.float32) for x in values] for values in outputs]
    for name, out in zip(("device", "zero_copy"), arrays, strict=True):
        done = engram_inference.Round(seconds=1, waited=0, tokens=5, outputs=out)
        tier = engram_inference.Tier(name=name, read=None, state=None)
        tier.rounds = [done] * 2
        prompts.append(tier)
        step = engram_decode.Tier(name=name, step=print, state=None, cache=None)
        step.seconds, step.outputs = [1.0, 1.0], out
        tokens.append(step)
    decoding = engram_decode.Decoding(batch=2, held=1, slots=8, tokens=2, rounds=2)
    return (
        engram_inference.rows_of(serving, prompts),
        engram_decode.rows_of(serving, decoding, tokens),
    )


@pytest.mark.parametrize(
    "values", [(1.1, 1.0), (1.0, 1.1), (1.0, np.nan), (np.nan, 1.0)]
)
def test_a_result_that_differs_has_no_speed(serving, values):
    for right, wrong in rows_of_outputs(serving, (1.0, 1.0), values):
        assert right["ms"] > 0
        assert right["note"] == ""
        assert wrong["ms"] is None
        assert wrong["tokens_per_s"] is None
        assert "differ" in wrong["note"] or "not finite" in wrong["note"]
        assert not engram_inference.is_good(wrong)


def test_what_is_compared_with_nan_has_no_speed_either(serving):
    for rows in rows_of_outputs(serving, (1.0, np.nan), (1.0, 1.0)):
        assert [row["ms"] for row in rows] == [None, None]
        assert [row["apart"] for row in rows] == [None, None]
    one, nan = np.ones(4, np.float32), np.full(4, np.nan, np.float32)
    assert np.isnan(engram_inference.apart([one, nan], [one, one]))
    assert np.isnan(engram_inference.apart([one, one, one], [one, nan, one]))


def test_unknown_tiers_and_full_caches_are_named(serving):
    with pytest.raises(ValueError, match="tier 'disk' is unknown"):
        next(engram_inference.measure(serving, ("disk",)))
    decoding = engram_decode.Decoding(batch=2, held=1, slots=8, tokens=2, rounds=2)
    with pytest.raises(ValueError, match="tier 'hot' is unknown"):
        next(engram_decode.measure(serving, decoding, ("hot",)))
    with pytest.raises(ValueError, match="slots=4"):
        engram_decode.Decoding(held=3, slots=4, tokens=2, rounds=2)


def experiment_row(model, **changes):
    sizes = {"workload": "t", "steps": 9, "batch": 2, "seeds": 2, "seed": 0}
    row = {"subject": "experiment", "op": "parts", "over_model": "a", **sizes}
    return {**row, "model": model, **changes}


@pytest.mark.parametrize(
    "change",
    [{"steps": 8}, {"batch": 4}, {"seeds": 3}, {"seed": 1}, {"over_model": "b"}],
)
def test_rows_of_another_run_stay_and_are_told_apart(tmp_path, change):
    path = tmp_path / "rows.json"
    whole = [experiment_row(model) for model in "abc"]
    part = [experiment_row(model, **change) for model in "bc"]
    results.write(path, whole)
    results.update(path, part, engram.NAME)
    rows = results.read(path)
    assert rows == [*whole, *part]
    assert engram.of_one_run(rows) == whole
    # Of one run: the newer row takes the place.
    again = [experiment_row("b", note="new")]
    results.write(path, whole)
    results.update(path, again, engram.NAME)
    assert results.read(path) == [whole[0], whole[2], *again]


def test_the_longest_training_is_shown_then_the_last():
    short, long, last = (
        [experiment_row(model, steps=steps, seed=seed) for model in "ab"]
        for steps, seed in ((3, 0), (9, 0), (9, 1))
    )
    assert engram.of_one_run([*long, *short]) == long
    assert engram.of_one_run([*long, *short, *last]) == last
    assert engram.of_one_run([]) == []


def test_rows_of_an_earlier_call_stay(tmp_path, capsys):
    path = tmp_path / "rows.json"
    command = ["engram", "--only", "optimizer", "--lookups", "64", "--sums", "xla"]
    for sizes in ("100", "200", "100"):
        argv = [*command, "--sizes", sizes, "--json", str(path), "--commit", "abc"]
        assert benchmarks.main(argv) == 0
    rows = json.loads(path.read_text())["rows"]
    assert [row["table_rows"] for row in rows] == [200, 100]
    assert rows[0]["commit"] == "abc"
    assert "xla" in capsys.readouterr().out


def test_a_subject_must_be_named(capsys):
    with pytest.raises(SystemExit):
        engram.main(["--json", "x.json"])
    assert "--only" in capsys.readouterr().err
