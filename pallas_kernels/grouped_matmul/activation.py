"""Functions that may be applied to a product before it is written.

An activation stands here if its slope follows from its result: then the product
itself is neither written nor saved.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True, kw_only=True)
class Activation:
    """An elementwise function of f32.

    Attributes:
      apply: the function; 0 at 0.
      slope: its derivative, from its result.
    """

    apply: Callable[[jax.Array], jax.Array]
    slope: Callable[[jax.Array], jax.Array]


def _relu2(z: jax.Array) -> jax.Array:
    positive = jnp.maximum(z, 0.0)
    return positive * positive


ACTIVATIONS: Mapping[str, Activation] = {
    # So et al. 2021, arXiv 2109.08668.
    "relu2": Activation(apply=_relu2, slope=lambda a: 2.0 * jnp.sqrt(a)),
}


def activate(name: str | None, product: jax.Array) -> jax.Array:
    """The activation of a product in f32; the product itself without a name."""
    return product if name is None else ACTIVATIONS[name].apply(product)


def pull_back(name: str | None, result: jax.Array | None, dy: jax.Array) -> jax.Array:
    """The gradient of the product, of dy's dtype.

    Args:
      name: of the activation, or `None`.
      result: what it gave; not needed without a name.
      dy: gradient of the result.
    """
    if name is None or result is None:
        return dy
    slope = ACTIVATIONS[name].slope(result.astype(jnp.float32))
    return (dy.astype(jnp.float32) * slope).astype(dy.dtype)
