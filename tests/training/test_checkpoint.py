"""Checkpoints come back bit for bit, refuse what differs, and survive a full disk."""

import collections
import dataclasses
import json
import pathlib
import resource
import shutil

import chex
import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from training_runs import (
    Run,
    hybrid_decoder,
    ragged_batch,
    routed_decoder,
    tiny_decoder,
)

from jaxaccel.core.tree import split_model
from jaxaccel.data.tokenizer import ByteTokenizer, train_bpe
from jaxaccel.models.decoder import Decoder
from jaxaccel.nn.rope import RopeConfig
from jaxaccel.training.checkpoint import (
    CheckpointExtras,
    best_checkpoint,
    find_checkpoint,
    latest_checkpoint,
    load_checkpoint_model,
    restore_checkpoint,
    save_checkpoint,
)
from jaxaccel.training.config import OptimConfig, TrainConfig


pytestmark = pytest.mark.usefixtures("quick_compile")

CONFIG = TrainConfig(num_steps=10, optim=OptimConfig(warmup_steps=0), ema_decay=0.9)


def extras(**changes) -> CheckpointExtras:
    fields = {
        "model_config": tiny_decoder(),
        "tokenizer": ByteTokenizer(),
        "data_state": {"batch": 7},
        "config_text": "train.num_steps = 10\n",
    }
    return CheckpointExtras(**(fields | changes))


def abstract(state):
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state
    )


@pytest.fixture(scope="module")
def run(quick_compile):
    return Run({}, CONFIG)


def test_everything_comes_back_bit_for_bit(run, tmp_path):
    state, _ = run.jitted(jax.jit(run.init)(), ragged_batch(4, 12))
    path = save_checkpoint(tmp_path, state, extras())
    assert path == latest_checkpoint(tmp_path) == tmp_path / "00000001"
    assert (path / "config.gin").read_text() == "train.num_steps = 10\n"
    restored, data_state = restore_checkpoint(
        path, abstract(state), ByteTokenizer(), tiny_decoder()
    )
    assert data_state == {"batch": 7}
    assert jax.random.bits(restored.rng) == jax.random.bits(state.rng)
    for want, got in zip(
        jax.tree.leaves(state), jax.tree.leaves(restored), strict=True
    ):
        assert want.dtype == got.dtype
    plain = [jax.tree.map(jax.random.key_data, (s.rng,)) for s in (state, restored)]
    chex.assert_trees_all_equal(*plain)
    chex.assert_trees_all_equal(
        (state.step, state.params, state.opt_state, state.ema, state.finite),
        (
            restored.step,
            restored.params,
            restored.opt_state,
            restored.ema,
            restored.finite,
        ),
    )


def test_refuses_another_model_dtype_and_tokenizer(run, tmp_path):
    path = save_checkpoint(tmp_path, run.state, extras())
    template = abstract(run.state)
    params = dict(template.params)
    kernel = params["lm_head/kernel"]
    params["lm_head/kernel"] = jax.ShapeDtypeStruct(
        kernel.shape, jnp.bfloat16, sharding=kernel.sharding
    )
    params["embed/embedding"] = jax.ShapeDtypeStruct(
        (33, 16), jnp.float32, sharding=kernel.sharding
    )
    params["extra/kernel"] = params.pop("layers/0/norm/scale")
    other = dataclasses.replace(template, params=params)
    with pytest.raises(ValueError, match="another run") as error:
        restore_checkpoint(path, other, ByteTokenizer(), tiny_decoder())
    for text in (
        "lm_head/kernel is float32[16, 32] in the checkpoint, bfloat16[16, 32] here",
        "embed/embedding is float32[32, 16] in the checkpoint, float32[33, 16] here",
        "params/extra/kernel is missing in the checkpoint",
        "params/layers/0/norm/scale is not in this model",
    ):
        assert text in str(error.value)
    tokenizer = train_bpe(["some text to learn from"], 270)
    with pytest.raises(ValueError, match="its tokenizer is"):
        restore_checkpoint(path, template, tokenizer, tiny_decoder())
    (path / "metadata.json").write_text(json.dumps({"format": 99}))
    with pytest.raises(ValueError, match="format 99"):
        restore_checkpoint(path, template, ByteTokenizer(), tiny_decoder())


def test_refuses_another_function_of_the_same_shapes(run, tmp_path):
    saved = routed_decoder(num_layers=4, pattern=("attention", "attention"))
    path = save_checkpoint(tmp_path, run.state, extras(model_config=saved))
    changed = dataclasses.replace(
        saved,
        attention=dataclasses.replace(saved.attention, rope=RopeConfig(theta=5e3)),
        mlp=dataclasses.replace(saved.mlp, top_k=1),
        pattern=("attention",),
        dtype="bfloat16",
    )
    template = abstract(run.state)
    with pytest.raises(ValueError, match="another run") as error:
        restore_checkpoint(path, template, ByteTokenizer(), changed)
    assert str(error.value).splitlines()[1:] == [
        "  attention.rope.theta is 10000.0 in the checkpoint, 5000.0 here",
        "  dtype is 'float32' in the checkpoint, 'bfloat16' here",
        "  mlp.top_k is 2 in the checkpoint, 1 here",
        "  pattern[1] is 'attention' in the checkpoint, 'absent' here",
    ]
    same = dataclasses.replace(saved, implementation="xla", remat_policy="full")
    restore_checkpoint(path, template, ByteTokenizer(), same)
    # A field that is younger than the checkpoint had its default then.
    metadata = json.loads((path / "metadata.json").read_text())
    del metadata["model_config"]["num_mtp_layers"]
    (path / "metadata.json").write_text(json.dumps(metadata))
    restore_checkpoint(path, template, ByteTokenizer(), same)


