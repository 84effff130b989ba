"""Mosaic GPU kernel of one decoding step, from the projections to the gated norm.

It is the kernel of `gated_delta_step` without the delta. An *item* is a row and a group
with the heads that read it: exactly one block reads and writes any state, and any
channel of any convolution window, so both pools are updated in place in one launch.

Blocks are persistent. In each, one warpgroup runs ahead: it starts the copies of the
heads' states into a ring, convolves the item's channels, shifts the window, and leaves
x, b, c, decays, step sizes, SiLU(z) and the norm's scale in shared memory, in two
places by turns. The other warpgroups compute, each with its heads and its ring:

    S <- e^(s a) S + s x b^T        y = S c + d x        u = y SiLU(z)

A state goes back to where it came from while the next one is computed. The norm needs u
of all heads of the item, which meet in shared memory at its end.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels._common import hw, indexed
from pallas_kernels._common.layout import split_index
from pallas_kernels.gated_delta_step import kernel as delta
from pallas_kernels.ssd_step.config import (
    HEAD_DIM,
    PREPARED,
    STATE_DIM,
    VECTOR,
    Config,
)
from pallas_kernels.ssd_step.layer import Layer


HEADS_OF_VECTOR = VECTOR // HEAD_DIM


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """The static part of a launch.

    Attributes:
      batch, groups, heads, width: B, G, H, W.
      dtype: of xbc, z, y and the convolution's windows.
      state_dtype: of the state in device and shared memory.
      restarts: whether rows may begin documents.
      norm_eps: added to the mean square.
      dt_limit: least and largest step size.
      config: how to tile.
    """

    batch: int
    groups: int
    heads: int
    width: int
    dtype: Any
    state_dtype: Any
    restarts: bool
    norm_eps: float
    dt_limit: tuple[float, float]
    config: Config

    # These two and `dtype` are what the neighbour's functions read of a plan.
    part = delta.Plan.part
    layout = delta.Plan.layout

    @property
    def group(self) -> int:
        """Heads of an item."""
        return self.heads // self.groups

    @property
    def vectors(self) -> int:
        """Vectors of x of an item, two heads in each."""
        return self.group // HEADS_OF_VECTOR

    @property
    def items(self) -> int:
        return self.batch * self.groups

    @property
    def blocks(self) -> int:
        return min(self.items, hw.device().sms * self.config.blocks_per_sm)

    @property
    def tiles(self) -> int:
        """Heads of an item that one warpgroup computes, a tile each."""
        return self.group // self.config.warpgroups

    def segments(self, group: jax.Array) -> list[jax.Array]:
        """First channels of the item's b, c and each vector of x."""
        first = self.heads * HEAD_DIM + group * STATE_DIM
        x = group * self.vectors
        return [first, first + self.groups * STATE_DIM] + [
            (x + j) * VECTOR for j in range(self.vectors)
        ]


B, C, X = 0, 1, 2  # places of b, c and x among an item's vectors
DECAY, STEP, SKIP = 0, 1, 2  # of what there is for each head


def _prepare(plan: Plan, refs: dict[str, Any], shared: dict[str, Any], at, row, group):
    """Convolves an item's channels, shifts its window, makes steps and decays.

    Args:
      plan: of the launch.
      refs: device memory.
      shared: "channels" [PREPARED, 2 + vectors, 128], "heads" f32[PREPARED, 3, 128],
        and "gate", "scale" f32[PREPARED, vectors, 128].
      at: which of the PREPARED places to fill.
      row, group: the item.
    """
    slot, last = refs["slots"][row], plan.width - 1
    begins = refs["first"][row] != 0 if plan.restarts else None
    loaded = []
    for begin in plan.segments(group):
        span = pl.ds(begin, VECTOR)
        x = delta._load_vector(refs["xbc"].at[row, span])
        window = [
            delta._load_vector(refs["conv"].at[slot, j, span]) for j in range(last)
        ]
        taps = [
            delta._load_vector(refs["weight"].at[j, span]) for j in range(plan.width)
        ]
        taps.append(delta._load_vector(refs["bias"].at[span]))
        loaded.append((span, [*window, x], taps))
    # A head in each thread, as far as there are any.
    member = indexed.iota(VECTOR)
    is_head, head = member < plan.group, member + group * plan.group
    where = (indexed.everywhere(row), head)
    # The launch in front may write them as this one begins: they are no constants.
    dt = indexed.take(refs["dt"], where, where=is_head, cached=False)
    dt_bias, A_log, skip = (
        indexed.take(refs[name], (head,), where=is_head, cached=False)
        for name in ("dt_bias", "A_log", "D")
    )
    gates = [
        [delta._load_vector(at) for at in (refs["z"].at[row, v], refs["scale"].at[v])]
        for v in (group * plan.vectors + j for j in range(plan.vectors))
    ]
    # Everything is on its way before the first value is used.
    for index, (span, inputs, (*taps, bias)) in enumerate(loaded):
        if begins is not None:
            zero = jnp.zeros((VECTOR,), plan.dtype)
            inputs = [jnp.where(begins, zero, w) for w in inputs[:-1]] + inputs[-1:]
        total = bias.astype(jnp.float32)
        for x, tap in zip(inputs, taps, strict=True):
            total = total + x.astype(jnp.float32) * tap.astype(jnp.float32)
        value = (total * delta._sigmoid(total)).astype(plan.dtype)
        shared["channels"].at[at, index][...] = value
        for j in range(last):
            refs["conv"].at[slot, j, span][...] = inputs[j + 1]
    low, high = plan.dt_limit
    step = delta._softplus(dt + dt_bias)
    step = jnp.maximum(step, low) if low > 0 else step
    step = jnp.minimum(step, high) if high < math.inf else step
    decay = jnp.exp(-jnp.exp(A_log) * step)
    for i, value in ((DECAY, decay), (STEP, step), (SKIP, skip)):
        place = (indexed.everywhere(at), indexed.everywhere(i), member)
        indexed.put(shared["heads"], place, indexed.spread(value, 1), is_head)
    for j, (z, scale) in enumerate(gates):
        z = z.astype(jnp.float32)
        shared["gate"].at[at, j][...] = z * delta._sigmoid(z)
        shared["scale"].at[at, j][...] = scale.astype(jnp.float32)
    plgpu.commit_smem()


