"""cuDNN's attention over several documents a row, a peer of benchmarks."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def packed_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    lengths: np.ndarray,
    offsets: np.ndarray,
    *,
    scale: float,
) -> jax.Array:
    """Causal attention within each document; no public function of JAX has it.

    Args:
      q, k, v: [B, T, H, D] and [B, T, G, D] twice, 16 bits.
      lengths: i32[B, M], tokens of each document, together T.
      offsets: i32[B, M + 1], where the documents begin, and T.
      scale: of the scores.

    Returns:
      [B, T, H, D].
    """
    from jax._src.cudnn import fused_attention_stablehlo as cudnn

    begins, counts = jnp.asarray(offsets), jnp.asarray(lengths)
    o: Any = cudnn.dot_product_attention(
        *(q, k, v, None, None, counts, counts, begins, begins),
        scale=scale,
        mask_type=cudnn.MaskType.PADDING_CAUSAL,
    )
    return o