@pytest.mark.parametrize("rename", [1, 2])
@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError])
def test_replacing_a_checkpoint_leaves_one_at_every_moment(
    run, tmp_path, monkeypatch, rename, error
):
    old = save_checkpoint(tmp_path, at_step(run.state, 1), extras())
    calls, rename_path = [], pathlib.Path.rename

    def dying(self, target):
        calls.append(target)
        if len(calls) == rename:
            raise error
        return rename_path(self, target)

    with monkeypatch.context() as patch:
        patch.setattr(pathlib.Path, "rename", dying)
        with pytest.raises(error):
            save_checkpoint(tmp_path, at_step(run.state, 1), extras())
    found = find_checkpoint(tmp_path)
    restored, _ = restore_checkpoint(
        found, abstract(run.state), ByteTokenizer(), tiny_decoder()
    )
    chex.assert_trees_all_equal(restored.params, run.state.params)
    if error is OSError:
        assert found == old
    assert save_checkpoint(tmp_path, at_step(run.state, 2), extras()).is_dir()
    assert steps(tmp_path) == [1, 2]
    assert not list(tmp_path.glob(".*"))


def at_step(state, step):
    return dataclasses.replace(state, step=jnp.int32(step))


def steps(folder):
    return sorted(int(p.name) for p in folder.iterdir() if p.name.isdecimal())


def test_keeps_the_newest_and_the_best(run, tmp_path):
    for step, score in ((1, 3.0), (2, 1.0), (3, 2.0), (4, 2.5)):
        save_checkpoint(
            tmp_path,
            at_step(run.state, step),
            extras(metrics={"nats_per_byte": score}),
            keep=1,
        )
    assert steps(tmp_path) == [2, 4]
    assert best_checkpoint(tmp_path).name == "00000002"
    assert find_checkpoint(tmp_path).name == "00000004"


@pytest.mark.parametrize("how", ["no space", "write fails"])
def test_a_full_disk_leaves_the_old_checkpoint(run, tmp_path, monkeypatch, how):
    old = save_checkpoint(tmp_path, at_step(run.state, 1), extras())
    (tmp_path / ".00000001.tmp").mkdir()  # As a killed run leaves it.
    if how == "no space":
        usage = collections.namedtuple("usage", "total used free")
        monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(9, 8, 1))
        with pytest.raises(OSError, match="the disk has 1 left") as error:
            save_checkpoint(tmp_path, at_step(run.state, 2), extras(), keep=1)
    else:
        # The kernel refuses to let any file grow, as it does on a full disk.
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        large = {"large": jax.random.normal(jax.random.key(0), (64, 2048))}
        state = dataclasses.replace(at_step(run.state, 2), ema=large)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
        try:
            with pytest.raises(OSError, match="could not write") as error:
                save_checkpoint(tmp_path, state, extras(), keep=1)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert not list(tmp_path.glob(".*"))
    assert str(old) in str(error.value)
    assert steps(tmp_path) == [1]
    restored, _ = restore_checkpoint(
        old, abstract(run.state), ByteTokenizer(), tiny_decoder()
    )
    chex.assert_trees_all_equal(restored.params, run.state.params)
    monkeypatch.undo()
    assert save_checkpoint(tmp_path, at_step(run.state, 2), extras()).is_dir()


def test_model_for_inference(tmp_path):
    decoder = hybrid_decoder()
    run = Run(decoder, CONFIG)
    buffers = {name: x + 1.0 for name, x in run.state.buffers.items()}
    ema = {name: x + 1.0 for name, x in run.state.ema.items()}
    state = dataclasses.replace(run.state, buffers=buffers, ema=ema)
    save_checkpoint(tmp_path / "checkpoints", state, extras(model_config=decoder))
    model, tokenizer = load_checkpoint_model(tmp_path)
    assert isinstance(model, Decoder)
    assert model.config == decoder
    assert tokenizer.fingerprint == ByteTokenizer().fingerprint
    chex.assert_trees_all_equal(split_model(model), (state.params, state.buffers))
    mean, _ = load_checkpoint_model(tmp_path, use_ema=True)
    chex.assert_trees_all_equal(split_model(mean)[0], ema)
    assert nnx.graphdef(mean) == nnx.graphdef(model)


def test_no_checkpoint(tmp_path):
    with pytest.raises(FileNotFoundError, match="holds no complete checkpoint"):
        find_checkpoint(tmp_path)
    assert latest_checkpoint(tmp_path / "none") is None
