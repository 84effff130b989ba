"""Rotary position embedding: partial, and scaled by YaRN."""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np


@dataclasses.dataclass(frozen=True, kw_only=True)
class YarnScaling:
    """YaRN (Peng et al., arXiv:2309.00071), as gpt-oss uses it.

    Attributes:
      factor: how many times longer than `original_max_position` contexts get.
      original_max_position: context length of the unscaled training.
      beta_fast: dimensions with more rotations than this keep their frequency.
      beta_slow: dimensions with fewer rotations than this are slowed by `factor`.
      truncate: round the two bounds of the ramp outwards to whole dimensions.
      attention_factor: multiplies cos and sin; `None` means
        0.1 * mscale * ln(factor) + 1.
      mscale: see `attention_factor`.
    """

    factor: float
    original_max_position: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float | None = None
    mscale: float = 1.0

    def __post_init__(self):
        if self.factor < 1:
            raise ValueError(f"YarnScaling: factor={self.factor} must be at least 1")
        if self.original_max_position < 1:
            raise ValueError(
                "YarnScaling: original_max_position="
                f"{self.original_max_position} must be positive"
            )
        if not self.beta_fast > self.beta_slow > 0:
            raise ValueError(
                f"YarnScaling: beta_fast={self.beta_fast} must be above "
                f"beta_slow={self.beta_slow}, and both positive"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class LinearScaling:
    """Positions divided by a factor.

    Attributes:
      factor: the divisor.
    """

    factor: float

    def __post_init__(self):
        if self.factor < 1:
            raise ValueError(f"LinearScaling: factor={self.factor} must be at least 1")


@dataclasses.dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Rotary embedding of a head.

    Attributes:
      theta: base of the frequencies.
      fraction: share of the head's dimensions that rotate, the first ones.
      scaling: `None`, `LinearScaling` or `YarnScaling`.
    """

    theta: float = 10_000.0
    fraction: float = 1.0
    scaling: YarnScaling | LinearScaling | None = None

    def __post_init__(self):
        if self.theta <= 1:
            raise ValueError(f"RopeConfig: theta={self.theta} must be above 1")
        if not 0 < self.fraction <= 1:
            raise ValueError(f"RopeConfig: fraction={self.fraction} must be in (0, 1]")

    def rotary_dim(self, head_dim: int) -> int:
        """Returns how many dimensions rotate.

        Raises:
          ValueError: the number is odd or zero.
        """
        rotary = int(head_dim * self.fraction)
        if rotary < 2 or rotary % 2:
            raise ValueError(
                f"RopeConfig: fraction={self.fraction} of head_dim={head_dim} rotates "
                f"{rotary} dimensions, allowed are even numbers from 2"
            )
        return rotary


def frequencies(config: RopeConfig, head_dim: int) -> tuple[np.ndarray, float]:
    """Computes the angle per position of each pair, in double precision.

    Args:
      config: the embedding.
      head_dim: K.

    Returns:
      f64[rotary_dim / 2] radians per position, and the factor on cos and sin.
    """
    rotary = config.rotary_dim(head_dim)
    plain = config.theta ** (-np.arange(0, rotary, 2, dtype=np.float64) / rotary)
    scaling = config.scaling
    if scaling is None:
        return plain, 1.0
    if isinstance(scaling, LinearScaling):
        return plain / scaling.factor, 1.0

    def dimension_of(rotations: float) -> float:
        turns = scaling.original_max_position / (rotations * 2 * math.pi)
        return rotary * math.log(turns) / (2 * math.log(config.theta))

    low, high = dimension_of(scaling.beta_fast), dimension_of(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotary - 1)
    # A ramp of no width would divide by zero.
    ramp = (np.arange(rotary // 2) - low) / max(high - low, 1e-3)
    ramp = np.clip(ramp, 0.0, 1.0)
    factor = scaling.attention_factor
    if factor is None:
        factor = 1.0
        if scaling.factor > 1:
            factor = 0.1 * scaling.mscale * math.log(scaling.factor) + 1.0
    return plain / scaling.factor * ramp + plain * (1 - ramp), factor


def rotary_tables(
    positions: jax.Array, config: RopeConfig, head_dim: int
) -> tuple[jax.Array, jax.Array]:
    """Cosine and sine of each position's angles, times the factor of the scaling.

    Args:
      positions: i32[B, T].
      config: the embedding.
      head_dim: K.

    Returns:
      f32[B, T, R/2] each, for the R dimensions that rotate.
    """
    per_position, factor = frequencies(config, head_dim)
    per_position = jnp.asarray(per_position, jnp.float32)
    angle = jnp.einsum(
        "bt,f->btf",
        positions.astype(jnp.float32),
        per_position,
        precision=jax.lax.Precision.HIGHEST,
    )
    return jnp.cos(angle) * factor, jnp.sin(angle) * factor


def apply_rope(x: jax.Array, positions: jax.Array, config: RopeConfig) -> jax.Array:
    """Rotates the first dimensions of each head by its token's position.

    Dimension i pairs with i + rotary_dim / 2 ("rotate half", as in the Hugging Face
    checkpoints). Angles, sine and cosine are f32 under any dtype.

    Args:
      x: [B, T, H, K].
      positions: i32[B, T].
      config: the embedding.

    Returns:
      [B, T, H, K] in x's dtype.
    """
    tables = rotary_tables(positions, config, x.shape[-1])
    cos, sin = (table[:, :, None, :] for table in tables)  # [B, T, 1, R/2]
    half = cos.shape[-1]
    first = x[..., :half].astype(jnp.float32)
    second = x[..., half : 2 * half].astype(jnp.float32)
    rotated = jnp.concatenate(
        [first * cos - second * sin, second * cos + first * sin], axis=-1
    ).astype(x.dtype)
    if 2 * half == x.shape[-1]:
        return rotated
    return jnp.concatenate([rotated, x[..., 2 * half :]], axis=-1)
