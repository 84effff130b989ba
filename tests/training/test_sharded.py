"""One device == eight devices with fsdp x tensor == two processes, to f32 rounding."""

import dataclasses
import functools
import os
import pathlib
import socket
import subprocess
import sys

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from training_runs import Run, hybrid_decoder, ragged_batch, tiny_decoder

from jaxaccel.core.sharding import MeshConfig, batch_sharding, global_batch, make_mesh
from jaxaccel.core.tree import split_model
from jaxaccel.data.pipeline import DataConfig
from jaxaccel.data.sources import InMemorySource
from jaxaccel.data.tokenizer import ByteTokenizer
from jaxaccel.training.checkpoint import (
    CheckpointExtras,
    load_checkpoint_model,
    restore_checkpoint,
    save_checkpoint,
)
from jaxaccel.training.config import OptimConfig, TrainConfig
from jaxaccel.training.loop import train
from jaxaccel.training.metrics import read_metrics
from jaxaccel.training.step import state_shardings


pytestmark = pytest.mark.usefixtures("quick_compile")


# What the run of two processes does not train: recurrent layers and experts.
HYBRID = hybrid_decoder(pattern=("gdn", "moe"), single_part=True)


@functools.cache
def hybrid():
    """Every kind of state: recurrent layers, experts, biases that are no parameters."""
    mesh_config = MeshConfig(data=2, fsdp=2, tensor=2)
    config = TrainConfig(
        num_steps=10,
        # Some moments joined, some cut as their parameters are.
        optim=OptimConfig(peak_lr=1e-2, warmup_steps=0, join_below=256),
        mesh=mesh_config,
    )
    return Run(HYBRID, config, router_bias_rate=0.1)


def fresh(run):
    return jax.tree.map(jnp.copy, run.state)


def test_eight_devices_equal_one():
    run, batch = hybrid(), ragged_batch(8, 12)
    config = run.config
    mesh = make_mesh(config.mesh)
    shardings = state_shardings(jax.eval_shape(run.init), mesh, config)
    sharded = jax.jit(run.init, out_shardings=shardings)()
    chex.assert_trees_all_equal(
        *(jax.tree.map(np.asarray, s.params) for s in (run.state, sharded))
    )
    kernel = sharded.params["layers/0/mixer/z_proj/kernel"]
    assert kernel.shape == (1, 16, 8)
    assert kernel.addressable_shards[0].data.shape == (1, 8, 4)
    experts = optax.tree.get(
        sharded.opt_state,
        "mu",
        filtering=lambda _, mu: isinstance(mu, dict),
    )["layers/1/mlp/w_in"]
    assert experts.addressable_shards[0].data.shape == (1, 4, 8, 8)
    with jax.set_mesh(mesh):
        step = jax.jit(
            run.step,
            donate_argnums=0,
            in_shardings=(shardings, batch_sharding(mesh)),
            out_shardings=(shardings, None),
        )
        got, got_metrics = step(sharded, global_batch(batch, mesh))
    want, want_metrics = run.jitted(fresh(run), batch)
    got, want = (
        jax.tree.map(np.asarray, (s.opt_state, s.buffers)) for s in (got, want)
    )
    chex.assert_trees_all_close(got, want, rtol=1e-4, atol=1e-6)
    chex.assert_trees_all_close(got_metrics, want_metrics, rtol=1e-4, atol=1e-6)


def test_a_hybrid_resumes_bit_for_bit(tmp_path):
    run = hybrid()
    state, _ = run.jitted(fresh(run), ragged_batch(8, 12, seed=0))
    extras = CheckpointExtras(
        model_config=HYBRID, tokenizer=ByteTokenizer(), data_state={}
    )
    path = save_checkpoint(tmp_path, state, extras)
    template = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state
    )
    restored, _ = restore_checkpoint(path, template, ByteTokenizer(), HYBRID)
    assert np.abs(restored.buffers["layers/1/mlp/router/bias"]).max() > 0
    # Arrays bound to no device, as those of `state`: the compiled step serves both.
    rng = jax.random.key_data(restored.rng)
    numbers = dataclasses.replace(restored, rng=rng)
    numbers = jax.tree.map(lambda x: jnp.asarray(np.asarray(x)), numbers)
    restored = dataclasses.replace(numbers, rng=jax.random.wrap_key_data(numbers.rng))
    ends = []
    for start in (state, restored):
        end, metrics = run.jitted(start, ragged_batch(8, 12, seed=1))
        rng = jax.random.key_data(end.rng)
        ends.append((dataclasses.replace(end, rng=rng), metrics))
    chex.assert_trees_all_equal(*ends)


TEXTS = tuple(f"def f{i}(x):\n    return x + {i}\n" * (i % 5 + 1) for i in range(30))
MODEL = tiny_decoder(vocab_size=260)
DATA = DataConfig(
    sources=(InMemorySource(texts=TEXTS),),
    tokenizer="byte",
    seq_len=32,
    batch_size=4,
    heldout_fraction=0.2,
    prefetch=0,
)


def config(**mesh) -> TrainConfig:
    return TrainConfig(
        num_steps=3,
        optim=OptimConfig(peak_lr=1e-3, warmup_steps=0),
        log_every=1,
        eval_batches=1,
        mesh=MeshConfig(**mesh),
    )


def run_one_of_two(workdir: str) -> None:
    """What each of the two processes does; the environment says which it is."""
    from jaxaccel.core import distributed

    assert distributed.initialize()
    assert (jax.process_count(), jax.device_count()) == (2, 4)
    train(config(fsdp=2, tensor=2), MODEL, DATA, workdir)


# Slow because two interpreters import everything and compile. Nothing smaller shows
# that data, collectives, checkpoint and figures agree over processes.
def test_two_processes_equal_one(tmp_path):
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    here = pathlib.Path(__file__).parent
    root = here.parent.parent
    code = "import sys, test_sharded; test_sharded.run_one_of_two(sys.argv[1])"
    processes = []
    for index in range(2):
        environment = os.environ | {
            "JAXACCEL_COORDINATOR": f"localhost:{port}",
            "JAXACCEL_NUM_PROCESSES": "2",
            "JAXACCEL_PROCESS_ID": str(index),
            "JAX_PLATFORMS": "cpu",
            "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
            "JAX_DEFAULT_MATMUL_PRECISION": "highest",
            # As `tests/conftest.py` sets them, for fewer devices.
            "XLA_FLAGS": os.environ["XLA_FLAGS"].replace("count=8", "count=2"),
            "PYTHONPATH": f"{here}{os.pathsep}{root}",
        }
        processes.append(
            subprocess.Popen(
                [sys.executable, "-c", code, str(tmp_path / "two")],
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
    one = train(config(), MODEL, DATA, tmp_path / "one")
    try:
        logs = [process.communicate(timeout=120)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, 0], "\n".join(logs)
    for kind, names in (
        ("train", ("loss", "grad_norm", "tokens_seen")),
        ("eval", ("nats_per_byte", "accuracy")),
        ("baseline", ("byte_bigram_nats_per_byte",)),
    ):
        figures = [
            [
                [row[n] for n in names]
                for row in read_metrics(path)
                if row["kind"] == kind
            ]
            for path in (tmp_path / "one", tmp_path / "two")
        ]
        np.testing.assert_allclose(*figures, rtol=1e-5, err_msg=kind)
    models = [load_checkpoint_model(tmp_path / name)[0] for name in ("one", "two")]
    # Adam divides by the gradient's size, so rounding of a tiny one moves a weight.
    chex.assert_trees_all_close(*map(split_model, models), atol=3e-4)
    assert one.checkpoint.name == "00000003"
