"""Functions that are applied to a product before it is written, and their gradients.

One of a single product stands here if its slope follows from its result: then the
product itself is neither written nor saved. A gated one takes two products of the same
rows, gate and up, whose columns lie one behind the other in the matrices: those are
saved, and the result is computed again where it is needed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp


LIMIT, ALPHA = 7.0, 1.702  # of the clamped SwiGLU


@dataclasses.dataclass(frozen=True, kw_only=True)
class Activation:
    """An elementwise function of one or two f32 products.

    Attributes:
      parts: how many products, 1 or 2 (gate, up).
      apply: the function of them; 0 where all are 0.
      gradient: (what was saved ..., gradient of the result) -> gradient of each
        product. Saved is the result of a single product, and both of a pair.
    """

    parts: int
    apply: Callable[..., jax.Array]
    gradient: Callable[..., tuple[jax.Array, ...]]

    def result(self, *saved: jax.Array) -> jax.Array:
        """The result, from what was saved."""
        return saved[0] if self.parts == 1 else self.apply(*saved)


def _relu2(z: jax.Array) -> jax.Array:
    positive = jnp.maximum(z, 0.0)
    return positive * positive


def _relu2_gradient(a: jax.Array, da: jax.Array) -> tuple[jax.Array]:
    return (da * (2.0 * jnp.sqrt(a)),)


def _swiglu(gate: jax.Array, up: jax.Array) -> jax.Array:
    return gate * jax.nn.sigmoid(gate) * up


def _swiglu_gradient(
    gate: jax.Array, up: jax.Array, da: jax.Array
) -> tuple[jax.Array, jax.Array]:
    share = jax.nn.sigmoid(gate)
    return da * up * share * (1.0 + gate * (1.0 - share)), da * gate * share


def _clamp(gate: jax.Array, up: jax.Array) -> tuple[jax.Array, jax.Array]:
    return jnp.minimum(gate, LIMIT), jnp.maximum(jnp.minimum(up, LIMIT), -LIMIT)


def _clamped_swiglu(gate: jax.Array, up: jax.Array) -> jax.Array:
    gate, up = _clamp(gate, up)
    return (up + 1.0) * gate * jax.nn.sigmoid(ALPHA * gate)


def _clamped_swiglu_gradient(
    gate: jax.Array, up: jax.Array, da: jax.Array
) -> tuple[jax.Array, jax.Array]:
    low, bounded = _clamp(gate, up)
    share = jax.nn.sigmoid(ALPHA * low)
    d_gate = da * (bounded + 1.0) * share * (1.0 + ALPHA * low * (1.0 - share))
    d_up = da * low * share
    # A NaN is not beyond the limit: it stays visible.
    return (
        jnp.where(gate > LIMIT, 0.0, d_gate),
        jnp.where(jnp.abs(up) > LIMIT, 0.0, d_up),
    )


ACTIVATIONS: Mapping[str, Activation] = {
    # So et al. 2021, arXiv 2109.08668.
    "relu2": Activation(parts=1, apply=_relu2, gradient=_relu2_gradient),
    # Shazeer 2020, arXiv 2002.05202.
    "swiglu": Activation(parts=2, apply=_swiglu, gradient=_swiglu_gradient),
    # gpt-oss model card, arXiv 2508.10925, and its published code.
    "clamped_swiglu": Activation(
        parts=2, apply=_clamped_swiglu, gradient=_clamped_swiglu_gradient
    ),
}


def parts_of(name: str | None) -> int:
    """How many products the activation takes; 1 without one."""
    return 1 if name is None else ACTIVATIONS[name].parts


def activate(name: str | None, product: jax.Array) -> jax.Array:
    """The activation of a product in f32, [..., N] or [..., F] of its two halves.

    Without a name, the product itself.
    """
    if name is None:
        return product
    activation = ACTIVATIONS[name]
    if activation.parts == 1:
        return activation.apply(product)
    return activation.apply(*jnp.split(product, activation.parts, axis=-1))


def between(
    routed: jax.Array,
    da: jax.Array,
    saved: jax.Array,
    scale: jax.Array | None,
    name: str,
) -> tuple[jax.Array, jax.Array | None, jax.Array]:
    """What the gradient of scale * act(z) w passes on, from da = dy w^T.

    Args:
      routed: bool[M], whether a row is an expert's; nothing reaches others.
      da: f32[M, F].
      saved: a [M, F] or z [M, 2F], see `Activation`.
      scale: f32[M] or `None`.
      name: of the activation.

    Returns:
      (dz of saved's shape, f32[M] the gradient of the scale or `None`, scale * a
      [M, F]); dz and scale * a of saved's dtype.
    """
    activation = ACTIVATIONS[name]
    here = routed[:, None]
    f32 = jnp.where(here, saved.astype(jnp.float32), 0.0)
    parts = jnp.split(f32, activation.parts, axis=-1)
    result, d_scale = activation.result(*parts), None
    if scale is not None:
        d_scale = jnp.sum(result * da, axis=1)
        factor = jnp.where(here, scale.astype(jnp.float32)[:, None], 0.0)
        result, da = factor * result, factor * da
    dz = jnp.concatenate(activation.gradient(*parts, da), axis=-1)
    return dz.astype(saved.dtype), d_scale, result.astype(saved.dtype)


def pull_back(name: str | None, saved: jax.Array | None, dy: jax.Array) -> jax.Array:
    """The gradient of the product, of dy's dtype.

    Args:
      name: of the activation, or `None`.
      saved: what it gave; the product, if it is gated; not needed without a name.
      dy: gradient of the result.
    """
    if name is None or saved is None:
        return dy
    activation = ACTIVATIONS[name]
    parts = jnp.split(saved.astype(jnp.float32), activation.parts, axis=-1)
    gradients = activation.gradient(*parts, dy.astype(jnp.float32))
    return jnp.concatenate(gradients, axis=-1).astype(dy.dtype)
