"""Products with a f32 matrix at the speed of bf16 ones.

A bf16 number has 8 bits of precision and a f32 number 24, so every f32 number is a sum
of three bf16 numbers. With x in bf16 already,

    x W = x W_1 + x W_2 + x W_3,    W = W_1 + W_2 + W_3,

is one bf16 product of three times the width, whose sums are f32. A GPU multiplies bf16
matrices an order of magnitude faster than f32 ones, of which it has no matrix unit.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp


def split(x: jax.Array, count: int = 3) -> tuple[jax.Array, ...]:
    """bf16 arrays whose sum is x, the largest first.

    Args:
      x: f32; what is beyond bfloat16's largest number, as few numbers are, gives NaN.
      count: of arrays; three have all bits of x, up to underflow.

    Returns:
      Arrays of x's shape.
    """
    parts, rest = [], x
    for _ in range(count):
        # A cast there and back would be removed by XLA, which may keep more precision
        # than it is told to.
        part = jax.lax.reduce_precision(rest, exponent_bits=8, mantissa_bits=7)
        parts.append(part.astype(jnp.bfloat16))
        rest = rest - part
    return tuple(parts)


def _dot(a: jax.Array, b: jax.Array, axes: tuple[int, int], dtype: type) -> jax.Array:
    return jax.lax.dot_general(
        a,
        b,
        (((axes[0],), (axes[1],)), ((), ())),
        preferred_element_type=dtype,
    )


def _sum_of_parts(wide: jax.Array) -> jax.Array:
    """[M, 3 N] to [M, N], the smallest first."""
    first, second, third = jnp.split(wide, 3, axis=1)
    return (third + second) + first


@jax.custom_vjp
def split_product(x: jax.Array, w: jax.Array) -> jax.Array:
    """x W in f32 without f32 products.

    Args:
      x: bf16[M, D].
      w: f32[D, N].

    Returns:
      f32[M, N], as exact as a f32 product. Of the gradients, that of w is so, too;
      that of x is rounded to bf16 and computed with 16 bits of either operand.
    """
    return _sum_of_parts(
        _dot(x, jnp.concatenate(split(w), axis=1), (1, 0), jnp.float32)
    )


def _forward(x, w):
    return split_product(x, w), (x, w)


def _backward(residuals, dy):
    x, w = residuals
    dy_parts, w_parts = split(dy), split(w, 2)
    dw = _sum_of_parts(_dot(x, jnp.concatenate(dy_parts, axis=1), (0, 0), jnp.float32))
    left = jnp.concatenate((dy_parts[0], dy_parts[1], dy_parts[0]), axis=1)
    right = jnp.concatenate((w_parts[0], w_parts[0], w_parts[1]), axis=1)
    return _dot(left, right, (1, 1), jnp.float32).astype(x.dtype), dw


split_product.defvjp(_forward, _backward)
