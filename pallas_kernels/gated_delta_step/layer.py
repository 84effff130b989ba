"""What decoding needs of a layer, and what verified tokens leave behind."""

from __future__ import annotations

import dataclasses
import functools

import jax


L2_EPS = 1e-6  # of the norms of q and k, inside the root


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["conv_weight", "A_log", "dt_bias", "norm_scale"],
    meta_fields=["key_heads", "norm_eps", "negative_eigenvalues"],
)
@dataclasses.dataclass(frozen=True, kw_only=True)
class Layer:
    """The small parameters of a Gated DeltaNet layer.

    Attributes:
      conv_weight: [W, C], the last row multiplies the current token.
      A_log: f32[Hv].
      dt_bias: f32[Hv].
      norm_scale: [V], of the output norm.
      key_heads: Hk; value head h reads key head h // (Hv / Hk).
      norm_eps: added to the mean square in the output norm.
      negative_eigenvalues: beta in (0, 2) instead of (0, 1).
    """

    conv_weight: jax.Array
    A_log: jax.Array
    dt_bias: jax.Array
    norm_scale: jax.Array
    key_heads: int
    norm_eps: float = 1e-6
    negative_eigenvalues: bool = False


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Pending:
    """What T verified tokens would do to the pools, far smaller than a state.

    Attributes:
      qkv: [B, T, C], raw inputs of the convolution.
      k: [B, T, Hk, K], normalised keys.
      written: f32[B, T, Hv, V], the rows u that the state takes along the keys.
      log_decay: f32[B, T, Hv], g of each token.
      is_first: bool[B], whether the first token begins a document; `None` if none do.
    """

    qkv: jax.Array
    k: jax.Array
    written: jax.Array
    log_decay: jax.Array
    is_first: jax.Array | None
