"""Mosaic GPU kernel that ends the gradient of step sizes and decays, for all heads.

`kernel_grads` leaves, head by head, what each token's sum of decays gets. The decay of
a token m is in the sums of all tokens from it on in its document, and in all that
reaches the chunk's exit if m's document does:

    dg_m = sum of d_total_i over i >= m of m's document + (sum of exits)

These are the sums of `kernel_prepare` the other way round, and they run over the same
tokens in all heads: a block has a chunk of 64 heads and multiplies two matrices of
zeros and ones with numbers that are cut into three of 16 bits. What comes in by head
goes out by token.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels._common import hw
from pallas_kernels.gated_delta_rule import tensor_core as tc
from pallas_kernels.gated_delta_rule.config_mosaic import CHUNK, SQUARE, Gate
from pallas_kernels.ssd.config_mosaic import HEAD_TILE, Shapes
from pallas_kernels.ssd.kernel_prepare import PARTS, HeadTile, cut


SUMMED = ("d_total", "exits")


def _steps_kernel(
    total_ref,
    exits_ref,
    dstep_ref,
    gates_ref,
    dg_out,
    dstep_out,
    *,
    parts,
    ones,
    staging,
    shapes: Shapes,
):
    place = HeadTile(shapes)
    item, chunk = place.items.start, place.chunk
    by_head = (place.items, pl.ds(chunk * CHUNK, CHUNK))
    warpgroup = lax.axis_index("warpgroup")

    @pl.when(warpgroup == 0)
    def _():
        token, other = tc.square_indices(CHUNK)
        start = gates_ref.at[item, chunk, Gate.START]
        starts = tc.load_global(start, tc.PER_COLUMN).astype(jnp.int32)
        last_start = gates_ref[item, chunk, Gate.START, CHUNK - 1].astype(jnp.int32)
        # A document's first token decays nothing.
        masks = (
            (token <= other) & (token > tc.per_column(starts, SQUARE)),
            token > last_start,
        )
        for i, (source, mask) in enumerate(
            zip((total_ref, exits_ref), masks, strict=True)
        ):
            cut(tc.load_global(source.at[by_head]), parts.at[i])
            ones.at[i][...] = jnp.where(mask, 1.0, 0.0).astype(jnp.bfloat16)
        plgpu.commit_smem()
        dg = tc.mma(
            *((ones.at[i], parts.at[i, j].T) for i in range(2) for j in range(PARTS))
        )
        dg_out.at[place.by_token][...] = dg

    @pl.when(warpgroup == 1)
    def _():
        tc.store_transposed(staging, tc.load_global(dstep_ref.at[by_head]))
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(staging, dstep_out.at[place.by_token])
        plgpu.wait_smem_to_gmem(0)


# Lowered once a module: calls of equal sizes, such as those of layers, share it.
@functools.partial(jax.jit, static_argnums=0)
def step_gradients(
    shapes: Shapes, grads: dict[str, jax.Array], gates: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Ends what `chunk_grads` began.

    Args:
      shapes: sizes of the call.
      grads: "d_total", "exits" and "dstep" of `chunk_grads`, f32[B H', T].
      gates: as `prepare` gives them.

    Returns:
      Gradients of step sizes and of natural log decays, f32[B T, H'], by token. Heads
      behind H have no meaning.
    """
    scratch: dict[str, Any] = {
        "parts": tc.operand(2, PARTS, HEAD_TILE, CHUNK, dtype=jnp.bfloat16),
        "ones": tc.operand(2, *SQUARE, dtype=jnp.bfloat16),
        "staging": plgpu.SMEM((CHUNK, HEAD_TILE), jnp.float32),
    }
    hw.check_smem(tc.shared_bytes(scratch), "pk_ssd_steps")
    by_token = jax.ShapeDtypeStruct(
        (shapes.batch * shapes.time, shapes.padded_heads), jnp.float32
    )
    dg, dstep = plgpu.kernel(
        functools.partial(_steps_kernel, shapes=shapes),
        out_type=(by_token, by_token),
        grid=(HeadTile.count(shapes),),
        grid_names=("block",),
        num_threads=2,
        thread_name="warpgroup",
        scratch_types=scratch,
        kernel_name="pk_ssd_steps",
        compiler_params=tc.params(auto_barriers=not shapes.backward),
    )(*(grads[name] for name in (*SUMMED, "dstep")), gates)
    return dstep, dg
