"""Mosaic GPU kernel that turns step sizes into the factors of a chunk's tokens.

The table is that of the gated delta rule (`Gate`), with the step size as the writing
strength. A warpgroup has one chunk of one head: its sums over the chunk are sums of one
sign from a document's start, each made of its own terms, and no differences.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.gated_delta_rule import tensor_core as tc
from pallas_kernels.gated_delta_rule.config_mosaic import CHUNK, Gate
from pallas_kernels.gated_delta_rule.kernel_inverse import decay_rows
from pallas_kernels.ssd.config_mosaic import Shapes


def _prepare_kernel(g_ref, step_ref, start_ref, gates_ref, *, shapes: Shapes):
    block, head = tc.split_index(lax.axis_index("block"), shapes.heads)
    row, chunk = tc.split_index(block, shapes.chunks)
    item, inside = row * shapes.heads + head, pl.ds(chunk * CHUNK, CHUNK)
    total, enter, leave, start = decay_rows(
        g_ref.at[item, inside],
        start_ref.at[row, inside],
        start_ref[row, chunk * CHUNK + (CHUNK - 1)],
        tc.square_indices(CHUNK),
    )
    step = tc.load_global(step_ref.at[item, inside], tc.PER_ROW)
    gates = gates_ref.at[item, chunk]
    gates.at[Gate.TOTAL][...] = total
    gates.at[Gate.ENTER][...] = enter
    gates.at[Gate.LEAVE][...] = leave
    gates.at[Gate.BETA][...] = step
    gates.at[Gate.START][...] = start


# Lowered once a module: calls of equal sizes, such as those of layers, share it.
@functools.partial(jax.jit, static_argnums=0)
def prepare(
    shapes: Shapes, g: jax.Array, step: jax.Array, start: jax.Array
) -> jax.Array:
    """Makes the table of factors.

    Args:
      shapes: sizes of the call.
      g: f32[B H, T], log decay in base 2, from -160 to 0.
      step: f32[B H, T], step sizes.
      start: i32[B, T] from `document_starts`.

    Returns:
      f32[B H, T / C, len(Gate), C]: what `Gate` lists, chunk by chunk.
    """
    return plgpu.kernel(
        functools.partial(_prepare_kernel, shapes=shapes),
        out_type=jax.ShapeDtypeStruct(
            (shapes.items, shapes.chunks, len(Gate), CHUNK), jnp.float32
        ),
        grid=(shapes.items * shapes.chunks,),
        grid_names=("block",),
        num_threads=1,
        thread_name="warpgroup",
        kernel_name="pk_ssd_prepare",
        compiler_params=tc.params(),
    )(g, step, start)
