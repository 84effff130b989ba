"""Mosaic GPU kernel that prepares chunks: decay factors and the 64 x 64 inverse.

A warpgroup has one chunk of one value head and inverts

    I + strictLower(diag(beta) K K^T)

by recursive doubling: with X_b the inverse of the diagonal blocks of size b,

    X_2b = X_b - (X_b L X_b restricted to the lower left quarter of each 2b-block).

Value heads of one key head share K K^T, but multiplying it again (2 of 12 products)
costs less than the registers that a loop over the heads takes from other blocks.

The products are full 64 x 64 ones; X_b is block diagonal, so masking them afterwards
is exact. Operands are f16, whose 11 bits serve entries of about 1 better than bf16.
Unlike the Neumann product (I - L)(I + L^2)..., no step forms powers of L, which
overflow when keys resemble each other.

Products wait for each other, so what counts is how many chunks an SM has at a time, and
registers limit that: one warpgroup in each block leaves room for four blocks. A block
of five gives each 96 registers, for which X_b must be f16 throughout and its levels a
loop, whose addresses are not all known before it.

The inverse knows nothing of documents: a diagonal block of the inverse of a block
triangular matrix is the inverse of that diagonal block, and the decay matrix, which
is zero between documents, picks the diagonal blocks later.
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
    HALF,
    SQUARE,
    Config,
    Gate,
    Shapes,
)


LOG2_E = 1.4426950408889634
LEVELS = 5  # from blocks of 2 to one of 64


def _decay_rows(g_ref, start_ref, last_start, index):
    """Decay factors of a chunk's tokens, `PER_ROW` vectors.

    Args:
      g_ref: f32[C] in device memory, log decay in base 2.
      start_ref: i32[C] in device memory, document starts.
      last_start: i32[], start of the last token's document.
      index: row and column index of each element of [C, C].

    Returns:
      (total, enter, leave, start), f32[C] each, see `Gate`.
    """
    row, column = index
    g = tc.per_column(tc.load_global(g_ref, tc.PER_COLUMN), SQUARE)
    start = tc.load_global(start_ref, tc.PER_ROW)
    # A document's first token has nothing to decay, hence ">" and not ">=".
    before = (column <= row) & (column > tc.per_row(start, SQUARE))
    total = jnp.sum(jnp.where(before, g, 0.0), axis=1)
    remaining = jnp.sum(jnp.where(column > row, g, 0.0), axis=1)
    enter = jnp.where(start < 0, jnp.exp2(total), 0.0)
    leave = jnp.where(start == last_start, jnp.exp2(remaining), 0.0)
    return total, enter, leave, start.astype(jnp.float32)


def _quarter(index, size: Any) -> jax.Array:
    """Whether elements lie in the lower left quarter of a diagonal block of 2 size.

    The upper right quarter counts as well: what is put there is zero.
    """
    row, column = index
    return ((row & -size) ^ size) == (column & -size)


def _unit_lower_inverse(lower, index, lower_smem, block_smem, sparing):
    """(I + lower)^-1 for a strictly lower triangular f32[C, C] in registers.

    Args:
      lower: the matrix.
      index: row and column index of each element.
      lower_smem, block_smem: shared memory f16[C, C].
      sparing: whether to spare registers, see above.
    """
    row, column = index
    lower_smem[...] = lower.astype(jnp.float16)
    # Blocks of size 2 are exact: (I + L)^-1 = I - L.
    inverse = jnp.where(row == column, 1.0, jnp.where(_quarter(index, 1), -lower, 0.0))

    def double(level, inverse):
        size = lax.shift_left(jnp.int32(2), level) if sparing else 2 << level
        blocks = inverse.astype(jnp.float16)
        block_smem[...] = blocks
        plgpu.commit_smem()
        left = tc.mma((blocks, lower_smem)).astype(jnp.float16)
        both = tc.mma((left, block_smem)).astype(inverse.dtype)
        return jnp.where(_quarter(index, size), -both, inverse)

    if sparing:
        return lax.fori_loop(0, LEVELS, double, inverse.astype(jnp.float16))
    for level in range(LEVELS):
        inverse = double(level, inverse)
    return inverse


def _prepare_chunk(
    index,
    k_ref,
    g_ref,
    beta_ref,
    start_ref,
    inverse_ref,
    gates_ref,
    k_smem,
    lower_smem,
    block_smem,
    arrived,
    *,
    shapes: Shapes,
    sparing: bool,
):
    # Heads vary fastest, so that those of one key head find its keys in the cache.
    block, head = tc.split_index(index, shapes.value_heads)
    row, chunk = tc.split_index(block, shapes.chunks)
    item = row * shapes.value_heads + head
    tokens, inside = pl.ds(block * CHUNK, CHUNK), pl.ds(chunk * CHUNK, CHUNK)
    key_head = lax.div(head, jnp.int32(shapes.group))
    for half in range(2):
        columns = pl.ds(half * HALF, HALF)
        plgpu.copy_gmem_to_smem(
            k_ref.at[tokens, key_head, columns], k_smem.at[half], arrived
        )
    index = tc.square_indices(CHUNK)
    beta = tc.load_global(beta_ref.at[item, inside], tc.PER_ROW)
    total, enter, leave, start = _decay_rows(
        g_ref.at[item, inside],
        start_ref.at[row, inside],
        start_ref[row, chunk * CHUNK + (CHUNK - 1)],
        index,
    )
    gates = gates_ref.at[item, chunk]
    gates.at[Gate.TOTAL][...] = total
    gates.at[Gate.ENTER][...] = enter
    gates.at[Gate.LEAVE][...] = leave
    gates.at[Gate.BETA][...] = beta
    gates.at[Gate.START][...] = start
    plgpu.barrier_wait(arrived)
    lower = tc.mma(*((k_smem.at[half], k_smem.at[half].T) for half in range(2)))
    lower = lower * tc.per_row(beta, SQUARE)
    lower = jnp.where(index[0] > index[1], lower, 0.0)
    inverse = _unit_lower_inverse(lower, index, lower_smem, block_smem, sparing)
    out_smem = k_smem.at[0]  # nobody reads the keys any more
    out_smem[...] = inverse.astype(out_smem.dtype)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(out_smem, inverse_ref.at[tokens, head])
    plgpu.wait_smem_to_gmem(0)


# Lowered once a module: calls of equal sizes, such as those of layers, share it.
@functools.partial(jax.jit, static_argnums=(0, 1))
def prepare(
    shapes: Shapes,
    config: Config,
    k: jax.Array,
    g: jax.Array,
    beta: jax.Array,
    start: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Inverts the chunks and turns log decays into factors.

    Args:
      shapes: sizes of the call.
      config: launch parameters.
      k: [B T, Hk, K], bf16 or f16.
      g: f32[B Hv, T], log decay in base 2, from -160 to 0.
      beta: f32[B Hv, T].
      start: i32[B, T] from `tables.document_starts`.

    Returns:
      inverse [B T, Hv, C] of k's dtype: row i of (I + L)^-1 at token i.
      gates f32[B Hv, T / C, len(Gate), C]: what `Gate` lists, chunk by chunk.
    """
    count, chunks = config.prepare_warpgroups, shapes.items * shapes.chunks
    scratch: list[Any] = [
        tc.operand(count, 2, CHUNK, HALF, dtype=k.dtype),
        tc.operand(count, *SQUARE, dtype=jnp.float16),
        tc.operand(count, *SQUARE, dtype=jnp.float16),
        plgpu.Barrier(num_arrivals=2, num_barriers=count),  # halves of the keys
    ]
    hw.check_smem(tc.shared_bytes(scratch), "pk_gdn_prepare")

    def body(*refs):
        warpgroup = lax.axis_index("warpgroup")
        index = lax.axis_index("block") * count + warpgroup
        places = [x.at[warpgroup] for x in refs[-len(scratch) :]]

        @pl.when(index < chunks)
        def _():
            _prepare_chunk(
                index,
                *refs[: -len(scratch)],
                *places,
                shapes=shapes,
                sparing=count > 1,
            )

    return plgpu.kernel(
        body,
        out_type=(
            jax.ShapeDtypeStruct((k.shape[0], shapes.value_heads, CHUNK), k.dtype),
            jax.ShapeDtypeStruct(
                (shapes.items, shapes.chunks, len(Gate), CHUNK), jnp.float32
            ),
        ),
        grid=(-(-chunks // count),),
        grid_names=("block",),
        num_threads=count,
        thread_name="warpgroup",
        scratch_types=scratch,
        kernel_name="pk_gdn_prepare",
        compiler_params=tc.params(),
    )(k, g, beta, start)
