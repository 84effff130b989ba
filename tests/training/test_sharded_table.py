"""A table cut over devices: lookups, gradients and a step equal to a whole table's."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding

from jaxaccel.core.sharded_rows import TableSharding, fetch_rows, look_up, pad_rows
from jaxaccel.core.sparse_rows import gather_rows, plan_rows, take_rows
from jaxaccel.training.sharded_table import update_sharded_table
from jaxaccel.training.sparse_table import (
    TableOptimConfig,
    init_table_state,
    update_table,
)


pytestmark = pytest.mark.usefixtures("quick_compile")

N, D, B, C, LR = 53, 3, 8, 5, 0.01
CONFIG = TableOptimConfig()


def sharding_of(parts, **changes):
    devices = np.asarray(jax.devices()[:parts], dtype=object)
    mesh = Mesh(devices, ("mem",), axis_types=(AxisType.Auto,))
    return TableSharding(mesh=mesh, axis="mem", num_rows=N, **changes)


def loss(rows, weights):
    return jnp.sum(jnp.tanh(rows) * weights)


@functools.cache
def dense_step():
    @jax.jit
    def step(table, state, ids, weights):
        plan = plan_rows(ids, N)
        rows = gather_rows(table, plan.unique)
        y = take_rows(rows, plan.slots)
        grads = jax.grad(lambda r: loss(take_rows(r, plan.slots), weights))(rows)
        return y, *update_table(CONFIG, table, state, plan.unique, grads, LR)

    return step


@functools.cache
def sharded_step(parts):
    sharding = sharding_of(parts)

    @jax.jit
    def step(table, state, ids, weights):
        fetched = fetch_rows(table, ids, sharding)
        slots = fetched.plan.slots
        grads = jax.grad(lambda r: loss(look_up(r, slots, sharding), weights))(
            fetched.rows
        )
        new = update_sharded_table(
            CONFIG, table, state, fetched.plan.unique, grads, jnp.float32(LR), sharding
        )
        return look_up(fetched.rows, slots, sharding), *new, fetched

    return step, sharding


def batches():
    """Even lookups, and those that overload an owner or a row."""
    rng = np.random.default_rng(0)
    spread = rng.permutation(np.arange(B * C) % N).reshape(B, C)
    return {
        "spread": spread,
        "one_owner": rng.integers(0, 7, (B, C)) + np.arange(B)[:, None] % 2,
        "one_row": np.full((B, C), N - 1),
        "first_and_last": np.where(rng.random((B, C)) < 0.5, 0, N - 1),
        "descending": (N - 1 - np.arange(B * C)).reshape(B, C),
    }


@pytest.mark.parametrize("parts", [1, 2, 4])
def test_equals_a_whole_table(parts):
    step, sharding = sharded_step(parts)
    rng = np.random.default_rng(1)
    table = jnp.asarray(rng.normal(size=(N, D)), jnp.float32)
    state = init_table_state(CONFIG, table)
    place = functools.partial(
        jax.device_put, device=NamedSharding(sharding.mesh, sharding.rows_spec)
    )
    cut = place(pad_rows(table, parts))
    assert cut.shape[0] == sharding.rows_per_part * parts >= N
    cut_state = init_table_state(CONFIG, cut)
    overflows = {}
    for name, ids in batches().items():
        ids = ids.astype(np.int32)
        weights = jnp.asarray(rng.normal(size=(B, C, D)), jnp.float32)
        want, table, state = dense_step()(table, state, ids, weights)
        got, cut, cut_state, fetched = step(cut, cut_state, place(ids), weights)
        overflows[name] = int(fetched.overflow)
        np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-6, err_msg=name)
        np.testing.assert_allclose(cut[:N], table, rtol=2e-5, atol=2e-5, err_msg=name)
        assert np.all(np.asarray(cut[N:]) == 0)
        np.testing.assert_allclose(
            cut_state.first[:N], state.first, rtol=1e-4, atol=1e-6
        )
        # Each row once for each device that reads it.
        counts = [len(np.unique(x)) for x in np.split(ids, parts)]
        assert fetched.plan.count.tolist() == counts
        assert int(np.sum(fetched.plan.num_missing)) == 0
    # Both ways were taken, and the second was counted.
    assert overflows["one_row"] == 0
    assert (overflows["one_owner"] > 0) == (parts == 4)
    # Under another number of devices the same rows are restored.
    kept = np.asarray(cut)[:N]
    for other in (1, 2, 4):
        np.testing.assert_array_equal(pad_rows(kept, other)[:N], kept)
        assert len(pad_rows(kept, other)) % other == 0


def test_rows_nobody_has_are_never_silent():
    step, _ = sharded_step(2)
    table = jnp.ones((N + 1, D))
    ids = np.zeros((B, C), np.int32)
    ids[0, 0], ids[7, 4] = N, -1  # N is a row of padding
    y, *_, fetched = step(
        table, init_table_state(CONFIG, table), ids, jnp.zeros((B, C, D))
    )
    missing = np.isnan(np.asarray(y)).all(axis=-1)
    np.testing.assert_array_equal(missing, (ids < 0) | (ids >= N))
    assert fetched.plan.num_missing.tolist() == [1, 1]


def test_what_cannot_be_is_said():
    sharding = sharding_of(2)
    ids = jnp.zeros((4, 1), jnp.int32)
    with pytest.raises(ValueError, match="53 rows over 2 devices are 54"):
        fetch_rows(jnp.zeros((N, D)), ids, sharding)
    with pytest.raises(ValueError, match="the batch is 3"):
        fetch_rows(jnp.zeros((N + 1, D)), ids[:3], sharding)
    with pytest.raises(ValueError, match="capacity=0"):
        sharding_of(2, capacity=0)
    with pytest.raises(ValueError, match="axis='data' is none"):
        TableSharding(mesh=sharding.mesh, axis="data", num_rows=N)
    sinkhorn = TableOptimConfig(kind="sinkhorn_momentum")
    with pytest.raises(ValueError, match="balances all rows"):
        update_sharded_table(
            sinkhorn,
            jnp.zeros((N + 1, D)),
            init_table_state(sinkhorn, jnp.zeros((N + 1, D))),
            ids[:, 0],
            jnp.zeros((4, D)),
            LR,
            sharding,
        )
