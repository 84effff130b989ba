"""The chunked form: matrix products inside chunks, a short scan over chunks.

Formulas and names as in README.md. Letters beyond the usual ones: n chunk, r value
head of a key head, i and j tokens of a chunk (i the later one).
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels._common import chunked
from pallas_kernels.gated_delta_rule.config import Config
from pallas_kernels.gated_delta_rule.inverse import unit_lower_inverse
from pallas_kernels.gated_delta_rule.segments import Summary


class _Chunks(NamedTuple):
    """Inputs of some chunks.

    q, k [n, B, Hk, C, K]; v [n, B, Hk, R, C, V]; g, beta f32[n, B, Hk, R, C];
    first bool[n, B, C].
    """

    q: jax.Array
    k: jax.Array
    v: jax.Array
    g: jax.Array
    beta: jax.Array
    first: jax.Array


class _Decay(NamedTuple):
    """Decay factors, all <= 1; those that would cross a document border are 0.

    within [n, B, Hk, R, i, j] from after token j to after token i; enter [..., i]
    from the chunk's entry to after token i; leave [..., j] from after token j to the
    chunk's exit; across [...] over the whole chunk; same bool[n, B, i, j] whether
    j <= i and both are of one document.
    """

    within: jax.Array
    enter: jax.Array
    leave: jax.Array
    across: jax.Array
    same: jax.Array


class _Saved(NamedTuple):
    """What the backward needs of the forward.

    inverse [n, B, Hk, R, i, j]; entry [n, B, Hk, R, V, K] states at chunk entries;
    written [n, B, Hk, R, C, V] the rows that are added to the state.
    """

    inverse: jax.Array
    entry: jax.Array
    written: jax.Array


def _decay(x: _Chunks) -> _Decay:
    # The barrier keeps XLA from fusing the running sum into each [C, C] array.
    run = jnp.cumsum(x.first.astype(jnp.int32), axis=-1)  # [n, B, C]
    run = jax.lax.optimization_barrier(run)
    size = run.shape[-1]
    tril = jnp.tril(jnp.ones((size, size), bool))
    same = (run[..., :, None] == run[..., None, :]) & tril[None, None]
    # A document's first token has nothing to decay; and exp is 0 in f32 from -104
    # on, so the floor changes no result but keeps the sums below precise.
    g = jnp.where(x.first[:, :, None, None, :], 0.0, jnp.maximum(x.g, -110.0))
    # Sums restart with each document: what came before can't blur them.
    total = chunked.product(
        "nbhrj,nbij->nbhri", g, same.astype(jnp.float32), dtype=jnp.dtype(jnp.float32)
    )
    same_all = same[:, :, None, None]
    difference = total[..., :, None] - total[..., None, :]
    within = jnp.exp(jnp.where(same_all, difference, -jnp.inf))
    begun_before = (run == 0)[:, :, None, None, :]
    enter = jnp.where(begun_before, jnp.exp(total), 0.0)
    return _Decay(
        within=within,
        enter=enter,
        leave=within[..., -1, :],
        across=enter[..., -1],
        same=same,
    )


def _strictly_lower(same: jax.Array) -> jax.Array:
    size = same.shape[-1]
    strict = jnp.tril(jnp.ones((size, size), bool), -1)
    return (same & strict[None, None])[:, :, None, None]


def _inverse(x: _Chunks, decay: _Decay, kk: jax.Array) -> jax.Array:
    lower = jnp.where(
        _strictly_lower(decay.same), x.beta[..., :, None] * kk[:, :, :, None], 0.0
    )
    return unit_lower_inverse(lower)


def _solve(x: _Chunks, state: jax.Array, decay: _Decay) -> tuple[jax.Array, _Saved]:
    """Runs the state through the chunks.

    Args:
      x: the inputs.
      state: f32[B, Hk, R, V, K].
      decay: their decay factors.

    Returns:
      (the state after the last chunk, what was computed on the way).
    """
    dtype = x.v.dtype
    product = functools.partial(chunked.product, dtype=dtype)
    kk = product("nbhik,nbhjk->nbhij", x.k, x.k)
    inverse = _inverse(x, decay, kk)
    weights = inverse * decay.within * x.beta[..., None, :]  # [n, B, Hk, R, i, j]
    from_values = product("nbhrij,nbhrjv->nbhriv", weights, x.v)
    from_state = product(
        "nbhrij,nbhjk->nbhrik", weights * decay.enter[..., None, :], x.k
    ).astype(dtype)

    def chunk(state, inputs):
        k, from_values, from_state, leave, across = inputs
        entry = state.astype(dtype)
        written = from_values - product("bhrik,bhrvk->bhriv", from_state, entry)
        left = written * leave[..., None]
        state = across[..., None, None] * state
        state = state + product("bhriv,bhik->bhrvk", left, k)
        return state, (entry, written.astype(dtype))

    state, (entry, written) = jax.lax.scan(
        chunk, state, (x.k, from_values, from_state, decay.leave, decay.across)
    )
    return state, _Saved(inverse.astype(dtype), entry, written)


def _forward_group(
    scale: float, x: _Chunks, state: jax.Array
) -> tuple[jax.Array, jax.Array, _Saved]:
    product = functools.partial(chunked.product, dtype=x.v.dtype)
    decay = _decay(x)
    state, saved = _solve(x, state, decay)
    qk = product("nbhik,nbhjk->nbhij", x.q, x.k)
    scores = scale * qk[:, :, :, None] * decay.within
    o = product("nbhik,nbhrvk->nbhriv", x.q, saved.entry)
    o = scale * decay.enter[..., None] * o
    o = o + product("nbhrij,nbhrjv->nbhriv", scores, saved.written)
    return o.astype(x.v.dtype), state, saved


class _Reverse(NamedTuple):
    """What the pass over the chunks in reverse makes of dO and dS'.

    do_entering [n, B, Hk, R, C, V] gradient of Q S; from_do f32[n, B, Hk, R, C, V] the
    part of dD that comes from dO; d_exit [n, B, Hk, R, V, K] gradient of the state at
    each chunk's exit; dv [n, B, Hk, R, C, V].
    """

    do_entering: jax.Array
    from_do: jax.Array
    d_exit: jax.Array
    dv: jax.Array


def _reverse(
    scale: float,
    x: _Chunks,
    inverse: jax.Array,
    decay: _Decay,
    do: jax.Array,
    d_state: jax.Array,
) -> tuple[jax.Array, _Reverse]:
    """Runs the gradient of the state back through the chunks.

    Args:
      scale: factor on the output.
      x: the inputs; v is not read.
      inverse: [n, B, Hk, R, i, j], A.
      decay: their decay factors.
      do: [n, B, Hk, R, C, V].
      d_state: f32[B, Hk, R, V, K], gradient of the state after the last chunk.

    Returns:
      (that of the state before the first chunk, what was computed on the way).
    """
    dtype = do.dtype
    product = functools.partial(chunked.product, dtype=dtype)
    qk = product("nbhik,nbhjk->nbhij", x.q, x.k)[:, :, :, None]
    scores = scale * qk * decay.within  # P
    weights = inverse.astype(jnp.float32) * decay.within * x.beta[..., None, :]
    enter, leave = decay.enter[..., None], decay.leave[..., None]

    from_do = product("nbhrij,nbhriv->nbhrjv", scores, do)  # Pᵀ dO
    to_written = product("nbhrij,nbhriv->nbhrjv", weights, from_do)
    to_state = product("nbhrij,nbhik->nbhrjk", weights * leave, x.k).astype(dtype)
    do_entering = (scale * enter * do.astype(jnp.float32)).astype(dtype)

    def chunk(d_state, inputs):
        q, k, to_written, to_state, do_entering, enter, across = inputs
        d_exit = d_state.astype(dtype)
        dv = to_written + product("bhrjk,bhrvk->bhrjv", to_state, d_exit)  # dW
        du = -enter * dv
        d_state = across[..., None, None] * d_state
        d_state = d_state + product("bhriv,bhik->bhrvk", do_entering, q)
        d_state = d_state + product("bhriv,bhik->bhrvk", du, k)
        return d_state, (d_exit, dv.astype(dtype))

    d_state, (d_exit, dv) = jax.lax.scan(
        chunk,
        d_state,
        (x.q, x.k, to_written, to_state, do_entering, enter, decay.across),
        reverse=True,
    )
    return d_state, _Reverse(do_entering, from_do, d_exit, dv)


def _backward_group(
    scale: float,
    x: _Chunks,
    saved: _Saved,
    decay: _Decay,
    do: jax.Array,
    d_state: jax.Array,
) -> tuple[_Chunks, jax.Array]:
    """Gradients of `_forward_group`; the letters in comments are README.md's."""
    dtype = x.v.dtype
    product = functools.partial(chunked.product, dtype=dtype)
    inverse = saved.inverse.astype(jnp.float32)
    kk = product("nbhik,nbhjk->nbhij", x.k, x.k)[:, :, :, None]
    qk = product("nbhik,nbhjk->nbhij", x.q, x.k)[:, :, :, None]
    beta_j = x.beta[..., None, :]
    decayed = inverse * decay.within  # A o G
    weights = decayed * beta_j  # Ã
    scores = scale * qk * decay.within  # P
    enter, leave = decay.enter[..., None], decay.leave[..., None]

    d_state, reverse = _reverse(scale, x, saved.inverse, decay, do, d_state)
    do_entering, from_do, d_exit, dv = reverse

    read = product("nbhik,nbhrvk->nbhriv", x.k, saved.entry)  # U
    missing = x.v.astype(jnp.float32) - enter * read  # W
    k_exit = leave * product("nbhik,nbhrvk->nbhriv", x.k, d_exit)
    d_written = from_do + k_exit  # dD
    du = -enter * dv.astype(jnp.float32)
    same = decay.same[:, :, None, None]
    d_weights = product("nbhriv,nbhrjv->nbhrij", d_written, missing)
    d_weights = jnp.where(same, d_weights, 0.0)
    d_scores = product("nbhriv,nbhrjv->nbhrij", do, saved.written)
    d_scores = jnp.where(same, d_scores, 0.0)

    dq_entering = product("nbhriv,nbhrvk->nbhrik", do_entering, saved.entry)
    d_qk = scale * jnp.sum(d_scores * decay.within, axis=3)  # [n, B, Hk, i, j]
    dq = jnp.sum(dq_entering, axis=3) + product("nbhij,nbhjk->nbhik", d_qk, x.k)

    d_inverse = d_weights * decay.within * beta_j
    inner = product("nbhrlj,nbhrij->nbhrli", d_inverse, saved.inverse)
    d_lower = product("nbhrli,nbhrlj->nbhrji", inner, saved.inverse)
    d_lower = jnp.where(_strictly_lower(decay.same), -d_lower, 0.0)
    d_kk = jnp.sum(x.beta[..., :, None] * d_lower, axis=3)
    left = leave * saved.written.astype(jnp.float32)
    dk = product("nbhriv,nbhrvk->nbhik", left, d_exit)
    dk = dk + product("nbhriv,nbhrvk->nbhik", du, saved.entry)
    dk = dk + product("nbhij,nbhik->nbhjk", d_qk, x.q)
    dk = dk + product("nbhij,nbhjk->nbhik", d_kk, x.k)
    dk = dk + product("nbhij,nbhik->nbhjk", d_kk, x.k)

    d_beta = jnp.sum(d_weights * decayed, axis=-2) + jnp.sum(d_lower * kk, axis=-1)

    by_pair = d_weights * weights + d_scores * scores  # Z
    leaving = jnp.sum(k_exit * saved.written.astype(jnp.float32), axis=-1)
    d_total = jnp.sum(by_pair, axis=-1) - jnp.sum(by_pair, axis=-2) - leaving
    q32 = x.q.astype(jnp.float32)[:, :, :, None]
    d_total = d_total + jnp.sum(q32 * dq_entering, axis=-1)
    d_total = d_total + jnp.sum(du * read, axis=-1)
    kept = jnp.einsum(
        "nbhrvk,nbhrvk->nbhr",
        d_exit.astype(jnp.float32),
        saved.entry.astype(jnp.float32),
    )
    at_exit = jnp.sum(leaving, axis=-1) + decay.across * kept
    d_total = d_total.at[..., -1].add(at_exit)
    # Sums stop at the document's end: an earlier document gets exact zeros.
    dg = chunked.product(
        "nbhri,nbij->nbhrj",
        d_total,
        decay.same.astype(jnp.float32),
        dtype=jnp.dtype(jnp.float32),
    )
    unused = x.first[:, :, None, None, :] | (x.g < -110.0)
    dg = jnp.where(unused, 0.0, dg)
    gradients = _Chunks(
        q=dq.astype(dtype),
        k=dk.astype(dtype),
        v=dv,
        g=dg,
        beta=d_beta,
        first=x.first,
    )
    return gradients, d_state


