"""Decoding as XLA runs it well: one pass over the state per call, T tokens at a time.

With S the state before the tokens and gamma_t the decay from there to after token t
(README.md, arXiv 2412.06464 section 3 in the form of a short chunk):

    u_t = beta_t (v_t - gamma_t S k_t - sum_{j<t} (gamma_t / gamma_j) (k_t . k_j) u_j)
    o_t = s (gamma_t S q_t + sum_{j<=t} (gamma_t / gamma_j) (q_t . k_j) u_j)

Every function takes the rows that the slots name, as in `reference.py`.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from pallas_kernels.causal_conv1d import xla as conv
from pallas_kernels.gated_delta_rule.inverse import unit_lower_inverse
from pallas_kernels.gated_delta_step.layer import L2_EPS, Layer, Pending
from pallas_kernels.rms_norm import xla as norm


# Without it a GPU multiplies f32 operands as tf32.
_product = functools.partial(jnp.einsum, precision=jax.lax.Precision.HIGHEST)


def _unit(x: jax.Array) -> jax.Array:
    x32 = x.astype(jnp.float32)
    square = jnp.sum(x32 * x32, axis=-1, keepdims=True)
    return (x32 * jax.lax.rsqrt(square + L2_EPS)).astype(x.dtype)


def gates(layer: Layer, a: jax.Array, b: jax.Array) -> tuple[jax.Array, jax.Array]:
    """g and beta, f32[B, T, Hv] each."""
    rate = jnp.exp(layer.A_log)[None, None]
    g = -rate * jax.nn.softplus(a + layer.dt_bias[None, None])
    beta = jax.nn.sigmoid(b)
    return g, 2.0 * beta if layer.negative_eigenvalues else beta


def projected(
    layer: Layer, qkv: jax.Array, window: jax.Array, state: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """q, k [B, T, Hk, K] of length 1, v [B, T, Hv, V], and the new window."""
    value_heads, value_dim, key_dim = state.shape[1:]
    y, last = conv.causal_conv1d(
        qkv,
        layer.conv_weight,
        bias=None,
        is_first=None,
        is_real=None,
        initial_state=window.astype(qkv.dtype),
        activation="silu",
    )
    d_key = layer.key_heads * key_dim
    q, k, v = jnp.split(y, (d_key, 2 * d_key), axis=-1)
    tokens = qkv.shape[:2]
    q, k = (_unit(x.reshape(*tokens, layer.key_heads, key_dim)) for x in (q, k))
    return q, k, v.reshape(*tokens, value_heads, value_dim), last.astype(window.dtype)


def normed(layer: Layer, o: jax.Array, z: jax.Array) -> jax.Array:
    """The gated norm of [B, T, Hv, V] over V, as [B, T, Hv * V]."""
    rows = (-1, 1, o.shape[-1])
    y = norm.forward(
        o.reshape(rows),
        layer.norm_scale.astype(jnp.float32)[None],
        z.reshape(rows),
        eps=layer.norm_eps,
        norm_before_gate=True,
    )
    return y.reshape(z.shape)


def step(
    layer: Layer,
    qkv: jax.Array,
    a: jax.Array,
    b: jax.Array,
    z: jax.Array,
    window: jax.Array,
    state: jax.Array,
    is_first: jax.Array | None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """One token; arguments as in `reference.step`, (y, new window, new state).

    The sums over K are no matrix products: as such they would want the state in f32
    and masked, which a sum does on the way.
    """
    q, k, v, window = projected(layer, qkv[:, None], window, state)
    # Fused with the norms of q and k, the passes over the state would be kernels of
    # their own for each sum, and copies of the state.
    q, k = jax.lax.optimization_barrier((q, k))
    g, beta = gates(layer, a[:, None], b[:, None])
    key_heads, key_dim = q.shape[2:]
    shape = (q.shape[0], key_heads, v.shape[2] // key_heads)
    # [B, Hk, 1, 1, K] each, against the rows [B, Hk, R, V, K] of the value heads.
    q32, k32 = (x[:, 0, :, None, None].astype(jnp.float32) for x in (q, k))
    v32 = v.astype(jnp.float32).reshape(*shape, -1)
    decay, strength = jnp.exp(g).reshape(*shape, 1), beta.reshape(*shape, 1)
    rows = state.astype(jnp.float32).reshape(*shape, *state.shape[2:])
    if is_first is not None:
        rows = jnp.where(is_first[:, None, None, None, None], 0.0, rows)
    sums = jnp.sum(rows * k32, axis=-1), jnp.sum(rows * q32, axis=-1)
    # Fused with what follows, each of them would read the state again.
    sk, sq = jax.lax.optimization_barrier(sums)
    written = strength * (v32 - decay * sk)
    o = decay * sq + jnp.sum(q32 * k32, axis=-1) * written
    o = (key_dim**-0.5 * o).reshape(v.shape).astype(v.dtype)
    rows = decay[..., None] * rows + written[..., None] * k32
    y = normed(layer, o, z[:, None])[:, 0]
    return y, window, rows.reshape(state.shape)


def _decays(g: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Decays between tokens and from the start, each a sum of its own terms.

    A difference of two running sums would lose a weak decay behind a strong one.

    Args:
      g: f32[B, T, H], log decays.

    Returns:
      (within f32[B, H, T, T], exp of the sum of g over j < m <= t, 0 for j > t;
      enter f32[B, T, H], exp of the sum over m <= t).
    """
    index = jnp.arange(g.shape[1])
    t, j, m = index[:, None, None], index[None, :, None], index[None, None, :]
    between = ((j < m) & (m <= t)).astype(jnp.float32)
    total = _product("bmh,tjm->bhtj", g, between)
    seen = (index[None, :] <= index[:, None])[None, None]
    # Masked before exp: every exponent is at most 0.
    within = jnp.exp(jnp.where(seen, total, -jnp.inf))
    return within, jnp.exp(jnp.cumsum(g, axis=1))


