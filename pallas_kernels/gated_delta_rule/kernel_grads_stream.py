"""`kernel_grads_ring` with a place for each matrix instead of slots for halves of V.

The same warpgroups have the same parts, and the same bytes move. What differs is when
sums over V are complete: there after two halves, and all that follows a product, its
factors per token and its sums over K with q or k, is done for each half. Here a product
sums over all of V at once, so that this work is done once a value head.

No two value heads fit shared memory, so each matrix has one place, which is filled
again as soon as the last product with it is done. In the order of their use:

    D, dS    diag(leave) D dS
    dO, S    diag(enter) dO S, and beside the product the sum of dS o S
    dY, V    dY S, and beside the product dV

While the products with E and F end a head, the next one's matrices arrive.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.gated_delta_rule import kernel_grads_ring as ring
from pallas_kernels.gated_delta_rule import tensor_core as tc
from pallas_kernels.gated_delta_rule.config_mosaic import (
    CHUNK,
    HALF,
    SQUARE,
    Gate,
    Shapes,
)


# Matrices of a value head, in the order in which places become free; and how many
# warpgroups read each.
READERS = {"written": 3, "d_states": 2, "do": 3, "states": 2, "d_weighed": 3, "v": 2}


def _copy_matrices(
    shapes: Shapes, place: ring.Place, turn: jax.Array, sources: Any, smem: Any
) -> None:
    def step(member, carry):
        head, item = place.head(member)
        count = turn * shapes.group + member
        for name in READERS:

            @pl.when(count > 0)
            def _(name=name):
                plgpu.barrier_wait(smem["free"][name])

            if name == "written":
                # All have begun the head before, so none reads those of the one before.
                ring.copy_gates(place, item, count, sources, smem)
            at = (item, place.chunk) if name in ring.STATES else (place.tokens, head)
            source, matrix = sources[name].at[*at], smem[name]
            pieces = [(source, matrix.at[0])]
            if name == "v":
                pieces = [(source.at[:, ring.half_of(i)], matrix.at[i]) for i in (0, 1)]
            for piece, destination in pieces:
                plgpu.copy_gmem_to_smem(piece, destination, smem["full"][name])
        return carry

    lax.fori_loop(0, shapes.group, step, None)


def _wait_matrices(smem: Any) -> None:
    for name in READERS:
        plgpu.barrier_wait(smem["free"][name])


def _wait(smem: Any, *names: str) -> None:
    for name in names:
        plgpu.barrier_wait(smem["full"][name])


def _release(smem: Any, *names: str) -> None:
    plgpu.commit_smem()  # all warps have read them
    for name in names:
        plgpu.barrier_arrive(smem["free"][name])


def _kept(states: Any, d_states: Any) -> jax.Array:
    """Sums of dS o S over columns and over rows that are 64 apart."""
    total: Any = 0.0
    for half in range(2):
        rows = ring.half_of(half)
        state = tc.load(states.at[rows]).astype(jnp.float32)
        d_state = tc.load(d_states.at[rows]).astype(jnp.float32)
        total = total + jnp.sum(state * d_state, axis=1)
    return total


def _value_gradient(gates: Any, d_weighed: Any, value: Any) -> jax.Array:
    """dV replaces V in half of its columns; returns rowsum(dY o V) there."""
    d_value = tc.load(d_weighed).astype(jnp.float32)
    total = jnp.sum(d_value * tc.load(value).astype(jnp.float32), axis=1)
    beta = tc.load(gates.at[Gate.BETA], tc.PER_ROW)
    value[...] = (d_value * tc.per_row(beta, SQUARE)).astype(value.dtype)
    return total


def _head_columns(
    shapes: Shapes,
    scale: float,
    columns: Any,
    place: ring.Place,
    smem: Any,
    turn: jax.Array,
) -> Any:
    """What a warpgroup with half of the K columns does for a value head."""
    half = ring.half_of(columns)

    def weighed_sum(product, factor, key):
        """The product with a factor per token, and its sums with q or k over K."""
        product = product * tc.per_row(factor, SQUARE)
        return product, jnp.sum(product * tc.load(key).astype(jnp.float32), axis=1)

    def step(member, carry):
        dq, dk = carry
        head, _ = place.head(member)
        parity = ring.parity_of(turn * shapes.group + member)
        gates, table = smem["gates"].at[parity], smem["sums"].at[parity]
        plgpu.barrier_wait(smem["gates_full"].at[parity])

        def factor(gate):
            return tc.load(gates.at[gate], tc.PER_ROW)

        zero = ring.unknown_zero(gates)
        at = {name: smem[name].at[zero] for name in READERS if name != "v"}
        q, k = (smem[x].at[ring.parity_of(turn) + zero, columns] for x in ring.KEYS)
        states, d_states = (at[name].at[:, half] for name in ring.STATES)
        value = smem["v"].at[columns + zero]

        _wait(smem, "written", "d_states")
        leaving = tc.mma((at["written"], d_states))
        leaving, at_exit = weighed_sum(leaving, factor(Gate.LEAVE), k)
        dk = dk + leaving
        _release(smem, "written")

        _wait(smem, "do", "states")
        entering, kept = tc.mma_beside(
            lambda: _kept(states, d_states), (at["do"], states)
        )
        entering, queried = weighed_sum(entering, factor(Gate.ENTER) * scale, q)
        dq = dq + entering
        _release(smem, "d_states", "do")

        _wait(smem, "d_weighed", "v")
        read, values = tc.mma_beside(
            lambda: _value_gradient(gates, at["d_weighed"].at[:, half], value),
            (at["d_weighed"], states),
        )
        _release(smem, "states", "d_weighed")
        plgpu.copy_smem_to_gmem(value, smem["dv_ref"].at[place.tokens, head, half])
        table.at[ring.BETA + columns][...] = values
        known = jnp.sum(read * tc.load(k).astype(jnp.float32), axis=1)
        dk = dk - read * tc.per_row(factor(Gate.ENTER) * factor(Gate.BETA), SQUARE)
        ring.finish_sums(gates, table, columns, queried, at_exit, known, kept)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        _release(smem, "v")
        plgpu.barrier_arrive(smem["summed"].at[parity])
        zero = ring.unknown_zero(gates)
        keys = {x: smem[x].at[ring.parity_of(turn) + zero, columns] for x in ring.KEYS}
        return ring.add_pairs(smem, keys, zero, dq, dk)

    return step


def _pair_products(smem: Any, gates: Any, zeros: jax.Array) -> list[jax.Array]:
    """dO D^T and dY D^T."""
    del zeros
    zero = ring.unknown_zero(gates)
    written, do, d_weighed = (
        smem[name].at[zero] for name in ("written", "do", "d_weighed")
    )
    _wait(smem, "written", "do", "d_weighed")
    products = tc.mma_each((do, written.T), (d_weighed, written.T))
    _release(smem, "written", "do", "d_weighed")
    return products


_MATRICES = ring.Roles(
    copy_heads=_copy_matrices,
    wait_free=_wait_matrices,
    head_columns=_head_columns,
    pair_products=_pair_products,
)


# Lowered once a module: calls of equal sizes, such as those of layers, share it.
@functools.partial(jax.jit, static_argnums=(0, 1))
def chunk_grads_stream(
    shapes: Shapes, scale: float, sources: dict[str, jax.Array]
) -> dict[str, jax.Array]:
    """Gradients of q, k, v, g and beta; see `kernel_grads_ring.chunk_grads_ring`."""
    operand = functools.partial(tc.operand, dtype=shapes.dtype)
    states = operand(1, shapes.value_dim, shapes.key_dim)
    matrices = dict.fromkeys(READERS, operand(1, CHUNK, shapes.value_dim))
    matrices |= dict.fromkeys(ring.STATES, states)
    matrices["v"] = operand(2, CHUNK, HALF)  # halves that dV is stored from
    copies = {name: 2 if name == "v" else 1 for name in READERS}
    scratch = ring.pair_scratch(shapes) | {
        **matrices,
        "full": {name: plgpu.Barrier(num_arrivals=x) for name, x in copies.items()},
        "free": {name: plgpu.Barrier(num_arrivals=x) for name, x in READERS.items()},
    }
    return ring.launch_ring(
        "pk_gdn_grads_stream", _MATRICES, shapes, scale, sources, scratch
    )
