"""A training step around the rows of an n-gram memory that its batch reads.

The step of `training.step` stays what it is: it gets a small model, whose tables hold
the gathered rows as parameters, and a small optimizer state. Before it rows and moments
are gathered, after it they are written back in place. So accumulation, clipping by the
global norm and the stop at a loss that is not finite are those of any other parameter,
and nothing is as large as a table.

Running means are not: they are kept of dense parameters alone, those of the gathered
rows are thrown away. An evaluation of the running mean ("ema_nats_per_byte") reads
averaged dense weights with the tables as they are.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from jaxaccel.core.sparse_rows import RowPlan, gather_rows, plan_rows, scatter_rows
from jaxaccel.core.tree import ModelParts
from jaxaccel.data.batch import PackedBatch
from jaxaccel.nn.engram import GatheredRows
from jaxaccel.nn.engram_config import EngramConfig
from jaxaccel.training.config import TrainConfig
from jaxaccel.training.optim import learning_rate
from jaxaccel.training.sparse_table import (
    TableOptimConfig,
    TableOptimState,
    init_table_state,
    round_to,
    update_table,
)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class TablesOptState:
    """The state of the model's optimizer and of each table's.

    Attributes:
      dense: the former.
      tables: by the name of the table's rows.
    """

    dense: Any
    tables: dict[str, TableOptimState]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class LookupBatch(PackedBatch):
    """A batch whose lookups are known.

    Attributes:
      slots: i32[B, T, C] of each table, places in its gathered rows.
    """

    slots: tuple[jax.Array, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class _RowsAsParameters(ModelParts):
    """A model whose tables' rows come with the parameters."""

    names: tuple[str, ...]

    def merge(
        self, params: Mapping[str, jax.Array], buffers: Mapping[str, jax.Array]
    ) -> nnx.Module:
        rows = {name: params[name] for name in self.names}
        dense = {name: x for name, x in params.items() if name not in rows}
        return super().merge(dense, {**buffers, **rows})


def table_names(num_tables: int) -> tuple[str, ...]:
    """Names of the tables' rows among a decoder's buffers."""
    return tuple(f"memory/layers/{i}/table/rows" for i in range(num_tables))


def first_state(opt_state: Any, model: Any, buffers: Mapping[str, jax.Array]) -> Any:
    """The optimizer's first state, with that of the model's tables if it has some.

    Args:
      opt_state: of the optimizer alone.
      model: any module.
      buffers: its buffers by name.
    """
    engram = _memory_config(model)
    if engram is None:
        return opt_state
    config = _optim_config(engram)
    return TablesOptState(
        dense=opt_state,
        tables={
            name: init_table_state(config, buffers[name])
            for name in table_names(len(engram.layers))
        },
    )


def _memory_config(model: Any) -> EngramConfig | None:
    return getattr(getattr(model, "config", None), "engram", None)


def _optim_config(engram: EngramConfig) -> TableOptimConfig:
    return TableOptimConfig(
        kind=engram.table_optimizer, lr_factor=engram.table_lr_factor
    )


