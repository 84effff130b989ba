"""The assert helper fails where it must."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels._common.testing import assert_close


EXPECTED = np.asarray(jax.random.normal(jax.random.key(0), (64, 128)))


def test_rounding_passes():
    assert_close(EXPECTED, EXPECTED)
    for dtype in (jnp.bfloat16, jnp.float16):
        rounded = jnp.asarray(EXPECTED).astype(dtype)
        assert_close(rounded, EXPECTED, quantiles={0.99: 1e-2, 1.0: 2e-2})


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_an_error_of_nine_tenths_of_a_percent_fails(dtype):
    wrong = jnp.asarray(EXPECTED * 1.009).astype(dtype)
    with pytest.raises(AssertionError, match="relative error"):
        assert_close(wrong, EXPECTED)


def test_one_nan_fails_and_an_expected_one_does_not():
    wrong = EXPECTED.copy()
    wrong[3, 5] = np.nan
    with pytest.raises(AssertionError, match=r"not finite.*\(3, 5\)"):
        assert_close(wrong, EXPECTED)


def test_one_unwritten_block_of_many_fails():
    expected = np.tile(EXPECTED, (512, 1))
    wrong = expected.copy()
    wrong[777] = 0.0
    with pytest.raises(AssertionError, match=r"block \(777,\)"):
        assert_close(wrong, expected, rel=0.02)
    by_column = expected.T.copy()
    by_column[:, 777] = 0.0
    with pytest.raises(AssertionError, match=r"block \(777,\)"):
        assert_close(by_column, expected.T, rel=0.02, block_axes=(1,))


def test_one_wild_element_fails_its_quantile():
    wrong = EXPECTED.copy()
    wrong[0, 0] += 0.5
    with pytest.raises(AssertionError, match=r"1\.0 quantile"):
        assert_close(wrong, EXPECTED, rel=0.1, quantiles={0.99: 1e-3, 1.0: 0.1})


def test_zeros_are_compared_in_absolute_terms():
    zeros = np.zeros((4, 4), np.float32)
    assert_close(zeros, zeros)
    with pytest.raises(AssertionError):
        assert_close(zeros + 1e-3, zeros)


def test_shapes_must_agree():
    with pytest.raises(AssertionError, match="shape"):
        assert_close(EXPECTED[:3], EXPECTED)


def test_a_nan_that_is_expected_hides_nothing_else():
    expected = np.ones((4, 8), np.float32)
    expected[1, 2] = np.nan
    assert_close(expected.copy(), expected)
    with pytest.raises(AssertionError, match="relative error"):
        assert_close(np.where(np.isnan(expected), expected, 777.0), expected)
    with pytest.raises(AssertionError, match="NaN or infinity expected"):
        assert_close(np.full_like(expected, 777.0), expected)
