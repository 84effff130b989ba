"""Mosaic GPU kernel for the gradients that need no order: one block per chunk.

A block has one chunk of one key head and works through the value heads that read it,
so dq and dk are summed over them in registers, in one fixed order. What carries over
from chunk to chunk, the states S at their entry, dS at their exit and dV, was written
by `kernel_bwd`. With A, G, P, R as there, and rows i
and columns j of [C, C]:

    U = K S                      D = R W              W = V - diag(enter) U
    dD = diag(leave) K dS + P^T dO                    dU = -diag(enter) dV
    dR = dD W^T    dP = dO D^T   (both count only where G does)
    dQ = scale diag(enter) dO S^T + scale (dP o G) K
    dA = dR o G diag(beta)       dL = -strictLower(A^T dA A^T)     E = diag(beta) dL
    dK = diag(leave) D dS^T + dU S^T + scale (dP o G)^T Q + (E + E^T) K
    dbeta_j = sum_i (dR o A o G)_ij + sum_i (dL o K K^T)_ji
    Z = strictLower(dR o R + dP o P)

    dtotal = rowsum Z - colsum Z + rowsum(Q o dQ's first term) + rowsum(dU o U)
             - rowsum(K o dK's first term)
    dg_j = sum of dtotal_i over i >= j of j's document, and, if that document reaches
           the chunk's exit, sum(K o dK's first term) + across <dS, S>

where dU o U is summed as K o (dU S^T), which is at hand. Z without its diagonal,
whose row and column sums cancel, keeps dg precise under strong decay.

Three kinds of work share a block (`_Part`). "Columns", in two warpgroups: up to dD each
has half of the V columns, for dQ and dK half of the K columns. "Pairs" makes P, then dR
and dP; "inverse" makes R, then dL. `Config.grads_warpgroups` says whether these two
have a warpgroup of their own. A warpgroup for each of them leaves each too few
registers: the compiler then waits after every product.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
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
from pallas_kernels.gated_delta_rule.kernel_fwd import decay_matrix


LATER = ("do", "dv")  # of what is copied for a head, what is read last
OPERANDS = (
    *("q", "k", "v", "do", "dv", "written", "d_written", "states", "d_states"),
    *("inverse", "d_inverse", "weights", "scores"),
)
REDUCTION_BYTES = 8192
# Rows of the table of per-token sums that warpgroups hand each other: "dtotal" and
# "exit" have one for each that has columns.
SUMS = {"dtotal": 0, "exit": 2, "columns": 4, "rows": 5, "dbeta": 6}


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Part:
    """What a warpgroup does.

    Attributes:
      columns: which half of the columns it has, `None` for none.
      pairs: whether it makes P, dR and dP.
      inverse: whether it makes R and dL.
      registers: per thread, `None` for as many as there are.
    """

    columns: int | None = None
    pairs: bool = False
    inverse: bool = False
    registers: int | None = None


# A sum over pairs of tokens is 32 registers, those of dQ and dK in half of the columns
# 64; products need as many again.
PARTS = {
    2: (_Part(columns=0, pairs=True), _Part(columns=1, inverse=True)),
    3: (
        _Part(columns=0, registers=160),
        _Part(columns=1, registers=160),
        _Part(pairs=True, inverse=True, registers=184),
    ),
}


def _meet(barrier: Any) -> None:
    """All warpgroups see what the others wrote to shared memory before."""
    plgpu.commit_smem()
    plgpu.barrier_arrive(barrier)
    plgpu.barrier_wait(barrier)


def _slot(smem: dict[str, Any], slot: Any) -> dict[str, Any]:
    """The operands at a slot of their leading axis of size 1; the rest as it is."""
    return {
        name: ref.at[slot] if name in OPERANDS else ref for name, ref in smem.items()
    }


def _unknown_zero(gates: Any) -> jax.Array:
    """Zero, without the compiler knowing it.

    Addresses that depend on it are computed where they are used. Known ones would all
    be computed before the loop over heads, and fill the registers it needs.
    """
    return (gates[Gate.ENTER, CHUNK - 1] < 0).astype(jnp.int32)


def _fetch_head(sources, smem, tokens, head, item, chunk):
    """Starts the copies of one value head; what is needed first comes first."""

    def fetch(name, source):
        barrier = smem["later_arrived" if name in LATER else "arrived"]
        plgpu.copy_gmem_to_smem(source, smem[name], barrier)

    for name in ("gates", "states", "d_states"):
        fetch(name, sources[name].at[item, chunk])
    for name in ("v", "inverse", *LATER):
        fetch(name, sources[name].at[tokens, head])


def _write_missing(smem, half):
    """W replaces V in this warpgroup's columns; returns diag(leave) K dS there."""
    gates = smem["gates"]
    known, from_exit = tc.mma_each(
        (smem["k"], smem["states"].at[half].T),
        (smem["k"], smem["d_states"].at[half].T),
    )
    enter = tc.load(gates.at[Gate.ENTER], tc.PER_ROW)
    leave = tc.load(gates.at[Gate.LEAVE], tc.PER_ROW)
    place = smem["v"].at[:, half]
    value = tc.load(place).astype(jnp.float32)
    place[...] = (value - known * tc.per_row(enter, SQUARE)).astype(place.dtype)
    return from_exit * tc.per_row(leave, SQUARE)


