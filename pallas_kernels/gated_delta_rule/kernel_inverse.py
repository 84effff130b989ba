"""Mosaic GPU kernel that prepares chunks: decay factors and the 64 x 64 inverse.

A warpgroup has one chunk of one value head and inverts

    I + strictLower(diag(beta) K K^T)

by merging the inverses of diagonal blocks, 2 -> 4 -> ... -> 64:

    [X_1 0; -X_2 L_21 X_1  X_2].

Operands are f16, whose 11 bits serve entries of about 1 better than bf16. Unlike the
Neumann product (I - L)(I + L^2)..., no step forms powers of L, which overflow when keys
resemble each other.

**Tiles.** A warp holds 16 rows, so one register matrix [64, 16] holds the four diagonal
tiles of 16, each in the rows of its warp, and up to that size all four grow together:
the matrix is multiplied with the tile of every warp, and each warp keeps what is its
own. That is a quarter of the work of whole products, and of the registers. Only the
last two steps have tiles beside the diagonal.

Value heads of one key head share K K^T, but multiplying it again costs less than the
registers that a loop over the heads takes from other blocks: products wait for each
other, so what counts is how many chunks an SM has at a time.

The inverse knows nothing of documents: a diagonal block of the inverse of a block
triangular matrix is the inverse of that diagonal block, and the decay matrix, which
is zero between documents, picks the diagonal blocks later.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
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
    Gate,
    Shapes,
)
from pallas_kernels.gated_delta_rule.config_mosaic import LOG2_E as LOG2_E


TILE = 16  # rows of a warp, and the least that a product sums over
TILES = CHUNK // TILE


def decay_rows(g_ref, start_ref, last_start, index):
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


def _as_f16(x: jax.Array) -> jax.Array:
    return x.astype(jnp.float16)


def _tile(smem: Any, row: int, column: int = 0, *, wide: int = 1) -> Any:
    """A tile of 16 rows and `wide` tiles of 16 columns."""
    return smem.at[pl.ds(row * TILE, TILE), pl.ds(column * TILE, wide * TILE)]


def _quarter(row: jax.Array, column: jax.Array, size: int) -> jax.Array:
    """Whether elements lie in the lower left quarter of a diagonal block of 2 size.

    The upper right quarter counts as well: what is put there is zero.
    """
    return ((row & -size) ^ size) == (column & -size)


def _own(warp: jax.Array, parts: Sequence[jax.Array]) -> jax.Array:
    """Part i in the rows of warp i, f32[C, 16]."""
    kept = parts[0]
    for number, part in enumerate(parts[1:], 1):
        kept = jnp.where(warp == number, part, kept)
    return kept


def _diagonal_tiles(lower, warp, row, column, lower_smem, tiles_smem):
    """Inverts the diagonal tiles of I + L.

    Args:
      lower: L, f32[C, C] in registers.
      warp: which warp holds an element, i32[C, 16].
      row, column: of an element in its tile, i32[C, 16].
      lower_smem: shared memory f16[C, C] with L.
      tiles_smem: shared memory f16[2, C, 16]. Results take turns, so that no warp
        overwrites what another still multiplies with.

    Returns:
      f32[C, 16], the tiles in the rows of their warps; and where they lie in f16.
    """
    parts = [lower[:, i * TILE : (i + 1) * TILE] for i in range(TILES)]
    # Blocks of size 2 are exact: (I + L)^-1 = I - L.
    pairs = jnp.where(_quarter(row, column, 1), -_own(warp, parts), 0.0)
    tiles = jnp.where(row == column, 1.0, pairs)
    for turn, size in enumerate((2, 4, 8)):
        smem, halves = tiles_smem.at[turn % 2], _as_f16(tiles)
        smem[...] = halves
        plgpu.commit_smem()
        diagonal = [(halves, _tile(lower_smem, i, i)) for i in range(TILES)]
        left = _as_f16(_own(warp, tc.mma_each(*diagonal)))
        inverses = [(left, _tile(smem, i)) for i in range(TILES)]
        both = _own(warp, tc.mma_each(*inverses))
        tiles = jnp.where(_quarter(row, column, size), -both, tiles)
    smem = tiles_smem.at[1]
    smem[...] = _as_f16(tiles)
    plgpu.commit_smem()
    return tiles, smem


def _unit_lower_inverse(lower, lower_smem, tiles_smem, corner_smem):
    """(I + L)^-1 for a strictly lower triangular matrix.

    Args:
      lower: L, f32[C, C] in registers.
      lower_smem: shared memory f16[C, C].
      tiles_smem: shared memory f16[2, C, 16].
      corner_smem: shared memory f16[C, 32].

    Returns:
      f32[C, C] in registers.
    """
    row, column = (
        plgpu.broadcasted_iota(jnp.int32, (CHUNK, TILE), axis, layout=tc.ROWS)
        for axis in (0, 1)
    )
    warp, row = lax.shift_right_logical(row, 4), row & (TILE - 1)
    lower_smem[...] = _as_f16(lower)
    tiles, smem = _diagonal_tiles(lower, warp, row, column, lower_smem, tiles_smem)

    # Blocks of 32 have one tile beside the diagonal, in the rows of warps 1 and 3.
    def upper_and_lower(products):
        upper, lower = products
        return jnp.where(warp < 2, upper, lower)

    firsts = (0, 2)
    products = tc.mma_each(
        *((_as_f16(tiles), _tile(lower_smem, i + 1, i)) for i in firsts)
    )
    left = _as_f16(upper_and_lower(products))
    products = tc.mma_each(*((left, _tile(smem, i)) for i in firsts))
    beside = jnp.where((warp & 1) == 1, -upper_and_lower(products), 0.0)

    # The block of 64 has four, below the corner of two times two tiles.
    def rows(number, value, otherwise):
        return jnp.where(warp == number, value, otherwise)

    columns = [
        rows(0, tiles, rows(1, beside, 0.0)),
        rows(1, tiles, 0.0),
        rows(2, tiles, rows(3, beside, 0.0)),
        rows(3, tiles, 0.0),
    ]
    for i in range(2):
        corner_smem.at[:, pl.ds(i * TILE, TILE)][...] = _as_f16(columns[i])
    left = tc.mma(
        *((_as_f16(columns[i]), _tile(lower_smem, i, wide=2)) for i in (2, 3))
    )
    plgpu.commit_smem()
    below = tc.mma((_as_f16(left), corner_smem.at[pl.ds(0, 2 * TILE)]))
    for i in range(2):
        part = below[:, i * TILE : (i + 1) * TILE]
        columns[i] = jnp.where(warp < 2, columns[i], -part)
    return jnp.concatenate(columns, axis=1)


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
    tiles_smem,
    corner_smem,
    arrived,
    *,
    shapes: Shapes,
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
    decays = (
        g_ref.at[item, inside],
        start_ref.at[row, inside],
        start_ref[row, chunk * CHUNK + (CHUNK - 1)],
    )
    total, enter, leave, start = decay_rows(*decays, index)
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
    inverse = _unit_lower_inverse(lower, lower_smem, tiles_smem, corner_smem)
    out_smem = k_smem.at[0]  # nobody reads the keys any more
    out_smem[...] = inverse.astype(out_smem.dtype)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(out_smem, inverse_ref.at[tokens, head])
    plgpu.wait_smem_to_gmem(0)


def _tiled(*shape: int) -> Any:
    """Shared memory for f16 that products read tile by tile."""
    swizzle = plgpu.SwizzleTransform(2 * TILE)
    transforms = (plgpu.TilingTransform((8, TILE)), swizzle)
    return plgpu.SMEM(shape, jnp.float16, transforms=transforms)


# Lowered once a module: calls of equal sizes, such as those of layers, share it.
@functools.partial(jax.jit, static_argnums=0)
def prepare(
    shapes: Shapes,
    k: jax.Array,
    g: jax.Array,
    beta: jax.Array,
    start: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Inverts the chunks and turns log decays into factors.

    Args:
      shapes: sizes of the call.
      k: [B T, Hk, K], bf16 or f16.
      g: f32[B Hv, T], log decay in base 2, from -160 to 0.
      beta: f32[B Hv, T].
      start: i32[B, T] from `tables.document_starts`.

    Returns:
      inverse [B T, Hv, C] of k's dtype: row i of (I + L)^-1 at token i.
      gates f32[B Hv, T / C, len(Gate), C]: what `Gate` lists, chunk by chunk.
    """
    scratch: list[Any] = [
        tc.operand(2, CHUNK, HALF, dtype=k.dtype),
        _tiled(*SQUARE),
        _tiled(2, CHUNK, TILE),
        _tiled(CHUNK, 2 * TILE),  # the corner of the last step
        plgpu.Barrier(num_arrivals=2),  # halves of the keys
    ]
    hw.check_smem(tc.shared_bytes(scratch), "pk_gdn_prepare")

    def body(*refs):
        _prepare_chunk(lax.axis_index("block"), *refs, shapes=shapes)

    return plgpu.kernel(
        body,
        out_type=(
            jax.ShapeDtypeStruct((k.shape[0], shapes.value_heads, CHUNK), k.dtype),
            jax.ShapeDtypeStruct(
                (shapes.items, shapes.chunks, len(Gate), CHUNK), jnp.float32
            ),
        ),
        grid=(shapes.items * shapes.chunks,),
        grid_names=("block",),
        scratch_types=scratch,
        kernel_name="pk_gdn_prepare",
        compiler_params=tc.params(),
    )(k, g, beta, start)
