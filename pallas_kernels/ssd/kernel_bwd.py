"""Mosaic GPU kernel that carries the gradient of the state back through the chunks.

Its blocks run `kernel_pass` backward: they write dX, and dS at the exit of each span of
chunks. Where the forward kept no states, as many blocks again compute them and
write S at each span's entry. They need nothing of each other, so together they fill a
card that either of them would leave idle when rows and heads are few. `kernel_grads`
has the rest.
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
from pallas_kernels.gated_delta_rule.config_mosaic import CHUNK
from pallas_kernels.gated_delta_rule.kernel_fwd import launch
from pallas_kernels.ssd.config_mosaic import (
    HEAD_DIM,
    HEADS,
    STATE_SHAPE,
    Shapes,
)
from pallas_kernels.ssd.kernel_pass import (
    BACKWARD,
    FORWARD,
    PLAIN_COPIES,
    STAGES,
    Place,
    barriers,
    in_span,
    ring_scratch,
    run_block,
    span_states,
    starts_of,
    store_output,
    store_state,
)


def _bwd_kernel(sources, skip_ref, *refs, ring, plain, staging, shapes):
    count = starts_of(shapes)
    leaving, refs = refs[:count], refs[count:]
    entering = ()
    if plain:
        entering, refs = refs[:count], refs[count:]
    dx_ref, d_states_ref, d_entries_ref, *states = refs
    block = lax.axis_index("item")

    @pl.when(block < shapes.pairs)
    def _():
        place = Place(shapes, block)

        def emit(head, chunk, at_exit, out):
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            to = dx_ref.at[place.tokens(chunk), place.head(head)]
            store_output(staging["out"].at[head], to, out, shapes.dtype)

            @pl.when(in_span(shapes, chunk) == shapes.span - 1)
            def _():
                store_state(
                    place, staging["states"], d_states_ref, head, chunk, at_exit
                )

        def end(head, state, left):
            del left
            place.write_end(d_entries_ref, head, state, 0)

        run_block(
            shapes,
            BACKWARD,
            BACKWARD.sources(sources, output=True),
            ring,
            place,
            initial=functools.partial(place.entering, BACKWARD, leaving),
            emit=emit,
            end=end,
            skip_ref=skip_ref,
        )

    if not plain:
        return

    @pl.when(block >= shapes.pairs)
    def _():
        place = Place(shapes, block - shapes.pairs)

        def emit(head, chunk, entry):
            @pl.when(in_span(shapes, chunk) == 0)
            def _():
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                store_state(place, staging["states"], states[0], head, chunk, entry)

        # The same memory; fewer copies arrive.
        memory = {"x": ring["dy"], "b": ring["b"], "gates": ring["gates"]}
        run_block(
            shapes,
            FORWARD,
            FORWARD.sources(sources, output=False),
            memory | plain,
            place,
            initial=functools.partial(place.entering, FORWARD, entering),
            emit=emit,
            end=lambda *_: None,
        )


# Lowered once a module: calls of equal sizes, such as those of layers, share it.
@functools.partial(jax.jit, static_argnums=0)
def chunk_bwd(
    shapes: Shapes,
    sources: dict[str, jax.Array],
    skip: jax.Array,
    starts: tuple[jax.Array, ...],
    d_starts: tuple[jax.Array, ...],
    states: jax.Array | None,
) -> tuple[dict[str, jax.Array], jax.Array, jax.Array]:
    """Runs the chunks in order for the states, in reverse for their gradients.

    Args:
      shapes: sizes of the call.
      sources: b, c [B T, G, N], x, dy [B T, H, V], and gates as `prepare` gives them.
      skip: f32[H], d.
      starts: as for `chunk_fwd`.
      states: what `chunk_fwd` kept, `None` to compute them again.
      d_starts: the same against the order of time: f32[B H, V, N], the gradient of the
        states that leave the caller's rows, and of several segments where they lead.

    Returns:
      What the other gradients need, `span_states` each: "states", that at the entry of
      each span of chunks, and "d_states", the gradient of that at its exit;
      dx [B T, H, V]; and f32[B H, V, N], the gradient of the states that enter the
      caller's rows.
    """
    names = ("b", "c", "x", "dy", "gates")
    operand = functools.partial(tc.operand, HEADS, dtype=shapes.dtype)
    in_ring = BACKWARD.sources(sources, output=True)
    again = states is None
    dx, d_states, d_entries, *found = launch(
        functools.partial(_bwd_kernel, shapes=shapes),
        "pk_ssd_bwd",
        {name: sources[name] for name in names},
        (skip, *d_starts, *(starts if again else ())),
        blocks=(2 if again else 1) * shapes.pairs,
        out_type=(
            jax.ShapeDtypeStruct(sources["x"].shape, shapes.dtype),
            span_states(shapes),
            jax.ShapeDtypeStruct(
                (shapes.items // shapes.segments, *STATE_SHAPE), jnp.float32
            ),
            *([span_states(shapes)] if again else []),
        ),
        scratch={
            "ring": ring_scratch(shapes, in_ring, STAGES, output=True),
            "plain": barriers(PLAIN_COPIES, STAGES, output=False) if again else {},
            "staging": {
                "out": operand(CHUNK, HEAD_DIM),
                "states": operand(*STATE_SHAPE),
            },
        },
        auto_barriers=not shapes.backward,
    )
    between: dict[str, Any] = {"d_states": d_states}
    between["states"] = found[0] if again else states
    return between, dx, d_entries
