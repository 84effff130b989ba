"""Mosaic GPU kernel of `rope_append`: one launch, a warp for a head of a token.

A head is 32 neighbouring pieces of a row, one a thread, so that its sum of squares is
one within a warp and no thread waits for another one. The dimension that each is paired
with is read a second time rather than exchanged: a warp asks for both at once, and
waits for memory once. Blocks are those of q, of k, of v and of positions, one after the
other; each knows by its number what it has to do. A cache is written by the warp that
made a head, at an address of its own: nothing is copied, and no order need be kept.
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

from pallas_kernels._common import in_place, indexed, overlap
from pallas_kernels._common.pieces import WARPGROUP
from pallas_kernels.rope_append.config import WARP


HEADS = WARPGROUP // WARP  # of a block


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """The static part of a launch.

    Attributes:
      tokens, time: B T and T.
      heads, padded_heads: query heads of each kv head, without and with padding.
      kv_heads, dim, half: G, K, R/2, which is 0 without a rotation.
      length: S.
      stacked: whether the caches have an axis of layers.
      has_positions: whether there is a cache of positions.
      zero_centered, eps: of the norms.
      dtype: of q, k and v.
    """

    tokens: int
    time: int
    heads: int
    padded_heads: int
    kv_heads: int
    dim: int
    half: int
    length: int
    stacked: bool
    has_positions: bool
    zero_centered: bool
    eps: float
    dtype: Any

    @property
    def piece(self) -> int:
        """Values of a thread."""
        return self.dim // WARP

    @property
    def blocks(self) -> dict[str, int]:
        """How many each array has, in their order."""
        queries = self.tokens * self.kv_heads * self.padded_heads
        found = {"q": -(-queries // HEADS)}
        found |= dict.fromkeys(("k", "v"), -(-self.tokens * self.kv_heads // HEADS))
        if self.has_positions:
            found["positions"] = -(-self.tokens // WARPGROUP)
        return found


def _take(ref: Any, indices: tuple[jax.Array, ...], width: int | None = None) -> Any:
    # What another launch may write as this one begins is no constant. A head is read
    # while it is not known yet whether its token has a slot.
    return indexed.take(ref, indices, width, cached=False, stays=True)


def _lines(plan: Plan, block: jax.Array, heads: int) -> tuple[jax.Array, ...]:
    """Token and head of each thread, and whether they are some; else they are the last.

    Args:
      plan: of the launch.
      block: number of this block among those of the array.
      heads: of a token.
    """
    count = plan.tokens * heads
    line = indexed.iota(WARPGROUP) // WARP + block * HEADS
    there = line < count
    line = jnp.minimum(line, count - 1)
    return line // heads, line % heads, there


def _slot(plan: Plan, refs: Any, token: jax.Array) -> tuple[tuple, jax.Array]:
    """Where in a cache a token goes, by axes, and whether there is such a place."""
    slot = _take(refs["slots"], (token,))
    place = (token // plan.time, slot)
    if plan.stacked:
        place = (_take(refs["layer"], (indexed.everywhere(0),)), *place)
    return place, (slot >= 0) & (slot < plan.length)


def _turned(
    plan: Plan, refs: Any, name: str, token: jax.Array, head: jax.Array
) -> jax.Array:
    """Each thread's piece of a head, normed and rotated: f32[128, piece]."""
    width, half = plan.piece, plan.half
    column = indexed.iota(WARPGROUP) % WARP * width
    other = jnp.where(column < half, column + half, column - half)
    turns = column < 2 * half
    other = jnp.where(turns, other, column)
    angle = jnp.where(turns, jnp.minimum(column, other), jnp.zeros_like(column))
    columns = (column, other) if half else (column,)
    scale = refs.get(f"{name}_scale")
    parts = [_take(refs[name], (token, head, c), width) for c in columns]
    factors = [] if scale is None else [_take(scale, (c,), width) for c in columns]
    angles = (angle, angle + half) if half else ()
    tables = [_take(refs["cos_sin"], (token, x), width) for x in angles]
    # Everything is on its way before the first value is used.
    parts = [x.astype(jnp.float32) for x in parts]
    if factors:
        square = jnp.sum(parts[0] * parts[0], axis=1)
        square = plgpu.layout_cast(square, indexed.index_layout())
        mean = indexed.across_warp(square, "sum") * (1.0 / plan.dim)
        rstd = indexed.spread(lax.rsqrt(mean + plan.eps), width)
        factors = [x.astype(jnp.float32) for x in factors]
        if plan.zero_centered:
            factors = [1.0 + x for x in factors]
        parts = [
            (x * rstd * y).astype(plan.dtype).astype(jnp.float32)
            for x, y in zip(parts, factors, strict=True)
        ]
    if not half:
        return parts[0]
    (x, y), (cos, sin) = parts, tables
    wide = indexed.spread(column, width)
    turned = x * cos + y * jnp.where(wide < half, -sin, sin)
    return jnp.where(wide < 2 * half, turned, x)


