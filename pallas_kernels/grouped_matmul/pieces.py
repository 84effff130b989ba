"""Products of a training step one by one, for callers that write the step out.

Such callers keep less between forward and backward than gradients of whole functions
do, or add the gradients of several batches. None of these is differentiable itself.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels._common.dispatch import Choice, Implementation, select
from pallas_kernels.grouped_matmul import (
    api,
    config_fused,
    config_mosaic,
    reference,
    xla,
)
from pallas_kernels.grouped_matmul.activation import ACTIVATIONS, parts_of


def _like_matrices(x: Any, dy: Any, group_sizes: Any) -> jax.ShapeDtypeStruct:
    """[E, K, N] of x's dtype."""
    if x.ndim != 2 or dy.ndim != 2 or x.shape[0] != dy.shape[0]:
        raise ValueError(
            f"x and dy have shapes {x.shape} and {dy.shape}, expected [M, K] and [M, N]"
        )
    if x.dtype != dy.dtype:
        raise ValueError(f"dy has dtype {dy.dtype}, expected x's, {x.dtype}")
    shape = group_sizes.shape[0], x.shape[1], dy.shape[1]
    return jax.ShapeDtypeStruct(shape, x.dtype)


def choose_weight_gradient(
    x: Any,
    dy: Any,
    group_sizes: Any,
    *,
    into: Any = None,
    preferred_element_type: Any = None,
    implementation: Implementation | None = None,
) -> Choice:
    """Says what a call of `weight_gradient` would run; arguments as there."""
    w = _like_matrices(x, dy, group_sizes)
    api.check_product(x, w, group_sizes, None, ("x", "w", "bias"))
    dtype = _result_dtype(w, into, preferred_element_type)
    refused, config = {}, None
    sizes = api.sizes_of(x, w)
    if reason := api.refusal(x, w, dtype):
        refused["mosaic"] = reason
    else:
        config = config_mosaic.pick(**sizes).weight
    return select(
        "grouped_matmul.weight_gradient",
        implementation,
        refused,
        only_named=api.FUSED_ONLY_NAMED
        if into is not None
        else api.only_named(**sizes),
        config=config,
    )


def _result_dtype(w: Any, into: Any, preferred_element_type: Any) -> Any:
    if into is None:
        return jnp.dtype(preferred_element_type or w.dtype)
    if into.shape != w.shape or not jnp.issubdtype(into.dtype, jnp.floating):
        raise ValueError(
            f"into is {into.dtype}{list(into.shape)}, expected floats {list(w.shape)}"
        )
    if preferred_element_type not in (None, into.dtype):
        raise ValueError(
            f"preferred_element_type is {preferred_element_type}, expected `None` or "
            f"into's, {into.dtype}"
        )
    return into.dtype


def weight_gradient(
    x: jax.Array,
    dy: jax.Array,
    group_sizes: jax.Array,
    *,
    into: jax.Array | None = None,
    preferred_element_type: Any = None,
    implementation: Implementation | None = None,
) -> jax.Array:
    """dw_e = sum of x_m^T dy_m over the rows m of expert e, or `into` + dw.

    What `grouped_matmul` gives w as its gradient; here in any dtype, and added in place
    to those of other batches: an f32 total needs no second array of its size.

    Args:
      x: [M, K], rows sorted by expert.
      dy: [M, N], dtype of x.
      group_sizes: i32[E], rows of each expert, in order; their sum is at most M.
      into: [E, K, N], what to add to; its memory is used again if nothing else needs
        it. Additions are f32, rounded once.
      preferred_element_type: dtype of the result without `into`; x's if `None`.
      implementation: "mosaic", "xla", "reference" or `None`, which does not pick
        "mosaic" yet. It has x in bf16 or f16, results of x's dtype or f32, and K and
        N in multiples of 64.

    Returns:
      [E, K, N]; of an expert without rows exactly 0, or what `into` held. A NaN in one
      expert's rows stays with that expert.

    Raises:
      ValueError: a shape or dtype is not allowed.
      NotImplementedError: the named implementation cannot run this call.
    """
    choice = choose_weight_gradient(
        x,
        dy,
        group_sizes,
        into=into,
        preferred_element_type=preferred_element_type,
        implementation=implementation,
    )
    w = _like_matrices(x, dy, group_sizes)
    dtype = _result_dtype(w, into, preferred_element_type)
    if choice.implementation == "mosaic":
        # Imported on first use: Mosaic GPU takes a second that CPU users need not pay.
        from pallas_kernels.grouped_matmul import mosaic

        return mosaic.weight_sums(x, dy, group_sizes, dtype, choice.config, into)
    if choice.implementation == "reference":
        total = jnp.zeros(w.shape, dtype) if into is None else into
        return reference.weight_gradient(x, dy, group_sizes, total)
    dw = xla.weight_gradient(api.xla_config(x, w), group_sizes, x, dy)
    if into is not None:
        # Selected, not added: what an expert without rows had stays as it was.
        total = (into.astype(jnp.float32) + dw).astype(dtype)
        dw = jnp.where(group_sizes[:, None, None] > 0, total, into)
    return dw.astype(dtype)


def _check_activation(activation: Any) -> None:
    if activation not in ACTIVATIONS:
        raise ValueError(
            f"activation is {activation!r}, expected one of {', '.join(ACTIVATIONS)}"
        )


