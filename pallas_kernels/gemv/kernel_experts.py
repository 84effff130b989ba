"""Mosaic GPU kernel of `expert_gemv`: each block has a strip of columns of a result.

As `kernel`, whose bursts of rows it has; which expert's matrix they are of is read
first. A result that several experts add to is one block's, in their order: no sum
crosses blocks.
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

from pallas_kernels._common import indexed, overlap
from pallas_kernels._common.pieces import WARPGROUP
from pallas_kernels.attention import tensor_core as tc
from pallas_kernels.gemv.config import PIECE, Config, strip
from pallas_kernels.gemv.kernel import WARPS, leave_sums, sum_of_warps


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """The static part of a launch.

    Attributes:
      results, visits, experts: S, J and E.
      repeats: results' visits that read one row of x.
      depth, width: K and N of a result.
      gated: whether a matrix has a gate's N columns and then N more.
      squares: whether the result is relu(y)^2.
      config: how to divide.
    """

    results: int
    visits: int
    experts: int
    repeats: int
    depth: int
    width: int
    gated: bool
    squares: bool
    config: Config

    @property
    def columns(self) -> int:
        """Of a block."""
        return strip(self.width, self.config.columns)

    @property
    def strips(self) -> int:
        return self.width // self.columns


def _expert_kernel(*args, plan: Plan, names: tuple[str, ...]):
    arrays, (out, shared, barrier) = args[: len(names)], args[len(names) :]
    refs = dict(zip(names, arrays, strict=True))
    config, lanes = plan.config, plan.columns // PIECE
    wg = lax.axis_index("warpgroup")
    block = lax.axis_index("block")
    result = lax.div(block, jnp.int32(plan.strips))
    first = lax.rem(block, jnp.int32(plan.strips)) * plan.columns
    thread = indexed.iota(WARPGROUP)
    lane = thread % lanes * PIECE
    columns = [lane + first + part * plan.width for part in range(1 + plan.gated)]
    number, step = thread // lanes, WARPGROUP // lanes

    def add(sums, visit, begin, steps: int, whole: bool):
        """`steps` rows of each warpgroup, from the row `begin` of a matrix on."""
        expert = indexed.everywhere(refs["ids"][result, visit])
        source = result * plan.visits + visit
        row = indexed.everywhere(lax.div(source, jnp.int32(plan.repeats)))
        begin = begin + wg * (steps * step)
        ats = [number + (begin + s * step) for s in range(steps)]
        wheres = [None if whole else at < plan.depth for at in ats]
        read = functools.partial(indexed.take, refs["w"])
        # All of them are asked for before the first is used.
        parts = [
            [read((expert, at, c), PIECE, where=where) for c in columns]
            for at, where in zip(ats, wheres, strict=True)
        ]
        values = [
            indexed.take(refs["x"], (row, at), where=where, cached=False).astype(
                jnp.float32
            )
            for at, where in zip(ats, wheres, strict=True)
        ]
        weight = refs["weights"][result, visit]
        for part, value in zip(parts, values, strict=True):
            factor = indexed.spread(value * weight, PIECE)
            sums = tuple(
                total + x.astype(jnp.float32) * factor
                for total, x in zip(sums, part, strict=True)
            )
        return sums

    together = config.warpgroups * step
    burst = config.burst * together
    full, left = divmod(plan.depth, burst)

    def visit_expert(visit, sums):
        expert = refs["ids"][result, visit]
        is_one = (expert >= 0) & (expert < plan.experts)
        # A loop of none or one: nothing is read for an expert that is none.
        return lax.fori_loop(
            0, is_one.astype(jnp.int32), lambda _, sums: read_expert(visit, sums), sums
        )

    def read_expert(visit, sums):
        if full:
            sums = lax.fori_loop(
                0,
                full,
                lambda i, sums: add(sums, visit, i * burst, config.burst, True),
                sums,
            )
        if left:
            steps = -(-left // together)
            sums = add(sums, visit, full * burst, steps, left == steps * together)
        return sums

    zero = tc.full((WARPGROUP, PIECE), 0.0, indexed.layout(PIECE))
    sums = (zero,) * len(columns)
    sums = lax.fori_loop(0, plan.visits, visit_expert, sums)
    leave_sums(shared, sums, lanes, wg)
    plgpu.barrier_arrive(barrier)

    @pl.when(wg == 0)
    def _():
        plgpu.barrier_wait(barrier)
        whole = functools.partial(sum_of_warps, shared, lane, config.warpgroups)
        y = whole(0)
        if plan.gated:
            y = y / (1.0 + jnp.exp(-y)) * whole(1)
        if plan.squares:
            y = jnp.maximum(y, 0.0)
            y = y * y
        index = (indexed.everywhere(result), columns[0])
        indexed.put(out, index, y.astype(out.dtype), thread < lanes)


@overlap.launch(0, 1)
def expert_gemv(plan: Plan, out_dtype: Any, inputs: dict[str, jax.Array]) -> jax.Array:
    """Launches the kernel.

    Args:
      plan: of the launch.
      out_dtype: of the result.
      inputs: x [S J / repeats, K], w [E, K, N or 2 N], ids i32[S, J], weights
        f32[S, J].

    Returns:
      [S, N].
    """
    warpgroups = plan.config.warpgroups
    places = 2 if plan.gated else 1
    body: Any = functools.partial(_expert_kernel, plan=plan, names=tuple(inputs))
    body = overlap.overlapping(body)
    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((plan.results, plan.width), out_dtype),
        grid=(plan.results * plan.strips,),
        grid_names=("block",),
        num_threads=warpgroups,
        thread_name="warpgroup",
        scratch_types=[
            plgpu.SMEM((places, warpgroups * WARPS, plan.columns), jnp.float32),
            plgpu.Barrier(num_arrivals=warpgroups),
        ],
        kernel_name="pk_expert_gemv",
        compiler_params=tc.params(),
    )(*inputs.values())
