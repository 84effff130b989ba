"""Every code under every scale against independent formulas, and a stored vector."""

import pathlib

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file

from jaxaccel.quant import mxfp4
from jaxaccel.quant.mxfp4 import dequantize


GOLDEN = pathlib.Path(__file__).parent.parent / "goldens" / "gpt_oss"
# Written down from the specification's table, positive codes in order.
MAGNITUDES = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
DTYPES = [np.float32, ml_dtypes.bfloat16]


def every_block():
    """One block of all 16 codes, twice, under each of the 256 scales."""
    codes = np.tile(np.arange(16, dtype=np.uint8), 2)
    packed = codes[0::2] | codes[1::2] << 4
    blocks = np.broadcast_to(packed, (256, 1, 16)).copy()
    return codes, blocks, np.arange(256, dtype=np.uint8)[:, None]


def same_bits(got, want):
    """Equal to the last bit: -0 is not 0; any NaN is as good as another."""
    assert got.dtype == want.dtype
    np.testing.assert_array_equal(np.isnan(got), np.isnan(want))
    finite = ~np.isnan(want)
    assert got[finite].tobytes() == want[finite].tobytes()


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_code_times_every_scale(dtype):
    codes, blocks, scales = every_block()
    got = dequantize(blocks, scales, dtype)
    assert got.shape == (256, 32)
    values = np.array(MAGNITUDES + [-m for m in MAGNITUDES])[codes]  # -0.0 at code 8
    want = values * 2.0 ** (np.arange(256.0)[:, None] - 127)
    want[255] = np.nan
    with np.errstate(over="ignore"):
        cast = want.astype(dtype)
    # Nothing is rounded: what is finite is the exact product.
    finite = np.isfinite(cast)
    np.testing.assert_array_equal(cast[finite].astype(np.float64), want[finite])
    assert np.isfinite(cast[:254, :4]).all()
    assert want[254, 4] == 2.0**128
    assert np.isinf(cast[254, 4])
    same_bits(got, cast)


def test_agrees_with_the_dtypes_of_ml_dtypes():
    codes, blocks, scales = every_block()
    elements = codes.view(ml_dtypes.float4_e2m1fn).astype(np.float32)
    powers = scales.view(ml_dtypes.float8_e8m0fnu).astype(np.float32)
    with np.errstate(over="ignore"):
        same_bits(dequantize(blocks, scales, np.float32), elements * powers)


def test_low_bits_come_first_and_blocks_stand_side_by_side():
    blocks = np.zeros((1, 2, 16), np.uint8)
    blocks[0, 0, 1] = 0x72  # elements 2 and 3: codes 2 (1.0) and 7 (6.0)
    blocks[0, 1, 15] = 0xA0  # elements 62 and 63: codes 0 and 10 (-1.0)
    got = dequantize(blocks, np.array([[127, 130]], np.uint8))
    want = np.zeros((1, 64))
    want[0, [2, 3, 63]] = [1.0, 6.0, -8.0]
    np.testing.assert_array_equal(got.astype(np.float64), want)


def test_pieces_join_without_a_seam(monkeypatch):
    _, blocks, scales = every_block()
    whole = dequantize(blocks, scales)
    monkeypatch.setattr(mxfp4, "_PIECE", 7)
    same_bits(dequantize(blocks, scales), whole)


def test_stored_vector_of_transformers():
    stored = load_file(GOLDEN / "mxfp4_dequant.safetensors")
    got = dequantize(stored["blocks"], stored["scales"], np.float32)  # [E, out, in]
    want = stored["weight_f32"].swapaxes(-1, -2)
    same_bits(got, np.ascontiguousarray(want))


@pytest.mark.parametrize(
    "blocks, scales, dtype, message",
    [
        (np.zeros((2, 16), np.uint8), np.zeros(3, np.uint8), "f4", r"\(2, 16\)"),
        (np.zeros((2, 8), np.uint8), np.zeros(2, np.uint8), "f4", r"\(2, 8\)"),
        (np.zeros((2, 16), np.int8), np.zeros(2, np.uint8), "f4", "int8"),
        (np.zeros((2, 16), np.uint8), np.zeros(2, np.uint8), "f2", "float16"),
    ],
)
def test_wrong_arrays_are_named(blocks, scales, dtype, message):
    with pytest.raises(ValueError, match=message):
        dequantize(blocks, scales, dtype)
