"""The packing benchmark compares outputs, counts real tokens and writes one file."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxaccel import benchmarks
from jaxaccel.benchmarks import packing, step
from jaxaccel.config.registry import Experiment
from jaxaccel.data.batch import packing_metadata
from jaxaccel.data.pipeline import DataConfig
from jaxaccel.data.sources import InMemorySource
from jaxaccel.models.decoder import Decoder
from jaxaccel.models.qwen3_5_text import Qwen3_5TextConfig
from jaxaccel.training.config import TrainConfig


@pytest.fixture
def experiment():
    texts = tuple("packing " * count for count in (1, 2, 3, 1, 5, 2, 1, 1, 4, 2))
    return Experiment(
        model=dataclasses.replace(
            Qwen3_5TextConfig.tiny(),
            vocab_size=300,
            num_layers=1,
            pattern=("attention",),
            implementation="reference",
        ),
        data=DataConfig(
            sources=(InMemorySource(texts=texts),),
            tokenizer="byte",
            vocab_size=300,
            seq_len=48,
            batch_size=2,
            heldout_fraction=0.0,
        ),
        train=TrainConfig(num_steps=10),
    )


@pytest.fixture
def trained(monkeypatch):
    """Puts a step that trains nothing in place of the compiled one."""

    def set_losses(*losses):
        left = iter(losses)
        contender = step.Contender(
            name="jaxaccel",
            advance=lambda state, batch: (state, jnp.float32(next(left))),
            state=None,
            compile_seconds=1.0,
            peak_bytes=2**30,
        )
        monkeypatch.setattr(
            packing, "ours", lambda experiment, batch: (contender, None)
        )

    return set_losses


def drawn(config, seed):
    """A decoder whose parameters nothing had to compile."""
    draw = np.random.default_rng(seed)
    abstract = nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0)))
    graphdef, state = nnx.split(abstract)
    return nnx.merge(
        graphdef,
        jax.tree.map(
            lambda leaf: jnp.asarray(draw.normal(size=leaf.shape), leaf.dtype), state
        ),
    )


def run(monkeypatch, experiment, path, *options):
    monkeypatch.setattr(packing, "init_decoder", drawn)
    monkeypatch.setattr(packing, "load_experiment", lambda files, bindings: experiment)
    arguments = ["--gin_file", "a/b.gin", "--json", str(path), "--rounds", "2"]
    status = benchmarks.main(["packing", *arguments, "--steps", "1", *options])
    return status, json.loads(path.read_text())["rows"]


def test_rows_of_all_parts(monkeypatch, experiment, trained, tmp_path):
    trained(*[2.0] * 4)
    few = packing.log_normal_lengths(100)
    monkeypatch.setattr(packing, "log_normal_lengths", lambda: few)
    options = ["--row_lengths", "48"]
    status, rows = run(monkeypatch, experiment, tmp_path / "rows.json", *options)
    assert status == 0
    of = {op: [r for r in rows if r["op"] == op] for op in {r["op"] for r in rows}}
    ways = of["packing_metadata"]
    assert [r["implementation"] for r in ways] == ["build_alone", *packing.WAYS]
    assert all(r["ms"] > 0 and r["device_ms"] > 0 for r in ways)
    assert [r["apart"] for r in ways[1:]] == [0.0] * 3
    assert ways[1]["ratio"] == 1.0
    assert ways[1]["runs"]["attention"] == "reference"
    assert ways[1]["tables"] == []
    assert len(of["pack"]) == 2 * 4
    padded, packed = of["train_packed"]
    assert (padded["implementation"], packed["implementation"]) == (
        "one_per_row",
        "bfd",
    )
    assert padded["documents_per_row"] == 1.0
    assert padded["efficiency"] < packed["efficiency"] <= 1.0
    for row in (padded, packed):
        tokens = row["efficiency"] * 2 * 48
        assert row["tokens_per_s"] == pytest.approx(tokens / row["ms"] * 1e3, rel=1e-3)
    assert all(row["device"] and row["date"] for row in rows)


def test_packing_counts_what_rows_hold(experiment):
    lengths = np.array([30, 18, 40, 8, 100])
    rows = packing.pack_rows(experiment.data, {"some": lengths}, [48])
    assert [r["implementation"] for r in rows] == [
        *("one_per_row", "bfd", "first_fit", "next_fit")
    ]
    one, best, *_ = rows
    # 100 is split into two whole rows and a rest of 4.
    assert (one["rows"], best["rows"]) == (7, 5)
    assert one["efficiency"] == pytest.approx(196 / (7 * 48), rel=1e-3)
    assert best["ratio"] == pytest.approx(7 / 5, rel=1e-3)
    lengths = packing.log_normal_lengths(1000)
    assert lengths.min() >= 16
    assert np.median(lengths) == pytest.approx(600, rel=0.1)


def test_no_speed_for_another_output_or_a_broken_loss(
    monkeypatch, experiment, trained, tmp_path
):
    def build(shape, *, segment_ids, tables):
        found.append(None)
        # The third program that asks is "each_layer".
        ids = jnp.ones_like(segment_ids) if len(found) == 3 else segment_ids
        return packing_metadata(shape, segment_ids=ids, tables=tables)

    found = []
    monkeypatch.setattr(packing, "packing_metadata", build)
    monkeypatch.setattr(packing, "WAYS", ("once", "each_layer"))
    trained(2.0, 2.0, 2.0, float("nan"))
    options = ["--parts", "metadata,train"]
    status, rows = run(monkeypatch, experiment, tmp_path / "rows.json", *options)
    assert status == 1
    by_name = {row["implementation"]: row for row in rows}
    assert by_name["once"]["ms"] > 0
    assert by_name["each_layer"]["ms"] is None
    assert "no speed" in by_name["each_layer"]["note"]
    assert by_name["one_per_row"]["tokens_per_s"] > 0
    assert by_name["bfd"]["tokens_per_s"] is None


def test_an_unknown_part_is_refused(experiment):
    with pytest.raises(ValueError, match="part 'pact' is unknown"):
        next(
            packing.measure(
                experiment,
                workload="x",
                parts=["pact"],
                row_lengths=[],
                rounds=2,
                steps=1,
            )
        )
