"""What a training run is made of, apart from the model and the data."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from jaxaccel.core.sharding import MeshConfig


SCHEDULES = ("cosine", "wsd", "constant")


def _check(config: Any, allowed: str, is_allowed: bool, name: str) -> None:
    """Raises ValueError unless a field is finite, or None, and allowed."""
    value = getattr(config, name)
    if not is_allowed or (value is not None and not math.isfinite(value)):
        raise ValueError(f"{name} is {value}, expected {allowed}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """AdamW (arXiv 1711.05101) with warm-up and decay.

    Attributes:
      peak_lr: learning rate after the warm-up.
      schedule: "cosine" to `final_lr_fraction`; "wsd" (warm-up, stable, decay; MiniCPM,
        arXiv 2404.06395) falls linearly over the last `decay_fraction` of the run;
        "constant".
      warmup_steps: steps of linear warm-up from 0.
      final_lr_fraction: the last learning rate, as a fraction of the peak.
      decay_fraction: part of the run that "wsd" decays for.
      b1: decay of the first moment.
      b2: decay of the second moment.
      eps: added to the root of the second moment.
      weight_decay: decoupled, times the learning rate; on matrices only, see
        `optim.decay_mask`.
      decay_embeddings: whether the token embedding decays too.
      clip_norm: largest global norm of the gradient; `None` for no clipping.
      join_below: moments of parameters with fewer elements lie in one vector, whole on
        every device: each array that a step takes and returns costs host time, and
        half of a model's arrays are its norms and gates. 0 joins none.
    """

    peak_lr: float = 3e-4
    schedule: str = "cosine"
    warmup_steps: int = 100
    final_lr_fraction: float = 0.1
    decay_fraction: float = 0.2
    b1: float = 0.9
    b2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1
    decay_embeddings: bool = False
    clip_norm: float | None = 1.0
    join_below: int = 65536

    def __post_init__(self):
        if self.schedule not in SCHEDULES:
            raise ValueError(f"schedule is {self.schedule!r}, expected {SCHEDULES}")
        for name in ("peak_lr", "eps"):
            _check(self, "> 0", getattr(self, name) > 0, name)
        for name in ("warmup_steps", "weight_decay", "join_below"):
            _check(self, ">= 0", getattr(self, name) >= 0, name)
        for name in ("b1", "b2"):
            _check(self, "0 <= x < 1", 0.0 <= getattr(self, name) < 1.0, name)
        for name in ("final_lr_fraction", "decay_fraction"):
            _check(self, "0 <= x <= 1", 0.0 <= getattr(self, name) <= 1.0, name)
        norm = self.clip_norm
        _check(self, "> 0 or None", norm is None or norm > 0, "clip_norm")


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """One training run.

    On a CPU, a resumed run equals an uninterrupted one bit for bit. On a GPU that needs
    `XLA_FLAGS=--xla_gpu_deterministic_ops=true` in both: the embedding's gradient adds
    floats in whatever order they arrive (a scatter-add), and the autotuner of another
    process may pick another algorithm.

    Attributes:
      num_steps: optimizer steps.
      accumulation: micro-batches that a step is split into to save memory; divides
        the data config's batch size. It does not change the result beyond rounding,
        a router's `balance_loss_coef` aside: that loss looks at one micro-batch.
      optim: the optimizer.
      mesh: how devices are laid out.
      seed: of parameters and of the training RNG.
      loss_chunk: positions of every row whose logits exist at the same time.
      z_loss: weight of log(Z)^2 of the output logits.
      mtp_loss_weight: weight of the multi-token prediction loss; 0 leaves it out. The
        routers' losses are weighted by the model's own config.
      ema_decay: decay of an f32 running mean of the parameters; `None` for none.
      eval_every: steps between evaluations; 0 evaluates at start and end only.
      eval_batches: most batches of one evaluation, which are held in host memory;
        `None` takes all held-out text.
      checkpoint_every: steps between checkpoints; 0 writes the last one only.
      keep_checkpoints: newest checkpoints kept; the best one is kept besides.
      log_every: steps between progress lines and metric rows.
      tensorboard: also write TensorBoard files; needs the `tensorboard` extra.
      max_seconds: stop cleanly after this many seconds of training in one call of
        `train`, which needs a single process; the schedule still spans `num_steps`.
      offload_host_gb: pinned host memory, in units of 2^30 bytes, that a process may
        use for activations and optimizer state; `None` for XLA's own limit. Where a
        model's `remat_policy` does not fit, the run says so and takes a smaller one.
      optimizer_on_host: keep the optimizer's arrays in pinned host memory between
        steps: f32 moments, twice the parameters in f32, against reading and writing
        them over the bus once a step.
      compile_cache: folder of JAX's persistent compilation cache; `None` for none.
    """

    num_steps: int = 1000
    accumulation: int = 1
    optim: OptimConfig = dataclasses.field(default_factory=OptimConfig)
    mesh: MeshConfig = dataclasses.field(default_factory=MeshConfig)
    seed: int = 0
    loss_chunk: int = 512
    z_loss: float = 0.0
    mtp_loss_weight: float = 0.0
    ema_decay: float | None = None
    eval_every: int = 0
    eval_batches: int | None = 16
    checkpoint_every: int = 0
    keep_checkpoints: int = 2
    log_every: int = 10
    tensorboard: bool = False
    max_seconds: float | None = None
    offload_host_gb: float | None = None
    optimizer_on_host: bool = False
    compile_cache: str | None = None

    def __post_init__(self):
        for name in (
            *("num_steps", "accumulation", "loss_chunk", "keep_checkpoints"),
            "log_every",
        ):
            _check(self, ">= 1", getattr(self, name) >= 1, name)
        for name in ("eval_every", "checkpoint_every", "z_loss", "mtp_loss_weight"):
            _check(self, ">= 0", getattr(self, name) >= 0, name)
        batches, seconds, decay = self.eval_batches, self.max_seconds, self.ema_decay
        _check(self, ">= 1 or None", batches is None or batches >= 1, "eval_batches")
        _check(self, "> 0 or None", seconds is None or seconds > 0, "max_seconds")
        budget = self.offload_host_gb
        _check(self, "> 0 or None", budget is None or budget > 0, "offload_host_gb")
        _check(self, "0 < x < 1 or None", decay is None or 0 < decay < 1, "ema_decay")
