"""The optimizer's step on a table that is cut over devices.

It stands alone for now, as `core.sharded_rows` does: a training step replicates its
tables (`training.table_step`), and nothing in the library calls this.
"""

from __future__ import annotations

import jax
from jax.sharding import PartitionSpec

from jaxaccel.core.sharded_rows import TableSharding, owner_gradients
from jaxaccel.training.sparse_table import (
    TableOptimConfig,
    TableOptimState,
    update_table,
)


def update_sharded_table(
    config: TableOptimConfig,
    table: jax.Array,
    state: TableOptimState,
    unique: jax.Array,
    grads: jax.Array,
    learning_rate: jax.typing.ArrayLike,
    sharding: TableSharding,
    *,
    key: jax.Array | None = None,
) -> tuple[jax.Array, TableOptimState]:
    """`update_table` where each device updates its own rows.

    Args:
      config: the optimizer.
      table: [E ceil(N / E), d], of `pad_rows`.
      state: of that table.
      unique: i32[E U], `ShardedRows.plan.unique`.
      grads: [E U, d], gradients of `ShardedRows.rows` of the sum over devices.
      learning_rate: f32[].
      sharding: where the table lies.
      key: see `update_table`.

    Returns:
      The table and the state.

    Raises:
      ValueError: the optimizer moves rows by what other devices' rows do.
    """
    if config.kind == "sinkhorn_momentum":
        raise ValueError(
            "'sinkhorn_momentum' balances all rows of a table, it does not work on one "
            "that is cut over devices; allowed are 'adam' and 'rowwise_adam'"
        )
    spec = sharding.rows_spec
    whole = PartitionSpec()
    state_spec = jax.tree.map(lambda x: spec if x.ndim else whole, state)

    def device(table, state, unique, grads, learning_rate, key):
        rows, grads = owner_gradients(unique, grads, sharding)
        if key is not None:
            key = jax.random.fold_in(key, jax.lax.axis_index(sharding.axis))
        return update_table(config, table, state, rows, grads, learning_rate, key=key)

    return jax.shard_map(
        device,
        mesh=sharding.mesh,
        in_specs=(spec, state_spec, spec, spec, whole, whole),
        out_specs=(spec, state_spec),
        check_vma=False,
    )(table, state, unique, grads, learning_rate, key)
