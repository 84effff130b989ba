"""config.json in, config out: both spellings, bad values, round trips."""

import dataclasses
import json
import logging
import math
import pathlib

import pytest

from jaxaccel.models.hf import family_config, model_config
from jaxaccel.models.hf_config import plain_floats, read_config, shortest_period
from jaxaccel.models.qwen3_5_text import Qwen3_5TextConfig
from jaxaccel.models.qwen3_next import Qwen3NextConfig


ROOT = pathlib.Path(__file__).parent.parent / "goldens"
FAMILIES = [Qwen3NextConfig, Qwen3_5TextConfig]


def raw(model="qwen3_next", file="config.json", **changes):
    return {**json.loads((ROOT / model / file).read_text()), **changes}


def hub_spelling(new):
    """The older spelling of a config of transformers 5."""
    old = dict(new)
    rope = old.pop("rope_parameters")
    old |= {key: rope[key] for key in ("rope_theta", "partial_rotary_factor")}
    old |= {"rope_scaling": None, "full_attention_interval": 4}
    old["torch_dtype"] = old.pop("dtype")
    del old["layer_types"]
    return old


def test_spellings_agree():
    new = Qwen3NextConfig.from_hf(raw())
    assert new == Qwen3NextConfig.from_hf(raw(file="config_hub.json"))
    assert new == Qwen3NextConfig.from_hf(hub_spelling(raw()))
    assert new.pattern == ("gdn", "gdn", "gdn", "attention")
    assert (new.rope_theta, new.rotary_fraction) == (10_000.0, 0.25)
    assert (new.num_experts, new.experts_per_token, new.d_expert) == (8, 3, 16)
    text = Qwen3_5TextConfig.from_hf(raw("qwen3_5_text"))
    assert text == Qwen3_5TextConfig.from_hf(hub_spelling(raw("qwen3_5_text")))
    assert text.d_ff == 80


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("start", ["tiny", "published"])
def test_round_trips(family, start):
    config = getattr(family, start)(num_mtp_layers=1, param_dtype="float32")
    assert family.from_decoder(config.decoder()) == config
    again = family.from_hf(json.loads(json.dumps(config.to_hf())))
    # A file has one dtype; how a model is run is no part of it.
    assert dataclasses.replace(again, dtype=config.dtype) == config
    assert model_config(config.to_hf()) == again
    assert family_config(config.decoder()) == config


@pytest.mark.parametrize(
    "kinds, period",
    [
        (["linear_attention"] * 4, ("gdn",)),
        (["mamba", "mamba", "attention"] * 2, ("gdn", "gdn", "attention")),
        (
            ["linear_attention", "full_attention", "full_attention"],
            ("gdn", "attention", "attention"),
        ),
    ],
)
def test_layer_types(kinds, period):
    config = raw(layer_types=kinds, num_hidden_layers=len(kinds))
    # A pruned model keeps an interval that no longer holds; the list counts.
    config["full_attention_interval"] = 4
    found = Qwen3NextConfig.from_hf(config)
    assert found.pattern == period
    assert found.decoder().layer_types == period * (len(kinds) // len(period))
    assert Qwen3NextConfig.from_hf(found.to_hf()) == found


def test_shortest_period():
    assert shortest_period("abab") == ("a", "b")
    assert shortest_period("aba") == ("a", "b", "a")
    assert shortest_period("aaa") == ("a",)


def test_infinity_in_both_spellings(tmp_path):
    for text in ('{"a": [0.0, Infinity]}', '{"a": [0.0, {"__float__": "Infinity"}]}'):
        (tmp_path / "config.json").write_text(text)
        assert plain_floats(read_config(tmp_path)) == {"a": [0.0, math.inf]}


def test_unknown_keys_are_logged_once(caplog):
    with caplog.at_level(logging.WARNING):
        Qwen3NextConfig.from_hf(raw(swizzle=3, another=None))
    (record,) = caplog.records
    assert "['another', 'swizzle']" in record.getMessage()
    caplog.clear()
    for model, file in (
        ("qwen3_next", "config.json"),
        ("qwen3_next", "config_hub.json"),
        ("qwen3_5_text", "config.json"),
    ):
        model_config(raw(model, file))
    assert not caplog.records


@pytest.mark.parametrize(
    "changes, names",
    [
        ({"attention_bias": True}, ["attention_bias=True", "False"]),
        ({"hidden_act": "gelu"}, ["hidden_act='gelu'", "silu"]),
        ({"decoder_sparse_step": 2}, ["decoder_sparse_step=2"]),
        ({"mlp_only_layers": [1]}, ["mlp_only_layers=[1]"]),
        (
            {"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4}},
            ["rope_type='longrope'"],
        ),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, ["rope_type='yarn'"]),
        ({"model_type": "gpt2"}, ["'gpt2'", "qwen3_next"]),
    ],
)
def test_what_cannot_be_computed_is_refused(changes, names):
    with pytest.raises(NotImplementedError) as error:
        model_config(raw(**changes))
    assert all(name in str(error.value) for name in names), error.value


@pytest.mark.parametrize(
    "changes, names",
    [
        ({"hidden_size": None}, ["hidden_size"]),
        ({"num_attention_heads": 3}, ["num_heads=3", "num_kv_heads=2"]),
        ({"linear_num_value_heads": 3}, ["num_value_heads=3", "num_key_heads=2"]),
        ({"num_hidden_layers": 5}, ["num_hidden_layers=5", "4 layers"]),
        ({"layer_types": ["conv"] * 4}, ["conv", "linear_attention"]),
        ({"num_experts_per_tok": 9}, ["top_k=9", "num_experts=8"]),
        ({"dtype": "int4"}, ["int4", "bfloat16"]),
        ({"torch_dtype": "bfloat16"}, ["bfloat16", "float32"]),
        ({"vocab_size": 0}, ["vocab_size=0"]),
        ({"rope_parameters": {}}, ["rope_theta"]),
        ({"full_attention_interval": 0, "layer_types": None}, ["0", "interval"]),
        ({"num_mtp_layers": 2}, ["num_mtp_layers=2"]),
    ],
)
def test_bad_values_are_named(changes, names):
    with pytest.raises(ValueError) as error:  # noqa: PT011 (checked below)
        Qwen3NextConfig.from_hf(raw(**changes))
    assert all(name in str(error.value) for name in names), error.value


def test_pattern_words_and_families_are_checked():
    with pytest.raises(ValueError, match="mamba3"):
        Qwen3NextConfig.tiny(pattern=("gdn", "mamba3"))
    config = Qwen3NextConfig.tiny().decoder()
    windowed = dataclasses.replace(config.attention, window=16)
    with pytest.raises(ValueError, match=r"attention\.window=16"):
        family_config(dataclasses.replace(config, attention=windowed))
    with pytest.raises(ValueError, match="cannot say"):
        Qwen3_5TextConfig.from_decoder(config)


def test_unreadable_config(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"config\.json"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match="not JSON"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ValueError, match="list"):
        read_config(tmp_path)
