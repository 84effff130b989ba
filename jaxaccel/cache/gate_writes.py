"""Gated DeltaNet's state, written only when a token changes what it recalls.

S_t = a_t S_{t-1} + b_t (v_t - a_t S_{t-1} k_t) k_t^T with |k| = 1, 0 <= a, b <= 1.
Where the correction b |v - a S k| is small, the state is left as it is in memory, and
its decay is kept as a number beside it. What is left out is multiplied by a and by
I - b k k^T from then on, and neither makes it larger. So

    |error_t| <= a_t |error_{t-1}| + b_t |v_t - a_t S k_t|   of skipped tokens

holds for the state's largest singular value, and an output S q is wrong by at most
|error| |q|. A state is read at every step either way: no more than half of its traffic
can be saved.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Self

import jax
import jax.numpy as jnp


# A state's decay goes back into it before products with it lose digits in f32.
_LEAST_DECAY = -16.0


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class LazyState:
    """A recurrent state and its decay since it was last written.

    Attributes:
      stored: f32[B, H, V, K]; the state is exp(log_decay) times this.
      log_decay: f32[B, H].
      bound: f32[B, H], the most that the state's largest singular value is wrong by.
      writes: i32[B, H], times that `stored` was written.
      steps: i32[B, H], tokens read.
    """

    stored: jax.Array
    log_decay: jax.Array
    bound: jax.Array
    writes: jax.Array
    steps: jax.Array

    @classmethod
    def of(cls, state: jax.Array) -> Self:
        """A state f32[B, H, V, K] without error."""
        shape = state.shape[:2]
        return cls(
            stored=state.astype(jnp.float32),
            log_decay=jnp.zeros(shape, jnp.float32),
            bound=jnp.zeros(shape, jnp.float32),
            writes=jnp.zeros(shape, jnp.int32),
            steps=jnp.zeros(shape, jnp.int32),
        )

    @property
    def value(self) -> jax.Array:
        """The state f32[B, H, V, K]."""
        return jnp.exp(self.log_decay)[..., None, None] * self.stored

    @property
    def traffic_saved(self) -> jax.Array:
        """f32[B, H], the share of the state's reads and writes that was left out."""
        steps = jnp.maximum(self.steps, 1).astype(jnp.float32)
        return 0.5 * (1.0 - self.writes.astype(jnp.float32) / steps)


def lazy_step(
    state: LazyState,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    log_a: jax.Array,
    b: jax.Array,
    *,
    tolerance: float,
) -> tuple[jax.Array, LazyState]:
    """Reads one token a row.

    Args:
      state: before it.
      q: f32[B, H, K].
      k: f32[B, H, K] of length 1, or 0.
      v: f32[B, H, V].
      log_a: f32[B, H], logarithm of the decay, at most 0.
      b: f32[B, H] in 0..1, what of a correction is written.
      tolerance: a correction of this length is left out, at least 0; with 0 only those
        of nothing are.

    Returns:
      o f32[B, H, V] = S q, in which the token's own correction counts even where it is
      not written, and the state after it.

    Raises:
      ValueError: the tolerance is negative.

    Source: Gated DeltaNet (arXiv 2412.06464), equation 10.
    """
    if tolerance < 0:
        raise ValueError(f"tolerance={tolerance} must not be negative")
    decayed = state.log_decay + log_a
    factor = jnp.exp(decayed)[..., None]
    highest = jax.lax.Precision.HIGHEST

    def read(x):  # [B, H, K] -> [B, H, V]
        product = jnp.einsum("bhvk,bhk->bhv", state.stored, x, precision=highest)
        return factor * product

    correction = b[..., None] * (v - read(k))  # [B, H, V]
    size = jnp.linalg.norm(correction, axis=-1) * jnp.linalg.norm(k, axis=-1)
    is_written = (size > tolerance) | (decayed < _LEAST_DECAY)
    along = jnp.einsum("bhk,bhk->bh", k, q, precision=highest)
    o = read(q) + along[..., None] * correction
    update = correction[..., :, None] * k[..., None, :]
    written = factor[..., None] * state.stored + update
    place = is_written[..., None, None]
    return o, LazyState(
        stored=jnp.where(place, written, state.stored),
        log_decay=jnp.where(is_written, 0.0, decayed),
        bound=jnp.exp(log_a) * state.bound + jnp.where(is_written, 0.0, size),
        writes=state.writes + is_written.astype(jnp.int32),
        steps=state.steps + 1,
    )


def error_limit(tolerance: float, largest_decay: float) -> float:
    """What a state's error stays below, however many tokens are read.

    Args:
      tolerance: of `lazy_step`.
      largest_decay: the largest a = exp(log_a) of any token, below 1.

    Returns:
      tolerance / (1 - a). A gate near 1 remembers errors as long as it does tokens: ten
      percent more of 0.95 would be above 1, where nothing is bounded.

    Raises:
      ValueError: the decay is not in 0..1.
    """
    if not 0 <= largest_decay < 1 or not math.isfinite(tolerance):
        raise ValueError(f"largest_decay={largest_decay}, allowed are 0 up to below 1")
    return tolerance / (1.0 - largest_decay)
