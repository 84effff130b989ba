"""The committed mixtures have the sizes of the models that they are named after."""

import dataclasses
import pathlib

import pytest

from jaxaccel.config.gin_utils import load_config, load_experiment
from jaxaccel.config.moe import MoEBenchConfig
from jaxaccel.config.writer import experiment_text
from jaxaccel.nn.router import MoEConfig


FOLDER = pathlib.Path(__file__).parents[2] / "experiments" / "moe"

# Bytes of the experts in bf16 and operations of 8192 tokens, counted by hand:
# E * matrices * d * F * 2, and 2 * T * k * matrices * d * F.
PUBLISHED = {
    "nemotron3_nano": (128 * 2 * 2688 * 1856 * 2, 2 * 8192 * 6 * 2 * 2688 * 1856),
    "nemotron3_super": (512 * 2 * 1024 * 2688 * 2, 2 * 8192 * 22 * 2 * 1024 * 2688),
    "qwen3_next": (512 * 3 * 2048 * 512 * 2, 2 * 8192 * 10 * 3 * 2048 * 512),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_sizes_are_the_published_ones(name):
    config = load_config("MoEBenchConfig", [FOLDER / f"{name}.gin"])
    found = 2 * config.routed_weights, config.routed_flops
    assert found == PUBLISHED[name]
    assert config.moe.shared_d_ff > 0
    assert config.moe.shared_gate == (name == "qwen3_next")


def test_a_latent_of_a_quarter_pays_for_itself():
    """22 of 512 experts and two projections cost what 6 of 128 do in the full width."""
    latent = load_config("MoEBenchConfig", [FOLDER / "nemotron3_super.gin"])
    wide = MoEBenchConfig(
        moe=MoEConfig(num_experts=128, top_k=6, d_ff=2688, activation="relu2"),
        d_model=4096,
    )
    projections = 2 * latent.tokens * 2 * latent.moe.d_latent * latent.d_model
    assert latent.routed_flops + projections == pytest.approx(
        wide.routed_flops, rel=0.03
    )


@pytest.mark.parametrize("name", ["tiny_latent", "latent_h200"])
def test_experiments_survive_being_written(name, tmp_path):
    experiment = load_experiment([FOLDER / f"{name}.gin"])
    path = tmp_path / "config.gin"
    path.write_text(experiment_text(experiment))
    assert load_experiment([path]) == experiment
    assert experiment.model.moe.d_latent > 0


@pytest.mark.parametrize("form", ["ablation", "ablation_tiny"])
def test_both_mixtures_of_an_ablation_cost_the_same(form):
    """Parameters of the experts and products of a token, projections with them."""
    costs, rest = [], []
    for name in ("standard", "latent"):
        experiment = load_experiment([FOLDER / f"{form}_{name}.gin"])
        model = experiment.model
        layer = MoEBenchConfig(moe=model.moe, d_model=model.d_model, tokens=1)
        products = layer.routed_flops + 4 * model.moe.d_latent * model.d_model
        costs.append((layer.routed_weights, products))
        same = dataclasses.replace(model.moe, num_experts=1, top_k=1, d_latent=0)
        rest.append(
            dataclasses.replace(experiment, model=dataclasses.replace(model, moe=same))
        )
    assert costs[0] == costs[1]
    assert rest[0] == rest[1]


def test_sizes_are_checked():
    moe = MoEConfig(num_experts=4, top_k=2, d_ff=8)
    with pytest.raises(ValueError, match="tokens=0"):
        MoEBenchConfig(moe=moe, d_model=8, tokens=0)
