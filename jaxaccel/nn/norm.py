"""Root-mean-square norm as a module; the arithmetic is `pallas_kernels.rms_norm`."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from jaxaccel.nn.implementation import Implementations, implementation_of
from pallas_kernels.rms_norm import rms_norm


class RMSNorm(nnx.Module):
    """`x / rms(x) * scale` over the last axis, statistics in f32.

    Attributes:
      scale: param_dtype[d]; zero at first where `zero_centered` (the factor is
        1 + scale), else one.
    """

    def __init__(
        self,
        d: int,
        *,
        eps: float = 1e-6,
        zero_centered: bool = False,
        num_groups: int = 1,
        param_dtype: DTypeLike = jnp.float32,
        implementation: Implementations = None,
        rngs: nnx.Rngs | None = None,
    ):
        """Creates the scale.

        Args:
          d: size of the normalised axis.
          eps: added to the mean square.
          zero_centered: multiply by 1 + scale.
          num_groups: statistics over each of this many equal parts of the axis.
          param_dtype: dtype of the scale.
          implementation: see `nn.implementation`.
          rngs: unused, taken so that all modules are built alike.

        Raises:
          ValueError: `d` is not a multiple of `num_groups`, or `eps` is negative.
        """
        del rngs
        if num_groups < 1 or d % num_groups:
            raise ValueError(
                f"RMSNorm: num_groups={num_groups} must be a divisor of d={d}"
            )
        if eps < 0:
            raise ValueError(f"RMSNorm: eps={eps} must not be negative")
        init = jnp.zeros if zero_centered else jnp.ones
        self.scale = nnx.Param(init((d,), param_dtype))
        self.eps = eps
        self.zero_centered = zero_centered
        self.num_groups = num_groups
        self.implementation = implementation_of("rms_norm", implementation)

    def __call__(
        self,
        x: jax.Array,
        gate: jax.Array | None = None,
        norm_before_gate: bool = True,
    ) -> jax.Array:
        """Normalises x, and multiplies by SiLU(gate) where one is given.

        Args:
          x: [..., d].
          gate: [..., d] or `None`.
          norm_before_gate: gate after the norm; otherwise the product is normalised.

        Returns:
          [..., d] in x's dtype.
        """
        return rms_norm(
            x,
            self.scale[...],
            eps=self.eps,
            zero_centered=self.zero_centered,
            gate=gate,
            norm_before_gate=norm_before_gate,
            num_groups=self.num_groups,
            implementation=self.implementation,
        )


def l2_normalize(x: jax.Array, eps: float = 1e-6) -> jax.Array:
    """`x * rsqrt(sum x^2 + eps)` over the last axis in f32, gradient finite at zero.

    Args:
      x: [..., K].
      eps: inside the root, so that an all-zero row (padding) gives zero.

    Returns:
      f32[..., K].
    """
    x = x.astype(jnp.float32)
    return x * jax.lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + eps)
