"""The steps from op-by-op decoding to a decode loop that keeps the host out, as data.

`jaxaccel bench decode` measures them. Each step changes one thing and keeps what the
steps before it changed; a step that is left out changes nothing in those behind it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxaccel.nn.implementation import OPS


STEPS = (
    "op_by_op",
    "jit",
    "scan",
    "fused_kernel",
    "in_place",
    "device_loop",
    "command_buffers",
    "speculation",
)
LAYERS = ("scanned", "unrolled")


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecodeBenchConfig:
    """What `jaxaccel bench decode` measures.

    Attributes:
      model: a model's config, such as `@Qwen3_5TextConfig()`.
      checkpoint: folder of a run that trained it, whose weights continue documents that
        its data config holds out; `None` for random weights and prompts. No time
        depends on that but the last step's, whose drafts must be right to be worth
        anything.
      steps: names of `STEPS`, in their order. "op_by_op": no program around a
        token, as JAX runs what nobody compiled; the layers a Python loop, ops "xla".
        "jit": one program a token, the same loop inside. "scan": the layers are
        scanned. "fused_kernel": the ops of `fused` run what is named there.
        "in_place": caches are donated, and updated where they are. "device_loop":
        `tokens_per_call` tokens a call. "command_buffers": XLA puts launches into
        CUDA graphs; before, it puts none. "speculation": the prediction block drafts,
        one call for all tokens.
      batches: rows B, each measured in turn.
      prompt_length: tokens that the caches hold at first.
      new_tokens: tokens of a row that a round times, a multiple of `tokens_per_call`.
      op_by_op_tokens: the same for "op_by_op", which is slow.
      check_tokens: tokens of a row that are compared with those of the first step.
      rounds: rounds of each step; the median is told.
      tokens_per_call: of "device_loop".
      layers: from "in_place" on, one program for a period that a loop repeats
        ("scanned"), or for all layers with their own arrays ("unrolled").
      fused: op -> implementation, of "fused_kernel".
      command_buffers: kinds of launches that go into CUDA graphs, XLA's flag
        `xla_gpu_enable_command_buffer`; `None` for XLA's own choice.
      num_drafts: drafts of a pass, of "speculation".
      require: names of kernels, such as "pk_gated_delta_step", that must be in every
        program from "fused_kernel" on; without them it has no speed. That of
        "speculation" is free: it reads several tokens at once, by other kernels.
      logit_tolerance: where a row's tokens first differ from those of the first step,
        the largest gap allowed between its logits of both tokens, as a share of the
        logits' standard deviation: a near tie that rounding decides. A token of no
        meaning is about four deviations below the best of a random model.
      seed: of the weights and the prompts.
    """

    model: Any
    checkpoint: str | None = None
    steps: tuple[str, ...] = STEPS
    batches: tuple[int, ...] = (1, 8, 64)
    prompt_length: int = 128
    new_tokens: int = 128
    op_by_op_tokens: int = 8
    check_tokens: int = 16
    rounds: int = 3
    tokens_per_call: int = 32
    layers: str = "unrolled"
    fused: Mapping[str, str] = dataclasses.field(
        default_factory=lambda: {"gated_delta_step": "mosaic"}
    )
    command_buffers: str | None = None
    num_drafts: int = 1
    require: tuple[str, ...] = ()
    logit_tolerance: float = 0.05
    seed: int = 0

    def __post_init__(self):
        if tuple(step for step in STEPS if step in self.steps) != tuple(self.steps):
            raise ValueError(
                f"steps={self.steps} must be names out of {STEPS}, in this order"
            )
        if set(self.steps) - {"op_by_op"} and "jit" not in self.steps:
            raise ValueError(f"steps={self.steps}: those behind 'jit' need 'jit'")
        if not self.steps:
            raise ValueError("steps=() must name at least one step")
        if self.layers not in LAYERS:
            raise ValueError(f"layers={self.layers!r}, allowed are {LAYERS}")
        for name in (
            "prompt_length",
            "new_tokens",
            "op_by_op_tokens",
            "check_tokens",
            "rounds",
            "tokens_per_call",
            "num_drafts",
        ):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be positive")
        if not self.batches or min(self.batches) < 1:
            raise ValueError(f"batches={self.batches} must be positive numbers")
        if self.new_tokens % self.tokens_per_call:
            raise ValueError(
                f"new_tokens={self.new_tokens} must be a multiple of "
                f"tokens_per_call={self.tokens_per_call}"
            )
        if self.logit_tolerance < 0:
            raise ValueError(f"logit_tolerance={self.logit_tolerance} is negative")
        if "speculation" in self.steps and not self.model.decoder().num_mtp_layers:
            raise ValueError("steps: 'speculation' needs a model with num_mtp_layers=1")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """How a step decodes.

    Attributes:
      step: its name.
      jit: whether a token is one program.
      layers: "python" (a loop over blocks), "copied" (the decoder's scan), or one of
        `LAYERS`, with the caches carried.
      fused: op -> implementation; empty leaves the choice to the ops.
      donate: whether a call gives its caches away.
      tokens_per_call: tokens that a call draws.
      command_buffers: whether XLA may use CUDA graphs.
      num_drafts: drafts of a pass; 0 decodes token by token.
      needs_kernels: whether `DecodeBenchConfig.require` holds for it.
      unavailable: why the step's own change could not be made, "" if it was.
    """

    step: str
    jit: bool = False
    layers: str = "python"
    fused: tuple[tuple[str, str], ...] = ()
    donate: bool = False
    tokens_per_call: int = 1
    command_buffers: bool = False
    num_drafts: int = 0
    needs_kernels: bool = False
    unavailable: str = ""


def settings(config: DecodeBenchConfig, refusals: Mapping[str, str]) -> list[Settings]:
    """One entry per step of the config.

    Args:
      config: the benchmark.
      refusals: step -> why this machine cannot run it; later steps go without.

    Returns:
      The steps' settings, in order.
    """
    changes: dict[str, dict[str, Any]] = {
        "op_by_op": {},
        "jit": {"jit": True},
        "scan": {"layers": "copied"},
        "fused_kernel": {"fused": tuple(sorted(config.fused.items()))},
        "in_place": {"donate": True, "layers": config.layers},
        "device_loop": {"tokens_per_call": config.tokens_per_call},
        "command_buffers": {"command_buffers": True},
        "speculation": {"num_drafts": config.num_drafts, "needs_kernels": False},
    }
    current, found = Settings(step=""), []
    for step in config.steps:
        if step == "fused_kernel":
            current = dataclasses.replace(current, needs_kernels=True)
        if refusal := refusals.get(step, ""):
            found.append(dataclasses.replace(current, step=step, unavailable=refusal))
        else:
            current = dataclasses.replace(current, step=step, **changes[step])
            found.append(current)
    return found


def unknown_ops(fused: Mapping[str, str]) -> list[str]:
    """Ops of `fused` that no layer has."""
    return [op for op in fused if op not in OPS]
