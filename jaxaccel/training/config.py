"""What a training run is made of, apart from the model and the data."""

from __future__ import annotations

import dataclasses

from jaxaccel.core.sharding import MeshConfig


SCHEDULES = ("cosine", "wsd", "constant")


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

    def __post_init__(self):
        if self.schedule not in SCHEDULES:
            raise ValueError(f"schedule is {self.schedule!r}, expected {SCHEDULES}")
        if self.warmup_steps < 0:
            raise ValueError(f"warmup_steps is {self.warmup_steps}, expected >= 0")
        for name in ("final_lr_fraction", "decay_fraction"):
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise ValueError(f"{name} is {getattr(self, name)}, expected 0 to 1")
        if self.clip_norm is not None and self.clip_norm <= 0:
            raise ValueError(f"clip_norm is {self.clip_norm}, expected > 0 or None")


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """One training run.

    Attributes:
      num_steps: optimizer steps.
      accumulation: micro-batches that a step is split into to save memory; divides
        the data config's batch size. It does not change the result beyond rounding,
        a router's balance loss aside, which looks at one micro-batch at a time.
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
      max_seconds: stop cleanly after this many seconds of training, which needs a
        single process; the schedule still spans `num_steps`.
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
    compile_cache: str | None = None

    def __post_init__(self):
        for name in ("num_steps", "accumulation", "log_every", "loss_chunk"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, expected >= 1")
        if self.keep_checkpoints < 1:
            raise ValueError(f"keep_checkpoints is {self.keep_checkpoints}, not >= 1")
        if self.ema_decay is not None and not 0.0 < self.ema_decay < 1.0:
            raise ValueError(f"ema_decay is {self.ema_decay}, expected 0 < x < 1")
