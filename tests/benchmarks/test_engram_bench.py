"""The memory's benchmarks check what they time, and keep rows of earlier calls."""

import dataclasses
import json

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
)
from jaxaccel.benchmarks.engram_optimizer import OptimizerBench
from jaxaccel.benchmarks.engram_serving import Serving


SMALL = OptimizerBench(
    sizes=(300, 5000), lookups=256, width=8, dense_rows=300, rounds=2, calls=1
)


@pytest.fixture
def serving(monkeypatch):
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


def test_sizes_that_do_not_ascend_are_named():
    with pytest.raises(ValueError, match=r"sizes=\(5, 3\)"):
        OptimizerBench(sizes=(5, 3))


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


def test_frequent_words_have_small_numbers():
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


def test_decoding_gives_the_tokens_hidden_states_from_each_tier(serving):
    decoding = engram_decode.Decoding(batch=2, held=3, slots=8, tokens=2, rounds=2)
    names = ("device", "staged_sync")
    (rows,) = engram_decode.measure(serving, decoding, names)
    assert [row["note"] for row in rows] == ["", ""]
    # One program for all tokens, and a call a token.
    assert rows[1]["apart"] < 1e-3
    assert "loss_to_device" in rows[1]


def test_a_result_that_differs_has_no_speed(serving):
    outputs = [[np.ones(4, np.float32)], [np.full(4, 1.1, np.float32)]]
    tiers = [
        engram_inference.Tier(
            name=name,
            read=None,
            state=None,
            rounds=[engram_inference.Round(seconds=1, waited=0, tokens=5, outputs=out)]
            * 2,
        )
        for name, out in zip(("device", "zero_copy"), outputs, strict=True)
    ]
    right, wrong = engram_inference.rows_of(serving, tiers)
    assert right["ms"] == 500
    assert wrong["ms"] is None
    assert wrong["tokens_per_s"] is None
    assert "differ" in wrong["note"]
    assert not engram_inference.is_good(wrong)


def test_unknown_tiers_and_full_caches_are_named(serving):
    with pytest.raises(ValueError, match="tier 'disk' is unknown"):
        next(engram_inference.measure(serving, ("disk",)))
    decoding = engram_decode.Decoding(batch=2, held=1, slots=8, tokens=2, rounds=2)
    with pytest.raises(ValueError, match="tier 'hot' is unknown"):
        next(engram_decode.measure(serving, decoding, ("hot",)))
    with pytest.raises(ValueError, match="slots=4"):
        engram_decode.Decoding(held=3, slots=4, tokens=2, rounds=2)


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
