"""Mosaic GPU kernels of `rms_norm`: one pass over the rows each way.

Both kernels are persistent. A block walks over tiles of `rows` rows; `threads`
neighbouring threads share a row, so a warpgroup has `128 // threads` rows in its
registers at a time (a *part* of the tile). A row is read once, its statistics are
reduced in registers, and the result is written straight back. With `stages > 0` a
ring of asynchronous bulk copies runs ahead of the arithmetic; with `stages == 0`
plain 16-byte loads rely on many blocks per SM instead.

The backward pass recomputes the statistics, which costs nothing while it waits for
memory, and saves the forward from writing them. The gradient of `scale` stays in
registers until a block is done, so it needs no atomics and has one fixed order.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels._common import hw
from pallas_kernels.rms_norm.config import WARPGROUP, Config, vector_width


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """The static part of a launch.

    Attributes:
      rows, groups, width: the operands are [rows, groups, width].
      dtype: of x, gate and y.
      gated: "no", "before" (gate, then norm) or "after" (norm, then gate).
      zero_centered: the factor is `1 + scale`.
      eps: added to the mean square.
      config: how to tile.
    """

    rows: int
    groups: int
    width: int
    dtype: Any
    gated: str
    zero_centered: bool
    eps: float
    config: Config

    @property
    def part(self) -> tuple[int, int]:
        """Shape of what a warpgroup holds in registers: [R, width]."""
        return WARPGROUP // self.config.threads, self.width

    @property
    def tiles(self) -> int:
        return self.rows // self.config.rows

    @property
    def blocks(self) -> int:
        """Blocks that share the rows of one group."""
        wanted = hw.device().sms * self.config.blocks_per_sm // self.groups
        return max(1, min(self.tiles, wanted))

    @property
    def layout(self) -> Any:
        """`threads` threads along a row, 16 bytes each, the rest down the rows."""
        vector = vector_width(self.width, self.config.threads, self.dtype)
        lanes = min(self.config.threads, 32)
        warp_rows = 32 // lanes
        tiling = plgpu.Tiling(
            (
                (self.part[0], self.config.threads * vector),
                (warp_rows, lanes * vector),
                (1, vector),
            )
        )
        # [..., rows by warp, columns by warp, rows by lane, columns by lane, 1, vector]
        return _tiled(tiling, warp_dims=(-6, -5), lane_dims=(-4, -3))

    def ring_bytes(self, inputs: int, outputs: int) -> int:
        """Shared memory of one block, the scratch of reductions not counted."""
        tile = self.config.rows * self.width * jnp.dtype(self.dtype).itemsize
        staged = 2 * outputs if self.config.bulk_store else 0
        return tile * (inputs * self.config.stages + staged)


def _tiled(tiling, warp_dims, lane_dims):
    layout = mgpu.TiledLayout(
        tiling, warp_dims, lane_dims, vector_dim=-1, _check_canonical=False
    ).canonicalize()
    return plgpu.Layout.TILED(
        layout.tiling, layout.warp_dims, layout.lane_dims, layout.vector_dim
    )


def _silu(g: jax.Array) -> tuple[jax.Array, jax.Array]:
    """silu(g) and its derivative."""
    sigmoid = 1.0 / (1.0 + jnp.exp(-g))
    silu = g * sigmoid
    return silu, sigmoid + silu * (1.0 - sigmoid)


def _across(value: jax.Array, axis: int, plan: Plan) -> jax.Array:
    """Repeats a vector along the other axis of a part; costs no instruction."""
    wide = lax.broadcast_in_dim(value, plan.part, (axis,))
    return plgpu.layout_cast(wide, plan.layout)


def _rstd(u: jax.Array, plan: Plan) -> jax.Array:
    """1 / root mean square of each row of [R, width], as [R]."""
    return lax.rsqrt(jnp.sum(u * u, axis=1) * (1.0 / plan.width) + plan.eps)


def _factor(scale_ref, plan: Plan) -> jax.Array:
    """The factor of each column, f32[R, width]; kept in registers by a block."""
    scale = plgpu.load(scale_ref, layout=plan.layout.reduce(0), optimized=False)
    scale = scale.astype(jnp.float32)
    return _across(1.0 + scale if plan.zero_centered else scale, 1, plan)


def _fwd_part(plan: Plan, factor: jax.Array, inputs: Sequence[jax.Array], carry):
    x, *gate = inputs
    silu, _ = _silu(*gate) if gate else (1.0, 0.0)
    u = x * silu if plan.gated == "before" else x
    y = u * _across(_rstd(u, plan), 0, plan) * factor
    return (y * silu if plan.gated == "after" else y,), carry


def _bwd_part(plan: Plan, factor: jax.Array, inputs: Sequence[jax.Array], dfactor):
    x, dy, *gate = inputs
    silu, dsilu = _silu(*gate) if gate else (1.0, 0.0)
    u = x * silu if plan.gated == "before" else x
    dz = dy * silu if plan.gated == "after" else dy
    dn = dz * factor
    rstd = _rstd(u, plan)
    slope = jnp.sum(dn * u, axis=1) * rstd * (1.0 / plan.width)
    rstd, slope = _across(rstd, 0, plan), _across(slope * rstd, 0, plan)
    n = u * rstd
    du = rstd * dn - n * slope
    dfactor = dfactor + dz * n
    if plan.gated == "no":
        return (du,), dfactor
    if plan.gated == "before":
        return (du * silu, du * x * dsilu), dfactor
    return (du, dy * n * factor * dsilu), dfactor


def _stream(
    plan: Plan,
    inputs: Sequence[Any],
    outputs: Sequence[Any],
    scratch: dict[str, Any],
    part_fn: Callable,
    carry: Any,
) -> Any:
    """Runs `part_fn` over every part of this block's tiles.

    Args:
      inputs, outputs: refs [rows, groups, width] in device memory.
      scratch: "ring" and "full" with stages, "staging" with bulk stores.
      part_fn: (list of f32[R, width], carry) -> (tuple of f32[R, width], carry).
      carry: what is handed from part to part.
    """
    config, group, block = plan.config, lax.axis_index("group"), lax.axis_index("block")
    stages, height = config.stages, plan.part[0]
    count = lax.div(plan.tiles - 1 - block + plan.blocks, jnp.int32(plan.blocks))

    def first_row(i):
        return (block + i * plan.blocks) * config.rows

    def fetch(i):
        slot = lax.rem(i, jnp.int32(stages))
        for source, ring in zip(inputs, scratch["ring"], strict=True):
            # Rows of one group lie apart, so they come by one copy each.
            for r in range(1 if plan.groups == 1 else config.rows):
                span = config.rows if plan.groups == 1 else 1
                plgpu.copy_gmem_to_smem(
                    source.at[pl.ds(first_row(i) + r, span), group],
                    ring.at[slot, pl.ds(r, span)],
                    scratch["full"].at[slot],
                    # Without the promise these are tensor copies, whose boxes end
                    # at 256 elements; with it, one contiguous bulk copy.
                    oob_mode=plgpu.OOBFillMode.PROMISE_IN_BOUNDS,
                )

    def read(i, p):
        if stages:
            slot = lax.rem(i, jnp.int32(stages))
            parts = [r.at[slot, pl.ds(p * height, height)] for r in scratch["ring"]]
        else:
            span = pl.ds(first_row(i) + p * height, height)
            parts = [source.at[span, group] for source in inputs]
        return [
            plgpu.load(ref, layout=plan.layout, optimized=False).astype(jnp.float32)
            for ref in parts
        ]

    def refetch(i):
        plgpu.commit_smem()  # every thread has read slot i

        @pl.when(i + stages < count)
        def _():
            fetch(i + stages)

    def store(i, tile_slot, p, results):
        for k, (target, result) in enumerate(zip(outputs, results, strict=True)):
            result = result.astype(target.dtype)
            if config.bulk_store:
                inner = pl.ds(p * height, height)
                scratch["staging"][k].at[tile_slot, inner][...] = result
            else:
                span = pl.ds(first_row(i) + p * height, height)
                target.at[span, group][...] = result

    def flush(i, tile_slot):
        plgpu.commit_smem()
        for k, target in enumerate(outputs):
            span = pl.ds(first_row(i), config.rows)
            plgpu.copy_smem_to_gmem(
                scratch["staging"][k].at[tile_slot],
                target.at[span, group],
                commit_group=k == len(outputs) - 1,
            )

    for j in range(stages):
        pl.when(j < count)(functools.partial(fetch, jnp.int32(j)))

    def step(i, carry):
        tile_slot = lax.rem(i, jnp.int32(2))
        if stages:
            plgpu.barrier_wait(scratch["full"].at[lax.rem(i, jnp.int32(stages))])
        if config.bulk_store:
            plgpu.wait_smem_to_gmem(1, wait_read_only=True)
        parts = config.rows // height
        for p in range(parts):
            tiles = read(i, p)
            if stages and p == parts - 1:
                refetch(i)
            results, carry = part_fn(tiles, carry)
            store(i, tile_slot, p, results)
        if config.bulk_store:
            flush(i, tile_slot)
        return carry

    carry = lax.fori_loop(0, count, step, carry)
    if config.bulk_store:
        plgpu.wait_smem_to_gmem(0)
    return carry


def _rms_norm_fwd_kernel(*refs, plan: Plan, **scratch):
    scale_ref, *inputs, y_ref = refs
    factor = _factor(scale_ref.at[lax.axis_index("group")], plan)
    part_fn = functools.partial(_fwd_part, plan, factor)
    _stream(plan, inputs, [y_ref], scratch, part_fn, None)


def _rms_norm_bwd_kernel(*refs, plan: Plan, **scratch):
    count = 2 if plan.gated == "no" else 3
    scale_ref, inputs, outputs = refs[0], refs[1 : 1 + count], refs[1 + count : -1]
    dfactor_ref = refs[-1]
    group, block = lax.axis_index("group"), lax.axis_index("block")
    factor = _factor(scale_ref.at[group], plan)
    part_fn = functools.partial(_bwd_part, plan, factor)
    zero = plgpu.layout_cast(jnp.zeros(plan.part, jnp.float32), plan.layout)
    dfactor = _stream(plan, inputs, outputs, scratch, part_fn, zero)
    dfactor_ref.at[group, block][...] = dfactor


def _launch(body, name: str, plan: Plan, outputs, extra, scale, *inputs):
    """Calls a kernel body with the scratch that `_stream` expects."""
    config = plan.config
    tile = (config.rows, plan.width)
    copies = len(inputs) * (1 if plan.groups == 1 else config.rows)
    scratch: dict[str, Any] = {}
    if config.stages:
        scratch["ring"] = [
            plgpu.SMEM((config.stages, *tile), plan.dtype) for _ in inputs
        ]
        scratch["full"] = plgpu.Barrier(num_arrivals=copies, num_barriers=config.stages)
    if config.bulk_store:
        scratch["staging"] = [plgpu.SMEM((2, *tile), plan.dtype) for _ in outputs]
    hw.check_smem(plan.ring_bytes(len(inputs), len(outputs)), name)
    return plgpu.kernel(
        functools.partial(body, plan=plan),
        out_type=(*outputs, *extra),
        scratch_types=scratch,
        grid=(plan.groups, plan.blocks),
        grid_names=("group", "block"),
        kernel_name=name,
        compiler_params=plgpu.CompilerParams(
            approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane
        ),
    )(scale, *inputs)


def _like(plan: Plan) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((plan.rows, plan.groups, plan.width), plan.dtype)


def rms_norm_fwd(
    plan: Plan, x: jax.Array, scale: jax.Array, gate: jax.Array | None
) -> jax.Array:
    """Launches the forward pass.

    Args:
      x, gate: [rows, groups, width] in `plan.dtype`.
      scale: [groups, width].

    Returns:
      y, like x.
    """
    inputs = (x,) if gate is None else (x, gate)
    (y,) = _launch(
        _rms_norm_fwd_kernel,
        "pk_rms_norm_fwd",
        plan,
        (_like(plan),),
        (),
        scale,
        *inputs,
    )
    return y


def rms_norm_bwd(
    plan: Plan,
    x: jax.Array,
    scale: jax.Array,
    gate: jax.Array | None,
    dy: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """Launches the backward pass.

    Args:
      x, gate, dy: [rows, groups, width] in `plan.dtype`.
      scale: [groups, width].

    Returns:
      dx like x, dscale f32[groups, width], dgate like gate.
    """
    inputs = (x, dy) if gate is None else (x, dy, gate)
    partial = jax.ShapeDtypeStruct((plan.groups, plan.blocks, *plan.part), jnp.float32)
    dx, *dgate, dscale = _launch(
        _rms_norm_bwd_kernel,
        "pk_rms_norm_bwd",
        plan,
        (_like(plan),) * (len(inputs) - 1),
        (partial,),
        scale,
        *inputs,
    )
    return dx, jnp.sum(dscale, axis=(1, 2)), dgate[0] if dgate else None
