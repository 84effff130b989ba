"""Mosaic GPU kernel of `landmark_scores`: landmarks are read once, scores stay inside.

The blocks of a cluster share a row, that is a kv head of a sequence. In each, one
warpgroup copies tiles of 64 landmarks into a ring, and one multiplies them by the
queries of the group: the landmarks are the left operand, so that a product has no more
columns than it must; `config.Sizes` says how few heads fill them. Scores go to shared
memory as they come, while each thread keeps the largest and the sum of its own.

Then the blocks tell each other these sums through device memory, and each writes the
weights of its part: s - lse, the largest of the group. Meanwhile the ring fills with
the next row. So nothing but the weights is written, and no score is read again.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels._common import hw, indexed, interpret, layout
from pallas_kernels.attention import tensor_core as tc
from pallas_kernels.landmark_scores.config import COLUMNS, TILE, Config, Sizes


LOG2_E = math.log2(math.e)
LOWEST = -1e30  # below all scores, and finite: differences stay numbers
TOGETHER = 4  # results whose weights are computed at a time


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """The static part of a launch.

    Attributes:
      rows: B G.
      sizes: how a row falls into pieces.
      dtype: of queries and landmarks.
      scale, logit_cap: as for `api.landmark_scores`.
      config: how to divide.
    """

    rows: int
    sizes: Sizes
    dtype: Any
    scale: float
    logit_cap: float | None
    config: Config

    @classmethod
    def of(
        cls,
        q: Any,
        allowed: Any,
        *,
        scale: float | None,
        logit_cap: float | None,
        config: Config,
    ) -> Plan:
        """The launch of a call; arguments as for `api.landmark_scores`."""
        batch, groups, count = allowed.shape
        width = q.shape[2]
        sizes = Sizes(
            landmarks=count,
            group=q.shape[1] // groups,
            head_dim=width,
            cluster=config.cluster,
        )
        return cls(
            rows=batch * groups,
            sizes=sizes,
            dtype=jnp.dtype(q.dtype),
            scale=width**-0.5 if scale is None else scale,
            logit_cap=logit_cap,
            config=config,
        )

    @property
    def clusters(self) -> int:
        """Of the grid: as many as run at a time, or one a row.

        Two neighbouring SMs always make a pair. How many larger clusters have room at
        a time the card says to nobody; where one fewer had, the grid would take twice
        as long.
        """
        cluster = self.config.cluster
        return min(self.rows, hw.device().sms // cluster) if cluster <= 2 else self.rows

    @property
    def shape(self) -> tuple[int, int]:
        """Of a result."""
        return TILE, COLUMNS

    def logits(self, products: jax.Array) -> jax.Array:
        """Products of queries and landmarks as scores for exponents of 2."""
        if self.logit_cap is None:
            return products * (self.scale * LOG2_E)
        # tanh, without the instruction that errs by 2^-11.
        t = jnp.exp2(jnp.abs(products) * (-2.0 * LOG2_E * self.scale / self.logit_cap))
        size = (1.0 - t) / (1.0 + t) * (self.logit_cap * LOG2_E)
        return jnp.where(products < 0, -size, size)


def _first_of(sizes: Sizes, tile: Any) -> Any:
    """Where the copy of a tile begins: the last one's lies inside of the row."""
    return jnp.minimum(tile * TILE, sizes.landmarks - TILE)


def _rows_of_cluster(plan: Plan) -> tuple[jax.Array, Callable[[Any], Any]]:
    """How many rows this cluster has, and i -> the i-th."""
    me = lax.axis_index("place")
    count = lax.div(plan.rows - 1 - me + plan.clusters, jnp.int32(plan.clusters))
    return count, lambda i: me + i * plan.clusters


def _share(plan: Plan) -> tuple[jax.Array, jax.Array]:
    """The first result of this block, and how many it has."""
    first = lax.axis_index("part") * plan.sizes.share
    return first, jnp.clip(plan.sizes.results - first, 0, plan.sizes.share)


