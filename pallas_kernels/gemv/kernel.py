"""Mosaic GPU kernel of `gemv`: each block has a strip of columns, over all of K.

A thread reads 8 columns of every 128th row of its block's strip, many rows ahead, and
adds them up with the values of x there; the threads' sums are added last. So weights
go from memory to registers once, no block waits for another one, and sums have one
order. A strip of 8 columns reads half sectors of memory, but leaves 128 blocks of
N = 1024: neighbours share the sectors in L2.

RMSNorm in front of a product: sum_k x_k s_k w_k / rms is the product of x s with w,
divided by a number that is known at the end as well.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels._common import indexed
from pallas_kernels._common.pieces import WARPGROUP
from pallas_kernels.attention import tensor_core as tc
from pallas_kernels.gemv.config import PIECE, Config, strip


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """The static part of a launch.

    Attributes:
      rows, depth: M and K.
      widths: N of each result.
      gated: whether a result has two weights.
      eps: of the norm in front, `None` without one.
      zero_centered: whether it multiplies with 1 + scale.
      adds: whether there is a residual.
      config: how to divide.
    """

    rows: int
    depth: int
    widths: tuple[int, ...]
    gated: bool
    eps: float | None
    zero_centered: bool
    adds: bool
    config: Config

    @property
    def strips(self) -> tuple[int, ...]:
        """Columns of a block, of each result."""
        return tuple(strip(n, self.config.columns) for n in self.widths)

    @property
    def blocks(self) -> tuple[int, ...]:
        """How many each result has."""
        return tuple(n // c for n, c in zip(self.widths, self.strips, strict=True))


def _everywhere(value: Any) -> jax.Array:
    """One index for every thread."""
    value = jnp.full((WARPGROUP,), value, jnp.int32)
    return plgpu.layout_cast(value, indexed.index_layout())


def _vector(plan: Plan, refs: dict[str, Any], at: jax.Array, where: Any) -> Any:
    """Of each row of x the values at `at`, without and with the norm's scale."""

    def read(ref, *index):
        return indexed.take(ref, (*index, at), where=where).astype(jnp.float32)

    plain = [read(refs["x"], _everywhere(m)) for m in range(plan.rows)]
    if plan.eps is None:
        return plain, plain
    scale = read(refs["scale"])
    scale = 1.0 + scale if plan.zero_centered else scale
    return plain, [x * scale for x in plain]


def _sums(plan: Plan, refs, weights, first: jax.Array, pieces: int) -> Any:
    """What each thread adds up: by weight, row and piece, and the squares by row."""
    number = indexed.iota(WARPGROUP)
    columns = [_everywhere(first + PIECE * j) for j in range(pieces)]
    zero = functools.partial(tc.full, value=0.0)
    sums = [
        zero((WARPGROUP, PIECE), layout=indexed.layout(PIECE))
        for _ in range(len(weights) * pieces * plan.rows)
    ]
    squares = [
        zero((WARPGROUP,), layout=indexed.index_layout())
        for _ in range(0 if plan.eps is None else plan.rows)
    ]

    def add(carry, begin, steps: int, whole: bool):
        """The rows from `begin` on, 128 a step."""
        sums, squares = (list(x) for x in carry)
        ats = [number + (begin + s * WARPGROUP) for s in range(steps)]
        wheres = [None if whole else at < plan.depth for at in ats]
        # All of them are asked for before the first is used.
        parts = [
            [
                indexed.take(w, (at, column), PIECE, where=where)
                for w in weights
                for column in columns
            ]
            for at, where in zip(ats, wheres, strict=True)
        ]
        vectors = [_vector(plan, refs, *x) for x in zip(ats, wheres, strict=True)]
        for part, (plain, scaled) in zip(parts, vectors, strict=True):
            for m in range(plan.rows):
                factor = indexed.spread(scaled[m], PIECE)
                for i, values in enumerate(part):
                    n = i * plan.rows + m
                    sums[n] = sums[n] + values.astype(jnp.float32) * factor
                if squares:
                    squares[m] = squares[m] + plain[m] * plain[m]
        return tuple(sums), tuple(squares)

    burst = plan.config.burst * WARPGROUP
    full, carry = plan.depth // burst, (tuple(sums), tuple(squares))
    if full > 1:
        carry = lax.fori_loop(
            0,
            full,
            lambda i, carry: add(carry, i * burst, plan.config.burst, True),
            carry,
        )
    elif full:
        carry = add(carry, 0, plan.config.burst, True)
    done = full * burst
    if steps := (plan.depth - done) // WARPGROUP:
        carry = add(carry, done, steps, True)
        done += steps * WARPGROUP
    if done < plan.depth:
        carry = add(carry, done, 1, False)
    return carry


