"""Mosaic GPU kernel for the gradients that need no order, fed by a ring.

Of the products in `kernel_grads` it needs half, on blocks that stay and work through
chunk after chunk while a warpgroup copies ahead. Notation as there, and

    Y = diag(beta) W      D = (I + L o G)^-1 Y      dY = (A o G)^T dD

so that dV = dW = diag(beta) dY, and the gradient of L o G is -strictLower(dY D^T):
neither dR nor two products with A are needed. `kernel_bwd` has D and dY in registers
and writes them beside S and dS. What is left, with H = strictLower(dY D^T) o G and
dP = dO D^T:

    dQ = scale diag(enter) dO S + F K                     F = scale dP o G
    dK = diag(leave) D dS - diag(enter beta) dY S + F^T Q + (E + E^T) K
    E = -diag(beta) H
    dbeta = rowsum(dY o V) - enter rowsum(K o dY S) - rowsum(H o K K^T)
    Z = strictLower(F o Q K^T) + E o K K^T

and dg from Z and the products with S and dS as in `kernel_grads`.

**What moves.** All sums run over V, so a value head comes in two halves of V of 64 KB
each: S, dS, D, dY, dO, V. Two slots of shared memory hold a head, with q and k of two
chunks, so that bytes which cross device memory, not products or latencies, are what
should take the time: 128 KB in and dV out for each value head, and q, k, dq, dk for
each key head.

**Who works.** Two warpgroups have half of the K columns each, and all that S and dS are
multiplied with; they fold a half of V into dQ and dK as soon as it is there, since all
is linear in it. A third has what is summed over pairs of tokens, E and F, which the two
add at the end of the head, and makes dg and dbeta from sums per token that they leave
in a table. That is all they wait for each other. The fourth copies ahead, also into the
next chunk. Registers set the bounds: sums of E and F over the value heads would leave
the third warpgroup too few.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable
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
from pallas_kernels.gated_delta_rule.kernel_fwd import decay_matrix
from pallas_kernels.gated_delta_rule.kernel_grads import (
    decay_gradient,
    document_bounds,
    launch_grads,
)


SLOTS = 2  # of the ring: one for each half of V
PAIRS, COPY = 2, 3  # warpgroups; those before have the columns
REGISTERS = (160, 160, 168, 24)
KEYS = ("q", "k")
VALUES = ("do", "written", "d_weighed", "v")
STATES = ("states", "d_states")
# Rows of the table of sums per token, one for each warpgroup with columns.
TOTAL, EXIT, BETA = 0, 2, 4


def block_count(shapes: Shapes) -> int:
    """Chunks of key heads."""
    return shapes.batch * shapes.chunks * shapes.key_heads


class Place:
    """Where the chunk of a key head lies that a block takes in its turn `turn`."""

    def __init__(self, shapes: Shapes, turn: jax.Array):
        blocks = min(block_count(shapes), hw.device().sms)
        block = turn * blocks + lax.axis_index("block")
        self.token_chunk, self.key_head = tc.split_index(block, shapes.key_heads)
        self.row, self.chunk = tc.split_index(self.token_chunk, shapes.chunks)
        self.tokens = pl.ds(self.token_chunk * CHUNK, CHUNK)
        self.inside = pl.ds(self.chunk * CHUNK, CHUNK)
        self.shapes = shapes

    def head(self, member: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The value head, and its index over the rows."""
        head = self.key_head * self.shapes.group + member
        return head, self.row * self.shapes.value_heads + head


def half_of(index: Any) -> Any:
    return pl.ds(index * HALF, HALF)


def parity_of(x: jax.Array) -> jax.Array:
    return lax.rem(x, jnp.int32(2))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Roles:
    """What depends on how the matrices of a value head come.

    Attributes:
      copy_heads: copies those of the value heads of one turn.
      wait_free: waits until all of them have been read for the last time.
      head_columns: gives what a warpgroup with columns does for a value head.
      pair_products: makes dO D^T and dY D^T of a value head.
    """

    copy_heads: Callable[..., None]
    wait_free: Callable[..., None]
    head_columns: Callable[..., Any]
    pair_products: Callable[..., Any]


