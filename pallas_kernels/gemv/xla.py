"""Matrix-vector products by XLA, as products of eight rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.rms_norm import api as norms


ROWS = 8


def gemv(
    x: jax.Array,
    weights: Sequence[jax.Array],
    *,
    norm_scale: jax.Array | None,
    zero_centered: bool,
    eps: float,
    swiglu: bool,
    residual: jax.Array | None,
    out_dtypes: Sequence[Any],
) -> tuple[jax.Array, ...]:
    """See `api.gemv`; results as in `reference.gemv`."""
    if norm_scale is not None:
        x = norms.rms_norm(
            x,
            norm_scale,
            eps=eps,
            zero_centered=zero_centered,
            implementation="xla",
        )
    # Of one row XLA makes a sum over an array of all products, which it writes to
    # memory first: three times the traffic of the weights.
    rows = x.shape[0]
    x = jnp.pad(x, ((0, max(0, ROWS - rows)), (0, 0)))
    products = [
        jnp.einsum("md,df->mf", x, w, preferred_element_type=jnp.float32)[:rows]
        for w in weights
    ]
    if swiglu:
        gate, up = products
        products = [jax.nn.silu(gate) * up]
    if residual is not None:
        products = [residual.astype(jnp.float32) + products[0]]
    return tuple(y.astype(d) for y, d in zip(products, out_dtypes, strict=True))
