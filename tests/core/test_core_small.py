"""Named states, config JSON, device table, several-process start."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxaccel.core import distributed
from jaxaccel.core.config_json import from_json, to_json
from jaxaccel.core.devices import device_peak
from jaxaccel.core.distributed import DistributedConfig
from jaxaccel.core.tree import cast_floats, model_parts, split_model
from jaxaccel.models.qwen3_5_text import Qwen3_5TextConfig
from jaxaccel.models.qwen3_next import Qwen3NextConfig
from jaxaccel.training.config import OptimConfig, TrainConfig


class Buffer(nnx.Variable):
    pass


class Model(nnx.Module):
    def __init__(self, rngs):
        self.kernel = nnx.Param(jax.random.normal(rngs.params(), (2, 3)))
        self.bias = Buffer(jnp.zeros(3))
        self.parts = nnx.List([nnx.Param(jnp.ones(1)), nnx.Param(jnp.ones(2))])


def test_a_model_is_taken_apart_and_put_together():
    model = Model(nnx.Rngs(0))
    params, buffers = split_model(model)
    assert list(params) == ["kernel", "parts/0", "parts/1"]
    assert list(buffers) == ["bias"]
    parts = model_parts(lambda: Model(nnx.Rngs(0)))
    again = parts.merge(params, buffers)
    np.testing.assert_array_equal(again.kernel[...], model.kernel[...])
    with pytest.raises(ValueError, match=r"missing \['kernel'\], unexpected \['x'\]"):
        parts.merge({"x": params.pop("kernel")} | params, buffers)


def test_cast_leaves_integers():
    tree = cast_floats({"a": jnp.ones(1, jnp.bfloat16), "b": jnp.ones(1, int)}, "f4")
    assert (tree["a"].dtype, tree["b"].dtype) == (jnp.float32, jnp.int32)


@pytest.mark.parametrize(
    "config",
    [
        Qwen3NextConfig.tiny().decoder(),
        Qwen3_5TextConfig.tiny().decoder(),
        Qwen3NextConfig.published(),
        TrainConfig(optim=OptimConfig(clip_norm=None), ema_decay=0.9),
    ],
    ids=lambda config: type(config).__name__,
)
def test_configs_survive_json(config):
    again = from_json(to_json(config))
    assert again == config
    assert hash(again) == hash(config)


def test_config_json_refuses_what_it_cannot_read():
    encoded = json.loads(to_json(TrainConfig()))
    with pytest.raises(ValueError, match="not a config of jaxaccel"):
        from_json(json.dumps(encoded | {"__class__": "os:system"}))
    with pytest.raises(ValueError, match=r"has no .*config:Gone"):
        from_json(json.dumps({"__class__": "jaxaccel.training.config:Gone"}))
    with pytest.raises(ValueError, match=r"no fields \['num_step'\]"):
        from_json(json.dumps(encoded | {"num_step": 1}))

    @dataclasses.dataclass(frozen=True)
    class Odd:
        value: object

    with pytest.raises(ValueError, match=r"Odd\.value"):
        to_json(Odd(value=object()))


@pytest.mark.parametrize(
    ("kind", "teraflops"),
    [
        ("NVIDIA H200", 989),
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA L4", 121),
        ("NVIDIA L40S", 362),
        ("cpu", None),
        ("NVIDIA H2000", None),
    ],
)
def test_known_devices_have_a_peak_and_others_none(kind, teraflops):
    peak = device_peak(kind)
    assert (peak and peak.flops / 1e12) == teraflops


@pytest.fixture
def no_launcher(monkeypatch):
    for name in (*SLURM, *OPEN_MPI):
        monkeypatch.delenv(name, raising=False)


SLURM = {
    "SLURM_NTASKS": "2",
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_NODELIST": "node[1-2]",
    "SLURM_PROCID": "1",
    "SLURM_LOCALID": "0",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
}


@pytest.mark.usefixtures("no_launcher")
@pytest.mark.parametrize("launcher", [SLURM, OPEN_MPI], ids=["slurm", "open mpi"])
def test_several_processes_from_a_launcher(monkeypatch, launcher):
    calls = []
    # Not to be set in this process, whose CPU devices exist already.
    monkeypatch.setattr(jax.config, "update", lambda *_: None)
    monkeypatch.setattr(jax.distributed, "initialize", lambda **k: calls.append(k))
    for name, value in launcher.items():
        assert not distributed.initialize()
        monkeypatch.setenv(name, value)
    assert distributed.initialize()
    assert calls == [{}]  # JAX reads the launcher's variables by itself.
    own = DistributedConfig(coordinator="host:1", num_processes=2, process_id=0)
    assert distributed.initialize(own)
    assert calls[1]["coordinator_address"] == "host:1"
    monkeypatch.setenv(next(iter(launcher)), "1")
    assert not distributed.initialize()


@pytest.mark.usefixtures("no_launcher")
def test_several_processes_from_the_environment(monkeypatch):
    assert not distributed.initialize()
    monkeypatch.setenv("JAXACCEL_COORDINATOR", "host:1234")
    with pytest.raises(ValueError, match="JAXACCEL_NUM_PROCESSES"):
        distributed.initialize()
    monkeypatch.setenv("JAXACCEL_NUM_PROCESSES", "2")
    monkeypatch.setenv("JAXACCEL_PROCESS_ID", "one")
    with pytest.raises(ValueError, match="JAXACCEL_PROCESS_ID is 'one'"):
        distributed.from_environment()
    monkeypatch.setenv("JAXACCEL_PROCESS_ID", "1")
    found = distributed.from_environment(DistributedConfig(num_processes=4))
    assert found == DistributedConfig(
        coordinator="host:1234", num_processes=4, process_id=1
    )
