"""Mamba-2's recurrence through Mosaic GPU kernels."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from pallas_kernels.gated_delta_rule import tables
from pallas_kernels.gated_delta_rule.config_mosaic import CHUNK, MIN_LOG_DECAY
from pallas_kernels.gated_delta_rule.kernel_inverse import LOG2_E
from pallas_kernels.ssd.config_mosaic import (
    Config,
    Shapes,
    plan_segments,
    shapes_of,
)
from pallas_kernels.ssd.kernel_bwd import chunk_bwd
from pallas_kernels.ssd.kernel_grads import chunk_grads
from pallas_kernels.ssd.kernel_pass import (
    BACKWARD,
    FORWARD,
    Way,
    chunk_fwd,
    segment_ends,
)
from pallas_kernels.ssd.kernel_prepare import prepare
from pallas_kernels.ssd.kernel_steps import step_gradients


def _table_of(shapes: Shapes, x: jax.Array) -> jax.Array:
    """[B, T, H] to [B T, H'], with zeros for the heads that `prepare` has besides."""
    missing = shapes.padded_heads - shapes.heads
    return _flat(jnp.pad(x, ((0, 0), (0, 0), (0, missing))))


def _flat(x: jax.Array) -> jax.Array:
    """[B, T, ...] to [B T, ...] and [B, H, ...] to [B H, ...]."""
    return x.reshape(-1, *x.shape[2:])


def _starts(
    shapes: Shapes, way: Way, sources: dict[str, jax.Array], start: jax.Array
) -> tuple[jax.Array, ...]:
    """What `Place.entering` finds the states in that enter the segments."""
    if shapes.segments == 1:
        return (start,)
    return (start, *segment_ends(shapes, way, sources, start))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _rule(shapes: Shapes, config: Config, x, step, g, b, c, d, start, state):
    inputs = (x, step, g, b, c, d, start, state)
    return _forward(shapes, config, *inputs, keeps=False)[0]


def _forward(
    shapes: Shapes, config: Config, x, step, g, b, c, d, start, state, *, keeps: bool
):
    """y and the last state, the table of factors, and with `keeps` states of chunks."""
    g2 = jnp.maximum(g, MIN_LOG_DECAY) * LOG2_E
    gates = prepare(shapes, _table_of(shapes, g2), _table_of(shapes, step), start)
    gates = checkpoint_name(gates, "ssd_gates")
    sources = {"x": _flat(x), "b": _flat(b), "c": _flat(c), "gates": gates}
    starts = _starts(shapes, FORWARD, sources, _flat(state))
    y, last, *kept = chunk_fwd(shapes, config, keeps, sources, d, starts)
    return (y.reshape(x.shape), last.reshape(state.shape)), gates, *kept


def _rule_forward(shapes: Shapes, config: Config, x, step, g, b, c, d, start, state):
    inputs = (x, step, g, b, c, d, start, state)
    results, gates, states = _forward(shapes, config, *inputs, keeps=True)
    states = checkpoint_name(states, "ssd_states")
    return results, (x, g, b, c, d, gates, states)


def _rule_backward(shapes: Shapes, config: Config, saved: Any, cotangents: Any):
    del config
    x, g, b, c, d, gates, states = saved
    shapes = dataclasses.replace(shapes, backward=True)
    dy, d_last = cotangents
    sources = {"x": _flat(x), "b": _flat(b), "c": _flat(c), "dy": _flat(dy)}
    sources["gates"] = gates
    d_starts = _starts(shapes, BACKWARD, sources, _flat(d_last))
    d_states, dx, d_entries = chunk_bwd(shapes, sources, d, d_starts)
    between = {"states": states, "d_states": d_states}
    grads = chunk_grads(shapes, sources | between)
    dstep, dg = (
        z[:, : shapes.heads].reshape(g.shape)
        for z in step_gradients(shapes, grads, gates)
    )
    # The floor of g is a constant there.
    dg = jnp.where(g < MIN_LOG_DECAY, 0.0, dg)
    by_head = grads["dd"].reshape(shapes.batch, shapes.padded_heads, -1)
    dd = jnp.sum(by_head[:, : shapes.heads], axis=(0, 2))
    return (
        dx.reshape(x.shape),
        dstep,
        dg,
        grads["db"].reshape(b.shape),
        grads["dc"].reshape(c.shape),
        dd,
        None,
        d_entries.reshape(d_last.shape),
    )


_rule.defvjp(_rule_forward, _rule_backward)


def _padded_rows(inputs: tuple[jax.Array, ...], time: int) -> list[jax.Array]:
    """Tokens padded at the end, where steps of zero leave the state as it is."""
    return [
        x
        if x.shape[1] == time
        else jnp.pad(x, ((0, 0), (0, time - x.shape[1])) + ((0, 0),) * (x.ndim - 2))
        for x in inputs
    ]


def ssd(
    x: jax.Array,
    step: jax.Array,
    a: jax.Array,
    b: jax.Array,
    c: jax.Array,
    *,
    d: jax.Array | None,
    starts: jax.Array,
    initial_state: jax.Array,
    config: Config,
) -> tuple[jax.Array, jax.Array]:
    """Kernel form.

    Args:
      x: [B, T, H, V], bf16 or f16.
      step: f32[B, T, H], step sizes as `step_sizes` makes them.
      a: f32[H].
      b, c: [B, T, G, N].
      d: f32[H] of the skip, `None` for none.
      starts: i32[B, T] from `document_starts` with chunks of 64 tokens.
      initial_state: f32[B, H, V, N].
      config: launch parameters.

    Returns:
      (y [B, T, H, V] of x's dtype with the skip, state f32[B, H, V, N]).

    Raises:
      ValueError: `config` has more segments than the rows have chunks of 64 tokens.
    """
    batch, time = x.shape[:2]
    shapes = shapes_of(x, b)
    count = config.segments
    if count is None:
        count = plan_segments(pairs=shapes.pairs, chunks=shapes.chunks)
    if count > shapes.chunks:
        raise ValueError(
            f"config has segments={count}, T = {time} has {shapes.chunks} chunks of "
            f"{CHUNK} tokens"
        )
    length = -(-shapes.chunks // count) * CHUNK
    step_decay = step * a[None, None, :]
    inputs = _padded_rows((x, step, step_decay, b, c), count * length)
    starts = tables.padded(starts, count * length, CHUNK)
    rows: Any = [
        z.reshape(batch * count, length, *z.shape[2:]) for z in (*inputs, starts)
    ]
    shapes = dataclasses.replace(
        shapes,
        batch=batch * count,
        time=length,
        segments=count,
    )
    skip = jnp.zeros((shapes.heads,), jnp.float32) if d is None else d
    *tokens, starts = rows
    y, state = _rule(shapes, config, *tokens, skip, starts, initial_state)
    return y.reshape(batch, -1, *y.shape[2:])[:, :time], state
