"""Rows of an ablation: losses, speed and curves of every seed."""

import types

import pytest

from jaxaccel.benchmarks import ablation
from pallas_kernels._common.bench import ROOT


def test_a_row_has_the_curves_of_every_seed(monkeypatch, tmp_path):
    def train_once(experiment, seed, corpus_dir):
        assert corpus_dir == tmp_path
        outcome = types.SimpleNamespace(final_eval={"nats_per_byte": 2.0 + seed})
        rows = [
            {
                "step": step,
                "nats_per_token": 5.0 - seed,
                "router_max_violation": None if seed == 2 else 0.25 * step,
                "tokens_per_second": 10.0,
            }
            for step in (1, 2)
        ]
        return outcome, rows

    monkeypatch.setattr(ablation, "train_once", train_once)
    path = str(ROOT / "experiments" / "moe" / "ablation_tiny_latent.gin")
    row = ablation.measure(path, [], [0, 1, 2], tmp_path)
    assert row["workload"] == "ablation_tiny_latent"
    assert row["heldout_by_seed"] == [2.0, 3.0, 4.0]
    assert row["heldout"] == pytest.approx(3.0)
    assert row["curves"] == {
        "step": [1, 2],
        "nats_per_token": [[5.0, 5.0], [4.0, 4.0], [3.0, 3.0]],
        "router_max_violation": [[0.25, 0.5], [0.25, 0.5], None],
    }
