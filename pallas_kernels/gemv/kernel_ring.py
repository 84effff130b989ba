"""Mosaic GPU kernel of `gemv` and `gemv_chain`: weights come through shared memory.

A block has a strip of columns of a product, over all of K. Each thread asks for its
own pieces of the weights, bursts of them in a ring, and reads back what it asked for
itself: no thread waits for another one's copies, and many more bytes are on their way
than the registers could hold. x is brought to shared memory once, in float32 and times
the norm's scale, so that no product waits for it again.

**Several products in one launch** are phases: what a phase writes, the next one reads,
after all blocks have met: there are no more of them than SMs, each with one for itself.
Weights are known before: the ring goes on into the next phases while a phase ends, so
that memory is at work across the borders.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels._common import hw, indexed, interpret, meeting, overlap
from pallas_kernels._common.layout import shared_bytes
from pallas_kernels._common.pieces import WARPGROUP
from pallas_kernels.attention import tensor_core as tc
from pallas_kernels.gemv.config import PIECE, Config
from pallas_kernels.gemv.kernel import WARPS, leave_sums, sum_of_warps


@dataclasses.dataclass(frozen=True, kw_only=True)
class Phase:
    """One product of a launch.

    Attributes:
      source: name of what it multiplies, [M, K].
      weights: names of matrices; two with `gated`, else one for each result.
      results: names of what it writes.
      depth, widths: K, and N of each result.
      columns: of a block.
      gated: whether the weights make one result by SwiGLU.
      scale: name of the scale of the norm in front, `None` without one.
      eps, zero_centered: of the norm.
      residual: name of what is added to the one result, `None` for nothing.
    """

    source: str
    weights: tuple[str, ...]
    results: tuple[str, ...]
    depth: int
    widths: tuple[int, ...]
    columns: int
    gated: bool = False
    scale: str | None = None
    eps: float = 1e-6
    zero_centered: bool = False
    residual: str | None = None

    @property
    def lanes(self) -> int:
        """Threads that read a row of a strip."""
        return self.columns // PIECE

    @property
    def each(self) -> int:
        """Weights of a result."""
        return 2 if self.gated else 1

    @property
    def strips(self) -> tuple[int, ...]:
        """Blocks of each result; the last of them may have columns that are none."""
        return tuple(-(-n // self.columns) for n in self.widths)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """The static part of a launch.

    Attributes:
      rows: M.
      phases: what it computes, one after the other.
      blocks: of the launch, each of which has at most one strip of a phase.
      at_rest: whether no launch in front of this one writes the weights.
      ahead: names of what the launch behind this one reads.
      dtype: of the weights.
      config: `ring` bursts of `burst` pieces a thread.
    """

    rows: int
    phases: tuple[Phase, ...]
    blocks: int
    at_rest: bool
    ahead: tuple[str, ...] = ()
    dtype: Any
    config: Config

    @property
    def borders(self) -> int:
        """How often the blocks meet."""
        return len(self.phases) - 1 if self.blocks > 1 else 0

    def steps(self, phase: Phase) -> int:
        """Rows of a weight that a thread has in a burst."""
        return self.config.burst // phase.each

    def burst(self, phase: Phase) -> int:
        """Rows of a weight that a block has in a burst."""
        rows = WARPGROUP // phase.lanes * self.config.warpgroups
        return rows * self.steps(phase)

    def bursts(self, phase: Phase) -> int:
        return -(-phase.depth // self.burst(phase))

    @property
    def begins(self) -> list[int]:
        """Bursts before each phase, and before the end."""
        counts = (self.bursts(phase) for phase in self.phases)
        return list(itertools.accumulate(counts, initial=0))

    def padded(self, phase: Phase) -> int:
        """Rows of all bursts, K and what is zero behind it."""
        return self.bursts(phase) * self.burst(phase)

    @property
    def scratch(self) -> dict[str, Any]:
        """Shared memory and barriers."""
        warpgroups, rows = self.config.warpgroups, self.rows
        places = max(rows * phase.each for phase in self.phases)
        columns = max(phase.columns for phase in self.phases)
        threads = warpgroups * WARPGROUP
        depth = -(-max(map(self.padded, self.phases)) // threads) * threads
        bursts = self.config.ring * self.config.burst
        ring = (bursts, threads, PIECE)
        return {
            "ring": plgpu.SMEM(ring, self.dtype),
            "x": plgpu.SMEM((rows, depth), jnp.float32),
            "squares": plgpu.SMEM((rows, threads), jnp.float32),
            "sums": plgpu.SMEM((places, warpgroups * WARPS, columns), jnp.float32),
            "met": plgpu.Barrier(num_arrivals=warpgroups),
        }


@dataclasses.dataclass(frozen=True)
class _Block:
    """What a warpgroup of a block works with."""

    plan: Plan
    refs: dict[str, Any]
    smem: dict[str, Any]
    wg: Any
    block: Any

    def meet(self) -> None:
        """All warpgroups of the block."""
        plgpu.barrier_arrive(self.smem["met"])
        plgpu.barrier_wait(self.smem["met"])

    def strips(self, phase: Phase):
        """Of each result: whether the block has a strip of it, and where it begins."""
        block, before = self.block, 0
        for result, count in enumerate(phase.strips):
            is_its = (block >= before) & (block < before + count)
            yield result, is_its, (block - before) * phase.columns
            before += count

    def rows_of(self, phase: Phase, i: Any) -> list[jax.Array]:
        """Row of each of a thread's steps in a burst."""
        lanes, steps = phase.lanes, self.plan.steps(phase)
        step = WARPGROUP // lanes
        begin = i * self.plan.burst(phase) + self.wg * (steps * step)
        return [
            indexed.iota(WARPGROUP) // lanes + (begin + s * step) for s in range(steps)
        ]

    def place(self, phase: Phase, turn: Any, s: int, n: int) -> tuple[Any, Any]:
        """Of a step and a weight in the ring."""
        first = lax.rem(jnp.int32(turn), jnp.int32(self.plan.config.ring))
        first = first * self.plan.config.burst
        return first + (s * phase.each + n), self.wg * WARPGROUP

    def ask_of(self, phase: Phase, turn: Any, i: Any) -> None:
        """Asks for a phase's burst i, the `turn`-th of the launch."""
        lane = indexed.iota(WARPGROUP) % phase.lanes * PIECE
        for result, is_its, first in self.strips(phase):
            names = phase.weights[result * phase.each :][: phase.each]

            @pl.when(is_its)
            def _(result=result, first=first, names=names):
                width = phase.widths[result]
                column = lane + first
                for s, at in enumerate(self.rows_of(phase, i)):
                    where = at < phase.depth
                    if width % phase.columns:
                        where &= column < width
                    inside = jnp.minimum(at, phase.depth - 1)
                    index = inside, jnp.minimum(column, width - PIECE)
                    for n, name in enumerate(names):
                        to = self.place(phase, turn, s, n)
                        indexed.copy(
                            self.refs[name], index, self.smem["ring"], to, where
                        )

    def ask(self, turn: Any, among: Sequence[int]) -> None:
        """Asks for the `turn`-th burst, which is of one of some phases, or of none."""
        begins = self.plan.begins
        for p in among:
            is_its = (turn >= begins[p]) & (turn < begins[p + 1])
            ask = functools.partial(
                self.ask_of, self.plan.phases[p], turn, turn - begins[p]
            )
            pl.when(is_its)(ask)
        indexed.commit_copies()

    def stage(self, phase: Phase) -> None:
        """Brings x to shared memory, and its squares' sums of each warp."""
        threads = self.plan.config.warpgroups * WARPGROUP
        thread = indexed.iota(WARPGROUP) + self.wg * WARPGROUP
        source, padded = self.refs[phase.source], self.plan.padded(phase)
        ats = [thread + j * threads for j in range(-(-padded // threads))]
        insides = [jnp.minimum(at, phase.depth - 1) for at in ats]

        def read(ref, *index):
            # Another launch or block may have written it as this one had begun.
            return indexed.take(ref, index, cached=False).astype(jnp.float32)

        rows = [indexed.everywhere(m) for m in range(self.plan.rows)]
        values = [[read(source, row, at) for at in insides] for row in rows]
        scales = None
        if phase.scale is not None:
            scales = [read(self.refs[phase.scale], at) for at in insides]
            if phase.zero_centered:
                scales = [1.0 + scale for scale in scales]
        for m in range(self.plan.rows):
            square = tc.full((WARPGROUP,), 0.0, indexed.index_layout())
            for j, (at, x) in enumerate(zip(ats, values[m], strict=True)):
                x = jnp.where(at < phase.depth, x, 0.0)
                square = square + x * x
                x = x if scales is None else x * scales[j]
                own = pl.ds(j * threads + self.wg * WARPGROUP, WARPGROUP)
                self.smem["x"].at[m, own][...] = x
            if phase.scale is not None:
                own = pl.ds(self.wg * WARPGROUP, WARPGROUP)
                of_warp = indexed.across_warp(square, "sum")
                self.smem["squares"].at[m, own][...] = of_warp
        plgpu.commit_smem()
        self.meet()

    def multiply(self, p: int) -> list[jax.Array]:
        """A thread's sums, by weight and row; asks for the bursts behind these."""
        plan, phase = self.plan, self.plan.phases[p]
        begins, ring = plan.begins, plan.config.ring
        first, last = begins[p] + ring, begins[p + 1] - 1 + ring
        among = [
            q
            for q in range(p, len(plan.phases))
            if begins[q] <= last and first < begins[q + 1]
        ]
        rows = [indexed.everywhere(m) for m in range(plan.rows)]

        def turn(i, sums):
            ats, sums = self.rows_of(phase, i), list(sums)
            indexed.await_copies(ring - 1)
            for s, at in enumerate(ats):
                parts = [
                    indexed.copied(
                        self.smem["ring"], self.place(phase, begins[p] + i, s, n)
                    ).astype(jnp.float32)
                    for n in range(phase.each)
                ]
                for m, row in enumerate(rows):
                    x = indexed.take(self.smem["x"], (row, at), cached=False)
                    factor = indexed.spread(x, PIECE)
                    for n, part in enumerate(parts):
                        k = n * plan.rows + m
                        sums[k] = sums[k] + part * factor
            self.ask(begins[p] + ring + i, among)
            return tuple(sums)

        zero = tc.full((WARPGROUP, PIECE), 0.0, indexed.layout(PIECE))
        sums = (zero,) * (phase.each * plan.rows)
        return list(lax.fori_loop(0, plan.bursts(phase), turn, sums))

    def fetch_ahead(self) -> None:
        """Has L2 ask for what comes next, now that memory has no more to do here."""
        warpgroups = self.plan.config.warpgroups
        part, parts = self.block * warpgroups + self.wg, self.plan.blocks * warpgroups
        for name in self.plan.ahead:
            indexed.prefetch(self.refs[name], part, parts)

    def write(self, phase: Phase) -> None:
        """Adds up the warps' sums of a strip and writes what becomes of them."""
        warpgroups = self.plan.config.warpgroups
        thread = indexed.iota(WARPGROUP)
        lane = thread % phase.lanes * PIECE
        total = functools.partial(sum_of_warps, self.smem["sums"], lane, warpgroups)
        for result, is_its, first in self.strips(phase):

            @pl.when(is_its)
            def _(result=result, first=first):
                width, column = phase.widths[result], lane + first
                out = self.refs[phase.results[result]]
                where = (thread < phase.lanes) & (column < width)
                for m in range(self.plan.rows):
                    factor = self._of_norm(phase, m)
                    products = [
                        total(n * self.plan.rows + m) for n in range(phase.each)
                    ]
                    if factor is not None:
                        products = [x * factor for x in products]
                    y = products[0]
                    if phase.gated:
                        y = y / (1.0 + jnp.exp(-y)) * products[1]
                    index = indexed.everywhere(m), column
                    if phase.residual is not None:
                        kept = indexed.take(
                            self.refs[phase.residual],
                            *(index, PIECE),
                            where=where,
                            cached=False,
                        )
                        y = y + kept.astype(jnp.float32)
                    indexed.put(out, index, y.astype(out.dtype), where)

    def _of_norm(self, phase: Phase, m: int) -> jax.Array | None:
        """1 / rms of a row, in every place of a strip's pieces."""
        if phase.scale is None:
            return None
        total = tc.full((WARPGROUP,), 0.0, indexed.index_layout())
        for warp in range(self.plan.config.warpgroups * WARPS):
            index = indexed.everywhere(m), indexed.everywhere(warp * indexed.WARP)
            part = indexed.take(self.smem["squares"], index, cached=False)
            total = total + part
        return indexed.spread(lax.rsqrt(total / phase.depth + phase.eps), PIECE)


def _ring_kernel(refs: dict[str, Any], smem: dict[str, Any], *, plan: Plan) -> None:
    wg, block = lax.axis_index("warpgroup"), lax.axis_index("block")
    here = _Block(plan, refs, smem, wg, block)
    counters = refs.get("counters")
    overlap.let_next_begin()
    if not plan.at_rest:
        overlap.wait()
    for turn in range(plan.config.ring):
        here.ask(turn, range(len(plan.phases)))
    if plan.at_rest:
        overlap.wait()
    for p, phase in enumerate(plan.phases):
        if p and plan.borders:
            meeting.wait(counters, p - 1, plan.blocks)
        elif p:
            here.meet()
        here.stage(phase)
        if p and p == plan.borders:
            # All warpgroups have met since they last waited.
            leave = functools.partial(meeting.leave, counters, plan.blocks)
            pl.when(wg == 0)(leave)
        sums = here.multiply(p)
        if p + 1 == len(plan.phases):
            here.fetch_ahead()
        leave_sums(smem["sums"], sums, phase.lanes, wg)
        here.meet()

        @pl.when(wg == 0)
        def _(p=p, phase=phase):
            here.write(phase)
            if p < plan.borders:
                # The thread that counts speaks for the others' writes too.
                plgpu.commit_smem()
                meeting.arrive(counters, p)


def bytes_of(plan: Plan) -> int:
    """Shared memory that a block takes."""
    return shared_bytes(plan.scratch)


@overlap.launch(0, 1)
def launch(
    plan: Plan, outs: tuple[tuple[str, int, Any], ...], inputs: dict[str, jax.Array]
) -> dict[str, jax.Array]:
    """Launches the kernel.

    Args:
      plan: of the launch.
      outs: name, N and dtype of each result.
      inputs: by the names that the phases have for them.

    Returns:
      [M, N] of each result, by name.
    """
    hw.check_smem(bytes_of(plan), "gemv" if len(plan.phases) == 1 else "gemv_chain")
    if plan.borders:
        inputs = inputs | {"counters": meeting.counters(plan.borders)}
    names = (*inputs, *(name for name, *_ in outs))

    def body(*refs, **smem):
        _ring_kernel(dict(zip(names, refs, strict=True)), smem, plan=plan)

    kernel = plgpu.kernel(
        body,
        out_type=tuple(
            jax.ShapeDtypeStruct((plan.rows, width), dtype) for _, width, dtype in outs
        ),
        grid=(plan.blocks,),
        grid_names=("block",),
        num_threads=plan.config.warpgroups,
        thread_name="warpgroup",
        scratch_types=plan.scratch,
        kernel_name="pk_gemv" if len(plan.phases) == 1 else "pk_gemv_chain",
        # `commit_smem` stands between writes and the barriers that others wait at.
        compiler_params=tc.params(auto_barriers=False),
    )
    found = kernel(*inputs.values())
    return dict(zip((name for name, *_ in outs), found, strict=True))


def chain(
    plan: Plan, outs: tuple[tuple[str, int, Any], ...], inputs: dict[str, jax.Array]
) -> dict[str, jax.Array]:
    """As `launch`; in the interpreter, whose blocks cannot meet, a launch a phase."""
    if not interpret.is_interpreting() or plan.blocks == 1:
        return launch(plan, outs, inputs)
    found: dict[str, jax.Array] = {}
    for phase in plan.phases:
        alone = dataclasses.replace(plan, phases=(phase,), ahead=())
        own = tuple(out for out in outs if out[0] in phase.results)
        wanted = {phase.source, *phase.weights, phase.scale, phase.residual}
        known = {k: v for k, v in (inputs | found).items() if k in wanted}
        found |= launch(alone, own, known)
    return found


def gemv(
    config: Config,
    x: jax.Array,
    weights: Sequence[jax.Array],
    *,
    norm_scale: jax.Array | None,
    zero_centered: bool,
    eps: float,
    swiglu: bool,
    residual: jax.Array | None,
    at_rest: bool,
    out_dtypes: Sequence[Any],
) -> tuple[jax.Array, ...]:
    """Launches one phase; see `api.gemv`, results as in `reference.gemv`."""
    widths = tuple(w.shape[1] for w in (weights[:1] if swiglu else weights))
    names = tuple(f"w{i}" for i in range(len(weights)))
    results = tuple(f"y{i}" for i in range(len(widths)))
    phase = Phase(
        source="x",
        weights=names,
        results=results,
        depth=x.shape[1],
        widths=widths,
        columns=config.columns,
        gated=swiglu,
        scale=None if norm_scale is None else "scale",
        eps=eps,
        zero_centered=zero_centered,
        residual=None if residual is None else "residual",
    )
    plan = Plan(
        rows=x.shape[0],
        phases=(phase,),
        blocks=sum(phase.strips),
        at_rest=at_rest,
        dtype=jnp.dtype(x.dtype),
        config=config,
    )
    inputs = {"x": x} | dict(zip(names, weights, strict=True))
    if norm_scale is not None:
        inputs["scale"] = norm_scale
    if residual is not None:
        inputs["residual"] = residual
    dtypes = (jnp.dtype(d) for d in out_dtypes)
    found = launch(plan, tuple(zip(results, widths, dtypes, strict=True)), inputs)
    return tuple(found[name] for name in results)
