"""Eight-bit rows: the best scale, the nearest element, the same bits when packed."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxaccel.quant.mxfp8 import pack, packed_width, quantize, unpack
from pallas_kernels.host_gather import config


def dequantized(values, scales):
    powers = np.ldexp(1.0, scales.astype(np.int32) - 127)
    wide = np.asarray(values, np.float64)
    return wide * np.repeat(powers, 32, axis=-1)


@pytest.fixture(scope="module")
def rows():
    rng = np.random.default_rng(0)
    x = rng.standard_normal((40, 128)) * np.exp2(rng.integers(-20, 20, (40, 1)))
    x[0], x[1, :32] = 0.0, 448.0 * 2.0**5
    x[2, 32:64] = 448.0 * 2.0**5 * (1 + 2.0**-20)
    x[3], x[4] = 2.0**-126, 3e38
    return x.astype(np.float32)


def test_a_block_has_the_smallest_scale_that_holds_it(rows):
    values, scales = jax.tree.map(np.asarray, jax.jit(quantize)(rows))
    most = np.abs(rows.reshape(40, 4, 32)).max(axis=-1).astype(np.float64)
    power = np.ldexp(1.0, scales.astype(np.int32) - 127)
    is_set = (most > 0) & (scales > 0)
    assert (most <= 448 * power).all()
    assert (most > 448 * power / 2)[is_set].all()
    assert scales[1, 0] == 127 + 5
    assert scales[2, 1] == 127 + 6
    assert (scales[0] == 0).all()
    assert np.isfinite(np.asarray(values, np.float32)).all()


def test_elements_are_the_nearest(rows):
    values, scales = jax.tree.map(np.asarray, jax.jit(quantize)(rows))
    power = np.repeat(np.ldexp(1.0, scales.astype(np.int32) - 127), 32, axis=-1)
    # ml_dtypes rounds to the nearest.
    want = (rows / power).astype(np.float32).astype(ml_dtypes.float8_e4m3fn)
    far = rows[3:].astype(np.float64)
    got = dequantized(values, scales)
    np.testing.assert_array_equal(
        np.asarray(values[5:]).view(np.uint8), want[5:].view(np.uint8)
    )
    error = np.abs(got[4:] - rows[4:])
    assert (error <= np.maximum(np.abs(far[1:]) / 16, 2.0**-10 * power[4:])).all()


def test_what_is_packed_comes_back_bit_for_bit():
    rng = np.random.default_rng(1)
    values = rng.integers(0, 256, (5, 256)).astype(np.uint8)
    values = values.view(ml_dtypes.float8_e4m3fn)
    scales = rng.integers(0, 256, (5, 8)).astype(np.uint8)
    packed = pack(values, scales)
    assert packed.shape == (5, packed_width(256)) == (5, 80)
    got_values, got_scales = jax.jit(unpack)(jnp.asarray(packed))
    np.testing.assert_array_equal(
        np.asarray(got_values).view(np.uint8), values.view(np.uint8)
    )
    np.testing.assert_array_equal(got_scales, scales)


@pytest.mark.parametrize("dim", [128, 256, 512])
def test_a_device_can_read_packed_rows_from_the_host(dim):
    words = packed_width(dim)
    assert config.refusal(100, words, jnp.dtype(jnp.uint32), 64) is None


def test_rows_that_do_not_fit_are_named():
    with pytest.raises(ValueError, match="rows of 40"):
        quantize(jnp.zeros((2, 40)))
    with pytest.raises(ValueError, match="rows of 96 cannot be packed"):
        packed_width(96)
    with pytest.raises(ValueError, match=r"scales \[2, 3\]"):
        pack(np.zeros((2, 128), ml_dtypes.float8_e4m3fn), np.zeros((2, 3), np.uint8))
