"""A run of a model with a memory: its tokenizer's classes, its places, its sizes."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from training_runs import tiny_decoder

from jaxaccel.core.memory import HostMemory
from jaxaccel.core.offload import MODES
from jaxaccel.core.offload_plan import ScanSizes
from jaxaccel.core.sharding import MeshConfig, make_mesh, parameter_spec
from jaxaccel.core.tree import split_model
from jaxaccel.data.compressed_vocab import compressed_vocabulary
from jaxaccel.data.pipeline import DataConfig
from jaxaccel.data.sources import InMemorySource
from jaxaccel.models.decoder import Decoder
from jaxaccel.nn.engram_config import EngramConfig
from jaxaccel.training.checkpoint import load_checkpoint_model
from jaxaccel.training.config import OptimConfig, TrainConfig
from jaxaccel.training.loop import train
from jaxaccel.training.offload import OffloadLadder, RunSizes, scan_sizes


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


def test_its_projection_is_cut_like_any_other():
    mesh = make_mesh(MeshConfig(fsdp=2, tensor=2))
    name = "memory/layers/0/kv_proj"
    for end, shape, want in (
        ("kernel", (16, 32), jax.P("fsdp", "tensor")),
        ("bias", (32,), jax.P("tensor")),
    ):
        got = parameter_spec(f"{name}/{end}", shape, mesh, replicate_indivisible=False)
        assert got == want


def host_bytes_of_gradients(decoder):
    """What scans keep in host memory, as the traced program says."""
    shapes = nnx.eval_shape(lambda: Decoder(decoder, rngs=nnx.Rngs(0)))
    graphdef, params, rest = nnx.split(shapes, nnx.Param, ...)

    def loss(params, rest, tokens):
        return jnp.sum(nnx.merge(graphdef, params, rest)(tokens).hidden)

    tokens = jax.ShapeDtypeStruct((DATA.batch_size, DATA.seq_len), jnp.int32)
    traced = jax.make_jaxpr(jax.grad(loss))(params, rest, tokens)
    return sum(
        out.aval.size * out.aval.dtype.itemsize
        for equation in traced.jaxpr.eqns
        if equation.primitive.name == "scan"
        for out in equation.outvars
        if out.aval.memory_space == jax.memory.Space.Host
    )


@pytest.mark.parametrize(
    ("policy", "mode"),
    [("offload", "ring"), ("offload_policy:mlp_up", "policy")],
)
def test_host_memory_of_several_runs(policy, mode):
    memory = EngramConfig(layers=(1, 4), index_base=0, variant="v41", bases=11)
    decoder = tiny_decoder(num_layers=6, engram=memory, remat_policy=policy)
    sizes = scan_sizes(
        decoder, DATA, CONFIG, make_mesh(MeshConfig(), jax.devices()[:1])
    )
    assert sizes.host_bytes(mode) == host_bytes_of_gradients(decoder)


def test_sizes_of_one_run_and_groups_that_runs_do_not_have():
    one = {"length": 6, "stages": 2, "activation_bytes": 2**30, "named_bytes": 3}
    plain, run = ScanSizes(**one), RunSizes(runs=((6, 2),), **one)
    for mode in MODES:
        for group in (2, 3) if mode == "group" else (1,):
            assert run.host_bytes(mode, group) == plain.host_bytes(mode, group)
            assert run.device_bytes(mode, group) == plain.device_bytes(mode, group)
    # Groups of two divide all six layers, but not a run of one or three.
    memory = EngramConfig(layers=(1, 3), index_base=0, bases=11)
    decoder = tiny_decoder(num_layers=6, engram=memory, remat_policy="offload")
    sizes = scan_sizes(
        decoder, DATA, CONFIG, make_mesh(MeshConfig(), jax.devices()[:1])
    )
    sizes = dataclasses.replace(sizes, activation_bytes=2**30)
    config = dataclasses.replace(CONFIG, offload_host_gb=2.0)
    machine = HostMemory(
        device="GPU",
        is_shared=False,
        has_pinned_host=True,
        pinned_limit=2**40,
        available=2**40,
    )
    ladder = OffloadLadder(decoder, sizes, config, memory=machine)
    assert ladder.decoder.remat_policy == "remat"
    # Six layers' inputs, and two that the memory adds to.
    assert ladder.plan.device_bytes == (6 + 2) * 2**30
