"""The tasks of long contexts for gin files that say `import jaxaccel.config.ruler`."""

from __future__ import annotations

import dataclasses
from typing import Any

import gin

from jaxaccel.config import registry
from jaxaccel.data.ruler import QUESTION, TASKS, RulerConfig, RulerTask
from jaxaccel.models.config import DecoderConfig
from jaxaccel.nn.attention import AttentionConfig
from jaxaccel.nn.mlp import MLPConfig
from jaxaccel.nn.rope import RopeConfig
from jaxaccel.training.config import OptimConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class RopeDecoderConfig:
    """A decoder of nothing but grouped attention with RoPE, and SwiGLU.

    Attributes:
      vocab_size: number of tokens.
      d_model: width D.
      num_layers: layers.
      num_heads, num_kv_heads, head_dim: of attention.
      d_ff: hidden width F.
      rope_theta: of the rotary embedding, on whole heads.
      tie_embeddings, dtype, param_dtype, remat_policy, implementation: as in
        `DecoderConfig`.
    """

    vocab_size: int
    d_model: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    d_ff: int
    rope_theta: float = 10_000.0
    tie_embeddings: bool = False
    dtype: str = "float32"
    param_dtype: str = "float32"
    remat_policy: str = "none"
    implementation: Any = None

    def __post_init__(self):
        self.decoder()  # the parts check themselves and name what is wrong

    def decoder(self) -> DecoderConfig:
        """The model as data that `Decoder` builds.

        Raises:
          ValueError: sizes do not fit together.
        """
        return DecoderConfig(
            vocab_size=self.vocab_size,
            d_model=self.d_model,
            num_layers=self.num_layers,
            pattern=("attention",),
            mlp=MLPConfig(d_ff=self.d_ff),
            attention=AttentionConfig(
                num_heads=self.num_heads,
                num_kv_heads=self.num_kv_heads,
                head_dim=self.head_dim,
                rope=RopeConfig(theta=self.rope_theta),
            ),
            tie_embeddings=self.tie_embeddings,
            dtype=self.dtype,
            param_dtype=self.param_dtype,
            remat_policy=self.remat_policy,
            implementation=self.implementation,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class RulerBenchConfig:
    """What `jaxaccel bench ruler` trains, and what caches are asked.

    Attributes:
      model: its config, such as `@RopeDecoderConfig()`.
      rows: of the evaluation; training has the same tokens.
      phases: (context, rows of a step, steps), one after the other.
      train_questions: questions of a row in training.
      steps_per_call: steps that the device makes without the host; divides each phase.
      optim: the optimizer, over all phases.
      tasks: names in `jaxaccel.data.ruler.TASKS`.
      task_keys: keys of the task "multikey_64", whose name says its default.
      eval_rows: rows of each task.
      passes: what dense attention must score for a task to tell caches apart.
      max_seconds: training ends at this age, whatever is left, and each phase at its
        share of it; `None` for never. The learning rate follows the steps of all
        phases as planned: a run that is cut may end before it decays.
      budgets: chosen tokens as shares of the context, of the caches that are asked.
      outliers: outlier chunks of ShadowKV, the sink among them.
      local_window: newest tokens that caches keep.
      seed: of all that is drawn.
    """

    model: Any
    rows: RulerConfig = dataclasses.field(default_factory=RulerConfig)
    phases: tuple[tuple[int, int, int], ...] = ((256, 64, 1000), (4096, 16, 500))
    train_questions: int = 32
    steps_per_call: int = 100
    optim: OptimConfig = dataclasses.field(default_factory=OptimConfig)
    tasks: tuple[str, ...] = tuple(TASKS)
    task_keys: int = 64
    eval_rows: int = 64
    passes: float = 0.95
    max_seconds: float | None = None
    budgets: tuple[float, ...] = (1 / 256, 1 / 128, 1 / 64, 1 / 32, 1 / 16, 1.0)
    outliers: int = 2
    local_window: int = 32
    seed: int = 0

    def __post_init__(self):
        object.__setattr__(self, "phases", tuple(map(tuple, self.phases)))
        for name in ("train_questions", "steps_per_call", "eval_rows", "local_window"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be positive")
        if not self.phases:
            raise ValueError("phases=() must name at least one phase")
        for phase in self.phases:
            if len(phase) != 3 or min(phase) < 1:
                raise ValueError(
                    f"phases={self.phases} must be (context, rows, steps), positive"
                )
            if phase[2] % self.steps_per_call:
                raise ValueError(
                    f"phases={self.phases}: {phase[2]} steps are no multiple of "
                    f"steps_per_call={self.steps_per_call}"
                )
            self.training_rows(phase[0])  # checks itself
        unknown = [name for name in self.tasks if name not in TASKS]
        if unknown or not self.tasks:
            raise ValueError(
                f"tasks={self.tasks}, allowed are {', '.join(map(repr, TASKS))}"
            )
        for name in self.tasks:
            self.task(name).check(self.rows)
        if list(self.budgets) != sorted(set(self.budgets)) or not self.budgets:
            raise ValueError(f"budgets={self.budgets} must ascend, and not be empty")
        if not 0 < self.budgets[0] <= self.budgets[-1] <= 1:
            raise ValueError(f"budgets={self.budgets} must be above 0 and at most 1")
        vocab = self.model.decoder().vocab_size
        if vocab < self.rows.vocab_size:
            raise ValueError(
                f"model has vocab_size={vocab}, the tasks have {self.rows.vocab_size}"
            )

    @property
    def num_steps(self) -> int:
        """Steps of all phases."""
        return sum(steps for _, _, steps in self.phases)

    def training_rows(self, context: int) -> RulerConfig:
        """Rows of a phase; pairs fill a short context to a half at most.

        Raises:
          ValueError: the context has no room for a pair.
        """
        return dataclasses.replace(
            self.rows,
            context=context,
            num_questions=self.train_questions,
            most_pairs=min(self.rows.most_pairs, max((context - 2) // 4, 1)),
        )

    def task(self, name: str) -> RulerTask:
        """The task of that name, with `task_keys`."""
        if name == "multikey_64":
            return dataclasses.replace(TASKS[name], keys=self.task_keys)
        return TASKS[name]

    @property
    def room(self) -> int:
        """Tokens of a row whose questions are read twice."""
        return self.rows.context + 2 * QUESTION * self.rows.num_questions


for _configurable in (RopeDecoderConfig, RulerBenchConfig, RulerConfig):
    if _configurable.__name__ not in registry.names():
        gin.register(_configurable, module="jaxaccel")
