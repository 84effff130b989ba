"""One comparison for all kernels: norm, worst block, and quantiles of the error.

A single element-wise tolerance is either blind to a tile that was never written or
red for one unlucky rounding. These three together are neither.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np


# Relative Frobenius error of one rounding is about 2^-9 / sqrt(3) = 1.1e-3 in bf16.
RELATIVE = {"float32": 5e-6, "float16": 1e-3, "bfloat16": 4e-3}


def relative_error(actual: np.ndarray, expected: np.ndarray) -> float:
    """|actual - expected| / |expected| in the Frobenius norm, both float64."""
    norm = float(np.linalg.norm(expected))
    error = float(np.linalg.norm(actual - expected))
    return error if norm == 0.0 else error / norm


def assert_close(
    actual: jax.typing.ArrayLike,
    expected: jax.typing.ArrayLike,
    *,
    rel: float | None = None,
    block_rel: float | None = None,
    block_axes: Sequence[int] = (0,),
    quantiles: Mapping[float, float] | None = None,
    name: str = "result",
) -> None:
    """Asserts that a kernel's result is the reference's up to rounding.

    Args:
      actual: what the kernel gave.
      expected: what the reference gave, same shape, float32 or better; where it is
        NaN or infinite, so must `actual` be.
      rel: largest relative Frobenius error; by `actual`'s dtype if not given.
      block_rel: the same for the worst block; 4 x `rel` if not given. A block whose
        norm is under a tenth of the typical one is measured against that tenth.
      block_axes: a block is everything at one index of these axes (rows, heads).
      quantiles: quantile of the element-wise error -> its limit, in units of the
        root mean square of `expected`: `{0.99: 1e-2, 1.0: 5e-2}`.
      name: what to call the array in a message.

    Raises:
      AssertionError: naming the measure that failed, its value and its limit.
    """
    dtype = str(np.asarray(actual).dtype)
    got = np.asarray(actual).astype(np.float64)
    want = np.asarray(expected).astype(np.float64)
    if got.shape != want.shape:
        raise AssertionError(f"{name}: shape {got.shape}, expected {want.shape}")
    if (bad := ~np.isfinite(got) & np.isfinite(want)).any():
        first = tuple(int(i) for i in np.argwhere(bad)[0])
        raise AssertionError(
            f"{name}: {int(bad.sum())} of {bad.size} values are not finite, the "
            f"first at {first}"
        )
    odd = ~np.isfinite(want)
    if (bad := odd & ~((got == want) | (np.isnan(got) & np.isnan(want)))).any():
        first = tuple(int(i) for i in np.argwhere(bad)[0])
        raise AssertionError(
            f"{name}: {int(bad.sum())} of {bad.size} values are not the NaN or "
            f"infinity expected, the first at {first}"
        )
    # One NaN in a norm would make every comparison below true.
    got, want = np.where(odd, 0.0, got), np.where(odd, 0.0, want)
    rel = RELATIVE[dtype] if rel is None else rel
    if (error := relative_error(got, want)) > rel:
        raise AssertionError(f"{name}: relative error {error:.3g}, limit {rel:.3g}")
    if got.ndim:
        _assert_blocks(
            got, want, 4 * rel if block_rel is None else block_rel, block_axes, name
        )
    if quantiles:
        rms = float(np.sqrt(np.mean(want**2))) or 1.0
        errors = np.abs(got - want) / rms
        for quantile, limit in quantiles.items():
            if (value := float(np.quantile(errors, quantile))) > limit:
                raise AssertionError(
                    f"{name}: the {quantile} quantile of |error| / rms is "
                    f"{value:.3g}, limit {limit:.3g}"
                )


def _assert_blocks(got, want, limit, block_axes, name):
    axes = tuple(axis % got.ndim for axis in block_axes)
    inside = tuple(axis for axis in range(got.ndim) if axis not in axes)
    error = np.sqrt(np.sum((got - want) ** 2, axis=inside))
    norm = np.sqrt(np.sum(want**2, axis=inside))
    typical = float(np.sqrt(np.mean(norm**2)))
    if typical == 0.0:
        typical = 1.0
    ratio = error / np.maximum(norm, 0.1 * typical)
    if (worst := float(ratio.max())) > limit:
        where = tuple(int(i) for i in np.unravel_index(ratio.argmax(), ratio.shape))
        raise AssertionError(
            f"{name}: block {where} of axes {axes} has relative error {worst:.3g}, "
            f"limit {limit:.3g}"
        )


@functools.partial(jax.jit, static_argnums=2)
def _lengths(
    got: jax.Array, want: jax.Array, whole: bool
) -> tuple[jax.Array, jax.Array]:
    """Euclidean lengths of the expected rows and of their errors, f32[rows] each."""
    if whole:
        got, want = got[None], want[None]
    got, want = got.astype(jnp.float32), want.astype(jnp.float32)
    inside = tuple(range(1, got.ndim))
    error = jnp.sqrt(jnp.sum((got - want) ** 2, axis=inside))
    return jnp.sqrt(jnp.sum(want**2, axis=inside)), error


def assert_close_on_device(
    got: jax.Array, want: jax.Array, *, rel: float, name: str, whole: bool = False
) -> None:
    """`assert_close` of arrays for which the host would take minutes.

    Args:
      got: a result.
      want: what it should be, of the same shape.
      rel: largest relative Frobenius error.
      name: for the message.
      whole: whether the array counts as one row; else its leading axis has rows, whose
        worst block is held to `assert_close`'s limit, too.

    Raises:
      AssertionError: they are further apart.
    """
    # One number a row: `assert_close` finds the same norms and blocks in these.
    length, error = _lengths(got, want, whole)
    assert_close(length + error, length, rel=rel, name=name)
