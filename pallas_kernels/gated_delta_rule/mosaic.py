"""The gated delta rule through Mosaic GPU kernels, with their gradient.

Forward: `kernel_inverse` then `kernel_fwd`. Backward: `kernel_bwd` computes the states
at chunk entries again and runs the chunks in reverse, `kernel_grads` does the rest.
Saved between the two are the inputs, the inverses and the decay factors; a
`jax.checkpoint` policy finds the latter two as "gdn_inverse" and "gdn_gates".
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from pallas_kernels.gated_delta_rule import tables
from pallas_kernels.gated_delta_rule.config_mosaic import (
    CHUNK,
    MIN_LOG_DECAY,
    Shapes,
    heuristic,
)
from pallas_kernels.gated_delta_rule.kernel_bwd import chunk_bwd
from pallas_kernels.gated_delta_rule.kernel_fwd import chunk_fwd
from pallas_kernels.gated_delta_rule.kernel_grads import chunk_grads
from pallas_kernels.gated_delta_rule.kernel_inverse import LOG2_E, prepare


def _by_head(shapes: Shapes, x: jax.Array) -> jax.Array:
    """[B, T, Hv] to [B Hv, T]: a chunk of one head becomes contiguous."""
    return jnp.swapaxes(x, 1, 2).reshape(shapes.items, shapes.time)


def _by_token(shapes: Shapes, x: jax.Array) -> jax.Array:
    """[B Hv, T] to [B, T, Hv]."""
    x = x.reshape(shapes.batch, shapes.value_heads, shapes.time)
    return jnp.swapaxes(x, 1, 2)


def _flat(x: jax.Array) -> jax.Array:
    """[B, T, ...] to [B T, ...] and [B, Hv, ...] to [B Hv, ...]."""
    return x.reshape(-1, *x.shape[2:])


def _prepare(shapes: Shapes, k, g, beta, start) -> tuple[jax.Array, jax.Array]:
    g = _by_head(shapes, jnp.maximum(g, MIN_LOG_DECAY) * LOG2_E)
    inverse, gates = prepare(shapes, _flat(k), g, _by_head(shapes, beta), start)
    inverse = checkpoint_name(inverse, "gdn_inverse")
    return inverse, checkpoint_name(gates, "gdn_gates")


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _rule(shapes: Shapes, scale: float, q, k, v, g, beta, start, state):
    return _rule_forward(shapes, scale, q, k, v, g, beta, start, state)[0]


def _rule_forward(shapes: Shapes, scale: float, q, k, v, g, beta, start, state):
    inverse, gates = _prepare(shapes, k, g, beta, start)
    sources = {
        "q": _flat(q),
        "k": _flat(k),
        "v": _flat(v),
        "inverse": inverse,
        "gates": gates,
    }
    o, last = chunk_fwd(shapes, scale, sources, _flat(state))
    saved = (q, k, v, g, inverse, gates, state)
    return (o.reshape(v.shape), last.reshape(state.shape)), saved


def _rule_backward(shapes: Shapes, scale: float, saved: Any, cotangents: Any):
    q, k, v, g, inverse, gates, state = saved
    do, d_last = cotangents
    sources = {
        "q": _flat(q),
        "k": _flat(k),
        "v": _flat(v),
        "do": _flat(do),
        "inverse": inverse,
        "gates": gates,
    }
    states, dv, d_states, d_initial = chunk_bwd(
        shapes, scale, sources, _flat(state), _flat(d_last)
    )
    between = {"dv": dv, "states": states, "d_states": d_states}
    grads = chunk_grads(shapes, scale, heuristic(shapes), sources | between)
    # The floor of g is a constant there.
    dg = jnp.where(g < MIN_LOG_DECAY, 0.0, _by_token(shapes, grads["dg"]))
    return (
        grads["dq"].reshape(q.shape),
        grads["dk"].reshape(k.shape),
        dv.reshape(v.shape),
        dg,
        _by_token(shapes, grads["dbeta"]),
        None,
        d_initial.reshape(state.shape),
    )


_rule.defvjp(_rule_forward, _rule_backward)


def gated_delta_rule(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    g: jax.Array,
    beta: jax.Array,
    *,
    is_first: jax.Array,
    initial_state: jax.Array,
    scale: float,
) -> tuple[jax.Array, jax.Array]:
    """Kernel form; arguments and results as in `api.gated_delta_rule`."""
    batch, time, key_heads, key_dim = q.shape
    padding = -time % CHUNK
    if padding:
        # Zeros in g and beta leave the state as it is.
        q, k, v, g, beta, is_first = (
            jnp.pad(x, ((0, 0), (0, padding)) + ((0, 0),) * (x.ndim - 2))
            for x in (q, k, v, g, beta, is_first)
        )
    shapes = Shapes(
        batch=batch,
        time=time + padding,
        key_heads=key_heads,
        value_heads=v.shape[2],
        key_dim=key_dim,
        value_dim=v.shape[3],
        dtype=jnp.dtype(v.dtype),
    )
    start = tables.document_starts(is_first, CHUNK)
    o, state = _rule(shapes, scale, q, k, v, g, beta, start, initial_state)
    return o[:, :time], state
