"""Where a run's activations lie: the plan, and a first step that may change it."""

from __future__ import annotations

import dataclasses
import logging
import sys
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from jaxaccel.core.memory import (
    PINNED_LIMIT_VARIABLE,
    HostMemory,
    gib,
    host_memory,
    pinned_limit,
)
from jaxaccel.core.offload import OFFLOADING
from jaxaccel.core.offload_plan import (
    CANARY_TOLERANCE,
    OffloadFailed,
    OffloadPlan,
    ScanSizes,
    compiler_options,
    gradient_canary,
    plan_offload,
    verify_offload,
)
from jaxaccel.data.pipeline import DataConfig
from jaxaccel.models.config import DecoderConfig, RematPolicy
from jaxaccel.models.decoder import Decoder
from jaxaccel.training.config import TrainConfig


_LOGGER = logging.getLogger(__name__)

# What XLA says of a device's memory and of the pinned pool.
_OUT_OF_MEMORY = ("RESOURCE_EXHAUSTED", "Out of host memory")


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunSizes(ScanSizes):
    """What the scans of a decoder's runs keep, one behind the other.

    `length` counts the iterations of all of them, and `named_bytes` is their mean.

    Attributes:
      runs: (iterations, layers in an iteration) of each.
      inputs_between: further inputs kept on each device, of what stands between runs.
    """

    runs: tuple[tuple[int, int], ...]
    inputs_between: int = 0

    def host_bytes(self, mode: str, group: int = 1) -> int:
        """As of `ScanSizes`; more than any memory for a group that a run can't have."""
        if mode not in OFFLOADING:
            return 0
        if any(repeats % group for repeats, _ in self.runs):
            return sys.maxsize
        if mode == "policy":
            inputs = sum(repeats * stages for repeats, stages in self.runs)
            one_device = inputs * self.activation_bytes
            return (one_device + self.length * self.named_bytes) * self.num_devices
        # What is not repeated stays on the device.
        stored = sum(
            repeats // group * (stages if mode == "ring" else 1)
            for repeats, stages in self.runs
            if repeats > group
        )
        return stored * self.activation_bytes * self.num_devices

    def device_bytes(self, mode: str, group: int = 1) -> int:
        """As of `ScanSizes`."""
        deepest = max(stages for _, stages in self.runs)
        count = {
            # Each run keeps its last inputs; one of them reads further ones at a time.
            "ring": sum(stages for _, stages in self.runs) + deepest,
            "policy": 1,
            "group": len(self.runs) + 1 + group * deepest,
        }.get(mode, sum(repeats * stages for repeats, stages in self.runs))
        return (count + self.inputs_between) * self.activation_bytes


def scan_sizes(
    decoder: DecoderConfig, data: DataConfig, config: TrainConfig, mesh: Mesh
) -> RunSizes:
    """What the layers' scans keep of one micro-batch on one device.

    Args:
      decoder: the model.
      data: rows of a batch and their length.
      config: micro-batches of a step.
      mesh: rows are cut over "data" x "fsdp"; "tensor" does not cut layer inputs.
    """
    parts = mesh.shape["data"] * mesh.shape["fsdp"]
    rows = data.batch_size // config.accumulation // parts
    names = RematPolicy.parse(decoder.remat_policy).names
    one = rows * data.seq_len * decoder.d_model * decoder.compute_dtype.itemsize
    runs = tuple((run.repeats, len(run.kinds)) for run in decoder.runs)
    return RunSizes(
        runs=runs,
        inputs_between=0 if decoder.engram is None else len(decoder.engram.places),
        length=sum(repeats for repeats, _ in runs),
        stages=max(stages for _, stages in runs),
        activation_bytes=one,
        named_bytes=named_bytes(decoder, rows, data.seq_len) if names else 0,
        num_devices=len(mesh.local_devices),
    )


