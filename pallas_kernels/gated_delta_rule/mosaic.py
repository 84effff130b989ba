"""The gated delta rule through Mosaic GPU kernels, with their gradient.

Forward: `kernel_inverse` then `kernel_fwd`. Backward: `kernel_bwd` computes the states
at chunk entries again and runs the chunks in reverse, `kernel_grads_stream` or
`kernel_grads_ring` does the rest.
Saved between the two are the inputs, the inverses and the decay factors; a
`jax.checkpoint` policy finds the latter two as "gdn_inverse" and "gdn_gates". With
`Config(keep="states")` the forward of a gradient saves the states at chunk entries and
the written values too, as "gdn_states", and `kernel_bwd` only runs in reverse.

With several segments per row, `kernel_summary` runs before `kernel_fwd` and before
`kernel_bwd`, and these see each segment as a row of its own: tokens lie in memory alike
either way. The states that enter the segments and their maps are saved too, as
"gdn_segments".
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from pallas_kernels.gated_delta_rule import (
    head_dims,
    kernel_summary,
    segments,
    tables,
)
from pallas_kernels.gated_delta_rule.config_mosaic import (
    CHUNK,
    LOG2_E,
    MIN_LOG_DECAY,
    Config,
    Shapes,
    heuristic,
    plan_segments,
    shapes_of,
)
from pallas_kernels.gated_delta_rule.kernel_bwd import chunk_bwd, reverse_bwd
from pallas_kernels.gated_delta_rule.kernel_fwd import chunk_fwd
from pallas_kernels.gated_delta_rule.kernel_grads_ring import chunk_grads_ring
from pallas_kernels.gated_delta_rule.kernel_grads_stream import chunk_grads_stream
from pallas_kernels.gated_delta_rule.kernel_inverse import prepare


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


def _only(sources: dict[str, jax.Array], *names: str) -> dict[str, jax.Array]:
    return {name: sources[name] for name in (*names, "inverse", "gates")}


def _prepare(shapes: Shapes, k, g, beta, start) -> tuple[jax.Array, jax.Array]:
    g = _by_head(shapes, jnp.maximum(g, MIN_LOG_DECAY) * LOG2_E)
    inverse, gates = prepare(shapes, _flat(k), g, _by_head(shapes, beta), start)
    inverse = checkpoint_name(inverse, "gdn_inverse")
    return inverse, checkpoint_name(gates, "gdn_gates")


def _merge(shapes: Shapes, states: jax.Array) -> jax.Array:
    """[S, B Hv, V, K] to [B S Hv, V, K], segments as rows."""
    count = states.shape[0]
    states = states.reshape(count, -1, shapes.value_heads, *states.shape[2:])
    return jnp.swapaxes(states, 0, 1).reshape(-1, *states.shape[3:])


def _entries(
    shapes: Shapes, sources: dict[str, jax.Array], state: jax.Array
) -> tuple[jax.Array, jax.Array | None]:
    """The states that enter the segments, and the maps of those that have both ends.

    Args:
      shapes: sizes of the call with segments as rows.
      sources: k, v, inverse, gates.
      state: f32[B Hv, V, K], that enters the rows.

    Returns:
      f32[B S Hv, V, K] and f32[S - 2, B Hv, K, K], `None` for one segment.
    """
    if shapes.segments == 1:
        return state, None
    after_first, inner = kernel_summary.summaries(shapes, sources, state)
    states = segments.chain(after_first, inner)
    entries = jnp.concatenate([state[None], states])
    named = functools.partial(checkpoint_name, name="gdn_segments")
    return named(_merge(shapes, entries)), named(inner.through)


def _exit_gradients(
    shapes: Shapes,
    scale: float,
    sources: dict[str, jax.Array],
    through: jax.Array | None,
    d_last: jax.Array,
) -> jax.Array:
    """Gradients of the states that leave the segments, [B S Hv, V, K].

    Args:
      shapes: sizes of the call with segments as rows.
      scale: factor on the output.
      sources: q, k, do, inverse, gates.
      through: what `_entries` returned.
      d_last: f32[B Hv, V, K], of the rows' final states.
    """
    if through is None:
        return d_last
    d_entries = kernel_summary.entry_gradients(shapes, scale, sources, d_last)
    d_states = segments.chain_gradients(d_entries[-1], through, d_entries[:-1])
    return _merge(shapes, jnp.concatenate([d_states, d_last[None]]))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _rule(shapes: Shapes, scale: float, config: Config, q, k, v, g, beta, start, state):
    config = dataclasses.replace(config, keep="inputs")  # there is no gradient
    return _rule_forward(shapes, scale, config, q, k, v, g, beta, start, state)[0]


def _rule_forward(
    shapes: Shapes, scale: float, config: Config, q, k, v, g, beta, start, state
):
    inverse, gates = _prepare(shapes, k, g, beta, start)
    sources = {
        "q": _flat(q),
        "k": _flat(k),
        "v": _flat(v),
        "inverse": inverse,
        "gates": gates,
    }
    entries, through = _entries(shapes, _only(sources, "k", "v"), _flat(state))
    kept = config.keep == "states"
    o, last, *rest = chunk_fwd(shapes, scale, config, sources, entries, kept=kept)
    between = {
        name: checkpoint_name(x, "gdn_states")
        for name, x in zip(("states", "written"), rest, strict=kept)
    }
    # Entry states are those of the first chunks where states are kept.
    saved = (q, k, v, g, inverse, gates, None if kept else entries, through, between)
    return (o.reshape(v.shape), last.reshape(state.shape)), saved


def _rule_backward(
    shapes: Shapes, scale: float, config: Config, saved: Any, cotangents: Any
):
    q, k, v, g, inverse, gates, entries, through, between = saved
    do, d_last = cotangents
    sources = {
        "q": _flat(q),
        "k": _flat(k),
        "v": _flat(v),
        "do": _flat(do),
        "inverse": inverse,
        "gates": gates,
    }
    d_exits = _exit_gradients(
        shapes,
        scale,
        _only(sources, "q", "k", "do"),
        through,
        _flat(d_last),
    )
    if between:
        reverse = _only(sources, "q", "k", "do")
        more, d_initial = reverse_bwd(shapes, scale, reverse, d_exits)
        between = between | more
    else:
        between, d_initial = chunk_bwd(shapes, scale, sources, entries, d_exits)
    del sources["inverse"]
    run = chunk_grads_stream if config.grads == "stream" else chunk_grads_ring
    grads = run(shapes, scale, sources | between)
    # The floor of g is a constant there.
    dg = jnp.where(g < MIN_LOG_DECAY, 0.0, _by_token(shapes, grads["dg"]))
    return (
        grads["dq"].reshape(q.shape),
        grads["dk"].reshape(k.shape),
        grads["dv"].reshape(v.shape),
        dg,
        _by_token(shapes, grads["dbeta"]),
        None,
        d_initial.reshape(d_last.shape),
    )


_rule.defvjp(_rule_forward, _rule_backward)


def _padded_rows(
    inputs: tuple[jax.Array, ...], starts: jax.Array, time: int
) -> list[jax.Array]:
    """Tokens and starts padded at the end, where they leave the state as it is."""
    padding = time - starts.shape[1]
    rows = [
        jnp.pad(x, ((0, 0), (0, padding)) + ((0, 0),) * (x.ndim - 2)) if padding else x
        for x in inputs
    ]
    return [*rows, tables.padded(starts, time, CHUNK)]


def gated_delta_rule(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    g: jax.Array,
    beta: jax.Array,
    *,
    starts: jax.Array,
    initial_state: jax.Array,
    scale: float,
    config: Config | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Kernel form; arguments and results as in `api.gated_delta_rule`.

    Raises:
      ValueError: `config` has more segments than the rows have chunks.
    """
    batch, time = q.shape[:2]
    key_dim, value_dim = q.shape[3], v.shape[3]
    shapes = shapes_of(q, v)
    q, k, v = head_dims.fit_keys(q), head_dims.fit_keys(k), head_dims.fit_values(v)
    g, beta = (head_dims.fit_gates(x, value_dim) for x in (g, beta))
    config = heuristic(shapes) if config is None else config
    count = config.segments
    if count is None:
        count = plan_segments(items=shapes.items, chunks=shapes.chunks)
    if count > shapes.chunks:
        raise ValueError(
            f"config has segments={count}, T = {time} has {shapes.chunks} chunks of "
            f"{CHUNK} tokens"
        )
    length = -(-shapes.chunks // count) * CHUNK
    inputs = _padded_rows((q, k, v, g, beta), starts, count * length)
    inputs = [x.reshape(batch * count, length, *x.shape[2:]) for x in inputs]
    shapes = dataclasses.replace(
        shapes, batch=batch * count, time=length, segments=count
    )
    initial = head_dims.fit_states(initial_state)
    o, state = _rule(shapes, scale, config, *inputs, initial)
    o = o.reshape(batch, -1, *o.shape[2:])[:, :time]
    return (
        head_dims.values(o, value_dim),
        head_dims.states(state, value_dim, key_dim),
    )


def summaries(
    k: jax.Array, v: jax.Array, g: jax.Array, beta: jax.Array, *, starts: jax.Array
) -> segments.Summary:
    """What each row does to a state; see `api_segments.summaries`."""
    shapes = shapes_of(k, v)
    key_dim, value_dim = k.shape[3], v.shape[3]
    k, v = head_dims.fit_keys(k), head_dims.fit_values(v)
    g, beta = (head_dims.fit_gates(x, value_dim) for x in (g, beta))
    k, v, g, beta, starts = _padded_rows((k, v, g, beta), starts, shapes.time)
    inverse, gates = _prepare(shapes, k, g, beta, starts)
    sources = {"k": _flat(k), "v": _flat(v), "inverse": inverse, "gates": gates}
    maps = kernel_summary.row_summary(shapes, sources)
    heads = (shapes.batch, shapes.value_heads)
    through, written = (x.reshape(*heads, *x.shape[1:]) for x in maps)
    return segments.Summary(
        through=head_dims.maps(through, value_dim, key_dim),
        written=head_dims.states(written, value_dim, key_dim),
    )


def entry_gradients(
    q: jax.Array,
    k: jax.Array,
    g: jax.Array,
    beta: jax.Array,
    do: jax.Array,
    *,
    starts: jax.Array,
    scale: float,
) -> jax.Array:
    """What outputs send to the state before; see `api_segments.entry_gradients`."""
    shapes = shapes_of(k, do)
    key_dim, value_dim = k.shape[3], do.shape[3]
    q, k, do = head_dims.fit_keys(q), head_dims.fit_keys(k), head_dims.fit_values(do)
    g, beta = (head_dims.fit_gates(x, value_dim) for x in (g, beta))
    inputs = (q, k, g, beta, do)
    q, k, g, beta, do, starts = _padded_rows(inputs, starts, shapes.time)
    inverse, gates = _prepare(shapes, k, g, beta, starts)
    sources = {"q": _flat(q), "k": _flat(k), "do": _flat(do)}
    sources |= {"inverse": inverse, "gates": gates}
    state = (shapes.batch, shapes.value_heads, shapes.value_dim, shapes.key_dim)
    nothing = jnp.zeros((shapes.items, *state[2:]), jnp.float32)
    d_entry = kernel_summary.entry_gradients(shapes, scale, sources, nothing)
    return head_dims.states(d_entry.reshape(state), value_dim, key_dim)
