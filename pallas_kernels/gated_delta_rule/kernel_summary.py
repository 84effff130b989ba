"""Mosaic GPU kernels that let segments of a row run side by side.

With few rows and heads, `kernel_fwd` leaves SMs idle: it has one block for each. A row
cut into S segments of time has S times as many blocks, once the state that enters
each of them is known. A segment maps a state linearly (`segments.py`):

    S -> S @ through + written

`written` is where its chunks lead from a state of zero, and `through` where they lead
from the identity if the values are zero. Both are passes of `kernel_fwd` without O. A
segment's two have blocks of their own; the first segment has one, which starts from
the row's initial state, and the last needs none, because nobody asks what it leads to.

The gradient of the state runs through the segments in reverse with the same
`through`. What is missing is the gradient that a segment's outputs send to the state
before it: a pass of `kernel_bwd` without its outputs, started from zero; in the last
segment, from the gradient of the final state.

A row of one segment is what a device has of longer rows: there the first segment has
both maps and no initial state, and the last one sends its gradient like the others.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.gated_delta_rule import tensor_core as tc
from pallas_kernels.gated_delta_rule.config_mosaic import (
    HALF,
    STAGES,
    Shapes,
)
from pallas_kernels.gated_delta_rule.kernel_bwd import gradient_pass
from pallas_kernels.gated_delta_rule.kernel_fwd import (
    launch,
    ring_scratch,
    start_warpgroups,
    state_pass,
)
from pallas_kernels.gated_delta_rule.segments import Summary


def _place(shapes: Shapes, unit: jax.Array, segment: jax.Array):
    """Item of a segment of (row, head) number `unit` where segments are rows."""
    row, head = tc.split_index(unit, shapes.value_heads)
    return (row * shapes.segments + segment) * shapes.value_heads + head


def _rows_of_identity(warpgroup: jax.Array, key_dim: int) -> jax.Array:
    shape = (HALF, key_dim)
    row, column = (
        plgpu.broadcasted_iota(jnp.int32, shape, i, layout=tc.ROWS) for i in (0, 1)
    )
    return (row + warpgroup * HALF == column).astype(jnp.float32)


def _nothing(*args: Any) -> None:
    """Takes what a pass offers to write and leaves it."""


def _summary_kernel(
    sources, initial_ref, out_ref, *, ring, through_full, shapes, written
):
    """Blocks of `written` come first, segment by segment, then those of `through`.

    Args:
      written: how many segments have one, from the first on.
    """
    block = lax.axis_index("item")
    part, unit = tc.split_index(block, shapes.items // shapes.segments)
    first_through = shapes.segments - written

    def carry(names, ring, segment, initial):
        item = _place(shapes, unit, segment)

        def carry_state(warpgroup):
            half = pl.ds(warpgroup * HALF, HALF)
            state = initial(warpgroup, half)
            state = state_pass(shapes, 1.0, ring, state, warpgroup, _nothing)
            out_ref.at[block, half][...] = state

        named = {name: sources[name] for name in names}
        start_warpgroups(shapes, 1.0, named, ring, item, carry_state)

    def from_initial(warpgroup, half):
        del warpgroup
        is_first = (part == 0).astype(jnp.float32)
        return tc.load_global(initial_ref.at[unit, half]) * is_first

    @pl.when(part < written)
    def _():
        carry(sources, ring, part, from_initial)

    if first_through < written:

        @pl.when(part >= written)
        def _():
            # The same memory; fewer copies arrive.
            names = ("k", "inverse", "gates")
            fewer = {x: ring[x] for x in (*names, "weights", "mixed", "free")}
            carry(
                names,
                fewer | {"full": through_full},
                part - written + first_through,
                lambda warpgroup, half: _rows_of_identity(warpgroup, shapes.key_dim),
            )


# Lowered once a module: calls of equal sizes, such as those of layers, share it.
@functools.partial(jax.jit, static_argnums=(0, 1))
def _maps(
    shapes: Shapes,
    written: int,
    sources: dict[str, jax.Array],
    initial_state: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """`written` of the first so many segments, and `through` of as many less those
    that it leaves out at the end, which are left out at the front."""
    units, value_dim, key_dim = initial_state.shape
    parts = 2 * written - (shapes.segments - written)
    full = plgpu.Barrier(num_arrivals=3, num_barriers=STAGES)
    (out,) = launch(
        functools.partial(_summary_kernel, shapes=shapes, written=written),
        "pk_gdn_summary",
        sources,
        (initial_state,),
        blocks=parts * units,
        out_type=(
            jax.ShapeDtypeStruct((parts * units, value_dim, key_dim), jnp.float32),
        ),
        scratch={"ring": ring_scratch(shapes, tuple(sources)), "through_full": full},
    )
    out = out.reshape(parts, units, value_dim, key_dim)
    return out[:written], out[written:]


def summaries(
    shapes: Shapes,
    sources: dict[str, jax.Array],
    initial_state: jax.Array,
) -> tuple[jax.Array, Summary]:
    """Summarises the segments that others follow.

    Args:
      shapes: sizes of the call with each segment as a row of its own, S of them at
        least 2.
      sources: k [B T, Hk, K], v [B T, Hv, V], and inverse, gates as
        `kernel_inverse.prepare` gives them for `shapes`.
      initial_state: f32[B Hv, V, K], one for each row of the caller's.

    Returns:
      The state after segment 0, f32[B Hv, V, K]; and the summary of segments 1 to
      S - 2, f32[S - 2, B Hv, ...].
    """
    written, through = _maps(shapes, shapes.segments - 1, sources, initial_state)
    return written[0], Summary(through=through, written=written[1:])


def row_summary(shapes: Shapes, sources: dict[str, jax.Array]) -> Summary:
    """Summarises whole rows, f32[B Hv, ...]; arguments as for `summaries`."""
    nothing = jnp.zeros((shapes.items, shapes.value_dim, shapes.key_dim), jnp.float32)
    written, through = _maps(shapes, 1, sources, nothing)
    return Summary(through=through[0], written=written[0])


def _entry_gradient_kernel(sources, d_last_ref, out_ref, *, ring, shapes, scale, first):
    block = lax.axis_index("item")
    part, unit = tc.split_index(block, shapes.items // shapes.segments)
    item = _place(shapes, unit, part + first)

    def carry_state(warpgroup):
        half = pl.ds(warpgroup * HALF, HALF)
        is_last = (part + first == shapes.segments - 1).astype(jnp.float32)
        d_state = tc.load_global(d_last_ref.at[unit, half]) * is_last
        out_ref.at[block, half][...] = gradient_pass(
            shapes, ring, d_state, warpgroup, _nothing
        )

    start_warpgroups(
        shapes,
        scale,
        sources,
        ring,
        item,
        carry_state,
        reverse=True,
        weigh_queries=True,
    )


# Lowered once a module: calls of equal sizes, such as those of layers, share it.
@functools.partial(jax.jit, static_argnums=(0, 1))
def entry_gradients(
    shapes: Shapes,
    scale: float,
    sources: dict[str, jax.Array],
    d_last: jax.Array,
) -> jax.Array:
    """Gradients that segments send to the states before them.

    Args:
      shapes: sizes of the call with each segment as a row of its own.
      scale: factor on the output.
      sources: q, k [B T, Hk, K], do [B T, Hv, V], and inverse, gates as
        `kernel_inverse.prepare` gives them for `shapes`.
      d_last: f32[B Hv, V, K], gradient of the final state of the caller's rows.

    Returns:
      f32[S - 1, B Hv, V, K] for segments 1 to S - 1: of the last one with all that
      follows, of the others what their own outputs send. A row of one segment has
      that of segment 0, f32[1, B Hv, V, K].
    """
    units, value_dim, key_dim = d_last.shape
    first = min(1, shapes.segments - 1)
    blocks = (shapes.segments - first) * units
    (out,) = launch(
        functools.partial(
            _entry_gradient_kernel,
            shapes=shapes,
            scale=scale,
            first=first,
        ),
        "pk_gdn_entry_gradients",
        sources,
        (d_last,),
        blocks=blocks,
        out_type=(jax.ShapeDtypeStruct((blocks, value_dim, key_dim), jnp.float32),),
        scratch={"ring": ring_scratch(shapes, tuple(sources))},
    )
    return out.reshape(shapes.segments - first, units, value_dim, key_dim)
