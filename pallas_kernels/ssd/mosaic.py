"""Mamba-2's recurrence through Mosaic GPU kernels."""

from __future__ import annotations

import dataclasses
import functools
import operator
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from pallas_kernels.gated_delta_rule import tables
from pallas_kernels.gated_delta_rule.config_mosaic import CHUNK
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
from pallas_kernels.ssd.kernel_steps import SUMS, step_gradients
from pallas_kernels.ssd.reference import step_sizes


def _table_of(shapes: Shapes, x: jax.Array) -> jax.Array:
    """[B, T, H] to [B T, H'], with zeros for the heads that `prepare` has besides."""
    missing = shapes.padded_heads - shapes.heads
    return _flat(jnp.pad(x, ((0, 0), (0, 0), (0, missing))))


def _rates(shapes: Shapes, a: jax.Array) -> jax.Array:
    """[H] to [H'] likewise."""
    return jnp.pad(a, (0, shapes.padded_heads - shapes.heads))


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


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _rule(shapes: Shapes, config: Config, dt_limit, x, dt, bias, a, b, c, d, *rest):
    """`rest` is step, start, state; `step` is `step_sizes` of dt and bias.

    dt and bias are here for their gradients, which a kernel makes beside others.
    """
    del dt_limit, dt, bias
    return _forward(shapes, config, x, a, b, c, d, *rest, keeps=False)[0]


def _forward(
    shapes: Shapes, config: Config, x, a, b, c, d, step, start, state, *, keeps: bool
):
    """y and the last state, the table of factors, and with `keeps` states of chunks."""
    gates = prepare(shapes, _table_of(shapes, step), _rates(shapes, a), start)
    gates = checkpoint_name(gates, "ssd_gates")
    sources = {"x": _flat(x), "b": _flat(b), "c": _flat(c), "gates": gates}
    starts = _starts(shapes, FORWARD, sources, _flat(state))
    y, last, *kept = chunk_fwd(shapes, config, keeps, sources, d, starts)
    return (y.reshape(x.shape), last.reshape(state.shape)), gates, *kept


def _rule_forward(
    shapes: Shapes, config: Config, dt_limit, x, dt, bias, a, b, c, d, *rest
):
    del dt_limit, dt, bias
    inputs = (x, a, b, c, d)
    results, gates, states = _forward(shapes, config, *inputs, *rest, keeps=True)
    states = checkpoint_name(states, "ssd_states")
    return results, (*inputs, gates, states)


def _rule_backward(
    shapes: Shapes, config: Config, dt_limit: Any, saved: Any, cotangents: Any
):
    del config
    x, a, b, c, d, gates, states = saved
    shapes = dataclasses.replace(shapes, backward=True)
    dy, d_last = cotangents
    sources = {"x": _flat(x), "b": _flat(b), "c": _flat(c), "dy": _flat(dy)}
    sources["gates"] = gates
    d_starts = _starts(shapes, BACKWARD, sources, _flat(d_last))
    d_states, dx, d_entries = chunk_bwd(shapes, sources, d, d_starts)
    between = {"states": states, "d_states": d_states}
    grads = chunk_grads(shapes, sources | between)
    ddt, by_chunk = step_gradients(shapes, dt_limit, grads, gates, _rates(shapes, a))
    # Together, which is one launch instead of three.
    da, dbias, dd = (
        z[: shapes.heads]
        for z in lax.reduce(
            tuple(by_chunk[name] for name in SUMS),
            (jnp.float32(0.0),) * len(SUMS),
            lambda x, y: tuple(map(operator.add, x, y)),
            dimensions=(0,),
        )
    )
    return (
        dx.reshape(x.shape),
        ddt[:, : shapes.heads].reshape(*x.shape[:3]),
        dbias,
        da,
        grads["db"].reshape(b.shape),
        grads["dc"].reshape(c.shape),
        dd,
        None,
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
    dt: jax.Array,
    a: jax.Array,
    b: jax.Array,
    c: jax.Array,
    *,
    d: jax.Array | None,
    dt_bias: jax.Array | None,
    dt_limit: tuple[float, float],
    is_real: jax.Array | None,
    starts: jax.Array,
    initial_state: jax.Array,
    config: Config,
) -> tuple[jax.Array, jax.Array]:
    """Kernel form.

    Args:
      x: [B, T, H, V], bf16 or f16.
      dt: f32[B, T, H], before bias and softplus.
      a: f32[H].
      b, c: [B, T, G, N].
      d: f32[H] of the skip, `None` for none.
      dt_bias, dt_limit, is_real: as for `step_sizes`.
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
    step = step_sizes(dt, dt_bias, dt_limit=dt_limit, is_real=is_real)
    # The gradient of dt is made of the kernels' own, not through these.
    step = lax.stop_gradient(step)
    inputs = _padded_rows((x, dt, b, c, step), count * length)
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
    none = jnp.zeros((shapes.heads,), jnp.float32)
    bias, skip = (none if z is None else z for z in (dt_bias, d))
    x, dt, b, c, *rest = rows
    y, state = _rule(
        *(shapes, config, tuple(dt_limit), x, dt, bias, a, b, c, skip),
        *(*rest, initial_state),
    )
    return y.reshape(batch, -1, *y.shape[2:])[:, :time], state
