"""Mosaic GPU kernel for the gradients that need no order, a chunk of a group at a time.

The passes before wrote S at the entry of each chunk and dS at its exit. With M and G as
in `kernel_pass`, and rows i and columns j of [C, C]:

    dM = dY X^T        T = dM o G diag(s), of each head
    dC_h = T B + diag(enter) dY S        dB_h = T^T C + diag(leave s) X dS
    dtotal = rowsum(C o dC_h) - rowsum(B o dB_h)
    dexit = rowsum(B o diag(leave s) X dS) + across <dS, S>, a row of V in each place
    ds = rowsum(B o dB_h) / s            dd = trace dM

and dC, dB are the sums of dC_h, dB_h over the heads of a group, in registers and in one
fixed order. `kernel_steps` makes dg of dtotal and dexit, and adds up dd.

T is rounded to 16 bits, once: what of it is in both sums of dtotal cancels as it does
without rounding. Its diagonal, which under strong decay is all of T, is in neither: it
is kept beside T, in float32 and a number per token, and added to dB, dC and ds. A step
of zero has ds = 0 but for the diagonal: what a step is made of has no slope there.

**Who works.** Blocks stay and work through chunk after chunk. Two warpgroups have half
of the N columns each, of S, dS, B, C, dB and dC, and compute sums per token beside the
products that follow. A third makes T of the next head, and ends sums per token that the
two leave in a table. The fourth copies ahead, also into the next chunk: a head's place
is free when half of its products are made.
"""

from __future__ import annotations

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
from pallas_kernels.gated_delta_rule.config_mosaic import CHUNK, SQUARE, Gate
from pallas_kernels.gated_delta_rule.kernel_fwd import decay_matrix
from pallas_kernels.gated_delta_rule.kernel_grads import launch_grads
from pallas_kernels.ssd.config_mosaic import STATE_DIM, Shapes
from pallas_kernels.ssd.kernel_pass import beside


COLUMNS = STATE_DIM // 2  # of a warpgroup
PAIRS, COPY = 2, 3  # warpgroups; those before have the columns
REGISTERS = (184, 184, 120, 24)
KEYS = ("b", "c")
VALUES = ("x", "dy")
EDGES = ("states", "d_states")
# Rows of the table of sums per token, one for each warpgroup with columns: of C o dC_h,
# of B o dB_h, and dexit; and the third one's, the diagonal of T, of all heads so far.
READ, WRITTEN, EXIT, OWN = 0, 2, 4, 6
SUMS = 7
MIN_STEP = 1e-30  # a step below it counts as zero
# For a head: values and gates, halves of two states.
HEAD_COPIES = len(VALUES) + 1 + 2 * len(EDGES)


def _blocks(shapes: Shapes) -> int:
    """Chunks of groups."""
    return shapes.batch * shapes.chunks * shapes.groups


