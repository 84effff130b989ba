"""What a block of `kernel_inverse` computes, in fewer instructions.

What that kernel computes is little, so that what it takes to say it counts:

**Selections.** There the rows of all four warps are multiplied with each of four tiles,
and each warp keeps what is its own: four sums to choose from. Here they are one sum, of
products whose left side is zero in the rows of other warps,

    X_w Y_w in the rows of warp w = sum over i of (X o [rows of warp i]) Y_i,

and zeros are written two values at a time. Of L only the diagonal tiles are masked:
nobody reads what lies above them.

**Sums of decays.** What remains from a token to the chunk's exit is the difference of
two sums up to tokens, as in the decays between tokens, and no sum of its own.

**Documents.** Where none begins in a chunk, nobody asks which token is of which.

And it reads g and beta as they are, where the other has them put in order of heads, and
has one place of shared memory less.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.gated_delta_rule import tensor_core as tc
from pallas_kernels.gated_delta_rule.config_mosaic import (
    CHUNK,
    LOG2_E,
    MIN_LOG_DECAY,
    SQUARE,
)


TILE = 16  # rows of a warp, and the least that a product sums over
TILES = CHUNK // TILE


def decay_rows(g_ref, start_ref, last_start, g_smem):
    """Decay factors of a chunk's tokens, `PER_ROW` vectors.

    Args:
      g_ref: f32[C] in device memory, natural logarithms of decays, at any stride.
      start_ref: i32[C] in device memory, document starts.
      last_start: i32[], start of the last token's document.
      g_smem: shared memory f32[C].

    Returns:
      (total, enter, leave, start), f32[C] each, see `Gate`.
    """
    # As vectors, so that the rows of a thread share what depends on columns alone.
    row = plgpu.broadcasted_iota(jnp.int32, (CHUNK,), 0, layout=tc.PER_ROW)
    column = plgpu.broadcasted_iota(jnp.int32, (CHUNK,), 0, layout=tc.PER_COLUMN)
    g = jnp.maximum(tc.load_global(g_ref, tc.PER_ROW), MIN_LOG_DECAY)
    g_smem[...] = g * LOG2_E
    plgpu.commit_smem()
    g = tc.load(g_smem, tc.PER_COLUMN)
    start = tc.load_global(start_ref, tc.PER_ROW)
    so_far = tc.per_column(column, SQUARE) <= tc.per_row(row, SQUARE)

    def sums(g, so_far):
        """Of decays up to each token, and of all, `PER_ROW`."""
        every = jnp.sum(tc.per_column(g, SQUARE), axis=1)
        return jnp.sum(jnp.where(so_far, tc.per_column(g, SQUARE), 0.0), axis=1), every

    def in_documents():
        # A document's first token has nothing to decay, hence ">" and not ">=".
        later = tc.per_column(column, SQUARE) > tc.per_row(start, SQUARE)
        inside = jnp.where(column > last_start, g, 0.0)
        return sums(g, so_far & later)[0], sums(inside, so_far)[1]

    # The same sums, to the bit, if the masks leave out nothing.
    total, last = lax.cond(last_start < 0, lambda: sums(g, so_far), in_documents)
    # Rounding may leave the difference just above zero.
    leave = jnp.exp2(jnp.minimum(last - total, 0.0))
    enter = jnp.where(start < 0, jnp.exp2(total), 0.0)
    leave = jnp.where(start == last_start, leave, 0.0)
    return total, enter, leave, start.astype(jnp.float32)


def as_f16(x: jax.Array) -> jax.Array:
    return x.astype(jnp.float16)


def tile(smem: Any, row: int, column: int = 0, *, wide: int = 1) -> Any:
    """A tile of 16 rows and `wide` tiles of 16 columns."""
    return smem.at[pl.ds(row * TILE, TILE), pl.ds(column * TILE, wide * TILE)]


def quarter(row: jax.Array, column: jax.Array, size: int) -> jax.Array:
    """Whether elements lie in the lower left quarter of a diagonal block of 2 size.

    The upper right quarter counts as well: what is put there is zero.
    """
    return ((row & -size) ^ size) == (column & -size)


def unit_lower_inverse(products, beta, lower_smem, tiles_smem):
    """(I + strictLower(diag(beta) products))^-1.

    Args:
      products: f32[C, C] in registers.
      beta: f32[C], `PER_ROW`.
      lower_smem: shared memory f16[C, C].
      tiles_smem: shared memory f16[3, C, 16]. The last is for the diagonal tiles of L;
        inverses take turns in the others, so that no warp overwrites what another still
        multiplies with.

    Returns:
      f32[C, C] in registers.
    """
    row, column = (
        plgpu.broadcasted_iota(jnp.int32, (CHUNK, TILE), axis, layout=tc.ROWS)
        for axis in (0, 1)
    )
    warp, row = lax.shift_right_logical(row, 4), row & (TILE - 1)
    own = [(warp == i).astype(jnp.float16) for i in range(TILES)]

    def product(left, right):
        """left_w right_w in the rows of each warp w, f32[C, 16]."""
        return tc.mma(*((left * own[i], tile(right, i)) for i in range(TILES)))

    left_of_last = (TILES - 1) * TILE  # nobody reads the last column of tiles
    lower = products[:, :left_of_last] * tc.per_row(beta, (CHUNK, left_of_last))
    lower_smem.at[:, pl.ds(0, left_of_last)][...] = as_f16(lower)
    diagonal = products[:, :TILE]
    for i in range(1, TILES):
        part = products[:, i * TILE : (i + 1) * TILE]
        diagonal = jnp.where(warp == i, part, diagonal)
    diagonal = diagonal * tc.per_row(beta, (CHUNK, TILE))
    diagonal = jnp.where(column < row, diagonal, 0.0)
    diagonal_smem = tiles_smem.at[2]
    diagonal_smem[...] = as_f16(diagonal)

    # Blocks of size 2 are exact: (I + L)^-1 = I - L.
    pairs = jnp.where(quarter(row, column, 1), -diagonal, 0.0)
    tiles = jnp.where(row == column, 1.0, pairs)
    for turn, size in enumerate((2, 4, 8)):
        smem, halves = tiles_smem.at[turn % 2], as_f16(tiles)
        smem[...] = halves
        plgpu.commit_smem()
        left = as_f16(product(halves, diagonal_smem))
        tiles = jnp.where(quarter(row, column, size), -product(left, smem), tiles)
    smem, halves = tiles_smem.at[1], as_f16(tiles)
    smem[...] = halves
    plgpu.commit_smem()

    # Blocks of 32 have one tile beside the diagonal, in the rows of warps 1 and 3.
    firsts = (0, 2)
    left = tc.mma(*((halves * own[i + 1], tile(lower_smem, i + 1, i)) for i in firsts))
    left = as_f16(left)
    beside = -tc.mma(*((left * own[i + 1], tile(smem, i)) for i in firsts))

    # The block of 64 has four, in the rows of warps 2 and 3. What the others compute
    # on the way is left out at the end.
    beside_halves = as_f16(beside)
    corner = tiles_smem.at[0], tiles_smem.at[2]  # nobody multiplies with them any more
    corner[0][...] = halves * own[0] + beside_halves
    corner[1][...] = halves * own[1]
    columns = halves * own[2] + beside_halves, halves * own[3]
    left = tc.mma(*((x, tile(lower_smem, i, wide=2)) for i, x in enumerate(columns, 2)))
    left = as_f16(-left)
    plgpu.commit_smem()
    upper = pl.ds(0, 2 * TILE)
    first, second = tc.mma_each(*((left, x.at[upper]) for x in corner))

    def rows(number, value, otherwise):
        return jnp.where(warp == number, value, otherwise)

    return jnp.concatenate(
        [
            rows(0, tiles, rows(1, beside, first)),
            rows(1, tiles, rows(0, 0.0, second)),
            rows(2, tiles, rows(3, beside, 0.0)),
            rows(3, tiles, 0.0),
        ],
        axis=1,
    )
