"""Mosaic GPU kernel that carries the state through the chunks of a sequence.

One block has one row and one value head and walks over its chunks. The state is held
transposed, S^T [V, K], in f32 registers of two warpgroups (64 rows of V each) and is
itself the left operand of the products with K^T and Q^T, so it never visits shared
memory. A third warpgroup makes the two [C, C] matrices of a chunk,

    P = scale (Q K^T) o G    and    R = (A o G) diag(beta),

with A the inverse from `kernel_inverse` and G the decays between tokens of one
document, and a fourth one feeds a ring of chunks with TMA. Per chunk:

    U^T  = S^T K^T
    D^T  = (V^T - U^T diag(enter)) R^T        what is written to the state
    O^T  = scale (S^T Q^T) diag(enter) + D^T P^T
    S^T  = across S^T + (D^T diag(leave)) K

`enter`, `leave` and `across` are zero where a document begins or ends inside the
chunk, so documents may begin anywhere. The same body without O, writing S at each
chunk's entry and D, is part of the backward pass, unless this one has written them.
"""

from __future__ import annotations

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
    REGISTERS,
    SQUARE,
    STAGES,
    STATE_WARPGROUPS,
    Config,
    Gate,
    Order,
    Shapes,
    Warpgroup,
)


def decay_matrix(
    gates: Any, index: tuple[jax.Array, jax.Array], *, to_itself: bool = True
) -> jax.Array:
    """G: the decay from after token j to after token i, zero between documents.

    Args:
      gates: shared memory f32[len(Gate), C].
      index: row and column index of each element.
      to_itself: whether the diagonal is 1, or 0.

    Returns:
      f32[C, C], rows i and columns j.
    """
    row, column = index
    later = tc.per_row(tc.load(gates.at[Gate.TOTAL], tc.PER_ROW), SQUARE)
    earlier = tc.per_column(tc.load(gates.at[Gate.TOTAL], tc.PER_COLUMN), SQUARE)
    start = tc.load(gates.at[Gate.START], tc.PER_ROW).astype(jnp.int32)
    before = column <= row if to_itself else column < row
    same = before & (column >= tc.per_row(start, SQUARE))
    # Masked before exp2: above the diagonal the difference is positive.
    return jnp.exp2(jnp.where(same, later - earlier, -1e30))


def feed(
    shapes: Shapes,
    sources: dict[str, Any],
    ring: dict[str, Any],
    item: jax.Array,
    *,
    stages: int = STAGES,
    reverse: bool = False,
) -> None:
    """Warpgroup that copies chunk after chunk into the ring.

    Args:
      shapes: sizes of the call.
      sources: q, k [B T, Hk, K]; v, do [B T, Hv, V]; inverse [B T, Hv, C]; gates
        f32[B Hv, T / C, len(Gate), C], those that the kernel reads, in device memory.
      ring: the same names with `stages` slots in shared memory; barriers full, free.
      item: row * Hv + value head.
      stages: slots of the ring.
      reverse: whether the last chunk comes first.
    """
    row, head = tc.split_index(item, shapes.value_heads)
    key_head = lax.div(head, jnp.int32(shapes.group))

    def step(i, carry):
        slot = lax.rem(i, jnp.int32(stages))
        chunk = shapes.chunks - 1 - i if reverse else i

        @pl.when(i >= stages)
        def _():
            plgpu.barrier_wait(ring["free"].at[slot])

        tokens = pl.ds(row * shapes.time + chunk * CHUNK, CHUNK)
        for name, source in sources.items():
            if name == "gates":
                piece = source.at[item, chunk]
            else:
                piece = source.at[tokens, key_head if name in "qk" else head]
            plgpu.copy_gmem_to_smem(piece, ring[name].at[slot], ring["full"].at[slot])
        return carry

    lax.fori_loop(0, shapes.chunks, step, None)
    # Every arrival must be waited for before the block ends.
    for i in range(max(0, shapes.chunks - stages), shapes.chunks):
        plgpu.barrier_wait(ring["free"].at[i % stages])


