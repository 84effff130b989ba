"""The pattern ablation's configs differ in what they say and in nothing else."""

import dataclasses
import pathlib

import pytest

from jaxaccel.config.gin_utils import load_experiment
from jaxaccel.models.describe import describe
from jaxaccel.models.nemotron_h import NemotronHConfig


FOLDER = pathlib.Path(__file__).parents[2] / "experiments" / "nemotron"
MIXERS = ("mamba", "attention", "hybrid", "hybrid_first", "hybrid_last")


def loaded(name):
    return load_experiment([str(FOLDER / f"ablation_{name}.gin")])


@pytest.fixture(scope="module")
def experiments():
    return {name: loaded(name) for name in (*MIXERS, "moe", "latent_moe")}


def test_patterns_differ_and_nothing_else(experiments):
    first = experiments["mamba"]
    for name in MIXERS:
        other = experiments[name]
        model = dataclasses.replace(other.model, pattern=first.model.pattern)
        assert dataclasses.replace(other, model=model) == first
        pattern = other.model.pattern
        assert pattern.replace("*", "M") == first.model.pattern
        total = describe(other.model.decoder()).total.params
        assert total == pytest.approx(
            describe(first.model.decoder()).total.params, rel=0.01
        )


def test_the_hybrid_has_nanos_ratio_and_places(experiments):
    patterns = {name: experiments[name].model.pattern for name in MIXERS}
    assert set(patterns["mamba"]) == {"M", "-"}
    assert set(patterns["attention"]) == {"*", "-"}
    nano = NemotronHConfig.published("nano").pattern
    ratio = nano.count("M") / nano.count("*")
    for name in ("hybrid", "hybrid_first", "hybrid_last"):
        pattern = patterns[name]
        assert pattern.count("M") / pattern.count("*") == pytest.approx(ratio, rel=0.1)
    # Attention right behind Mamba-2 and before a feed-forward part, in both.
    assert patterns["hybrid"].count("M*-") == patterns["hybrid"].count("*")
    assert nano.count("M*E") == nano.count("*")
    assert patterns["hybrid_first"].startswith("*-*-M")
    assert patterns["hybrid_last"].endswith("M-*-*-")


def test_experts_in_a_latent_cost_what_others_cost(experiments):
    plain, latent = (
        experiments[name].model.decoder() for name in ("moe", "latent_moe")
    )
    a, b = describe(plain).total, describe(latent).total
    assert a.params == pytest.approx(b.params, rel=0.02)
    assert a.active_params == pytest.approx(b.active_params, rel=0.01)
    assert a.forward_flops == pytest.approx(b.forward_flops, rel=0.01)
    assert plain.d_model == 4 * latent.mlp.d_latent
    assert latent.mlp.num_experts == 4 * plain.mlp.num_experts
    hybrid = experiments["hybrid"].model.pattern
    assert experiments["moe"].model.pattern == hybrid.replace("-", "E")