def named_bytes(decoder: DecoderConfig, rows: int, time: int) -> int:
    """Bytes of the values that "offload_policy:NAME,..." names, in one iteration.

    Args:
      decoder: the model.
      rows: of a batch.
      time: their length.

    Returns:
      The mean of all iterations, where the layers are scanned in several runs.
    """
    names = RematPolicy.parse(decoder.remat_policy).names
    plain = dataclasses.replace(decoder, remat_policy="save", num_mtp_layers=0)

    def hidden(tokens: jax.Array) -> jax.Array:
        return Decoder(plain, rngs=nnx.Rngs(0))(tokens).hidden

    tokens = jax.ShapeDtypeStruct((rows, time), jnp.int32)
    total = sum(
        times * out.aval.size * out.aval.dtype.itemsize
        for equation, times in _equations(jax.make_jaxpr(hidden)(tokens).jaxpr)
        if equation.primitive.name == "name" and equation.params["name"] in names
        for out in equation.outvars
    )
    return total // sum(run.repeats for run in decoder.runs)


def _equations(jaxpr: Any, times: int = 1) -> Iterator[tuple[Any, int]]:
    """All equations of a jaxpr and its inner functions, and how often each runs."""
    for equation in jaxpr.eqns:
        yield equation, times
        own = times
        if equation.primitive.name == "scan":
            own *= equation.params["length"]
        for value in equation.params.values():
            for item in value if isinstance(value, tuple | list) else (value,):
                inner = getattr(item, "jaxpr", item)
                if hasattr(inner, "eqns"):
                    yield from _equations(inner, own)


def check_pinned_limit(num_bytes: int, config: TrainConfig) -> None:
    """Refuses an optimizer state that cannot be pinned.

    Raises:
      ValueError: names the limit that is passed and what sets it.
    """
    limits = [(pinned_limit(), f"the pinned pool's limit, {PINNED_LIMIT_VARIABLE}")]
    if config.offload_host_gb is not None:
        budget = int(config.offload_host_gb * 2**30)
        limits.append((budget, "TrainConfig.offload_host_gb"))
    limit, name = min(limits)
    if num_bytes > limit:
        raise ValueError(
            f"optimizer_on_host=True needs {gib(num_bytes)} of pinned host memory, "
            f"more than {gib(limit)} ({name})"
        )


class OffloadLadder:
    """The modes that a run may still have, the best of them first.

    A mode that failed does not come back, so that there is an end.

    Attributes:
      plan: the mode at hand.
      decoder: the model with that mode's `remat_policy`.
      platform: of the devices.
      num_devices: devices of this process that the run uses.
    """

    def __init__(
        self,
        decoder: DecoderConfig,
        sizes: ScanSizes,
        config: TrainConfig,
        *,
        reserved: int = 0,
        memory: HostMemory | None = None,
    ):
        """Makes the first plan and says what it is.

        Args:
          decoder: the model as asked for.
          sizes: what its layers keep.
          config: the host budget.
          reserved: pinned bytes that the optimizer's state takes.
          memory: what the device and the host have; asked by default, where the
            model offloads.
        """
        self._asked = decoder
        self._policy = RematPolicy.parse(decoder.remat_policy)
        self._sizes = sizes
        self._failed: dict[str, str] = {}
        self._reserved = reserved
        budget = config.offload_host_gb
        self._budget = None if budget is None else int(budget * 2**30)
        # Asked only where it matters: a malformed limit stops no run that offloads
        # nothing.
        if memory is None and self._policy.mode in OFFLOADING:
            memory = host_memory()
        self._memory = memory
        self.platform = jax.local_devices()[0].platform
        self.num_devices = sizes.num_devices
        self._replan()

    def refuse(self, reason: str) -> None:
        """Gives the mode at hand up for good and takes the next one.

        Args:
          reason: why, for people.

        Raises:
          ValueError: the mode uses no host memory: there is none below it.
        """
        if self.plan.mode not in OFFLOADING:
            raise ValueError(f"nothing to fall back to from {self.plan.mode}: {reason}")
        self._failed[self.plan.mode] = reason
        self._replan()

    def _replan(self) -> None:
        policy, asked = self._policy, self._asked
        if policy.mode not in OFFLOADING:
            self.plan, self.decoder = self._planned(policy.mode), asked
            return
        plan, names = self._planned(policy.mode), policy.names
        if names and plan.mode != "policy" and "policy" not in self._failed:
            without = self._planned(policy.mode, named_bytes=0)
            if without.mode == "policy":
                reason = f"without {', '.join(names)}: {plan.reason}"
                plan, names = dataclasses.replace(without, reason=reason), ()
        self.plan = plan
        text = RematPolicy.of_mode(plan.mode, group=plan.group, names=names)
        self.decoder = dataclasses.replace(asked, remat_policy=text)
        say = _LOGGER.info if text == asked.remat_policy else _LOGGER.warning
        say(
            "activations: %s asked for, %s taken, %s of host memory, layer inputs %s "
            "on the device (%s)",
            *(asked.remat_policy, text, gib(plan.host_bytes), gib(plan.device_bytes)),
            plan.reason,
        )

    def _planned(self, mode: str, **sizes: int) -> OffloadPlan:
        return plan_offload(
            mode,
            dataclasses.replace(self._sizes, **sizes),
            self._memory,
            group=max(self._policy.group, 2),
            host_budget=self._budget,
            reserved=self._reserved,
            failed=self._failed,
        )


