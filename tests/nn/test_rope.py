"""Rotary embedding: against the formula, and what makes it relative."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxaccel.nn.rope import (
    LinearScaling,
    RopeConfig,
    YarnScaling,
    apply_rope,
    frequencies,
)


rotate = jax.jit(apply_rope, static_argnums=2)


def _yarn(**changes):
    settings = {"factor": 32.0, "original_max_position": 4096, "truncate": False}
    return YarnScaling(**(settings | changes))


def test_partial_rotation_matches_the_formula():
    config = RopeConfig(theta=100.0, fraction=0.5)
    x = jax.random.normal(jax.random.key(0), (2, 5, 3, 8))
    positions = jnp.array([[0, 1, 2, 3, 4], [9, 3, 3, 0, 700]], jnp.int32)
    got = np.asarray(rotate(x, positions, config))
    x = np.asarray(x, np.float64)
    angle = np.asarray(positions)[..., None] * 100.0 ** (-np.arange(0, 4, 2) / 4)
    cos, sin = np.cos(angle)[:, :, None], np.sin(angle)[:, :, None]
    first, second = x[..., :2], x[..., 2:4]
    want = np.concatenate(
        [first * cos - second * sin, second * cos + first * sin, x[..., 4:]], -1
    )
    np.testing.assert_allclose(got, want, atol=1e-4)


def test_scores_depend_on_the_distance_alone():
    config = RopeConfig(theta=1e4)
    q, k = jax.random.normal(jax.random.key(1), (2, 1, 6, 1, 16))
    positions = jnp.array([[0, 2, 3, 5, 8, 13]], jnp.int32)

    def scores(shift):
        rotated = [rotate(a, positions + shift, config) for a in (q, k)]
        return jnp.einsum("bthk,bshk->bts", *rotated)

    np.testing.assert_allclose(scores(0), scores(1000), atol=1e-3)


def test_yarn_matches_the_gpt_oss_formula():
    got, factor = frequencies(RopeConfig(theta=150_000.0, scaling=_yarn()), 64)
    # Bounds of the ramp worked out in closed form, without rounding.
    low, high = (
        64 * np.log(4096 / (beta * 2 * np.pi)) / (2 * np.log(150_000.0))
        for beta in (32.0, 1.0)
    )
    plain = 150_000.0 ** (-np.arange(0, 64, 2) / 64)
    ramp = np.clip((np.arange(32) - low) / (high - low), 0, 1)
    np.testing.assert_allclose(got, plain / 32 * ramp + plain * (1 - ramp), rtol=1e-12)
    assert factor == pytest.approx(1.3465735902799727)


def test_yarn_rounds_the_ramp_only_when_told():
    rounded, _ = frequencies(RopeConfig(scaling=_yarn(truncate=True)), 64)
    exact, _ = frequencies(RopeConfig(scaling=_yarn()), 64)
    assert np.abs(rounded / exact - 1).max() > 1e-3
    np.testing.assert_allclose(rounded[[0, -1]], exact[[0, -1]])


def test_yarn_factor_multiplies_the_rotated_part():
    config = RopeConfig(fraction=0.5, scaling=_yarn())
    x = jnp.ones((1, 1, 1, 64))
    got = rotate(x, jnp.zeros((1, 1), jnp.int32), config)[0, 0, 0]
    np.testing.assert_allclose(got[:32], 1.3465736, rtol=1e-6)
    np.testing.assert_array_equal(got[32:], 1.0)


def test_linear_scaling_stretches_positions():
    x = jax.random.normal(jax.random.key(2), (1, 4, 1, 8))
    positions = jnp.arange(4, dtype=jnp.int32)[None]
    got = rotate(x, 8 * positions, RopeConfig(scaling=LinearScaling(factor=8.0)))
    np.testing.assert_allclose(got, rotate(x, positions, RopeConfig()), atol=1e-5)


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: RopeConfig(theta=0.0), r"theta=0\.0"),
        (lambda: RopeConfig(fraction=1.5), r"fraction=1\.5"),
        (lambda: RopeConfig(fraction=0.3).rotary_dim(10), "rotates 3 dim"),
        (lambda: _yarn(factor=0.5), r"factor=0\.5"),
        (lambda: _yarn(beta_slow=40.0), r"beta_fast=32\.0"),
        (lambda: _yarn(original_max_position=0), "original_max_position=0"),
        (lambda: LinearScaling(factor=0.0), r"factor=0\.0"),
    ],
)
def test_bad_configs_raise(make, message):
    with pytest.raises(ValueError, match=message):
        make()
