"""Mosaic GPU kernel of `engram_hash`: one thread a token, all layers' row numbers.

XLA finds what each token looks back at, a few shifts and selects. A thread then holds a
token's window, builds the mix of each layer order by order in two 32-bit halves, as
`xla.py` does, and takes its remainders: the primes are constants of the kernel, so that
each division becomes a multiplication. Columns leave one by one, so that neighbouring
threads write neighbouring numbers; XLA turns columns and tokens around.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.engram_hash.layout import HashLayout
from pallas_kernels.engram_hash.xla import multiply_high, remainder


TOKENS = 128  # of a block, one for each thread


def _engram_hash_kernel(window_ref, ids_ref, *, layout: HashLayout):
    tokens = pl.ds(lax.axis_index("block") * TOKENS, TOKENS)
    strided = plgpu.Layout.WG_STRIDED((TOKENS,), 1)

    def constant(value: int) -> jax.Array:
        return plgpu.layout_cast(jnp.full(TOKENS, value, jnp.uint32), strided)

    x = [
        plgpu.load(window_ref.at[i, tokens], layout=strided)
        for i in range(layout.max_order)
    ]
    column = 0
    for layer in range(layout.num_layers):
        high, low = constant(0), constant(0)
        offsets = layout.offsets[layer]
        for i, m in enumerate(layout.multipliers[layer]):
            m_high, m_low = constant(m >> 32), constant(m & 0xFFFFFFFF)
            # No carry is lost: the whole product is below 2^63.
            low = low ^ (x[i] * m_low)
            high = high ^ (multiply_high(x[i], m_low) + x[i] * m_high)
            if i + 1 not in layout.orders:
                continue
            first = layout.orders.index(i + 1) * layout.heads
            for c in range(first, first + layout.heads):
                prime = np.uint32(layout.primes[layer][c])
                rest = remainder(high, low, prime).astype(jnp.int32)
                ids_ref.at[column, tokens][...] = rest + jnp.int32(int(offsets[c]))
                column += 1


def engram_hash(windows: list[jax.Array], layout: HashLayout) -> jax.Array:
    """Launches the hash.

    Args:
      windows: N arrays u32[B, T], the i-th holds the compressed id i tokens before.
      layout: multipliers and primes of L layers.

    Returns:
      i32[B, T, L, C].
    """
    batch, time = windows[0].shape
    count = batch * time
    # What a last block lacks is hashed too, and thrown away.
    padded = -(-count // TOKENS) * TOKENS
    x = jnp.stack([w.reshape(-1) for w in windows])
    x = jnp.pad(x, ((0, 0), (0, padded - count)))
    columns = layout.num_layers * layout.num_columns
    body: Any = functools.partial(_engram_hash_kernel, layout=layout)
    ids = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((columns, padded), jnp.int32),
        grid=(padded // TOKENS,),
        grid_names=("block",),
        kernel_name="pk_engram_hash",
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane,
            unsafe_no_auto_barriers=True,  # threads share nothing
        ),
    )(x)
    ids = ids.T[:count]
    return ids.reshape(batch, time, layout.num_layers, layout.num_columns)
