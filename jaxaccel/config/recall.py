"""The recall benchmark for gin files that say `import jaxaccel.config.recall`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import gin

from jaxaccel.config import registry
from jaxaccel.data.recall import RecallConfig
from jaxaccel.training.config import OptimConfig


MOST_SEEDS = 16
"""As many as `benchmarks.recall` knows a quantile of Student's t for."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RecallBenchConfig:
    """What `jaxaccel bench recall` trains, and asks.

    Attributes:
      models: name -> a model's config, such as `@Qwen3_5TextConfig()`; all of them must
        have the task's vocabulary.
      pairs: numbers of pairs, ascending. A training batch holds rows of each in equal
        parts, and every number is asked for on its own afterwards.
      num_queries: keys that a row asks for, at most the least of `pairs`.
      num_keys: keys there are.
      num_values: values there are.
      optim: the optimizer.
      num_steps: training steps.
      batch_size: rows of a step, a multiple of the count of `pairs`.
      num_seeds: runs of each model, of another initialisation and other rows each;
        they train side by side in one program.
      steps_per_call: steps that the device makes without the host, a divisor of
        `num_steps`.
      eval_rows: rows per number of pairs that the accuracy is counted over, none of
        which was trained on.
      equal_within: largest relative difference of the models' parameters allowed.
      seed: of all that is drawn.
    """

    models: Mapping[str, Any]
    pairs: tuple[int, ...] = (8, 16, 32, 64)
    num_queries: int = 8
    num_keys: int = 128
    num_values: int = 128
    optim: OptimConfig = dataclasses.field(default_factory=OptimConfig)
    num_steps: int = 1000
    batch_size: int = 64
    num_seeds: int = 5
    steps_per_call: int = 250
    eval_rows: int = 512
    equal_within: float = 0.01
    seed: int = 0

    def __post_init__(self):
        for name in ("num_steps", "batch_size", "steps_per_call", "eval_rows"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be positive")
        if not self.pairs or list(self.pairs) != sorted(set(self.pairs)):
            raise ValueError(f"pairs={self.pairs} must ascend, and not be empty")
        if not 2 <= self.num_seeds <= MOST_SEEDS:
            raise ValueError(
                f"num_seeds={self.num_seeds} must be 2 to {MOST_SEEDS}: an interval "
                "needs two"
            )
        for name, divisor in (
            ("batch_size", len(self.pairs)),
            ("num_steps", self.steps_per_call),
        ):
            if getattr(self, name) % divisor:
                raise ValueError(
                    f"{name}={getattr(self, name)} must be a multiple of {divisor}"
                )
        for pairs in (self.pairs[0], self.pairs[-1]):
            self.task(pairs)  # checks itself
        for name, model in self.models.items():
            vocab = model.decoder().vocab_size
            if vocab != self.vocab_size:
                raise ValueError(
                    f"models: {name!r} has vocab_size={vocab}, the task has "
                    f"{self.vocab_size}"
                )

    def task(self, pairs: int) -> RecallConfig:
        """The task with that number of pairs.

        Raises:
          ValueError: the numbers do not fit together.
        """
        return RecallConfig(
            num_pairs=pairs,
            num_queries=self.num_queries,
            num_keys=self.num_keys,
            num_values=self.num_values,
        )

    @property
    def vocab_size(self) -> int:
        """Tokens there are."""
        return self.num_keys + self.num_values

    @property
    def seq_len(self) -> int:
        """T of every row: that of the most pairs; rows with fewer are padded."""
        return self.task(self.pairs[-1]).seq_len


if "RecallBenchConfig" not in registry.names():
    gin.register(RecallBenchConfig, module="jaxaccel")
