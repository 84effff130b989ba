"""Mosaic GPU kernels that read several tokens, and that keep a prefix of them.

A block has one row and one value head, and each of its two warpgroups 64 rows of the
state, in registers: there are few rows where tokens are drafted, and a head's 64 KB
come at once. `verify` takes a state through all tokens and writes it nowhere. What
each token would write stays behind, `Pending.written`; `commit` adds it up:

    u = beta (v - alpha S k)      S <- alpha S + u k^T      o = S q      (verify)
    S <- alpha S + u k^T for the first tokens, and their inputs as the window   (commit)

Both warpgroups convolve all that their head needs for themselves. They meet once,
before the gated norm over all of V.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels._common import in_place, overlap
from pallas_kernels._common.layout import split_index
from pallas_kernels.gated_delta_step import kernel as step
from pallas_kernels.gated_delta_step.config import HEAD_DIM, Config
from pallas_kernels.gated_delta_step.layer import Layer, Pending


WARPGROUPS = 2
ROWS = HEAD_DIM // WARPGROUPS  # of a state, a warpgroup each
Q, K, V = 0, 1, 2  # places of a token's channels


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan(step.Sizes):
    """The static part of a launch.

    Attributes:
      time: T; only a row's first token may begin a document.
    """

    time: int

    config = Config(rows=ROWS, part=ROWS)
    part = (ROWS, HEAD_DIM)
    layout = step.Plan.layout


def _place(plan: Plan) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Row, value head and key head of a block."""
    row, head = split_index(lax.axis_index("block"), plan.value_heads)
    return row, head, lax.div(head, jnp.int32(plan.group))


def _inputs(plan: Any, refs: dict[str, Any], row, slot, begin) -> list[jax.Array]:
    """128 channels from `begin` on of the window's tokens and of the new ones."""
    span = pl.ds(begin, HEAD_DIM)
    window = [
        step._load_vector(refs["conv"].at[slot, j, span]) for j in range(plan.width - 1)
    ]
    tokens = [step._load_vector(refs["qkv"].at[row, t, span]) for t in range(plan.time)]
    if plan.restarts:
        zero = jnp.zeros((HEAD_DIM,), plan.dtype)
        window = [jnp.where(refs["first"][row] != 0, zero, x) for x in window]
    return window + tokens


def _state(plan: Any, refs: dict[str, Any], row, slot, head, rows) -> jax.Array:
    """A warpgroup's rows of the state, f32[64, K]."""
    state = plgpu.load(
        refs["state"].at[slot, head, rows], layout=plan.layout, optimized=False
    ).astype(jnp.float32)
    if plan.restarts:
        state = jnp.where(refs["first"][row] != 0, jnp.zeros_like(state), state)
    return state


def _of_rows(plan: Any, ref: Any) -> jax.Array:
    """A vector over a warpgroup's rows, f32[64]."""
    vector = plgpu.load(ref, layout=plan.layout.reduce(1), optimized=False)
    return vector.astype(jnp.float32)


def _prepare(plan: Any, refs: dict[str, Any], shared: dict[str, Any], slot, w) -> None:
    """Leaves q, k and v of all tokens in shared memory, q and k of length 1."""
    row, head, key_head = _place(plan)
    begins = [
        key_head * HEAD_DIM,
        (plan.key_heads + key_head) * HEAD_DIM,
        (2 * plan.key_heads + head) * HEAD_DIM,
    ]
    loaded = []
    for begin in begins:
        span = pl.ds(begin, HEAD_DIM)
        taps = [
            step._load_vector(refs["weight"].at[j, span]) for j in range(plan.width)
        ]
        loaded.append((_inputs(plan, refs, row, slot, begin), taps))
    scale = step._load_vector(refs["scale"]).astype(jnp.float32)
    channels = shared["channels"].at[w]
    for index, (inputs, taps) in enumerate(loaded):
        for t in range(plan.time):
            total = jnp.zeros((HEAD_DIM,), jnp.float32)
            for x, tap in zip(inputs[t:], taps, strict=False):
                total = total + x.astype(jnp.float32) * tap.astype(jnp.float32)
            value = (total * step._sigmoid(total)).astype(plan.dtype)
            channels.at[t, index][...] = value
    for t in range(plan.time):
        z = step._load_vector(refs["z"].at[row, t, head]).astype(jnp.float32)
        shared["gate"].at[w, t][...] = z * step._sigmoid(z) * scale
    plgpu.commit_smem()
    for t in range(plan.time):
        for index in (Q, K):
            x = step._along(plan, channels.at[t, index])
            rstd = lax.rsqrt(jnp.sum(x * x, axis=1) + step.L2_EPS)
            # The same in every row; one of them reaches the threads of a vector.
            shared["rstd"].at[w, t, index][...] = rstd
    plgpu.commit_smem()
    is_first_reader = (lax.rem(head, jnp.int32(plan.group)) == 0) & (w == 0)
    for t in range(plan.time):
        for index in (Q, K):
            vector = step._load_vector(channels.at[t, index]).astype(jnp.float32)
            unit = (vector * shared["rstd"][w, t, index, 0]).astype(plan.dtype)
            channels.at[t, index][...] = unit
            if index == K:

                @pl.when(is_first_reader)
                def _(unit=unit, t=t):
                    refs["k"].at[row, t, key_head][...] = unit

    plgpu.commit_smem()