def activated_product(
    x: jax.Array,
    w: jax.Array,
    group_sizes: jax.Array,
    *,
    activation: str,
    bias: jax.Array | None = None,
    implementation: Implementation | None = None,
) -> tuple[jax.Array, jax.Array]:
    """`grouped_matmul` with an activation, and what its gradient needs of it.

    Args:
      x, w, group_sizes, bias, implementation: as for `grouped_matmul`.
      activation: "relu2", "swiglu" or "clamped_swiglu", as there.

    Returns:
      (a [M, F], saved) of x's dtype: saved is a itself for "relu2", and
      z = x w + bias [M, 2F] for a gated activation.

    Raises:
      ValueError: a shape or dtype is not allowed.
      NotImplementedError: the named implementation cannot run this call.
    """
    _check_activation(activation)
    choice = api.choose(
        x,
        w,
        group_sizes,
        bias=bias,
        activation=activation,
        implementation=implementation,
    )
    operands = x, w, bias, group_sizes
    if choice.implementation == "mosaic":
        # Imported on first use: Mosaic GPU takes a second that CPU users need not pay.
        from pallas_kernels.grouped_matmul import mosaic_fused

        tile = choice.config.forward
        return mosaic_fused.activated_product(*operands, tile, activation)
    if choice.implementation == "xla":
        return xla.activated_product(*operands, api.xla_config(x, w), activation)
    one = {"dtype": x.dtype, "bias": bias}
    a = reference.grouped_matmul(x, w, group_sizes, activation=activation, **one)
    if parts_of(activation) == 1:
        return a, a
    return a, reference.grouped_matmul(x, w, group_sizes, **one)


class ActivationGradient(NamedTuple):
    """What lies between the two products of a layer, going back.

    Attributes:
      dz: gradient of the first product, of the shape of what was saved.
      d_scale: f32[M], of the rows' scale, 0 for a row of no expert; `None` without.
      scaled: scale * a [M, F], which the second matrix' gradient multiplies with dy;
        `None` if not asked for.

    Rows of no expert have no meaning in dz and `scaled`.
    """

    dz: jax.Array
    d_scale: jax.Array | None
    scaled: jax.Array | None


def choose_activation_gradient(
    dy: Any,
    w: Any,
    group_sizes: Any,
    saved: Any,
    *,
    activation: str,
    row_scale: Any = None,
    implementation: Implementation | None = None,
) -> Choice:
    """Says what a call of `activation_gradient` would run; arguments as there."""
    _check_activation(activation)
    parts = parts_of(activation)
    columns = w.shape[1] if w.ndim == 3 else 0
    hidden = jax.ShapeDtypeStruct((dy.shape[0], columns), dy.dtype)
    api.check_product(hidden, w, group_sizes, None, ("a", "w", "bias"))
    if dy.shape[1:] != w.shape[2:]:
        raise ValueError(
            f"dy and w have shapes {dy.shape} and {w.shape}, expected [M, D] and "
            "[E, F, D]"
        )
    want = dy.shape[0], parts * columns
    if saved.shape != want or saved.dtype != dy.dtype:
        raise ValueError(
            f"saved is {saved.dtype}{list(saved.shape)}, expected dy's {dy.dtype} and "
            f"{list(want)} with {activation!r}"
        )
    api.check_scale(row_scale, dy.shape[0])
    refused, config = {}, None
    if reason := api.refusal(hidden, w, dy.dtype):
        refused["mosaic"] = reason
    else:
        config = config_fused.backward_tile(parts, **api.sizes_of(hidden, w))
    return select(
        "grouped_matmul.activation_gradient",
        implementation,
        refused,
        only_named=api.FUSED_ONLY_NAMED,
        config=config,
    )


def activation_gradient(
    dy: jax.Array,
    w: jax.Array,
    group_sizes: jax.Array,
    saved: jax.Array,
    *,
    activation: str,
    row_scale: jax.Array | None = None,
    needs_scaled: bool = False,
    implementation: Implementation | None = None,
) -> ActivationGradient:
    """The gradient of z in y = s (act(z) w), from dy; da = dy w^T is not written.

    dz = s da act'(z)        ds_m = sum_f a_mf da_mf

    The second is right where s is 0, too, and needs no row of y.

    Args:
      dy: [M, D], rows sorted by expert.
      w: [E, F, D], dtype of dy.
      group_sizes: i32[E], rows of each expert, in order; their sum is at most M.
      saved: what `activated_product` gave, dtype of dy.
      activation: the name it was given.
      row_scale: [M], s; `None` for ones.
      needs_scaled: whether s a is wanted, too.
      implementation: "mosaic", "xla", "reference" or `None`, which does not pick
        "mosaic" yet. It has 16-bit arrays, and D and F in multiples of 64.

    Returns:
      dz, and what was asked for beside it.

    Raises:
      ValueError: a shape or dtype is not allowed.
      NotImplementedError: the named implementation cannot run this call.

    Source: SonicMoE (arXiv 2512.14080).
    """
    choice = choose_activation_gradient(
        dy,
        w,
        group_sizes,
        saved,
        activation=activation,
        row_scale=row_scale,
        implementation=implementation,
    )
    scale = None if row_scale is None else row_scale.astype(jnp.float32)
    operands = dy, w, group_sizes, saved, scale
    if choice.implementation == "mosaic":
        # Imported on first use: Mosaic GPU takes a second that CPU users need not pay.
        from pallas_kernels.grouped_matmul import mosaic_fused

        found = mosaic_fused.activation_gradient(
            *operands, choice.config, activation, emits=needs_scaled
        )
        return ActivationGradient(
            found["dz"], found.get("d_scale"), found.get("scaled")
        )
    if choice.implementation == "xla":
        hidden = jax.ShapeDtypeStruct((dy.shape[0], w.shape[1]), dy.dtype)
        config = api.xla_config(hidden, w)
        dz, d_scale, scaled = xla.activation_gradient(*operands, config, activation)
    else:
        dz, d_scale, scaled = reference.activation_gradient(*operands, activation)
    return ActivationGradient(dz, d_scale, scaled if needs_scaled else None)
