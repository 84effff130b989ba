"""Folders in and out: bytes, shards, dtypes, damaged and wrong files."""

import itertools
import json
import pathlib
import shutil

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from jaxaccel import load_pretrained, save_pretrained
from jaxaccel.models import safetensors_io
from jaxaccel.models.decoder import Decoder
from jaxaccel.models.names import DepthwiseConv, Grouped, Same, Transposed
from jaxaccel.models.qwen3_5_text import Qwen3_5TextConfig
from jaxaccel.models.qwen3_next import Qwen3NextConfig


ROOT = pathlib.Path(__file__).parent.parent / "goldens"


def tensors_of(folder):
    found = {}
    for path in sorted(pathlib.Path(folder).glob("*.safetensors")):
        found |= load_file(path)
    return found


def assert_same_bytes(found, wanted):
    assert set(found) == set(wanted)
    for name, want in wanted.items():
        assert found[name].dtype == want.dtype, name
        assert found[name].shape == want.shape, name
        assert found[name].tobytes() == want.tobytes(), name


def parameters(model):
    return {
        ".".join(map(str, path)): variable.get_value()
        for path, variable in nnx.to_flat_state(nnx.state(model))
    }


def random_model(config):
    """A model of random numbers, without compiling its initialisation."""
    rng = np.random.default_rng(3)
    model = nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0)))
    graphdef, state = nnx.split(model)

    def draw(leaf):
        return jnp.asarray(rng.standard_normal(leaf.shape), leaf.dtype)

    return nnx.merge(graphdef, jax.tree.map(draw, state))


@pytest.fixture
def copy(tmp_path):
    """A writable copy of a golden checkpoint."""

    def make(name="qwen3_5_text"):
        folder = tmp_path / name
        folder.mkdir()
        for file in ("config.json", "model.safetensors", "mtp.safetensors"):
            if (ROOT / name / file).exists():
                shutil.copyfile(ROOT / name / file, folder / file)
        return folder

    return make


@pytest.mark.parametrize("name", ["qwen3_next", "qwen3_5_text"])
def test_saving_gives_the_same_bytes(name, tmp_path, copy):
    model = load_pretrained(ROOT / name)
    save_pretrained(model, tmp_path / "whole", extra_config={"eos_token_id": 7})
    wanted = tensors_of(copy(name))
    assert_same_bytes(tensors_of(tmp_path / "whole"), wanted)
    config = json.loads((tmp_path / "whole/config.json").read_text())
    original = json.loads((ROOT / name / "config.json").read_text())
    assert config["eos_token_id"] == 7
    for key in set(config) & set(original) - {"eos_token_id", "rope_parameters"}:
        assert config[key] == original[key], key
    # In shards with an index, and read back from them.
    save_pretrained(model, tmp_path / "shards", max_shard_bytes=100_000)
    assert len(list((tmp_path / "shards").glob("model-*.safetensors"))) > 3
    assert_same_bytes(tensors_of(tmp_path / "shards"), wanted)
    again = load_pretrained(tmp_path / "shards")
    assert again.config == model.config
    jax.tree.map(np.testing.assert_array_equal, nnx.state(again), nnx.state(model))


def test_loading_twice_gives_the_files_values():
    """No initialisation touches a value after the load."""
    stored = load_file(ROOT / "qwen3_5_text/model.safetensors")
    for _ in range(2):
        found = parameters(load_pretrained(ROOT / "qwen3_5_text"))
        for i in range(3):
            prefix = f"model.layers.{i}.linear_attn."
            for name in ("A_log", "dt_bias"):
                np.testing.assert_array_equal(
                    found[f"layers.{i}.mixer.{name}"][0], stored[prefix + name]
                )
        np.testing.assert_array_equal(
            found["lm_head.kernel"], stored["lm_head.weight"].T
        )


@pytest.mark.parametrize(
    "config",
    [
        Qwen3NextConfig.tiny(
            num_layers=4, pattern=("gdn", "attention"), num_mtp_layers=1
        ),
        Qwen3_5TextConfig.tiny(
            num_layers=6, pattern=("attention", "gdn"), tie_embeddings=True
        ),
    ],
)
def test_several_periods_round_trip(config, tmp_path):
    model = random_model(config.decoder())
    save_pretrained(model, tmp_path)
    again = load_pretrained(tmp_path)
    assert again.config == model.config
    jax.tree.map(np.testing.assert_array_equal, nnx.state(again), nnx.state(model))
    # Layer p * len(pattern) + i is row p of position i.
    stored = tensors_of(tmp_path)
    assert ("lm_head.weight" in stored) != config.tie_embeddings
    for layer in range(config.num_layers):
        period, position = divmod(layer, 2)
        np.testing.assert_array_equal(
            stored[f"model.layers.{layer}.input_layernorm.weight"],
            parameters(model)[f"layers.{position}.mixer_norm.scale"][period],
        )


def test_what_has_no_name_is_not_dropped(tmp_path):
    config = Qwen3NextConfig.tiny(router_bias_update_rate=0.1).decoder()
    with pytest.raises(ValueError, match=r"no place for .*router\.bias"):
        save_pretrained(random_model(config), tmp_path)
    assert not list(tmp_path.iterdir())


def to_dtypes(folder, choose):
    path = folder / "model.safetensors"
    stored = load_file(path)
    changed = {
        name: array.astype(choose(name, array.dtype)) for name, array in stored.items()
    }
    save_file(changed, path, metadata={"format": "pt"})
    return changed


