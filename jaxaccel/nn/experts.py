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

from jaxaccel.nn.mlp import clamped_swiglu, relu2, swiglu
from pallas_kernels.grouped_matmul import grouped_matmul
from pallas_kernels.sort_dispatch import (
    DispatchPlan,
    combine,
    permute,
    row_weights,
    slot_values,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExpertOps:
    """What the experts compute, and with which implementations.

    Attributes:
      activation: "swiglu" or "relu2".
      dtype: of the products; parameters are cast to it on the way, so that no cast
        copy of them is kept for the backward pass.
      swiglu_limit: see `MoEConfig`.
      matmul: implementation of `grouped_matmul`.
      dispatch: implementation of `permute` and `combine`.
    """

    activation: str
    dtype: Any
    swiglu_limit: float | None = None
    matmul: Any = None
    dispatch: Any = None

    def permute(self, x: jax.Array, plan: DispatchPlan) -> jax.Array:
        """Copies each token to the rows of its experts."""
        return permute(x, plan, implementation=self.dispatch)

    def product(self, x, w, sizes, activation: str | None = None) -> jax.Array:
        """Each row times its expert's matrix."""
        return grouped_matmul(
            x,
            w.astype(self.dtype),
            sizes,
            activation=activation,
            implementation=self.matmul,
        )

    def gradients(self, x, w, sizes, dy) -> tuple[jax.Array, jax.Array]:
        """(dx, dw) of `product`; the compiler drops the one that is not used."""
        _, pull = jax.vjp(lambda x, w: self.product(x, w, sizes), x, w)
        return pull(dy)

    def biased(self, rows: jax.Array, bias: jax.Array | None, sizes) -> jax.Array:
        """Rows plus their expert's bias; those of no expert are as they were."""
        if bias is None:
            return rows
        return rows + self._per_row(bias, rows, sizes)

    def _per_row(self, bias: jax.Array, rows: jax.Array, sizes: jax.Array) -> jax.Array:
        # A product with a column of ones: its gradient adds an expert's rows in their
        # order, where that of a lookup is a scatter with atomics.
        ones = jnp.ones((rows.shape[0], 1), rows.dtype)
        bias = bias.astype(rows.dtype)[:, None, :]  # [E, 1, N]
        # There is no kernel for matrices of one row: naming it means the large ones.
        name: Any = "reference" if self.matmul == "reference" else "xla"
        return grouped_matmul(ones, bias, sizes, implementation=name)

    def bias_gradient(self, bias: jax.Array, dy: jax.Array, sizes) -> jax.Array:
        """The sum of each expert's rows of dy."""
        return jax.vjp(lambda bias: self._per_row(bias, dy, sizes), bias)[1](dy)[0]

    def bias_times(self, bias: jax.Array, dy: jax.Array, sizes) -> jax.Array:
        """f32[M], each row's product with its expert's bias."""
        return jnp.sum(self._per_row(bias, dy, sizes) * dy, axis=1, dtype=jnp.float32)

    def first(self, rows: jax.Array, experts: ExpertWeights, sizes) -> jax.Array:
        """What is kept of the first product: a for "relu2", else z."""
        if self.activation != "relu2":
            z = self.product(rows, experts.w_in, sizes)
            kept = self.biased(z, experts.bias_in, sizes)
        elif experts.bias_in is None:
            kept = self.product(rows, experts.w_in, sizes, "relu2")
        else:
            z = self.product(rows, experts.w_in, sizes)
            kept = relu2(self.biased(z, experts.bias_in, sizes))
        return checkpoint_name(kept, "moe_hidden")

    def activated(self, kept: jax.Array) -> jax.Array:
        """f32 a [M, F] from what is kept."""
        kept = kept.astype(jnp.float32)
        if self.activation == "relu2":
            return kept
        gate, up = jnp.split(kept, 2, axis=-1)
        if self.swiglu_limit is not None:
            return clamped_swiglu(gate, up, self.swiglu_limit)
        return swiglu(gate, up)

    def pull_back(self, kept: jax.Array, da: jax.Array) -> jax.Array:
        """The gradient of z from that of a, f32."""
        kept = kept.astype(jnp.float32)
        if self.activation == "relu2":
            return da * 2.0 * jnp.sqrt(kept)
        return jax.vjp(self.activated, kept)[1](da)[0]


class ExpertWeights(NamedTuple):
    """Parameters of E experts.

    w_in [E, D, F], or [E, D, 2F], gate then up, for "swiglu"; w_out [E, F, D]; bias_in
    [E, F] or [E, 2F] and bias_out [E, D], or `None`.
    """

    w_in: jax.Array
    w_out: jax.Array
    bias_in: jax.Array | None = None
    bias_out: jax.Array | None = None


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
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
    return _forward(ops, h, weights, plan, experts)[0]


def _forward(ops: ExpertOps, h, weights, plan, experts):
    sizes = plan.group_sizes
    kept = ops.first(ops.permute(h, plan), experts, sizes)  # [M, F] or [M, 2F]
    a = ops.activated(kept).astype(ops.dtype)  # [M, F]
    y = ops.biased(ops.product(a, experts.w_out, sizes), experts.bias_out, sizes)
    c = combine(y, plan, weights, implementation=ops.dispatch)
    return c, (h, weights, plan, experts, kept)


def _backward(ops: ExpertOps, saved, dc):
    h, weights, plan, experts, kept = saved
    w_in, w_out, bias_in, bias_out = experts
    sizes = plan.group_sizes
    scale = row_weights(plan, weights)[:, None]  # [M, 1]
    a = ops.activated(kept)  # f32[M, F]
    do = ops.permute(dc, plan)  # [M, D], without the weights
    scaled = (scale * do.astype(jnp.float32)).astype(ops.dtype)
    da, _ = ops.gradients(a.astype(ops.dtype), w_out, sizes, do)  # [M, F]
    da = da.astype(jnp.float32)
    # From a without its weight: right where the weight is 0, too.
    by_row = jnp.sum(a * da, axis=1)  # [M]
    if bias_out is not None:
        by_row = by_row + ops.bias_times(bias_out, do, sizes)
        bias_out = ops.bias_gradient(bias_out, scaled, sizes)
    dz = ops.pull_back(kept, scale * da).astype(ops.dtype)
    if bias_in is not None:
        bias_in = ops.bias_gradient(bias_in, dz, sizes)
    # The narrower operand carries the weight: fewer numbers are rounded.
    left, right = a, scaled
    if do.shape[1] > a.shape[1]:
        left, right = scale * a, do
    _, d_w_out = ops.gradients(left.astype(ops.dtype), w_out, sizes, right)
    rows, unsort = jax.vjp(lambda h: ops.permute(h, plan), h)
    d_rows, d_w_in = ops.gradients(rows, w_in, sizes, dz)
    (dh,) = unsort(d_rows)
    gradients = ExpertWeights(d_w_in, d_w_out, bias_in, bias_out)
    return dh, slot_values(plan, by_row), None, gradients


routed_experts.defvjp(_forward, _backward)
