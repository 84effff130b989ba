"""Stretches of a row as affine maps of the state: chained, they are the whole row."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels._common.testing import assert_close
from pallas_kernels.gated_delta_rule import segments, xla
from pallas_kernels.gated_delta_rule.config import Config


CONFIG = Config(chunk=16, group=2)
SCALE = 0.3
B, T, N, HK, HV, K, V = 1, 144, 3, 1, 2, 16, 24


def inputs(seed=0):
    """q, k, v, g, beta, initial state; one head never forgets, so that leaks show."""
    rng = np.random.default_rng(seed)
    q, k = rng.standard_normal((2, B, T, HK, K), np.float32)
    q, k = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
    v = rng.standard_normal((B, T, HV, V), np.float32)
    g = -0.1 * rng.random((B, T, HV), np.float32)
    g[..., 0] = 0.0
    beta = rng.random((B, T, HV), np.float32)
    state = rng.standard_normal((B, HV, V, K), np.float32)
    return q, k, v, g, beta, state


def first(*starts):
    is_first = np.zeros((B, T), bool)
    is_first[:, list(starts)] = True
    return is_first


def rows(x):
    """Each of N stretches as a row of its own: [B, T, ...] to [B N, T / N, ...]."""
    return x.reshape(B * N, T // N, *x.shape[2:])


def stretches(x):
    """[B N, ...] to [N, B, ...]."""
    return jnp.moveaxis(x.reshape(B, N, *x.shape[1:]), 1, 0)


def joined(x):
    """[N, B, ...] to [B N, ...]."""
    return jnp.moveaxis(x, 0, 1).reshape(B * N, *x.shape[2:])


rule = functools.partial(xla.gated_delta_rule, scale=SCALE, config=CONFIG)


@jax.jit
def whole(args, is_first, cotangents):
    def run(*args):
        *tokens, state = args
        return rule(*tokens, is_first=is_first, initial_state=state)

    out, pullback = jax.vjp(run, *args)
    return *out, *pullback(cotangents)


@jax.jit
def in_stretches(args, is_first, cotangents):
    """The same through summaries; gradients of the stretches by `jax.vjp`."""
    *tokens, state = args
    do, d_last = cotangents
    q, k, v, g, beta = (rows(x) for x in tokens)
    firsts = rows(is_first)
    maps = xla.summaries(k, v, g, beta, is_first=firsts, config=CONFIG)
    maps = segments.Summary(*(stretches(x) for x in maps))
    states = segments.chain(state, maps)

    def run(*args):
        *tokens, state = args
        return rule(*tokens, is_first=firsts, initial_state=state)

    (o, last), pullback = jax.vjp(run, q, k, v, g, beta, joined(states[:-1]))
    d_entries = xla.entry_gradients(
        q, k, g, beta, rows(do), is_first=firsts, scale=SCALE, config=CONFIG
    )
    d_states = segments.chain_gradients(d_last, maps.through, stretches(d_entries))
    *grads, d_state = pullback((rows(do), joined(d_states[1:])))
    grads = [x.reshape(B, T, *x.shape[2:]) for x in grads]
    last = stretches(last)
    d_entry = stretches(d_state)
    # Both ends of the chain are what the stretches themselves arrive at.
    ends = (last[-1], states[-1]), (d_entry[0], d_states[0])
    return (o.reshape(do.shape), last[-1], *grads, d_entry[0]), maps, ends


def cotangents():
    rng = np.random.default_rng(7)
    do = rng.standard_normal((B, T, HV, V), np.float32)
    return do, rng.standard_normal((B, HV, V, K), np.float32)


NAMES = ("o", "state", "dq", "dk", "dv", "dg", "dbeta", "dinitial")


@pytest.mark.parametrize("starts", [(), (20, 100), (48,), (0, 95, 96, 97)])
def test_stretches_in_a_chain_are_the_whole_row(starts):
    args, is_first = inputs(), first(*starts)
    want = whole(args, is_first, cotangents())
    got, maps, ends = in_stretches(args, is_first, cotangents())
    for name, a, b in zip(NAMES, got, want, strict=True):
        assert_close(a, b, rel=1e-5, name=name)
    for a, b in ends:
        assert_close(a, b, rel=1e-5)
    cut = rows(is_first).any(axis=1)
    through = np.asarray(joined(maps.through))
    assert not through[cut].any()
    assert through[~cut].any(axis=(1, 2, 3)).all()
