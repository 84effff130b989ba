"""The public function: checks, then the implementation that was chosen."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels._common import hw, interpret
from pallas_kernels._common.dispatch import Choice, Implementation, select
from pallas_kernels.top_k_select import config as configs
from pallas_kernels.top_k_select import reference, xla


LEAST_COLUMNS = 4096
"""Scores of a row from which `None` takes the kernel; the rows have 7,688 and more."""


def choose(
    scores: Any, k: int, *, implementation: Implementation | None = None
) -> Choice:
    """Says what a call of `top_k_select` would run.

    Args:
      scores: an array or `jax.ShapeDtypeStruct`, as for the function.
      k: as for the function.
      implementation: the one asked for.

    Returns:
      The choice, with a `Config` if it is "mosaic".

    Raises:
      ValueError: a shape, a dtype or k is not allowed.
      NotImplementedError: the named implementation cannot run this call.
    """
    if not scores.shape or scores.dtype != jnp.float32:
        raise ValueError(
            f"scores are {scores.dtype}{list(scores.shape)}, expected float32[..., C]"
        )
    columns = scores.shape[-1]
    if not 1 <= k <= columns:
        raise ValueError(f"k={k}, allowed are 1 to the {columns} scores of a row")
    refused, config = {}, None
    if not (hw.is_hopper() or interpret.is_interpreting()):
        refused["mosaic"] = (
            f"the kernel needs a Hopper GPU, this is {jax.default_backend()}"
        )
    elif reason := configs.refusal(math.prod(scores.shape[:-1]), columns):
        refused["mosaic"] = reason
    else:
        config = configs.pick(columns)
    only_named = {}
    if columns < LEAST_COLUMNS:
        short = f"rows are below {LEAST_COLUMNS} scores, far from any measured one"
        only_named["mosaic"] = short
    return select(
        "top_k_select", implementation, refused, only_named=only_named, config=config
    )


def top_k_select(
    scores: jax.Array, k: int, *, implementation: Implementation | None = None
) -> jax.Array:
    """The places of the k largest scores of each row, exactly.

    Of equal scores those of the lowest places are taken; -0 and what is below the least
    normal number equal 0. A score of -inf is never taken, and NaN counts as -inf. Hence
    one set of places and one order of them: every implementation gives the same, bit
    for bit. Not differentiable: the scores get no gradient.

    Args:
      scores: f32[..., C].
      k: places to take, 1 to C.
      implementation: "mosaic", "xla", "reference"; `None` takes the best that can, and
        "mosaic" only from `LEAST_COLUMNS` scores on.

    Returns:
      i32[..., k], the places in ascending order; where fewer may be taken, the last
      are -1.

    Raises:
      ValueError: a shape, a dtype or k is not allowed.
      NotImplementedError: the named implementation cannot run this call.

    Source: ShadowKV (arXiv 2410.21465), section 4.2, for what it is used for.
    """
    choice = choose(scores, k, implementation=implementation)
    scores = jax.lax.stop_gradient(scores)
    if choice.implementation != "mosaic":
        module = xla if choice.implementation == "xla" else reference
        return module.top_k_select(scores, k)
    # Imported on first use: Mosaic GPU takes a second that others need not pay.
    from pallas_kernels.top_k_select import kernel

    columns = scores.shape[-1]
    plan = kernel.Plan(columns=columns, k=k, config=choice.config)
    ids = kernel.top_k_select(plan, scores.reshape(-1, columns))
    return ids.reshape(*scores.shape[:-1], k)
