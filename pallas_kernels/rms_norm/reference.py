"""RMSNorm (Zhang and Sennrich 2019, arXiv:1910.07467) as it is written, in float32.

With a gate it is the output norm of Mamba-2 (arXiv:2405.21060) and Gated DeltaNet
(arXiv:2412.06464); zero-centred it is the norm of Gemma and Qwen3-Next.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp


def rms_norm(
    x: jax.Array,
    scale: jax.Array,
    *,
    eps: float = 1e-6,
    zero_centered: bool = False,
    gate: jax.Array | None = None,
    norm_before_gate: bool = True,
    num_groups: int = 1,
) -> jax.Array:
    """y = x / sqrt(mean(x^2) + eps) * scale, the mean over each group of channels.

    Args and result as `pallas_kernels.rms_norm`; differentiated by JAX.
    """
    dtype, shape = x.dtype, x.shape
    u = x.astype(jnp.float32)  # [..., D]
    factor = scale.astype(jnp.float32)  # [D]
    if zero_centered:
        factor = 1.0 + factor
    silu = None if gate is None else jax.nn.silu(gate.astype(jnp.float32))
    if silu is not None and not norm_before_gate:
        u = u * silu
    grouped = u.reshape(-1, num_groups, shape[-1] // num_groups)  # [N, groups, W]
    mean_square = jnp.mean(grouped**2, axis=-1, keepdims=True)
    normed = (grouped / jnp.sqrt(mean_square + eps)).reshape(-1, shape[-1])  # [N, D]
    y = (normed * factor[None, :]).reshape(shape)
    if silu is not None and norm_before_gate:
        y = y * silu
    return y.astype(dtype)
