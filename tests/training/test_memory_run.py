"""A run of a model with an n-gram memory over the classes of its own tokenizer."""

import jax
import numpy as np
import pytest
from flax import nnx
from training_runs import tiny_decoder

from jaxaccel.core.sharding import MeshConfig, make_mesh, parameter_spec
from jaxaccel.core.tree import split_model
from jaxaccel.data.compressed_vocab import compressed_vocabulary
from jaxaccel.data.pipeline import DataConfig
from jaxaccel.data.sources import InMemorySource
from jaxaccel.nn.engram_config import EngramConfig
from jaxaccel.training.checkpoint import load_checkpoint_model
from jaxaccel.training.config import OptimConfig, TrainConfig
from jaxaccel.training.loop import train


pytestmark = pytest.mark.usefixtures("quick_compile")

# One id more than the tokenizer has.
MODEL = tiny_decoder(
    vocab_size=260,
    num_layers=1,
    engram=EngramConfig(
        layers=(0,), variant="v41", compress=True, orders=(2,), heads=2, bases=101
    ),
)
DATA = DataConfig(
    sources=(InMemorySource(texts=("A Rose is a ROSE. " * 20,)),),
    tokenizer="byte",
    seq_len=16,
    batch_size=4,
    heldout_fraction=0.0,
    prefetch=0,
)
CONFIG = TrainConfig(
    num_steps=1,
    optim=OptimConfig(peak_lr=1e-2, warmup_steps=0),
)


def test_it_is_saved_resumed_and_loaded(tmp_path):
    result = train(CONFIG, MODEL, DATA, tmp_path)
    model, tokenizer = load_checkpoint_model(tmp_path)
    vocabulary = compressed_vocabulary(tokenizer)
    assert model.config.engram.vocabulary == vocabulary.fingerprint
    classes = np.asarray(model.memory.ngrams.classes[...])
    np.testing.assert_array_equal(classes, [*vocabulary.token_map, -1])
    saved = split_model(model)[1]
    for name, array in result.state.buffers.items():
        np.testing.assert_array_equal(saved[name], array)
    # The config that asks for it names no tokenizer; the run's own fits.
    again = train(CONFIG, MODEL, DATA, tmp_path, resume=True)
    assert again.checkpoint == result.checkpoint
    # A token without a class would make it NaN.
    graphdef, state = nnx.split(model)

    @jax.jit
    def read(tokens):
        model = nnx.merge(graphdef, state)
        return model(tokens).logits, model.memory.lookups(tokens)

    logits, rows = read(np.stack([tokenizer.encode(t) for t in ("A rose", "a ROSE")]))
    assert np.isfinite(logits).all()
    np.testing.assert_array_equal(rows[0], rows[1])


def test_its_projection_is_cut_like_any_other():
    mesh = make_mesh(MeshConfig(fsdp=2, tensor=2))
    name = "memory/layers/0/kv_proj"
    for end, shape, want in (
        ("kernel", (16, 32), jax.P("fsdp", "tensor")),
        ("bias", (32,), jax.P("tensor")),
    ):
        got = parameter_spec(f"{name}/{end}", shape, mesh, replicate_indivisible=False)
        assert got == want
