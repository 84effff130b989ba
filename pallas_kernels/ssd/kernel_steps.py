"""Mosaic GPU kernel that ends the gradients of step sizes, rates and the skip.

`kernel_grads` leaves, head by head, what each token's sum of decays gets. The decay of
a token m is in the sums of all tokens from it on in its document, and in all that
reaches the chunk's exit if m's document does:

    dg_m = sum of d_total_i over i >= m of m's document + (sum of exits)

The former are the sums of `kernel_prepare` the other way round, and they run over the
same tokens in all heads: a block has a chunk of 64 heads and multiplies numbers that
are cut into three of 16 bits with a matrix of zeros and ones. With it are the decay
g = s a and the step s = clip(softplus(dt + dt_bias)) differentiated:

    ddt = (ds + a dg) s'        da = sum of s dg        ddt_bias = sum of ddt

A block has all that these sums take from its chunk, so it adds it up, and dd too; what
is left to add is a number for each chunk and head. s' is a function of s: 1 - e^-s, and
zero where s is clipped. On padding s is zero, and so is s'.
"""

from __future__ import annotations

import functools
import math
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
from pallas_kernels.ssd.config_mosaic import HEAD_TILE, Shapes
from pallas_kernels.ssd.kernel_prepare import PARTS, HeadTile, cut


BY_HEAD = ("d_total", "exits", "dstep", "dd")
SUMS = ("da", "dbias", "dd")
# 1 - e^-s = s - s^2 / 2 + ... as far as it matters below the largest of small steps,
# where the difference would lose bits.
SMALL_STEP = 0.25
_SERIES = tuple((-1.0) ** i / math.factorial(i + 1) for i in range(6))


def slope(step: jax.Array, dt_limit: tuple[float, float]) -> jax.Array:
    """Derivative of `step_sizes`, of what it gives."""
    series = jnp.full_like(step, _SERIES[-1])
    for factor in _SERIES[-2::-1]:
        series = series * step + factor
    found = jnp.where(step < SMALL_STEP, series * step, 1.0 - jnp.exp(-step))
    low, high = dt_limit
    if low > 0:
        found = jnp.where(step > low, found, 0.0)
    if high < math.inf:
        found = jnp.where(step < high, found, 0.0)
    return found


def _steps_kernel(
    total_ref,
    exits_ref,
    dstep_ref,
    dd_ref,
    gates_ref,
    rate_ref,
    ddt_out,
    *sums_out,
    parts,
    ones,
    reached,
    ready,
    staging,
    shapes: Shapes,
    dt_limit: tuple[float, float],
):
    place = HeadTile(shapes)
    item, chunk = place.items.start, place.chunk
    by_head = (place.items, pl.ds(chunk * CHUNK, CHUNK))
    sums = dict(zip(SUMS, sums_out, strict=True))
    token = tc.square_indices(CHUNK)
    warpgroup = lax.axis_index("warpgroup")

    def add_up(name: str, terms: jax.Array) -> None:
        sums[name].at[place.block, place.heads][...] = jnp.sum(terms, axis=1)

    @pl.when(warpgroup == 0)
    def _():
        # All at once, for nothing here takes as long as to wait for them.
        total = tc.load_global(total_ref.at[by_head])
        dstep = tc.load_global(dstep_ref.at[by_head])
        step = tc.load_global(gates_ref.at[place.items, chunk, Gate.BETA])
        rate = tc.load_global(rate_ref.at[place.heads], tc.PER_ROW)
        start = gates_ref[item, chunk, Gate.START, CHUNK - 1]
        cut(total, parts)
        plgpu.commit_smem()
        plgpu.barrier_wait(ready)
        dg = tc.mma(*((parts.at[i], ones.T) for i in range(PARTS)))
        exits = tc.per_row(tc.load(reached, tc.PER_ROW), SQUARE)
        dg = dg + jnp.where(token[1] > start.astype(jnp.int32), exits, 0.0)
        rate = tc.per_row(rate, SQUARE)
        # Where the decay is at its floor it is a constant.
        dg = jnp.where(step * rate < MIN_LOG_DECAY, 0.0, dg)
        ddt = (dstep + dg * rate) * slope(step, dt_limit)
        tc.store_transposed(staging, ddt)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(staging, ddt_out.at[place.by_token])
        add_up("da", dg * step)
        add_up("dbias", ddt)
        plgpu.wait_smem_to_gmem(0)

    @pl.when(warpgroup == 1)
    def _():
        start = gates_ref.at[item, chunk, Gate.START]
        starts = tc.load_global(start, tc.PER_COLUMN).astype(jnp.int32)
        exits = tc.load_global(exits_ref.at[by_head])
        dd = tc.load_global(dd_ref.at[by_head])
        # Of a token's row the tokens whose sums its decay is in: not of a document's
        # first one, which decays nothing.
        own, other = token
        mask = (own <= other) & (own > tc.per_column(starts, SQUARE))
        ones[...] = jnp.where(mask, 1.0, 0.0).astype(jnp.bfloat16)
        reached[...] = jnp.sum(exits, axis=1)
        plgpu.commit_smem()
        plgpu.barrier_arrive(ready)
        add_up("dd", dd)


# Lowered once a module: calls of equal sizes, such as those of layers, share it.
@functools.partial(jax.jit, static_argnums=(0, 1))
def step_gradients(
    shapes: Shapes,
    dt_limit: tuple[float, float],
    grads: dict[str, jax.Array],
    gates: jax.Array,
    rate: jax.Array,
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Ends what `chunk_grads` began.

    Args:
      shapes: sizes of the call.
      dt_limit: of `step_sizes`.
      grads: `BY_HEAD` of `chunk_grads`, f32[B H', T].
      gates: as `prepare` gives them.
      rate: f32[H'], a.

    Returns:
      The gradient of dt f32[B T, H'], by token; and those of a, dt_bias and d by
      chunk, f32[B T / C, H'], whose sums over chunks they are. Heads behind H have no
      meaning.
    """
    scratch: dict[str, Any] = {
        "parts": tc.operand(PARTS, HEAD_TILE, CHUNK, dtype=jnp.bfloat16),
        "ones": tc.operand(*SQUARE, dtype=jnp.bfloat16),
        "reached": plgpu.SMEM((HEAD_TILE,), jnp.float32),
        "ready": plgpu.Barrier(num_arrivals=1),
        "staging": plgpu.SMEM((CHUNK, HEAD_TILE), jnp.float32),
    }
    hw.check_smem(tc.shared_bytes(scratch), "pk_ssd_steps")
    tokens = shapes.batch * shapes.time

    def table(rows: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((rows, shapes.padded_heads), jnp.float32)

    ddt, *sums = plgpu.kernel(
        functools.partial(_steps_kernel, shapes=shapes, dt_limit=dt_limit),
        out_type=(table(tokens), *(table(tokens // CHUNK) for _ in SUMS)),
        grid=(HeadTile.count(shapes),),
        grid_names=("block",),
        num_threads=2,
        thread_name="warpgroup",
        scratch_types=scratch,
        kernel_name="pk_ssd_steps",
        compiler_params=tc.params(auto_barriers=not shapes.backward),
    )(*(grads[name] for name in BY_HEAD), gates, rate)
    return ddt, dict(zip(SUMS, sums, strict=True))
