"""Stretches of time as affine maps of the state, and what follows from one another.

The rule is affine in the state, so whatever tokens a stretch has, it maps the state S
[V, K] that enters it to

    S @ through + written,        through [K, K], written [V, K],

and the gradient of the state that leaves it to that of the state that entered,
dS @ through^T plus what its own outputs send. With these two per stretch, stretches
of one row can run side by side: on one card (`mosaic`) or on many
(`jaxaccel.nn.context_parallel`). A document that begins inside a stretch makes
`through` exactly zero. This is the context parallelism of chunked linear attention
(Yang et al. 2024, arXiv 2406.06484, for the maps of the delta rule).
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Summary(NamedTuple):
    """What stretches of time do to a state.

    Attributes:
      through: f32[..., K, K].
      written: f32[..., V, K].
    """

    through: jax.Array
    written: jax.Array


def _apply(state: jax.Array, through: jax.Array, written: jax.Array) -> jax.Array:
    # Without HIGHEST a GPU multiplies f32 operands as tf32.
    product = jnp.einsum(
        "...vk,...kl->...vl", state, through, precision=jax.lax.Precision.HIGHEST
    )
    return product + written


def chain(state: jax.Array, summary: Summary) -> jax.Array:
    """The states between stretches that follow one another.

    Args:
      state: f32[..., V, K], the one that enters the first stretch.
      summary: of n stretches, along a new first axis.

    Returns:
      f32[n + 1, ..., V, K]: the state that enters each stretch, and the last one.
    """
    states = [state]
    for through, written in zip(*summary, strict=True):
        states.append(_apply(states[-1], through, written))
    return jnp.stack(states)


def chain_gradients(
    d_state: jax.Array, through: jax.Array, d_entries: jax.Array
) -> jax.Array:
    """The gradients of the states between stretches that follow one another.

    Args:
      d_state: f32[..., V, K], gradient of the state that leaves the last stretch.
      through: f32[n, ..., K, K], as in `Summary`.
      d_entries: f32[n, ..., V, K], what the outputs of each stretch send to the state
        that enters it.

    Returns:
      f32[n + 1, ..., V, K]: the gradient of the state that enters the first stretch,
      and of the state that leaves each.
    """
    back = Summary(jnp.swapaxes(through, -1, -2)[::-1], d_entries[::-1])
    return chain(d_state, back)[::-1]