class PlannedStep:
    """A jitted training step that is compiled for its plan when it is first called.

    What keeps activations in host memory is tried before it is trusted: its gradients
    on a small stack, the executable's host memory, and one step. Where that fails, the
    step is built anew for the next mode of the ladder, each mode once.
    """

    def __init__(
        self,
        ladder: OffloadLadder,
        build: Callable[[DecoderConfig], Any],
        remake: Callable[[], Any],
    ):
        """Nothing is compiled yet.

        Args:
          ladder: the modes.
          build: model -> jitted (state, batch) -> (state, metrics), state donated.
          remake: () -> the state of the first call, which a failed step has consumed.
        """
        self._ladder = ladder
        self._build = build
        self._remake = remake
        self._step: Callable[[Any, Any], tuple[Any, Any]] | None = None

    def __call__(self, state: Any, batch: Any) -> tuple[Any, Any]:
        """One step; the first one may take a few attempts.

        Raises:
          jax.errors.JaxRuntimeError: of the step, where no other mode can help.
        """
        if self._step is not None:
            return self._step(state, batch)
        # The modes get fewer with each failure: this ends.
        while self._ladder.plan.mode in OFFLOADING:
            failure = self._attempt(state, batch)
            if not isinstance(failure, str):
                return failure
            self._ladder.refuse(failure)
            if any(x.is_deleted() for x in jax.tree.leaves(state)):
                state = self._remake()
        self._step = self._build(self._ladder.decoder)
        return self._step(state, batch)

    def _attempt(self, state: Any, batch: Any) -> tuple[Any, Any] | str:
        """The result of a step, or why the mode at hand cannot be had."""
        ladder, plan = self._ladder, self._ladder.plan
        try:
            if ladder.platform == "gpu":
                apart = gradient_canary(plan.mode)
                # Written so that NaN fails.
                if not apart <= CANARY_TOLERANCE:
                    return f"its gradients on this device are {apart:.1e} off remat's"
            step = (
                self._build(ladder.decoder)
                .lower(state, batch)
                .compile(compiler_options=compiler_options(plan.mode, ladder.platform))
            )
            verify_offload(step, plan, ladder.platform, ladder.num_devices)
            result = step(state, batch)
            # An error of the device shows when a result is waited for.
            jax.block_until_ready(result)
        except OffloadFailed as error:
            return str(error)
        except jax.errors.JaxRuntimeError as error:
            # Several processes would have to agree on another program.
            is_full = any(text in str(error) for text in _OUT_OF_MEMORY)
            if not is_full or jax.process_count() > 1:
                raise
            return "out of memory in the first step"
        self._step = step
        return result