def _feed(plan: Plan, refs: dict[str, Any], shared: dict[str, Any]) -> None:
    """The warpgroup that copies."""
    slots, parts = jnp.int32(plan.config.slots), plan.sizes.parts
    count, row_of = _rows_of_cluster(plan)
    first, results = _share(plan)
    # A launch of its own would take longer than this.
    layers = refs["landmarks"].shape[0] // plan.rows
    offset = jnp.clip(refs["layer"][0], 0, layers - 1) * plan.rows

    def item(i, done):
        row = row_of(i)

        @pl.when(i > 0)
        def _():
            plgpu.barrier_wait(shared["q_free"])

        plgpu.copy_gmem_to_smem(refs["q"].at[row], shared["q"], shared["q_full"])

        def tile(j, done):
            slot = lax.rem(done, slots)

            @pl.when(done >= slots)
            def _():
                plgpu.barrier_wait(shared["free"].at[slot])

            start = _first_of(plan.sizes, first * parts + j)
            plgpu.copy_gmem_to_smem(
                refs["landmarks"].at[offset + row, pl.ds(start, TILE)],
                shared["ring"].at[slot],
                shared["full"].at[slot],
            )
            return done + 1

        return lax.fori_loop(0, results * parts, tile, done)

    done = lax.fori_loop(0, count, item, jnp.int32(0))

    # Every arrival must be waited for before the block ends.
    def drain(n, carry):
        plgpu.barrier_wait(shared["free"].at[lax.rem(n, slots)])
        return carry

    lax.fori_loop(jnp.maximum(done - slots, 0), done, drain, None)
    plgpu.barrier_wait(shared["q_free"])


def _scores(plan: Plan, refs, shared, row, result, done) -> jax.Array:
    """Scores [64, 8] of one result; -inf where no landmark is allowed."""
    sizes, slots = plan.sizes, jnp.int32(plan.config.slots)
    tiles = [result * sizes.parts + p for p in range(sizes.parts)]
    places = [lax.rem(done + p, slots) for p in range(sizes.parts)]

    def allowed(tile):
        start = _first_of(sizes, tile)
        flags = refs["allowed"].at[row, pl.ds(start, TILE)]
        flags = tc.load_global(flags, tc.PER_ROW).astype(jnp.int32) != 0
        number = plgpu.broadcasted_iota(jnp.int32, (TILE,), 0, layout=tc.PER_ROW)
        # What the tile before has too counts there alone.
        return flags & (number + start >= tile * TILE)

    # On their way while the landmarks are.
    flags = [allowed(tile) for tile in tiles]

    for place in places:
        plgpu.barrier_wait(shared["full"].at[place])

    def body(*totals):
        for total, place in zip(totals, places, strict=True):
            tc.mma(total, shared["ring"].at[place], shared["q"].T)
        return [tc.read(total) for total in totals]

    products = tc.accumulate(body, *[plan.shape] * sizes.parts)
    for place in places:
        tc.give_back(shared["free"].at[place])
    part = lax.div(tc.index(plan.shape, 1), jnp.int32(sizes.heads))
    found, keep = products[0], tc.per_row(flags[0], plan.shape)
    for p in range(1, sizes.parts):
        found = jnp.where(part == p, products[p], found)
        keep = jnp.where(part == p, tc.per_row(flags[p], plan.shape), keep)
    return jnp.where(keep, plan.logits(found), -jnp.inf)


def _stored(plan: Plan, shared: dict[str, Any], first: jax.Array, count: int) -> Any:
    """Scores of `count` results, one row for each landmark: [n, heads]."""
    sizes = plan.sizes
    shape = (-1, sizes.heads)
    kind = indexed.layout(sizes.heads)
    if interpret.is_interpreting():  # it knows no reshaped memory
        return shared["scores"].at[pl.ds(first, count)][...].reshape(shape)
    rows = TILE * sizes.parts
    ref = shared["scores"].reshape(sizes.share * rows, sizes.heads)
    ref = ref.at[pl.ds(first * rows, count * rows)]
    return plgpu.load(ref, layout=kind, optimized=False)


