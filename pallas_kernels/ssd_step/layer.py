"""What decoding needs of a layer."""

from __future__ import annotations

import dataclasses
import functools
import math

import jax


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["conv_weight", "conv_bias", "A_log", "D", "dt_bias", "norm_scale"],
    meta_fields=["groups", "norm_eps", "dt_limit"],
)
@dataclasses.dataclass(frozen=True, kw_only=True)
class Layer:
    """The small parameters of a Mamba-2 layer.

    Attributes:
      conv_weight: [W, C], the last row multiplies the current token.
      conv_bias: [C].
      A_log: f32[H], logarithm of the forgetting rate.
      D: f32[H], of the skip.
      dt_bias: f32[H].
      norm_scale: [H * V], of the output norm.
      groups: G; head h reads group h // (H / G), and the norm has one mean per group.
      norm_eps: added to the mean square in the output norm.
      dt_limit: least and largest step size.
    """

    conv_weight: jax.Array
    conv_bias: jax.Array
    A_log: jax.Array
    D: jax.Array
    dt_bias: jax.Array
    norm_scale: jax.Array
    groups: int
    norm_eps: float = 1e-5
    dt_limit: tuple[float, float] = (0.0, math.inf)
