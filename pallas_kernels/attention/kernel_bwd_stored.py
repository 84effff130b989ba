"""Mosaic GPU kernels of a backward pass that computes the scores once.

The dk, dv kernel of `kernel_bwd` also writes, in 16 bits, each tile of

    dS = P o (dO V^T - delta)

that it computes, and the dq kernel is the block-sparse product dQ = scale dS K: five
products in all, and dS goes to device memory and back. Only visited tiles have a place
there: `TileBounds.first_pair` says where. A tile is written as it is in registers, 64
keys by 64 queries, and read as the transposed operand of a wgmma.

A block of the dq kernel has 64 queries for each of its computing warpgroups, of some
query heads of one kv head, which share the tiles of K that one warpgroup copies. Each
warpgroup skips the tiles that its own queries do not see: they were not written. The
sums have one fixed order and no atomics.

dS of some rows and kv heads is alive at a time (`Parts`): parts follow one another,
each with both kernels. How many pairs a row has at most follows from its length; how
many documents leave of them is known on the device alone (`parts_for_documents`).

Source: FlashAttention-2 (arXiv 2307.08691), section 3.1.2, whose sum over blocks of
keys by atomics this replaces.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels._common import hw
from pallas_kernels.attention import tensor_core as tc
from pallas_kernels.attention.config_mosaic import REGISTERS, ROWS
from pallas_kernels.attention.kernel_bwd import (
    DKV_WARPGROUPS,
    Place,
    dkv_kernel,
    dkv_scratch,
    meet_warps,
)
from pallas_kernels.attention.kernel_fwd import Plan, drain, launch, work_item
from pallas_kernels.attention.tiles import TILE, TileBounds, most_first


# Registers per thread that sums of dq may take, by the number of computing warpgroups.
_SUMS = {2: 128, 3: 64}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Parts:
    """What dS are kept of at a time.

    Attributes:
      rows, kv_heads: of a part; divisors of B and G.
      pairs: places per row and query head, each for a block of keys and 64 queries.
    """

    rows: int
    kv_heads: int
    pairs: int

    def count(self, plan: Plan) -> int:
        """How many parts there are."""
        return plan.batch // self.rows * (plan.kv_heads // self.kv_heads)

    def scores(self, plan: Plan) -> jax.ShapeDtypeStruct:
        """The tiles of dS^T of a part: [places, 64 keys, 64 queries].

        The place of a tile is, from the outside in, that of its query head in the
        part, of its row, of its pair and of the 64 keys in their block.
        """
        heads = self.kv_heads * plan.group
        tiles = heads * self.rows * self.pairs * (plan.config.block_kv // ROWS)
        return jax.ShapeDtypeStruct((tiles, ROWS, TILE), plan.dtype)


def _largest_divisor(number: int, most: int) -> int:
    return max(d for d in range(1, min(number, most) + 1) if number % d == 0)


def parts_of(plan: Plan, bounds: TileBounds) -> Parts | None:
    """The largest parts whose dS are within `scores_bytes`.

    Args:
      plan: sizes of the call.
      bounds: of its mask.

    Returns:
      The parts, `None` where one row and kv head can have more.
    """
    one = Parts(rows=1, kv_heads=1, pairs=bounds.most_pairs)
    fit = _how_often(plan, one)
    if not fit:
        return None
    kv_heads = _largest_divisor(plan.kv_heads, fit)
    rows = 1
    if kv_heads == plan.kv_heads:
        rows = _largest_divisor(plan.batch, fit // kv_heads)
    return dataclasses.replace(one, rows=rows, kv_heads=kv_heads)


def parts_for_documents(plan: Plan, bounds: TileBounds) -> Parts | None:
    """A row each with as many pairs as `scores_bytes` allow.

    A row without documents has the `most_pairs` that `parts_of` counts with. One with
    documents has far fewer: `bounds.pairs`, which only the device knows.

    Args:
      plan: sizes of the call.
      bounds: of its mask.

    Returns:
      The parts, `None` where there are no documents.
    """
    pair = Parts(rows=1, kv_heads=plan.kv_heads, pairs=1)
    fit = _how_often(plan, pair)
    if not fit or not bounds.documents:
        return None
    return dataclasses.replace(pair, pairs=min(fit, bounds.most_pairs))


def _how_often(plan: Plan, parts: Parts) -> int:
    """How many times the dS of a part are within `scores_bytes`."""
    scores = parts.scores(plan)
    return plan.config.scores_bytes // (math.prod(scores.shape) * scores.dtype.itemsize)


def _tile_at(plan, parts, *, row, head, pair, half):
    """Place of a tile of dS^T; arguments are as in `Parts.scores`."""
    pair = (head * parts.rows + row) * parts.pairs + pair
    return pair * (plan.config.block_kv // ROWS) + half


def _dkv_kernel(refs, smem, *, plan, parts):
    halves = plan.config.block_kv // ROWS
    slots = plan.config.scores_slots

    def keep(place: Place):
        first = _tile_at(
            plan,
            parts,
            row=place.row,
            head=place.kv_head * plan.group,
            pair=refs["first_pair"][place.row_in, place.block],
            half=0,
        )

        def keep_tile(warpgroup, n, head, tile, d_scores):
            # Without halves only warpgroup 0 has dS.
            half = warpgroup if halves == DKV_WARPGROUPS else 0
            slot = lax.rem(n, jnp.int32(slots)) if slots > 1 else 0
            staged = smem["scores"].at[half, slot]
            at = (head * (parts.rows * parts.pairs) + tile) * halves + half
            plgpu.wait_smem_to_gmem(slots - 1, wait_read_only=True)
            staged[...] = d_scores
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(staged, refs["scores"].at[first + at])

        return keep_tile

    dkv_kernel(refs, smem, plan=plan, kv_heads=parts.kv_heads, keep=keep)


def dkv_stored(
    plan: Plan, parts: Parts, inputs: dict[str, jax.Array]
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Launches the dk, dv kernel that writes dS.

    Args:
      plan: sizes of the call.
      parts: sizes of a part.
      inputs: as for `attention_dkv`, and first_pair i32[B, kv_blocks]; origin i32[2]
        of the part if it is not all, with an order i32[rows kv_blocks] of its own.

    Returns:
      dk and dv of the part, [rows, S', kv_heads, K], of the first `kv_blocks` blocks;
      its dS^T, as `Parts.scores` says.
    """
    config = plan.config
    halves = config.block_kv // ROWS
    scratch = dkv_scratch(plan)
    scratch["scores"] = tc.operand(
        *(halves, config.scores_slots, ROWS, TILE), dtype=plan.dtype
    )
    length = inputs["k"].shape[1]
    out = jax.ShapeDtypeStruct(
        (parts.rows, length, parts.kv_heads, plan.head_dim), plan.dtype
    )
    return launch(
        functools.partial(_dkv_kernel, plan=plan, parts=parts),
        "pk_attention_dkv_stored",
        inputs,
        {"dk": out, "dv": out, "scores": parts.scores(plan)},
        blocks=parts.rows * plan.kv_blocks * parts.kv_heads,
        registers=REGISTERS[DKV_WARPGROUPS],
        scratch=scratch,
        auto_barriers=False,
    )


