"""Strict modes for every test; eight fake CPU devices for the sharding tests."""

import gc
import os


# Traced programs are large webs of objects that stay; Python would look through them
# for garbage every 700 allocations.
gc.set_threshold(100_000, 20)
os.environ.setdefault("NNX_GRAPH_MODE", "false")
os.environ.setdefault("NNX_GRAPH_UPDATES", "false")
_FLAGS = os.environ.get("XLA_FLAGS", "")
for _flag in (
    "--xla_force_host_platform_device_count=8",
    # Compiling, not running, is what the suite spends its time on.
    "--xla_backend_optimization_level=0",
    "--xla_cpu_opt_preset=FAST_COMPILE",
    # One module a program: cut into 32, its shared parts are compiled 32 times.
    "--xla_cpu_parallel_codegen_split_count=1",
    # The plain emitters compile a training step much faster; see kernels/running.py.
    "--xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters",
):
    if _flag.split("=")[0] not in _FLAGS:
        _FLAGS = f"{_FLAGS} {_flag}"
os.environ["XLA_FLAGS"] = _FLAGS

import jax
import pytest

from tests.interpreter import hand_over_numpy
from tests.staging import put_numpy


hand_over_numpy()
put_numpy()

jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_default_matmul_precision", "highest")
if jax.config.jax_compilation_cache_dir is None:
    # With nowhere to keep programs, JAX would still hash each that it compiles.
    jax.config.update("jax_enable_compilation_cache", False)


def pytest_collection_modifyitems(config, items):
    if jax.default_backend() == "gpu":
        return
    skip = pytest.mark.skip(reason="needs an NVIDIA Hopper GPU")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)


def pytest_sessionfinish(session):
    """Looks for garbage once: pytest does so five times, through all programs."""
    gc.collect()
    gc.freeze()
