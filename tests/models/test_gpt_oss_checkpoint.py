"""gpt-oss folders and sizes: both spellings, MXFP4 experts, round trips, counts."""

import dataclasses
import json
import logging
import pathlib

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from jaxaccel import load_pretrained, save_pretrained
from jaxaccel.models.decoder import Decoder
from jaxaccel.models.describe import describe
from jaxaccel.models.gpt_oss import GptOssConfig
from jaxaccel.models.hf import family_config, model_config
from jaxaccel.models.names import Interleaved
from jaxaccel.models.qwen3_next import Qwen3NextConfig
from jaxaccel.nn.rope import LinearScaling


GOLDEN = pathlib.Path(__file__).parent.parent / "goldens" / "gpt_oss"


def raw(file="config.json", **changes):
    return {**json.loads((GOLDEN / file).read_text()), **changes}


def parameters(model):
    return {
        ".".join(map(str, path)): variable.get_value()
        for path, variable in nnx.to_flat_state(nnx.state(model))
    }


def test_spellings_agree(caplog):
    new = GptOssConfig.from_hf(raw())
    assert new == GptOssConfig.from_hf(raw("config_hub.json"))
    # As the published files have it: lengths and experts under further names.
    rope = dict(raw("config_hub.json")["rope_scaling"])
    del rope["original_max_position_embeddings"], rope["rope_theta"]
    published = raw(
        "config_hub.json",
        rope_scaling=rope,
        initial_context_length=4096,
        experts_per_token=2,
        quantization_config={"quant_method": "mxfp4", "modules_to_not_convert": []},
    )
    assert new == GptOssConfig.from_hf(published)
    assert not caplog.records
    assert new.pattern == ("sliding_attention", "attention")
    assert (new.window, new.num_experts, new.experts_per_token) == (16, 8, 2)
    assert (new.rope_factor, new.rope_original_length) == (32.0, 4096)
    assert new.rope_truncate is False
    # Without a list the layers alternate, as transformers makes them.
    assert new == GptOssConfig.from_hf(raw(layer_types=None))


@pytest.mark.parametrize(
    "config",
    [
        GptOssConfig.tiny(),
        GptOssConfig.tiny(
            rope_factor=1.0, rope_original_length=4096, pattern=("attention",)
        ),
        GptOssConfig.published(dtype="float32"),
        GptOssConfig.published("120b", dtype="float32", tie_embeddings=True),
    ],
)
def test_round_trips(config):
    assert family_config(config.decoder()) == config
    assert model_config(json.loads(json.dumps(config.to_hf()))) == config
    placed = dataclasses.replace(config, expert_axis="fsdp", z_loss_coef=1e-3)
    assert family_config(placed.decoder()) == placed
    # How a model is trained is no part of a file.
    assert model_config(placed.to_hf()) == config


