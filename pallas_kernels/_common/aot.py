"""Compiling for an H200 without one: what XLA makes of a function there.

Needs the extra `h200-aot` (the CUDA plugin's wheels, no driver and no card). XLA
fuses, schedules and plans memory as it would on the card; a Mosaic GPU kernel stays
a custom call with its module inside, because that one is compiled at load time.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import pathlib
from collections.abc import Callable
from typing import Any

import jax
from jax._src.lib import xla_client
from jax.experimental import topologies


_PLUGIN = "jax_plugins.xla_cuda13"

_LIMITS = {
    "threads_per_block_limit": 1024,
    "threads_per_warp": 32,
    "shared_memory_per_block": 49152,
    "shared_memory_per_core": 233472,
    "threads_per_core_limit": 2048,
    "core_count": 132,
    "fpus_per_core": 128,
    "block_dim_limit_x": 2147483647,
    "block_dim_limit_y": 65535,
    "block_dim_limit_z": 65535,
    "memory_bandwidth": 4_800_000_000_000,
    "l2_cache_size": 52_428_800,
    "clock_rate_ghz": 1.98,
    "device_memory_size": 151_397_597_184,
    "shared_memory_per_block_optin": 232448,
    "registers_per_core_limit": 65536,
    "registers_per_block_limit": 65536,
    "thread_dim_limit_x": 1024,
    "thread_dim_limit_y": 1024,
    "thread_dim_limit_z": 64,
    "device_address_bits": 64,
    "pcie_bandwidth": 34_359_738_368,
    "collective_memory_granularity": 2_097_152,
}

# XLA's PrimitiveType number -> operations a clock of one scalar or tensor unit. The
# fusion cost model reads them; without them it takes another path.
_TENSOR_UNIT = {
    **dict.fromkeys((2, 6, 19, 20, 23, 24, 25, 28, 29, 33, 35, 36), 1024),
    **dict.fromkeys((10, 16), 512),
    11: 256,
}
_SCALAR_UNIT = {4: (64, 1), 8: (64, 1), 10: (128, 2), 11: (128, 1), 12: (64, 1)}
_SCALAR_UNIT[16] = (128, 2)


def missing() -> str | None:
    """Why nothing can be compiled here; `None` if the extra is installed."""
    try:
        found = importlib.util.find_spec(_PLUGIN)
    except ModuleNotFoundError:  # no jax_plugins at all
        found = None
    if found is None:
        return "the optional extra h200-aot (jax-cuda13-pjrt, -plugin) is not installed"
    return None


def target_config() -> str:
    """XLA's description of an H200, a text protocol buffer."""

    def rate(key: int, clock: float, units: int, ops: int) -> str:
        return (
            f"rate_infos {{ key: {key} value {{ clock_rate_ghz: {clock} "
            f"units_per_core: {units} ops_per_clock: {ops} }} }}"
        )

    limits = "\n".join(f"  {name}: {value}" for name, value in _LIMITS.items())
    scalar = "\n".join(rate(k, 1.98, u, o) for k, (u, o) in _SCALAR_UNIT.items())
    tensor = "\n".join(rate(k, 1.8295201, 4, ops) for k, ops in _TENSOR_UNIT.items())
    return f"""gpu_device_info {{
{limits}
  cuda_compute_capability {{ major: 9 feature_extension: ACCELERATED_FEATURES }}
  ecc_enabled: true
  scalar_unit_description {{ {scalar} }}
  matrix_unit_description {{ {tensor} {rate(12, 1.98, 4, 32)} }}
  device_vendor: "NVIDIA Corporation"
  platform_version: "Compute Capability 9.0a"
  name: "NVIDIA H200 141GB HBM3e"
  driver_version: "13.0.0"
  runtime_version: "13.0.0"
  compile_time_toolkit_version: "13.0.0"
  dnn_version: "9.10.0"
  cub_version: "3.1.2"
  device_interconnect_info {{ active_links: 18 }}
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 patch: 0 }}
device_description_str: "NVIDIA H200 141GB HBM3e"
"""


@functools.cache
def h200() -> jax.Device:
    """A compile-only H200.

    Raises:
      NotImplementedError: the extra is not installed.
    """
    if (reason := missing()) is not None:
        raise NotImplementedError(f"cannot compile for an H200: {reason}")
    plugin = importlib.import_module(_PLUGIN)
    library = pathlib.Path(next(iter(plugin.__path__))) / "xla_cuda_plugin.so"
    client = xla_client.load_pjrt_plugin_dynamically("cuda", str(library))
    if not xla_client.pjrt_plugin_initialized("cuda"):
        xla_client.initialize_pjrt_plugin("cuda")
    topology = xla_client.make_c_api_device_topology(
        client, "h200", topology="1x1x1", target_config=target_config()
    )
    return topologies.TopologyDescription(
        topology._make_compile_only_devices()
    ).devices[0]


def program_for_h200(lowered: jax.stages.Lowered) -> Any:
    """Compiles what was lowered for "cuda", arrays of host memory among its arguments.

    A compile-only device has no host memory to place arrays in, so those of the CPU
    stand for them, which `compile_for_h200` would refuse.

    Args:
      lowered: `jax.jit(...).trace(...).lower(lowering_platforms=("cuda",))`.

    Returns:
      XLA's executable: `.hlo_modules()`, `.get_compiled_memory_stats()`.
    """
    options = xla_client.CompileOptions()
    for part in (options, options.executable_build_options):
        part.num_replicas = part.num_partitions = 1
    device = h200()
    devices = xla_client.DeviceList((device,))
    return device.client.compile(lowered.compiler_ir("stablehlo"), devices, options)


def compile_for_h200(fn: Callable[..., Any], *args: Any) -> jax.stages.Compiled:
    """Compiles a function for one H200.

    Args:
      fn: what to compile; choose implementations by name or within `hw.assume()`.
      *args: arrays or `jax.ShapeDtypeStruct` of its arguments.

    Returns:
      The executable: `.as_text()` is scheduled HLO, `.memory_analysis()` its memory.
    """
    place = jax.sharding.SingleDeviceSharding(h200())
    args = jax.tree.map(
        lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=place), args
    )
    jitted = jax.jit(fn, in_shardings=place, out_shardings=place)
    return jitted.trace(*args).lower(lowering_platforms=("cuda",)).compile()
