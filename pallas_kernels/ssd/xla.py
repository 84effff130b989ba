"""The chunked form: matrix products inside chunks, a short scan over chunks.

Formulas and names as in README.md. Letters beyond the usual ones: n chunk, r head of a
group, i and j tokens of a chunk (i the later one).
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels._common import chunked
from pallas_kernels.ssd.config import Config


class _Chunks(NamedTuple):
    """Inputs of some chunks.

    x [n, B, G, R, C, V]; dt f32[n, B, G, R, C]; b, c [n, B, G, C, N];
    first bool[n, B, C].
    """

    x: jax.Array
    dt: jax.Array
    b: jax.Array
    c: jax.Array
    first: jax.Array


class _Decay(NamedTuple):
    """Decay factors, all <= 1; those that would cross a document border are 0.

    within [n, B, G, R, i, j] from after token j to after token i, 0 for j > i;
    enter [..., i] from the chunk's entry to after token i; leave [..., j] from after
    token j to the chunk's exit; across [...] over the whole chunk.
    """

    within: jax.Array
    enter: jax.Array
    leave: jax.Array
    across: jax.Array


def _decay(g: jax.Array, first: jax.Array) -> _Decay:
    """From log decays f32[n, B, G, R, C] and document starts bool[n, B, C]."""
    run = jnp.cumsum(first.astype(jnp.int32), axis=-1)  # [n, B, C]
    size = run.shape[-1]
    tril = jnp.tril(jnp.ones((size, size), bool))
    same = (run[..., :, None] == run[..., None, :]) & tril[None, None]
    same = same[:, :, None, None]  # [n, B, 1, 1, i, j]
    # The sum from j + 1 to i, and not a difference of two sums from the chunk's start:
    # those grow where the state is forgotten quickly, and their difference is noise.
    strict = jnp.tril(jnp.ones((size, size), bool), -1)[None, None, None, None]
    total = jnp.cumsum(jnp.where(strict, g[..., :, None], 0.0), axis=-2)
    # Masked before exp, so that no exponent is positive.
    within = jnp.exp(jnp.where(same, total, -jnp.inf))
    begun_before = (run == 0)[:, :, None, None, :]
    from_entry = jnp.where(begun_before, jnp.cumsum(g, axis=-1), -jnp.inf)
    enter = jnp.exp(from_entry)
    return _Decay(within, enter, within[..., -1, :], enter[..., -1])


def _group(a: jax.Array, state: jax.Array, x: _Chunks) -> tuple[jax.Array, jax.Array]:
    """Some chunks in turn.

    Args:
      a: f32[G, R].
      state: f32[B, G, R, V, N] before the first of them.
      x: their inputs.

    Returns:
      (state after the last of them, y f32[n, B, G, R, C, V]).
    """
    dtype = x.x.dtype
    decay = _decay(x.dt * a[None, None, :, :, None], x.first)
    cb = chunked.product("nbgik,nbgjk->nbgij", x.c, x.b, dtype=dtype)
    scores = cb[:, :, :, None] * decay.within * x.dt[..., None, :]
    y = chunked.product("nbgrij,nbgrjv->nbgriv", scores, x.x, dtype=dtype)
    left = (decay.leave * x.dt)[..., None] * x.x.astype(jnp.float32)
    written = chunked.product("nbgrjv,nbgjk->nbgrvk", left, x.b, dtype=dtype)

    def chunk(state, inputs):
        across, written = inputs
        return across[..., None, None] * state + written, state

    state, entry = jax.lax.scan(chunk, state, (decay.across, written))
    from_entry = chunked.product("nbgik,nbgrvk->nbgriv", x.c, entry, dtype=dtype)
    return state, y + decay.enter[..., None] * from_entry


def ssd(
    x: jax.Array,
    dt: jax.Array,
    a: jax.Array,
    b: jax.Array,
    c: jax.Array,
    *,
    is_first: jax.Array,
    initial_state: jax.Array,
    config: Config,
) -> tuple[jax.Array, jax.Array]:
    """Chunked form; arguments and results as in `reference.ssd`."""
    batch, time, _, dim = x.shape
    num_groups = b.shape[2]
    # Padding is a step of zero, which leaves the state as it is.
    chunks = functools.partial(
        chunked.to_chunks, chunk=config.chunk, group=config.group
    )
    inputs = _Chunks(
        x=chunks(x, num_groups),
        dt=chunks(dt, num_groups),
        b=chunks(b, 0),
        c=chunks(c, 0),
        first=chunks(is_first, 0),
    )
    by_group = a.reshape(num_groups, -1)
    state = initial_state.reshape(batch, num_groups, -1, dim, b.shape[3])

    def group(state, x):
        return _group(by_group, state, x)

    if len(inputs.dt) > 1:
        # One state a group is kept for the gradient, and the group computed again.
        again = jax.checkpoint(group, prevent_cse=False)
        state, y = jax.lax.scan(again, state, inputs)
    else:
        state, y = group(state, jax.tree.map(lambda leaf: leaf[0], inputs))
        y = y[None]
    return chunked.to_tokens(y)[:, :time], state.reshape(initial_state.shape)