@pytest.mark.parametrize(
    "error, changes, names",
    [
        (NotImplementedError, {"attention_bias": False}, ["attention_bias=False"]),
        (NotImplementedError, {"swiglu_alpha": 1.5}, ["swiglu_alpha=1.5", "1.702"]),
        (NotImplementedError, {"experts_per_token": 3}, ["experts_per_token=3", "2"]),
        (
            NotImplementedError,
            {"quantization_config": {"quant_method": "fp8"}},
            ["'fp8'", "mxfp4"],
        ),
        (
            NotImplementedError,
            {"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4}},
            ["'llama3'", "yarn"],
        ),
        (
            NotImplementedError,
            {"rope_parameters": {"rope_type": "yarn", "mscale_all_dim": 1.0}},
            ["mscale_all_dim"],
        ),
        (
            ValueError,
            {"rope_parameters": {"rope_type": "yarn", "factor": 32.0}},
            ["original_max_position_embeddings"],
        ),
        (ValueError, {"layer_types": ["linear_attention"] * 4}, ["linear_attention"]),
        (ValueError, {"sliding_window": 0}, ["window=0"]),
        (ValueError, {"swiglu_limit": -1.0}, ["swiglu_limit=-1.0"]),
    ],
)
def test_what_a_file_cannot_ask_for(error, changes, names):
    with pytest.raises(error) as caught:
        GptOssConfig.from_hf(raw(**changes))
    assert all(name in str(caught.value) for name in names), caught.value


def test_what_a_checkpoint_cannot_say():
    config = GptOssConfig.tiny().decoder()

    def refused(match, **changes):
        with pytest.raises(ValueError, match=match):
            family_config(dataclasses.replace(config, **changes))

    refused(r"mlp\.scale=2\.0", mlp=dataclasses.replace(config.mlp, scale=2.0))
    plain = dataclasses.replace(config.mlp, swiglu_limit=None)
    refused("swiglu_limit=None", mlp=plain)
    no_sinks = dataclasses.replace(config.attention, sinks=False)
    refused(r"attention\.sinks=False", attention=no_sinks)
    wide = dataclasses.replace(config.sliding_attention, window=None)
    refused(r"window=None", sliding_attention=wide)
    rope = dataclasses.replace(config.attention.rope, scaling=LinearScaling(factor=2.0))
    refused("LinearScaling", attention=dataclasses.replace(config.attention, rope=rope))
    refused("rotary", attention=None, pattern=("sliding_attention",))
    with pytest.raises(ValueError, match="mamba3"):
        GptOssConfig.tiny(pattern=("mamba3",))
    with pytest.raises(ValueError, match="'7b', allowed are 20b, 120b"):
        GptOssConfig.published("7b")
    with pytest.raises(ValueError, match="needs the configs of both mixers"):
        GptOssConfig.from_decoder(Qwen3NextConfig.tiny().decoder())


def test_saving_gives_the_same_bytes(tmp_path):
    model = load_pretrained(GOLDEN)
    save_pretrained(model, tmp_path, extra_config={"eos_token_id": 7})
    wanted, found = (
        load_file(folder / "model.safetensors") for folder in (GOLDEN, tmp_path)
    )
    assert set(found) == set(wanted)
    for name, want in wanted.items():
        assert found[name].dtype == want.dtype, name
        np.testing.assert_array_equal(found[name], want, err_msg=name)
    config = json.loads((tmp_path / "config.json").read_text())
    original = raw(eos_token_id=7)
    unsaid = {"transformers_version", "use_cache", "initializer_range"}
    unsaid |= {"output_router_logits", "bos_token_id", "pad_token_id"}
    assert config == {key: original[key] for key in set(original) - unsaid}


@pytest.fixture(scope="module")
def quantized(tmp_path_factory):
    """A folder as the hub has it: bfloat16 with experts in random MXFP4."""
    folder = tmp_path_factory.mktemp("quantized")
    rng = np.random.default_rng(5)
    config = GptOssConfig.tiny(d_model=64, dtype="bfloat16", param_dtype="bfloat16")
    graphdef, state = nnx.split(
        nnx.eval_shape(lambda: Decoder(config.decoder(), rngs=nnx.Rngs(0)))
    )

    def draw(leaf):
        return jnp.asarray(rng.standard_normal(leaf.shape), leaf.dtype)

    save_pretrained(nnx.merge(graphdef, jax.tree.map(draw, state)), folder)
    stored = {
        name: array.astype(ml_dtypes.bfloat16)
        for name, array in load_file(folder / "model.safetensors").items()
    }
    experts = {}
    for name in [
        name for name in stored if name.endswith("_proj") and "experts" in name
    ]:
        count, d_in, d_out = stored.pop(name).shape
        shape = (count, d_out, d_in // 32)
        stored[name + "_blocks"] = rng.integers(0, 256, (*shape, 16), dtype=np.uint8)
        stored[name + "_scales"] = rng.integers(110, 140, shape, dtype=np.uint8)
        codes = stored[name + "_blocks"][..., None] >> np.array([0, 4], np.uint8) & 15
        values = codes.view(ml_dtypes.float4_e2m1fn).astype(np.float32)
        powers = stored[name + "_scales"].view(ml_dtypes.float8_e8m0fnu)
        numbers = values * powers.astype(np.float32)[..., None, None]
        experts[name] = numbers.reshape(count, d_out, d_in).swapaxes(1, 2)
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    raw = json.loads((folder / "config.json").read_text())
    raw["quantization_config"] = {"quant_method": "mxfp4"}
    (folder / "config.json").write_text(json.dumps(raw))
    return folder, experts


def test_quantized_experts_are_read_exactly(quantized, tmp_path, caplog):
    folder, experts = quantized
    with caplog.at_level(logging.WARNING):
        model = load_pretrained(folder)
    assert not caplog.records
    assert model.config.param_dtype == "bfloat16"
    found = parameters(model)
    for layer in range(4):
        period, position = divmod(layer, 2)
        prefix = f"model.layers.{layer}.mlp.experts."
        w_in, w_out = (
            found[f"layers.{position}.mlp.{name}"][period] for name in ("w_in", "w_out")
        )
        assert w_in.dtype == w_out.dtype == jnp.bfloat16
        want = experts[prefix + "gate_up_proj"]
        gate, up = np.split(np.asarray(w_in, np.float32), 2, axis=-1)
        np.testing.assert_array_equal(gate, want[..., 0::2])
        np.testing.assert_array_equal(up, want[..., 1::2])
        want = experts[prefix + "down_proj"]
        np.testing.assert_array_equal(np.asarray(w_out, np.float32), want)
    # Saved as numbers: all other tensors keep their bytes, and nothing is lost.
    save_pretrained(model, tmp_path)
    before, after = (load_file(f / "model.safetensors") for f in (folder, tmp_path))
    assert set(after) == {name for name in before if name[-7:] not in _SUFFIXES} | set(
        experts
    )
    for name, array in after.items():
        assert array.dtype == ml_dtypes.bfloat16, name
        if name in before:
            assert array.tobytes() == before[name].tobytes(), name
    again = load_pretrained(tmp_path)
    assert "quantization_config" not in (tmp_path / "config.json").read_text()
    jax.tree.map(np.testing.assert_array_equal, nnx.state(again), nnx.state(model))


_SUFFIXES = ("_blocks", "_scales")


def test_quantized_pairs_must_fit(quantized, tmp_path):
    folder, _ = quantized
    stored = load_file(folder / "model.safetensors")
    name = "model.layers.0.mlp.experts.down_proj"
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())

    def refused(match, changed):
        save_file(changed, tmp_path / "model.safetensors")
        with pytest.raises(ValueError, match=match):
            load_pretrained(tmp_path)

    scales = stored.pop(name + "_scales")
    refused(rf"missing: {name}\n(.|\n)*unexpected: {name}_blocks", stored)
    short = np.ascontiguousarray(scales[:, :-1])
    refused(rf"{name}_blocks is \(4, 64, 1, 16\)", {**stored, name + "_scales": short})


def test_interleaved_columns_by_hand():
    stored = np.arange(12.0).reshape(2, 6)
    (held,) = Interleaved().load(stored)
    np.testing.assert_array_equal(held[0], [0, 2, 4, 1, 3, 5])
    np.testing.assert_array_equal(Interleaved().save((held,)), stored)


@pytest.mark.parametrize(
    "size, params, total, active",
    [("20b", 20_914_757_184, 20.91, 3.61), ("120b", 116_829_156_672, 116.83, 5.13)],
)
def test_published_sizes(size, params, total, active):
    """The model card's table (arXiv 2508.10925); active without the embedding."""
    config = GptOssConfig.published(size, param_dtype="bfloat16").decoder()
    shapes = nnx.state(nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0))))
    leaves = {
        ".".join(map(str, path)): leaf.get_value().size
        for path, leaf in nnx.to_flat_state(shapes)
    }
    assert sum(leaves.values()) == params
    assert round(params / 1e9, 2) == total
    share = config.mlp.top_k / config.mlp.num_experts
    visited = sum(
        count * (share if name.split(".")[-2] == "mlp" or ".bias_" in name else 1)
        for name, count in leaves.items()
        if name != "embed.embedding"
    )
    assert round(visited / 1e9, 2) == active
    found = describe(config, seq_len=131_072)
    assert round(found.total.active_params / 1e9, 2) == active
    assert found.total.params == params
    # Half of the layers look back 128 tokens, but every layer stores what it saw.
    assert found.total.kv_bytes_per_token == config.num_layers * 2 * 8 * 64 * 2
