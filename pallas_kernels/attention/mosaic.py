"""Attention through Mosaic GPU kernels, with its gradient.

Saved between forward and backward are the inputs, o and the logarithm of the sums; a
`jax.checkpoint` policy finds the latter two as "attention_o" and "attention_lse".
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from pallas_kernels.attention import kernel_bwd_stored
from pallas_kernels.attention.config_mosaic import (
    Config,
    padded_length,
    with_blocks,
)
from pallas_kernels.attention.kernel_bwd import DELTA, attention_dkv, attention_dq
from pallas_kernels.attention.kernel_fwd import LOG2_E, NOTHING, Plan, attention_fwd
from pallas_kernels.attention.tiles import TileBounds


def _pad(x: jax.Array, length: int) -> jax.Array:
    """Zeros at the end of axis 1."""
    missing = length - x.shape[1]
    if not missing:
        return x
    return jnp.pad(x, ((0, 0), (0, missing)) + ((0, 0),) * (x.ndim - 2))


def pad_queries(plan: Plan, x: jax.Array) -> jax.Array:
    """Zeros at the end of axis 1 of [B, T, ...], to whole blocks of queries."""
    return _pad(x, plan.q_blocks * plan.config.block_q)


def pad_keys(plan: Plan, x: jax.Array) -> jax.Array:
    """Zeros at the end of axis 1 of [B, S, ...], to whole blocks and steps."""
    return _pad(x, padded_length(plan.config, x.shape[1]))


def _natural(lse: jax.Array) -> jax.Array:
    """Base 2 and `NOTHING`, [B, H, T], to base e and -inf, [B, T, H]."""
    lse = jnp.where(lse == NOTHING, -jnp.inf, lse / LOG2_E)
    return jnp.swapaxes(lse, 1, 2)


def forward_inputs(q, k, v, sinks, bounds: TileBounds) -> dict[str, jax.Array]:
    """What `attention_fwd` reads; q, k and v by `pad_queries` and `pad_keys`."""
    inputs = {
        "q": q,
        "k": k,
        "v": v,
        "key_start": bounds.key_start,
        "key_stop": bounds.key_stop,
    }
    inputs |= by_query(bounds)
    return inputs if sinks is None else inputs | {"sinks": sinks}


def backward_inputs(
    q, k, v, o, lse, do, d_lse, bounds: TileBounds
) -> dict[str, jax.Array]:
    """What both backward kernels read, without the table of their blocks.

    q, k, v and do are padded as for `forward_inputs`; o and lse are what it gave.
    """
    delta = jnp.einsum("bthv,bthv->bth", do.astype(jnp.float32), o.astype(jnp.float32))
    if d_lse is not None:
        # The logarithm of the sums has the softmax as its gradient.
        delta = delta - d_lse
    # Within the fusion that stacks, one thread would sum a row value by value.
    delta = jnp.swapaxes(jax.lax.optimization_barrier(delta), 1, 2)
    return {
        "q": q,
        "k": k,
        "v": v,
        "do": do,
        "stats": jnp.stack([lse, delta], axis=2),
        "intervals": jnp.stack([bounds.key_start, bounds.key_stop], axis=1),
    }


def by_query(bounds: TileBounds) -> dict[str, jax.Array]:
    """The table of blocks of queries, and the order to take them in."""
    return {"tiles": bounds.q_tiles, "order": bounds.q_order}


def by_key(bounds: TileBounds) -> dict[str, jax.Array]:
    """The same of blocks of keys."""
    return {"tiles": bounds.kv_tiles, "order": bounds.kv_order}


def gradients(
    plan: Plan, inputs: dict[str, jax.Array], bounds: TileBounds
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """dq, dk and dv by the kernels that `Config.backward` names.

    Args:
      plan: sizes of the call.
      inputs: of `backward_inputs`.
      bounds: of the mask.

    Returns:
      Like q, k and v, of the blocks that `bounds` has.
    """

    def recomputed(inputs, bounds):
        dq = attention_dq(plan, inputs | by_query(bounds))
        dk, dv = attention_dkv(plan, inputs | by_key(bounds))
        return dq, dk, dv

    if plan.config.backward != "stored":
        return recomputed(inputs, bounds)
    stored = functools.partial(kernel_bwd_stored.gradients, plan)
    run, parts = recomputed, kernel_bwd_stored.parts_of(plan, bounds)
    if parts is not None:
        run = functools.partial(stored, parts)
    fewer = kernel_bwd_stored.parts_for_documents(plan, bounds)
    if fewer is None or (parts and parts.count(plan) <= fewer.count(plan)):
        return run(inputs, bounds)
    run_fewer = functools.partial(stored, fewer)
    return jax.lax.cond(bounds.pairs <= fewer.pairs, run_fewer, run, inputs, bounds)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(plan: Plan, q, k, v, sinks, bounds: TileBounds):
    return _attention_forward(plan, q, k, v, sinks, bounds)[0]


def _attention_forward(plan: Plan, q, k, v, sinks, bounds: TileBounds):
    o, lse = attention_fwd(plan, forward_inputs(q, k, v, sinks, bounds))
    o = checkpoint_name(o, "attention_o")
    lse = checkpoint_name(lse, "attention_lse")
    return (o, _natural(lse)), (q, k, v, sinks, bounds, o, lse)


def _attention_backward(plan: Plan, saved: Any, cotangents: Any):
    q, k, v, sinks, bounds, o, lse = saved
    do, d_lse = cotangents
    inputs = backward_inputs(q, k, v, o, lse, do, d_lse, bounds)
    dq, dk, dv = gradients(plan, inputs, bounds)
    d_sinks = None
    if sinks is not None:
        weight = jnp.exp2(sinks[None, :, None] * LOG2_E - lse)
        d_sinks = -jnp.sum(weight * inputs["stats"][:, :, DELTA], axis=(0, 2))
    return dq, dk, dv, d_sinks, None


_attention.defvjp(_attention_forward, _attention_backward)


def plan_of(
    q: jax.Array,
    k: jax.Array,
    *,
    scale: float,
    logit_cap: float | None,
    bounds: TileBounds,
    config: Config,
) -> Plan:
    """Sizes of a call, with the blocks of its bounds; arguments as in `attention`."""
    batch, _, heads, dim = q.shape
    config = with_blocks(
        config, head_dim=dim, block_q=bounds.block_q, block_kv=bounds.block_kv
    )
    if logit_cap is not None:
        # Its slope is one more matrix in registers.
        config = dataclasses.replace(config, dq_step_kv=64, dkv_step_q=64)
    return Plan(
        batch=batch,
        heads=heads,
        kv_heads=k.shape[2],
        head_dim=dim,
        q_blocks=bounds.q_tiles.shape[1],
        kv_blocks=bounds.kv_tiles.shape[1],
        dtype=jnp.dtype(q.dtype),
        scale=scale,
        logit_cap=logit_cap,
        config=config,
    )


def attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    sinks: jax.Array | None,
    logit_cap: float | None,
    scale: float,
    bounds: TileBounds,
    config: Config,
) -> tuple[jax.Array, jax.Array]:
    """Kernel form; arguments as in `api.attention`, the mask being in `bounds`.

    Returns:
      o [B, T, H, V] and the logarithm of the sums, f32[B, T, H].
    """
    time = q.shape[1]
    plan = plan_of(q, k, scale=scale, logit_cap=logit_cap, bounds=bounds, config=config)
    o, lse = _attention(
        plan,
        pad_queries(plan, q),
        pad_keys(plan, k),
        pad_keys(plan, v),
        None if sinks is None else sinks.astype(jnp.float32),
        bounds,
    )
    return o[:, :time], lse[:, :time]
