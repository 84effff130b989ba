"""Settings outside their range are refused by name."""

import re

import pytest

from jaxaccel.training.config import OptimConfig, TrainConfig


BAD = (
    (OptimConfig, "peak_lr", (0.0, -1e-3), "> 0"),
    (OptimConfig, "warmup_steps", (-1,), ">= 0"),
    (OptimConfig, "b1", (-0.1, 1.0), "0 <= x < 1"),
    (OptimConfig, "b2", (-0.1, 1.0), "0 <= x < 1"),
    (OptimConfig, "eps", (0.0, -1e-8), "> 0"),
    (OptimConfig, "weight_decay", (-0.1,), ">= 0"),
    (OptimConfig, "final_lr_fraction", (-0.1, 1.1), "0 <= x <= 1"),
    (OptimConfig, "decay_fraction", (-0.1, 1.1), "0 <= x <= 1"),
    (OptimConfig, "clip_norm", (0.0,), "> 0 or None"),
    (TrainConfig, "num_steps", (0,), ">= 1"),
    (TrainConfig, "accumulation", (0,), ">= 1"),
    (TrainConfig, "loss_chunk", (0,), ">= 1"),
    (TrainConfig, "keep_checkpoints", (0,), ">= 1"),
    (TrainConfig, "log_every", (0,), ">= 1"),
    (TrainConfig, "eval_every", (-1,), ">= 0"),
    (TrainConfig, "checkpoint_every", (-1,), ">= 0"),
    (TrainConfig, "z_loss", (-1e-4,), ">= 0"),
    (TrainConfig, "mtp_loss_weight", (-0.1,), ">= 0"),
    (TrainConfig, "eval_batches", (0,), ">= 1 or None"),
    (TrainConfig, "max_seconds", (0.0, -1.0), "> 0 or None"),
    (TrainConfig, "offload_host_gb", (0.0, -1.0), "> 0 or None"),
    (TrainConfig, "ema_decay", (0.0, 1.0), "0 < x < 1 or None"),
)


@pytest.mark.parametrize(
    ("config", "name", "value", "allowed"),
    [
        (config, name, value, allowed)
        for config, name, values, allowed in BAD
        for value in (*values, float("nan"), float("inf"))
    ],
)
def test_refuses_a_value_and_says_what_is_allowed(config, name, value, allowed):
    message = re.escape(f"{name} is {value}, expected {allowed}")
    with pytest.raises(ValueError, match=f"{message}$"):
        config(**{name: value})


def test_takes_the_ends_of_the_ranges():
    OptimConfig(b1=0.0, b2=0.0, weight_decay=0.0, warmup_steps=0, clip_norm=None)
    TrainConfig(
        num_steps=1,
        loss_chunk=1,
        eval_every=0,
        checkpoint_every=0,
        eval_batches=1,
        max_seconds=0.5,
        z_loss=0.0,
        mtp_loss_weight=0.0,
    )