def _feed(plan: Plan, refs: dict[str, Any], shared: dict[str, Any]) -> None:
    def tile_of(row, group, w, t):
        h = group * plan.group + w * plan.tiles + t
        return refs["state"].at[refs["slots"][row], h]

    items = delta.items_of_block(plan, plan.groups)
    delta.run_ahead(plan, refs, shared, items, tile_of, _prepare)


def _place_of_head(head: jax.Array, p: int, rows: int) -> tuple[jax.Array, Any]:
    """Where the p-th `rows` rows of a head are among vectors of 128 channels."""
    vector, inside = split_index(head, HEADS_OF_VECTOR)
    return vector, pl.ds(inside * HEAD_DIM + p * rows, rows)


def _update_head(
    plan: Any, shared: dict[str, Any], at, ring, head: jax.Array, begins
) -> None:
    """Updates the state of a head in shared memory, and leaves its u.

    Args:
      plan: of the launch.
      shared: what `_prepare` filled; "gated" f32[PREPARED, vectors, 128] to fill.
      at: the item's place in it.
      ring: [V, N] in shared memory.
      head: of the item.
      begins: whether the state counts as zero, `None` if none do.
    """
    channels, rows = shared["channels"].at[at], plan.part[0]
    b, c = (delta._along(plan, channels.at[j]) for j in (B, C))
    decay, step, skip = (shared["heads"][at, i, head] for i in (DECAY, STEP, SKIP))
    per_row = functools.partial(
        plgpu.load, layout=plan.layout.reduce(1), optimized=False
    )
    for p in range(HEAD_DIM // rows):
        here = ring.at[pl.ds(p * rows, rows)]
        state = plgpu.load(here, layout=plan.layout, optimized=False)
        state = state.astype(jnp.float32)
        if begins is not None:
            state = jnp.where(begins, jnp.zeros_like(state), state)
        vector, inside = _place_of_head(head, p, rows)
        x = per_row(channels.at[X + vector, inside]).astype(jnp.float32)
        state = decay * state + delta._across(plan, step * x) * b
        here[...] = state.astype(plan.state_dtype)
        y = delta._rounded(plan, jnp.sum(state * c, axis=1) + skip * x)
        gate = per_row(shared["gate"].at[at, vector, inside])
        shared["gated"].at[at, vector, inside][...] = y * gate


def _normalize(plan: Any, refs, shared, at, row, group, w: int) -> None:
    """Writes y of the heads of this warpgroup, once u of all heads is there."""
    square: Any = None
    for j in range(plan.vectors):
        u = delta._along(plan, shared["gated"].at[at, j])
        term = jnp.sum(u * u, axis=1)
        square = term if square is None else square + term
    rstd = lax.rsqrt(square * (1.0 / (plan.group * HEAD_DIM)) + plan.norm_eps)
    # The same in every row; one of them reaches the threads of a vector.
    shared["rstd"].at[w][...] = rstd
    plgpu.commit_smem()
    factor = shared["rstd"][w, 0]
    own = plan.vectors // plan.config.warpgroups
    for j in range(own):
        u = delta._load_vector(shared["gated"].at[at, w * own + j])
        y = u * factor * delta._load_vector(shared["scale"].at[at, w * own + j])
        vector = group * plan.vectors + w * own + j
        refs["y"].at[row, vector][...] = y.astype(plan.dtype)


def _compute(plan: Plan, refs: dict[str, Any], shared: dict[str, Any], w: int) -> None:
    """Warpgroup that updates and reads the states of its heads."""
    config = plan.config
    stages = jnp.int32(config.stages)
    count, place = delta.items_of_block(plan, plan.groups)

    def head_of_item(done, at, slot, group, begins, t):
        tile = done * plan.tiles + t
        stage, head = lax.rem(tile, stages), w * plan.tiles + t
        plgpu.barrier_wait(shared["full"].at[w, stage])
        ring = shared["ring"].at[w, stage]
        _update_head(plan, shared, at, ring, head, begins)
        plgpu.commit_smem()
        to = refs["state"].at[slot, group * plan.group + head]
        plgpu.copy_smem_to_gmem(ring, to)
        # The tile before this one has left shared memory.
        plgpu.wait_smem_to_gmem(1, wait_read_only=True)

        @pl.when(tile > 0)
        def _():
            plgpu.barrier_arrive(shared["free"].at[w, lax.rem(tile - 1, stages)])

    def item(i, done):
        row, group = place(i)
        slot = refs["slots"][row]
        live = slot >= 0

        @pl.when(live)
        def _():
            at = lax.rem(done, jnp.int32(PREPARED))
            plgpu.barrier_wait(shared["ready"].at[at])
            begins = refs["first"][row] != 0 if plan.restarts else None
            head = functools.partial(head_of_item, done, at, slot, group, begins)
            # A loop: what a group's heads are written out to is in no cache at once.
            lax.fori_loop(0, plan.tiles, lambda t, _: head(t), None)
            plgpu.barrier_arrive(shared["met"])
            plgpu.barrier_wait(shared["met"])
            _normalize(plan, refs, shared, at, row, group, w)
            plgpu.commit_smem()
            plgpu.barrier_arrive(shared["used"].at[at])

        @pl.when(jnp.logical_not(live))
        def _():
            zero = plgpu.layout_cast(jnp.zeros((VECTOR,), plan.dtype), delta.STRIDED)
            own = plan.vectors // config.warpgroups
            for j in range(own):
                vector = group * plan.vectors + w * own + j
                refs["y"].at[row, vector][...] = zero

        return done + live.astype(jnp.int32)

    delta.walk(plan, shared, w, count, item)


def _scratch(plan: Any) -> dict[str, Any]:
    warpgroups = plan.config.warpgroups
    vectors = plgpu.SMEM((PREPARED, plan.vectors, VECTOR), jnp.float32)
    return {
        **delta.ring_scratch(plan, (HEAD_DIM, STATE_DIM)),
        "channels": plgpu.SMEM((PREPARED, 2 + plan.vectors, VECTOR), plan.dtype),
        "heads": plgpu.SMEM((PREPARED, 3, VECTOR), jnp.float32),
        "gate": vectors,
        "scale": vectors,
        "gated": vectors,
        "rstd": plgpu.SMEM((warpgroups, plan.part[0]), jnp.float32),
        "met": plgpu.Barrier(num_arrivals=warpgroups),
    }


def ssd_step(
    config: Config,
    xbc: jax.Array,
    dt: jax.Array,
    z: jax.Array,
    layer: Layer,
    conv_pool: jax.Array,
    state_pool: jax.Array,
    slots: jax.Array,
    is_first: jax.Array | None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Launches the kernel; arguments and results as in `api.ssd_step`.

    Raises:
      ValueError: the tiling does not fit these sizes or the card.
    """
    batch, heads = dt.shape
    plan = Plan(
        batch=batch,
        groups=layer.groups,
        heads=heads,
        width=layer.conv_weight.shape[0],
        dtype=jnp.dtype(xbc.dtype),
        state_dtype=jnp.dtype(state_pool.dtype),
        restarts=is_first is not None,
        norm_eps=layer.norm_eps,
        dt_limit=layer.dt_limit,
        config=config,
    )
    if reason := config.refusal(plan.group, plan.dtype, plan.state_dtype):
        raise ValueError(reason)
    inputs = {
        "xbc": xbc,
        "dt": dt,
        "z": z.reshape(batch, -1, VECTOR),
        "weight": layer.conv_weight,
        "bias": layer.conv_bias,
        "A_log": layer.A_log,
        "D": layer.D,
        "dt_bias": layer.dt_bias,
        "scale": layer.norm_scale.reshape(-1, VECTOR),
        "slots": slots,
    }
    return delta.launch(
        *(plan, "ssd_step", _compute, _feed, _scratch),
        *(inputs, (conv_pool, state_pool), is_first),
    )
