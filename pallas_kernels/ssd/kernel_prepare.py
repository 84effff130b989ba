"""Mosaic GPU kernel that turns step sizes into the factors of a chunk's tokens.

The table is that of the gated delta rule (`Gate`), with the step size as the writing
strength. Its sums run over the tokens of a document in a chunk, each made of its own
terms of one sign. They are the same tokens in all heads, so a block has a chunk of
64 heads and multiplies a matrix of zeros and ones with their log decays s a, which it
cuts into three numbers of 16 bits each, so that no bit of them is lost. Two warpgroups
share a block's table: one has the sums from documents' starts, one those to the
chunk's exit.
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
from pallas_kernels.gated_delta_rule.config_mosaic import (
    CHUNK,
    MIN_LOG_DECAY,
    SQUARE,
    Gate,
)
from pallas_kernels.gated_delta_rule.kernel_inverse import LOG2_E
from pallas_kernels.ssd.config_mosaic import HEAD_TILE, Shapes


PARTS = 3  # bf16 numbers of 8 bits each that an f32 number is the sum of


def cut(value: jax.Array, parts: Any) -> None:
    """Writes an f32 matrix as `PARTS` of bf16 that it is the sum of."""
    for i in range(PARTS):
        part = value.astype(jnp.bfloat16)
        parts.at[i][...] = part
        value = value - part.astype(jnp.float32)


class HeadTile:
    """What a block has: a chunk of a row, of `HEAD_TILE` heads.

    Attributes:
      row, chunk: which one.
      block: the chunk's index over the rows.
      heads: of a row.
      items: of the heads, over the rows.
      by_token: index of [B T, H'].
    """

    def __init__(self, shapes: Shapes):
        tiles = shapes.padded_heads // HEAD_TILE
        self.block, tile = tc.split_index(lax.axis_index("block"), tiles)
        self.row, self.chunk = tc.split_index(self.block, shapes.chunks)
        self.items = pl.ds((self.row * tiles + tile) * HEAD_TILE, HEAD_TILE)
        self.heads = pl.ds(tile * HEAD_TILE, HEAD_TILE)
        self.by_token = (pl.ds(self.block * CHUNK, CHUNK), self.heads)

    @staticmethod
    def count(shapes: Shapes) -> int:
        """How many there are."""
        tiles = shapes.padded_heads // HEAD_TILE
        return shapes.batch * shapes.chunks * tiles


# What each of the two warpgroups makes, neighbours in the table.
FROM_START, TO_EXIT = (Gate.TOTAL, Gate.ENTER), (Gate.LEAVE, Gate.BETA, Gate.START)


def _prepare_kernel(
    step_ref,
    rate_ref,
    start_ref,
    gates_ref,
    *,
    parts,
    ready,
    ones,
    staging,
    shapes: Shapes,
):
    place = HeadTile(shapes)
    row, chunk, here = place.row, place.chunk, place.by_token
    inside = pl.ds(chunk * CHUNK, CHUNK)
    later, earlier = tc.square_indices(CHUNK)
    start = tc.load_global(start_ref.at[row, inside], tc.PER_ROW)
    begin = tc.per_row(start, SQUARE)
    warpgroup = lax.axis_index("warpgroup")

    def summed(tokens: jax.Array) -> jax.Array:
        # Not from registers: half of these are known to the compiler, and ptxas 13.0 to
        # 13.2 sets a register of a constant only after the products that read it.
        own = ones.at[warpgroup]
        own[...] = jnp.where(tokens, 1.0, 0.0).astype(jnp.bfloat16)
        plgpu.commit_smem()
        return tc.mma(*((own, parts.at[i]) for i in range(PARTS)))

    def write(gates: tuple[Gate, ...], values: tuple[jax.Array, ...]) -> None:
        own = staging[gates[0].name]
        for i, value in enumerate(values):
            tc.store_transposed(own.at[:, i], value)
        plgpu.commit_smem()
        to = gates_ref.at[place.items, chunk, pl.ds(gates[0], len(gates))]
        plgpu.copy_smem_to_gmem(own, to)
        plgpu.wait_smem_to_gmem(0)

    @pl.when(warpgroup == 0)
    def _():
        rate = tc.load_global(rate_ref.at[place.heads], tc.PER_COLUMN)
        g = tc.load_global(step_ref.at[here]) * tc.per_column(rate, SQUARE)
        cut(jnp.maximum(g, MIN_LOG_DECAY) * LOG2_E, parts)  # [C, 64 heads]
        plgpu.commit_smem()
        plgpu.barrier_arrive(ready)
        # A document's first token has nothing to decay, hence ">" and not ">=".
        total = summed((earlier <= later) & (earlier > begin))
        write(FROM_START, (total, jnp.where(begin < 0, jnp.exp2(total), 0.0)))

    @pl.when(warpgroup == 1)
    def _():
        step = tc.load_global(step_ref.at[here])
        last_start = start_ref[row, chunk * CHUNK + (CHUNK - 1)]
        plgpu.barrier_wait(ready)
        remaining = summed(earlier > later)
        leave = jnp.where(begin == last_start, jnp.exp2(remaining), 0.0)
        write(TO_EXIT, (leave, step, begin.astype(jnp.float32)))


# Lowered once a module: calls of equal sizes, such as those of layers, share it.
@functools.partial(jax.jit, static_argnums=0)
def prepare(
    shapes: Shapes, step: jax.Array, rate: jax.Array, start: jax.Array
) -> jax.Array:
    """Makes the table of factors.

    Args:
      shapes: sizes of the call.
      step: f32[B T, H'], step sizes of `padded_heads`.
      rate: f32[H'], a.
      start: i32[B, T] from `document_starts`.

    Returns:
      f32[B H', T / C, len(Gate), C]: what `Gate` lists, chunk by chunk.
    """
    scratch: dict[str, Any] = {
        "parts": tc.operand(PARTS, CHUNK, HEAD_TILE, dtype=jnp.bfloat16),
        "ready": plgpu.Barrier(num_arrivals=1),
        "ones": tc.operand(2, *SQUARE, dtype=jnp.bfloat16),
        "staging": {
            gates[0].name: plgpu.SMEM((HEAD_TILE, len(gates), CHUNK), jnp.float32)
            for gates in (FROM_START, TO_EXIT)
        },
    }
    hw.check_smem(tc.shared_bytes(scratch), "pk_ssd_prepare")
    items = shapes.batch * shapes.padded_heads
    return plgpu.kernel(
        functools.partial(_prepare_kernel, shapes=shapes),
        out_type=jax.ShapeDtypeStruct(
            (items, shapes.chunks, len(Gate), CHUNK), jnp.float32
        ),
        grid=(HeadTile.count(shapes),),
        grid_names=("block",),
        num_threads=2,
        thread_name="warpgroup",
        scratch_types=scratch,
        kernel_name="pk_ssd_prepare",
        compiler_params=tc.params(),
    )(step, rate, start)
