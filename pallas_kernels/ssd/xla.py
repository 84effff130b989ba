"""The chunked form: matrix products inside chunks, a short scan over chunks.

Formulas and names as in README.md. Letters beyond the usual ones: n chunk, r head of a
group, i and j tokens of a chunk (i the later one).
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

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


def _product(subscripts: str, *operands: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Product of operands rounded to `dtype`, accumulated in f32."""
    # Without HIGHEST a GPU multiplies f32 operands as tf32.
    exact = dtype == jnp.float32
    return jnp.einsum(
        subscripts,
        *(x.astype(dtype) for x in operands),
        preferred_element_type=jnp.float32,
        precision=jax.lax.Precision.HIGHEST if exact else jax.lax.Precision.DEFAULT,
    )


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
    cb = _product("nbgik,nbgjk->nbgij", x.c, x.b, dtype=dtype)
    scores = cb[:, :, :, None] * decay.within * x.dt[..., None, :]
    y = _product("nbgrij,nbgrjv->nbgriv", scores, x.x, dtype=dtype)
    left = (decay.leave * x.dt)[..., None] * x.x.astype(jnp.float32)
    written = _product("nbgrjv,nbgjk->nbgrvk", left, x.b, dtype=dtype)

    def chunk(state, inputs):
        across, written = inputs
        return across[..., None, None] * state + written, state

    state, entry = jax.lax.scan(chunk, state, (decay.across, written))
    from_entry = _product("nbgik,nbgrvk->nbgriv", x.c, entry, dtype=dtype)
    return state, y + decay.enter[..., None] * from_entry


def _to_chunks(config: Config, groups: int, x: jax.Array, heads: int) -> jax.Array:
    """[B, T, H, ...] to [groups, n, B, G, R, C, ...]; no R axis if heads is 0."""
    batch, _, *rest = x.shape
    shape = (batch, groups, config.group, config.chunk)
    if not rest:
        return jnp.moveaxis(x.reshape(shape), 0, 2)
    if heads == 0:
        x = x.reshape(*shape, *rest)
        return jnp.transpose(x, (1, 2, 0, 4, 3, *range(5, x.ndim)))
    x = x.reshape(*shape, heads, rest[0] // heads, *rest[1:])
    return jnp.transpose(x, (1, 2, 0, 4, 5, 3, *range(6, x.ndim)))


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
    batch, time, heads, dim = x.shape
    num_groups = b.shape[2]
    groups = max(1, -(-time // (config.chunk * config.group)))
    padding = groups * config.group * config.chunk - time

    def chunks(x: jax.Array, heads: int) -> jax.Array:
        # A step of zero leaves the state as it is.
        x = jnp.pad(x, ((0, 0), (0, padding)) + ((0, 0),) * (x.ndim - 2))
        return _to_chunks(config, groups, x, heads)

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

    if groups > 1:
        # One state a group is kept for the gradient, and the group computed again.
        again = jax.checkpoint(group, prevent_cse=False)
        state, y = jax.lax.scan(again, state, inputs)
    else:
        state, y = group(state, jax.tree.map(lambda leaf: leaf[0], inputs))
        y = y[None]
    y = jnp.transpose(y, (2, 0, 1, 5, 3, 4, 6))
    y = y.reshape(batch, groups * config.group * config.chunk, heads, dim)
    return y[:, :time], state.reshape(initial_state.shape)