def _write_written(smem, half, from_exit):
    """D and dD in this warpgroup's columns."""
    written = tc.mma((smem["weights"], smem["v"].at[:, half]))
    smem["written"].at[:, half][...] = written.astype(smem["written"].dtype)
    d_written = tc.mma((smem["scores"].T, smem["do"].at[:, half]), init=from_exit)
    smem["d_written"].at[:, half][...] = d_written.astype(smem["d_written"].dtype)


def _pair_gradients(smem, scale, index, d_scores, in_turn):
    """dR and dP, and all that is summed over pairs of tokens.

    Returns:
      The sum of scale dP o G so far.
    """
    row, column = index
    gates = smem["gates"]
    products = (smem["d_written"], smem["v"].T), (smem["do"], smem["written"].T)
    d_qk: Any = None
    if in_turn:
        d_weights = tc.mma(products[0])
    else:
        d_weights, d_qk = tc.mma_each(*products)
    decay = decay_matrix(gates, index)
    beta = tc.per_column(tc.load(gates.at[Gate.BETA], tc.PER_COLUMN), SQUARE)
    d_weights = d_weights * decay
    smem["d_inverse"][...] = (d_weights * beta).astype(smem["d_inverse"].dtype)
    plgpu.commit_smem()
    plgpu.barrier_arrive(smem["d_inverse_ready"])
    d_weights = d_weights * tc.load(smem["inverse"]).astype(jnp.float32)
    smem["sums"].at[SUMS["dbeta"]][...] = jnp.sum(d_weights, axis=0)
    if in_turn:
        d_qk = tc.mma(products[1])
    pairs = d_weights * beta + d_qk * tc.load(smem["scores"]).astype(jnp.float32)
    pairs = jnp.where(column < row, pairs, 0.0)
    smem["sums"].at[SUMS["columns"]][...] = jnp.sum(pairs, axis=0)
    smem["sums"].at[SUMS["rows"]][...] = jnp.sum(pairs, axis=1)
    if in_turn:
        decay = decay_matrix(gates, index)  # again, rather than kept until here
    return d_scores + d_qk * decay * scale


def _inverse_gradient(smem, index, d_kk):
    """dL from dA.

    Returns:
      The sum of E so far, and dbeta's second term, a `PER_ROW` vector.
    """
    row, column = index
    plgpu.barrier_wait(smem["d_inverse_ready"])
    left = tc.mma((smem["inverse"].T, smem["d_inverse"]))
    d_lower = tc.mma((left.astype(smem["d_inverse"].dtype), smem["inverse"].T))
    d_lower = jnp.where(column < row, -d_lower, 0.0)
    beta = tc.per_row(tc.load(smem["gates"].at[Gate.BETA], tc.PER_ROW), SQUARE)
    d_kk = d_kk + d_lower * beta
    kk = tc.mma((smem["k"], smem["k"].T))
    return d_kk, jnp.sum(d_lower * kk, axis=1)