def _verify_kernel(refs: dict[str, Any], shared: dict[str, Any], *, plan: Any) -> None:
    w = lax.axis_index("warpgroup")
    row, head, _ = _place(plan)
    # Of a row without a slot nothing is asked: it may read any.
    slot = jnp.maximum(refs["slots"][row], 0)
    rows = pl.ds(w * ROWS, ROWS)
    state = _state(plan, refs, row, slot, head, rows)
    _prepare(plan, refs, shared, slot, w)
    channels, out = shared["channels"].at[w], []
    for t in range(plan.time):
        q = step._along(plan, channels.at[t, Q]) * step.SCALE
        k = step._along(plan, channels.at[t, K])
        rate, bias = jnp.exp(refs["A_log"][head]), refs["dt_bias"][head]
        log_decay = -rate * step._softplus(refs["a"][row, t, head] + bias)
        alpha = jnp.exp(log_decay)
        beta = plan.top_beta * step._sigmoid(refs["b"][row, t, head])

        @pl.when(w == 0)
        def _(log_decay=log_decay, t=t):
            refs["log_decay"][row, t, head] = log_decay

        value = _of_rows(plan, channels.at[t, V, rows])
        sk, sq = jnp.sum(state * k, axis=1), jnp.sum(state * q, axis=1)
        written = beta * (value - alpha * sk)
        refs["written"].at[row, t, head, rows][...] = written
        o = step._rounded(plan, alpha * sq + jnp.sum(q * k, axis=1) * written)
        shared["read"].at[t, rows][...] = o.astype(plan.dtype)
        out.append(o)
        state = alpha * state + step._across(plan, written) * k
    plgpu.commit_smem()
    plgpu.barrier_arrive(shared["met"])
    plgpu.barrier_wait(shared["met"])
    for t, o in enumerate(out):
        whole = step._along(plan, shared["read"].at[t])
        square = jnp.sum(whole * whole, axis=1) * (1.0 / HEAD_DIM)
        gate = _of_rows(plan, shared["gate"].at[w, t, rows])
        y = o * lax.rsqrt(square + plan.norm_eps) * gate
        refs["y"].at[row, t, head, rows][...] = y.astype(plan.dtype)