def _tell(plan: Plan, refs, shared, row, m, l) -> None:
    """Gives the other blocks this one's largest scores and sums, and awaits theirs."""
    largest = jnp.max(m, axis=0)
    total = jnp.sum(l * jnp.exp2(m - tc.per_column(largest, plan.shape)), axis=0)
    mine = refs["sums"].at[row, lax.axis_index("part")]
    mine.at[0][...] = largest
    mine.at[1][...] = total
    plgpu.commit_smem()
    _fence()
    plgpu.barrier_arrive(shared["told"])
    plgpu.barrier_wait(shared["told"])
    _fence()


def _fence() -> None:
    """Orders device memory between blocks, which barriers alone need not."""
    if interpret.is_interpreting():
        return

    @plgpu.inline_mgpu()
    def fence(_):
        mgpu.utils.inline_ptx("fence.acq_rel.gpu;", has_side_effects=True)

    fence()


def _total(plan: Plan, refs, row) -> jax.Array:
    """The log-sum-exp of each head, f32[heads] in base 2; huge for one of padding."""
    sizes = plan.sizes
    kind = indexed.layout(sizes.heads).reduce(0)

    def read(block, which, p):
        heads = pl.ds(p * sizes.heads, sizes.heads)
        ref = refs["sums"].at[row, block, which, heads]
        return plgpu.load(ref, layout=kind, optimized=False)

    pairs = [
        (read(block, 0, p), read(block, 1, p))
        for block in range(sizes.cluster)
        for p in range(sizes.parts)
    ]
    largest = functools.reduce(jnp.maximum, [m for m, _ in pairs])
    total = functools.reduce(jnp.add, [l * jnp.exp2(m - largest) for m, l in pairs])
    # Without an allowed landmark no score is a number either.
    lse = jnp.where(total > 0, largest + jnp.log(total) * LOG2_E, 0.0)
    head = plgpu.broadcasted_iota(jnp.int32, (sizes.heads,), 0, layout=kind)
    return jnp.where(head < sizes.group, lse, -LOWEST)


def _weigh(plan: Plan, refs, shared, row, first, results) -> None:
    """Writes the weights of this block's landmarks."""
    sizes = plan.sizes
    count = min(TOGETHER, sizes.share)
    pieces = count * TILE * sizes.parts
    lse = lax.broadcast_in_dim(_total(plan, refs, row), (pieces, sizes.heads), (1,))
    lse = plgpu.layout_cast(lse, indexed.layout(sizes.heads))
    number = indexed.iota(pieces)
    rows = plgpu.layout_cast(
        jnp.full((pieces,), row, jnp.int32), indexed.index_layout()
    )

    def step(i, carry):
        # The last step repeats what the one before it wrote, if need be.
        begin = jnp.minimum(i * count, sizes.share - count)
        weights = jnp.max(_stored(plan, shared, begin, count) - lse, axis=1)
        weights = plgpu.layout_cast(weights / LOG2_E, indexed.index_layout())
        place = lax.div(number, jnp.int32(sizes.parts))
        p = number - place * sizes.parts
        result = lax.div(place, jnp.int32(TILE))
        tile = (first + begin + result) * sizes.parts + p
        landmark = _first_of(sizes, tile) + place - result * TILE
        indexed.put(
            refs["weights"],
            (rows, landmark),
            indexed.spread(weights, 1),
            landmark >= tile * TILE,
        )
        return carry

    lax.fori_loop(0, lax.div(results + count - 1, jnp.int32(count)), step, None)


def _compute(plan: Plan, refs: dict[str, Any], shared: dict[str, Any]) -> None:
    """The warpgroup that multiplies, sums and writes."""
    count, row_of = _rows_of_cluster(plan)
    first, results = _share(plan)

    def item(i, done):
        row = row_of(i)
        plgpu.barrier_wait(shared["q_full"])

        def step(j, carry):
            done, m, l = carry
            scores = _scores(plan, refs, shared, row, first + j, done)
            shared["scores"].at[j][...] = scores
            largest = jnp.maximum(m, scores)
            l = l * jnp.exp2(m - largest) + jnp.exp2(scores - largest)
            return done + plan.sizes.parts, largest, l

        start = (tc.full(plan.shape, x, tc.MATRIX) for x in (LOWEST, 0.0))
        done, m, l = lax.fori_loop(0, results, step, (done, *start))
        tc.give_back(shared["q_free"])
        _tell(plan, refs, shared, row, m, l)
        _weigh(plan, refs, shared, row, first, results)
        return done

    lax.fori_loop(0, count, item, jnp.int32(0))