def mix(
    shapes: Shapes,
    scale: float,
    ring: dict[str, Any],
    *,
    stages: int = STAGES,
    weigh_queries: bool = False,
    weigh_writes: bool = True,
) -> None:
    """Warpgroup that makes R, and P if the ring has a place for it, of each chunk.

    Args:
      shapes: sizes of the call.
      scale: factor on the output.
      ring: what `feed` fills; weights and scores to write to; barriers full, mixed,
        free. Weights may lie where the inverse does.
      stages: slots of the ring.
      weigh_queries: whether to replace Q by scale diag(enter) Q.
      weigh_writes: whether R has its factor diag(beta).
    """
    index = tc.square_indices(CHUNK)

    def step(i, carry):
        slot = lax.rem(i, jnp.int32(stages))
        plgpu.barrier_wait(ring["full"].at[slot])
        gates = ring["gates"].at[slot]
        qk = None
        if "scores" in ring:
            qk = tc.mma((ring["q"].at[slot], ring["k"].at[slot].T))
        decay = decay_matrix(gates, index)
        if qk is not None:
            ring["scores"][slot] = (qk * decay * scale).astype(shapes.dtype)
        weights = tc.load(ring["inverse"].at[slot]).astype(jnp.float32) * decay
        if weigh_writes:
            beta = tc.load(gates.at[Gate.BETA], tc.PER_COLUMN)
            weights = weights * tc.per_column(beta, SQUARE)
        ring["weights"][slot] = weights.astype(shapes.dtype)
        if weigh_queries:
            plgpu.commit_smem()  # all warps have multiplied with them
            enter = tc.load(gates.at[Gate.ENTER], tc.PER_ROW) * scale
            for start in range(0, shapes.key_dim, CHUNK):
                part = ring["q"].at[slot, :, pl.ds(start, CHUNK)]
                weighed = tc.load(part).astype(jnp.float32) * tc.per_row(enter, SQUARE)
                part[...] = weighed.astype(shapes.dtype)
        plgpu.commit_smem()
        plgpu.barrier_arrive(ring["mixed"].at[slot])
        plgpu.barrier_arrive(ring["free"].at[slot])
        return carry

    lax.fori_loop(0, shapes.chunks, step, None)


def state_pass(
    shapes: Shapes,
    scale: float,
    ring: dict[str, Any],
    state: jax.Array,
    warpgroup: jax.Array,
    emit: Callable[..., None],
    *,
    stages: int = STAGES,
    order: Order = "queries_first",
    enter_chunk: Callable[..., None] | None = None,
) -> jax.Array:
    """Warpgroup that carries 64 rows of S^T; returns them after the last chunk.

    Args:
      shapes: sizes of the call.
      scale: factor on the output.
      ring: what `feed` and `mix` fill; without v, the values are zero.
      state: f32[64, K], the rows before the first chunk.
      warpgroup: which rows.
      emit: called in each chunk with i, S^T at entry in 16 bits, D^T, and O^T if
        there are scores.
      stages: slots of the ring.
      order: of the products, see `Config`; unless queries are first, `mix` has
        weighed them.
      enter_chunk: called in each chunk before its products with i and S^T in 16 bits.
    """
    half = pl.ds(warpgroup * HALF, HALF)
    with_scores, with_values = "scores" in ring, "v" in ring
    queries_first = with_scores and order == "queries_first"
    values_first = with_values and order == "values_first"

    def chunk(i, state):
        slot = lax.rem(i, jnp.int32(stages))
        shape = (HALF, CHUNK)
        if enter_chunk is not None:
            enter_chunk(i, state.astype(shapes.dtype))
        plgpu.barrier_wait(ring["full"].at[slot])
        gates, k = ring["gates"].at[slot], ring["k"].at[slot]
        enter = tc.load(gates.at[Gate.ENTER], tc.PER_COLUMN)
        entry = state.astype(shapes.dtype)
        weights = ring["weights"].at[slot].T
        values: list[Any] = []
        if with_values:
            values.append((ring["v"].at[slot, :, half].T, weights))
        reads = [(entry, k.T)]
        if queries_first:
            reads.append((entry, ring["q"].at[slot].T))
        if values_first:
            plgpu.barrier_wait(ring["mixed"].at[slot])
            reads += values
        known, *read = tc.mma_each(*reads)
        missing = (-known * tc.per_column(enter, shape)).astype(shapes.dtype)
        if values_first:
            written = tc.mma((missing, weights), init=read.pop())
        else:
            plgpu.barrier_wait(ring["mixed"].at[slot])
            written = tc.mma(*values, (missing, weights))
        leave = tc.load(gates.at[Gate.LEAVE], tc.PER_COLUMN)
        left = (written * tc.per_column(leave, shape)).astype(shapes.dtype)
        across = gates[Gate.ENTER, CHUNK - 1]
        sums: list[Any] = [(state * across, (left, k))]
        if with_scores:
            scores = ring["scores"].at[slot].T
            terms = [(written.astype(shapes.dtype), scores)]
            if queries_first:
                entering = read[0] * tc.per_column(enter * scale, shape)
            else:
                entering = plgpu.layout_cast(jnp.zeros(shape, jnp.float32), tc.ROWS)
                terms.append((entry, ring["q"].at[slot].T))
            sums.append((entering, *terms))
        state, *out = tc.mma_onto(*sums)
        plgpu.commit_smem()
        plgpu.barrier_arrive(ring["free"].at[slot])
        emit(i, entry, written, *out)
        return state

    return lax.fori_loop(0, shapes.chunks, chunk, state)


