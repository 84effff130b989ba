"""Which mode of `offload_scan` a run can have, and whether it got it."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jaxaccel.core.memory import (
    PINNED_HOST,
    PINNED_LIMIT_VARIABLE,
    HostMemory,
    gib,
)
from jaxaccel.core.offload import MODES, OFFLOADING, offload_scan


_LOGGER = logging.getLogger(__name__)

MIN_LAYERS = 3
MIN_ACTIVATION_BYTES = 2 * 2**20
"""Below either of these a copy costs more than the memory it frees is worth."""

CANARY_TOLERANCE = 1e-2
"""Largest result of `gradient_canary` that passes: a wrong slice gives about one."""

AVAILABLE_SHARE = 0.8
"""Part of the memory that a process has left which may be pinned."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class OffloadPlan:
    """What `plan_offload` chose.

    Attributes:
      mode: one of `MODES`.
      group: layers that share a stored input, 1 but for mode "group".
      host_bytes: pinned bytes that this process's layer inputs take.
      device_bytes: bytes of layer inputs that lie on each device at the same time.
      reason: why this mode and none before it, for people.
    """

    mode: str
    group: int = 1
    host_bytes: int
    device_bytes: int
    reason: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScanSizes:
    """What a scan keeps for its backward pass.

    Attributes:
      length: iterations L.
      stages: layers in an iteration, see `offload_scan`.
      activation_bytes: of one layer's input on one device.
      named_bytes: of the further named values of one iteration, on one device.
      num_devices: devices of this process.
    """

    length: int
    stages: int = 1
    activation_bytes: int
    named_bytes: int = 0
    num_devices: int = 1

    def host_bytes(self, mode: str, group: int = 1) -> int:
        """Pinned bytes of this process in a mode."""
        if mode not in OFFLOADING:
            return 0
        if mode == "group":
            # One input a group of iterations, and the ring never stores the last.
            one_device = self.length // group * self.activation_bytes
        else:
            inputs = self.stages * self.activation_bytes
            named = self.named_bytes if mode == "policy" else 0
            one_device = self.length * (inputs + named)
        return one_device * self.num_devices

    def device_bytes(self, mode: str, group: int = 1) -> int:
        """Bytes of layer inputs on one device in a mode."""
        count = {
            "ring": 2 * self.stages,
            "policy": 1,
            "group": 2 + group * self.stages,
        }.get(mode, self.length * self.stages)
        return count * self.activation_bytes


def plan_offload(
    mode: str,
    sizes: ScanSizes,
    memory: HostMemory | None,
    *,
    group: int = 2,
    host_budget: int | None = None,
    reserved: int = 0,
    failed: Mapping[str, str] | None = None,
) -> OffloadPlan:
    """Chooses the first mode that fits: the one asked for, policy, group, remat.

    Args:
      mode: what is asked for; "save" and "remat" are taken as they are.
      sizes: what there is to keep.
      memory: what the device and the host have; `None` where the mode uses no host
        memory.
      group: the smallest group of layers, for mode "group".
      host_budget: pinned bytes that this process may use, `None` for no such limit.
      reserved: pinned bytes that something else of this process takes.
      failed: modes that were tried, and why they cannot be had.

    Returns:
      The plan. Its reason names each mode that was passed over, the number that it
      failed by and what sets that number.

    Raises:
      ValueError: the mode is unknown, or offloads without `memory`.
    """
    if mode not in MODES:
        raise ValueError(
            f"mode={mode!r} is unknown, allowed are {', '.join(map(repr, MODES))}"
        )
    if mode not in OFFLOADING:
        return _plan(mode, 1, sizes, "as asked")
    if memory is None:
        raise ValueError(f"mode={mode!r} needs memory, got None")
    unfit = _why_not_at_all(sizes, memory)
    if unfit is not None:
        return _plan("remat", 1, sizes, f"{mode}: {unfit}")
    limit, limit_name = _host_limit(memory, host_budget)
    refusals: list[str] = []
    for rung in OFFLOADING[OFFLOADING.index(mode) :]:
        refusal = (failed or {}).get(rung)
        grouped = 1
        if rung == "group":
            grouped = _group_that_fits(sizes, limit - reserved, group)
        need = sizes.host_bytes(rung, grouped)
        if refusal is None and rung == "group" and grouped == 1:
            refusal = (
                f"no group of {sizes.length} layers is small enough ({limit_name})"
            )
        if refusal is None and need + reserved > limit:
            taken = f" beside {gib(reserved)} in use" if reserved else ""
            refusal = f"needs {gib(need)} of host memory{taken} ({limit_name})"
        if refusal is None:
            chosen = f"{rung}: {gib(need)} of host memory ({limit_name})"
            return _plan(rung, grouped, sizes, "; ".join([*refusals, chosen]))
        refusals.append(f"{rung}: {refusal}")
    return _plan("remat", 1, sizes, "; ".join(refusals))


def _plan(mode: str, group: int, sizes: ScanSizes, reason: str) -> OffloadPlan:
    return OffloadPlan(
        mode=mode,
        group=group,
        host_bytes=sizes.host_bytes(mode, group),
        device_bytes=sizes.device_bytes(mode, group),
        reason=reason,
    )


def _why_not_at_all(sizes: ScanSizes, memory: HostMemory) -> str | None:
    if memory.is_shared:
        return f"the memory of {memory.device} is the host's own"
    if not memory.has_pinned_host:
        return f"{memory.device} has no memory of the kind {PINNED_HOST!r}"
    if sizes.length < MIN_LAYERS:
        return f"{sizes.length} layers are less than {MIN_LAYERS}"
    if sizes.activation_bytes < MIN_ACTIVATION_BYTES:
        size = sizes.activation_bytes
        return f"a layer's input has {size} bytes, less than {MIN_ACTIVATION_BYTES}"
    return None


