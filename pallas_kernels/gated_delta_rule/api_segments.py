"""What stretches of time do to the state, through the implementation that is chosen.

For callers that have parts of rows, such as the devices of a mesh, and chain them
themselves with `segments.chain` and `segments.chain_gradients`. Nothing here has a
gradient: it is what gradients are made of.
"""

from __future__ import annotations

from typing import Any

import jax

from pallas_kernels._common.dispatch import Choice, Implementation, select
from pallas_kernels.gated_delta_rule import checks, tables, xla
from pallas_kernels.gated_delta_rule.api import refusals
from pallas_kernels.gated_delta_rule.config import heuristic
from pallas_kernels.gated_delta_rule.config_mosaic import CHUNK
from pallas_kernels.gated_delta_rule.segments import Summary


# The recurrence has no pass over the state alone.
_AVAILABLE: tuple[Implementation, ...] = ("mosaic", "xla")


def choose(
    op: str,
    k: Any,
    v: Any,
    *,
    chunk_size: int = CHUNK,
    implementation: Implementation | None = None,
) -> Choice:
    """Says what a call of a function of this module would run.

    Args:
      op: "summaries" or "entry_gradients".
      k: [B, T, Hk, K], an array or `jax.ShapeDtypeStruct`.
      v: [B, T, Hv, V], the values or the gradient of the output.
      chunk_size: tokens per chunk.
      implementation: the one asked for; `None` takes "xla".

    Returns:
      The choice.
    """
    return select(
        f"gated_delta_rule.{op}",
        implementation,
        refusals(k, v, chunk_size),
        available=_AVAILABLE,
        only_named={"mosaic": "no measured row speaks for segments yet"},
    )


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
    chunk_size: int = CHUNK,
    implementation: Implementation | None = None,
) -> Summary:
    """What each row does to a state, whichever it is.

    Args:
      k, v, g, beta, is_first, chunk_size: as for `gated_delta_rule`.
      implementation: "mosaic" within the limits of `gated_delta_rule`, "xla", or
        `None`, which takes "xla".

    Returns:
      The map of all tokens of each row, f32[B, Hv, ...].

    Raises:
      ValueError: a shape, dtype, chunk size or name is not allowed.
      NotImplementedError: the named implementation cannot run this call.
    """
    shape = checks.tokens(None, k, v, g, beta)
    checks.chunk_size(chunk_size)
    checks.documents(shape, is_first, None)
    choice = choose(
        "summaries", k, v, chunk_size=chunk_size, implementation=implementation
    )
    if choice.implementation == "mosaic":
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
    chunk_size: int = CHUNK,
    implementation: Implementation | None = None,
) -> jax.Array:
    """The gradient that each row's outputs alone send to the state before it.

    Args:
      q, k, g, beta, is_first, scale, chunk_size: as for `gated_delta_rule`.
      do: [B, T, Hv, V], gradient of the output, dtype of q.
      implementation: "mosaic" within the limits of `gated_delta_rule`, "xla", or
        `None`, which takes "xla".

    Returns:
      f32[B, Hv, V, K].

    Raises:
      ValueError: a shape, dtype, chunk size or name is not allowed.
      NotImplementedError: the named implementation cannot run this call.
    """
    shape = checks.tokens(q, k, do, g, beta, value="do")
    checks.chunk_size(chunk_size)
    checks.documents(shape, is_first, None)
    choice = choose(
        "entry_gradients", k, do, chunk_size=chunk_size, implementation=implementation
    )
    if choice.implementation == "mosaic":
        # Imported on first use: Mosaic GPU takes a second that CPU users need not pay.
        from pallas_kernels.gated_delta_rule import mosaic

        starts = tables.document_starts(is_first, chunk_size)
        return mosaic.entry_gradients(q, k, g, beta, do, starts=starts, scale=scale)
    sizes = _sizes(k, do, chunk_size)
    return xla.entry_gradients(
        q, k, g, beta, do, is_first=is_first, scale=scale, config=sizes
    )