def _by_key_head(state: jax.Array, key_heads: int) -> jax.Array:
    """[B, Hv, V, K] to [B, Hk, R, V, K]."""
    batch, value_heads, *rest = state.shape
    return state.reshape(batch, key_heads, value_heads // key_heads, *rest)


def _split_chunks(config: Config, q, k, v, g, beta, is_first) -> _Chunks:
    """The inputs in groups of chunks, padded to whole groups."""
    key_heads = k.shape[2]
    # Padding has zeros in g and beta, which leave the state as it is.
    chunks = functools.partial(
        chunked.to_chunks, chunk=config.chunk, group=config.group
    )
    return _Chunks(
        q=chunks(q, 0),
        k=chunks(k, 0),
        v=chunks(v, key_heads),
        g=chunks(g, key_heads),
        beta=chunks(beta, key_heads),
        first=chunks(is_first, 0),
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _rule(
    config: Config, scale: float, x: _Chunks, state: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """All groups in turn; leaves of `x` have a leading [groups] axis."""

    def group(state, x):
        o, state, _ = _forward_group(scale, x, state)
        return state, o

    state, o = jax.lax.scan(group, state, x)
    return o, state


def _rule_forward(config, scale, x, state):
    def group(state, x):
        entry = state
        o, state, saved = _forward_group(scale, x, state)
        return state, (o, entry, saved if config.save else None)

    state, (o, entries, saved) = jax.lax.scan(group, state, x)
    return (o, state), (x, entries, saved)


def _rule_backward(config, scale, residuals, cotangents):
    del config
    do, d_state = cotangents

    def group(d_state, inputs):
        x, entry, saved, do = inputs
        decay = _decay(x)
        if saved is None:
            _, saved = _solve(x, entry, decay)
        gradients, d_state = _backward_group(scale, x, saved, decay, do, d_state)
        # A bool has no gradient, which `None` says to custom_vjp.
        none: Any = None
        return d_state, gradients._replace(first=none)

    d_state, gradients = jax.lax.scan(group, d_state, (*residuals, do), reverse=True)
    return gradients, d_state


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
    config: Config,
) -> tuple[jax.Array, jax.Array]:
    """Chunked form; arguments and results as in `api.gated_delta_rule`."""
    x = _split_chunks(config, q, k, v, g, beta, is_first)
    state = _by_key_head(initial_state, k.shape[2])
    o, state = _rule(config, scale, x, state)
    return chunked.to_tokens(o)[:, : q.shape[1]], state.reshape(initial_state.shape)


def summaries(
    k: jax.Array,
    v: jax.Array,
    g: jax.Array,
    beta: jax.Array,
    *,
    is_first: jax.Array,
    config: Config,
) -> Summary:
    """What each row does to a state, whichever it is; see `segments`.

    The state is widened by K rows: values [v | 0] from the state [0 | I] leave the
    written part in the first V rows and the factor on the state in the others.

    Args:
      k, v, g, beta, is_first: as in `api.gated_delta_rule`.
      config: sizes of the chunked form.

    Returns:
      The summary of all tokens of each row, f32[B, Hv, ...].
    """
    batch, _, key_heads, key_dim = k.shape
    value_heads, value_dim = v.shape[2:]
    wide = jnp.pad(v, ((0, 0), (0, 0), (0, 0), (0, key_dim)))
    x = _split_chunks(config, k, k, wide, g, beta, is_first)
    state = jnp.eye(value_dim + key_dim, key_dim, -value_dim, jnp.float32)
    state = jnp.broadcast_to(
        state[None, None], (batch, value_heads, value_dim + key_dim, key_dim)
    )

    def group(state, x):
        return _solve(x, state, _decay(x))[0], None

    state, _ = jax.lax.scan(group, _by_key_head(state, key_heads), x)
    state = state.reshape(batch, value_heads, value_dim + key_dim, key_dim)
    return Summary(through=state[:, :, value_dim:], written=state[:, :, :value_dim])


def entry_gradients(
    q: jax.Array,
    k: jax.Array,
    g: jax.Array,
    beta: jax.Array,
    do: jax.Array,
    *,
    is_first: jax.Array,
    scale: float,
    config: Config,
) -> jax.Array:
    """The gradient that each row's outputs alone send to the state before it.

    That of the state after the row adds to it what `segments.chain_gradients` says.

    Args:
      q, k, g, beta, is_first, scale: as in `api.gated_delta_rule`.
      do: [B, T, Hv, V], gradient of the output, dtype of q.
      config: sizes of the chunked form.

    Returns:
      f32[B, Hv, V, K].
    """
    batch, _, key_heads, key_dim = k.shape
    value_heads, value_dim = do.shape[2:]
    x = _split_chunks(config, q, k, do, g, beta, is_first)

    def group(d_state, x):
        decay = _decay(x)
        kk = chunked.product("nbhik,nbhjk->nbhij", x.k, x.k, dtype=do.dtype)
        inverse = _inverse(x, decay, kk).astype(do.dtype)
        return _reverse(scale, x, inverse, decay, x.v, d_state)[0], None

    shape = (batch, value_heads, value_dim, key_dim)
    d_state = _by_key_head(jnp.zeros(shape, jnp.float32), key_heads)
    d_state, _ = jax.lax.scan(group, d_state, x, reverse=True)
    return d_state.reshape(shape)