def _heads_of_block(plan: Plan) -> int:
    """Query heads of one kv head that a block of the dq kernel has."""
    fit = _SUMS[plan.config.warpgroups] // (plan.head_dim // 2)
    return math.gcd(plan.group, max(1, min(fit, plan.config.scores_heads)))


def _dq_kernel(refs, smem, *, plan, parts, stages):
    config = plan.config
    count, heads = config.warpgroups, _heads_of_block(plan)
    halves = config.block_kv // ROWS
    warpgroup = lax.axis_index("warpgroup")
    ring = smem["ring"]
    row_out, block, first_head = work_item(
        refs["order"],
        lax.axis_index("block"),
        parts.kv_heads * plan.group // heads,
        plan.q_blocks,
    )
    first_head = first_head * heads
    kv_head = lax.div(first_head, jnp.int32(plan.group))
    row = row_out
    if (origin := refs.get("origin")) is not None:
        row, kv_head = row + origin[0], kv_head + origin[1]

    def seen_by(w):
        """Tiles of keys of a warpgroup's queries."""
        return tuple(refs["tile_keys"][row, block * count + w, i] for i in range(2))

    # A tile of queries that sees nothing has 0 and 0: it does not count.
    far = jnp.int32(jnp.iinfo(jnp.int32).max)
    first, stop = far, jnp.int32(0)
    seen = [seen_by(w) for w in range(count)]
    for low, high in seen:
        first = jnp.minimum(first, lax.select(high > low, low, far))
        stop = jnp.maximum(stop, high)
    first = jnp.minimum(first, stop)

    @pl.when(warpgroup == count)
    def _():
        plgpu.set_max_registers(REGISTERS[count][-1], action="decrease")

        def step(i, carry):
            tile = first + i
            slot = lax.rem(i, jnp.int32(stages))
            key_block, half = tc.split_index(tile, halves)
            first_pair = refs["first_pair"][row, key_block]

            @pl.when(i >= stages)
            def _():
                plgpu.barrier_wait(ring["free"].at[slot])

            full = ring["full"].at[slot]
            keys = refs["k"].at[row, pl.ds(tile * TILE, TILE), kv_head]
            plgpu.copy_gmem_to_smem(keys, ring["k"].at[slot], full)
            for w, (low, high) in enumerate(seen):
                pair = first_pair + block * count + w
                # What is not seen was not written: anything may be copied instead.
                pair = lax.select((tile >= low) & (tile < high), pair, jnp.int32(0))
                for h in range(heads):
                    at = _tile_at(
                        plan,
                        parts,
                        row=row_out,
                        head=first_head + h,
                        pair=pair,
                        half=half,
                    )
                    target = ring["scores"].at[slot, w * heads + h]
                    plgpu.copy_gmem_to_smem(refs["scores"].at[at], target, full)
            meet_warps()
            return carry

        lax.fori_loop(0, stop - first, step, None)
        drain(ring, stop - first, stages)

    @pl.when(warpgroup < count)
    def _():
        plgpu.set_max_registers(REGISTERS[count][0], action="increase")
        low, high = seen_by(warpgroup)
        low = jnp.clip(low, first, stop)
        high = jnp.maximum(low, high)

        def skip(i, carry):
            slot = lax.rem(i, jnp.int32(stages))
            plgpu.barrier_wait(ring["full"].at[slot])
            tc.give_back(ring["free"].at[slot])
            return carry

        def step(i, sums):
            slot = lax.rem(i, jnp.int32(stages))
            plgpu.barrier_wait(ring["full"].at[slot])
            keys = ring["k"].at[slot]

            def body(*totals):
                for h, total in enumerate(totals):
                    scores = ring["scores"].at[slot, warpgroup * heads + h]
                    tc.mma(total, scores.T, keys)
                last = len(totals) - 1
                return tuple(tc.read(x, last - h) for h, x in enumerate(totals))

            sums = tc.accumulate(body, *sums)
            tc.give_back(ring["free"].at[slot])
            return sums

        zero = tc.full((ROWS, plan.head_dim), 0.0, tc.MATRIX)
        lax.fori_loop(0, low - first, skip, None)
        sums = lax.fori_loop(low - first, high - first, step, (zero,) * heads)
        lax.fori_loop(high - first, stop - first, skip, None)
        rows = pl.ds(block * config.block_q + warpgroup * ROWS, ROWS)
        staged = smem["dq"].at[warpgroup]
        for h, value in enumerate(sums):
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            staged[...] = (value * plan.scale).astype(plan.dtype)
            plgpu.commit_smem()
            target = refs["dq"].at[row_out, rows, first_head + h]
            plgpu.copy_smem_to_gmem(staged, target)
        plgpu.wait_smem_to_gmem(0)


