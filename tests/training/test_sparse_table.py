"""Rows of a table trained alone, against the whole table trained densely."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxaccel.core.sparse_rows import gather_rows, plan_rows, scatter_rows, take_rows
from jaxaccel.training.sparse_table import (
    TableOptimConfig,
    balance,
    init_table_state,
    update_table,
)


pytestmark = pytest.mark.usefixtures("quick_compile")

N, D, LR = 23, 3, 0.01


def zipf(rng, shape, n=N):
    return np.minimum(rng.zipf(1.3, shape) - 1, n - 1).astype(np.int32)


def test_plan_holds_each_row_once():
    ids = zipf(np.random.default_rng(0), (4, 9))
    ids[0, :2] = -1, N  # no rows
    plan = jax.jit(functools.partial(plan_rows, num_rows=N))(ids)
    real = np.unique(ids[(ids >= 0) & (ids < N)])
    assert int(plan.count) == len(real)
    assert int(plan.num_missing) == 2
    np.testing.assert_array_equal(plan.unique[: len(real)], real)
    assert np.all(np.asarray(plan.unique)[len(real) :] >= N)
    assert len(set(np.asarray(plan.unique).tolist())) == plan.unique.size == N
    table = np.random.default_rng(1).normal(size=(N, D)).astype(np.float32)
    rows = gather_rows(jnp.asarray(table), plan.unique)
    got = np.array(take_rows(rows, plan.slots))
    assert np.isnan(got[0, :2]).all()
    got[0, :2] = table[ids[0, 2]]
    ids[0, :2] = ids[0, 2]
    np.testing.assert_array_equal(got, table[ids])


def test_rows_beyond_the_capacity_are_counted():
    ids = jnp.asarray([5, 1, 1, 9, 7], jnp.int32)
    plan = jax.jit(functools.partial(plan_rows, num_rows=N, capacity=2))(ids)
    assert plan.unique.tolist() == [1, 5]
    assert plan.slots.tolist() == [1, 0, 0, 2, 2]
    assert (int(plan.count), int(plan.num_missing)) == (2, 2)
    with pytest.raises(ValueError, match="capacity 0"):
        plan_rows(ids, N, capacity=0)
    with pytest.raises(ValueError, match="expected int32"):
        plan_rows(ids.astype(jnp.float32), N)


def test_gradient_of_rows_is_the_dense_one():
    rng = np.random.default_rng(0)
    ids = zipf(rng, (5, 16))
    dy = jnp.asarray(rng.normal(size=(5, 16, D)), jnp.float32)

    @jax.jit
    def gradient(table, ids, dy):
        plan = plan_rows(ids, N)
        rows = gather_rows(table, plan.unique)
        y, pull = jax.vjp(lambda rows: take_rows(rows, plan.slots), rows)
        d_rows = pull(dy)[0]
        dense = scatter_rows(jnp.zeros_like(table), plan.unique, d_rows)
        return y, dense, jax.vjp(lambda t: t[ids], table)[1](dy)[0]

    table = jnp.asarray(rng.normal(size=(N, D)), jnp.float32)
    y, got, want = gradient(table, ids, dy)
    np.testing.assert_array_equal(y, np.asarray(table)[ids])
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
    # All lookups equal: one row gets all, the others nothing.
    _, got, _ = gradient(table, np.full_like(ids, 3), dy)
    np.testing.assert_allclose(got[3], dy.sum((0, 1)), rtol=1e-5, atol=1e-5)
    assert np.all(np.delete(np.asarray(got), 3, axis=0) == 0)


@functools.cache
def stepper(config):
    @jax.jit
    def step(table, state, ids, dy, moves):
        plan = plan_rows(ids, N)
        grads = jax.ops.segment_sum(dy, plan.slots, plan.unique.size)
        return update_table(config, table, state, plan.unique, grads, LR, moves=moves)

    return step


def run(config, steps=4, moves=(True,) * 9):
    """Tables after each step, and the dense gradients and touched rows of each."""
    rng = np.random.default_rng(0)
    table = jnp.asarray(rng.normal(size=(N, D)), jnp.float32)
    state = init_table_state(config, table)
    history, dense = [np.asarray(table)], []
    for i in range(steps):
        ids = zipf(rng, 12)
        dy = rng.normal(size=(12, D)).astype(np.float32)
        table, state = stepper(config)(table, state, ids, dy, moves[i])
        history.append(np.asarray(table))
        gradient = np.zeros((N, D), np.float32)
        np.add.at(gradient, ids, dy)
        dense.append((gradient, np.isin(np.arange(N), ids)))
    return history, dense, state


@pytest.mark.parametrize("kind", ["adam", "rowwise_adam"])
@pytest.mark.parametrize("exact_decay", [False, True])
def test_equals_dense_adam_on_the_rows_that_are_read(kind, exact_decay):
    config = TableOptimConfig(kind=kind, exact_decay=exact_decay)
    history, dense, state = run(config)
    rate, (b1, b2) = LR * config.lr_factor, (config.b1, config.b2)
    table = history[0].astype(np.float64)
    m, v = np.zeros((N, D)), np.zeros((N, D) if kind == "adam" else (N, 1))
    for t, (g, touched) in enumerate(dense, start=1):
        g = g.astype(np.float64)
        square = g**2 if kind == "adam" else np.mean(g**2, axis=1, keepdims=True)
        touched = touched[:, None]
        # Where no gradient is, dense moments fade, those of a lazy optimizer rest.
        change = touched | exact_decay
        m = np.where(change, b1 * m + (1 - b1) * g, m)
        v = np.where(change, b2 * v + (1 - b2) * square, v)
        step = rate * (m / (1 - b1**t)) / (np.sqrt(v / (1 - b2**t)) + config.eps)
        table = np.where(touched, table - step, table)
        np.testing.assert_allclose(history[t], table, rtol=1e-5, atol=1e-6)
        untouched = ~touched[:, 0]
        assert untouched.any()
        np.testing.assert_array_equal(history[t][untouched], history[t - 1][untouched])
    assert int(state.count) == len(dense)


def test_first_step_is_that_of_optax():
    config = TableOptimConfig()
    history, dense, _ = run(config, steps=1)
    adam = optax.adam(LR * config.lr_factor, b1=config.b1, b2=config.b2)
    gradient, touched = dense[0]
    with jax.numpy_dtype_promotion("standard"):
        updates, _ = adam.update(gradient, adam.init(jnp.asarray(history[0])))
    want = history[0] + np.asarray(updates)
    np.testing.assert_allclose(history[1][touched], want[touched], rtol=1e-5)


def test_sinkhorn_momentum_is_the_dense_update():
    config = TableOptimConfig(kind="sinkhorn_momentum")
    history, dense, state = run(config, steps=3)
    table, m = history[0].astype(np.float64), np.zeros((N, D))
    for t, (g, _) in enumerate(dense, start=1):
        m = 0.95 * m + 0.05 * g
        u = 0.95 * m + 0.05 * g
        norms = np.linalg.norm(u, axis=1, keepdims=True)
        u = np.where(norms > 1e-3 * norms.mean(), u, 0.0)
        for turn in range(11):
            u /= np.sqrt(np.sum(u * u, axis=1 - turn % 2, keepdims=True) + 1e-20)
        table -= LR * 5 * 0.18 * D**0.5 * u
        np.testing.assert_allclose(history[t], table, rtol=1e-4, atol=1e-5)
    assert state.second is None
    u = balance(jnp.asarray(np.random.default_rng(0).normal(size=(8, 4)), jnp.float32))
    np.testing.assert_allclose(jnp.linalg.norm(u, axis=1), 1.0, rtol=1e-5)
    np.testing.assert_allclose(jnp.linalg.norm(u, axis=0), 2**0.5, rtol=0.02)
    with pytest.raises(ValueError, match="too large for 'sinkhorn_momentum'"):
        init_table_state(config, jax.ShapeDtypeStruct((2**20 + 1, 1), jnp.float32))


@pytest.mark.parametrize("kind", ["adam", "sinkhorn_momentum"])
def test_a_step_that_does_not_move_leaves_everything(kind):
    config = TableOptimConfig(kind=kind, exact_decay=kind == "adam")
    history, _, state = run(config, steps=2, moves=(True, False))
    np.testing.assert_array_equal(history[2], history[1])
    assert int(state.count) == 1
    for a, b in zip(
        jax.tree.leaves(state), jax.tree.leaves(run(config, steps=1)[2]), strict=True
    ):
        np.testing.assert_array_equal(a, b)


def test_bfloat16_rounds_right_on_average():
    config = TableOptimConfig(lr_factor=1.0)
    table = jnp.ones((1, 4096), jnp.bfloat16)
    state = init_table_state(config, table)
    unique, grads = jnp.zeros(1, jnp.int32), jnp.ones((1, 4096))
    # The update is a fifth of the distance to the next number below one.
    step = functools.partial(update_table, config, table, state, unique, grads)
    moved, _ = step(2.0**-8 / 5, key=jax.random.key(0))
    assert moved.dtype == jnp.bfloat16
    np.testing.assert_allclose(
        jnp.mean(moved.astype(jnp.float32)), 1 - 2.0**-8 / 5, atol=2e-4
    )
    with pytest.raises(ValueError, match="needs a key"):
        step(0.1)


def test_cost_does_not_grow_with_the_table():
    """No temporary array of the table's size, and no pass over it."""
    config = TableOptimConfig()

    def compiled(num_rows):
        def step(table, state, ids, dy):
            plan = plan_rows(ids, num_rows, capacity=64)
            grads = jax.ops.segment_sum(dy, plan.slots, 64)
            return update_table(config, table, state, plan.unique, grads, LR)

        table = jax.ShapeDtypeStruct((num_rows, 8), jnp.float32)
        state = jax.eval_shape(functools.partial(init_table_state, config), table)
        ids = jax.ShapeDtypeStruct((64,), jnp.int32)
        dy = jax.ShapeDtypeStruct((64, 8), jnp.float32)
        return (
            jax.jit(step, donate_argnums=(0, 1)).lower(table, state, ids, dy).compile()
        )

    compiled_large = compiled(1_000_000)
    bytes_of = [c.memory_analysis() for c in (compiled(10_000), compiled_large)]
    table_bytes = 4 * 8 * 10_000
    assert bytes_of[0].temp_size_in_bytes < table_bytes / 4
    assert bytes_of[1].temp_size_in_bytes == bytes_of[0].temp_size_in_bytes
    # Table and both moments come out where they came in.
    aliased = 3 * 100 * table_bytes
    assert bytes_of[1].alias_size_in_bytes >= aliased
    # Nothing but scatters, each in a fusion of its own, gives an array of that size.
    made = re.findall(r"= \S*f32\[1000000,8\]\S* ([\w-]+)\(", compiled_large.as_text())
    assert {*made} == {"parameter", "scatter", "fusion"}
    assert made.count("fusion") == made.count("scatter") == 3


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"kind": "sgd"}, "kind is 'sgd'"),
        ({"b1": 1.0}, "b1 is 1.0"),
        ({"rounds": 4}, "rounds is 4"),
        ({"lr_factor": 0.0}, "lr_factor is 0.0"),
    ],
)
def test_configs_that_cannot_be(changes, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(TableOptimConfig(), **changes)