def test_bfloat16_files_come_back_as_they_were(copy, tmp_path):
    """Also decays in bfloat16, which the model holds in f32, and f32 norms."""
    folder = copy()
    bfloat16 = np.dtype(ml_dtypes.bfloat16)
    wanted = to_dtypes(
        folder,
        lambda name, dtype: dtype if "linear_attn.norm" in name else bfloat16,
    )
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**raw, "dtype": "bfloat16"}))
    model = load_pretrained(folder)
    assert model.config.dtype == "bfloat16"
    found = parameters(model)
    assert found["layers.0.mixer.A_log"].dtype == jnp.float32
    assert found["layers.0.mixer.norm.scale"].dtype == jnp.float32
    assert found["layers.0.mixer.qkv_proj.kernel"].dtype == jnp.bfloat16
    save_pretrained(model, tmp_path / "out")
    assert_same_bytes(tensors_of(tmp_path / "out"), wanted)


def test_dtype_casts_all_but_what_must_be_f32():
    found = parameters(load_pretrained(ROOT / "qwen3_next", dtype=jnp.bfloat16))
    kept = {name for name, array in found.items() if array.dtype == jnp.float32}
    ends = {name.rsplit(".", 1)[-1] for name in kept if "router" not in name}
    assert ends == {"A_log", "dt_bias"}
    assert {name for name in kept if "router.kernel" in name}
    assert all(
        array.dtype == jnp.bfloat16 for name, array in found.items() if name not in kept
    )


def test_everything_wrong_with_the_names_is_listed(copy):
    folder = copy()
    stored = load_file(folder / "model.safetensors")
    del stored["model.norm.weight"]
    del stored["model.layers.2.linear_attn.A_log"]
    stored["model.layers.4.mlp.gate_proj.weight"] = np.zeros((2, 2), np.float32)
    stored["lm_head.weight"] = np.zeros((127, 48), np.float32)
    save_file(stored, folder / "model.safetensors")
    with pytest.raises(ValueError, match="4 tensors do not fit") as error:
        load_pretrained(folder)
    for line in (
        "missing: model.norm.weight",
        "missing: model.layers.2.linear_attn.A_log",
        "unexpected: model.layers.4.mlp.gate_proj.weight",
        "shape: lm_head.weight is (127, 48), expected (128, 48)",
    ):
        assert line in str(error.value)


def test_damaged_folders(copy, tmp_path):
    folder = copy()
    path = folder / "model.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[:-1000])
    with pytest.raises(ValueError, match="not a whole safetensors file"):
        load_pretrained(folder)
    path.unlink()
    with pytest.raises(FileNotFoundError, match=r"model\.safetensors"):
        load_pretrained(folder)
    path.write_bytes(whole)
    index = {"weight_map": {"model.norm.weight": "model-00001-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(FileNotFoundError, match="model-00001-of-00002"):
        load_pretrained(folder)
    index = {"weight_map": {"model.nothing": "model.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match=r"model\.nothing in model\.safetensors"):
        load_pretrained(folder)


def test_prediction_block_announced_but_absent(copy, caplog):
    folder = copy("qwen3_next")
    (folder / "mtp.safetensors").unlink()
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**raw, "num_mtp_layers": 1}))
    model = load_pretrained(folder)
    assert model.config.num_mtp_layers == 0
    assert "prediction block" in caplog.text


def test_a_full_disk_leaves_the_old_checkpoint(tmp_path, monkeypatch):
    model = load_pretrained(ROOT / "qwen3_5_text")
    save_pretrained(model, tmp_path, max_shard_bytes=200_000)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    calls = itertools.count()

    def full(descriptor):
        if next(calls) == 1:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(safetensors_io.os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        save_pretrained(model, tmp_path, max_shard_bytes=100_000)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_new_checkpoint_replaces_all_of_an_old_one(tmp_path):
    model = load_pretrained(ROOT / "qwen3_5_text")
    save_pretrained(model, tmp_path, max_shard_bytes=100_000)
    save_pretrained(model, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "config.json",
        "model.safetensors",
    ]
    load_pretrained(tmp_path)


def test_tensors_are_read_one_at_a_time(monkeypatch):
    """Each as often as it has pieces in our parameters, and never kept."""
    reads: dict[str, int] = {}
    read = safetensors_io.CheckpointReader.read

    def counted(self, name):
        reads[name] = reads.get(name, 0) + 1
        return read(self, name)

    monkeypatch.setattr(safetensors_io.CheckpointReader, "read", counted)
    load_pretrained(ROOT / "qwen3_next")
    twice = {name for name, count in reads.items() if count == 2}
    assert max(reads.values()) == 2
    ends = {name.rsplit(".", 2)[1] for name in twice}
    assert ends == {"in_proj_qkvz", "in_proj_ba", "q_proj"}


@pytest.mark.parametrize(
    "layout, shape",
    [
        (Same(), (5,)),
        (Transposed(), (5, 3)),
        (DepthwiseConv(), (6, 1, 4)),
        (Grouped(2, (3, 3, 4, 4), ((0, 1, 2), (3,))), (28, 5)),
        (Grouped(3, (2, 2), ((0,), (1,))), (12, 5)),
        (Grouped(1, (1, 2, 3), ((2, 0), (1,))), (6, 5)),
    ],
)
def test_layouts_are_bijections(layout, shape):
    stored = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    pieces = layout.load(stored)
    np.testing.assert_array_equal(layout.save(pieces), stored)
    assert sum(piece.size for piece in pieces) == stored.size


def test_grouped_projection_by_hand():
    """Two groups of [q(1) | k(1) | v(2)]: rows 0..3 and 4..7."""
    layout = Grouped(2, (1, 1, 2), ((0, 1, 2),))
    stored = np.arange(8.0)[:, None]
    (flat,) = layout.load(stored)
    np.testing.assert_array_equal(flat, [[0, 4, 1, 5, 2, 3, 6, 7]])