def _key_space(smem, scale, columns, dq, dk):
    """Terms of dQ and dK that read or write the state, in half of the K columns.

    Returns:
      dq, dk f32[C, K / 2], this head's terms added.
    """
    gates, sums = smem["gates"], smem["sums"]
    half = pl.ds(columns * HALF, HALF)
    enter = tc.load(gates.at[Gate.ENTER], tc.PER_ROW)
    leave = tc.load(gates.at[Gate.LEAVE], tc.PER_ROW)
    states, d_states = smem["states"].at[:, half], smem["d_states"].at[:, half]

    entering = tc.mma((smem["do"], states)) * tc.per_row(enter * scale, SQUARE)
    queries = tc.load(smem["q"].at[:, half]).astype(jnp.float32)
    d_total = jnp.sum(entering * queries, axis=1)
    dq = dq + entering

    leaving = tc.mma((smem["written"], d_states)) * tc.per_row(leave, SQUARE)
    keys = tc.load(smem["k"].at[:, half]).astype(jnp.float32)
    at_exit = jnp.sum(leaving * keys, axis=1)
    dk = dk + leaving

    known = tc.mma((smem["dv"], states)) * tc.per_row(-enter, SQUARE)
    keys = tc.load(smem["k"].at[:, half]).astype(jnp.float32)
    d_total = d_total + jnp.sum(known * keys, axis=1) - at_exit
    dk = dk + known

    across = gates[Gate.ENTER, CHUNK - 1]
    kept = jnp.zeros_like(at_exit)
    for start in range(0, smem["states"].shape[1], CHUNK):
        part = (half, pl.ds(start, CHUNK))
        state = tc.load(smem["states"].at[part]).astype(jnp.float32)
        d_state = tc.load(smem["d_states"].at[part]).astype(jnp.float32)
        kept = kept + jnp.sum(state * d_state, axis=1)
    sums.at[SUMS["dtotal"] + columns][...] = d_total
    sums.at[SUMS["exit"] + columns][...] = at_exit + across * kept
    return dq, dk


def document_bounds(gates: Any) -> tuple[jax.Array, jax.Array]:
    """Start of each token's document, `PER_COLUMN`, and of the last token's."""
    starts = tc.load(gates.at[Gate.START], tc.PER_COLUMN).astype(jnp.int32)
    return starts, gates[Gate.START, CHUNK - 1].astype(jnp.int32)


def decay_gradient(
    index: tuple[jax.Array, jax.Array],
    bounds: tuple[jax.Array, jax.Array],
    d_total: jax.Array,
    at_exit: jax.Array,
) -> jax.Array:
    """dg of each token.

    Args:
      index: row and column index of each element of [C, C].
      bounds: from `document_bounds`.
      d_total: `PER_COLUMN`, gradient of the sum of decays up to each token.
      at_exit: `PER_COLUMN`, gradient of the sum up to the chunk's exit.

    Returns:
      f32[C], `PER_ROW`.
    """
    row, column = index
    starts, last_start = bounds
    later = (row <= column) & (row > tc.per_column(starts, SQUARE))
    terms = jnp.where(later, tc.per_column(d_total, SQUARE), 0.0)
    terms = terms + jnp.where(row > last_start, tc.per_column(at_exit, SQUARE), 0.0)
    return jnp.sum(terms, axis=1)


def _decay_gradient(smem, index, bounds):
    """dg of each token, from what the warpgroups left."""

    def load(name: str, columns: int = 0) -> jax.Array:
        return tc.load(smem["sums"].at[SUMS[name] + columns], tc.PER_COLUMN)

    d_total = load("dtotal") + load("dtotal", 1) + load("rows") - load("columns")
    at_exit = load("exit") + load("exit", 1)
    return decay_gradient(index, bounds, d_total, at_exit)


def _combine(smem, columns, dq, dk):
    """Adds what the matrices summed over value heads give; dq, dk to shared memory."""
    half = pl.ds(columns * HALF, HALF)
    q, k = smem["q"].at[:, half], smem["k"].at[:, half]
    d_scores, d_kk = smem["scores"], smem["weights"]
    dq, dk = tc.mma_onto(
        (dq, (d_scores, k)), (dk, (d_scores.T, q), (d_kk, k), (d_kk.T, k))
    )
    for place, value in (("v", dq), ("do", dk)):
        smem[place].at[:, half][...] = value.astype(smem[place].dtype)


