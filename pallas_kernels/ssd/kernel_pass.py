"""Mosaic GPU kernels that carry a state through the chunks of a row.

One block has a row and two heads of a group and walks over the chunks. A warpgroup
holds the state S [V, N] of each head in f32 registers, and S itself, rounded, is the
left operand of what reads it, so it never visits shared memory. A third warpgroup makes
the [C, C] matrix of each head,

    M = (C B^T) o G diag(s) + d I,

from one C B^T for both, with G the decays between tokens of one document, and a fourth
one feeds a ring of chunks with TMA. Per chunk:

    Y^T = (S C^T) diag(enter) + X^T M^T
    S   = across S + (X^T diag(leave s)) B

The gradient runs the other way through the same body, with dY in the place of X, B and
C exchanged, and with them the factors of what is read and written:

    dX^T = (dS B^T) diag(leave s) + dY^T M
    dS   = across dS + (dY^T diag(enter)) C

so `state_pass` is all that carries: with Y or dX, or without them to find where a
stretch of chunks leads. `enter`, `leave` and `across` are zero where a document begins
or ends inside the chunk, so documents may begin anywhere.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection, Sequence
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
    SQUARE,
    Gate,
    Warpgroup,
)
from pallas_kernels.gated_delta_rule.kernel_fwd import decay_matrix, launch
from pallas_kernels.ssd.config_mosaic import (
    HEAD_DIM,
    HEADS,
    REGISTERS,
    STATE_DIM,
    STATE_SHAPE,
    Config,
    Shapes,
)


def beside(shapes: Shapes, work: Callable[[], Any], *pairs: Any) -> tuple[Any, Any]:
    """A sum of products as `mma` makes it, and what `work` computes."""
    if shapes.backward:
        return tc.mma_beside(work, *pairs)
    return tc.mma(*pairs), work()


GROUPED = ("b", "c")  # sources that the heads of a group share
STAGES = 2  # of kernels that write states as well


def _entering(gates: Any) -> jax.Array:
    return tc.load(gates.at[Gate.ENTER], tc.PER_COLUMN)


def _leaving(gates: Any) -> jax.Array:
    leave, step = (tc.load(gates.at[x], tc.PER_COLUMN) for x in (Gate.LEAVE, Gate.BETA))
    return leave * step


@dataclasses.dataclass(frozen=True, kw_only=True)
class Way:
    """A direction in time.

    Attributes:
      values: source of what is written to the state.
      write, read: sources of what it is written and read along.
      reverse: whether the last chunk comes first.
    """

    values: str
    write: str
    read: str
    reverse: bool

    def chunk(self, shapes: Shapes, i: Any) -> Any:
        """The chunk that comes at place i."""
        return shapes.chunks - 1 - i if self.reverse else i

    def writing(self, gates: Any) -> jax.Array:
        """What is written is weighed by, `PER_COLUMN`."""
        return _entering(gates) if self.reverse else _leaving(gates)

    def reading(self, gates: Any) -> jax.Array:
        """What is read is weighed by, `PER_COLUMN`."""
        return _leaving(gates) if self.reverse else _entering(gates)

    def sources(self, named: dict[str, Any], *, output: bool) -> dict[str, Any]:
        """Those of the arrays that a pass reads, with or without an output."""
        names = (self.values, self.write, "gates") + (self.read,) * output
        return {name: named[name] for name in names}


FORWARD = Way(values="x", write="b", read="c", reverse=False)
BACKWARD = Way(values="dy", write="c", read="b", reverse=True)


class Place:
    """The row and the heads that a block has."""

    def __init__(self, shapes: Shapes, pair: jax.Array):
        self.shapes = shapes
        self.row, at = tc.split_index(pair, shapes.heads // HEADS)
        self.first_head = at * HEADS
        self.group = lax.div(self.first_head, jnp.int32(shapes.group))

    def head(self, index: Any) -> jax.Array:
        return self.first_head + index

    def item(self, index: Any) -> jax.Array:
        return self.row * self.shapes.heads + self.head(index)

    def write_end(self, ref: Any, index: Any, state: jax.Array, segment: int) -> None:
        """Writes a head's state to f32[B H, V, N], if this segment is the row's."""
        count = jnp.int32(self.shapes.segments)
        row, own = lax.div(self.row, count), lax.rem(self.row, count)

        @pl.when(own == segment)
        def _():
            ref.at[row * self.shapes.heads + self.head(index)][...] = state

    def entering(self, way: Way, starts: Sequence[Any], index: Any) -> jax.Array:
        """The state before a head's first chunk in this segment.

        Args:
          way: the direction.
          starts: in device memory the state that the caller's rows begin with and, of
            several segments, what `segment_ends` gives.
          index: of the head in the block.

        Returns:
          f32[V, N].
        """
        count = self.shapes.segments
        row, own = tc.split_index(self.row, count)
        unit = row * self.shapes.heads + self.head(index)

        def start():
            return tc.load_global(starts[0].at[unit])

        if count == 1:
            return start()
        _, ends, through = starts

        def end(i):
            part = count - 2 - i if way.reverse else i
            return tc.load_global(ends.at[part, unit]), through[part, unit, 0]

        def step(i, state):
            after, left = end(i)
            return state * left + after

        before = count - 1 - own if way.reverse else own
        # The first segment began with the row's state, so what it ends with has all.
        state = lax.cond(before == 0, start, lambda: end(0)[0])
        return lax.fori_loop(1, jnp.maximum(before, 1), step, state)

    def factors(self, index: Any) -> jax.Array:
        """Where a head is in the table of factors."""
        return self.row * self.shapes.padded_heads + self.head(index)

    def tokens(self, chunk: Any) -> Any:
        return pl.ds(self.row * self.shapes.time + chunk * CHUNK, CHUNK)


def _feed(
    shapes: Shapes,
    way: Way,
    sources: dict[str, Any],
    ring: dict[str, Any],
    place: Place,
    stages: int,
) -> None:
    """Warpgroup that copies chunk after chunk into the ring.

    Args:
      shapes: sizes of the call.
      way: the order of the chunks.
      sources: b, c [B T, G, N]; x, dy [B T, H, V]; gates
        f32[B H', T / C, len(Gate), C]: those that the kernel reads, in device memory.
      ring: the same names with `stages` slots in shared memory; barriers full, free.
      place: of the block.
      stages: slots of the ring.
    """

    def step(i, carry):
        slot, chunk = lax.rem(i, jnp.int32(stages)), way.chunk(shapes, i)

        @pl.when(i >= stages)
        def _():
            plgpu.barrier_wait(ring["free"].at[slot])

        tokens, full = place.tokens(chunk), ring["full"].at[slot]
        for name, source in sources.items():
            to = ring[name].at[slot]
            if name in GROUPED:
                plgpu.copy_gmem_to_smem(source.at[tokens, place.group], to, full)
                continue
            for h in range(HEADS):
                if name == "gates":
                    piece = source.at[place.factors(h), chunk]
                else:
                    piece = source.at[tokens, place.head(h)]
                plgpu.copy_gmem_to_smem(piece, to.at[h], full)
        return carry

    lax.fori_loop(0, shapes.chunks, step, None)
    # Every arrival must be waited for before the block ends.
    for i in range(max(0, shapes.chunks - stages), shapes.chunks):
        plgpu.barrier_wait(ring["free"].at[i % stages])


def _mix(
    shapes: Shapes, ring: dict[str, Any], skips: list[jax.Array], stages: int
) -> None:
    """Warpgroup that makes M of each chunk and head.

    Args:
      shapes: sizes of the call.
      ring: what `_feed` fills; scores to write to; barriers full, mixed, free.
      skips: d of each head, scalars.
      stages: slots of the ring.
    """
    row, column = tc.square_indices(CHUNK)
    index = row, column

    def step(i, carry):
        slot = lax.rem(i, jnp.int32(stages))
        plgpu.barrier_wait(ring["full"].at[slot])
        products = tc.mma((ring["c"].at[slot], ring["b"].at[slot].T))

        def one_head(h, products):
            gates = ring["gates"].at[slot, h]
            step = tc.per_column(tc.load(gates.at[Gate.BETA], tc.PER_COLUMN), SQUARE)
            scores = products * decay_matrix(gates, index) * step
            skip = jnp.where(h == 0, skips[0], skips[1])
            scores = scores + jnp.where(row == column, skip, 0.0)
            ring["scores"].at[slot, h][...] = scores.astype(shapes.dtype)
            return products

        # A loop: both at a time would need more registers.
        lax.fori_loop(0, HEADS, one_head, products)
        plgpu.commit_smem()
        plgpu.barrier_arrive(ring["mixed"].at[slot])
        plgpu.barrier_arrive(ring["free"].at[slot])
        return carry

    lax.fori_loop(0, shapes.chunks, step, None)


def _state_pass(
    shapes: Shapes,
    way: Way,
    ring: dict[str, Any],
    state: jax.Array,
    head: jax.Array,
    emit: Callable[..., None],
    stages: int,
) -> tuple[jax.Array, jax.Array]:
    """Warpgroup that carries a state.

    Args:
      shapes: sizes of the call.
      way: the direction.
      ring: what `_feed` and `_mix` fill; without scores there is no output.
      state: f32[V, N] before the first chunk.
      head: which of the block's heads.
      emit: called in each chunk with its index, the state before it in 16 bits, and
        Y^T or dX^T f32[V, C] if there are scores.
      stages: slots of the ring.

    Returns:
      The state after the last chunk, and what is left in it of the first one.
    """
    shape = (HEAD_DIM, CHUNK)

    def step(i, carry):
        state, left = carry
        slot = lax.rem(i, jnp.int32(stages))
        plgpu.barrier_wait(ring["full"].at[slot])
        gates = ring["gates"].at[slot, head]
        values = ring[way.values].at[slot, head].T
        before = state.astype(shapes.dtype)

        def weigh():
            weighed = tc.load(values).astype(jnp.float32)
            weighed = weighed * tc.per_column(way.writing(gates), shape)
            return weighed.astype(shapes.dtype)

        read: Any = None
        if "scores" in ring:
            # First, for a product in flight costs the fewest registers here.
            pair = (before, ring[way.read].at[slot].T)
            read, weighed = beside(shapes, weigh, pair)
            read = read * tc.per_column(way.reading(gates), shape)
        else:
            weighed = weigh()
        across = gates[Gate.ENTER, CHUNK - 1]
        sums: list[Any] = [(state * across, (weighed, ring[way.write].at[slot]))]
        if read is not None:
            plgpu.barrier_wait(ring["mixed"].at[slot])
            scores = ring["scores"].at[slot, head]
            sums.append((read, (values, scores if way.reverse else scores.T)))
        state, *out = tc.mma_onto(*sums)
        plgpu.commit_smem()
        plgpu.barrier_arrive(ring["free"].at[slot])
        emit(way.chunk(shapes, i), before, *out)
        return state, left * across

    return lax.fori_loop(0, shapes.chunks, step, (state, jnp.float32(1.0)))


def run_block(
    shapes: Shapes,
    way: Way,
    sources: dict[str, Any],
    ring: dict[str, Any],
    place: Place,
    *,
    initial: Callable[[jax.Array], jax.Array],
    emit: Callable[..., None],
    end: Callable[[jax.Array, jax.Array, jax.Array], None],
    skip_ref: Any = None,
    stages: int = STAGES,
) -> None:
    """Gives each warpgroup of a block its part of a pass.

    Args:
      shapes, way, sources, ring, place, stages: as for `_feed`.
      initial: head of the block -> f32[V, N] before the first chunk.
      emit: head of the block, then what `_state_pass` gives.
      end: called with the head of the block and what `_state_pass` returns.
      skip_ref: f32[H] in device memory, d; for the output alone.
    """
    hw.check_registers(REGISTERS)
    warpgroup = lax.axis_index("warpgroup")

    @pl.when(warpgroup == Warpgroup.COPY)
    def _():
        plgpu.set_max_registers(REGISTERS[Warpgroup.COPY], action="decrease")
        _feed(shapes, way, sources, ring, place, stages)

    @pl.when(warpgroup == Warpgroup.MIX)
    def _():
        plgpu.set_max_registers(REGISTERS[Warpgroup.MIX], action="decrease")
        if "scores" in ring:
            skips = [skip_ref[place.head(h)] for h in range(HEADS)]
            _mix(shapes, ring, skips, stages)

    @pl.when(warpgroup < HEADS)
    def _():
        plgpu.set_max_registers(REGISTERS[0], action="increase")
        found = _state_pass(
            shapes,
            way,
            ring,
            initial(warpgroup),
            warpgroup,
            functools.partial(emit, warpgroup),
            stages,
        )
        end(warpgroup, *found)
        plgpu.wait_smem_to_gmem(0)


def _copies(names: Collection[str]) -> int:
    return sum(1 if name in GROUPED else HEADS for name in names)


def ring_scratch(
    shapes: Shapes, names: Collection[str], stages: int, *, output: bool
) -> dict[str, Any]:
    """Shared memory of a ring of the sources `names`, and its barriers."""
    operand = functools.partial(tc.operand, stages, dtype=shapes.dtype)
    by_head = operand(HEADS, CHUNK, HEAD_DIM)
    places = {
        "b": operand(CHUNK, STATE_DIM),
        "c": operand(CHUNK, STATE_DIM),
        "x": by_head,
        "dy": by_head,
        "gates": plgpu.SMEM((stages, HEADS, len(Gate), CHUNK), jnp.float32),
    }
    ring: dict[str, Any] = {name: places[name] for name in names}
    if output:
        ring["scores"] = operand(HEADS, *SQUARE)
        ring["mixed"] = plgpu.Barrier(num_arrivals=1, num_barriers=stages)
    copies, readers = _copies(names), HEADS + output
    ring["full"] = plgpu.Barrier(num_arrivals=copies, num_barriers=stages)
    ring["free"] = plgpu.Barrier(num_arrivals=readers, num_barriers=stages)
    return ring


def staging_scratch(shapes: Shapes, *, states: bool) -> dict[str, Any]:
    """Shared memory that `store` sends its arguments through."""
    operand = functools.partial(tc.operand, HEADS, dtype=shapes.dtype)
    staging = {"out": operand(CHUNK, HEAD_DIM)}
    return staging | ({"states": operand(*STATE_SHAPE)} if states else {})


def store(
    place: Place,
    staging: dict[str, Any],
    refs: Sequence[Any],
    head: jax.Array,
    chunk: jax.Array,
    state: jax.Array,
    out: jax.Array,
) -> None:
    """Sends what `_state_pass` gives in a chunk to device memory.

    Args:
      place: of the block.
      staging: as `staging_scratch` makes it.
      refs: [B T, H, V] for Y or dX, and `chunk_states` where states are kept.
      head: of the block.
      chunk: its index.
      state: before it, f16 or bf16.
      out: Y^T or dX^T f32[V, C].
    """
    out_ref, *states_ref = refs
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    tc.store_transposed(staging["out"].at[head], out.astype(place.shapes.dtype))
    if states_ref:
        staging["states"].at[head][...] = state
    plgpu.commit_smem()
    to = out_ref.at[place.tokens(chunk), place.head(head)]
    plgpu.copy_smem_to_gmem(staging["out"].at[head], to)
    if states_ref:
        to = states_ref[0].at[place.item(head), chunk]
        plgpu.copy_smem_to_gmem(staging["states"].at[head], to)


def starts_of(shapes: Shapes) -> int:
    """How many arrays say what enters the segments, see `Place.entering`."""
    return 1 if shapes.segments == 1 else 3


def _fwd_kernel(sources, skip_ref, *refs, ring, staging, shapes, stages):
    """Writes Y and the final state; `sources` has b, c, x and gates."""
    count = starts_of(shapes)
    starts, (out_ref, last_ref, *states) = refs[:count], refs[count:]
    place = Place(shapes, lax.axis_index("item"))

    def end(head, state, left):
        del left
        place.write_end(last_ref, head, state, shapes.segments - 1)

    run_block(
        shapes,
        FORWARD,
        sources,
        ring,
        place,
        initial=functools.partial(place.entering, FORWARD, starts),
        emit=functools.partial(store, place, staging, (out_ref, *states)),
        end=end,
        skip_ref=skip_ref,
        stages=stages,
    )


def chunk_states(shapes: Shapes) -> jax.ShapeDtypeStruct:
    """One state for each chunk."""
    shape = (shapes.items, shapes.chunks, *STATE_SHAPE)
    return jax.ShapeDtypeStruct(shape, shapes.dtype)


# Lowered once a module: calls of equal sizes, such as those of layers, share it.
@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def chunk_fwd(
    shapes: Shapes,
    config: Config,
    keeps: bool,
    sources: dict[str, jax.Array],
    skip: jax.Array,
    starts: tuple[jax.Array, ...],
) -> tuple[jax.Array, ...]:
    """Runs the chunks in order.

    Args:
      shapes: sizes of the call.
      config: launch parameters.
      keeps: whether it returns the states as well.
      sources: b, c [B T, G, N], x [B T, H, V], and gates as `prepare` gives them.
      skip: f32[H], d.
      starts: f32[B H, V, N], the state that enters the caller's rows, and, of several
        segments, what `segment_ends` gives.

    Returns:
      y [B T, H, V] of x's dtype, final state f32[B H, V, N] of the caller's rows, and
      with `keeps` `chunk_states`, at the entry of each chunk.
    """
    sources = FORWARD.sources(sources, output=True)
    stages = STAGES if keeps else config.stages
    return launch(
        functools.partial(_fwd_kernel, shapes=shapes, stages=stages),
        "pk_ssd_fwd",
        sources,
        (skip, *starts),
        blocks=shapes.pairs,
        out_type=(
            jax.ShapeDtypeStruct(sources["x"].shape, shapes.dtype),
            jax.ShapeDtypeStruct(
                (shapes.items // shapes.segments, *STATE_SHAPE), jnp.float32
            ),
            *([chunk_states(shapes)] if keeps else []),
        ),
        scratch={
            "ring": ring_scratch(shapes, sources, stages, output=True),
            "staging": staging_scratch(shapes, states=keeps),
        },
    )


def _ends_kernel(
    sources, start_ref, out_ref, through_ref, *, ring, shapes, way, start_part
):
    part, unit = tc.split_index(lax.axis_index("item"), shapes.pairs // shapes.segments)
    row, at = tc.split_index(unit, shapes.heads // HEADS)
    # All segments but the last in its direction, whose end nobody asks for.
    segment = part + 1 if way.reverse else part
    pair = (row * shapes.segments + segment) * (shapes.heads // HEADS) + at
    place = Place(shapes, pair)

    def initial(head):
        is_first = (part == start_part).astype(jnp.float32)
        return tc.load_global(start_ref.at[unit * HEADS + head]) * is_first

    def end(head, state, left):
        item = lax.axis_index("item") * HEADS + head
        out_ref.at[item][...] = state
        left = plgpu.layout_cast(jnp.full((CHUNK,), left, jnp.float32), tc.PER_ROW)
        through_ref.at[item][...] = left

    run_block(
        shapes,
        way,
        sources,
        ring,
        place,
        initial=initial,
        emit=lambda *_: None,
        end=end,
        stages=4,
    )


# Lowered once a module: calls of equal sizes, such as those of layers, share it.
@functools.partial(jax.jit, static_argnums=(0, 1))
def segment_ends(
    shapes: Shapes, way: Way, sources: dict[str, jax.Array], start: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Where segments lead: the first in its direction from `start`, others from zero.

    Args:
      shapes: sizes of the call with each segment as a row of its own, S of them at
        least 2.
      way: the direction.
      sources: those of `way` without an output, as for `chunk_fwd`.
      start: f32[B H, V, N], the state that enters the caller's rows, or the gradient of
        the one that leaves them.

    Returns:
      f32[S - 1, B H, V, N], in the order of time, of all segments but the last in the
      direction; and f32[S - 1, B H, C], in each of C places what is left in it of the
      state that enters the segment.
    """
    sources = way.sources(sources, output=False)
    parts, units = shapes.segments - 1, start.shape[0]
    start_part = parts - 1 if way.reverse else 0
    count = parts * units
    ends, through = launch(
        functools.partial(_ends_kernel, shapes=shapes, way=way, start_part=start_part),
        "pk_ssd_entry_gradients" if way.reverse else "pk_ssd_summary",
        sources,
        (start,),
        blocks=count // HEADS,
        out_type=(
            jax.ShapeDtypeStruct((count, *STATE_SHAPE), jnp.float32),
            jax.ShapeDtypeStruct((count, CHUNK), jnp.float32),
        ),
        scratch={"ring": ring_scratch(shapes, sources, 4, output=False)},
        auto_barriers=not shapes.backward,
    )
    return tuple(x.reshape(parts, units, *x.shape[1:]) for x in (ends, through))
