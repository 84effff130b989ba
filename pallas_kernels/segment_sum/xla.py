"""The sum over rows in the order of their ids, whose runs XLA can keep together."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def segment_sum(
    values: jax.Array, ordered: jax.Array, source: jax.Array, num_segments: int
) -> jax.Array:
    """f32[num_segments, d].

    Args:
      values: [M, d].
      ordered: i32[M], ids ascending, those that are dropped from `num_segments` on.
      source: i32[M], place of each in `values`.
      num_segments: K.
    """
    return jax.ops.segment_sum(
        values[source].astype(jnp.float32),
        ordered,
        num_segments,
        indices_are_sorted=True,
        mode="drop",
    )
