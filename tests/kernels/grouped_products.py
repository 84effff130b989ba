"""The grouped products one by one: as a kernel, interpreted or lowered, and by hand."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels._common import hw
from pallas_kernels._common.interpret import interpreted


PRODUCTS = ("y", "dx", "dw")


def card(sms):
    """A small one, so that a block has several tiles."""
    return hw.Device(kind=hw.H200.kind, sms=sms, smem_bytes=hw.H200.smem_bytes)


@functools.cache
def drawn(spec):
    return jax.jit(spec.arguments)(jax.random.key(0))


def arguments(spec):
    return [np.array(a) for a in drawn(spec)]


def borders(sizes):
    return np.concatenate([[0], np.cumsum(sizes)])


def by_hand(x, w, sizes, dy):
    """y, dx, dw expert by expert in float64."""
    x, w, dy = (a.astype(np.float64) for a in (x, w, dy))
    y, dx, dw = np.zeros_like(dy), np.zeros_like(x), np.zeros_like(w)
    for expert, (start, end) in enumerate(itertools.pairwise(borders(sizes))):
        rows = slice(start, end)
        y[rows], dx[rows] = x[rows] @ w[expert], dy[rows] @ w[expert].T
        dw[expert] = x[rows].T @ dy[rows]
    return y, dx, dw


def single(what, tile, args, dtype):
    """One of the three products, cut as `tile` says."""
    from pallas_kernels.grouped_matmul import kernel_wgrad, mosaic

    x, w, sizes, dy = (jnp.asarray(a) for a in args)
    if what != "dw":
        operand, back = (dy, True) if what == "dx" else (x, False)
        return mosaic._product(
            operand, w, sizes, jnp.dtype(dtype), tile, transposed=back
        )
    plan = kernel_wgrad.WeightGradient(
        rows=x.shape[0],
        experts=w.shape[0],
        in_dim=w.shape[1],
        out_dim=w.shape[2],
        dtype=x.dtype,
        out_dtype=jnp.dtype(dtype),
        tile=tile,
    )
    return kernel_wgrad.weight_gradient(plan, x, dy, sizes)


def cut(what, tile, sms, args, dtype=jnp.bfloat16):
    """The product on an interpreted card of `sms` multiprocessors."""
    with hw.assume(card(sms)), interpreted():
        return np.asarray(single(what, tile, args, dtype))


def lowered(what, tile, rows=8192, experts=8, in_dim=2688, out_dim=1856):
    """The module of a product for the card."""
    like = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.bfloat16)
    sizes = jax.ShapeDtypeStruct((experts,), jnp.int32)
    args = (
        like((rows, in_dim)),
        like((experts, in_dim, out_dim)),
        sizes,
        like((rows, out_dim)),
    )
    with hw.assume():
        traced = jax.jit(lambda *a: single(what, tile, a, jnp.bfloat16)).trace(*args)
        return traced.lower(lowering_platforms=("cuda",)).as_text()
