"""Nemotron-H configs: spellings, round trips, refusals, published sizes, presets."""

import dataclasses
import json
import logging
import math
import pathlib
import shutil

import pytest
from flax import nnx

from jaxaccel import load_pretrained
from jaxaccel.config.gin_utils import load_experiment
from jaxaccel.config.writer import experiment_text
from jaxaccel.models.decoder import Decoder
from jaxaccel.models.describe import describe
from jaxaccel.models.gpt_oss import GptOssConfig
from jaxaccel.models.hf import family_config, model_config
from jaxaccel.models.nemotron_h import NemotronHConfig
from jaxaccel.nn.rope import RopeConfig


ROOT = pathlib.Path(__file__).parents[2]
GOLDENS = ROOT / "tests" / "goldens"


def raw(name="nemotron_h", file="config.json", **changes):
    return {**json.loads((GOLDENS / name / file).read_text()), **changes}


@pytest.mark.parametrize("name", ["nemotron_nano", "nemotron_h"])
def test_spellings_agree(name, caplog):
    new = NemotronHConfig.from_hf(raw(name))
    assert new == NemotronHConfig.from_hf(raw(name, "config_hub.json"))
    # Words of older files.
    words = {"linear_attention": "mamba", "full_attention": "attention"}
    older = [words.get(word, word) for word in raw(name)["layers_block_type"]]
    assert new == NemotronHConfig.from_hf(raw(name, layers_block_type=older))
    assert not caplog.records
    assert new.dt_limit == (0.0, None)
    assert new.decoder().mamba.dt_limit == (0.0, math.inf)
    assert (new.d_ff, new.d_latent) == ((0, 0) if "nano" in name else (80, 24))
    assert (new.expert_groups, new.top_expert_groups) == (1 + ("nano" in name), 1)
    with caplog.at_level(logging.WARNING):
        NemotronHConfig.from_hf(raw(name, layer_scale=0.5))
    assert "layer_scale" in caplog.text


def test_prediction_block_of_a_file():
    hub = raw(file="config_hub.json", num_nextn_predict_layers=2)
    config = NemotronHConfig.from_hf(hub)
    assert config.pattern == "MEM*E-ME/*E/*E"
    spelled = {**hub, "mtp_hybrid_override_pattern": "*E"}
    assert NemotronHConfig.from_hf(spelled) == config
    plan = config.decoder()
    assert (plan.num_mtp_layers, plan.mtp_depth) == (1, 2)
    assert family_config(plan) == config


def test_places_of_layers_and_routers():
    """Runs are "ME" twice, "M*E" once, "ME" three times."""
    config = NemotronHConfig.tiny(pattern="MEMEM*EMEMEME").decoder()
    runs = [("".join(k[0] for k in run.kinds), run.repeats) for run in config.runs]
    assert runs == [("mm", 2), ("mam", 1), ("mm", 3)]
    assert config.layer_places[:6] == ((0, 0), (1, 0), (0, 1), (1, 1), (2, 0), (3, 0))
    assert config.router_places == ((1, 0), (1, 1), (4, 0), (6, 0), (6, 1), (6, 2))
    # A pattern that repeats is one run, and a paired layer has both parts.
    again = dataclasses.replace(config, pattern=("mamba", "moe"), num_layers=6)
    assert again.positions == (("mamba", 3), ("moe", 3))
    assert again.router_places == ((1, 0), (1, 1), (1, 2))


def test_a_block_that_is_announced_and_missing(tmp_path, caplog):
    for file in ("config.json", "model.safetensors"):
        shutil.copyfile(GOLDENS / "nemotron_h" / file, tmp_path / file)
    found = raw(num_nextn_predict_layers=1)
    del found["dtype"]  # then the embedding's
    (tmp_path / "config.json").write_text(json.dumps(found))
    with caplog.at_level(logging.WARNING):
        model = load_pretrained(tmp_path)
    assert "announces a prediction block" in caplog.text
    assert model.config.num_mtp_layers == 0
    assert model.config.dtype == "float32"


@pytest.mark.parametrize(
    "config",
    [
        NemotronHConfig.tiny(),
        NemotronHConfig.tiny(pattern="MEM*E-/*E/*E", dt_limit=(1e-3, 2.0)),
        NemotronHConfig.tiny(pattern="MMM*", num_experts=0, d_ff=0),
        NemotronHConfig.tiny(pattern="M-*-/*-", state_dtype="bfloat16"),
        NemotronHConfig.published(dtype="float32"),
        NemotronHConfig.published("super", dtype="float32", tie_embeddings=True),
    ],
    ids=lambda config: config.pattern,
)
def test_round_trips(config):
    canonical = family_config(config.decoder())
    # Sizes of layers that the pattern lacks are not kept.
    assert canonical.decoder() == config.decoder()
    assert family_config(canonical.decoder()) == canonical
    stored = model_config(json.loads(json.dumps(canonical.to_hf())))
    assert stored.decoder() == canonical.decoder()
    if "E" in config.pattern:
        placed = dataclasses.replace(canonical, expert_axis="fsdp", z_loss_coef=1e-3)
        assert family_config(placed.decoder()) == placed
        # How a model is trained is no part of a file.
        assert model_config(placed.to_hf()) == canonical


