"""The public functions: checks, then the implementation that was chosen."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels._common import hw, interpret
from pallas_kernels._common.dispatch import Choice, Implementation, select
from pallas_kernels.sort_dispatch import config as configs
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
    "chosen_scores",
    "combine",
    "limit_rows",
    "permute",
    "row_weights",
    "slot_values",
    "sort_dispatch",
    "spread",
    "top_experts",
]

FUNCTIONS = ("sort_dispatch", "permute", "combine", "spread", "top_experts")
_ONLY_NAMED = {"mosaic": "no measured row speaks for the kernels"}


def choose(
    *args: Any,
    function: str = "sort_dispatch",
    implementation: Implementation | None = None,
    **options: Any,
) -> Choice:
    """Says what a call of one of the functions would run.

    Args:
      *args: arrays or `jax.ShapeDtypeStruct`, as for the function.
      function: one of `FUNCTIONS`.
      implementation: the one asked for.
      **options: its other keywords.

    Returns:
      The choice, with a `Config` if kernels move rows. The plan has no kernel:
      under "mosaic", too, XLA sorts.

    Raises:
      ValueError: there is no such function.
      NotImplementedError: the named implementation cannot run this call.
    """
    if function not in FUNCTIONS:
        raise ValueError(
            f"sort_dispatch: no function {function!r}, allowed are "
            f"{', '.join(FUNCTIONS)}"
        )
    refused, config = {}, None
    if function != "sort_dispatch":
        if not (hw.is_hopper() or interpret.is_interpreting()):
            refused["mosaic"] = (
                f"the kernels need a Hopper GPU, this is {jax.default_backend()}"
            )
        elif function == "top_experts":
            scores, top_k = args[:2]
            reason = configs.top_refusal(
                scores.shape[1], top_k, options.get("num_groups", 1)
            )
            refused |= {"mosaic": reason} if reason else {}
        else:
            values, plan = args[:2]
            dim, slots = values.shape[1], plan.row.shape[1]
            rows = max(values.shape[0], plan.token.shape[0])
            reason = configs.rows_refusal(rows, dim, values.dtype)
            refused |= {"mosaic": reason} if reason else {}
            config = None if reason else configs.pick(slots, dim, values.dtype)
    return select(
        "sort_dispatch",
        implementation,
        refused,
        only_named=_ONLY_NAMED,
        config=config,
    )


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
      implementation: "mosaic", "xla", "reference"; `None` takes the best that can. The
        first two are the same sort: a kernel for it there is none.

    Returns:
      The plan.

    Raises:
      ValueError: the ids are no integers [T, k], or too many to sort with i32 keys.
    """
    choice = choose(expert_ids, num_experts, implementation=implementation)
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
    module = reference if choice.implementation == "reference" else xla
    return module.sort_dispatch(expert_ids, num_experts)


