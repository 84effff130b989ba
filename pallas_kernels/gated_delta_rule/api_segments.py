"""What stretches of time do to the state, through the implementation that is chosen.

For callers that have parts of rows, such as the devices of a mesh, and chain them
themselves with `segments.chain` and `segments.chain_gradients`. Nothing here has a
gradient: it is what gradients are made of.
"""

from __future__ import annotations

from typing import Any

import jax

from pallas_kernels._common.dispatch import Implementation
from pallas_kernels.gated_delta_rule import tables, xla
from pallas_kernels.gated_delta_rule.api import choose
from pallas_kernels.gated_delta_rule.config import heuristic
from pallas_kernels.gated_delta_rule.segments import Summary


def _runs_kernels(k: Any, v: Any, chunk_size: int, implementation: Any) -> bool:
    choice = choose(k, k, v, chunk_size=chunk_size, implementation=implementation)
    return choice.implementation == "mosaic"


def _sizes(k: jax.Array, v: jax.Array, chunk_size: int) -> Any:
    return heuristic(
        batch=v.shape[0],
        time=v.shape[1],
        value_heads=v.shape[2],
        key_dim=k.shape[3],
        value_dim=v.shape[3],
        itemsize=v.dtype.itemsize,
        chunk=chunk_size,
    )


def summaries(
    k: jax.Array,
    v: jax.Array,
    g: jax.Array,
    beta: jax.Array,
    *,
    is_first: jax.Array,
    chunk_size: int = 64,
    implementation: Implementation | None = None,
) -> Summary:
    """What each row does to a state, whichever it is.

    Args:
      k, v, g, beta, is_first, chunk_size: as for `gated_delta_rule`.
      implementation: as for `gated_delta_rule`; "reference" runs "xla".

    Returns:
      The map of all tokens of each row, f32[B, Hv, ...].

    Raises:
      NotImplementedError: the named implementation cannot run this call.
    """
    if _runs_kernels(k, v, chunk_size, implementation):
        # Imported on first use: Mosaic GPU takes a second that CPU users need not pay.
        from pallas_kernels.gated_delta_rule import mosaic

        starts = tables.document_starts(is_first, chunk_size)
        return mosaic.summaries(k, v, g, beta, starts=starts)
    sizes = _sizes(k, v, chunk_size)
    return xla.summaries(k, v, g, beta, is_first=is_first, config=sizes)


def entry_gradients(
    q: jax.Array,
    k: jax.Array,
    g: jax.Array,
    beta: jax.Array,
    do: jax.Array,
    *,
    is_first: jax.Array,
    scale: float,
    chunk_size: int = 64,
    implementation: Implementation | None = None,
) -> jax.Array:
    """The gradient that each row's outputs alone send to the state before it.

    Args:
      q, k, g, beta, is_first, scale, chunk_size: as for `gated_delta_rule`.
      do: [B, T, Hv, V], gradient of the output, dtype of q.
      implementation: as for `gated_delta_rule`; "reference" runs "xla".

    Returns:
      f32[B, Hv, V, K].

    Raises:
      NotImplementedError: the named implementation cannot run this call.
    """
    if _runs_kernels(k, do, chunk_size, implementation):
        # Imported on first use: Mosaic GPU takes a second that CPU users need not pay.
        from pallas_kernels.gated_delta_rule import mosaic

        starts = tables.document_starts(is_first, chunk_size)
        return mosaic.entry_gradients(q, k, g, beta, do, starts=starts, scale=scale)
    sizes = _sizes(k, do, chunk_size)
    return xla.entry_gradients(
        q, k, g, beta, do, is_first=is_first, scale=scale, config=sizes
    )