class _Turn:
    """Where the chunk of a group lies that a block takes in its turn `turn`.

    First chunks come first, those of all rows: `kernel_bwd` came to them last, and what
    it read and wrote there may still be in L2.
    """

    def __init__(self, shapes: Shapes, turn: jax.Array):
        blocks = min(_blocks(shapes), hw.device().sms)
        block = turn * blocks + lax.axis_index("block")
        place, self.group = tc.split_index(block, shapes.groups)
        self.chunk, self.row = tc.split_index(place, shapes.batch)
        self.tokens = pl.ds((self.row * shapes.chunks + self.chunk) * CHUNK, CHUNK)
        self.inside = pl.ds(self.chunk * CHUNK, CHUNK)
        self.shapes = shapes

    def factors(self, member: jax.Array) -> jax.Array:
        """Where a head of the group is in tables of `padded_heads`."""
        head, _ = self.head(member)
        return self.row * self.shapes.padded_heads + head

    def head(self, member: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The head, and its index over the rows."""
        head = self.group * self.shapes.group + member
        return head, self.row * self.shapes.heads + head


def _half(index: Any) -> Any:
    return pl.ds(index * COLUMNS, COLUMNS)


def _parity(x: jax.Array) -> jax.Array:
    return lax.rem(x, jnp.int32(2))


def _copy(shapes: Shapes, turns: jax.Array, sources: Any, smem: Any) -> None:
    """Copies ahead of the others, as far as there is room."""

    def fetch_keys(place, turn):
        slot = _parity(turn)

        @pl.when(turn >= 2)
        def _():
            plgpu.barrier_wait(smem["keys_free"].at[slot])

        for name, half in itertools.product(KEYS, range(2)):
            plgpu.copy_gmem_to_smem(
                sources[name].at[place.tokens, place.group, _half(half)],
                smem[name].at[slot, half],
                smem["keys_full"].at[slot],
            )

    def head_step(place, turn, member, carry):
        head, item = place.head(member)
        count = turn * shapes.group + member
        slot = _parity(count)
        full = smem["full"].at[slot]

        @pl.when(count >= 2)
        def _():
            plgpu.barrier_wait(smem["free"].at[slot])

        gates = sources["gates"].at[place.factors(member), place.chunk]
        plgpu.copy_gmem_to_smem(gates, smem["gates"].at[slot], full)
        for (i, name), half in itertools.product(enumerate(EDGES), range(2)):
            plgpu.copy_gmem_to_smem(
                sources[name].at[item, place.chunk, :, _half(half)],
                smem["edges"].at[slot, i, half],
                full,
            )
        for name in VALUES:
            plgpu.copy_gmem_to_smem(
                sources[name].at[place.tokens, head], smem[name].at[slot], full
            )
        return carry

    def turn_step(turn, carry):
        place = _Turn(shapes, turn)
        fetch_keys(place, turn)
        step = functools.partial(head_step, place, turn)
        return lax.fori_loop(0, shapes.group, step, carry)

    lax.fori_loop(0, turns, turn_step, None)

    # Every arrival must be waited for before the block ends; heads are even in number.
    for slot in range(2):
        plgpu.barrier_wait(smem["free"].at[slot])

    @pl.when(turns >= 2)
    def _():
        plgpu.barrier_wait(smem["keys_free"].at[_parity(turns)])

    plgpu.barrier_wait(smem["keys_free"].at[_parity(turns + 1)])


def _head_columns(
    shapes: Shapes,
    slot: Any,
    free: Callable[[], None],
    mixed: Callable[[], None],
    columns: Any,
    sums: tuple[jax.Array, jax.Array],
) -> tuple[jax.Array, jax.Array]:
    """Adds a head's terms in half of the N columns.

    Args:
      shapes: sizes of the call.
      slot: x, dy, edges, gates, pairs and sums of the head; b and c.
      free: gives the ring's place back.
      mixed: waits for pairs, and for the table of two heads before to be read.
      columns: which half of the N columns.
      sums: db, dc f32[C, N / 2].

    Returns:
      `sums` with this head's terms.
    """
    db, dc = sums
    gates, table = slot["gates"], slot["sums"]
    state, d_state = (slot["edges"].at[i, columns] for i in range(2))
    keys = {name: slot[name].at[columns] for name in KEYS}

    def factor(gate):
        return tc.load(gates.at[gate], tc.PER_ROW)

    def products_of_states():
        kept = tc.load(state).astype(jnp.float32)
        return jnp.sum(kept * tc.load(d_state).astype(jnp.float32), axis=1)

    def along(rows, name):
        """Of each row its product with the row of b or c."""
        return jnp.sum(rows * tc.load(keys[name]).astype(jnp.float32), axis=1)

    written, kept = beside(shapes, products_of_states, (slot["x"], d_state))
    leave = factor(Gate.LEAVE) * factor(Gate.BETA)
    written = written * tc.per_row(leave, SQUARE)
    read, exits = beside(shapes, lambda: along(written, "b"), (slot["dy"], state))
    exits = exits + kept * gates[Gate.ENTER, CHUNK - 1]
    enter = factor(Gate.ENTER)
    # What follows reads nothing that the ring brings for a head.
    plgpu.commit_smem()
    free()
    mixed()
    table.at[EXIT + columns][...] = exits
    (written,) = tc.mma_onto((written, (slot["pairs"].T, keys["c"])))

    def end_of_written():
        return along(written, "b"), db + written

    product, (along_b, db_after) = beside(
        shapes, end_of_written, (slot["pairs"], keys["b"])
    )
    table.at[WRITTEN + columns][...] = along_b
    read = read * tc.per_row(enter, SQUARE) + product
    table.at[READ + columns][...] = along(read, "c")
    return db_after, dc + read


def _columns(
    shapes: Shapes, turns: jax.Array, columns: jax.Array, outputs: Any, smem: Any
) -> None:
    """Warpgroup with half of the columns of dB and dC."""
    zeros = plgpu.layout_cast(jnp.zeros(SQUARE, jnp.float32), tc.ROWS)
    no_own = plgpu.layout_cast(jnp.zeros((CHUNK,), jnp.float32), tc.PER_ROW)

    def head_step(turn, member, carry):
        db, dc, _ = carry
        at = _parity(turn * shapes.group + member)
        plgpu.barrier_wait(smem["full"].at[at])
        by_head = (*VALUES, "gates", "edges", "pairs", "sums")
        slot = {name: smem[name].at[at] for name in by_head}
        slot |= {name: smem[name].at[_parity(turn)] for name in KEYS}
        free = functools.partial(plgpu.barrier_arrive, smem["free"].at[at])
        mixed = functools.partial(plgpu.barrier_wait, smem["mixed"].at[at])
        db, dc = _head_columns(shapes, slot, free, mixed, columns, (db, dc))
        own = tc.load(slot["sums"].at[OWN], tc.PER_ROW)
        plgpu.commit_smem()
        plgpu.barrier_arrive(smem["summed"].at[at])
        return db, dc, own

    def turn_step(turn, carry):
        place, slot = _Turn(shapes, turn), _parity(turn)
        plgpu.barrier_wait(smem["keys_full"].at[slot])
        step = functools.partial(head_step, turn)
        db, dc, own = lax.fori_loop(0, shapes.group, step, (zeros, zeros, no_own))
        b, c = (smem[name].at[slot, columns] for name in KEYS)
        own = tc.per_row(own, SQUARE)
        db = db + own * tc.load(c).astype(jnp.float32)
        dc = dc + own * tc.load(b).astype(jnp.float32)
        # Other warps of this one may still read these columns, nobody else.
        plgpu.commit_smem()
        for name, place_of, value in (("db", b, db), ("dc", c, dc)):
            place_of[...] = value.astype(shapes.dtype)
            plgpu.commit_smem()
            to = outputs[name].at[place.tokens, place.group, _half(columns)]
            plgpu.copy_smem_to_gmem(place_of, to)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        plgpu.barrier_arrive(smem["keys_free"].at[slot])
        return carry

    lax.fori_loop(0, turns, turn_step, None)
    plgpu.wait_smem_to_gmem(0)


def _diagonal(index: tuple[jax.Array, jax.Array], square: jax.Array) -> jax.Array:
    """The diagonal of f32[C, C], `PER_ROW`."""
    return jnp.sum(jnp.where(index[0] == index[1], square, 0.0), axis=1)


def _pairs(shapes: Shapes, turns: jax.Array, outputs: Any, smem: Any) -> None:
    """Warpgroup for pairs of tokens, and for the ends of sums per token."""
    nothing = plgpu.layout_cast(jnp.zeros((CHUNK,), jnp.float32), tc.PER_ROW)
    index = tc.square_indices(CHUNK)

    def write(place, member, name, value):
        outputs[name].at[place.factors(member), place.inside][...] = value

    def head_ends(place, turn, own_product, member, own, step):
        at = _parity(turn * shapes.group + member)
        plgpu.barrier_wait(smem["summed"].at[at])

        def load(first: int) -> jax.Array:
            table = smem["sums"].at[at]
            halves = (tc.load(table.at[first + i], tc.PER_ROW) for i in range(2))
            return sum(halves, start=jnp.float32(0.0))

        written = load(WRITTEN)
        known = step > MIN_STEP
        by_step = jnp.where(known, written / jnp.where(known, step, 1.0), 0.0)
        write(place, member, "dstep", by_step + own * own_product)
        write(place, member, "d_total", load(READ) - written)
        write(place, member, "exits", load(EXIT))

    def head_step(place, turn, own_product, member, carry):
        all_own, *before = carry
        at = _parity(turn * shapes.group + member)
        plgpu.barrier_wait(smem["full"].at[at])
        gates = smem["gates"].at[at]
        # Without the diagonal, in which nothing decays.
        d_scores, decay = beside(
            shapes,
            lambda: decay_matrix(gates, index, to_itself=False),
            (smem["dy"].at[at], smem["x"].at[at].T),
        )
        own = _diagonal(index, d_scores)
        own_step = tc.load(gates.at[Gate.BETA], tc.PER_ROW)
        all_own = all_own + own * own_step
        smem["sums"].at[at, OWN][...] = all_own
        step = tc.per_column(tc.load(gates.at[Gate.BETA], tc.PER_COLUMN), SQUARE)
        smem["pairs"].at[at][...] = (d_scores * decay * step).astype(shapes.dtype)
        plgpu.commit_smem()
        plgpu.barrier_arrive(smem["mixed"].at[at])
        plgpu.barrier_arrive(smem["free"].at[at])
        write(place, member, "dd", own)

        # A head late, so that the two others never wait for pairs.
        @pl.when(member > 0)
        def _():
            head_ends(place, turn, own_product, member - 1, *before)

        return all_own, own, own_step

    def turn_step(turn, carry):
        place = _Turn(shapes, turn)
        plgpu.barrier_wait(smem["keys_full"].at[_parity(turn)])
        b, c = (smem[name].at[_parity(turn)] for name in KEYS)
        # The decay from a token to itself is 1 in every head.
        products = tc.mma(*((c.at[i], b.at[i].T) for i in range(2)))
        own_product = _diagonal(index, products)
        step = functools.partial(head_step, place, turn, own_product)
        _, *last = lax.fori_loop(0, shapes.group, step, (nothing,) * 3)
        head_ends(place, turn, own_product, jnp.int32(shapes.group - 1), *last)
        return carry

    lax.fori_loop(0, turns, turn_step, None)


def _grads_kernel(sources: Any, outputs: Any, smem: Any, *, shapes: Shapes) -> None:
    blocks = min(_blocks(shapes), hw.device().sms)
    last = jnp.int32(_blocks(shapes) - 1) - lax.axis_index("block")
    turns = lax.div(last, jnp.int32(blocks)) + 1
    warpgroup = lax.axis_index("warpgroup")

    def start(condition, registers, run, *args):
        launched = hw.launch_registers(len(REGISTERS))

        @pl.when(condition)
        def _():
            action = "increase" if registers > launched else "decrease"
            plgpu.set_max_registers(registers, action=action)
            run(shapes, turns, *args, smem)

    start(warpgroup < PAIRS, REGISTERS[0], _columns, warpgroup, outputs)
    start(warpgroup == PAIRS, REGISTERS[PAIRS], _pairs, outputs)
    start(warpgroup == COPY, REGISTERS[COPY], _copy, sources)


def _scratch(shapes: Shapes) -> dict[str, Any]:
    def tiles(*shape: int) -> Any:
        return tc.operand(*shape, *SQUARE, dtype=shapes.dtype)

    return {
        **dict.fromkeys(KEYS, tiles(2, 2)),
        **dict.fromkeys(VALUES, tiles(2)),
        "edges": tiles(2, len(EDGES), 2),
        "pairs": tiles(2),
        "gates": plgpu.SMEM((2, len(Gate), CHUNK), jnp.float32),
        "sums": plgpu.SMEM((2, SUMS, CHUNK), jnp.float32),
        "keys_full": plgpu.Barrier(num_arrivals=2 * len(KEYS), num_barriers=2),
        "keys_free": plgpu.Barrier(num_arrivals=2, num_barriers=2),
        "full": plgpu.Barrier(num_arrivals=HEAD_COPIES, num_barriers=2),
        "free": plgpu.Barrier(num_arrivals=3, num_barriers=2),
        "summed": plgpu.Barrier(num_arrivals=2, num_barriers=2),
        "mixed": plgpu.Barrier(num_arrivals=1, num_barriers=2),
    }


# Lowered once a module: calls of equal sizes, such as those of layers, share it.
@functools.partial(jax.jit, static_argnums=0)
def chunk_grads(shapes: Shapes, sources: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """Gradients of b, c, step sizes, log decays and the skip.

    Args:
      shapes: sizes of the call.
      sources: b, c [B T, G, N]; x, dy [B T, H, V]; states, d_states
        of `chunk_states`; gates f32[B H', T / C, len(Gate), C].

    Returns:
      db, dc like b; and f32[B H', T]: dstep; "d_total" and "exits", gradients of the
      sums of natural log decays from a document's start to each token and to the
      chunk's exit; and "dd", what each token adds to the skip's gradient. Heads behind
      H are not written.
    """
    names = (*KEYS, *VALUES, *EDGES, "gates")
    keys = jax.ShapeDtypeStruct(sources["b"].shape, shapes.dtype)
    per_token = jax.ShapeDtypeStruct(
        (shapes.batch * shapes.padded_heads, shapes.time), jnp.float32
    )
    out_type = dict.fromkeys(("db", "dc"), keys)
    out_type |= dict.fromkeys(("dstep", "d_total", "exits", "dd"), per_token)
    scratch = _scratch(shapes)
    return launch_grads(
        functools.partial(_grads_kernel, shapes=shapes),
        "pk_ssd_grads",
        {name: sources[name] for name in names},
        out_type,
        blocks=min(_blocks(shapes), hw.device().sms),
        threads=len(REGISTERS),
        registers=REGISTERS,
        scratch=scratch,
        auto_barriers=not shapes.backward,
    )