def _commit_kernel(refs: dict[str, Any], shared: dict[str, Any], *, plan: Any) -> None:
    w = lax.axis_index("warpgroup")
    row, head, key_head = _place(plan)
    slot, count = refs["slots"][row], refs["accepted"][row]
    rows = pl.ds(w * ROWS, ROWS)

    def shift(begin):
        """The last inputs of the kept tokens become the window of 128 channels."""
        inputs = _inputs(plan, refs, row, slot, begin)
        for j in range(plan.width - 1):
            kept = inputs[j]
            for t in range(1, plan.time + 1):
                kept = jnp.where(count >= t, inputs[j + t], kept)
            refs["conv"].at[slot, j, pl.ds(begin, HEAD_DIM)][...] = kept

    @pl.when(slot >= 0)
    def _():
        state = _state(plan, refs, row, slot, head, rows)
        for t in range(plan.time):
            is_kept = t < count
            alpha = jnp.exp(jnp.where(is_kept, refs["log_decay"][row, t, head], 0.0))
            written = _of_rows(plan, refs["written"].at[row, t, head, rows])
            written = jnp.where(is_kept, written, jnp.zeros_like(written))
            k = step._along(plan, refs["k"].at[row, t, key_head])
            state = alpha * state + step._across(plan, written) * k
        staged = shared["state"].at[w]
        staged[...] = state.astype(plan.state_dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(staged, refs["state"].at[slot, head, rows])

        @pl.when(w == 0)
        def _():
            shift((2 * plan.key_heads + head) * HEAD_DIM)

            @pl.when(lax.rem(head, jnp.int32(plan.group)) == 0)
            def _():
                shift(key_head * HEAD_DIM)
                shift((plan.key_heads + key_head) * HEAD_DIM)

        plgpu.wait_smem_to_gmem(0)


def _kernel(
    body: Any, name: str, plan: Plan, names: tuple[str, ...], outs: Any, scratch: Any
) -> Any:
    """A kernel of one block for each row and value head."""

    def run(*refs, **shared):
        body(dict(zip(names, refs, strict=True)), shared, plan=plan)

    return plgpu.kernel(
        overlap.overlapping(run),
        out_type=outs,
        grid=(plan.batch * plan.value_heads,),
        grid_names=("block",),
        num_threads=WARPGROUPS,
        thread_name="warpgroup",
        scratch_types=scratch,
        kernel_name=f"pk_gated_delta_{name}",
        compiler_params=plgpu.CompilerParams(
            approx_math=True,
            lowering_semantics=plgpu.LoweringSemantics.Lane,
            reduction_scratch_bytes=0,  # rows are summed within a warp
        ),
    )


def gated_delta_verify(
    qkv: jax.Array,
    a: jax.Array,
    b: jax.Array,
    z: jax.Array,
    layer: Layer,
    conv_pool: jax.Array,
    state_pool: jax.Array,
    slots: jax.Array,
    is_first: jax.Array | None,
) -> tuple[jax.Array, Pending]:
    """Launches the kernel; see `api.gated_delta_verify`, y of slot -1 being anything.

    Args:
      qkv, a, b, z, layer, conv_pool, state_pool, is_first: as there.
      slots: i32[B], of each row, -1 for none.
    """
    batch, time, _ = qkv.shape
    heads, dim = state_pool.shape[1], HEAD_DIM
    plan = Plan.of(qkv, layer, state_pool, is_first, time=time)
    inputs = {
        "qkv": qkv,
        "a": a,
        "b": b,
        "A_log": layer.A_log,
        "dt_bias": layer.dt_bias,
        "z": z.reshape(batch, time, heads, dim),
        "weight": layer.conv_weight,
        "scale": layer.norm_scale,
        "slots": slots,
        "conv": conv_pool,
        "state": state_pool,
    }
    if is_first is not None:
        inputs["first"] = is_first.astype(jnp.int32)
    like = jax.ShapeDtypeStruct
    outs = {
        "y": like((batch, time, heads, dim), plan.dtype),
        "k": like((batch, time, layer.key_heads, dim), plan.dtype),
        "written": like((batch, time, heads, dim), jnp.float32),
        "log_decay": like((batch, time, heads), jnp.float32),
    }
    scratch = {
        "channels": plgpu.SMEM((WARPGROUPS, time, 3, dim), plan.dtype),
        "gate": plgpu.SMEM((WARPGROUPS, time, dim), jnp.float32),
        "rstd": plgpu.SMEM((WARPGROUPS, time, 2, ROWS), jnp.float32),
        "read": plgpu.SMEM((time, dim), plan.dtype),
        "met": plgpu.Barrier(num_arrivals=WARPGROUPS),
    }
    names = (*inputs, *outs)
    kernel = _kernel(
        _verify_kernel, "verify", plan, names, tuple(outs.values()), scratch
    )
    y, k, written, log_decay = kernel(*inputs.values())
    pending = Pending(
        qkv=qkv, k=k, written=written, log_decay=log_decay, is_first=is_first
    )
    return y.reshape(z.shape), pending


def gated_delta_commit(
    pending: Pending,
    accepted: jax.Array,
    conv_pool: jax.Array,
    state_pool: jax.Array,
    slots: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Launches the kernel; see `api.gated_delta_commit`.

    Args:
      pending, accepted, conv_pool, state_pool: as there.
      slots: i32[B], of each row, -1 for one that keeps nothing.
    """
    batch, time, key_heads, _ = pending.k.shape
    plan = Plan(
        batch=batch,
        time=time,
        key_heads=key_heads,
        value_heads=state_pool.shape[1],
        width=conv_pool.shape[1] + 1,
        dtype=jnp.dtype(conv_pool.dtype),
        state_dtype=jnp.dtype(state_pool.dtype),
        restarts=pending.is_first is not None,
    )
    inputs = {
        "qkv": pending.qkv,
        "k": pending.k,
        "written": pending.written,
        "log_decay": pending.log_decay,
        "accepted": accepted,
        "slots": slots,
    }
    if pending.is_first is not None:
        inputs["first"] = pending.is_first.astype(jnp.int32)
    tile = plgpu.SMEM((WARPGROUPS, ROWS, HEAD_DIM), plan.state_dtype)
    names = (*inputs, "conv", "state")
    kernel = _kernel(_commit_kernel, "commit", plan, names, (), {"state": tile})
    _, conv, state = in_place.update(
        kernel, tuple(inputs.values()), conv_pool, state_pool
    )
    return conv, state
