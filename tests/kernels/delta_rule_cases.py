"""Arguments, gradients and limits that the delta rule's kernel tests share."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from running import jit

from pallas_kernels import gated_delta_rule
from pallas_kernels._common.testing import assert_close
from pallas_kernels.gated_delta_rule import config_mosaic
from pallas_kernels.gated_delta_rule.config_mosaic import CHUNK, HEAD_DIM


SCALE = HEAD_DIM**-0.5
NAMES = ("o", "state", "dq", "dk", "dv", "dg", "dbeta", "dinitial")
# Relative errors against the recurrence in f32, as for the public kernels.
LIMITS = dict(zip(NAMES, (5e-3, 5e-3, 8e-3, 8e-3, 8e-3, 2e-2, 2e-2, 8e-3), strict=True))


def unit(x):
    return x / jnp.linalg.norm(x, axis=-1, keepdims=True)


def arguments(batch=1, time=CHUNK, group=1, dtype=jnp.bfloat16, decay=0.05, seed=0):
    """q, k, v, g, beta, initial state of one key head."""
    rng = np.random.default_rng(seed)

    def normal(*shape):
        return rng.standard_normal(shape, np.float32)

    q, k = normal(2, batch, time, 1, HEAD_DIM)
    q, k = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
    v = normal(batch, time, group, HEAD_DIM)
    g = -np.float32(decay) * np.logaddexp(0, normal(batch, time, group) + 1)
    beta = 1 / (1 + np.exp(-normal(batch, time, group)))
    state = np.float32(0.3) * normal(batch, group, HEAD_DIM, HEAD_DIM)
    q, k, v = (x.astype(dtype) for x in (q, k, v))
    return tuple(jnp.asarray(x) for x in (q, k, v, g, beta, state))


def first(batch, time, *starts):
    is_first = np.zeros((batch, time), bool)
    for row, token in starts:
        is_first[row, token] = True
    return jnp.asarray(is_first)


def exact(args):
    return tuple(x.astype(jnp.float32) for x in args)


def rule(args, is_first, implementation, config=None):
    *inputs, state = args
    return gated_delta_rule(
        *inputs,
        is_first=is_first,
        initial_state=state,
        config=config,
        implementation=implementation,
    )


# One program for each implementation and each set of shapes. A forward is compiled
# longer than it runs, so not by `running.jit`.
compiled_rule = jax.jit(rule, static_argnums=(2, 3))


def cotangents(args):
    rng = np.random.default_rng(99)
    do, d_state = (rng.standard_normal(args[i].shape, np.float32) for i in (2, 5))
    return jnp.asarray(do.astype(args[2].dtype)), jnp.asarray(d_state)


@functools.partial(jit, static_argnums=(3, 4))
def gradients(args, is_first, cotangents, implementation, config=None):
    """o, final state and the six gradients."""
    out, pullback = jax.vjp(
        lambda *args: rule(args, is_first, implementation, config), *args
    )
    do, d_state = cotangents
    return *out, *pullback((do.astype(out[0].dtype), d_state))


def with_gradients(args, is_first, implementation):
    return gradients(args, is_first, cotangents(args), implementation)


def assert_all_close(got, want, names=NAMES):
    for name, a, b in zip(names, got, want, strict=True):
        assert_close(a, b, rel=LIMITS[name], name=name)


def shapes_of(args):
    return config_mosaic.shapes_of(args[0], args[2])


def flat(x):
    return x.reshape(-1, *x.shape[2:])
