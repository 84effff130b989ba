"""The public functions: checks, then the implementation that was chosen."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels._common.dispatch import Choice, Implementation, select
from pallas_kernels.sort_dispatch import reference, xla
from pallas_kernels.sort_dispatch.plan import (
    DispatchPlan,
    limit_rows,
    row_weights,
    slot_values,
)


__all__ = [
    "DispatchPlan",
    "choose",
    "combine",
    "limit_rows",
    "permute",
    "row_weights",
    "slot_values",
    "sort_dispatch",
]

_AVAILABLE: tuple[Implementation, ...] = ("xla", "reference")


def choose(
    *args: Any, implementation: Implementation | None = None, **options: Any
) -> Choice:
    """Says what a call of `sort_dispatch`, `permute` or `combine` would run.

    Args:
      *args: arrays or `jax.ShapeDtypeStruct`, as for the function.
      implementation: the one asked for.
      **options: other keywords.

    Returns:
      The choice.
    """
    del args, options  # Both implementations run everything that passes the checks.
    return select("sort_dispatch", implementation, {}, available=_AVAILABLE)


def _module(implementation: Implementation | None) -> Any:
    picked = choose(implementation=implementation).implementation
    return reference if picked == "reference" else xla


def sort_dispatch(
    expert_ids: jax.Array,
    num_experts: int,
    *,
    implementation: Implementation | None = None,
) -> DispatchPlan:
    """Sorts the slots of tokens by expert, equal to a stable argsort.

    Args:
      expert_ids: i32[T, k] in [0, num_experts]; num_experts means "not routed", and
        those rows sort behind all others.
      num_experts: E.
      implementation: "xla", "reference" or `None`.

    Returns:
      The plan.

    Raises:
      ValueError: the ids are no integers [T, k], or too many to sort with i32 keys.
    """
    module = _module(implementation)
    if expert_ids.ndim != 2 or not jnp.issubdtype(expert_ids.dtype, jnp.integer):
        raise ValueError(
            f"expert_ids is {expert_ids.dtype}{list(expert_ids.shape)}, expected "
            "int[T, k]"
        )
    if num_experts < 1 or expert_ids.size < 1:
        raise ValueError(
            f"num_experts is {num_experts} and there are {expert_ids.size} slots, "
            "expected at least one of each"
        )
    if (num_experts + 1) * expert_ids.size >= 2**31:
        raise ValueError(
            f"(num_experts + 1) * T * k is {(num_experts + 1) * expert_ids.size}, "
            f"expected less than {2**31}; split the batch"
        )
    return module.sort_dispatch(expert_ids, num_experts)


def permute(
    x: jax.Array, plan: DispatchPlan, *, implementation: Implementation | None = None
) -> jax.Array:
    """Copies each token to the rows of its experts.

    Args:
      x: [T, D].
      plan: of `sort_dispatch`.
      implementation: "xla", "reference" or `None`.

    Returns:
      [M, D] of x's dtype; rows that are not routed are exactly 0.

    Raises:
      ValueError: x has another number of tokens than the plan.
    """
    module = _module(implementation)
    if x.ndim != 2 or x.shape[0] != plan.row.shape[0]:
        raise ValueError(
            f"x has shape {x.shape}, expected [{plan.row.shape[0]}, D] by the plan"
        )
    return module.permute(x, plan)


def combine(
    y: jax.Array,
    plan: DispatchPlan,
    weights: jax.Array,
    *,
    implementation: Implementation | None = None,
) -> jax.Array:
    """Sums each token's rows with its weights, in f32 and in the order of slots.

    Args:
      y: [M, D], rows in the plan's order; what stands in rows that are not routed
        is never read into a sum.
      plan: of `sort_dispatch`.
      weights: f32[T, k].
      implementation: "xla", "reference" or `None`.

    Returns:
      [T, D] of y's dtype.

    Raises:
      ValueError: a shape or dtype does not fit the plan.
    """
    module = _module(implementation)
    if y.ndim != 2 or y.shape[0] != plan.token.shape[0]:
        raise ValueError(
            f"y has shape {y.shape}, expected [{plan.token.shape[0]}, D] by the plan"
        )
    if weights.shape != plan.row.shape or weights.dtype != jnp.float32:
        raise ValueError(
            f"weights is {weights.dtype}{list(weights.shape)}, expected "
            f"float32{list(plan.row.shape)}"
        )
    return module.combine(y, plan, weights)