def _host_limit(memory: HostMemory, budget: int | None) -> tuple[int, str]:
    """The smallest of the limits, and a name for it that says who sets it."""
    limits = [
        (
            memory.pinned_limit,
            f"the pinned pool has {gib(memory.pinned_limit)} ({PINNED_LIMIT_VARIABLE})",
        )
    ]
    if budget is not None:
        limits.append((budget, f"the host budget is {gib(budget)}"))
    if memory.available is not None:
        share = int(AVAILABLE_SHARE * memory.available)
        limits.append((share, f"{gib(share)} of this process's memory may be pinned"))
    return min(limits)


def _group_that_fits(sizes: ScanSizes, limit: int, least: int) -> int:
    """The smallest group that divides the layers and fits; 1 if none does."""
    for group in range(least, sizes.length // 2 + 1):
        fits = sizes.host_bytes("group", group) <= limit
        if fits and sizes.length % group == 0:
            return group
    return 1


class OffloadFailed(RuntimeError):
    """The executable or its gradients are not what the mode promises."""


def compiler_options(mode: str, platform: str) -> dict[str, Any]:
    """XLA's options for an executable that copies beside its kernels.

    A CUDA graph puts the copies in line with the kernels, so that none overlap. XLA
    refuses to compile with an option that it does not know.

    Args:
      mode: one of `MODES`.
      platform: of the devices, `jax.Device.platform`.
    """
    if mode in OFFLOADING and platform == "gpu":
        return {"xla_gpu_enable_command_buffer": ""}
    return {}


def verify_offload(
    compiled: jax.stages.Compiled,
    plan: OffloadPlan,
    platform: str,
    num_devices: int = 1,
) -> None:
    """Asserts that a compiled function keeps in host memory what the plan says.

    More than a tenth above the plan is logged as a warning: the step runs, but the
    budget that the plan kept to may be passed.

    A misspelt name or a value that XLA could prove unnecessary to move would leave
    everything on the device without a word. A CPU's host memory is its own, and no
    copies are made there: nothing is asserted.

    Args:
      compiled: a function whose gradient is taken in it.
      plan: what it was compiled for.
      platform: of the devices.
      num_devices: devices of this process, which share the plan's host bytes.

    Raises:
      OffloadFailed: names what is missing.
    """
    if platform == "cpu" or plan.mode not in OFFLOADING:
        return
    analysis = compiled.memory_analysis()
    found = 0 if analysis is None else analysis.host_temp_size_in_bytes
    expected = plan.host_bytes // num_devices
    if found < 0.9 * expected:
        raise OffloadFailed(
            f"the compiled step keeps {gib(found)} in host memory, expected "
            f"{gib(expected)}"
        )
    if found > 1.1 * expected:
        _LOGGER.warning(
            "the compiled step keeps %s in host memory, planned were %s",
            gib(found),
            gib(expected),
        )
    text = compiled.as_text() or ""
    if '_xla_compute_type="host"' in text:
        raise OffloadFailed("XLA moved computations to the host")
    if plan.mode in OFFLOADING and "command_buffer" in text:
        raise OffloadFailed(
            "the compiled step has command buffers although "
            "xla_gpu_enable_command_buffer is empty: no copy would overlap"
        )


def gradient_canary(mode: str, *, group: int = 2, size: int = 512) -> float:
    """Compares the gradients of a mode with those of remat on the device at hand.

    Four layers of different weights, whose inputs have 1 MiB at the default size: a
    slice that is read in the wrong order, or before it has arrived, shows.

    Args:
      mode: one of `MODES`.
      group: layers in a group, for mode "group".
      size: rows and columns of the layers' inputs.

    Returns:
      The largest relative difference of a layer's gradient; rounding gives about
      1e-6, or 1e-3 where matrix products run in TF32.
    """
    platform = jax.devices()[0].platform

    def layer(w, x, consts):
        return x + jnp.tanh(jnp.matmul(x, w) * consts), jnp.sum(x)

    def gradients(mode: str, group: int):
        def loss(ws, x, scale):
            y, sums = offload_scan(layer, ws, x, scale, mode=mode, group=group)
            return jnp.sum(jnp.square(y)) / size + jnp.mean(sums)

        options = compiler_options(mode, platform)
        return jax.jit(jax.grad(loss, argnums=(0, 1, 2)), compiler_options=options)

    keys = jax.random.split(jax.random.key(0), 2)
    ws = jax.random.normal(keys[0], (4, size, size), jnp.float32)
    x = jax.random.normal(keys[1], (size, size), jnp.float32)
    arguments = (ws, x, jnp.float32(size**-0.5))
    got = gradients(mode, group if mode == "group" else 1)(*arguments)
    want = gradients("remat", 1)(*arguments)

    def apart(a, b):
        axes = tuple(range(max(a.ndim - 2, 0), a.ndim))  # layer by layer
        norm = jnp.sqrt(jnp.sum(jnp.square(b), axis=axes))
        return jnp.max(jnp.sqrt(jnp.sum(jnp.square(a - b), axis=axes)) / norm)

    worst = jax.tree.map(apart, got, want)
    # NaN must not pass for small.
    return float(jnp.max(jnp.stack(jax.tree.leaves(worst))))
