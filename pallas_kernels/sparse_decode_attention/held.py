"""What a row holds, and what of it a token reads."""

from __future__ import annotations

import dataclasses

import jax


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Held:
    """Keys and values of B rows; those marked * may be of L layers, [L, ...] each.

    Attributes:
      a: *[B, C, c, r], keys of chunks of c tokens in the basis, before their rotation.
      basis: [B, G, K, r], of each kv head.
      first: i32[B, C], the position of each chunk's first token.
      values: *[B, G, M, c K], values of some chunks.
      out_k, out_v: *[B, G, O, c, K], chunks that are kept as they are.
      out_count: i32[B], how many of them there are, the first ones.
      ring_k, ring_v: [B, G, R, K], the newest tokens, in any order.
      ring_valid: bool[B, R], which of these count.
    """

    a: jax.Array
    basis: jax.Array
    first: jax.Array
    values: jax.Array
    out_k: jax.Array
    out_v: jax.Array
    out_count: jax.Array
    ring_k: jax.Array
    ring_v: jax.Array
    ring_valid: jax.Array

    LAYERED = ("a", "values", "out_k", "out_v")

    def of_layer(self, layer: jax.Array | None) -> Held:
        """The same with one layer's arrays."""
        if layer is None:
            return self
        part = {
            name: jax.lax.dynamic_index_in_dim(
                getattr(self, name), layer, keepdims=False
            )
            for name in self.LAYERED
        }
        return dataclasses.replace(self, **part)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rotary:
    """A rotary embedding of all K dimensions, i paired with i + K / 2.

    Attributes:
      frequencies: radians per position of each pair, K / 2 numbers.
      factor: on cosine and sine.
    """

    frequencies: tuple[float, ...]
    factor: float = 1.0
