"""A run whose activations do not fit goes on, one mode down, with the same result."""

import dataclasses
import functools
import logging

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from training_runs import Run, ragged_batch, tiny_decoder

from jaxaccel.core import offload_plan
from jaxaccel.core.memory import HostMemory
from jaxaccel.core.offload_plan import OffloadFailed, ScanSizes
from jaxaccel.core.sharding import MeshConfig, make_mesh
from jaxaccel.data.pipeline import DataConfig
from jaxaccel.data.sources import InMemorySource
from jaxaccel.data.tokenizer import ByteTokenizer
from jaxaccel.training import loop, offload
from jaxaccel.training.checkpoint import (
    CheckpointExtras,
    restore_checkpoint,
    save_checkpoint,
)
from jaxaccel.training.config import OptimConfig, TrainConfig
from jaxaccel.training.offload import (
    OffloadLadder,
    PlannedStep,
    check_pinned_limit,
    named_bytes,
    scan_sizes,
)
from jaxaccel.training.optim import host_state_bytes
from jaxaccel.training.step import state_shardings


pytestmark = pytest.mark.usefixtures("quick_compile")

GIB = 2**30
H200 = HostMemory(
    device="NVIDIA H200", has_pinned_host=True, is_shared=False, pinned_limit=64 * GIB
)
SIZES = ScanSizes(length=4, activation_bytes=GIB // 2)
CONFIG = TrainConfig(
    num_steps=2,
    optim=OptimConfig(peak_lr=1e-2, warmup_steps=0),
    log_every=1,
    eval_batches=1,
)
FULL = "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 1 byte"


def ladder(policy="offload", config=CONFIG, memory=H200, **options):
    model = tiny_decoder(num_layers=4, remat_policy=policy)
    return OffloadLadder(model, SIZES, config, memory=memory, **options)


TEXTS = tuple(f"def f{i}(x):\n    return x + {i}\n" * (i % 5 + 1) for i in range(30))
DATA = DataConfig(
    sources=(InMemorySource(texts=TEXTS),),
    tokenizer="byte",
    seq_len=16,
    batch_size=2,
    heldout_fraction=0.0,
    prefetch=0,
)


# The plan of a run.


def test_a_budget_of_one_gigabyte_is_said_once(caplog):
    with caplog.at_level(logging.INFO, logger="jaxaccel"):
        got = ladder(config=dataclasses.replace(CONFIG, offload_host_gb=1.0))
    assert got.decoder.remat_policy == "offload_group:2"
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "offload asked for, offload_group:2 taken, 1 GiB of host" in record.message
    assert "ring: needs 2 GiB of host memory (the host budget is 1 GiB)" in (
        record.message
    )


def test_the_pinned_limit_is_named(caplog, monkeypatch):
    small = dataclasses.replace(H200, pinned_limit=GIB // 2)
    assert ladder(memory=small).decoder.remat_policy == "remat"
    assert "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB" in caplog.text
    monkeypatch.setenv("XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB", "2")
    with pytest.raises(ValueError, match=r"needs 3 GiB .*XLA_PJRT_GPU_HOST_MEMORY_LIM"):
        check_pinned_limit(3 * GIB, CONFIG)
    tight = dataclasses.replace(CONFIG, offload_host_gb=1.0)
    with pytest.raises(ValueError, match=r"more than 1 GiB \(TrainConfig\.offload_"):
        check_pinned_limit(2 * GIB, tight)


def test_a_backend_without_host_memory_takes_remat(caplog):
    bare = dataclasses.replace(H200, device="TPU v0", has_pinned_host=False)
    assert ladder(memory=bare).decoder.remat_policy == "remat"
    assert "TPU v0 has no memory of the kind 'pinned_host'" in caplog.text


@pytest.mark.parametrize("policy", ["none", "full", "dots", "save_names:mlp_up"])
def test_other_policies_are_left_alone(policy, caplog):
    got = ladder(policy)
    assert got.decoder.remat_policy == policy
    assert not caplog.records
    with pytest.raises(ValueError, match="nothing to fall back to"):
        got.refuse("full")


def test_a_malformed_limit_stops_only_runs_that_offload(monkeypatch):
    monkeypatch.setenv("XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB", "64GB")
    assert ladder("full", memory=None).decoder.remat_policy == "full"
    with pytest.raises(ValueError, match="'64GB' is no whole number of GiB"):
        ladder("offload", memory=None)


def test_a_group_that_is_asked_for_is_the_smallest_taken():
    assert ladder("offload_group:2").plan.group == 2
    assert ladder("offload_group:4").decoder.remat_policy == "remat"


def test_named_values_are_left_out_where_they_do_not_fit(caplog):
    model = tiny_decoder(num_layers=4, remat_policy="offload_policy:mlp_up")
    sizes = dataclasses.replace(SIZES, named_bytes=GIB)
    for budget, policy in ((6.0, "offload_policy:mlp_up"), (3.0, "offload_policy")):
        config = dataclasses.replace(CONFIG, offload_host_gb=budget)
        got = OffloadLadder(model, sizes, config, memory=H200)
        assert got.decoder.remat_policy == policy
    assert "without mlp_up: " in caplog.text


def test_sizes_are_those_of_a_micro_batch_on_one_device():
    model = tiny_decoder(num_layers=6, pattern=("attention", "attention"))
    data = dataclasses.replace(DATA, seq_len=32, batch_size=16)
    config = dataclasses.replace(CONFIG, accumulation=2)
    mesh = make_mesh(MeshConfig(data=2, fsdp=2, tensor=2))
    got = scan_sizes(model, data, config, mesh)
    assert (got.length, got.stages, got.num_devices) == (3, 2, 8)
    assert got.activation_bytes == 16 // 2 // 4 * 32 * 16 * 4
    assert got.named_bytes == 0


def test_bytes_of_named_values():
    model = tiny_decoder(remat_policy="offload_policy:mlp_up,attention_out")
    only_one = tiny_decoder(remat_policy="offload_policy:attention_out")
    rows, time, width = 2, 8, 16
    attention_out = rows * time * width * 4
    assert named_bytes(only_one, rows, time) == attention_out
    assert named_bytes(model, rows, time) > attention_out


# The first step.


class Jitted:
    """Stands in for a jitted step; a failing one consumes its donated state."""

    def __init__(self, policy, error=None):
        self.policy = policy
        self.error = error
        self.calls = 0

    def lower(self, *arguments):
        return self

    def compile(self, compiler_options):
        self.options = compiler_options
        return self

    def memory_analysis(self):
        return None

    def as_text(self):
        return ""

    def __call__(self, state, batch):
        self.calls += 1
        if self.error is not None:
            state["x"].delete()
            raise jax.errors.JaxRuntimeError(self.error)
        return {"x": state["x"] + 1}, self.policy


def planned(errors, **options):
    """A step whose modes fail as told, what was built for it, and its states."""
    built, remade = [], []

    def build(decoder):
        policy = decoder.remat_policy
        built.append(Jitted(policy, errors.get(policy)))
        return built[-1]

    def remake():
        remade.append({"x": jnp.ones(())})
        return remade[-1]

    return PlannedStep(ladder(**options), build, remake), built, remade


def test_out_of_memory_goes_down_once_a_mode(caplog):
    fails = dict.fromkeys(("offload", "offload_policy", "offload_group:2"), FULL)
    step, built, remade = planned(fails)
    state, policy = step({"x": jnp.ones(())}, None)
    assert (float(state["x"]), policy) == (2.0, "remat")
    modes = [one.policy for one in built]
    assert modes == ["offload", "offload_policy", "offload_group:2", "remat"]
    assert len(remade) == 3
    assert caplog.text.count("ring: out of memory in the first step") == 3
    # From here on nothing is built, tried or said again.
    said = len(caplog.records)
    step(state, None)
    assert len(built) == 4
    assert built[-1].calls == 2
    assert len(caplog.records) == said


def test_the_last_mode_raises_what_happened():
    fails = dict.fromkeys(
        ("offload", "offload_policy", "offload_group:2", "remat"), FULL
    )
    step, built, _ = planned(fails)
    with pytest.raises(jax.errors.JaxRuntimeError, match="RESOURCE_EXHAUSTED"):
        step({"x": jnp.ones(())}, None)
    assert len(built) == 4


def test_other_errors_are_not_swallowed():
    step, built, _ = planned({"offload": "INTERNAL: a bug"})
    with pytest.raises(jax.errors.JaxRuntimeError, match="a bug"):
        step({"x": jnp.ones(())}, None)
    assert len(built) == 1


def test_later_steps_do_not_fall():
    step, built, _ = planned({})
    state, _ = step({"x": jnp.ones(())}, None)
    built[0].error = FULL
    with pytest.raises(jax.errors.JaxRuntimeError):
        step(state, None)
    assert len(built) == 1


def test_a_step_that_keeps_nothing_on_the_host_is_refused(monkeypatch, caplog):
    def verify(compiled, plan, platform, num_devices):
        if plan.mode == "ring":
            raise OffloadFailed("the compiled step keeps nothing")

    monkeypatch.setattr(offload, "verify_offload", verify)
    step, built, _ = planned({})
    assert step({"x": jnp.ones(())}, None)[1] == "offload_policy"
    assert built[0].calls == 0
    assert "ring: the compiled step keeps nothing" in caplog.text


@pytest.mark.parametrize("apart", [0.5, float("nan")])
def test_wrong_gradients_are_refused_on_a_gpu(monkeypatch, caplog, apart):
    tried = []

    def canary(mode):
        tried.append(mode)
        return apart if mode == "ring" else 1e-6

    monkeypatch.setattr(offload, "gradient_canary", canary)
    monkeypatch.setattr(offload, "verify_offload", lambda *arguments: None)
    step, built, _ = planned({})
    step._ladder.platform = "gpu"
    assert step({"x": jnp.ones(())}, None)[1] == "offload_policy"
    assert tried == ["ring", "policy"]
    assert built[0].options == {"xla_gpu_enable_command_buffer": ""}
    assert "ring: its gradients on this device are" in caplog.text


def test_a_run_falls_back_and_ends_as_remat_does(
    tmp_path, monkeypatch, caplog, compile_cache
):
    """The ring runs out of memory in the first step, after it took the state."""
    jax.config.update("jax_compilation_cache_dir", compile_cache)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    monkeypatch.setattr(offload, "host_memory", lambda: H200)
    monkeypatch.setattr(offload_plan, "MIN_ACTIVATION_BYTES", 0)
    jitted = loop._Run._jitted_step
    asked = []

    def failing(self, shardings, decoder):
        asked.append(decoder.remat_policy)
        if decoder.remat_policy != "offload":
            return jitted(self, shardings, decoder)

        class Full(Jitted):
            def __call__(self, state, batch):
                jax.tree.map(lambda x: x.delete(), state)
                raise jax.errors.JaxRuntimeError(FULL)

        return Full("offload")

    monkeypatch.setattr(loop._Run, "_jitted_step", failing)
    ends = []
    for policy in ("offload", "remat"):
        model = tiny_decoder(vocab_size=260, num_layers=3, remat_policy=policy)
        result = loop.train(CONFIG, model, DATA, tmp_path / policy)
        ends.append(jax.tree.map(np.asarray, (result.state.params, result.step)))
    assert asked == ["offload", "offload_policy", "remat"]
    chex.assert_trees_all_equal(*ends)
    assert caplog.text.count("out of memory in the first step") == 1


# The optimizer's state on the host.


@functools.cache
def toy(on_host):
    config = dataclasses.replace(CONFIG, optimizer_on_host=on_host)
    return Run({}, config, is_abstract=True)


def kinds(state):
    return {x.sharding.memory_kind for x in jax.tree.leaves(state) if x.ndim}


@functools.cache
def programs(on_host):
    """The jitted start and step, and the shardings of the state."""
    run, mesh = toy(on_host), make_mesh(MeshConfig())
    shardings = state_shardings(run.state, mesh, run.config)
    step = jax.jit(
        run.step,
        donate_argnums=0,
        in_shardings=(shardings, None),
        out_shardings=(shardings, None),
    )
    return jax.jit(run.init, out_shardings=shardings), step, shardings


def test_the_optimizer_state_stays_on_the_host(tmp_path):
    ends, batch = [], ragged_batch(4, 12)
    for on_host in (False, True):
        start, step, shardings = programs(on_host)
        state = start()
        first = jax.tree.leaves(state.opt_state)
        for _ in range(2):
            state, _ = step(state, batch)
        assert all(x.is_deleted() for x in first)  # updated in place
        assert kinds(state.opt_state) == {"pinned_host" if on_host else "device"}
        assert kinds(state.params) == {"device"}
        ends.append(state)
    chex.assert_trees_all_equal(
        *(jax.tree.map(np.asarray, (s.params, s.opt_state)) for s in ends)
    )
    moments = 2 * sum(x.nbytes for x in ends[1].params.values())
    assert host_state_bytes(shardings.opt_state, state.opt_state) == moments
    # A checkpoint comes back to where it was.
    model, tokenizer = tiny_decoder(), ByteTokenizer()
    extras = CheckpointExtras(model_config=model, tokenizer=tokenizer, data_state={})
    path = save_checkpoint(tmp_path, state, extras)
    template = jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
        state,
        shardings,
    )
    restored, _ = restore_checkpoint(path, template, tokenizer, model)
    assert kinds(restored.opt_state) == {"pinned_host"}
    chex.assert_trees_all_equal(restored.opt_state, state.opt_state)


def test_the_optimizer_state_is_copied_both_ways_on_a_gpu():
    _, step, _ = programs(True)
    state = toy(True).state
    traced = step.trace(state, ragged_batch(4, 12))
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    arrays = sum(1 for x in jax.tree.leaves(state.opt_state) if x.ndim)
    assert text.count('placement = "device"') >= arrays
    assert text.count('"pinned_host"') >= 2 * arrays  # arguments and results


def test_a_device_without_host_memory_is_refused(monkeypatch):
    device = type(jax.devices()[0])
    monkeypatch.setattr(device, "addressable_memories", lambda self: [])
    run = toy(True)
    with pytest.raises(NotImplementedError, match="optimizer_on_host=True needs"):
        state_shardings(run.state, make_mesh(MeshConfig()), run.config)