def permute(
    x: jax.Array, plan: DispatchPlan, *, implementation: Implementation | None = None
) -> jax.Array:
    """Copies each token to the rows of its experts.

    Args:
      x: [T, D].
      plan: of `sort_dispatch`.
      implementation: "mosaic", "xla", "reference"; `None` takes the best that can.

    Returns:
      [M, D] of x's dtype; rows that are not routed are exactly 0.

    Raises:
      ValueError: x has another number of tokens than the plan.
      NotImplementedError: the named implementation cannot run this call.
    """
    if x.ndim != 2 or x.shape[0] != plan.row.shape[0]:
        raise ValueError(
            f"x has shape {x.shape}, expected [{plan.row.shape[0]}, D] by the plan"
        )
    choice = choose(x, plan, function="permute", implementation=implementation)
    if choice.implementation == "mosaic":
        return _mosaic_permute(choice.config, x, plan)
    module = xla if choice.implementation == "xla" else reference
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
      implementation: "mosaic", "xla", "reference"; `None` takes the best that can.

    Returns:
      [T, D] of y's dtype.

    Raises:
      ValueError: a shape or dtype does not fit the plan.
      NotImplementedError: the named implementation cannot run this call.
    """
    if y.ndim != 2 or y.shape[0] != plan.token.shape[0]:
        raise ValueError(
            f"y has shape {y.shape}, expected [{plan.token.shape[0]}, D] by the plan"
        )
    _check_weights(weights, plan)
    choice = choose(y, plan, function="combine", implementation=implementation)
    if choice.implementation == "mosaic":
        return _mosaic_combine(choice.config, y, plan, weights)
    module = xla if choice.implementation == "xla" else reference
    return module.combine(y, plan, weights)


def _check_weights(weights: jax.Array, plan: DispatchPlan) -> None:
    if weights.shape != plan.row.shape or weights.dtype != jnp.float32:
        raise ValueError(
            f"weights is {weights.dtype}{list(weights.shape)}, expected "
            f"float32{list(plan.row.shape)}"
        )


def spread(
    x: jax.Array,
    plan: DispatchPlan,
    weights: jax.Array,
    *,
    implementation: Implementation | None = None,
) -> jax.Array:
    """Copies each token to the rows of its experts, times the row's weight.

    The transpose of `combine` in y, for gradients that are written out by hand; not
    differentiable itself.

    Args:
      x: [T, D].
      plan: of `sort_dispatch`.
      weights: f32[T, k].
      implementation: "mosaic", "xla", "reference"; `None` takes the best that can.

    Returns:
      [M, D] of x's dtype, rounded once; rows that are not routed are exactly 0.

    Raises:
      ValueError: a shape or dtype does not fit the plan.
      NotImplementedError: the named implementation cannot run this call.
    """
    if x.ndim != 2 or x.shape[0] != plan.row.shape[0]:
        raise ValueError(
            f"x has shape {x.shape}, expected [{plan.row.shape[0]}, D] by the plan"
        )
    _check_weights(weights, plan)
    choice = choose(x, plan, function="spread", implementation=implementation)
    if choice.implementation == "mosaic":
        scale = row_weights(plan, weights)
        return _kernel().gather(
            _launch(choice.config, x, plan), x, plan.token, _routed(plan), scale
        )
    module = xla if choice.implementation == "xla" else reference
    return module.spread(x, plan, weights)


def top_experts(
    scores: jax.Array,
    top_k: int,
    *,
    bias: jax.Array | None = None,
    num_groups: int = 1,
    top_groups: int = 1,
    group_score_top: int = 2,
    implementation: Implementation | None = None,
) -> jax.Array:
    """The k best experts of each token, of the best groups of experts.

    A group is E / G neighbours, and its score is the sum of its best few. Experts of
    groups that are not kept count as -infinity. NaN is above everything, both zeros are
    equal.

    Args:
      scores: f32[T, E].
      top_k: k.
      bias: f32[E], added for the choice, and to nothing else.
      num_groups: G, a divisor of E; 1 has no groups.
      top_groups: groups whose experts can be chosen.
      group_score_top: experts that are summed to a group's score.
      implementation: "mosaic", "xla", "reference"; `None` takes the best that can.

    Returns:
      i32[T, k], best first; equal ones by their ids. Not differentiable.

    Raises:
      ValueError: a shape or dtype is not allowed, or k experts there are not.
      NotImplementedError: the named implementation cannot run this call.

    Source: DeepSeek-V3 (arXiv 2412.19437), section 2.1.2, for bias and groups.
    """
    if scores.ndim != 2 or scores.dtype != jnp.float32 or not scores.size:
        raise ValueError(
            f"scores is {scores.dtype}{list(scores.shape)}, expected float32[T, E]"
        )
    experts = scores.shape[1]
    if bias is not None and (bias.shape, bias.dtype) != ((experts,), jnp.float32):
        raise ValueError(
            f"bias is {bias.dtype}{list(bias.shape)}, expected float32[{experts}]"
        )
    if num_groups < 1 or experts % num_groups:
        raise ValueError(f"num_groups is {num_groups}, expected a divisor of {experts}")
    in_group = experts // num_groups
    for name, value, most in (
        ("top_groups", top_groups, num_groups),
        ("group_score_top", group_score_top, in_group if num_groups > 1 else None),
        ("top_k", top_k, top_groups * in_group),
    ):
        if value < 1 or (most is not None and value > most):
            raise ValueError(f"{name} is {value}, expected 1 to {most}")
    groups = {
        "num_groups": num_groups,
        "top_groups": top_groups,
        "group_score_top": group_score_top,
    }
    choice = choose(
        scores,
        top_k,
        function="top_experts",
        implementation=implementation,
        num_groups=num_groups,
    )
    scores, bias = jax.lax.stop_gradient((scores, bias))
    if choice.implementation == "mosaic":
        # Imported on first use: Mosaic GPU takes a second that others need not pay.
        from pallas_kernels.sort_dispatch import kernel_top

        top = kernel_top.Top(
            tokens=scores.shape[0], experts=experts, top_k=top_k, **groups
        )
        return kernel_top.top_experts(top, scores, bias)
    module = xla if choice.implementation == "xla" else reference
    return module.top_experts(scores, bias, top_k, **groups)


@jax.custom_vjp
def chosen_scores(scores: jax.Array, expert_ids: jax.Array) -> jax.Array:
    """The scores of each token's experts.

    The gradient is a comparison with every expert: no float is added by a scatter.

    Args:
      scores: f32[T, E].
      expert_ids: i32[T, k] in [0, E).

    Returns:
      f32[T, k].
    """
    return jnp.take_along_axis(scores, expert_ids, axis=1, mode="promise_in_bounds")


def _chosen_forward(scores, expert_ids):
    # An empty array tells the backward pass E without keeping the scores.
    like = jnp.zeros((0, scores.shape[1]), scores.dtype)
    return chosen_scores(scores, expert_ids), (expert_ids, like)


def _chosen_backward(residuals, dy):
    expert_ids, like = residuals
    experts = jnp.arange(like.shape[1], dtype=expert_ids.dtype)
    is_own = expert_ids[:, :, None] == experts[None, None, :]
    return jnp.sum(jnp.where(is_own, dy[:, :, None], 0.0), axis=1), None


chosen_scores.defvjp(_chosen_forward, _chosen_backward)


def _kernel() -> Any:
    # Imported on first use: Mosaic GPU takes a second that others need not pay.
    from pallas_kernels.sort_dispatch import kernel

    return kernel


def _launch(config: configs.Config, values: jax.Array, plan: DispatchPlan) -> Any:
    return _kernel().Plan(
        tokens=plan.row.shape[0],
        slots=plan.row.shape[1],
        rows=plan.token.shape[0],
        dim=values.shape[1],
        dtype=jnp.dtype(values.dtype),
        config=config,
    )


def _routed(plan: DispatchPlan) -> jax.Array:
    return jnp.sum(plan.group_sizes, dtype=jnp.int32)[None]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _mosaic_permute(config, x, plan):
    launch = _launch(config, x, plan)
    return _kernel().gather(launch, x, plan.token, _routed(plan))


def _mosaic_permute_forward(config, x, plan):
    return _mosaic_permute(config, x, plan), plan


def _mosaic_permute_backward(config, plan, dy):
    launch = _launch(config, dy, plan)
    return _kernel().reduce(launch, dy, plan.row.reshape(-1), _routed(plan)), None


_mosaic_permute.defvjp(_mosaic_permute_forward, _mosaic_permute_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _mosaic_combine(config, y, plan, weights):
    launch, row = _launch(config, y, plan), plan.row.reshape(-1)
    return _kernel().reduce(launch, y, row, _routed(plan), weights.reshape(-1))


def _mosaic_combine_forward(config, y, plan, weights):
    return _mosaic_combine(config, y, plan, weights), (y, plan, weights)


def _mosaic_combine_backward(config, residuals, do):
    y, plan, weights = residuals
    launch, scale = _launch(config, y, plan), row_weights(plan, weights)
    dy, products = _kernel().pull(launch, y, do, plan.token, _routed(plan), scale)
    return dy, None, slot_values(plan, products)


_mosaic_combine.defvjp(_mosaic_combine_forward, _mosaic_combine_backward)
