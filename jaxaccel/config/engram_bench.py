"""Experiments with a memory; gin files say `import jaxaccel.config.engram_bench`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import gin

from jaxaccel.config import registry
from jaxaccel.config.recall import MOST_SEEDS
from jaxaccel.data.pipeline import DataConfig
from jaxaccel.data.planted import PlantedConfig
from jaxaccel.models.config import DecoderConfig
from jaxaccel.nn.engram_config import EngramConfig
from jaxaccel.training.config import OptimConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextConfig:
    """Real text as one long row of tokens, pieces of which are trained on.

    Attributes:
      data: corpus, tokenizer and held-out share; it is not packed.
      seq_len: T of a piece.
    """

    data: DataConfig = dataclasses.field(default_factory=DataConfig)
    seq_len: int = 256

    def __post_init__(self):
        if self.seq_len < 2:
            raise ValueError(f"seq_len={self.seq_len} must be at least 2")

    @property
    def vocab_size(self) -> int:
        """Tokens there are."""
        return self.data.vocab_size


@dataclasses.dataclass(frozen=True, kw_only=True)
class AblatedConfig:
    """A model some of whose parameters begin at zero, and so stay there.

    With both gains of a memory's gate at zero every score is zero and no gradient
    reaches them: the gate is one half. With the gain of the norm in front of its
    convolution at zero, whose filters begin at zero, the convolution adds nothing.

    Attributes:
      model: a model's config.
      zeroed: ends of the names of parameters.
    """

    model: Any
    zeroed: tuple[str, ...]

    @property
    def vocab_size(self) -> int:
        """Number of the model's tokens."""
        return self.model.vocab_size

    def decoder(self) -> DecoderConfig:
        """The model's decoder."""
        return self.model.decoder()


@dataclasses.dataclass(frozen=True, kw_only=True)
class StreamsConfig:
    """A decoder with several residual streams (mHC, arXiv 2512.24880).

    Attributes:
      model: a dense model's config; its layers are what the streams run around.
      streams: G.
      engram: its memory, with as many streams, each with keys of its own; or with one
        stream: one key, held against the streams' mean, for all of them. `None` for
        none.
    """

    model: Any
    streams: int = 4
    engram: EngramConfig | None = None

    def __post_init__(self):
        if self.streams < 1:
            raise ValueError(f"streams={self.streams} must be positive")
        if self.engram is not None and self.engram.streams not in (1, self.streams):
            raise ValueError(
                f"engram.streams={self.engram.streams}, allowed are 1 and "
                f"streams={self.streams}"
            )

    @property
    def vocab_size(self) -> int:
        """Number of the model's tokens."""
        return self.model.vocab_size

    def decoder(self) -> DecoderConfig:
        """The layers, without streams and memory."""
        return self.model.decoder()


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngramBenchConfig:
    """What `jaxaccel bench engram --only experiment` trains, and asks.

    Attributes:
      name: of the experiment.
      models: name -> a model's config. The first one is what others are held against.
      task: what is read, `@PlantedConfig()` or `@TextConfig()`.
      optim: the optimizer.
      num_steps: training steps.
      batch_size: rows of a step.
      num_seeds: runs of each model, of another initialisation and other rows each; they
        train side by side in one program. Models of one seed read the same rows.
      steps_per_call: steps that the device makes without the host, a divisor of
        `num_steps`.
      eval_batches: held-out batches that are asked for.
      equal_within: largest relative difference of the models' parameters allowed, 0 for
        any.
      fit_slots: fit a line to the losses over the logarithm of the tables' rows.
      seed: of all that is drawn.
    """

    name: str
    models: Mapping[str, Any]
    task: Any
    optim: OptimConfig = dataclasses.field(default_factory=OptimConfig)
    num_steps: int = 400
    batch_size: int = 64
    num_seeds: int = 4
    steps_per_call: int = 100
    eval_batches: int = 8
    equal_within: float = 0.0
    fit_slots: bool = False
    seed: int = 0

    def __post_init__(self):
        for name in ("num_steps", "batch_size", "steps_per_call", "eval_batches"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be positive")
        if not 2 <= self.num_seeds <= MOST_SEEDS:
            raise ValueError(
                f"num_seeds={self.num_seeds} must be 2 to {MOST_SEEDS}: an interval "
                "needs two"
            )
        if self.num_steps % self.steps_per_call:
            raise ValueError(
                f"num_steps={self.num_steps} must be a multiple of "
                f"steps_per_call={self.steps_per_call}"
            )
        for name, model in self.models.items():
            if model.vocab_size != self.task.vocab_size:
                raise ValueError(
                    f"models: {name!r} has vocab_size={model.vocab_size}, the task has "
                    f"{self.task.vocab_size}"
                )


for _config in (
    AblatedConfig,
    EngramBenchConfig,
    PlantedConfig,
    StreamsConfig,
    TextConfig,
):
    if _config.__name__ not in registry.names():
        gin.register(_config, module="jaxaccel")
