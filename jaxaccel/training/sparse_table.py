"""Optimizers that touch a table's rows only where a batch has a gradient.

A dense gradient of a table is as large as the table, and so are the writes of a dense
optimizer, whatever few rows a batch reads. Here the step gathers the rows and their
moments, trains those, and writes them back in place.

A run sets `TableOptimConfig.kind` and `lr_factor`, from `EngramConfig`; the other
fields, `exact_decay` and those of "sinkhorn_momentum" among them, keep their defaults
there, and only a caller of `update_table` changes them.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from jaxaccel.core.sparse_rows import gather_rows, scatter_rows


KINDS = ("adam", "rowwise_adam", "sinkhorn_momentum")

SINKHORN_MAX_ROWS = 2**20
"""`sinkhorn_momentum` updates every row in every step; larger tables are refused."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TableOptimConfig:
    """How a table is trained; there is no weight decay.

    Attributes:
      kind: "adam" (moments of a row change when a batch reads it), "rowwise_adam" (one
        second moment a row, the mean over it) or "sinkhorn_momentum" (one state array,
        updates balanced over rows and columns; every row moves, small tables only).
      lr_factor: learning rate in units of the model's.
      b1, b2, eps: of Adam.
      exact_decay: moments fade for the steps in which a row wasn't read too, as those
        of a dense optimizer do; costs an int32 a row.
      momentum, scale, rounds, threshold: of "sinkhorn_momentum": beta, gamma, number
        of normalisations K, and the share tau of the mean row norm under which a row
        does not move.

    Source: Engram (arXiv 2601.07372): Adam, five times the learning rate, no decay.
    """

    kind: str = "adam"
    lr_factor: float = 5.0
    b1: float = 0.9
    b2: float = 0.95
    eps: float = 1e-8
    exact_decay: bool = False
    momentum: float = 0.95
    scale: float = 0.18
    rounds: int = 11
    threshold: float = 1e-3

    def __post_init__(self):
        if self.kind not in KINDS:
            raise ValueError(
                f"kind is {self.kind!r}, allowed are {', '.join(map(repr, KINDS))}"
            )
        for name in ("b1", "b2", "momentum"):
            if not 0.0 <= getattr(self, name) < 1.0:
                raise ValueError(
                    f"{name} is {getattr(self, name)}, expected 0 <= x < 1"
                )
        for name in ("lr_factor", "eps", "scale"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} is {getattr(self, name)}, expected > 0")
        if self.rounds < 1 or self.rounds % 2 == 0:
            # They begin and end with rows.
            raise ValueError(f"rounds is {self.rounds}, expected odd and positive")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class TableOptimState:
    """What the optimizer of one table keeps.

    Attributes:
      count: i32[], steps done.
      first: f32[N, d], mean of gradients.
      second: f32[N, d] of their squares, f32[N] for "rowwise_adam", else `None`.
      last: i32[N], step in which a row was last read, with `exact_decay`.
    """

    count: jax.Array
    first: jax.Array
    second: jax.Array | None = None
    last: jax.Array | None = None


def init_table_state(config: TableOptimConfig, table: jax.Array) -> TableOptimState:
    """The state before the first step.

    Args:
      config: the optimizer.
      table: [N, d], may be abstract.

    Returns:
      The state, zeros.

    Raises:
      ValueError: the table is too large for "sinkhorn_momentum".
    """
    if config.kind == "sinkhorn_momentum" and table.shape[0] > SINKHORN_MAX_ROWS:
        raise ValueError(
            f"a table of {table.shape[0]} rows is too large for 'sinkhorn_momentum', "
            f"which moves every row; allowed are {SINKHORN_MAX_ROWS}"
        )
    second = None
    if config.kind == "adam":
        second = jnp.zeros(table.shape, jnp.float32)
    elif config.kind == "rowwise_adam":
        second = jnp.zeros(table.shape[:1], jnp.float32)
    is_lazy = config.kind != "sinkhorn_momentum"
    return TableOptimState(
        count=jnp.zeros((), jnp.int32),
        first=jnp.zeros(table.shape, jnp.float32),
        second=second,
        last=jnp.zeros(table.shape[:1], jnp.int32)
        if config.exact_decay and is_lazy
        else None,
    )