def _copy(
    shapes: Shapes, roles: Roles, turns: jax.Array, sources: Any, smem: Any
) -> None:
    """Copies ahead of the others, as far as there is room."""

    def turn_step(turn, carry):
        place, slot = Place(shapes, turn), parity_of(turn)

        @pl.when(turn >= 2)
        def _():
            plgpu.barrier_wait(smem["keys_free"].at[slot])

        for name, half in itertools.product(KEYS, range(2)):
            plgpu.copy_gmem_to_smem(
                sources[name].at[place.tokens, place.key_head, half_of(half)],
                smem[name].at[slot, half],
                smem["keys_full"].at[slot],
            )
        roles.copy_heads(shapes, place, turn, sources, smem)
        return carry

    lax.fori_loop(0, turns, turn_step, None)
    # Every arrival must be waited for before the block ends.
    roles.wait_free(smem)

    @pl.when(turns >= 2)
    def _():
        plgpu.barrier_wait(smem["keys_free"].at[parity_of(turns)])

    plgpu.barrier_wait(smem["keys_free"].at[parity_of(turns + 1)])


def copy_gates(place: Place, item: Any, count: Any, sources: Any, smem: Any) -> None:
    """Copies the factors of value head number `count`, if none reads their place."""
    slot = parity_of(count)
    plgpu.copy_gmem_to_smem(
        sources["gates"].at[item, place.chunk],
        smem["gates"].at[slot],
        smem["gates_full"].at[slot],
    )


def _copy_halves(
    shapes: Shapes, place: Place, turn: jax.Array, sources: Any, smem: Any
) -> None:
    def step(i, carry):
        member, half = tc.split_index(i, SLOTS)
        head, item = place.head(member)
        count = turn * shapes.group + member

        @pl.when(count > 0)
        def _():
            plgpu.barrier_wait(smem["free"].at[half])

        # The head before has been begun by all, so none reads those of the one before.
        @pl.when(half == 0)
        def _():
            copy_gates(place, item, count, sources, smem)

        for name in (*VALUES, *STATES):
            at = (item, place.chunk) if name in STATES else (place.tokens, head)
            plgpu.copy_gmem_to_smem(
                sources[name].at[*at, half_of(half)],
                smem[name].at[half],
                smem["full"].at[half],
            )
        return carry

    lax.fori_loop(0, shapes.group * SLOTS, step, None)


def _wait_halves(smem: Any) -> None:
    for half in range(SLOTS):
        plgpu.barrier_wait(smem["free"].at[half])


def _value_gradient(slot: Any) -> jax.Array:
    """dV replaces V in a half of its columns; returns rowsum(dY o V) there."""
    d_weighed = tc.load(slot["d_weighed"]).astype(jnp.float32)
    value = tc.load(slot["v"]).astype(jnp.float32)
    total = jnp.sum(d_weighed * value, axis=1)
    beta = tc.load(slot["gates"].at[Gate.BETA], tc.PER_ROW)
    d_value = d_weighed * tc.per_row(beta, SQUARE)
    slot["v"][...] = d_value.astype(slot["v"].dtype)
    plgpu.commit_smem()
    return total


