"""Mosaic GPU kernels of the backward pass: dq by queries, dk and dv by keys.

Both compute the weights again from the base 2 logarithm L of each query's sums,

    P = exp2(S c - L)      dS = P o (dO V^T - delta)      delta = rowsum(dO o O)

(with a factor 1 - tanh^2 under a soft cap), and each sums in registers in one fixed
order, without atomics:

    dQ = scale dS K        over the tiles of keys that a block of queries visits
    dK = scale dS^T Q      over the query heads of a group and the tiles of queries
    dV = P^T dO            that see a block of keys

The second kernel works on transposed tiles, S^T = K Q^T, so that both sums have their
rows in the warpgroup that has the weights in registers. For head dim 256 the sums of
64 keys fill the registers of two warpgroups: one has dK, the other dV, and both
compute P (`block_kv = 64`).

Source: FlashAttention-2 (arXiv 2307.08691), section 3.1.2; split in two kernels
because a sum over blocks of keys has no fixed order within one.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.attention import tensor_core as tc
from pallas_kernels.attention.config_mosaic import REGISTERS, ROWS
from pallas_kernels.attention.kernel_fwd import (
    Plan,
    capped,
    copy_tile,
    drain,
    in_turn,
    launch,
    span,
    work_item,
)


LSE, DELTA = 0, 1  # rows of the table of what a query has
START, STOP = 0, 1  # rows of the table of intervals
DKV_WARPGROUPS = 2


def _weights(
    plan: Plan, scores: jax.Array, lse: jax.Array, allowed: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    """P, and what dP - delta is multiplied with: P too, or P and the cap's slope."""
    scores, ratio = capped(plan, scores)
    if allowed is not None:
        scores = jnp.where(allowed, scores, -jnp.inf)
    p = jnp.exp2(scores * plan.exponent - lse)
    return p, p if ratio is None else p * (1.0 - ratio * ratio)


def _unknown_zero(plan: Plan, step: jax.Array) -> jax.Array | int:
    """Zero; where registers are short, without the compiler knowing it.

    Addresses that depend on it are computed where they are used. Known ones would all
    be computed before the loop and be spilled there.
    """
    stores = plan.config.backward == "stored" and plan.head_dim == 128
    short = plan.head_dim == 256 or plan.logit_cap is not None or stores
    return jnp.minimum(step, 0) if short else 0


