"""Hyper-connections against numpy, at their start, and through Sinkhorn's limits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxaccel.nn.hyper_connection import (
    HyperConnection,
    expand_streams,
    merge_streams,
    sinkhorn,
)


B, T, N, D = 2, 3, 4, 5


@pytest.fixture(scope="module")
def made(build):
    return build(lambda rngs: HyperConnection(D, N, rngs=rngs))


@pytest.fixture(scope="module")
def x():
    return jnp.asarray(np.random.default_rng(0).normal(size=(B, T, N, D)), jnp.float32)


def by_numpy(module, x, layer):
    kernel, bias, gain, scale = (
        np.asarray(p[...], np.float64)
        for p in (module.kernel, module.bias, module.gain, module.scale)
    )
    x = np.asarray(x, np.float64)
    y = np.empty_like(x)
    for b, t in np.ndindex(B, T):
        flat = x[b, t].reshape(-1)
        u = flat / np.sqrt(np.mean(flat**2) + 1e-6) * scale
        parts = np.split(u @ kernel, [N, 2 * N])
        offsets = np.split(bias, [N, 2 * N])
        read, write, mix = (
            a * p + o for a, p, o in zip(gain, parts, offsets, strict=True)
        )
        read, write = 1 / (1 + np.exp(-read)) + 1e-6, 2 / (1 + np.exp(-write))
        mix = np.exp(mix.reshape(N, N))
        mix /= mix.sum(axis=1, keepdims=True)
        for _ in range(20):
            mix /= mix.sum(axis=1, keepdims=True) + 1e-6
            mix /= mix.sum(axis=0, keepdims=True) + 1e-6
        out = layer(read @ x[b, t])
        y[b, t] = mix.T @ x[b, t] + write[:, None] * out
    return y


def test_equals_numpy_with_finite_gradients(made, x):
    graphdef, state = nnx.split(made)

    def run(state, x):
        return nnx.merge(graphdef, state)(x, jnp.tanh)

    @jax.jit
    def both(state, x):
        y, pull = jax.vjp(run, state, x)
        return y, pull(jnp.ones_like(y))

    y, grads = both(state, x)
    np.testing.assert_allclose(y, by_numpy(made, x, np.tanh), rtol=1e-5, atol=1e-5)
    for leaf in jax.tree.leaves(grads):
        assert np.isfinite(leaf).all()
        assert np.abs(leaf).max() > 0


def test_mix_is_doubly_stochastic(made, x):
    read, write, mix = made.weights(x)
    assert mix.shape == (B, T, N, N)
    np.testing.assert_allclose(mix.sum(axis=-2), 1.0, atol=1e-5)
    np.testing.assert_allclose(mix.sum(axis=-1), 1.0, atol=1e-3)
    for weights, most in ((read, 1.0), (write, 2.0)):
        assert np.all(np.asarray(weights) > 0)
        assert np.all(np.asarray(weights) < most + 1e-5)
    # The mean over streams is kept: mixing alone neither grows nor shrinks it.
    silent = made(x, jnp.zeros_like)
    np.testing.assert_allclose(merge_streams(silent), merge_streams(x), atol=1e-3)


def test_sinkhorn_of_extremes():
    identity = jnp.eye(3)
    np.testing.assert_allclose(sinkhorn(identity), identity, atol=1e-5)
    np.testing.assert_allclose(sinkhorn(jnp.full((3, 3), 7.0)), 1 / 3, atol=1e-5)
    # One entry a million times the others, in bf16; the result is f32.
    peaked = jnp.ones((3, 3), jnp.bfloat16).at[0, 1].set(1e6)
    out = sinkhorn(peaked)
    assert out.dtype == jnp.float32
    np.testing.assert_allclose(out.sum(axis=0), 1.0, atol=1e-4)
    assert float(out[0, 1]) > 0.9


def test_equal_streams_begin_as_an_ordinary_residual(x):
    module = HyperConnection(D, N, rngs=nnx.Rngs(0))
    module.gain[...] = jnp.zeros(3)
    plain = x[:, :, 0]
    y = module(expand_streams(plain, N), jnp.tanh)
    want = plain + jnp.tanh(plain)
    np.testing.assert_allclose(merge_streams(y), want, atol=1e-4)
    np.testing.assert_allclose(y, expand_streams(want, N), atol=1e-4)
    half = module(expand_streams(plain, N).astype(jnp.bfloat16), jnp.tanh)
    assert half.dtype == jnp.bfloat16


def test_what_is_not_allowed_is_named(made, x):
    with pytest.raises(ValueError, match="streams=0"):
        HyperConnection(D, 0, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match=r"expected \[B, T, 4, D\]"):
        made(x[:, :, :3], jnp.tanh)