def write_end(
    ref: Any,
    shapes: Shapes,
    item: jax.Array,
    half: Any,
    state: jax.Array,
    segment: int,
) -> None:
    """Writes rows of a block's state to f32[B Hv, V, K], if it has this segment."""
    row, head = tc.split_index(item, shapes.value_heads)
    outer, own = tc.split_index(row, shapes.segments)

    @pl.when(own == segment)
    def _():
        ref.at[outer * shapes.value_heads + head, half][...] = state


def end_type(shapes: Shapes) -> jax.ShapeDtypeStruct:
    """What `write_end` writes to: states of the caller's rows."""
    items = shapes.items // shapes.segments
    return jax.ShapeDtypeStruct((items, shapes.value_dim, shapes.key_dim), jnp.float32)


def _chunk_fwd_kernel(
    sources,
    initial_ref,
    out_ref,
    last_ref,
    states_ref: Any = None,
    written_ref: Any = None,
    *,
    ring,
    staging,
    shapes,
    scale,
    config,
):
    """Writes O and the final state; `sources` has q, k, v, inverse and gates.

    With `states_ref` it writes S at the entry of each chunk and D as well.
    """
    item = lax.axis_index("item")
    ring = in_place(ring)
    kept = states_ref is not None

    def carry_state(warpgroup):
        row, head = tc.split_index(item, shapes.value_heads)
        half = pl.ds(warpgroup * HALF, HALF)
        places = {name: ref.at[warpgroup] for name, ref in staging.items()}

        # Copies out of a place were read from it before the place is written again:
        # those of S are the first of a chunk's three, so two younger ones may go on.
        def enter_chunk(i, entry):
            plgpu.wait_smem_to_gmem(2, wait_read_only=True)
            places["states"][...] = entry
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(places["states"], states_ref.at[item, i, half])

        def emit(i, entry, written, out):
            del entry
            tokens = pl.ds(row * shapes.time + i * CHUNK, CHUNK)
            plgpu.wait_smem_to_gmem(1 if kept else 0, wait_read_only=True)
            tc.store_transposed(places["o"], out.astype(shapes.dtype))
            if kept:
                tc.store_transposed(places["written"], written.astype(shapes.dtype))
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(places["o"], out_ref.at[tokens, head, half])
            if kept:
                plgpu.copy_smem_to_gmem(
                    places["written"], written_ref.at[tokens, head, half]
                )

        last = state_pass(
            shapes,
            scale,
            ring,
            tc.load_global(initial_ref.at[item, half]),
            warpgroup,
            emit,
            stages=forward_stages(config, kept),
            order=config.order,
            enter_chunk=enter_chunk if kept else None,
        )
        write_end(last_ref, shapes, item, half, last, shapes.segments - 1)
        plgpu.wait_smem_to_gmem(0)

    start_warpgroups(
        shapes,
        scale,
        sources,
        ring,
        item,
        carry_state,
        stages=forward_stages(config, kept),
        weigh_queries=config.order != "queries_first",
    )


def forward_stages(config: Config, kept: bool) -> int:
    """Slots of the forward's ring: what it keeps takes the room of the third."""
    return STAGES if kept else config.stages


