"""Mosaic GPU kernel that carries the gradient of the state back through the chunks.

Half of its blocks compute the states at chunk entries again (`write_states` in
`kernel_fwd`). They need nothing of the other half, so together they fill a card that
either of them would leave idle when rows and heads are few.

The other half mirrors `kernel_fwd`: the same four warpgroups, the same ring fed from
the last chunk to the first, dS^T [V, K] in f32 registers of two of them. With dS the
gradient of the state at a chunk's exit, and P, R as in `kernel_fwd`:

    dD^T = (dS^T K^T) diag(leave) + dO^T P
    dV^T = dD^T R
    dS^T = across dS^T + dO^T (scale diag(enter) Q) - (dV^T diag(enter)) K

Everything else follows from dS, dV and D chunk by chunk, see `kernel_grads`. The first
half writes D as well, which it has at hand, and the other one dY instead of dV, by
leaving out the factor diag(beta) of R. Where the forward has kept S and D there is no
first half.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.gated_delta_rule import tensor_core as tc
from pallas_kernels.gated_delta_rule.config_mosaic import (
    CHUNK,
    HALF,
    STAGES,
    STATE_WARPGROUPS,
    Gate,
    Shapes,
)
from pallas_kernels.gated_delta_rule.kernel_fwd import (
    end_type,
    launch,
    ring_scratch,
    start_warpgroups,
    write_end,
    write_states,
)


def gradient_pass(
    shapes: Shapes,
    ring: dict[str, Any],
    d_state: jax.Array,
    warpgroup: jax.Array,
    emit: Callable[..., None],
    *,
    weighed: bool = True,
) -> jax.Array:
    """Warpgroup that carries 64 rows of dS^T back, from the last chunk to the first.

    Args:
      shapes: sizes of the call.
      ring: what `feed` and `mix` fill in reverse, from q, k, do, inverse and gates.
      d_state: f32[64, K], the rows after the last chunk.
      warpgroup: which rows.
      emit: called in each chunk with its index, dV^T and dS^T at exit in 16 bits.
      weighed: whether R has its factor diag(beta); without, `emit` gets dY^T.

    Returns:
      The rows before the first chunk.
    """
    half = pl.ds(warpgroup * HALF, HALF)

    def step(i, d_state):
        slot = lax.rem(i, jnp.int32(STAGES))
        shape = (HALF, CHUNK)
        plgpu.barrier_wait(ring["full"].at[slot])
        gates, k = ring["gates"].at[slot], ring["k"].at[slot]
        at_exit = d_state.astype(shapes.dtype)
        leave = tc.load(gates.at[Gate.LEAVE], tc.PER_COLUMN)
        d_written = tc.mma((at_exit, k.T)) * tc.per_column(leave, shape)
        do = ring["do"].at[slot, :, half].T
        plgpu.barrier_wait(ring["mixed"].at[slot])
        across = gates[Gate.ENTER, CHUNK - 1]
        d_written, d_state = tc.mma_onto(
            (d_written, (do, ring["scores"].at[slot])),
            (d_state * across, (do, ring["q"].at[slot])),
        )
        dv = tc.mma((d_written.astype(shapes.dtype), ring["weights"].at[slot]))
        enter = tc.load(gates.at[Gate.ENTER], tc.PER_COLUMN)
        if not weighed:
            enter = enter * tc.load(gates.at[Gate.BETA], tc.PER_COLUMN)
        d_known = (-dv * tc.per_column(enter, shape)).astype(shapes.dtype)
        d_state = tc.mma((d_known, k), init=d_state)
        plgpu.commit_smem()
        plgpu.barrier_arrive(ring["free"].at[slot])
        emit(shapes.chunks - 1 - i, dv, at_exit)
        return d_state

    return lax.fori_loop(0, shapes.chunks, step, d_state)


def _carry_gradient(
    sources,
    d_last_ref,
    d_weighed_ref,
    d_states_ref,
    d_initial_ref,
    *,
    ring,
    staging,
    shapes,
    scale,
    item,
):
    def carry_state(warpgroup):
        row, head = tc.split_index(item, shapes.value_heads)
        half = pl.ds(warpgroup * HALF, HALF)
        weighed_out, state_out = (
            staging[x].at[warpgroup] for x in ("d_weighed", "d_states")
        )

        def emit(chunk, d_weighed, at_exit):
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            tc.store_transposed(weighed_out, d_weighed.astype(shapes.dtype))
            state_out[...] = at_exit
            plgpu.commit_smem()
            tokens = pl.ds(row * shapes.time + chunk * CHUNK, CHUNK)
            plgpu.copy_smem_to_gmem(weighed_out, d_weighed_ref.at[tokens, head, half])
            plgpu.copy_smem_to_gmem(state_out, d_states_ref.at[item, chunk, half])

        d_state = tc.load_global(d_last_ref.at[item, half])
        d_state = gradient_pass(shapes, ring, d_state, warpgroup, emit, weighed=False)
        write_end(d_initial_ref, shapes, item, half, d_state, 0)
        plgpu.wait_smem_to_gmem(0)

    start_warpgroups(
        shapes,
        scale,
        sources,
        ring,
        item,
        carry_state,
        reverse=True,
        weigh_queries=True,
        weigh_writes=False,
    )


def _chunk_bwd_kernel(
    sources,
    initial_ref,
    d_last_ref,
    states_ref,
    d_weighed_ref,
    d_states_ref,
    d_initial_ref,
    written_ref,
    *,
    ring,
    staging,
    states_full,
    shapes,
    scale,
):
    block = lax.axis_index("item")

    def some(*names):
        return {name: sources[name] for name in (*names, "inverse", "gates")}

    @pl.when(block < shapes.items)
    def _():
        _carry_gradient(
            some("q", "k", "do"),
            d_last_ref,
            d_weighed_ref,
            d_states_ref,
            d_initial_ref,
            ring=ring,
            staging=staging,
            shapes=shapes,
            scale=scale,
            item=block,
        )

    @pl.when(block >= shapes.items)
    def _():
        # The same memory; fewer copies arrive.
        names = ("k", "inverse", "gates", "weights", "mixed", "free")
        states_ring = {name: ring[name] for name in names}
        write_states(
            some("k", "v"),
            initial_ref,
            states_ref,
            ring=states_ring | {"v": ring["do"], "full": states_full},
            staging=staging["d_states"],
            shapes=shapes,
            item=block - shapes.items,
            written_ref=written_ref,
            written_staging=staging["d_weighed"],
        )


def _reverse_kernel(sources, d_last_ref, *outputs, ring, staging, shapes, scale):
    """The other half alone; `outputs` are dY, dS and the initial state's gradient."""
    _carry_gradient(
        sources,
        d_last_ref,
        *outputs,
        ring=ring,
        staging=staging,
        shapes=shapes,
        scale=scale,
        item=lax.axis_index("item"),
    )


