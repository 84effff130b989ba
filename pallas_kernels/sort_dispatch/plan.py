"""The plan that says which token each sorted row holds, and back."""

from __future__ import annotations

import dataclasses

import jax


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class DispatchPlan:
    """Where the k slots of T tokens go when they are sorted by expert; M = T k.

    Attributes:
      token: i32[M], the source token of each sorted row.
      row: i32[T, k], the sorted row of each slot.
      group_sizes: i32[E], rows of each expert; rows past their sum are not routed.
    """

    token: jax.Array
    row: jax.Array
    group_sizes: jax.Array
