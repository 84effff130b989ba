"""Taking the best units of a row, and when to do so."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from pallas_kernels._common.dispatch import Implementation
from pallas_kernels.top_k_select import top_k_select


def best(
    scores: jax.Array, count: int, implementation: Implementation | None = None
) -> tuple[jax.Array, jax.Array]:
    """The units with the largest scores, exactly, in the order of their numbers.

    Args:
      scores: f32[B, G, C], -inf for what must not be taken.
      count: units to take, at most C.
      implementation: of `pallas_kernels.top_k_select`.

    Returns:
      i32[B, G, count] and bool[B, G, count]: where fewer may be taken, the last places
      are invalid, with the number 0. Of equal scores the lower number is taken.
    """
    ids = top_k_select(scores, count, implementation=implementation)
    return jnp.maximum(ids, 0), ids >= 0


def every(
    refresh_every: int,
    step: jax.Array,
    choose: Callable[[], tuple[jax.Array, jax.Array]],
    last: tuple[jax.Array, jax.Array],
) -> tuple[jax.Array, jax.Array]:
    """Chooses anew at every n-th step, and keeps to the last choice in between.

    On a GPU, the conditional makes the host wait for the device once a call: n > 1
    pays where choosing takes longer than that.

    Args:
      refresh_every: n.
      step: i32[], steps before this one.
      choose: makes (ids, valid).
      last: what it made last.

    Returns:
      (ids, valid). With n = 1 it is `choose()`, and nothing else is traced.
    """
    if refresh_every == 1:
        return choose()
    is_due = jnp.mod(step, refresh_every) == 0
    return jax.lax.cond(is_due, choose, lambda: last)


def check_schedule(name: str, local_window: int, refresh_every: int, unit: int) -> None:
    """Refuses a schedule under which a token could be seen by no step.

    Between two choices, tokens that no unit has yet are read as the local window.

    Raises:
      ValueError: names the numbers.
    """
    if local_window < refresh_every + unit:
        raise ValueError(
            f"{name}: local_window={local_window} must be at least refresh_every + "
            f"{unit} = {refresh_every + unit}, else new tokens are seen by no step"
        )
