"""Mosaic GPU kernel of one decoding step, from the projections to the gated norm.

An *item* is a row and a key head with the value heads that read it: exactly one block
reads and writes any state, and any channel of any convolution window, so both pools
are updated in place in one launch without a ring of positions.

Blocks are persistent. In each, one warpgroup runs ahead: it starts the copies of the
state's tiles into a ring, convolves the item's channels, shifts the window, and leaves
q, k, v, the gates and SiLU(z) * scale in shared memory, in two places by turns. The
other warpgroups compute, each with its heads and its ring of tiles. With S the state
before the token and alpha = e^g, one read of S gives both products:

    e = beta (v - alpha S k)        S <- alpha S + e k^T
    o = s (alpha S q + (q . k) e)   y = o / rms(o) * scale * SiLU(z)

A tile goes back to where it came from while the next one is computed. `row_threads`
neighbouring threads share a row of S, so that sums over K are a few shuffles.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, Self

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels._common import hw, in_place, overlap
from pallas_kernels._common.layout import split_index
from pallas_kernels.gated_delta_step.config import (
    BARRIER_BYTES,
    HEAD_DIM,
    PREPARED,
    WARPGROUP,
    Config,
)
from pallas_kernels.gated_delta_step.layer import L2_EPS, Layer


SCALE = HEAD_DIM**-0.5
STRIDED = plgpu.Layout.WG_STRIDED((HEAD_DIM,), 1)  # a vector, one value a thread


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes:
    """What every launch of this folder knows of its arguments.

    Attributes:
      batch, key_heads, value_heads, width: B, Hk, Hv, W.
      dtype: of qkv, z, y and the convolution's windows.
      state_dtype: of the state in device and shared memory.
      restarts: whether rows may begin documents.
      norm_eps: added to the mean square.
      top_beta: 1 or 2, what a large b makes of beta.
    """

    batch: int
    key_heads: int
    value_heads: int
    width: int
    dtype: Any
    state_dtype: Any
    restarts: bool
    norm_eps: float = 0.0
    top_beta: float = 1.0

    @classmethod
    def of(
        cls,
        qkv: jax.Array,
        layer: Layer,
        state_pool: jax.Array,
        is_first: jax.Array | None,
        **more: Any,
    ) -> Self:
        """Those of a layer's arguments, as in `api`, and `more` attributes."""
        return cls(
            batch=len(qkv),
            key_heads=layer.key_heads,
            value_heads=state_pool.shape[1],
            width=layer.conv_weight.shape[0],
            dtype=jnp.dtype(qkv.dtype),
            state_dtype=jnp.dtype(state_pool.dtype),
            restarts=is_first is not None,
            norm_eps=layer.norm_eps,
            top_beta=2.0 if layer.negative_eigenvalues else 1.0,
            **more,
        )

    @property
    def group(self) -> int:
        """Value heads that read a key head."""
        return self.value_heads // self.key_heads


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan(Sizes):
    """The static part of a launch.

    Attributes:
      config: how to tile.
    """

    config: Config

    @property
    def items(self) -> int:
        return self.batch * self.key_heads

    @property
    def blocks(self) -> int:
        return min(self.items, hw.device().sms * self.config.blocks_per_sm)

    @property
    def heads(self) -> int:
        """Value heads of an item that one warpgroup computes."""
        return self.group // self.config.warpgroups

    @property
    def tiles_per_head(self) -> int:
        return HEAD_DIM // self.config.rows

    @property
    def tiles(self) -> int:
        """Tiles of an item in the ring of one warpgroup."""
        return self.heads * self.tiles_per_head

    @property
    def part(self) -> tuple[int, int]:
        """Shape of what a warpgroup computes at a time."""
        return self.config.part, HEAD_DIM

    @property
    def layout(self) -> Any:
        """`row_threads` threads along a row of K, at most 16 bytes each at a time."""
        threads = self.config.row_threads
        widest = max(jnp.dtype(x).itemsize for x in (self.dtype, self.state_dtype))
        vector = min(16 // widest, HEAD_DIM // threads)
        tiling = plgpu.Tiling(
            (
                (WARPGROUP // threads, threads * vector),
                (32 // threads, threads * vector),
                (1, vector),
            )
        )
        # [..., rows by warp, 1, rows by lane, columns by lane, 1, vector]
        layout = mgpu.TiledLayout(
            tiling, (-6,), (-4, -3), vector_dim=-1, _check_canonical=False
        ).canonicalize()
        return plgpu.Layout.TILED(
            layout.tiling, layout.warp_dims, layout.lane_dims, layout.vector_dim
        )

    def segments(self, key_head: jax.Array) -> list[jax.Array]:
        """First channels of the item's q, k and each v."""
        first = [key_head * HEAD_DIM, (self.key_heads + key_head) * HEAD_DIM]
        value = 2 * self.key_heads + key_head * self.group
        return first + [(value + r) * HEAD_DIM for r in range(self.group)]


def _sigmoid(x: jax.Array) -> jax.Array:
    return 1.0 / (1.0 + jnp.exp(-x))


def _softplus(x: jax.Array) -> jax.Array:
    """log(1 + e^x) by the series of atanh: the card's fast logarithm is poor near 1."""
    t = jnp.exp(-jnp.abs(x))
    s = t / (2.0 + t)  # at most 1/3
    square = s * s
    series = jnp.zeros_like(s)
    for n in (15, 13, 11, 9, 7, 5, 3):
        series = (series + 1.0 / n) * square
    return jnp.maximum(x, 0.0) + 2.0 * s * (1.0 + series)


def _gates(plan: Plan, a, b, A_log, dt_bias) -> tuple[jax.Array, jax.Array]:
    """Decay alpha and beta of a head, scalars."""
    g = -jnp.exp(A_log) * _softplus(a + dt_bias)
    return jnp.exp(g), plan.top_beta * _sigmoid(b)


def _everywhere(value: jax.Array) -> jax.Array:
    """A scalar in each place of a vector."""
    return plgpu.layout_cast(jnp.full((HEAD_DIM,), value, jnp.float32), STRIDED)


def _across(plan: Plan, value: jax.Array) -> jax.Array:
    """Repeats a value per row along the rows; costs no instruction."""
    return plgpu.layout_cast(lax.broadcast_in_dim(value, plan.part, (0,)), plan.layout)


def _along(plan: Plan, ref: Any) -> jax.Array:
    """A vector over K in shared memory, the same in every row."""
    vector = plgpu.load(ref, layout=plan.layout.reduce(0), optimized=False)
    wide = lax.broadcast_in_dim(vector.astype(jnp.float32), plan.part, (1,))
    return plgpu.layout_cast(wide, plan.layout)


def _per_row(plan: Plan, ref: Any, p: int) -> jax.Array:
    """The values of the p-th part's rows of a vector over V in shared memory."""
    rows = pl.ds(p * plan.part[0], plan.part[0])
    vector = plgpu.load(ref.at[rows], layout=plan.layout.reduce(1), optimized=False)
    return vector.astype(jnp.float32)


def _rounded(plan: Plan, x: jax.Array) -> jax.Array:
    return x.astype(plan.dtype).astype(jnp.float32)


def _load_vector(ref: Any) -> jax.Array:
    return plgpu.load(ref, layout=STRIDED, optimized=False)


def items_of_block(plan: Any, parts: int) -> tuple[jax.Array, Any]:
    """How many items this block has, and (i) -> (row, part).

    Args:
      plan: with `items` and `blocks`.
      parts: items of a row.
    """
    block = lax.axis_index("block")
    count = lax.div(plan.items - 1 - block + plan.blocks, jnp.int32(plan.blocks))

    def place(i):
        return split_index(block + i * plan.blocks, parts)

    return count, place


def _prepare(plan: Plan, refs: dict[str, Any], shared: dict[str, Any], at, row, head):
    """Convolves an item's channels, shifts its window, makes gates.

    Args:
      plan: of the launch.
      refs: device memory.
      shared: "channels" [PREPARED, 2 + group, 128], "gates" and "out_gate" f32
        [PREPARED, 2 group, 128] and [PREPARED, group, 128].
      at: which of the PREPARED places to fill.
      row, head: the item.
    """
    slot, last = refs["slots"][row], plan.width - 1
    begins = refs["first"][row] != 0 if plan.restarts else None
    loaded = []
    for begin in plan.segments(head):
        span = pl.ds(begin, HEAD_DIM)
        x = _load_vector(refs["qkv"].at[row, span])
        window = [_load_vector(refs["conv"].at[slot, j, span]) for j in range(last)]
        taps = [_load_vector(refs["weight"].at[j, span]) for j in range(plan.width)]
        loaded.append((span, [*window, x], taps))
    scale = _load_vector(refs["scale"]).astype(jnp.float32)
    # Everything is on its way before the first value is used.
    for index, (span, inputs, taps) in enumerate(loaded):
        if begins is not None:
            zero = jnp.zeros((HEAD_DIM,), plan.dtype)
            inputs = [jnp.where(begins, zero, w) for w in inputs[:-1]] + inputs[-1:]
        total = jnp.zeros((HEAD_DIM,), jnp.float32)
        for x, tap in zip(inputs, taps, strict=True):
            total = total + x.astype(jnp.float32) * tap.astype(jnp.float32)
        value = (total * _sigmoid(total)).astype(plan.dtype)
        shared["channels"].at[at, index][...] = value
        for j in range(last):
            refs["conv"].at[slot, j, span][...] = inputs[j + 1]
    for r in range(plan.group):
        h = head * plan.group + r
        alpha, beta = _gates(
            plan,
            refs["a"][row, h],
            refs["b"][row, h],
            refs["A_log"][h],
            refs["dt_bias"][h],
        )
        shared["gates"].at[at, r][...] = _everywhere(alpha)
        shared["gates"].at[at, plan.group + r][...] = _everywhere(beta)
        z = _load_vector(refs["z"].at[row, h]).astype(jnp.float32)
        shared["out_gate"].at[at, r][...] = z * _sigmoid(z) * scale
    plgpu.commit_smem()


def run_ahead(
    plan: Any,
    refs: dict[str, Any],
    shared: dict[str, Any],
    items: tuple[jax.Array, Any],
    tile_of: Callable[..., Any],
    prepare: Callable[..., None],
) -> None:
    """Warpgroup that runs ahead: tiles of the state, and small vectors.

    Args:
      plan: with `config` and `tiles`.
      refs: device memory; "slots" among it.
      shared: "ring", "full" and "free" of it, and "ready", "used".
      items: of `items_of_block`.
      tile_of: (row, part, warpgroup, tile) -> the tile in device memory.
      prepare: (plan, refs, shared, at, row, part) fills one of the PREPARED places.
    """
    config = plan.config
    stages = jnp.int32(config.stages)
    count, place = items

    def fetch(row, part, first_tile, t):
        tile = first_tile + t
        stage = lax.rem(tile, stages)
        for w in range(config.warpgroups):

            @pl.when(tile >= stages)
            def _(w=w):
                plgpu.barrier_wait(shared["free"].at[w, stage])

            plgpu.copy_gmem_to_smem(
                tile_of(row, part, w, t),
                shared["ring"].at[w, stage],
                shared["full"].at[w, stage],
                # One contiguous copy; without the promise it is a tensor's.
                oob_mode=plgpu.OOBFillMode.PROMISE_IN_BOUNDS,
            )

    def item(i, done):
        row, part = place(i)
        live = refs["slots"][row] >= 0

        @pl.when(live)
        def _():
            first_tile = done * plan.tiles
            early = min(plan.tiles, config.stages)

            # The first item's copies find the ring empty; later ones would wait for
            # tiles that cannot be computed before what is prepared here.
            @pl.when(done == 0)
            def _():
                for t in range(early):
                    fetch(row, part, first_tile, t)

            at = lax.rem(done, jnp.int32(PREPARED))

            @pl.when(done >= PREPARED)
            def _():
                plgpu.barrier_wait(shared["used"].at[at])

            prepare(plan, refs, shared, at, row, part)
            plgpu.barrier_arrive(shared["ready"].at[at])

            @pl.when(done > 0)
            def _():
                for t in range(early):
                    fetch(row, part, first_tile, t)

            for t in range(early, plan.tiles):
                fetch(row, part, first_tile, t)

        return done + live.astype(jnp.int32)

    done = lax.fori_loop(0, count, item, jnp.int32(0))

    # Every arrival must be waited for before the block ends.
    def drain_tile(tile, carry):
        for w in range(config.warpgroups):
            plgpu.barrier_wait(shared["free"].at[w, lax.rem(tile, stages)])
        return carry

    def drain_item(i, carry):
        plgpu.barrier_wait(shared["used"].at[lax.rem(i, jnp.int32(PREPARED))])
        return carry

    tiles = done * plan.tiles
    lax.fori_loop(jnp.maximum(tiles - stages, 0), tiles, drain_tile, None)
    lax.fori_loop(jnp.maximum(done - PREPARED, 0), done, drain_item, None)


def _feed(plan: Plan, refs: dict[str, Any], shared: dict[str, Any]) -> None:
    def tile_of(row, head, w, t):
        r, piece = divmod(t, plan.tiles_per_head)
        h = head * plan.group + w * plan.heads + r
        rows = pl.ds(piece * plan.config.rows, plan.config.rows)
        return refs["state"].at[refs["slots"][row], h, rows]

    items = items_of_block(plan, plan.key_heads)
    run_ahead(plan, refs, shared, items, tile_of, _prepare)


def walk(
    plan: Any,
    shared: dict[str, Any],
    w: int,
    count: jax.Array,
    item: Callable[[jax.Array, jax.Array], jax.Array],
) -> None:
    """Takes the items of a computing warpgroup, and gives its last tile back.

    Args:
      plan, shared: as for `run_ahead`.
      w: the warpgroup.
      count: how many items there are.
      item: (index, items done that had a slot) -> those after it.
    """
    done = lax.fori_loop(0, count, item, jnp.int32(0))
    plgpu.wait_smem_to_gmem(0)

    @pl.when(done > 0)
    def _():
        last = lax.rem(done * plan.tiles - 1, jnp.int32(plan.config.stages))
        plgpu.barrier_arrive(shared["free"].at[w, last])


def _unit_keys(plan: Plan, channels: Any) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Unit q and k, the same in every row, and s q . k of each row."""

    def unit(x):
        rstd = lax.rsqrt(jnp.sum(x * x, axis=1) + L2_EPS)
        return _rounded(plan, x * _across(plan, rstd))

    q, k = (unit(_along(plan, channels.at[j])) for j in (0, 1))
    return q * SCALE, k, jnp.sum(q * k, axis=1) * SCALE


def _compute(plan: Plan, refs: dict[str, Any], shared: dict[str, Any], w: int) -> None:
    """Warpgroup that updates and reads the state of its value heads."""
    config = plan.config
    stages = jnp.int32(config.stages)
    count, place = items_of_block(plan, plan.key_heads)
    parts = config.rows // plan.part[0]
    ring = shared["ring"].at[w]

    def read(stage, p):
        rows = pl.ds(p * plan.part[0], plan.part[0])
        ref = ring.at[stage, rows]
        return ref, plgpu.load(ref, layout=plan.layout, optimized=False)

    def tile_of_head(stage, first_part, small, vectors, begins):
        """Updates a tile in shared memory; o of its rows, part by part."""
        q, k, qk = vectors
        alpha, beta, value = small
        out = []
        ref, s = read(stage, 0)
        for p in range(parts):
            here, x = ref, s.astype(jnp.float32)
            if p + 1 < parts:  # on its way while this part is computed
                ref, s = read(stage, p + 1)
            if begins is not None:
                x = jnp.where(begins, jnp.zeros_like(x), x)
            sk, sq = jnp.sum(x * k, axis=1), jnp.sum(x * q, axis=1)
            e = beta * (_per_row(plan, value, first_part + p) - alpha * sk)
            here[...] = (alpha * x + _across(plan, e) * k).astype(plan.state_dtype)
            out.append(_rounded(plan, alpha * sq + qk * e))
        return out

    def head_of_item(done, at, row, key_head, r, vectors, begins):
        """One value head: its tiles, then the gated norm of what was read."""
        local = w * plan.heads + r
        h = key_head * plan.group + local
        gates = shared["gates"].at[at]
        alpha, beta = gates[local, 0], gates[plan.group + local, 0]
        value = shared["channels"].at[at, 2 + local]
        place_y = lax.rem(done * plan.heads + r, jnp.int32(2))
        staged = shared["out"].at[w, place_y]
        out = []
        for piece in range(plan.tiles_per_head):
            tile = done * plan.tiles + r * plan.tiles_per_head + piece
            stage = lax.rem(tile, stages)
            plgpu.barrier_wait(shared["full"].at[w, stage])
            small = (alpha, beta, value)
            out += tile_of_head(stage, piece * parts, small, vectors, begins)
            last = piece == plan.tiles_per_head - 1
            if last:
                for p, o in enumerate(out):
                    rows = pl.ds(p * plan.part[0], plan.part[0])
                    shared["read"].at[w, rows][...] = o.astype(plan.dtype)
            plgpu.commit_smem()
            rows = pl.ds(piece * config.rows, config.rows)
            plgpu.copy_smem_to_gmem(
                ring.at[stage],
                refs["state"].at[refs["slots"][row], h, rows],
                commit_group=not last,
            )
            if last:
                o = _along(plan, shared["read"].at[w])
                square = jnp.sum(o * o, axis=1) * (1.0 / HEAD_DIM)
                rstd = lax.rsqrt(square + plan.norm_eps)
                for p, o in enumerate(out):
                    y = o * rstd * _per_row(plan, shared["out_gate"].at[at, local], p)
                    rows = pl.ds(p * plan.part[0], plan.part[0])
                    staged.at[rows][...] = y.astype(plan.dtype)
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(staged, refs["y"].at[row, h])
            # The tile before this one has left shared memory.
            plgpu.wait_smem_to_gmem(1, wait_read_only=True)

            @pl.when(tile > 0)
            def _(tile=tile):
                plgpu.barrier_arrive(shared["free"].at[w, lax.rem(tile - 1, stages)])

    def item(i, done):
        row, key_head = place(i)
        live = refs["slots"][row] >= 0

        @pl.when(live)
        def _():
            at = lax.rem(done, jnp.int32(PREPARED))
            plgpu.barrier_wait(shared["ready"].at[at])
            begins = refs["first"][row] != 0 if plan.restarts else None
            vectors = _unit_keys(plan, shared["channels"].at[at])
            for r in range(plan.heads):
                head_of_item(done, at, row, key_head, r, vectors, begins)
            plgpu.commit_smem()
            plgpu.barrier_arrive(shared["used"].at[at])

        @pl.when(jnp.logical_not(live))
        def _():
            zero = plgpu.layout_cast(jnp.zeros((HEAD_DIM,), plan.dtype), STRIDED)
            for r in range(plan.heads):
                h = key_head * plan.group + w * plan.heads + r
                refs["y"].at[row, h][...] = zero

        return done + live.astype(jnp.int32)

    walk(plan, shared, w, count, item)


def ring_scratch(plan: Any, tile: tuple[int, int]) -> dict[str, Any]:
    """The ring of tiles, and the barriers of `run_ahead`."""
    warpgroups, stages = plan.config.warpgroups, plan.config.stages
    return {
        "ring": plgpu.SMEM((warpgroups, stages, *tile), plan.state_dtype),
        "full": plgpu.Barrier(num_arrivals=1, num_barriers=(warpgroups, stages)),
        "free": plgpu.Barrier(num_arrivals=1, num_barriers=(warpgroups, stages)),
        "ready": plgpu.Barrier(num_arrivals=1, num_barriers=PREPARED),
        "used": plgpu.Barrier(num_arrivals=warpgroups, num_barriers=PREPARED),
    }


def _scratch(plan: Plan) -> dict[str, Any]:
    group, warpgroups = plan.group, plan.config.warpgroups
    return {
        **ring_scratch(plan, (plan.config.rows, HEAD_DIM)),
        "channels": plgpu.SMEM((PREPARED, 2 + group, HEAD_DIM), plan.dtype),
        "gates": plgpu.SMEM((PREPARED, 2 * group, HEAD_DIM), jnp.float32),
        "out_gate": plgpu.SMEM((PREPARED, group, HEAD_DIM), jnp.float32),
        "read": plgpu.SMEM((warpgroups, HEAD_DIM), plan.dtype),
        "out": plgpu.SMEM((warpgroups, 2, HEAD_DIM), plan.dtype),
    }


def shared_bytes(scratch: dict[str, Any]) -> int:
    """Shared memory of one block, with room for its barriers."""
    arrays = (x for x in scratch.values() if hasattr(x, "memory_space"))
    arrays = (x for x in arrays if x.memory_space == plgpu.SMEM)
    return BARRIER_BYTES + sum(
        math.prod(x.shape) * jnp.dtype(x.dtype).itemsize for x in arrays
    )


def launch(
    plan: Any,
    op: str,
    compute: Callable[..., None],
    feed: Callable[..., None],
    scratch_of: Callable[[Any], dict[str, Any]],
    inputs: dict[str, jax.Array],
    pools: tuple[jax.Array, jax.Array],
    is_first: jax.Array | None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Runs persistent blocks of warpgroups that compute, and one that runs ahead.

    Args:
      plan: with `config` and `blocks`.
      op: name of the op, of the kernel in profiles.
      compute: (plan, device memory, shared memory, warpgroup).
      feed: (plan, device memory, shared memory).
      scratch_of: plan -> shared memory and barriers.
      inputs: device memory by name; y has the shape of "z".
      pools: of the convolution's windows and of states.
      is_first: whether rows begin documents, `None` if none do.

    Returns:
      y, a row for each of "z", and the new pools.
    """
    hw.check_smem(plan.config.blocks_per_sm * shared_bytes(scratch_of(plan)), op)
    return _launch(plan, op, compute, feed, scratch_of, inputs, pools, is_first)


@overlap.launch(0, 1, 2, 3, 4)
def _launch(plan, op, compute, feed, scratch_of, inputs, pools, is_first):
    config = plan.config
    if is_first is not None:
        inputs = inputs | {"first": is_first.astype(jnp.int32)}
    names = (*inputs, "conv", "state", "y")

    def body(*refs, **shared):
        named = dict(zip(names, refs, strict=True))
        warpgroup = lax.axis_index("warpgroup")
        for w in range(config.warpgroups):
            pl.when(warpgroup == w)(functools.partial(compute, plan, named, shared, w))
        ahead = functools.partial(feed, plan, named, shared)
        pl.when(warpgroup == config.warpgroups)(ahead)

    kernel = plgpu.kernel(
        overlap.overlapping(body),
        out_type=jax.ShapeDtypeStruct(inputs["z"].shape, plan.dtype),
        grid=(plan.blocks,),
        grid_names=("block",),
        num_threads=config.warpgroups + 1,
        thread_name="warpgroup",
        scratch_types=scratch_of(plan),
        kernel_name=f"pk_{op}",
        compiler_params=plgpu.CompilerParams(
            approx_math=True,
            lowering_semantics=plgpu.LoweringSemantics.Lane,
            reduction_scratch_bytes=0,  # rows are summed within a warp
            unsafe_no_auto_barriers=not config.auto_barriers,
        ),
    )
    y, conv, state = in_place.update(kernel, tuple(inputs.values()), *pools)
    return y.reshape(len(y), -1), conv, state


def gated_delta_step(
    config: Config,
    qkv: jax.Array,
    a: jax.Array,
    b: jax.Array,
    z: jax.Array,
    layer: Layer,
    conv_pool: jax.Array,
    state_pool: jax.Array,
    slots: jax.Array,
    is_first: jax.Array | None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Launches the kernel; arguments and results as in `api.gated_delta_step`.

    Raises:
      ValueError: the tiling does not fit these sizes or the card.
    """
    plan = Plan.of(qkv, layer, state_pool, is_first, config=config)
    if plan.group % config.warpgroups:
        raise ValueError(
            f"warpgroups={config.warpgroups}, allowed are divisors of the {plan.group} "
            "value heads that read a key head"
        )
    inputs = {
        "qkv": qkv,
        "a": a,
        "b": b,
        "z": z.reshape(plan.batch, plan.value_heads, HEAD_DIM),
        "weight": layer.conv_weight,
        "A_log": layer.A_log,
        "dt_bias": layer.dt_bias,
        "scale": layer.norm_scale,
        "slots": slots,
    }
    return launch(
        *(plan, "gated_delta_step", _compute, _feed, _scratch),
        *(inputs, (conv_pool, state_pool), is_first),
    )