def _chunk_grads_kernel(
    sources, outputs, smem, *, shapes: Shapes, scale: float, config: Config
):
    block, key_head = tc.split_index(lax.axis_index("block"), shapes.key_heads)
    row, chunk = tc.split_index(block, shapes.chunks)
    tokens, inside = pl.ds(block * CHUNK, CHUNK), pl.ds(chunk * CHUNK, CHUNK)
    rows, columns_index = tc.square_indices(CHUNK)
    zeros = plgpu.layout_cast(jnp.zeros(SQUARE, jnp.float32), tc.ROWS)
    place, outside = smem, _slot(smem, 0)

    def head_of(member):
        head = key_head * shapes.group + member
        return head, row * shapes.value_heads + head

    def fetch(member):
        at = head_of(member)
        _fetch_head(sources, outside, tokens, *at, chunk)

    def start():
        for name in ("q", "k"):
            plgpu.copy_gmem_to_smem(
                sources[name].at[tokens, key_head],
                outside[name],
                smem["keys_arrived"],
            )
        fetch(jnp.int32(0))

    def value_head(part, member, sums):
        """One value head; `sums` over heads are those of `part`, in its order."""
        columns = part.columns
        half = None if columns is None else pl.ds(columns * HALF, HALF)
        sums = dict(sums)
        plgpu.barrier_wait(place["arrived"])
        gates = place["gates"]
        zero = _unknown_zero(gates)
        smem = _slot(place, zero)
        index = rows + zero, columns_index  # so are masks
        from_exit = None if half is None else _write_missing(smem, half)
        if part.pairs:
            # Multiplied again for each head: registers are scarcer than products.
            qk = tc.mma((smem["q"], smem["k"].T))
            scores = qk * decay_matrix(gates, index) * scale
            smem["scores"][...] = scores.astype(shapes.dtype)
        if part.inverse:
            beta = tc.per_column(tc.load(gates.at[Gate.BETA], tc.PER_COLUMN), SQUARE)
            inverse = tc.load(smem["inverse"]).astype(jnp.float32)
            weights = inverse * decay_matrix(gates, index) * beta
            smem["weights"][...] = weights.astype(shapes.dtype)
        _meet(smem["met"])
        plgpu.barrier_wait(smem["later_arrived"])
        if half is not None:
            _write_written(smem, half, from_exit)
        _meet(smem["met"])
        if part.pairs:
            in_turn = config.grads_products == "in_turn"
            sums["scores"] = _pair_gradients(
                smem, scale, index, sums["scores"], in_turn
            )
        if columns is not None:
            sums["dq"], sums["dk"] = _key_space(
                smem, scale, columns, sums["dq"], sums["dk"]
            )
        bounds: Any = None
        d_beta: Any = None
        if part.inverse:
            sums["weights"], d_beta = _inverse_gradient(smem, index, sums["weights"])
        if part.pairs:
            bounds = document_bounds(gates)
        _meet(smem["met"])
        if part.columns == 0:

            @pl.when(member + 1 < shapes.group)
            def _():
                fetch(member + 1)

        item = head_of(member)[1]
        if part.pairs:
            dg = _decay_gradient(smem, index, bounds)
            outputs["dg"].at[item, inside][...] = dg
        if part.inverse:
            d_beta = d_beta + tc.load(smem["sums"].at[SUMS["dbeta"]], tc.PER_ROW)
            outputs["dbeta"].at[item, inside][...] = d_beta
        return sums

    def run(part):
        launched = hw.launch_registers(config.grads_warpgroups)
        if part.registers not in (None, launched):
            action = "increase" if part.registers > launched else "decrease"
            plgpu.set_max_registers(part.registers, action=action)
        if part.columns == 0:
            start()
        plgpu.barrier_wait(place["keys_arrived"])
        names = ("dq", "dk") * (part.columns is not None)
        names += ("scores",) * part.pairs + ("weights",) * part.inverse
        sums = lax.fori_loop(
            0,
            shapes.group,
            functools.partial(value_head, part),
            dict.fromkeys(names, zeros),
        )
        for name in ("scores", "weights"):
            if name in sums:
                outside[name][...] = sums[name].astype(shapes.dtype)
        _meet(place["met"])
        if part.columns is not None:
            _combine(outside, part.columns, sums["dq"], sums["dk"])
        _meet(place["met"])
        if part.columns is not None:
            name, result = (("dq", "v"), ("dk", "do"))[part.columns]
            plgpu.copy_smem_to_gmem(outside[result], outputs[name].at[tokens, key_head])
            plgpu.wait_smem_to_gmem(0)

    warpgroup = lax.axis_index("warpgroup")
    for i, part in enumerate(PARTS[config.grads_warpgroups]):
        pl.when(warpgroup == i)(functools.partial(run, part))