# Lowered once a module: calls of equal sizes, such as those of layers, share it.
@functools.partial(jax.jit, static_argnums=(0, 1))
def chunk_bwd(
    shapes: Shapes,
    scale: float,
    sources: dict[str, jax.Array],
    initial_state: jax.Array,
    d_last: jax.Array,
) -> tuple[dict[str, jax.Array], jax.Array]:
    """Runs the chunks in order for the states, in reverse for their gradients.

    Args:
      shapes: sizes of the call.
      scale: factor on the output.
      sources: q, k [B T, Hk, K], v, do [B T, Hv, V], and inverse, gates as
        `kernel_inverse.prepare` gives them.
      initial_state: f32[B S Hv, V, K], of each segment.
      d_last: f32[B S Hv, V, K], gradients of the states that leave the segments.

    Returns:
      What the gradients of a chunk need, of v's dtype: states [B Hv, T / C, V, K]
      and d_states, the state at the entry of each chunk, and the gradient of that at
      its exit; and [B T, Hv, V] d_weighed and written, dY and D. And d_initial
      f32[B Hv, V, K] of the caller's rows.
    """
    items, value_dim, key_dim = d_last.shape
    operand = functools.partial(tc.operand, STATE_WARPGROUPS, dtype=shapes.dtype)
    states = jax.ShapeDtypeStruct(
        (items, shapes.chunks, value_dim, key_dim), shapes.dtype
    )
    values = jax.ShapeDtypeStruct(sources["do"].shape, shapes.dtype)
    names = ("q", "k", "do", "inverse", "gates")
    states_out, d_weighed, d_states, d_initial, written = launch(
        functools.partial(_chunk_bwd_kernel, shapes=shapes, scale=scale),
        "pk_gdn_bwd",
        sources,
        (initial_state, d_last),
        blocks=2 * shapes.items,
        out_type=(
            states,
            values,
            states,
            end_type(shapes),
            values,
        ),
        scratch={
            "ring": ring_scratch(shapes, names),
            "staging": {
                "d_weighed": operand(CHUNK, HALF),
                "d_states": operand(HALF, key_dim),
            },
            "states_full": plgpu.Barrier(num_arrivals=4, num_barriers=STAGES),
        },
    )
    between = {
        "states": states_out,
        "d_states": d_states,
        "d_weighed": d_weighed,
        "written": written,
    }
    return between, d_initial


# Lowered once a module: calls of equal sizes, such as those of layers, share it.
@functools.partial(jax.jit, static_argnums=(0, 1))
def reverse_bwd(
    shapes: Shapes,
    scale: float,
    sources: dict[str, jax.Array],
    d_last: jax.Array,
) -> tuple[dict[str, jax.Array], jax.Array]:
    """Runs the chunks in reverse, for a forward that has kept S and D.

    Args:
      shapes, scale, d_last: as for `chunk_bwd`.
      sources: the same without v.

    Returns:
      The d_states and d_weighed of `chunk_bwd`, and d_initial f32[B Hv, V, K] of the
      caller's rows.
    """
    items, *matrix = d_last.shape
    operand = functools.partial(tc.operand, STATE_WARPGROUPS, dtype=shapes.dtype)
    d_weighed, d_states, d_initial = launch(
        functools.partial(_reverse_kernel, shapes=shapes, scale=scale),
        "pk_gdn_bwd_reverse",
        sources,
        (d_last,),
        blocks=shapes.items,
        out_type=(
            jax.ShapeDtypeStruct(sources["do"].shape, shapes.dtype),
            jax.ShapeDtypeStruct((items, shapes.chunks, *matrix), shapes.dtype),
            end_type(shapes),
        ),
        scratch={
            "ring": ring_scratch(shapes, tuple(sources)),
            "staging": {
                "d_weighed": operand(CHUNK, HALF),
                "d_states": operand(HALF, shapes.key_dim),
            },
        },
    )
    return {"d_states": d_states, "d_weighed": d_weighed}, d_initial