def write_states(
    sources: dict[str, Any],
    initial_ref: Any,
    states_ref: Any,
    *,
    ring: dict[str, Any],
    staging: Any,
    shapes: Shapes,
    item: jax.Array,
    written_ref: Any,
    written_staging: Any,
) -> None:
    """Writes S at the entry of each chunk and D, in one block.

    Args:
      sources: k, v, inverse and gates, as for `feed`.
      initial_ref: f32[B Hv, V, K] in device memory.
      states_ref: [B Hv, T / C, V, K] in device memory.
      ring: as `ring_scratch` makes it.
      staging: shared memory [STATE_WARPGROUPS, HALF, K].
      shapes: sizes of the call.
      item: row * Hv + value head.
      written_ref: [B T, Hv, V] in device memory for D.
      written_staging: shared memory [STATE_WARPGROUPS, C, HALF] for it.
    """
    row, head = tc.split_index(item, shapes.value_heads)

    def carry_state(warpgroup):
        half = pl.ds(warpgroup * HALF, HALF)

        def emit(i, entry, written):
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            staging[warpgroup] = entry
            written_out = written_staging.at[warpgroup]
            tc.store_transposed(written_out, written.astype(shapes.dtype))
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(staging.at[warpgroup], states_ref.at[item, i, half])
            tokens = pl.ds(row * shapes.time + i * CHUNK, CHUNK)
            plgpu.copy_smem_to_gmem(written_out, written_ref.at[tokens, head, half])

        initial = tc.load_global(initial_ref.at[item, half])
        state_pass(shapes, 1.0, ring, initial, warpgroup, emit)
        plgpu.wait_smem_to_gmem(0)

    start_warpgroups(shapes, 1.0, sources, ring, item, carry_state)


def start_warpgroups(
    shapes: Shapes,
    scale: float,
    sources: dict[str, Any],
    ring: dict[str, Any],
    item: jax.Array,
    carry_state: Callable[[jax.Array], None],
    *,
    stages: int = STAGES,
    reverse: bool = False,
    weigh_queries: bool = False,
    weigh_writes: bool = True,
) -> None:
    """Gives each warpgroup of a block its part.

    Args:
      shapes, scale, sources, ring, item, stages, reverse, weigh_queries, weigh_writes:
        as for `feed` and `mix`.
      carry_state: called with their index in the warpgroups that hold the state.
    """
    warpgroup = lax.axis_index("warpgroup")

    @pl.when(warpgroup == Warpgroup.COPY)
    def _():
        plgpu.set_max_registers(REGISTERS[Warpgroup.COPY], action="decrease")
        feed(shapes, sources, ring, item, stages=stages, reverse=reverse)

    @pl.when(warpgroup == Warpgroup.MIX)
    def _():
        plgpu.set_max_registers(REGISTERS[Warpgroup.MIX], action="decrease")
        mix(
            shapes,
            scale,
            ring,
            stages=stages,
            weigh_queries=weigh_queries,
            weigh_writes=weigh_writes,
        )

    @pl.when(warpgroup < STATE_WARPGROUPS)
    def _():
        plgpu.set_max_registers(REGISTERS[0], action="increase")
        carry_state(warpgroup)


def ring_scratch(
    shapes: Shapes, names: Sequence[str], stages: int = STAGES
) -> dict[str, Any]:
    """Shared memory of a ring of the sources `names`, and its barriers.

    A ring of more than two stages has no "weights": `in_place` puts them where the
    inverse was, without which three stages would not fit.
    """
    dtype = shapes.dtype
    square = tc.operand(stages, *SQUARE, dtype=dtype)
    places = {
        "q": tc.operand(stages, CHUNK, shapes.key_dim, dtype=dtype),
        "k": tc.operand(stages, CHUNK, shapes.key_dim, dtype=dtype),
        "v": tc.operand(stages, CHUNK, shapes.value_dim, dtype=dtype),
        "do": tc.operand(stages, CHUNK, shapes.value_dim, dtype=dtype),
        "inverse": square,
        "gates": plgpu.SMEM((stages, len(Gate), CHUNK), jnp.float32),
    }
    ring: dict[str, Any] = {name: places[name] for name in names}
    if stages == STAGES:
        ring["weights"] = square
    if "q" in names:
        ring["scores"] = square
    readers = 1 + STATE_WARPGROUPS
    ring["full"] = plgpu.Barrier(num_arrivals=len(names), num_barriers=stages)
    ring["mixed"] = plgpu.Barrier(num_arrivals=1, num_barriers=stages)
    ring["free"] = plgpu.Barrier(num_arrivals=readers, num_barriers=stages)
    return ring