def _fold(slot: Any, keys: Any, scale: float, columns: Any, sums: Any) -> Any:
    """Adds the terms of one half of V that read S and dS.

    Args:
      slot: the half, and "gates".
      keys: q and k in these columns.
      scale: factor on the output.
      columns: which half of the K columns.
      sums: dq, dk f32[C, K / 2], then sums over K of each token, `PER_ROW`: of
        Q o dQ, of K o dK at the exit, and of K o dY S.

    Returns:
      `sums` with this half's terms.
    """
    dq, dk, queried, at_exit, known = sums
    gates, part = slot["gates"], (slice(None), half_of(columns))
    states, d_states = slot["states"].at[part], slot["d_states"].at[part]

    enter = tc.load(gates.at[Gate.ENTER], tc.PER_ROW)
    entering = tc.mma((slot["do"], states)) * tc.per_row(enter * scale, SQUARE)
    queries = tc.load(keys["q"]).astype(jnp.float32)
    queried = queried + jnp.sum(entering * queries, axis=1)
    dq = dq + entering

    leave = tc.load(gates.at[Gate.LEAVE], tc.PER_ROW)
    leaving = tc.mma((slot["written"], d_states)) * tc.per_row(leave, SQUARE)
    key = tc.load(keys["k"]).astype(jnp.float32)
    at_exit = at_exit + jnp.sum(leaving * key, axis=1)
    dk = dk + leaving

    read = tc.mma((slot["d_weighed"], states))
    key = tc.load(keys["k"]).astype(jnp.float32)
    known = known + jnp.sum(read * key, axis=1)
    enter = tc.load(gates.at[Gate.ENTER], tc.PER_ROW)
    beta = tc.load(gates.at[Gate.BETA], tc.PER_ROW)
    dk = dk - read * tc.per_row(enter * beta, SQUARE)
    return dq, dk, queried, at_exit, known


def _kept(slot: Any, columns: Any) -> jax.Array:
    """Sums of dS o S over half of the K columns, one for each row of a half of V."""
    part = (slice(None), half_of(columns))
    state = tc.load(slot["states"].at[part]).astype(jnp.float32)
    d_state = tc.load(slot["d_states"].at[part]).astype(jnp.float32)
    return jnp.sum(state * d_state, axis=1)


