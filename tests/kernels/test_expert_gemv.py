"""Products of few tokens with their experts' matrices, against the sums written out."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels._common import hw
from pallas_kernels._common.interpret import interpreted
from pallas_kernels._common.testing import assert_close
from pallas_kernels.gemv import expert_gemv, gemv
from pallas_kernels.gemv.config import Config


def numbers(*shape, seed=0, scale=1.0, dtype="bfloat16"):
    draw = np.random.default_rng(seed).standard_normal(shape) * scale
    return jnp.asarray(draw, jnp.dtype(dtype))


def few_blocks():
    return hw.assume(dataclasses.replace(hw.H200, sms=1))


def by_hand(x, w, ids, weights, activation):
    x, w = (np.asarray(v, np.float64) for v in (x, w))
    results, visits = ids.shape
    repeats = ids.size // len(x)
    found = []
    for s in range(results):
        total = np.zeros(w.shape[2])
        for j in range(visits):
            row = x[(s * visits + j) // repeats]
            if 0 <= ids[s, j] < len(w):
                total = total + weights[s, j] * (row @ w[ids[s, j]])
        if activation == "relu2":
            total = np.maximum(total, 0) ** 2
        if activation == "swiglu":
            gate, up = np.split(total, 2)
            total = gate / (1 + np.exp(-gate)) * up
        found.append(total)
    return np.stack(found)


CASES = {
    # Two tokens with three experts each; one of them is none.
    "first map": (2, (6, 1), None, "relu2"),
    "gated": (1, (3, 1), None, "swiglu"),
    "sum of experts": (6, (2, 3), "weights", None),
}


@pytest.mark.parametrize("implementation", ["reference", "xla", "mosaic"])
@pytest.mark.parametrize("name", CASES)
def test_every_form_is_the_sum(name, implementation):
    rows, shape, weighs, activation = CASES[name]
    x, w = numbers(rows, 200), numbers(5, 200, 48, seed=1, scale=200**-0.5)
    ids = np.random.default_rng(2).integers(0, 5, shape).astype(np.int32)
    ids[-1, -1] = 5
    weights = numbers(*shape, seed=3, dtype="float32") if weighs else None
    ones = np.ones(shape) if weights is None else np.asarray(weights, np.float64)
    want = by_hand(x, w, ids, ones, activation)
    run = functools.partial(
        expert_gemv, activation=activation, implementation=implementation
    )
    with few_blocks(), interpreted():
        got = jax.jit(run)(x, w, jnp.asarray(ids), weights=weights)
    assert got.dtype == x.dtype
    assert_close(got, jnp.asarray(want, jnp.float32), rel=4e-3)


def test_the_division_does_not_matter():
    ids = jnp.array([[3, 0], [1, 1]], jnp.int32)
    run = functools.partial(expert_gemv, implementation="mosaic")
    for depth, config in (
        (300, Config(columns=8, burst=1)),
        (300, Config(columns=64, burst=3)),
        (300, Config(columns=16, burst=2, warpgroups=4)),
        (256, Config(columns=64, burst=3, warpgroups=2)),
    ):
        x = jnp.repeat(numbers(2, depth, seed=4), 2, axis=0)
        w = numbers(4, depth, 64, seed=5, scale=0.06)
        want = by_hand(x, w, np.asarray(ids), np.ones((2, 2)), None)
        with few_blocks(), interpreted():
            got = jax.jit(functools.partial(run, config=config))(x, w, ids)
        assert_close(got, jnp.asarray(want, jnp.float32), rel=4e-3)


@pytest.mark.parametrize("implementation", ["reference", "xla", "mosaic"])
def test_a_visit_to_no_expert_reads_nothing(implementation):
    """Of what is not a number nothing is left, in the row and in any expert."""
    x = numbers(2, 64, seed=4).at[1].set(jnp.nan)
    w = numbers(3, 64, 16, seed=5).at[jnp.array([0, 2])].set(jnp.inf)
    ids = jnp.array([[1, -1], [3, 7]], jnp.int32)
    with few_blocks(), interpreted():
        y = expert_gemv(x, w, ids, implementation=implementation)
    assert_close(y[:1], x[:1].astype(jnp.float32) @ w[1].astype(jnp.float32), rel=4e-3)
    assert not y[1].any()


def test_a_gradient_through_the_kernel_is_refused():
    x, w = numbers(1, 64), numbers(2, 64, 16)

    def total(x):
        ids = jnp.zeros((1, 1), jnp.int32)
        return expert_gemv(x, w, ids, implementation="mosaic").sum()

    with interpreted(), pytest.raises(NotImplementedError, match="expert_gemv"):
        jax.grad(total)(x)


def test_one_expert_is_gemv():
    x, w = numbers(1, 128, seed=6), numbers(3, 128, 32, seed=7)
    got = expert_gemv(x, w, jnp.array([[2]], jnp.int32), implementation="reference")
    assert_close(got, gemv(x, w[2], implementation="reference"), rel=1e-3)


@pytest.mark.parametrize(
    "rows, shape, activation, dtype",
    [
        (1, (6, 1), "relu2", "bfloat16"),
        (1, (6, 1), "swiglu", "float16"),
        (24, (4, 6), None, "bfloat16"),
    ],
)
def test_lowers_for_the_card_and_is_named_only(rows, shape, activation, dtype):
    like = jax.ShapeDtypeStruct
    args = (
        like((rows, 2688), jnp.dtype(dtype)),
        like((128, 2688, 1856), jnp.dtype(dtype)),
        like(shape, jnp.int32),
    )
    weights = like(shape, jnp.float32)

    def text(implementation):
        run = functools.partial(
            expert_gemv, activation=activation, implementation=implementation
        )
        with hw.assume():
            traced = jax.jit(run).trace(*args, weights=weights)
            return traced.lower(lowering_platforms=("cuda",)).as_text()

    assert "pk_expert_gemv" in text("mosaic")
    assert "pk_expert_gemv" not in text(None)


def test_limits_are_named():
    x, w = jnp.ones((2, 16), jnp.bfloat16), jnp.ones((3, 16, 8), jnp.bfloat16)
    ids = jnp.zeros((2, 1), jnp.int32)
    for args, options, text in (
        ((x, w[:, :8], ids), {}, r"x is bfloat16\[2, 16\] and w bfloat16\[3, 8, 8\]"),
        ((x, w, ids[:1]), {}, r"ids is int32\[1, 1\], expected .* the 2 rows"),
        ((x, w, ids), {"weights": jnp.ones((2,))}, r"weights is float32\[2\]"),
        ((x, w, ids), {"activation": "gelu"}, "activation='gelu', allowed are"),
        ((x, w[..., :7], ids), {"activation": "swiglu"}, "N = 7"),
        ((x.astype("int32"), w.astype("int32"), ids), {}, "expected .* floating"),
        ((x, w[:0], ids), {}, r"w \[0, 16, 8\]"),
        ((x, w, ids[:0]), {}, r"ids is int32\[0, 1\]"),
        ((x, w, ids), {"config": Config(paired=True)}, "paired=True"),
        (
            (x, w, ids),
            {"config": Config(), "implementation": "xla"},
            'only "mosaic" has one',
        ),
    ):
        with pytest.raises(ValueError, match=text):
            expert_gemv(*args, **options)
    with pytest.raises(NotImplementedError, match="Hopper"):
        expert_gemv(x, w, ids, implementation="mosaic")
    with interpreted(), pytest.raises(NotImplementedError, match="N = 4"):
        expert_gemv(x, w[..., :4], ids, implementation="mosaic")


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 4])
def test_experts_of_nano_on_the_card(tokens):
    @functools.partial(jax.jit, static_argnums=(0, 1))
    def drawn(seed, shape):
        # On the device: 1.3 billion numbers are half a minute of the host's.
        draw = jax.random.normal(jax.random.key(seed), shape, jnp.bfloat16)
        return draw * shape[1] ** -0.5

    w_in, w_out = drawn(8, (128, 2688, 1856)), drawn(9, (128, 1856, 2688))
    ids = jnp.asarray(
        np.random.default_rng(10).integers(0, 128, (tokens, 6)), jnp.int32
    )
    x, p = numbers(tokens, 2688, seed=11), numbers(tokens, 6, seed=12, dtype="float32")

    @functools.partial(jax.jit, static_argnums=0)
    def layer(implementation, w_in, w_out):
        run = functools.partial(expert_gemv, implementation=implementation)
        h = run(x, w_in, ids.reshape(-1, 1), activation="relu2")
        return h, run(h, w_out, ids, weights=p)

    got, again, want = (
        layer(name, w_in, w_out) for name in ("mosaic", "mosaic", "reference")
    )
    for a, b, c in zip(got, want, again, strict=True):
        assert_close(a, b, rel=6e-3)
        assert jnp.array_equal(a, c)