def _queries(plan: Plan, refs: Any, block: jax.Array) -> None:
    token, head, there = _lines(plan, block, plan.kv_heads * plan.padded_heads)
    inside = head % plan.padded_heads
    own = jnp.minimum(inside, plan.heads - 1)
    source = head // plan.padded_heads * plan.heads + own
    value = _turned(plan, refs, "q", token, source)
    if plan.padded_heads > plan.heads:
        is_head = indexed.spread(inside, plan.piece) < plan.heads
        value = jnp.where(is_head, value, jnp.zeros_like(value))
    column = indexed.iota(WARPGROUP) % WARP * plan.piece
    indexed.put(refs["out"], (token, head, column), value.astype(plan.dtype), there)


def _keys_or_values(plan: Plan, refs: Any, name: str, block: jax.Array) -> None:
    token, head, there = _lines(plan, block, plan.kv_heads)
    place, is_slot = _slot(plan, refs, token)
    column = indexed.iota(WARPGROUP) % WARP * plan.piece
    if name == "k":
        value = _turned(plan, refs, name, token, head)
    else:
        value = _take(refs[name], (token, head, column), plan.piece)
    cache = refs[f"{name}_cache"]
    value = value.astype(cache.dtype)
    indexed.put(cache, (*place, head, column), value, there & is_slot)


def _positions(plan: Plan, refs: Any, block: jax.Array) -> None:
    token = indexed.iota(WARPGROUP) + block * WARPGROUP
    there = token < plan.tokens
    token = jnp.minimum(token, plan.tokens - 1)
    place, is_slot = _slot(plan, refs, token)
    value = indexed.spread(_take(refs["positions"], (token,)), 1)
    indexed.put(refs["position_cache"], place, value, there & is_slot)


def _rope_append_kernel(refs: dict[str, Any], *, plan: Plan) -> None:
    me, first = lax.axis_index("block"), 0
    for name, count in plan.blocks.items():
        body = {"q": _queries, "positions": _positions}.get(name)
        if body is None:
            body = functools.partial(_keys_or_values, name=name)
        run = functools.partial(body, plan, refs, block=me - first)
        pl.when((me >= first) & (me < first + count))(run)
        first += count


def rope_append(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    slots: jax.Array,
    caches: tuple[jax.Array, ...],
    *,
    positions: jax.Array | None,
    cos_sin: jax.Array | None,
    layer: jax.Array | None,
    q_scale: jax.Array | None,
    k_scale: jax.Array | None,
    zero_centered: bool,
    eps: float,
    padded_group: int | None,
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    """Launches the kernel; arguments and results as in `api.rope_append`."""
    batch, time, heads, dim = q.shape
    kv_heads, tokens = k.shape[2], batch * time
    group = heads // kv_heads
    plan = Plan(
        tokens=tokens,
        time=time,
        heads=group,
        padded_heads=group if padded_group is None else padded_group,
        kv_heads=kv_heads,
        dim=dim,
        half=0 if cos_sin is None else cos_sin.shape[-1] // 2,
        length=caches[0].shape[-3],
        stacked=layer is not None,
        has_positions=positions is not None,
        zero_centered=zero_centered,
        eps=eps,
        dtype=jnp.dtype(q.dtype),
    )
    by_token = {"q": q, "k": k, "v": v, "cos_sin": cos_sin}
    by_token |= {"slots": slots, "positions": positions}
    inputs = {
        name: x.reshape(tokens, *x.shape[2:])
        for name, x in by_token.items()
        if x is not None
    }
    scales = {"q_scale": q_scale, "k_scale": k_scale}
    inputs |= {name: x for name, x in scales.items() if x is not None}
    if layer is not None:
        inputs["layer"] = layer.reshape(1)
    out, *after = _launch(plan, inputs, caches)
    return out.reshape(batch, time, *out.shape[1:]), tuple(after)


@overlap.launch(0)
def _launch(
    plan: Plan, inputs: dict[str, jax.Array], caches: tuple[jax.Array, ...]
) -> tuple[jax.Array, ...]:
    cached = ("k_cache", "v_cache", "position_cache")[: len(caches)]
    names = (*inputs, *cached, "out")

    def body(*refs):
        _rope_append_kernel(dict(zip(names, refs, strict=True)), plan=plan)

    out_heads = plan.kv_heads * plan.padded_heads
    kernel = plgpu.kernel(
        overlap.overlapping(body),
        out_type=jax.ShapeDtypeStruct((plan.tokens, out_heads, plan.dim), plan.dtype),
        grid=(sum(plan.blocks.values()),),
        grid_names=("block",),
        kernel_name="pk_rope_append",
        compiler_params=plgpu.CompilerParams(
            approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane
        ),
    )
    return in_place.update(kernel, tuple(inputs.values()), *caches)