def _total(plan: Plan, shared: Any, parts: Sequence[jax.Array]) -> jax.Array:
    """The sum over all threads, [columns], of the pieces that lie side by side."""
    columns = len(parts) * PIECE
    strip = shared.at[:, pl.ds(0, columns)]
    for j, part in enumerate(parts):
        strip.at[:, pl.ds(j * PIECE, PIECE)][...] = part
    plgpu.commit_smem()
    half = WARPGROUP // 2
    halves = [tc.load_global(strip.at[pl.ds(h * half, half)]) for h in range(2)]
    return jnp.sum(halves[0] + halves[1], axis=0)


def _result(plan: Plan, refs, shared, weights, out, first: Any, pieces: int) -> None:
    """Computes and writes a strip of one result."""
    sums, squares = _sums(plan, refs, weights, first, pieces)
    at = pl.ds(first, pieces * PIECE)
    places = iter(range(len(weights) * plan.rows + len(squares)))
    for m in range(plan.rows):
        products = [
            _total(
                plan,
                shared.at[next(places)],
                [sums[(i * pieces + j) * plan.rows + m] for j in range(pieces)],
            )
            for i in range(len(weights))
        ]
        if plan.eps is not None:
            # Every column has the same sum.
            same = [indexed.spread(squares[m], PIECE)] * pieces
            square = _total(plan, shared.at[next(places)], same)
            products = [x * lax.rsqrt(square / plan.depth + plan.eps) for x in products]
        y = products[0]
        if plan.gated:
            y = y / (1.0 + jnp.exp(-y)) * products[1]
        if plan.adds:
            kept = tc.load_global(refs["residual"].at[m, at], tc.PER_COLUMN)
            y = y + kept.astype(jnp.float32)
        out.at[m, at][...] = y.astype(out.dtype)


def _gemv_kernel(*args, plan: Plan, names: tuple[str, ...]):
    arrays, (*outs, shared) = args[: len(names)], args[len(names) :]
    refs = dict(zip(names, arrays, strict=True))
    block, before = lax.axis_index("block"), 0
    each = 2 if plan.gated else 1
    for i, (count, columns) in enumerate(zip(plan.blocks, plan.strips, strict=True)):
        weights = [refs[f"w{i * each + k}"] for k in range(each)]

        @pl.when((block >= before) & (block < before + count))
        def _(before=before, columns=columns, weights=weights, out=outs[i]):
            first = (block - before) * columns
            _result(plan, refs, shared, weights, out, first, columns // PIECE)

        before += count


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
    out_dtypes: Sequence[Any],
) -> tuple[jax.Array, ...]:
    """Launches the kernel; see `api.gemv`, results as in `reference.gemv`."""
    plan = Plan(
        rows=x.shape[0],
        depth=x.shape[1],
        widths=tuple(w.shape[1] for w in (weights[:1] if swiglu else weights)),
        gated=swiglu,
        eps=None if norm_scale is None else eps,
        zero_centered=zero_centered,
        adds=residual is not None,
        config=config,
    )
    inputs = {"x": x} | {f"w{i}": w for i, w in enumerate(weights)}
    if norm_scale is not None:
        inputs["scale"] = norm_scale
    if residual is not None:
        inputs["residual"] = residual
    # A place for each sum, so that none is written before another was read.
    each = (2 if swiglu else 1) + (norm_scale is not None)
    scratch = (plan.rows * each, WARPGROUP, max(plan.strips))
    body: Any = functools.partial(_gemv_kernel, plan=plan, names=tuple(inputs))
    return tuple(
        plgpu.kernel(
            body,
            out_type=tuple(
                jax.ShapeDtypeStruct((plan.rows, n), d)
                for n, d in zip(plan.widths, out_dtypes, strict=True)
            ),
            grid=(sum(plan.blocks),),
            grid_names=("block",),
            scratch_types=[plgpu.SMEM(scratch, jnp.float32)],
            kernel_name="pk_gemv",
            compiler_params=tc.params(),
        )(*inputs.values())
    )
