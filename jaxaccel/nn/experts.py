"""The routed experts of a mixture as one operation that saves little.

Per token t with slots j and experts e(t, j):

    z = h_t W_in,e + b_in,e    a = act(z)    c_t = sum_j w_tj (a W_out,e + b_out,e)

The backward pass is written out. What it keeps from the forward pass is h, the weights,
the plan of the sort, and one array of sorted rows: a where act is relu^2, whose slope
follows from its result, and z for a gated one. Neither the sorted copies of h nor the
rows that `combine` sums are kept: a weight's gradient is <a, do W_out^T> + <b_out, do>
and not <y, do>, which needs the rows of y (Guo et al., SonicMoE, arXiv 2512.14080).
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jaxaccel.nn.mlp import clamped_swiglu, swiglu
from pallas_kernels.gemv import expert_gemv
from pallas_kernels.grouped_matmul import (
    activated_product,
    activation_gradient,
    grouped_matmul,
    weight_gradient,
)
from pallas_kernels.grouped_matmul.activation import LIMIT
from pallas_kernels.sort_dispatch import (
    DispatchPlan,
    combine,
    permute,
    row_weights,
    slot_values,
    spread,
)


class ExpertWeights(NamedTuple):
    """Parameters of E experts.

    w_in [E, D, F], or [E, D, 2F], gate then up, for "swiglu"; w_out [E, F, D]; bias_in
    [E, F] or [E, 2F] and bias_out [E, D], or `None`.
    """

    w_in: jax.Array
    w_out: jax.Array
    bias_in: jax.Array | None = None
    bias_out: jax.Array | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExpertOps:
    """What the experts compute, and with which implementations.

    Attributes:
      activation: "swiglu" or "relu2".
      dtype: of the products; parameters are cast to it on the way, so that no cast
        copy of them is kept for the backward pass.
      swiglu_limit: see `MoEConfig`.
      matmul: implementation of the grouped products.
      dispatch: implementation of `permute`, `combine` and `spread`.
    """

    activation: str
    dtype: Any
    swiglu_limit: float | None = None
    matmul: Any = None
    dispatch: Any = None

    @property
    def fused(self) -> str | None:
        """The op's name of the activation, `None` if it has none."""
        if self.swiglu_limit is None:
            return self.activation
        return "clamped_swiglu" if self.swiglu_limit == LIMIT else None

    def permute(self, x: jax.Array, plan: DispatchPlan) -> jax.Array:
        """Copies each token to the rows of its experts."""
        return permute(x, plan, implementation=self.dispatch)

    def spread(self, x: jax.Array, plan: DispatchPlan, weights: jax.Array):
        """Copies each token to the rows of its experts, times the row's weight."""
        return spread(x, plan, weights, implementation=self.dispatch)

    def combine(self, y: jax.Array, plan: DispatchPlan, weights: jax.Array):
        """Sums each token's rows with its weights."""
        return combine(y, plan, weights, implementation=self.dispatch)

    def product(self, x, w, sizes, bias=None) -> jax.Array:
        """Each row times its expert's matrix, plus its bias."""
        return grouped_matmul(
            x, w.astype(self.dtype), sizes, bias=bias, implementation=self.matmul
        )

    def first(
        self, rows: jax.Array, experts: ExpertWeights, sizes: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """(a [M, F], what is kept of it: a itself for "relu2", else z [M, 2F])."""
        assert self.fused is not None
        return activated_product(
            rows,
            experts.w_in.astype(self.dtype),
            sizes,
            activation=self.fused,
            bias=experts.bias_in,
            implementation=self.matmul,
        )

    def activated(self, z: jax.Array) -> jax.Array:
        """f32[M, F] of a gated activation's z [M, 2F]."""
        gate, up = jnp.split(z.astype(jnp.float32), 2, axis=-1)
        if self.swiglu_limit is not None:
            return clamped_swiglu(gate, up, self.swiglu_limit)
        return swiglu(gate, up)

    def data_gradient(self, x, w, sizes, dy) -> jax.Array:
        """dx of `product`; x gives shape and dtype."""
        return jax.vjp(lambda x: self.product(x, w, sizes), x)[1](dy)[0]

    def weight_gradient(self, x, dy, sizes, like: jax.Array) -> jax.Array:
        """dw of `product`, in the dtype of the parameter."""
        return weight_gradient(
            x,
            dy,
            sizes,
            preferred_element_type=like.dtype,
            implementation=self.matmul,
        )

    def scales_hidden(self, width: int, d_ff: int) -> bool:
        """Which operand of dw_out carries the weight: the hidden one, or dy's rows."""
        # s a comes with the gradient of a gated activation, whose a is not kept; else
        # it is the narrower one.
        return self.activation != "relu2" or width > d_ff

    @property
    def _thin(self) -> Any:
        # There is no kernel for matrices of one row: naming it means the large ones.
        return "reference" if self.matmul == "reference" else "xla"

    def bias_gradient(self, dy: jax.Array, sizes, like: jax.Array) -> jax.Array:
        """The sum of each expert's rows of dy, in their order."""
        ones = jnp.ones((dy.shape[0], 1), dy.dtype)
        return weight_gradient(
            ones,
            dy,
            sizes,
            preferred_element_type=like.dtype,
            implementation=self._thin,
        )[:, 0]

    def bias_times(self, bias: jax.Array, dy: jax.Array, sizes) -> jax.Array:
        """f32[M], each row's product with its expert's bias."""
        # A product with a column of ones: no scatter in it, and none in its gradient.
        # In f32, which the sum over the width would otherwise be too late for.
        ones = jnp.ones((dy.shape[0], 1), jnp.float32)
        by_row = grouped_matmul(
            ones,
            bias.astype(jnp.float32)[:, None, :],
            sizes,
            implementation=self._thin,
        )
        return jnp.sum(by_row * dy.astype(jnp.float32), axis=1)


def visited_experts(
    h: jax.Array,
    weights: jax.Array,
    ids: jax.Array,
    w_in: jax.Array,
    w_out: jax.Array,
    *,
    activation: Any,
    implementation: Any,
) -> jax.Array:
    """As `routed_experts`, of a handful of tokens, each of which reads its experts.

    Args:
      h: [T, D] of the matrices' dtype.
      weights: [T, k].
      ids: i32[T, k]; an expert that there is not adds nothing.
      w_in, w_out: of experts without biases.
      activation, implementation: of `expert_gemv`, which has no gradient.

    Returns:
      [T, D] of h's dtype.
    """
    op = functools.partial(expert_gemv, implementation=implementation)
    hidden = op(h, w_in, ids.reshape(-1, 1), activation=activation)
    return op(hidden, w_out, ids, weights=weights.astype(jnp.float32))


def routed_experts(
    ops: ExpertOps,
    h: jax.Array,
    weights: jax.Array,
    plan: DispatchPlan,
    experts: ExpertWeights,
) -> jax.Array:
    """Sends tokens through their experts and sums what comes back.

    Args:
      ops: what to compute.
      h: [T, D] of `ops.dtype`; the latent where there is one.
      weights: f32[T, k].
      plan: `sort_dispatch` of the experts' ids; slots without an expert add nothing.
      experts: the parameters.

    Returns:
      [T, D] of h's dtype. No float is added by a scatter, forward or backward, so
      that the same call gives the same bits.
    """
    if ops.fused is None:
        return _unfused(ops, h, weights, plan, experts)
    return _fused(ops, h, weights, plan, experts)


def _unfused(ops: ExpertOps, h, weights, plan, experts):
    """Of a bound that the op does not have, differentiated by JAX."""
    sizes = plan.group_sizes
    z = ops.product(ops.permute(h, plan), experts.w_in, sizes, experts.bias_in)
    a = ops.activated(checkpoint_name(z, "moe_hidden")).astype(ops.dtype)
    y = ops.product(a, experts.w_out, sizes, experts.bias_out)
    return ops.combine(y, plan, weights)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _fused(ops: ExpertOps, h, weights, plan, experts):
    return _forward(ops, h, weights, plan, experts)[0]


def _forward(ops: ExpertOps, h, weights, plan, experts):
    sizes = plan.group_sizes
    a, kept = ops.first(ops.permute(h, plan), experts, sizes)
    kept = checkpoint_name(kept, "moe_hidden")  # [M, F] or [M, 2F]
    if ops.activation == "relu2":
        a = kept  # one array, so that only one can be kept
    y = ops.product(a, experts.w_out, sizes, experts.bias_out)  # [M, D]
    return ops.combine(y, plan, weights), (h, weights, plan, experts, kept)


def _backward(ops: ExpertOps, saved, dc):
    h, weights, plan, experts, kept = saved
    w_in, w_out, bias_in, bias_out = experts
    sizes = plan.group_sizes
    scale = row_weights(plan, weights)  # [M]
    do = ops.permute(dc, plan)  # [M, D], without the weights
    scaled_do = ops.spread(dc, plan, weights)  # from dc, which is far shorter than do
    scales_a = ops.scales_hidden(h.shape[1], w_out.shape[1])
    between = activation_gradient(
        do,
        w_out.astype(ops.dtype),
        sizes,
        kept,
        activation=ops.fused or "",
        row_scale=scale,
        needs_scaled=scales_a,
        implementation=ops.matmul,
    )
    operands = (between.scaled, do) if scales_a else (kept, scaled_do)
    d_w_out = ops.weight_gradient(*operands, sizes, w_out)
    # From a without its weight: right where the weight is 0, too.
    by_row = between.d_scale
    assert by_row is not None  # a scale was given
    if bias_out is not None:
        by_row = by_row + ops.bias_times(bias_out, do, sizes)
        bias_out = ops.bias_gradient(scaled_do, sizes, bias_out)
    if bias_in is not None:
        bias_in = ops.bias_gradient(between.dz, sizes, bias_in)
    rows, unsort = jax.vjp(lambda h: ops.permute(h, plan), h)
    d_w_in = ops.weight_gradient(rows, between.dz, sizes, w_in)
    (dh,) = unsort(ops.data_gradient(rows, w_in, sizes, between.dz))
    gradients = ExpertWeights(d_w_in, d_w_out, bias_in, bias_out)
    return dh, slot_values(plan, by_row), None, gradients


_fused.defvjp(_forward, _backward)
