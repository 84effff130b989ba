"""Mosaic GPU kernels of `engram_gate`: one pass over the tokens each way.

Blocks are persistent. A block has one warpgroup, whose warps share a token's streams;
copies bring the streams, keys and the value of the next tokens into shared memory while
one is computed. With s = rh rk (h . w k) / sqrt(D), rh and rk the reciprocal root mean
squares of stream and key, and w the product of their gains:

    gate = sigmoid(sign(s) sqrt(max(|s|, clamp)))         y_g = gate_g v

The forward pass reads a token's values once for the three sums and the shared value
once for the streams. The backward pass sums dy . v too, and then reads shared memory
again:

    dh = c w k - (ds s rh^2 / D) h         dk = c w h - (ds s rk^2 / D) k
    dv = sum over streams of gate dy       dw = sum over tokens of c h k
    c = ds rh rk / sqrt(D)                 ds = (dy . v + dgate) gate' (s)

Registers hold the gain forward, and back its gradient until a block is done: one
partial sum a block, no atomics, one order. A dead token has zeros written for it and
adds nothing.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels._common import hw
from pallas_kernels.engram_gate import config as configs
from pallas_kernels.engram_gate.config import WARPGROUP, Config


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """The static part of a launch.

    Attributes:
      tokens, streams, dim: P, G, D.
      dtype: of streams, keys and value, and of their gradients.
      out_dtype: of y and dy.
      has_live: whether there are flags for dead tokens.
      eps: of the norms.
      clamp: smallest |s| whose root is taken.
      copies_sign: whether zeros have signs.
      config: how to tile.
    """

    tokens: int
    streams: int
    dim: int
    dtype: Any
    out_dtype: Any
    has_live: bool
    eps: float
    clamp: float
    copies_sign: bool
    config: Config

    @property
    def blocks(self) -> int:
        return min(self.tokens, hw.device().sms * self.config.blocks_per_sm)

    @property
    def width(self) -> int:
        """Columns of a chunk, of which a thread has one piece."""
        piece = configs.piece(self.streams, self.dim, self.dtype)
        return configs.threads(self.streams) * piece

    @property
    def chunk(self) -> tuple[int, int]:
        return self.streams, self.width

    @property
    def chunks(self) -> list[Any]:
        """Spans of columns."""
        return [pl.ds(c, self.width) for c in range(0, self.dim, self.width)]

    @property
    def layout(self) -> Any:
        """How the warpgroup holds a chunk: a stream's threads are neighbours."""
        lanes = min(configs.threads(self.streams), 32)
        piece = configs.piece(self.streams, self.dim, self.dtype)
        layout = mgpu.TiledLayout(
            plgpu.Tiling((self.chunk, (32 // lanes, lanes * piece), (1, piece))),
            warp_dims=(-6, -5),
            lane_dims=(-4, -3),
            vector_dim=-1,
            _check_canonical=False,
        ).canonicalize()
        return plgpu.Layout.TILED(
            layout.tiling, layout.warp_dims, layout.lane_dims, layout.vector_dim
        )


class Numbers(NamedTuple):
    """What a token's sums give, f32[G] each.

    Attributes:
      rh, rk: reciprocal root mean squares.
      score, root, gate: as in the formulas.
    """

    rh: jax.Array
    rk: jax.Array
    score: jax.Array
    root: jax.Array
    gate: jax.Array


def _wide(plan: Plan, numbers: jax.Array, axis: int = 0) -> jax.Array:
    """Repeats a vector over the other axis of a chunk; costs no instruction."""
    wide = lax.broadcast_in_dim(numbers, plan.chunk, (axis,))
    return plgpu.layout_cast(wide, plan.layout)


def _zeros(plan: Plan) -> jax.Array:
    return plgpu.layout_cast(jnp.zeros(plan.chunk, jnp.float32), plan.layout)


def _load(plan: Plan, ref: Any, *, shared: bool = False) -> jax.Array:
    """A chunk in float32; `shared` for the value, which all streams read."""
    if not shared:
        chunk = plgpu.load(ref, layout=plan.layout, optimized=False)
        return chunk.astype(jnp.float32)
    row = plgpu.load(ref, layout=plan.layout.reduce(0), optimized=False)
    return _wide(plan, row.astype(jnp.float32), 1)


def _numbers(plan: Plan, hk: jax.Array, hh: jax.Array, kk: jax.Array) -> Numbers:
    """From the sums of h w k, h^2 and k^2."""
    share = 1.0 / plan.dim
    rh, rk = (lax.rsqrt(x * share + plan.eps) for x in (hh, kk))
    score = hk * rh * rk * plan.dim**-0.5
    # A magnitude, once with its sign and once without.
    root = jnp.sqrt(jnp.maximum(jnp.abs(score), plan.clamp))
    if plan.copies_sign:
        is_negative = lax.bitcast_convert_type(score, jnp.int32) < 0
    else:
        is_negative = score < 0.0
    signed = jnp.where(is_negative, -root, root)
    if not plan.copies_sign:
        signed = jnp.where(score == 0.0, 0.0, signed)
    return Numbers(rh, rk, score, root, 1.0 / (1.0 + jnp.exp(-signed)))


def _stream(plan: Plan, sources: Sequence[Any], scratch: Any, token_fn: Any, carry):
    """Runs `token_fn(token, slot, carry)` over this block's tokens.

    Args:
      plan: the static part.
      sources: refs [P, rows, D] in device memory.
      scratch: "rings", [stages, rows, D] for each source, and the barriers "full".
      token_fn: may not read the rings after the last slot it was given.
      carry: what is handed from token to token.
    """
    block, stages = lax.axis_index("block"), plan.config.stages
    count = lax.div(plan.tokens - 1 - block + plan.blocks, jnp.int32(plan.blocks))
    rings, full = scratch["rings"], scratch["full"]

    def fetch(i):
        slot = lax.rem(i, jnp.int32(stages))
        for source, ring in zip(sources, rings, strict=True):
            plgpu.copy_gmem_to_smem(
                source.at[block + i * plan.blocks],
                ring.at[slot],
                full.at[slot],
                # With this promise it is one contiguous copy.
                oob_mode=plgpu.OOBFillMode.PROMISE_IN_BOUNDS,
            )

    for j in range(stages):
        pl.when(j < count)(functools.partial(fetch, jnp.int32(j)))

    def step(i, carry):
        slot = lax.rem(i, jnp.int32(stages))
        plgpu.barrier_wait(full.at[slot])
        carry = token_fn(block + i * plan.blocks, slot, carry)
        plgpu.commit_smem()  # every thread has read the slot

        @pl.when(i + stages < count)
        def _():
            fetch(i + stages)

        return carry

    return lax.fori_loop(0, count, step, carry)


def _if_live(plan: Plan, live_ref: Any, token: Any, live: Any, dead: Any, carry: Any):
    """Calls `live` or `dead` with the carry, as the token is."""
    if not plan.has_live:
        return live(carry)
    return lax.cond(live_ref[token] > 0, live, dead, carry)


def _store_numbers(plan: Plan, ref: Any, token: Any, numbers: jax.Array) -> None:
    """Writes f32[G] to a token's row; one number is stored as such."""
    if plan.streams == 1:
        ref[token, 0] = jnp.sum(numbers)
    else:
        ref.at[token][...] = numbers


def _engram_gate_fwd_kernel(*refs, plan: Plan, **scratch):
    h_ref, kv_ref, gain_ref, *live_ref, y_ref, gate_ref = refs
    h_ring, kv_ring = scratch["rings"]
    streams = pl.ds(0, plan.streams)
    gains = [_load(plan, gain_ref.at[:, span]) for span in plan.chunks]

    def token_fn(token, slot, carry):
        def live(carry):
            hk, hh, kk = (_zeros(plan) for _ in range(3))
            for gain, span in zip(gains, plan.chunks, strict=True):
                h = _load(plan, h_ring.at[slot, :, span])
                k = _load(plan, kv_ring.at[slot, streams, span])
                hk, hh, kk = hk + h * k * gain, hh + h * h, kk + k * k
            numbers = _numbers(plan, *(jnp.sum(x, axis=1) for x in (hk, hh, kk)))
            _store_numbers(plan, gate_ref, token, numbers.gate)
            gate = _wide(plan, numbers.gate)
            for span in plan.chunks:
                value = _load(plan, kv_ring.at[slot, plan.streams, span], shared=True)
                y_ref.at[token, :, span][...] = (gate * value).astype(plan.out_dtype)
            return carry

        def dead(carry):
            zeros = _zeros(plan)
            _store_numbers(plan, gate_ref, token, jnp.sum(zeros, axis=1))
            for span in plan.chunks:
                y_ref.at[token, :, span][...] = zeros.astype(plan.out_dtype)
            return carry

        flags = live_ref[0] if live_ref else None
        return _if_live(plan, flags, token, live, dead, carry)

    _stream(plan, [h_ref, kv_ref], scratch, token_fn, 0)


def _slopes(plan: Plan, numbers: Numbers, dgate: jax.Array) -> tuple[jax.Array, ...]:
    """c, and what stream and key are multiplied with, f32[G] each."""
    rh, rk, score, root, gate = numbers
    dscore = dgate * gate * (1.0 - gate) * 0.5 / root
    dscore = jnp.where(jnp.abs(score) > plan.clamp, dscore, 0.0)
    own = dscore * score * (1.0 / plan.dim)
    return dscore * rh * rk * plan.dim**-0.5, own * rh * rh, own * rk * rk


def _engram_gate_bwd_kernel(*refs, plan: Plan, **scratch):
    h_ref, kv_ref, dy_ref, gain_ref, dgate_ref, *live_ref = refs[:-3]
    dh_ref, dkv_ref, dgain_ref = refs[-3:]
    h_ring, kv_ring, dy_ring = scratch["rings"]
    gates, gain_smem = scratch["gates"], scratch["gain"]
    streams = pl.ds(0, plan.streams)
    plgpu.copy_gmem_to_smem(
        gain_ref,
        gain_smem,
        scratch["gain_full"],
        oob_mode=plgpu.OOBFillMode.PROMISE_IN_BOUNDS,
    )
    plgpu.barrier_wait(scratch["gain_full"])
    per_thread = plan.dim // WARPGROUP
    row = plgpu.Layout.WG_STRIDED(
        (plan.dim,), next(v for v in (8, 4, 2, 1) if per_thread % v == 0)
    )

    def write_dvalue(token, slot, gate):
        if plan.streams == 1:
            for span in plan.chunks:
                dvalue = _wide(plan, gate) * _load(plan, dy_ring.at[slot, :, span])
                target = dkv_ref.at[token, pl.ds(1, 1), span]
                target[...] = dvalue.astype(plan.dtype)
            return
        # The sum runs over warps: each thread takes the streams' columns of its own.
        gates[...] = gate
        plgpu.commit_smem()  # the gates are there for all threads
        dvalue = plgpu.layout_cast(jnp.zeros(plan.dim, jnp.float32), row)
        for g in range(plan.streams):
            dy = plgpu.load(dy_ring.at[slot, g], layout=row, optimized=False)
            dvalue = dvalue + dy.astype(jnp.float32) * gates[g]
        dkv_ref.at[token, plan.streams][...] = dvalue.astype(plan.dtype)

    def token_fn(token, slot, dgains):
        def chunk(ring, span):
            rows = streams if ring is kv_ring else slice(None)
            return _load(plan, ring.at[slot, rows, span])

        def live(dgains):
            sums = [_zeros(plan) for _ in range(4)]
            for span in plan.chunks:
                h, k, dy = (chunk(ring, span) for ring in (h_ring, kv_ring, dy_ring))
                gain = _load(plan, gain_smem.at[:, span])
                value = _load(plan, kv_ring.at[slot, plan.streams, span], shared=True)
                terms = (h * k * gain, h * h, k * k, dy * value)
                sums = [a + b for a, b in zip(sums, terms, strict=True)]
            hk, hh, kk, dgate = (jnp.sum(x, axis=1) for x in sums)
            numbers = _numbers(plan, hk, hh, kk)
            given = plgpu.load(
                dgate_ref.at[token], layout=plan.layout.reduce(1), optimized=False
            )
            slopes = _slopes(plan, numbers, dgate + given)
            cross, own_h, own_k = (_wide(plan, x) for x in slopes)
            results = []
            for dgain, span in zip(dgains, plan.chunks, strict=True):
                h, k = chunk(h_ring, span), chunk(kv_ring, span)
                gain = _load(plan, gain_smem.at[:, span])
                dh = cross * k * gain - own_h * h
                dk = cross * h * gain - own_k * k
                dh_ref.at[token, :, span][...] = dh.astype(plan.dtype)
                dkv_ref.at[token, streams, span][...] = dk.astype(plan.dtype)
                results.append(dgain + cross * h * k)
            write_dvalue(token, slot, numbers.gate)
            return results

        def dead(dgains):
            zeros = _zeros(plan).astype(plan.dtype)
            for span in plan.chunks:
                dh_ref.at[token, :, span][...] = zeros
                dkv_ref.at[token, streams, span][...] = zeros
            nothing = plgpu.layout_cast(jnp.zeros(plan.dim, plan.dtype), row)
            dkv_ref.at[token, plan.streams][...] = nothing
            return dgains

        flags = live_ref[0] if live_ref else None
        return _if_live(plan, flags, token, live, dead, dgains)

    dgains = [_zeros(plan) for _ in plan.chunks]
    dgains = _stream(plan, [h_ref, kv_ref, dy_ref], scratch, token_fn, dgains)
    for dgain, span in zip(dgains, plan.chunks, strict=True):
        dgain_ref.at[lax.axis_index("block"), :, span][...] = dgain


def _launch(body, name: str, plan: Plan, outputs, streamed, inputs, **extra):
    """Calls a kernel body with the scratch that `_stream` expects.

    Args:
      body, name: the kernel.
      plan: the static part.
      outputs: shapes and dtypes.
      streamed: arrays [P, rows, D] that come through the rings.
      inputs: the other arrays.
      **extra: more scratch.
    """
    config = plan.config
    rings = [(config.stages, *x.shape[1:]) for x in streamed]
    total = sum(
        config.stages * x.shape[1] * plan.dim * jnp.dtype(x.dtype).itemsize
        for x in streamed
    )
    direction = "bwd" if extra else "fwd"
    total += configs.fixed_bytes(plan.streams, plan.dim, direction)
    hw.check_smem(total, name)
    return plgpu.kernel(
        functools.partial(body, plan=plan),
        out_type=tuple(jax.ShapeDtypeStruct(*output) for output in outputs),
        scratch_types={
            "rings": [
                plgpu.SMEM(shape, x.dtype)
                for shape, x in zip(rings, streamed, strict=True)
            ],
            "full": plgpu.Barrier(
                num_arrivals=len(streamed), num_barriers=config.stages
            ),
            **extra,
        },
        grid=(plan.blocks,),
        grid_names=("block",),
        kernel_name=name,
        compiler_params=plgpu.CompilerParams(
            approx_math=True,
            lowering_semantics=plgpu.LoweringSemantics.Lane,
            # Nothing is both read and written but the gates, behind `commit_smem`.
            unsafe_no_auto_barriers=True,
        ),
    )(*streamed, *inputs)


def engram_gate_fwd(
    plan: Plan,
    h: jax.Array,
    kv: jax.Array,
    gain: jax.Array,
    is_live: jax.Array | None,
) -> tuple[jax.Array, jax.Array]:
    """Launches the forward pass.

    Args:
      plan: the static part.
      h: [P, G, D] in `plan.dtype`.
      kv: [P, G + 1, D] in `plan.dtype`.
      gain: f32[G, D].
      is_live: i32[P], or `None`.

    Returns:
      (y [P, G, D] in `plan.out_dtype`, gate f32[P, G]).

    Raises:
      ValueError: the rings do not fit into shared memory.
    """
    return _launch(
        _engram_gate_fwd_kernel,
        "pk_engram_gate_fwd",
        plan,
        [(h.shape, plan.out_dtype), (h.shape[:2], jnp.float32)],
        [h, kv],
        [gain] if is_live is None else [gain, is_live],
    )


def engram_gate_bwd(
    plan: Plan,
    h: jax.Array,
    kv: jax.Array,
    gain: jax.Array,
    is_live: jax.Array | None,
    dy: jax.Array,
    dgate: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Launches the backward pass; arguments as for `engram_gate_fwd`.

    Args:
      dy: [P, G, D] in `plan.out_dtype`.
      dgate: f32[P, G].

    Returns:
      dh like h, dkv like kv, dgain f32[G, D].

    Raises:
      ValueError: the rings do not fit into shared memory.
    """
    partial = (plan.blocks, plan.streams, plan.dim)
    dh, dkv, dgain = _launch(
        _engram_gate_bwd_kernel,
        "pk_engram_gate_bwd",
        plan,
        [(h.shape, plan.dtype), (kv.shape, plan.dtype), (partial, jnp.float32)],
        [h, kv, dy],
        [gain, dgate] if is_live is None else [gain, dgate, is_live],
        gates=plgpu.SMEM((plan.streams,), jnp.float32),
        gain=plgpu.SMEM(gain.shape, jnp.float32),
        gain_full=plgpu.Barrier(),
    )
    return dh, dkv, jnp.sum(dgain, axis=0)