class TableTraining:
    """What makes the step of a model without tables one of a model with them.

    Attributes:
      parts: the small model.
    """

    def __init__(self, parts: ModelParts, engram: EngramConfig, config: TrainConfig):
        """Use `of`."""
        if config.optimizer_on_host:
            raise ValueError(
                "optimizer_on_host=True does not work with an n-gram memory: moments "
                "are gathered on the device"
            )
        if engram.is_narrow:
            raise ValueError(
                f"table_dtype={engram.table_dtype!r} is read only, a run trains tables "
                "in 'float32' or 'bfloat16'"
            )
        self.names = table_names(len(engram.layers))
        self.parts = _RowsAsParameters(
            graphdef=parts.graphdef,
            params=parts.params,
            buffers=parts.buffers,
            names=self.names,
        )
        self._whole, self._config = parts, config
        self._optim = _optim_config(engram)
        self._moves_all = self._optim.kind == "sinkhorn_momentum"

    @classmethod
    def of(cls, parts: ModelParts, config: TrainConfig) -> TableTraining | None:
        """`None` for a model without tables.

        Raises:
          ValueError: the run's settings don't go with tables.
        """
        if isinstance(parts, _RowsAsParameters):
            return None
        model = nnx.merge(parts.graphdef, parts.params, parts.buffers)
        engram = _memory_config(model)
        return None if engram is None else cls(parts, engram, config)

    def optimizer(
        self, optimizer: optax.GradientTransformation
    ) -> optax.GradientTransformation:
        """Trains dense parameters as `optimizer` does, and the rows beside them."""
        schedule = learning_rate(self._config.optim, self._config.num_steps)
        clip_norm = self._config.optim.clip_norm

        def update(updates: Any, state: Any, params: Any = None) -> Any:
            if clip_norm is not None:
                # Over rows and dense parameters together; below it `optimizer`'s own
                # clipping finds nothing left to do.
                norm = optax.tree.norm(updates)
                factor = jnp.minimum(1.0, clip_norm / jnp.maximum(norm, 1e-30))
                updates = jax.tree.map(lambda g: g * factor, updates)
            assert params is not None
            rows = {name: updates[name] for name in self.names}
            dense = {name: g for name, g in updates.items() if name not in rows}
            inner: Any = optimizer.update(
                dense, state.dense, {name: params[name] for name in dense}
            )
            changes, tables = dict(inner[0]), {}
            for name, grads in rows.items():
                moved, tables[name] = update_table(
                    self._optim,
                    params[name],
                    state.tables[name],
                    jnp.arange(grads.shape[0], dtype=jnp.int32),
                    grads,
                    schedule(state.tables[name].count),
                )
                changes[name] = moved - params[name]
            return changes, TablesOptState(dense=inner[1], tables=tables)

        return optax.GradientTransformation(optimizer.init, update)  # pyrefly: ignore

    def loss(self, loss: Callable[..., Any]) -> Callable[..., Any]:
        """`loss` of a model that looks up gathered rows."""

        def with_rows(model, batch, *rest):
            for engram, slots in zip(model.memory.layers, batch.slots, strict=True):
                engram.table = GatheredRows(engram.table.rows[...], slots)
            return loss(model, batch, *rest)

        return with_rows

    def around(self, step: Callable[..., Any]) -> Callable[..., Any]:
        """The step of the whole model.

        Args:
          step: of the small model, (state, batch) -> (state, metrics).

        Returns:
          The same of the whole one. Metrics have "memory_rows", rows that were read.
        """

        def train_step(state: Any, batch: PackedBatch):
            plans = self._plans(state, batch)
            small = self._gathered(state, plans)
            fields = dataclasses.fields(batch)
            lookups = LookupBatch(
                **{field.name: getattr(batch, field.name) for field in fields},
                slots=tuple(plan.slots for plan in plans.values()),
            )
            small, metrics = step(small, lookups)
            read = [plan.count.astype(jnp.float32) for plan in plans.values()]
            metrics = metrics | {"memory_rows": jnp.sum(jnp.stack(read))}
            return self._written(state, small, plans), metrics

        return train_step

    def _plans(self, state: Any, batch: PackedBatch) -> dict[str, RowPlan]:
        model: Any = self._whole.merge(state.params, state.buffers)
        ids = model.memory.lookups(batch.tokens, batch.segment_ids)  # [B, T, L, C]
        plans = {}
        for index, name in enumerate(self.names):
            own, num_rows = ids[:, :, index], state.buffers[name].shape[0]
            plans[name] = plan_rows(own, num_rows)
            if self._moves_all:
                every = jnp.arange(num_rows, dtype=jnp.int32)
                plans[name] = dataclasses.replace(plans[name], unique=every, slots=own)
        return plans

    def _gathered(self, state: Any, plans: Mapping[str, RowPlan]) -> Any:
        rows, tables = {}, {}
        for name, plan in plans.items():
            # In f32, so that the rounding to the table's type is ours.
            gathered = gather_rows(state.buffers[name], plan.unique)
            rows[name] = gathered.astype(jnp.float32)
            tables[name] = jax.tree.map(
                lambda x, plan=plan: gather_rows(x, plan.unique) if x.ndim else x,
                state.opt_state.tables[name],
            )
        others = {n: x for n, x in state.buffers.items() if n not in rows}
        return dataclasses.replace(
            state,
            params={**state.params, **rows},
            ema=None if state.ema is None else {**state.ema, **rows},
            opt_state=TablesOptState(dense=state.opt_state.dense, tables=tables),
            buffers=others,
        )

    def _written(self, state: Any, small: Any, plans: Mapping[str, RowPlan]) -> Any:
        def dense(named):
            return None if named is None else {n: named[n] for n in state.params}

        buffers, tables = dict(small.buffers), {}
        for place, (name, plan) in enumerate(plans.items()):
            table = state.buffers[name]
            # No number that a split of the key would give.
            key = jax.random.fold_in(state.rng, 2**20 + place)
            rows = round_to(small.params[name], table.dtype, key)
            # Rounding is random: rows that did not change must not move by it.
            old = gather_rows(table, plan.unique)
            same = small.params[name] == old.astype(jnp.float32)
            rows = jnp.where(same, old, rows)
            buffers[name] = scatter_rows(table, plan.unique, rows)
            tables[name] = jax.tree.map(
                lambda x, new, plan=plan: (
                    scatter_rows(x, plan.unique, new) if x.ndim else new
                ),
                state.opt_state.tables[name],
                small.opt_state.tables[name],
            )
        return dataclasses.replace(
            small,
            params=dense(small.params),
            ema=dense(small.ema),  # the rows' means are dropped
            opt_state=TablesOptState(dense=small.opt_state.dense, tables=tables),
            buffers=dict(sorted(buffers.items())),
        )