def verify(
    layer: Layer,
    qkv: jax.Array,
    a: jax.Array,
    b: jax.Array,
    z: jax.Array,
    window: jax.Array,
    state: jax.Array,
    is_first: jax.Array | None,
) -> tuple[jax.Array, Pending]:
    """T tokens from one read of the state; as `reference.verify`."""
    batch, time, _ = qkv.shape
    q, k, v, _ = projected(layer, qkv, window, state)
    g, beta = gates(layer, a, b)
    key_heads, key_dim = q.shape[2:]
    group = v.shape[2] // key_heads
    heads = (batch, time, key_heads, group)
    within, enter = _decays(g)
    within = within.reshape(batch, key_heads, group, time, time)
    enter, strength = enter.reshape(*heads, 1), beta.reshape(*heads, 1)
    q32, k32 = q.astype(jnp.float32), k.astype(jnp.float32)
    v32 = v.astype(jnp.float32).reshape(*heads, -1)
    rows = state.astype(jnp.float32)
    rows = rows.reshape(batch, key_heads, group, *state.shape[2:])
    # [B, 2T, Hk, R, V]: S k and S q from one pass over S.
    both = _product("bgrvk,btgk->btgrv", rows, jnp.concatenate([k32, q32], axis=1))
    if is_first is not None:
        both = jnp.where(is_first[:, None, None, None, None], 0.0, both)
    keys = _product("btgk,bjgk->bgtj", k32, k32)[:, :, None]
    scores = _product("btgk,bjgk->bgtj", q32, k32)[:, :, None] * within
    by_row = jnp.moveaxis(beta.reshape(heads), 1, -1)[..., None]  # [B, Hk, R, T, 1]
    strict = jnp.tril(jnp.ones((time, time), bool), -1)[None, None, None]
    lower = jnp.where(strict, by_row * keys * within, 0.0)
    padding = [(0, 0)] * 3 + [(0, (1 << (time - 1).bit_length()) - time)] * 2
    inverse = unit_lower_inverse(jnp.pad(lower, padding))[..., :time, :time]
    missing = strength * (v32 - enter * both[:, :time])
    written = _product("bgrtj,bjgrv->btgrv", inverse, missing)
    o = enter * both[:, time:] + _product("bgrtj,bjgrv->btgrv", scores, written)
    o = (key_dim**-0.5 * o).reshape(v.shape).astype(v.dtype)
    pending = Pending(
        qkv=qkv,
        k=k,
        written=written.reshape(v.shape),
        log_decay=g,
        is_first=is_first,
    )
    return normed(layer, o, z), pending


def commit(
    pending: Pending, accepted: jax.Array, window: jax.Array, state: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """The accepted tokens in one product; as `reference.commit`."""
    batch, time, key_heads, _ = pending.k.shape
    g = pending.log_decay
    taken = (jnp.arange(time)[None] < accepted[:, None])[:, :, None]  # [B, T, 1]
    g = jnp.where(taken, g, 0.0)
    # Decay from after token j to after the last accepted one, the sum of what follows.
    following = jnp.pad(g[:, 1:], ((0, 0), (0, 1), (0, 0)))
    later = jnp.flip(jnp.cumsum(jnp.flip(following, 1), axis=1), 1)
    leave = jnp.where(taken, jnp.exp(later), 0.0)
    heads = (batch, time, key_heads, -1)
    left = (leave[..., None] * pending.written).reshape(*heads, state.shape[2])
    added = _product("btgrv,btgk->bgrvk", left, pending.k.astype(jnp.float32))
    decay = jnp.exp(jnp.sum(g, axis=1))[:, :, None, None]
    state = decay * state.astype(jnp.float32) + added.reshape(state.shape)
    inputs = jnp.concatenate([window, pending.qkv.astype(window.dtype)], axis=1)
    index = accepted[:, None] + jnp.arange(window.shape[1], dtype=jnp.int32)[None]
    return jnp.take_along_axis(inputs, index[:, :, None], axis=1), state
