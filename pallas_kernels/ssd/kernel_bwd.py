"""Mosaic GPU kernel that carries the gradient of the state back through the chunks.

Its blocks run `kernel_pass` backward: they write dX, and dS at the exit of each chunk.
`kernel_grads` has the rest.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.gated_delta_rule.kernel_fwd import launch
from pallas_kernels.ssd.config_mosaic import STATE_SHAPE, Shapes
from pallas_kernels.ssd.kernel_pass import (
    BACKWARD,
    STAGES,
    Place,
    chunk_states,
    ring_scratch,
    run_block,
    staging_scratch,
    starts_of,
    store,
)


def _bwd_kernel(sources, skip_ref, *refs, ring, staging, shapes):
    count = starts_of(shapes)
    leaving, (dx_ref, d_states_ref, d_entries_ref) = refs[:count], refs[count:]
    place = Place(shapes, lax.axis_index("item"))

    def end(head, state, left):
        del left
        place.write_end(d_entries_ref, head, state, 0)

    run_block(
        shapes,
        BACKWARD,
        sources,
        ring,
        place,
        initial=functools.partial(place.entering, BACKWARD, leaving),
        emit=functools.partial(store, place, staging, (dx_ref, d_states_ref)),
        end=end,
        skip_ref=skip_ref,
    )


# Lowered once a module: calls of equal sizes, such as those of layers, share it.
@functools.partial(jax.jit, static_argnums=0)
def chunk_bwd(
    shapes: Shapes,
    sources: dict[str, jax.Array],
    skip: jax.Array,
    d_starts: tuple[jax.Array, ...],
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Runs the chunks in reverse.

    Args:
      shapes: sizes of the call.
      sources: b, c [B T, G, N], dy [B T, H, V], and gates as `prepare` gives them.
      skip: f32[H], d.
      d_starts: f32[B H, V, N], the gradient of the states that leave the caller's rows,
        and, of several segments, what `segment_ends` gives.

    Returns:
      `chunk_states`, the gradient of the state at the exit of each chunk; dx
      [B T, H, V]; and f32[B H, V, N], the gradient of the states that enter the
      caller's rows.
    """
    sources = BACKWARD.sources(sources, output=True)
    values = sources[BACKWARD.values]
    scratch: dict[str, Any] = {
        "ring": ring_scratch(shapes, sources, STAGES, output=True),
        "staging": staging_scratch(shapes, states=True),
    }
    dx, d_states, d_entries = launch(
        functools.partial(_bwd_kernel, shapes=shapes),
        "pk_ssd_bwd",
        sources,
        (skip, *d_starts),
        blocks=shapes.pairs,
        out_type=(
            jax.ShapeDtypeStruct(values.shape, shapes.dtype),
            chunk_states(shapes),
            jax.ShapeDtypeStruct(
                (shapes.items // shapes.segments, *STATE_SHAPE), jnp.float32
            ),
        ),
        scratch=scratch,
        auto_barriers=not shapes.backward,
    )
    return d_states, dx, d_entries