def add_pairs(
    smem: Any, keys: Any, zero: jax.Array, dq: jax.Array, dk: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Adds the products with F and E; q and k in this warpgroup's columns."""
    scores, lower = smem["scores"].at[zero], smem["lower"].at[zero]
    plgpu.barrier_wait(smem["squares_full"])
    dq, dk = tc.mma_onto(
        (dq, (scores, keys["k"])),
        (dk, (scores.T, keys["q"]), (lower, keys["k"]), (lower.T, keys["k"])),
    )
    plgpu.barrier_arrive(smem["squares_free"])
    return dq, dk


def _head_columns(
    shapes: Shapes, scale: float, columns: Any, place: Place, smem: Any, turn: Any
) -> Any:
    """What a warpgroup with half of the K columns does for a value head."""

    def half_step(head, gates, table, half, sums):
        plgpu.barrier_wait(smem["full"].at[half])
        zero = unknown_zero(gates)
        slot = {name: smem[name].at[half + zero] for name in (*VALUES, *STATES)}
        slot["gates"] = gates
        keys = {name: smem[name].at[parity_of(turn) + zero, columns] for name in KEYS}

        # One of the two for each half.
        @pl.when(half == columns)
        def _():
            table.at[BETA + columns][...] = _value_gradient(slot)
            plgpu.copy_smem_to_gmem(
                slot["v"], smem["dv_ref"].at[place.tokens, head, half_of(half)]
            )

        *sums, kept = sums
        sums = _fold(slot, keys, scale, columns, sums)
        kept = kept + _kept(slot, columns)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        plgpu.commit_smem()
        plgpu.barrier_arrive(smem["free"].at[half])
        return *sums, kept

    def step(member, carry):
        parity = parity_of(turn * shapes.group + member)
        gates, table = smem["gates"].at[parity], smem["sums"].at[parity]
        plgpu.barrier_wait(smem["gates_full"].at[parity])
        nothing = plgpu.layout_cast(jnp.zeros((CHUNK,), jnp.float32), tc.PER_ROW)
        dq, dk, queried, at_exit, known, kept = lax.fori_loop(
            0,
            SLOTS,
            functools.partial(half_step, place.head(member)[0], gates, table),
            (*carry, *(nothing,) * 4),
        )
        finish_sums(gates, table, columns, queried, at_exit, known, kept)
        plgpu.commit_smem()
        plgpu.barrier_arrive(smem["summed"].at[parity])
        zero = unknown_zero(gates)
        keys = {name: smem[name].at[parity_of(turn) + zero, columns] for name in KEYS}
        return add_pairs(smem, keys, zero, dq, dk)

    return step


def finish_sums(
    gates: Any,
    table: Any,
    columns: Any,
    queried: Any,
    at_exit: Any,
    known: Any,
    kept: Any,
) -> None:
    """Leaves sums per token for dg and dbeta in the table.

    Args:
      gates: factors of the value head.
      table: of sums; its row for dbeta has those of dY o V.
      columns: which half of the K columns.
      queried, at_exit, known: see `_fold`.
      kept: see `_kept`.
    """
    enter = tc.load(gates.at[Gate.ENTER], tc.PER_ROW)
    beta = tc.load(gates.at[Gate.BETA], tc.PER_ROW)
    known = enter * known
    values = tc.load(table.at[BETA + columns], tc.PER_ROW)
    table.at[TOTAL + columns][...] = queried - beta * known - at_exit
    table.at[EXIT + columns][...] = at_exit + gates[Gate.ENTER, CHUNK - 1] * kept
    table.at[BETA + columns][...] = values - known


def unknown_zero(gates: Any) -> jax.Array:
    """Zero, without the compiler knowing it.

    Addresses that depend on it are computed where they are used. Known ones would all
    be computed before the loop over heads, and fill the registers it needs.
    """
    return (gates[Gate.ENTER, CHUNK - 1] < 0).astype(jnp.int32)


def _columns(
    shapes: Shapes,
    roles: Roles,
    scale: float,
    turns: jax.Array,
    columns: jax.Array,
    outputs: Any,
    smem: Any,
) -> None:
    """Warpgroup with half of the columns of dQ and dK."""
    half = half_of(columns)
    zeros = plgpu.layout_cast(jnp.zeros(SQUARE, jnp.float32), tc.ROWS)

    def turn_step(turn, carry):
        place, slot = Place(shapes, turn), parity_of(turn)
        plgpu.barrier_wait(smem["keys_full"].at[slot])
        step = roles.head_columns(shapes, scale, columns, place, smem, turn)
        dq, dk = lax.fori_loop(0, shapes.group, step, (zeros, zeros))
        q, k = (smem[name].at[slot, columns] for name in KEYS)
        plgpu.barrier_wait(smem["pairs_done"])
        # Nobody else reads these columns any more, nor does any warp of this one.
        plgpu.commit_smem()
        for name, ref, value in (("dq", q, dq), ("dk", k, dk)):
            ref[...] = value.astype(shapes.dtype)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(
                ref, outputs[name].at[place.tokens, place.key_head, half]
            )
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        plgpu.barrier_arrive(smem["keys_free"].at[slot])
        return carry

    lax.fori_loop(0, turns, turn_step, None)
    plgpu.wait_smem_to_gmem(0)


def _pair_products(smem: Any, gates: Any, zeros: jax.Array) -> list[jax.Array]:
    """dO D^T and dY D^T; the halves of V are free for the others afterwards."""

    def half_step(half, products):
        plgpu.barrier_wait(smem["full"].at[half])
        at = half + unknown_zero(gates)
        slot = {name: smem[name].at[at] for name in VALUES}
        pairs = [(slot[x], slot["written"].T) for x in ("do", "d_weighed")]
        products = tc.mma_onto(*zip(products, pairs, strict=True))
        plgpu.commit_smem()
        plgpu.barrier_arrive(smem["free"].at[half])
        return products

    return lax.fori_loop(0, SLOTS, half_step, [zeros, zeros])


def _pairs(
    shapes: Shapes,
    roles: Roles,
    scale: float,
    turns: jax.Array,
    outputs: Any,
    smem: Any,
) -> None:
    """Warpgroup for what is summed over pairs of tokens, and for dg and dbeta."""
    zeros = plgpu.layout_cast(jnp.zeros(SQUARE, jnp.float32), tc.ROWS)
    row, column = tc.square_indices(CHUNK)

    def head_step(place, turn, member, carry):
        count = turn * shapes.group + member
        parity = parity_of(count)
        gates, table = smem["gates"].at[parity], smem["sums"].at[parity]
        plgpu.barrier_wait(smem["gates_full"].at[parity])
        d_qk, pairs_lower = roles.pair_products(smem, gates, zeros)
        zero = unknown_zero(gates)
        q, k = (smem[name].at[parity_of(turn) + zero] for name in KEYS)
        index = row + zero, column
        strict = index[1] < index[0]
        decay = decay_matrix(gates, index)
        d_qk = d_qk * decay * scale
        pairs_lower = jnp.where(strict, pairs_lower * decay, 0.0)
        beta = tc.load(gates.at[Gate.BETA], tc.PER_ROW)

        @pl.when(count > 0)
        def _():
            plgpu.barrier_wait(smem["squares_free"])

        smem["scores"].at[zero][...] = d_qk.astype(shapes.dtype)
        lower = -pairs_lower * tc.per_row(beta, SQUARE)
        smem["lower"].at[zero][...] = lower.astype(shapes.dtype)
        plgpu.commit_smem()
        plgpu.barrier_arrive(smem["squares_full"])

        pairs_lower = pairs_lower * tc.mma(*((k.at[i], k.at[i].T) for i in range(2)))
        d_beta = -jnp.sum(pairs_lower, axis=1)
        pairs = jnp.where(
            strict, d_qk * tc.mma(*((q.at[i], k.at[i].T) for i in range(2))), 0.0
        )
        pairs = pairs - pairs_lower * tc.per_row(beta, SQUARE)
        to_columns = jnp.sum(pairs, axis=0)
        smem["rows"][...] = jnp.sum(pairs, axis=1)
        plgpu.commit_smem()
        plgpu.barrier_wait(smem["summed"].at[parity])

        def load(at: int, layout: Any) -> jax.Array:
            return tc.load(table.at[at], layout) + tc.load(table.at[at + 1], layout)

        d_total = load(TOTAL, tc.PER_COLUMN) - to_columns
        d_total = d_total + tc.load(smem["rows"], tc.PER_COLUMN)
        _, item = place.head(member)
        outputs["dg"].at[item, place.inside][...] = decay_gradient(
            index, document_bounds(gates), d_total, load(EXIT, tc.PER_COLUMN)
        )
        d_beta = d_beta + load(BETA, tc.PER_ROW)
        outputs["dbeta"].at[item, place.inside][...] = d_beta
        return carry

    def turn_step(turn, carry):
        place, slot = Place(shapes, turn), parity_of(turn)
        plgpu.barrier_wait(smem["keys_full"].at[slot])
        step = functools.partial(head_step, place, turn)
        lax.fori_loop(0, shapes.group, step, None)
        plgpu.barrier_arrive(smem["pairs_done"])
        return carry

    lax.fori_loop(0, turns, turn_step, None)
    plgpu.barrier_wait(smem["squares_free"])


def _grads_ring_kernel(
    sources: Any, outputs: Any, smem: Any, *, shapes: Shapes, roles: Roles, scale: float
) -> None:
    blocks = min(block_count(shapes), hw.device().sms)
    last = jnp.int32(block_count(shapes) - 1) - lax.axis_index("block")
    turns = lax.div(last, jnp.int32(blocks)) + 1
    smem = smem | {"dv_ref": outputs["dv"]}

    warpgroup = lax.axis_index("warpgroup")

    def start(condition, registers, run, *args):
        launched = hw.launch_registers(len(REGISTERS))

        @pl.when(condition)
        def _():
            action = "increase" if registers > launched else "decrease"
            plgpu.set_max_registers(registers, action=action)
            run(shapes, roles, *args, smem)

    start(warpgroup < PAIRS, REGISTERS[0], _columns, scale, turns, warpgroup, outputs)
    start(warpgroup == PAIRS, REGISTERS[PAIRS], _pairs, scale, turns, outputs)
    start(warpgroup == COPY, REGISTERS[COPY], _copy, turns, sources)


def pair_scratch(shapes: Shapes) -> dict[str, Any]:
    """Shared memory and barriers for all but the matrices of value heads."""
    keys = tc.operand(2, 2, CHUNK, HALF, dtype=shapes.dtype)
    square = tc.operand(1, *SQUARE, dtype=shapes.dtype)
    return {
        **dict.fromkeys(KEYS, keys),
        "scores": square,
        "lower": square,
        "gates": plgpu.SMEM((2, len(Gate), CHUNK), jnp.float32),
        "sums": plgpu.SMEM((2, 6, CHUNK), jnp.float32),
        "rows": plgpu.SMEM((CHUNK,), jnp.float32),
        "keys_full": plgpu.Barrier(num_arrivals=4, num_barriers=2),
        "keys_free": plgpu.Barrier(num_arrivals=2, num_barriers=2),
        "gates_full": plgpu.Barrier(num_arrivals=1, num_barriers=2),
        "summed": plgpu.Barrier(num_arrivals=2, num_barriers=2),
        "pairs_done": plgpu.Barrier(num_arrivals=1),
        "squares_full": plgpu.Barrier(num_arrivals=1),
        "squares_free": plgpu.Barrier(num_arrivals=2),
    }


def launch_ring(
    name: str,
    roles: Roles,
    shapes: Shapes,
    scale: float,
    sources: dict[str, jax.Array],
    scratch: dict[str, Any],
) -> dict[str, jax.Array]:
    """Runs blocks that stay; the rest as for `chunk_grads_ring`.

    Args:
      name: of the kernel in profiles.
      roles: what depends on how matrices of value heads come.
      shapes, scale, sources: as for `chunk_grads_ring`.
      scratch: `pair_scratch` and what the roles have besides.
    """
    keys = jax.ShapeDtypeStruct(sources["q"].shape, shapes.dtype)
    values = jax.ShapeDtypeStruct(sources["v"].shape, shapes.dtype)
    per_token = jax.ShapeDtypeStruct((shapes.items, shapes.time), jnp.float32)
    out_type = {"dq": keys, "dk": keys, "dv": values, "dg": per_token}
    out_type["dbeta"] = per_token
    return launch_grads(
        functools.partial(_grads_ring_kernel, shapes=shapes, roles=roles, scale=scale),
        name,
        sources,
        out_type,
        blocks=min(block_count(shapes), hw.device().sms),
        threads=len(REGISTERS),
        registers=REGISTERS,
        scratch=scratch,
    )


_HALVES = Roles(
    copy_heads=_copy_halves,
    wait_free=_wait_halves,
    head_columns=_head_columns,
    pair_products=_pair_products,
)


# Lowered once a module: calls of equal sizes, such as those of layers, share it.
@functools.partial(jax.jit, static_argnums=(0, 1))
def chunk_grads_ring(
    shapes: Shapes, scale: float, sources: dict[str, jax.Array]
) -> dict[str, jax.Array]:
    """Gradients of q, k, v, g and beta.

    Args:
      shapes: sizes of the call.
      scale: factor on the output.
      sources: q, k [B T, Hk, K]; v, do, written, d_weighed [B T, Hv, V]; states,
        d_states [B Hv, T / C, V, K]; gates f32[B Hv, T / C, len(Gate), C].

    Returns:
      dq, dk like q; dv like v; dg (of natural logarithms), dbeta f32[B Hv, T].
    """
    operand = functools.partial(tc.operand, 2, dtype=shapes.dtype)
    scratch = pair_scratch(shapes) | {
        **{name: operand(CHUNK, HALF) for name in VALUES},
        **{name: operand(HALF, shapes.key_dim) for name in STATES},
        "full": plgpu.Barrier(
            num_arrivals=len(VALUES) + len(STATES), num_barriers=SLOTS
        ),
        "free": plgpu.Barrier(num_arrivals=3, num_barriers=SLOTS),
    }
    return launch_ring("pk_gdn_grads_ring", _HALVES, shapes, scale, sources, scratch)