def update_table(
    config: TableOptimConfig,
    table: jax.Array,
    state: TableOptimState,
    unique: jax.Array,
    grads: jax.Array,
    learning_rate: jax.typing.ArrayLike,
    *,
    key: jax.Array | None = None,
    moves: jax.Array | bool = True,
) -> tuple[jax.Array, TableOptimState]:
    """One step; in place where table and state are donated.

    Args:
      config: the optimizer.
      table: [N, d].
      state: its state.
      unique: i32[K], `RowPlan.unique`.
      grads: [K, d].
      learning_rate: f32[], the model's; `lr_factor` multiplies it.
      key: of the rounding of a bfloat16 table, which is random: rounded to nearest,
        small updates would be lost for good.
      moves: bool[], false leaves table and state as they are.

    Returns:
      The table and the state.

    Raises:
      ValueError: a bfloat16 table comes without a key.
    """
    grads = grads.astype(jnp.float32)
    rate = jnp.asarray(learning_rate, jnp.float32) * config.lr_factor
    moves = jnp.asarray(moves)
    if config.kind == "sinkhorn_momentum":
        return _sinkhorn(config, table, state, unique, grads, rate, key, moves)
    count = state.count + 1
    first = gather_rows(state.first, unique)
    assert state.second is not None
    second = gather_rows(state.second, unique)
    is_rowwise = config.kind == "rowwise_adam"
    square = jnp.mean(grads**2, axis=-1) if is_rowwise else grads**2
    new_first, new_second, last = first, second, state.last
    if last is not None:
        # A row that no step has read has nothing to fade.
        missed = (count - 1 - gather_rows(last, unique)).astype(jnp.float32)
        new_first = first * (config.b1**missed)[:, None]
        fade = config.b2**missed
        new_second = second * (fade if is_rowwise else fade[:, None])
        seen = jnp.broadcast_to(jnp.where(moves, count, 0), unique.shape)
        old = gather_rows(last, unique)
        last = scatter_rows(last, unique, jnp.where(moves, seen, old))
    new_first = config.b1 * new_first + (1.0 - config.b1) * grads
    new_second = config.b2 * new_second + (1.0 - config.b2) * square
    steps = count.astype(jnp.float32)
    mean = new_first / (1.0 - config.b1**steps)
    root = jnp.sqrt(new_second / (1.0 - config.b2**steps))
    root = root[:, None] if is_rowwise else root
    rows = gather_rows(table, unique)
    moved = rows.astype(jnp.float32) - rate * mean / (root + config.eps)
    moved = round_to(moved, table.dtype, key)

    def write(array, new, old):
        return scatter_rows(array, unique, jnp.where(moves, new, old))

    new_state = TableOptimState(
        count=jnp.where(moves, count, state.count),
        first=write(state.first, new_first, first),
        second=write(state.second, new_second, second),
        last=last,
    )
    return write(table, moved, rows), new_state


def _sinkhorn(config, table, state, unique, grads, rate, key, moves):
    """Momentum, balanced: W -= rate gamma sqrt(d) U, U from the whole table."""
    dense = scatter_rows(jnp.zeros(table.shape, jnp.float32), unique, grads)
    beta = config.momentum
    momentum = beta * state.first + (1.0 - beta) * dense
    ahead = beta * momentum + (1.0 - beta) * dense  # Nesterov's
    update = balance(ahead, rounds=config.rounds, threshold=config.threshold)
    step = rate * config.scale * table.shape[1] ** 0.5
    moved = round_to(table.astype(jnp.float32) - step * update, table.dtype, key)
    new_state = TableOptimState(
        count=state.count + moves.astype(jnp.int32),
        first=jnp.where(moves, momentum, state.first),
    )
    return jnp.where(moves, moved, table), new_state


def balance(x: jax.Array, *, rounds: int = 11, threshold: float = 1e-3) -> jax.Array:
    """Rows and columns of equal norms, by turns.

    Args:
      x: f32[N, d].
      rounds: normalisations, odd: they begin and end with rows.
      threshold: rows whose norm is at most this share of the mean one become zero.

    Returns:
      f32[N, d], rows of norm 1 or 0.
    """
    norms = jnp.linalg.norm(x, axis=1, keepdims=True)
    x = jnp.where(norms > threshold * jnp.mean(norms), x, 0.0)
    for turn in range(rounds):
        square = jnp.sum(x * x, axis=1 - turn % 2, keepdims=True)
        x = x * jax.lax.rsqrt(square + 1e-20)
    return x


def round_to(x: jax.Array, dtype, key: jax.Array | None) -> jax.Array:
    """f32 in the table's type; to bfloat16 up or down at random, right on average.

    Args:
      x: f32[...].
      dtype: float32 or bfloat16.
      key: of the randomness; float32 needs none.

    Raises:
      ValueError: bfloat16 without a key.
    """
    if dtype == jnp.float32:
        return x
    if key is None:
        raise ValueError(f"a table of {dtype} needs a key, its rounding is random")
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    noise = jax.random.bits(key, x.shape, jnp.uint16).astype(jnp.uint32)
    bits = (bits + noise) & jnp.uint32(0xFFFF0000)
    return jax.lax.bitcast_convert_type(bits, jnp.float32).astype(dtype)
