"""Mosaic GPU kernel that carries the gradient of the state back through the chunks.

The mirror of `kernel_fwd`: the same four warpgroups, the same ring fed from the last
chunk to the first, dS^T [V, K] in f32 registers of two of them. With dS the gradient
of the state at a chunk's exit, and P, R as in `kernel_fwd`:

    dD^T = (dS^T K^T) diag(leave) + dO^T P
    dV^T = dD^T R
    dS^T = across dS^T + dO^T (scale diag(enter) Q) - (dV^T diag(enter)) K

Everything else follows from dS and dV chunk by chunk, see `kernel_grads`.
"""

from __future__ import annotations

import functools

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
from pallas_kernels.gated_delta_rule.kernel_fwd import launch, start_warpgroups


def _chunk_bwd_kernel(
    sources,
    d_last_ref,
    dv_ref,
    d_states_ref,
    d_initial_ref,
    *,
    ring,
    staging,
    shapes,
    scale,
):
    def carry_state(item, warpgroup):
        row, head = tc.split_index(item, shapes.value_heads)
        half = pl.ds(warpgroup * HALF, HALF)
        dv_out, state_out = (staging[x].at[warpgroup] for x in ("dv", "d_states"))

        def step(i, d_state):
            slot = lax.rem(i, jnp.int32(STAGES))
            chunk = shapes.chunks - 1 - i
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
            d_known = (-dv * tc.per_column(enter, shape)).astype(shapes.dtype)
            d_state = tc.mma((d_known, k), init=d_state)
            plgpu.commit_smem()
            plgpu.barrier_arrive(ring["free"].at[slot])
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            tc.store_transposed(dv_out, dv.astype(shapes.dtype))
            state_out[...] = at_exit
            plgpu.commit_smem()
            tokens = pl.ds(row * shapes.time + chunk * CHUNK, CHUNK)
            plgpu.copy_smem_to_gmem(dv_out, dv_ref.at[tokens, head, half])
            plgpu.copy_smem_to_gmem(state_out, d_states_ref.at[item, chunk, half])
            return d_state

        d_state = tc.load_global(d_last_ref.at[item, half])
        d_state = lax.fori_loop(0, shapes.chunks, step, d_state)
        d_initial_ref.at[item, half][...] = d_state
        plgpu.wait_smem_to_gmem(0)

    start_warpgroups(shapes, scale, sources, ring, carry_state, reverse=True)


def chunk_bwd(
    shapes: Shapes,
    scale: float,
    sources: dict[str, jax.Array],
    d_last: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Runs the chunks in reverse order.

    Args:
      shapes: sizes of the call.
      scale: factor on the output.
      sources: q, k [B T, Hk, K], do [B T, Hv, V], and inverse, gates as
        `kernel_inverse.prepare` gives them.
      d_last: f32[B Hv, V, K], gradient of the final state.

    Returns:
      dv [B T, Hv, V] and d_states [B Hv, T / C, V, K] of v's dtype, the latter the
      gradient of the state at the exit of each chunk; d_initial f32[B Hv, V, K].
    """
    items, value_dim, key_dim = d_last.shape
    operand = functools.partial(tc.operand, STATE_WARPGROUPS, dtype=shapes.dtype)
    return launch(
        functools.partial(_chunk_bwd_kernel, shapes=shapes, scale=scale),
        "pk_gdn_bwd",
        shapes,
        sources,
        d_last,
        out_type=(
            jax.ShapeDtypeStruct(sources["do"].shape, shapes.dtype),
            jax.ShapeDtypeStruct(
                (items, shapes.chunks, value_dim, key_dim), shapes.dtype
            ),
            jax.ShapeDtypeStruct(d_last.shape, jnp.float32),
        ),
        staging={"dv": operand(CHUNK, HALF), "d_states": operand(HALF, key_dim)},
    )