def _attention_dq_kernel(refs, smem, *, plan):
    config = plan.config
    count = config.warpgroups
    warpgroup = lax.axis_index("warpgroup")
    ring, slots = smem["ring"], config.dq_slots
    row, block, head = work_item(
        refs["order"], lax.axis_index("block"), plan.heads, plan.q_blocks
    )
    steps = span(refs["tiles"], row, block, config.dq_step_kv)

    def rows_of(w):
        return pl.ds(block * config.block_q + w * ROWS, ROWS)

    @pl.when(warpgroup == count)
    def _():
        plgpu.set_max_registers(REGISTERS[count][-1], action="decrease")
        kv_head = lax.div(head, jnp.int32(plan.group))
        for w in range(count):
            for name in ("q", "do"):
                source = refs[name].at[row, rows_of(w), head]
                plgpu.copy_gmem_to_smem(source, smem[name].at[w], smem["arrived"])

        def step(i, carry):
            keys = pl.ds(steps.at(i) * config.dq_step_kv, config.dq_step_kv)
            for offset, name in enumerate(("k", "v")):
                source = refs[name].at[row, keys, kv_head]
                copy_tile(ring, 2 * i + offset, slots, [("tile", source)])
            return carry

        lax.fori_loop(0, steps.count, step, None)
        drain(ring, 2 * steps.count, slots)

    @pl.when(warpgroup < count)
    def _():
        plgpu.set_max_registers(REGISTERS[count][0], action="increase")
        rows = rows_of(warpgroup)
        shape = (ROWS, config.dq_step_kv)
        low, high, lse, delta = (
            tc.per_row(tc.load_global(x, tc.PER_ROW), shape)
            for x in (
                refs["intervals"].at[row, START, rows],
                refs["intervals"].at[row, STOP, rows],
                refs["stats"].at[row, head, LSE, rows],
                refs["stats"].at[row, head, DELTA, rows],
            )
        )
        plgpu.barrier_wait(smem["arrived"])

        def step(i, acc, masked):
            k_slot, v_slot = (lax.rem(2 * i + x, jnp.int32(slots)) for x in range(2))
            allowed = None
            if masked:
                key = tc.index(shape, 1) + steps.at(i) * config.dq_step_kv
                allowed = (key >= low) & (key < high)
            plgpu.barrier_wait(ring["full"].at[k_slot])
            plgpu.barrier_wait(ring["full"].at[v_slot])
            k, v = ring["tile"].at[k_slot], ring["tile"].at[v_slot]
            place = warpgroup + _unknown_zero(plan, steps.at(i))
            q, do = smem["q"].at[place], smem["do"].at[place]

            def body(scores, d_weights, dq):
                tc.mma(scores, q, k.T)
                tc.mma(d_weights, do, v.T)
                _, factor = _weights(plan, tc.read(scores, pending=1), lse, allowed)
                d_scores = factor * (tc.read(d_weights) - delta)
                tc.give_back(ring["free"].at[v_slot])
                tc.mma(dq, d_scores.astype(plan.dtype), k)
                return tc.read(dq)

            acc = tc.accumulate(body, shape, shape, acc)
            tc.give_back(ring["free"].at[k_slot])
            return acc

        acc = tc.full((ROWS, plan.head_dim), 0.0, tc.MATRIX)
        acc = in_turn(steps, step, acc)
        q = smem["q"].at[warpgroup]
        q[...] = (acc * plan.scale).astype(plan.dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(q, refs["dq"].at[row, rows, head])
        plgpu.wait_smem_to_gmem(0)


def _dkv_step(plan, smem, keys, slot, low_key, masked):
    """What a warpgroup of the dk, dv kernel needs in a step.

    Args:
      smem: as scratch of `attention_dkv`.
      keys: which of the places of k and v.
      slot: of the ring.
      low_key: index of the first key of the warpgroup.
      masked: whether the step needs the mask.

    Returns:
      A function of S^T that gives what `_weights` does, and the operands.
    """
    ring = smem["ring"]
    shape = (ROWS, plan.config.dkv_step_q)

    def column(name, row):
        vector = tc.load(ring[name].at[slot, row], tc.PER_COLUMN)
        return tc.per_column(vector, shape)

    def weights(scores):
        allowed = None
        if masked:
            key = tc.index(shape, 0) + low_key
            allowed = (key >= column("intervals", START)) & (
                key < column("intervals", STOP)
            )
        return _weights(plan, scores, column("stats", LSE), allowed)

    return weights, {
        "k": smem["k"].at[keys],
        "v": smem["v"].at[keys],
        "q": ring["q"].at[slot],
        "do": ring["do"].at[slot],
        "delta": functools.partial(column, "stats", DELTA),
    }


def _both_sums(plan, smem, keys, low_key, each_step):
    """dK and dV of 64 keys in one warpgroup."""
    shape = (ROWS, plan.config.dkv_step_q)

    def step(slot, zero, sums, masked, keep):
        weights, of = _dkv_step(plan, smem, keys + zero, slot, low_key, masked)

        def body(scores, d_weights, dk, dv):
            tc.mma(scores, of["k"], of["q"].T)
            tc.mma(d_weights, of["v"], of["do"].T)
            p, factor = weights(tc.read(scores, pending=1))
            tc.mma(dv, p.astype(plan.dtype), of["do"])
            d_weights = tc.read(d_weights, pending=1)
            d_scores = (factor * (d_weights - of["delta"]())).astype(plan.dtype)
            tc.mma(dk, d_scores, of["q"])
            keep(d_scores)
            return tc.read(dk), tc.read(dv)

        return tc.accumulate(body, shape, shape, *sums)

    zero = tc.full((ROWS, plan.head_dim), 0.0, tc.MATRIX)
    return each_step(step, (zero, zero))


def _sum_of_dv(plan, smem, low_key, each_step):
    shape = (ROWS, plan.config.dkv_step_q)

    def step(slot, zero, dv, masked, keep):
        del keep  # dS is the other warpgroup's.
        weights, of = _dkv_step(plan, smem, zero, slot, low_key, masked)

        def body(scores, dv):
            tc.mma(scores, of["k"], of["q"].T)
            p, _ = weights(tc.read(scores))
            tc.mma(dv, p.astype(plan.dtype), of["do"])
            return tc.read(dv)

        return tc.accumulate(body, shape, dv)

    return each_step(step, tc.full((ROWS, plan.head_dim), 0.0, tc.MATRIX))


def _sum_of_dk(plan, smem, low_key, each_step):
    shape = (ROWS, plan.config.dkv_step_q)

    def step(slot, zero, dk, masked, keep):
        weights, of = _dkv_step(plan, smem, zero, slot, low_key, masked)

        def body(scores, d_weights, dk):
            tc.mma(scores, of["k"], of["q"].T)
            tc.mma(d_weights, of["v"], of["do"].T)
            _, factor = weights(tc.read(scores, pending=1))
            d_weights = tc.read(d_weights)
            d_scores = (factor * (d_weights - of["delta"]())).astype(plan.dtype)
            tc.mma(dk, d_scores, of["q"])
            keep(d_scores)
            return tc.read(dk)

        return tc.accumulate(body, shape, shape, dk)

    return each_step(step, tc.full((ROWS, plan.head_dim), 0.0, tc.MATRIX))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Place:
    """Which part of dk and dv a block has.

    Attributes:
      row, kv_head: of the outputs.
      row_in, kv_head_in: of the inputs, whose parts the outputs may be.
      block: of keys.
    """

    row: jax.Array
    kv_head: jax.Array
    row_in: jax.Array
    kv_head_in: jax.Array
    block: jax.Array


def dkv_kernel(refs, smem, *, plan, kv_heads, keep=None):
    """The body of the dk, dv kernel.

    Args:
      refs: as inputs and outputs of `attention_dkv`; origin i32[2] too if the outputs
        have some rows and kv heads only, the first row and kv head.
      smem: its scratch.
      plan: sizes of the call.
      kv_heads: those of the outputs.
      keep: if given, keep(place) is called once by each warpgroup that computes, and
        what it returns as f(warpgroup, n, head, tile, dS^T) for the n-th tile of 64
        keys and 64 queries, `head` being that of the group.
    """
    config = plan.config
    warpgroup = lax.axis_index("warpgroup")
    ring, stages = smem["ring"], config.dkv_stages
    halves = config.block_kv // ROWS
    row_out, block, head_out = work_item(
        refs["order"], lax.axis_index("block"), kv_heads, plan.kv_blocks
    )
    row, kv_head = row_out, head_out
    if (origin := refs.get("origin")) is not None:
        row, kv_head = row + origin[0], kv_head + origin[1]
    place = Place(
        row=row_out, kv_head=head_out, row_in=row, kv_head_in=kv_head, block=block
    )
    steps = span(refs["tiles"], row, block, config.dkv_step_q)
    registers = REGISTERS[DKV_WARPGROUPS]

    def keys_of(half):
        return pl.ds(block * config.block_kv + half * ROWS, ROWS)

    @pl.when(warpgroup == DKV_WARPGROUPS)
    def _():
        plgpu.set_max_registers(registers[-1], action="decrease")
        for half in range(halves):
            for name in ("k", "v"):
                source = refs[name].at[row, keys_of(half), kv_head]
                plgpu.copy_gmem_to_smem(source, smem[name].at[half], smem["arrived"])

        def of_head(r, carry):
            head = kv_head * plan.group + r

            def step(i, carry):
                rows = pl.ds(steps.at(i) * config.dkv_step_q, config.dkv_step_q)
                sources = (
                    ("q", refs["q"].at[row, rows, head]),
                    ("do", refs["do"].at[row, rows, head]),
                    ("stats", refs["stats"].at[row, head, :, rows]),
                    ("intervals", refs["intervals"].at[row, :, rows]),
                )
                copy_tile(ring, r * steps.count + i, stages, sources)
                if keep is not None:
                    meet_warps()
                return carry

            return lax.fori_loop(0, steps.count, step, carry)

        lax.fori_loop(0, plan.group, of_head, None)
        drain(ring, plan.group * steps.count, stages)

    @pl.when(warpgroup < DKV_WARPGROUPS)
    def _():
        plgpu.set_max_registers(registers[0], action="increase")
        kept = None if keep is None else keep(place)
        plgpu.barrier_wait(smem["arrived"])

        def each_step(step, sums):
            def of_head(r, sums):
                def one(i, sums, masked):
                    n = r * steps.count + i
                    slot = lax.rem(n, jnp.int32(stages))
                    plgpu.barrier_wait(ring["full"].at[slot])
                    zero = _unknown_zero(plan, steps.at(i))

                    def keep_tile(d_scores):
                        if kept is not None:
                            kept(warpgroup + zero, n, r, steps.at(i), d_scores)

                    sums = step(slot, zero, sums, masked, keep_tile)
                    tc.give_back(ring["free"].at[slot])
                    return sums

                return in_turn(steps, one, sums)

            return lax.fori_loop(0, plan.group, of_head, sums)

        def write(name, staged, half, value):
            staged[...] = value.astype(plan.dtype)
            plgpu.commit_smem()
            target = refs[f"d{name}"].at[row_out, keys_of(half), head_out]
            plgpu.copy_smem_to_gmem(staged, target)

        if halves == DKV_WARPGROUPS:
            low_key = block * config.block_kv + warpgroup * ROWS
            dk, dv = _both_sums(plan, smem, warpgroup, low_key, each_step)
            plgpu.commit_smem()  # all warps have multiplied with k and v
            write("k", smem["k"].at[warpgroup], warpgroup, dk * plan.scale)
            write("v", smem["v"].at[warpgroup], warpgroup, dv)
        else:
            low_key = block * config.block_kv

            # The other warpgroup may still read k and v.
            @pl.when(warpgroup == 0)
            def _():
                dk = _sum_of_dk(plan, smem, low_key, each_step)
                _meet(smem["done"])
                write("k", smem["k"].at[0], 0, dk * plan.scale)

            @pl.when(warpgroup == 1)
            def _():
                dv = _sum_of_dv(plan, smem, low_key, each_step)
                _meet(smem["done"])
                write("v", smem["v"].at[0], 0, dv)

        plgpu.wait_smem_to_gmem(0)


def meet_warps() -> None:
    """Lets no warp of the copying warpgroup fall behind the one that copies.

    Nobody waits for the others, and one that is two rounds of the ring behind would
    wait for a phase that is over. Compilers add such a barrier to each copy themselves
    unless they are told to add none.
    """
    plgpu.commit_smem()


def _meet(barrier: Any) -> None:
    tc.give_back(barrier)
    plgpu.barrier_wait(barrier)


def _like(x: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


@functools.partial(jax.jit, static_argnums=(0,))
def attention_dq(plan: Plan, inputs: dict[str, jax.Array]) -> jax.Array:
    """Launches the dq kernel.

    Args:
      plan: sizes of the call.
      inputs: q, do [B, T', H, K]; k, v [B, S', G, K]; stats f32[B, H, 2, T'] with rows
        LSE and DELTA; intervals i32[B, 2, T'] with rows START and STOP; tiles
        i32[B, q_blocks, 4]; order i32[B q_blocks].

    Returns:
      dq, like q.
    """
    config, dim = plan.config, plan.head_dim
    block = tc.operand(config.warpgroups, ROWS, dim, dtype=plan.dtype)
    tile = tc.operand(config.dq_slots, config.dq_step_kv, dim, dtype=plan.dtype)
    (dq,) = launch(
        functools.partial(_attention_dq_kernel, plan=plan),
        "pk_attention_dq",
        inputs,
        {"dq": _like(inputs["q"])},
        blocks=plan.batch * plan.q_blocks * plan.heads,
        registers=REGISTERS[config.warpgroups],
        scratch={
            "q": block,
            "do": block,
            "arrived": plgpu.Barrier(num_arrivals=2 * config.warpgroups),
            "ring": {
                "tile": tile,
                "full": plgpu.Barrier(num_arrivals=1, num_barriers=config.dq_slots),
                "free": plgpu.Barrier(
                    num_arrivals=config.warpgroups, num_barriers=config.dq_slots
                ),
            },
        },
    )
    return dq


@functools.partial(jax.jit, static_argnums=(0,))
def attention_dkv(
    plan: Plan, inputs: dict[str, jax.Array]
) -> tuple[jax.Array, jax.Array]:
    """Launches the dk, dv kernel.

    Args:
      plan: sizes of the call.
      inputs: as for `attention_dq`, but tiles i32[B, kv_blocks, 4] and order
        i32[B kv_blocks].

    Returns:
      dk and dv, like k and v; of the first `kv_blocks` blocks.
    """
    return launch(
        functools.partial(dkv_kernel, plan=plan, kv_heads=plan.kv_heads),
        "pk_attention_dkv",
        inputs,
        {"dk": _like(inputs["k"]), "dv": _like(inputs["v"])},
        blocks=plan.batch * plan.kv_blocks * plan.kv_heads,
        registers=REGISTERS[DKV_WARPGROUPS],
        scratch=dkv_scratch(plan),
    )


def dkv_scratch(plan: Plan) -> dict[str, Any]:
    """Shared memory and barriers of `dkv_kernel`."""
    config, dim, dtype = plan.config, plan.head_dim, plan.dtype
    stages, step = config.dkv_stages, config.dkv_step_q
    halves = config.block_kv // ROWS
    keys = tc.operand(halves, ROWS, dim, dtype=dtype)
    queries = tc.operand(stages, step, dim, dtype=dtype)
    scratch = {
        "k": keys,
        "v": keys,
        "arrived": plgpu.Barrier(num_arrivals=2 * halves),
        "ring": {
            "q": queries,
            "do": queries,
            "stats": plgpu.SMEM((stages, 2, step), jnp.float32),
            "intervals": plgpu.SMEM((stages, 2, step), jnp.int32),
            "full": plgpu.Barrier(num_arrivals=4, num_barriers=stages),
            "free": plgpu.Barrier(num_arrivals=DKV_WARPGROUPS, num_barriers=stages),
        },
    }
    if halves < DKV_WARPGROUPS:
        scratch["done"] = plgpu.Barrier(num_arrivals=DKV_WARPGROUPS)
    return scratch
