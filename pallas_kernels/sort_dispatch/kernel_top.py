"""Mosaic GPU kernel that chooses each token's experts: a warp a token, one pass each.

Scores become integers of the same order, each thread holds every 32nd of them, and a
choice is two reductions over the warp: the largest, and the lowest id that has it. What
was chosen is struck out in the registers of its thread. No id is packed into a score,
which would cost the bits that tell close scores apart.

NaN is above everything, both zeros are equal.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels._common import indexed
from pallas_kernels._common.indexed import WARP
from pallas_kernels._common.pieces import WARPGROUP


WARPS = WARPGROUP // WARP

# Selections below have the array first and the constant second: of the other order
# Mosaic makes unsigned numbers, whose comparisons are wrong.
_LEAST = -(2**31)  # below every score: no expert, or one that was chosen
_MOST = 2**31 - 1
_INFINITE = -0x7F800000  # of -inf


@dataclasses.dataclass(frozen=True, kw_only=True)
class Top:
    """The static part of a launch; names as in `api.top_experts`."""

    tokens: int
    experts: int
    top_k: int
    num_groups: int
    top_groups: int
    group_score_top: int

    @property
    def share(self) -> int:
        """Scores of a thread."""
        return -(-self.experts // WARP)


def _ordered(values: jax.Array) -> jax.Array:
    """f32 to i32 of the same order."""
    bits = lax.bitcast_convert_type(jnp.where(values != 0, values, 0.0), jnp.int32)
    order = jnp.where(bits < 0, _LEAST - bits, bits)
    return jnp.where(values == values, order, _MOST)


def _value(order: jax.Array) -> jax.Array:
    """The inverse of `_ordered`, with one NaN and one zero."""
    bits = jnp.where(order < 0, _LEAST - order, order)
    return lax.bitcast_convert_type(bits, jnp.float32)


def _best(keys: dict[int, jax.Array], lane: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The largest key of a warp, and the lowest id that has it; in all threads.

    `keys` has scores of a thread by their number c: the expert is 32 c + lane.
    """
    top = functools.reduce(jnp.maximum, keys.values())
    top = indexed.across_warp(top, "max")
    ids = [jnp.where(key == top, c * WARP + lane, _MOST) for c, key in keys.items()]
    return top, indexed.across_warp(functools.reduce(jnp.minimum, ids), "min")


def _within(keys: dict[int, jax.Array], lane: jax.Array, first: int, size: int):
    """The keys of experts `first` to `first + size`, others out of the running."""
    found = {}
    for c, key in keys.items():
        start, stop = first - c * WARP, first + size - c * WARP
        if stop > 0 and start < WARP:
            is_in = (lane >= start) & (lane < stop)
            found[c] = jnp.where(is_in, key, _LEAST)
    return found


def _only_best_groups(keys: dict[int, jax.Array], lane: jax.Array, top: Top):
    """The keys with those outside of the best groups at -inf."""
    size = top.experts // top.num_groups
    totals = []
    for group in range(top.num_groups):
        own = _within(keys, lane, group * size, size)
        total = None
        for _ in range(top.group_score_top):
            best, expert = _best(own, lane)
            own = {
                c: jnp.where(c * WARP + lane != expert, key, _LEAST)
                for c, key in own.items()
            }
            total = _value(best) if total is None else total + _value(best)
        assert total is not None
        totals.append(_ordered(total))
    # 1 for groups that are kept, the same in all threads.
    kept = [lane * 0 for _ in totals]
    for _ in range(top.top_groups):
        best, is_open = functools.reduce(jnp.maximum, totals), lane * 0 + 1
        for group, total in enumerate(totals):
            hit = jnp.where(total == best, is_open, 0)
            kept[group] = kept[group] + hit
            totals[group] = jnp.where(hit == 0, total, _LEAST)
            is_open = is_open - hit
    # -inf and not 0: with a negative bias, 0 would win over a kept expert.
    masked = {c: jnp.where(key == _LEAST, key, _INFINITE) for c, key in keys.items()}
    for group, flag in enumerate(kept):
        for c, key in _within(keys, lane, group * size, size).items():
            masked[c] = jnp.where((flag == 1) & (key > _LEAST), key, masked[c])
    return masked


def _top_kernel(*refs, top: Top):
    scores_ref, *bias_ref, ids_ref = refs
    number = indexed.iota(WARPGROUP)
    warp = lax.div(number, jnp.int32(WARP))
    lane = number - warp * WARP
    token = lax.axis_index("block") * WARPS + warp
    is_there = token < top.tokens
    token = jnp.minimum(token, top.tokens - 1)
    keys = {}
    for c in range(top.share):
        expert = c * WARP + lane
        place = jnp.minimum(expert, top.experts - 1)
        value = indexed.take(scores_ref, (token, place))
        if bias_ref:
            value = value + indexed.take(bias_ref[0], (place,))
        keys[c] = jnp.where(expert < top.experts, _ordered(value), _LEAST)
    if top.num_groups > 1:
        keys = _only_best_groups(keys, lane, top)

    def choose(slot, carry):
        keys, chosen = carry
        _, expert = _best(keys, lane)
        keys = {
            c: jnp.where(c * WARP + lane != expert, key, _LEAST)
            for c, key in keys.items()
        }
        chosen = [
            jnp.where(q * WARP + lane == slot, expert, ids)
            for q, ids in enumerate(chosen)
        ]
        return keys, chosen

    chosen = [lane * 0 for _ in range(-(-top.top_k // WARP))]
    _, chosen = lax.fori_loop(0, top.top_k, choose, (keys, chosen))
    for q, ids in enumerate(chosen):
        slot = q * WARP + lane
        is_slot = is_there & (slot < top.top_k)
        indexed.put(ids_ref, (token, slot), indexed.spread(ids, 1), is_slot)


def top_experts(top: Top, scores: jax.Array, bias: jax.Array | None) -> jax.Array:
    """Launches the choice.

    Args:
      top: the static part.
      scores: f32[T, E].
      bias: f32[E] or `None`.

    Returns:
      i32[T, k].
    """
    return plgpu.kernel(
        functools.partial(_top_kernel, top=top),
        out_type=jax.ShapeDtypeStruct((top.tokens, top.top_k), jnp.int32),
        grid=(-(-top.tokens // WARPS),),
        grid_names=("block",),
        kernel_name="pk_sort_dispatch_top",
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane,
            unsafe_no_auto_barriers=True,  # threads share nothing but by shuffles
        ),
    )(*((scores,) if bias is None else (scores, bias)))