def dq_stored(plan: Plan, parts: Parts, inputs: dict[str, jax.Array]) -> jax.Array:
    """Launches the dq kernel that reads dS.

    Args:
      plan: sizes of the call.
      parts: sizes of a part.
      inputs: k [B, S', G, K]; scores, the dS^T of `dkv_stored`; first_pair
        i32[B, kv_blocks]; tile_keys i32[B, T' / 64, 2]; order i32[rows q_blocks]; the
        part's origin i32[2] if it is not all.

    Returns:
      dq of the part, [rows, T', heads, K].
    """
    config, dim, dtype = plan.config, plan.head_dim, plan.dtype
    count, heads = config.warpgroups, _heads_of_block(plan)
    staged = tc.operand(count, ROWS, dim, dtype=dtype)

    def scratch(stages):
        return {
            "dq": staged,
            "ring": {
                "k": tc.operand(stages, TILE, dim, dtype=dtype),
                "scores": tc.operand(stages, count * heads, ROWS, TILE, dtype=dtype),
                "full": plgpu.Barrier(
                    num_arrivals=1 + count * heads, num_barriers=stages
                ),
                "free": plgpu.Barrier(num_arrivals=count, num_barriers=stages),
            },
        }

    fixed = tc.shared_bytes({"dq": staged})
    a_stage = tc.shared_bytes(scratch(2)) - tc.shared_bytes(scratch(1))
    fit = (hw.device().smem_bytes - fixed) // a_stage
    stages = max(1, min(config.scores_stages, fit))
    all_heads = parts.kv_heads * plan.group
    time = plan.q_blocks * config.block_q
    (dq,) = launch(
        functools.partial(_dq_kernel, plan=plan, parts=parts, stages=stages),
        "pk_attention_dq_stored",
        inputs,
        {"dq": jax.ShapeDtypeStruct((parts.rows, time, all_heads, dim), dtype)},
        blocks=parts.rows * plan.q_blocks * (all_heads // heads),
        registers=REGISTERS[count],
        scratch=scratch(stages),
        auto_barriers=False,
    )
    return dq


@functools.partial(jax.jit, static_argnums=(0, 1))
def gradients(
    plan: Plan, parts: Parts, inputs: dict[str, jax.Array], bounds: TileBounds
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """dq, dk and dv, part by part.

    Args:
      plan: sizes of the call.
      parts: of `parts_of` or `parts_for_documents`.
      inputs: as for `attention_dq`, without tables.
      bounds: of the mask.

    Returns:
      dq like q; dk and dv like k and v, of the first `kv_blocks` blocks.
    """
    shared = {"first_pair": bounds.first_pair}

    def one(origin: jax.Array | None) -> tuple[jax.Array, jax.Array, jax.Array]:
        q_order, kv_order = bounds.q_order, bounds.kv_order
        of_part: dict[str, Any] = dict(shared)
        if origin is not None:
            of_part["origin"] = origin
            if parts.rows < plan.batch:
                q_order, kv_order = (
                    most_first(lax.dynamic_slice_in_dim(x, origin[0], parts.rows))
                    for x in (bounds.q_tiles, bounds.kv_tiles)
                )
        tables = {"tiles": bounds.kv_tiles, "order": kv_order}
        dk, dv, scores = dkv_stored(plan, parts, inputs | of_part | tables)
        tables = {"tile_keys": bounds.tile_keys, "order": q_order}
        dq = dq_stored(
            plan, parts, {"k": inputs["k"], "scores": scores} | of_part | tables
        )
        return dq, dk, dv

    if parts.count(plan) == 1:
        return one(None)
    rows = jnp.arange(0, plan.batch, parts.rows, dtype=jnp.int32)
    heads = jnp.arange(0, plan.kv_heads, parts.kv_heads, dtype=jnp.int32)
    origins = jnp.stack(jnp.meshgrid(rows, heads, indexing="ij"), -1).reshape(-1, 2)

    def whole(x):
        """[parts, rows, T, heads, K] as [B, T, H, K]."""
        x = x.reshape(len(rows), len(heads), *x.shape[1:])
        x = jnp.transpose(x, (0, 2, 3, 1, 4, 5))
        return x.reshape(plan.batch, x.shape[2], -1, plan.head_dim)

    # One after another: dS of two parts are never alive together.
    return jax.tree.map(whole, lax.map(one, origins))