def in_place(ring: dict[str, Any]) -> dict[str, Any]:
    """The ring with weights that replace the inverse they are made of."""
    return {"weights": ring["inverse"]} | ring


# Lowered once a module: calls of equal sizes, such as those of layers, share it.
@functools.partial(jax.jit, static_argnums=(0, 1, 2), static_argnames="kept")
def chunk_fwd(
    shapes: Shapes,
    scale: float,
    config: Config,
    sources: dict[str, jax.Array],
    initial_state: jax.Array,
    *,
    kept: bool = False,
) -> tuple[jax.Array, ...]:
    """Runs the chunks in order.

    Args:
      shapes: sizes of the call.
      scale: factor on the output.
      config: launch parameters.
      sources: q, k [B T, Hk, K], v [B T, Hv, V], and inverse, gates as
        `kernel_inverse.prepare` gives them.
      initial_state: f32[B S Hv, V, K], of each segment.
      kept: whether to return what the gradient would compute again.

    Returns:
      o [B T, Hv, V] of v's dtype, final state f32[B Hv, V, K] of the caller's rows. If
      `kept`, also states [B S Hv, T / C, V, K] at the entry of each chunk, and
      written [B T, Hv, V], which is D, of v's dtype.
    """
    operand = functools.partial(tc.operand, STATE_WARPGROUPS, dtype=shapes.dtype)
    values = jax.ShapeDtypeStruct(sources["v"].shape, shapes.dtype)
    out_type = [values, end_type(shapes)]
    staging = {"o": operand(CHUNK, HALF)}
    if kept:
        items, *matrix = initial_state.shape
        states = (items, shapes.chunks, *matrix)
        out_type += [jax.ShapeDtypeStruct(states, shapes.dtype), values]
        staging |= {
            "states": operand(HALF, shapes.key_dim),
            "written": operand(CHUNK, HALF),
        }
    stages = forward_stages(config, kept)
    return launch(
        functools.partial(_chunk_fwd_kernel, shapes=shapes, scale=scale, config=config),
        "pk_gdn_fwd_kept" if kept else "pk_gdn_fwd",
        sources,
        (initial_state,),
        blocks=shapes.items,
        out_type=tuple(out_type),
        scratch={
            "ring": ring_scratch(shapes, tuple(sources), stages),
            "staging": staging,
        },
    )


def launch(
    kernel: Callable[..., None],
    name: str,
    sources: dict[str, jax.Array],
    states: tuple[jax.Array, ...],
    *,
    blocks: int,
    out_type: tuple[jax.ShapeDtypeStruct, ...],
    scratch: dict[str, Any],
    auto_barriers: bool = True,
) -> Any:
    """Runs a kernel with one block per item and four warpgroups.

    Args:
      kernel: called as kernel(sources, *states, *outputs, **scratch) with refs.
      name: of the kernel in profiles.
      sources: what its ring reads.
      states: f32[B Hv, V, K] each, where it starts from.
      blocks: how many items there are.
      out_type: its outputs.
      scratch: shared memory and barriers.
      auto_barriers: as for `tensor_core.params`.

    Returns:
      The outputs.
    """
    hw.check_registers(REGISTERS)
    hw.check_smem(tc.shared_bytes(scratch), name)

    def body(*refs, **scratch_refs):
        count = len(sources)
        named = dict(zip(sources, refs[:count], strict=True))
        kernel(named, *refs[count:], **scratch_refs)

    return plgpu.kernel(
        body,
        out_type=out_type,
        grid=(blocks,),
        grid_names=("item",),
        num_threads=len(REGISTERS),
        thread_name="warpgroup",
        scratch_types=scratch,
        kernel_name=name,
        compiler_params=tc.params(auto_barriers=auto_barriers),
    )(*sources.values(), *states)