@pytest.mark.parametrize(
    "error, changes, names",
    [
        (NotImplementedError, {"attention_bias": True}, ["attention_bias=True"]),
        (NotImplementedError, {"mlp_bias": True}, ["mlp_bias=True"]),
        (NotImplementedError, {"use_bias": True}, ["use_bias=True"]),
        (NotImplementedError, {"mamba_proj_bias": True}, ["mamba_proj_bias=True"]),
        (NotImplementedError, {"use_conv_bias": False}, ["use_conv_bias=False"]),
        (NotImplementedError, {"mlp_hidden_act": "silu"}, ["'silu'", "relu2"]),
        (NotImplementedError, {"norm_type": "layer_norm"}, ["'layer_norm'"]),
        (NotImplementedError, {"residual_in_fp32": True}, ["residual_in_fp32=True"]),
        (
            NotImplementedError,
            {"rope_scaling": {"rope_type": "yarn"}},
            ["rope_scaling", "yarn"],
        ),
        (NotImplementedError, {"sliding_window": 128}, ["sliding_window=128"]),
        (
            NotImplementedError,
            {"mtp_layers_block_type": ["mlp"], "num_nextn_predict_layers": 1},
            ["('mlp',)", "('attention', 'moe')"],
        ),
        (ValueError, {"layers_block_type": ["conv"]}, ["'conv'"]),
        (ValueError, {"layers_block_type": None}, ["hybrid_override_pattern"]),
        (ValueError, {"hybrid_override_pattern": "ME"}, ["'ME'", "disagree"]),
        (ValueError, {"num_hidden_layers": 9}, ["8 layers", "num_hidden_layers=9"]),
        (ValueError, {"n_groups": 3}, ["num_groups=3"]),
        (ValueError, {"time_step_limit": [1.0, 0.5]}, ["dt_limit=(1.0, 0.5)"]),
    ],
)
def test_what_a_file_cannot_ask_for(error, changes, names):
    with pytest.raises(error) as caught:
        NemotronHConfig.from_hf(raw(**changes))
    assert all(name in str(caught.value) for name in names), caught.value


def test_what_a_checkpoint_cannot_say():
    config = NemotronHConfig.tiny().decoder()

    def refused(match, **changes):
        with pytest.raises(ValueError, match=match):
            family_config(dataclasses.replace(config, **changes))

    still = dataclasses.replace(config.mlp, bias_update_rate=0.0)
    refused(r"mlp\.bias_update_rate=0", mlp=still)
    softmax = dataclasses.replace(config.mlp, score="softmax")
    refused(r"mlp\.score='softmax'", mlp=softmax)
    turned = dataclasses.replace(config.attention, rope=RopeConfig())
    refused("rope=", attention=turned)
    refused("zero_centered_norms=True", zero_centered_norms=True)
    refused("both mixers", attention=None, pattern=("mamba",), num_layers=1)
    with pytest.raises(NotImplementedError, match=r"\['gdn'\], supported are M \* E -"):
        NemotronHConfig.tiny(pattern="MGE")
    with pytest.raises(ValueError, match="'ultra', allowed are nano, super"):
        NemotronHConfig.published("ultra")
    with pytest.raises(ValueError, match="num_experts=0"):
        NemotronHConfig.tiny(num_experts=0)
    with pytest.raises(ValueError, match="must begin with a number"):
        NemotronHConfig.tiny(dt_limit=(None, 1.0))
    with pytest.raises(ValueError, match="needs single_part=True"):
        GptOssConfig.tiny().decoder().__class__(
            **{**vars(GptOssConfig.tiny().decoder()), "dense_mlp": config.dense_mlp}
        )
    with pytest.raises(ValueError, match="field `mlp` must be of that kind"):
        dataclasses.replace(config, mlp=config.dense_mlp)


@pytest.mark.parametrize(
    "size, params, billions, active",
    [
        # The reports' tables: 31.6B and 3.2B; 120.6B, of which 12.2B without tables.
        ("nano", 31_577_940_288, 31.58, 3.23),
        ("super", 120_668_707_840, 120.67, 12.23),
    ],
)
def test_published_sizes_and_presets(size, params, billions, active, tmp_path):
    experiment = load_experiment([ROOT / "experiments" / "nemotron" / f"{size}.gin"])
    config = experiment.model.decoder()
    published = NemotronHConfig.published(size, remat_policy="full")
    assert experiment.model == published
    found = describe(config, seq_len=131_072)
    assert found.trunk.params == params
    assert round(params / 1e9, 2) == billions
    assert round(found.trunk.active_params / 1e9, 2) == active
    shapes = nnx.state(nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0))))
    sizes = [leaf.get_value().size for _, leaf in nnx.to_flat_state(shapes)]
    assert sum(sizes) == found.total.params
    counts = {row.name: row.count for row in found.rows}
    main = published.pattern.split("/")[0]
    assert counts["layer: mamba"] == main.count("M")
    assert counts["layer: moe"] == main.count("E")
    assert counts["layer: attention"] == main.count("*")
    # Keys and values of two heads; states in f32 and three inputs of the convolution.
    assert found.total.kv_bytes_per_token == main.count("*") * 2 * 2 * 128 * 2
    heads = published.mamba_heads
    state = heads * 64 * 128 * 4 + 3 * (heads * 64 + 2 * 8 * 128) * 2
    assert found.total.state_bytes == main.count("M") * state
    path = tmp_path / "config.gin"
    path.write_text(experiment_text(experiment))
    assert load_experiment([path]) == experiment