def _landmark_scores_kernel(*args, plan: Plan, names: tuple[str, ...]):
    arrays, (shared,) = args[: len(names)], args[len(names) :]
    refs = dict(zip(names, arrays, strict=True))
    warpgroup = lax.axis_index("warpgroup")
    pl.when(warpgroup == 0)(lambda: _compute(plan, refs, shared))
    pl.when(warpgroup == 1)(lambda: _feed(plan, refs, shared))


def _queries(plan: Plan, q: jax.Array) -> jax.Array:
    """The right operands of products, [B G, 8, K]: a group's heads, again and again."""
    sizes = plan.sizes
    q = q.reshape(plan.rows, sizes.group, sizes.head_dim)
    q = jnp.pad(q, ((0, 0), (0, sizes.heads - sizes.group), (0, 0)))
    return jnp.tile(q, (1, sizes.parts, 1))


def landmark_scores(
    plan: Plan,
    q: jax.Array,
    landmarks: jax.Array,
    allowed: jax.Array,
    layer: jax.Array | None,
) -> tuple[jax.Array, jax.Array]:
    """Launches the kernel; arguments and results as in `api.landmark_scores`."""
    sizes, config = plan.sizes, plan.config
    hw.check_smem(sizes.shared_bytes(config.slots), "landmark_scores")
    inputs = {
        "q": _queries(plan, q),
        "landmarks": landmarks.reshape(-1, sizes.landmarks, sizes.head_dim),
        "allowed": allowed.reshape(plan.rows, -1).astype(jnp.int8),
        "layer": jnp.zeros(1, jnp.int32) if layer is None else layer[None],
    }
    scratch = {
        "ring": layout.operand(config.slots, TILE, sizes.head_dim, dtype=plan.dtype),
        "q": layout.operand(COLUMNS, sizes.head_dim, dtype=plan.dtype),
        "scores": plgpu.SMEM((sizes.share, TILE, COLUMNS), jnp.float32),
        "full": plgpu.Barrier(num_arrivals=1, num_barriers=config.slots),
        "free": plgpu.Barrier(num_arrivals=1, num_barriers=config.slots),
        "q_full": plgpu.Barrier(num_arrivals=1),
        "q_free": plgpu.Barrier(num_arrivals=1),
        "told": plgpu.ClusterBarrier(collective_axes=("part",)),
    }
    outputs = (
        jax.ShapeDtypeStruct((plan.rows, sizes.landmarks), jnp.float32),
        jax.ShapeDtypeStruct((plan.rows, config.cluster, 2, COLUMNS), jnp.float32),
    )
    body: Any = functools.partial(
        _landmark_scores_kernel, plan=plan, names=(*inputs, "weights", "sums")
    )
    weights, sums = plgpu.kernel(
        body,
        out_type=outputs,
        grid=(plan.clusters,),
        grid_names=("place",),
        cluster=(config.cluster,),
        cluster_names=("part",),
        num_threads=2,
        thread_name="warpgroup",
        scratch_types=[scratch],
        kernel_name="pk_landmark_scores",
        compiler_params=tc.params(),
    )(*inputs.values())
    return weights.reshape(allowed.shape), _lse(plan, sums).reshape(q.shape[:2])


def _lse(plan: Plan, sums: jax.Array) -> jax.Array:
    """The logarithms of the sums of each row and head, f32[B G, R]."""
    sizes = plan.sizes
    sums = sums.reshape(plan.rows, -1, 2, sizes.parts, sizes.heads)
    m, l = sums[:, :, 0], sums[:, :, 1]
    largest = jnp.max(m, axis=(1, 2), keepdims=True)
    total = jnp.sum(l * jnp.exp2(m - largest), axis=(1, 2))
    lse = largest[:, 0, 0] / LOG2_E + jnp.log(total)
    return lse[:, : sizes.group]