def _scratch(shapes: Shapes, config: Config) -> dict[str, Any]:
    dtype = shapes.dtype
    keys = tc.operand(1, CHUNK, shapes.key_dim, dtype=dtype)
    values = tc.operand(1, CHUNK, shapes.value_dim, dtype=dtype)
    states = tc.operand(1, shapes.value_dim, shapes.key_dim, dtype=dtype)
    square = tc.operand(1, *SQUARE, dtype=dtype)
    return {
        "q": keys,
        "k": keys,
        "v": values,
        "do": values,
        "dv": values,
        "written": values,
        "d_written": values,
        "states": states,
        "d_states": states,
        "inverse": square,
        "d_inverse": square,
        "weights": square,
        "scores": square,
        "gates": plgpu.SMEM((len(Gate), CHUNK), jnp.float32),
        "sums": plgpu.SMEM((7, CHUNK), jnp.float32),
        "keys_arrived": plgpu.Barrier(num_arrivals=2),  # q and k
        "arrived": plgpu.Barrier(num_arrivals=5),
        "later_arrived": plgpu.Barrier(num_arrivals=len(LATER)),
        "met": plgpu.Barrier(num_arrivals=config.grads_warpgroups),
        "d_inverse_ready": plgpu.Barrier(num_arrivals=1),
    }


def launch_grads(
    kernel: Callable[..., None],
    name: str,
    sources: dict[str, jax.Array],
    out_type: dict[str, jax.ShapeDtypeStruct],
    *,
    blocks: int,
    threads: int,
    registers: Sequence[int],
    scratch: dict[str, Any],
) -> dict[str, jax.Array]:
    """Runs a kernel of gradients that need no order.

    Args:
      kernel: called as kernel(sources, outputs, scratch) with refs by name.
      name: of the kernel in profiles.
      sources, out_type: device memory by name.
      blocks, threads: of the grid, and warpgroups of a block.
      registers: that a block's warpgroups ask for.
      scratch: shared memory and barriers.

    Returns:
      The outputs by name.
    """
    hw.check_registers(registers)
    hw.check_smem(tc.shared_bytes(scratch) + REDUCTION_BYTES, name)

    def body(*refs, **smem):
        inputs, outputs = refs[: len(sources)], refs[len(sources) :]
        kernel(
            dict(zip(sources, inputs, strict=True)),
            dict(zip(out_type, outputs, strict=True)),
            smem,
        )

    results = plgpu.kernel(
        body,
        out_type=tuple(out_type.values()),
        grid=(blocks,),
        grid_names=("block",),
        num_threads=threads,
        thread_name="warpgroup",
        scratch_types=scratch,
        kernel_name=name,
        compiler_params=tc.params(REDUCTION_BYTES),
    )(*sources.values())
    return dict(zip(out_type, results, strict=True))


# Lowered once a module: calls of equal sizes, such as those of layers, share it.
@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def chunk_grads(
    shapes: Shapes,
    scale: float,
    config: Config,
    sources: dict[str, jax.Array],
) -> dict[str, jax.Array]:
    """Gradients of q, k, g and beta.

    Args:
      shapes: sizes of the call.
      scale: factor on the output.
      config: launch parameters.
      sources: q, k [B T, Hk, K]; v, do, dv [B T, Hv, V]; states, d_states
        [B Hv, T / C, V, K]; inverse [B T, Hv, C]; gates f32[B Hv, T / C, len(Gate), C].

    Returns:
      dq, dk like q; dg (of natural logarithms), dbeta f32[B Hv, T].
    """
    keys = jax.ShapeDtypeStruct(sources["q"].shape, shapes.dtype)
    per_token = jax.ShapeDtypeStruct((shapes.items, shapes.time), jnp.float32)
    out_type = {"dq": keys, "dk": keys, "dg": per_token, "dbeta": per_token}
    scratch = _scratch(shapes, config)
    requested = [x.registers for x in PARTS[config.grads_warpgroups] if x.registers]
    return launch_grads(
        functools.partial(
            _chunk_grads_kernel, shapes=shapes, scale=scale, config=config
        ),
        "pk_gdn_grads",
        sources,
        out_type,
        blocks=shapes.batch * shapes.chunks * shapes.key_heads,
        threads=config.grads_warpgroups,
        registers=requested,
        scratch=scratch,
    )
