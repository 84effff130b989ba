"""Products of bf16 and f32 matrices that lose nothing to bf16."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxaccel.nn.split_product import split, split_product


M, D, N = 24, 96, 40


@pytest.fixture(scope="module")
def case():
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal((M, D)), jnp.bfloat16)
    w = jnp.asarray(rng.standard_normal((D, N)), jnp.float32)
    dy = jnp.asarray(rng.standard_normal((M, N)), jnp.float32)
    exact = [np.asarray(a.astype(jnp.float32)).astype(np.float64) for a in (x, w, dy)]
    return (x, w, dy), exact


def error(got, want):
    got = np.asarray(got.astype(jnp.float32)).astype(np.float64)
    return np.linalg.norm(got - want) / np.linalg.norm(want)


def test_three_parts_are_the_whole():
    x = np.random.default_rng(0).standard_normal(1000).astype(np.float32)
    x *= np.float32(2.0) ** np.arange(-50, 50).repeat(10)
    parts = jax.jit(split)(x)
    assert {part.dtype for part in parts} == {jnp.dtype(jnp.bfloat16)}
    total = sum(
        np.asarray(part.astype(jnp.float32)).astype(np.float64) for part in parts
    )
    np.testing.assert_array_equal(total, x)


def test_the_product_and_its_gradients(case):
    (x, w, dy), (x64, w64, dy64) = case

    @jax.jit
    def run(x, w, dy):
        y, pull = jax.vjp(split_product, x, w)
        return y, *pull(dy)

    y, dx, dw = run(x, w, dy)
    assert (y.dtype, dx.dtype, dw.dtype) == (jnp.float32, jnp.bfloat16, jnp.float32)
    assert error(y, x64 @ w64) < 3e-7
    assert error(dw, x64.T @ dy64) < 3e-7
    # One rounding to bf16, and no second one in front of it.
    once = jnp.asarray(dy64 @ w64.T, jnp.bfloat16)
    assert error(dx, dy64 @ w64.T) < 1.02 * error(once, dy64 @ w64.T)


def test_products_have_bf16_operands_and_f32_sums(case):
    (x, w, dy), _ = case

    def run(x, w, dy):
        y, pull = jax.vjp(split_product, x, w)
        return y, pull(dy)

    text = jax.jit(run).lower(x, w, dy).as_text()
    products = [line for line in text.splitlines() if "stablehlo.dot_general" in line]
    assert len(products) == 3
    for line in products:
        operands, result = line.split(" : ")[1].split(" -> ")
        assert operands.count("xbf16>") == 2
        assert result.endswith("xf32>")
