"""Experts on several devices equal experts on one: results and every gradient."""

import functools
import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxaccel.core.sharding import MeshConfig, make_mesh, parameter_shardings
from jaxaccel.core.tree import flatten_state, unflatten_state
from jaxaccel.data.batch import packing_metadata
from jaxaccel.nn import expert_parallel
from jaxaccel.nn.expert_parallel import (
    ExpertSharding,
    Route,
    choose_exchange,
    exchange_rows,
    routes,
    sharded_experts,
    traffic,
)
from jaxaccel.nn.experts import ExpertOps, ExpertWeights
from jaxaccel.nn.moe import MoE
from jaxaccel.nn.router import MoEConfig
from pallas_kernels._common.testing import assert_close


B, T, D, E, K = 8, 6, 8, 8, 3
# Rows 2 and 3 are short, row 5 is empty: devices have unequal numbers of tokens.
LENGTHS = np.array([6, 6, 2, 1, 6, 0, 5, 6])
SEGMENTS = (np.arange(T)[None, :] < LENGTHS[:, None]).astype(np.int32)


def config(exchange, capacity=0.0):
    return MoEConfig(
        num_experts=E,
        top_k=K,
        d_ff=12,
        d_latent=4,
        activation="relu2",
        score="sigmoid",
        scale=2.5,
        shared_d_ff=5,
        balance_loss_coef=0.1,
        expert_axis="fsdp" if exchange else "",
        expert_exchange=exchange or "auto",
        expert_capacity=capacity,
    )


@pytest.fixture(scope="module", autouse=True)
def quick_compile():
    """Without the expensive passes: compiling is what these tests spend time on."""
    # A GPU needs the passes that make a ragged exchange runnable.
    is_cpu = jax.default_backend() == "cpu"
    jax.config.update("jax_disable_most_optimizations", is_cpu)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture(scope="module")
def case(build):
    """(exchange, ...) -> (loss, report) and gradients; on eight devices if named."""
    meta = packing_metadata((B, T), segment_ids=jnp.asarray(SEGMENTS))
    x = jax.random.normal(jax.random.key(1), (B, T, D))
    probe = jax.random.normal(jax.random.key(2), x.shape)
    probe = jnp.where(meta.is_real[:, :, None], probe, 0.0)

    @functools.cache
    def run(exchange, capacity=0.0, backward=True):
        # The form that runs on CPUs, once; the other compiles sooner.
        name = "xla" if exchange == "allgather" else "reference"
        fields = config(exchange, capacity)
        layer = build(lambda rngs: MoE(fields, D, implementation=name, rngs=rngs))
        graphdef, params = nnx.split(layer)

        def loss(params, x):
            layer = nnx.merge(graphdef, params)
            y, aux = layer(x, meta)
            ids = layer.router(x, meta.is_real).expert_ids
            return jnp.sum(y * probe) + aux.balance_loss, (aux, y, ids)

        if backward:
            step = jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))
        else:
            step = jax.jit(lambda params, x: (loss(params, x), ()))
        if not exchange:
            return step(params, x)
        with jax.set_mesh(make_mesh(MeshConfig(data=2, fsdp=4))):
            return step(params, x)

    return run


@pytest.mark.parametrize("exchange", ["allgather", "all_to_all"])
def test_equals_one_device_with_gradients(case, exchange):
    (want, (want_aux, *_)), want_grads = case("")
    (got, (aux, *_)), grads = case(exchange)
    assert_close(got, want, rel=1e-5)
    np.testing.assert_array_equal(aux.counts, want_aux.counts)
    assert int(aux.counts.sum()) == K * LENGTHS.sum()
    assert int(aux.overflow) == 0
    leaves = [dict(jax.tree_util.tree_leaves_with_path(g)) for g in (grads, want_grads)]
    assert len(leaves[1]) == 8
    for path, leaf in leaves[1].items():
        assert_close(leaves[0][path], leaf, rel=1e-5, name=jax.tree_util.keystr(path))


def test_rows_that_do_not_divide_are_computed_without_an_exchange(build, caplog):
    """One row, as a sample has, on four devices; no capacity drops any of it."""
    x, meta = jax.random.normal(jax.random.key(1), (1, T, D)), packing_metadata((1, T))
    fields = config("allgather", 0.5)
    layer = build(lambda rngs: MoE(fields, D, implementation="reference", rngs=rngs))
    graphdef, params = nnx.split(layer)

    def run(params, x):
        return nnx.merge(graphdef, params)(x, meta)

    want, want_aux = jax.jit(run)(params, x)
    expert_parallel.say_indivisible.cache_clear()
    mesh = make_mesh(MeshConfig(fsdp=4))
    arrays = flatten_state(params)
    arrays = jax.device_put(arrays, parameter_shardings(arrays, mesh))
    params = unflatten_state(params, arrays)
    with jax.set_mesh(mesh), caplog.at_level(logging.INFO, logger="jaxaccel"):
        got, aux = jax.jit(run)(params, x)
        jax.eval_shape(run, params, x)  # traced again
    assert_close(got, want, rel=1e-5)
    np.testing.assert_array_equal(aux.counts, want_aux.counts)
    assert int(aux.overflow) == 0
    (record,) = caplog.records
    assert "1 rows do not divide over 4 devices" in record.getMessage()


@pytest.mark.parametrize("exchange", ["allgather", "all_to_all"])
def test_what_finds_no_room_is_dropped_and_counted(case, exchange):
    """A device has room for half of an even share: 9 rows of its 2 experts."""
    _, (_, whole, ids) = case("")[0]
    (_, (aux, y, _)), _ = case(exchange, 0.5, backward=False)
    room, lost, touched = int(0.5 * T * K), 0, np.zeros((B, T), bool)
    for first in (0, 4):  # the devices that share experts have a row each
        found = list(np.ndenumerate(np.asarray(ids)[first : first + 4]))
        for device in range(4):
            rows = [(s, t, e) for (s, t, _), e in found if e // 2 == device]
            # By gathering, those of all senders are sorted by expert together.
            by_expert = exchange == "allgather"
            rows.sort(key=lambda r: (r[2], r[0], r[1]) if by_expert else (r[0], r[2]))
            lost += len(rows[room:])
            for sender, token, _ in rows[room:]:
                touched[first + sender, token] = True
    assert 0 < lost == int(aux.overflow)
    np.testing.assert_array_equal(aux.counts, case("")[0][1][0].counts)
    same = np.isclose(y, whole, rtol=1e-5, atol=1e-5).all(axis=-1)
    np.testing.assert_array_equal(~same, touched)
    assert np.isfinite(y).all()


# Rows that each of three devices has for each: asymmetric, with empty slices.
COUNTS = np.array([[1, 2, 0], [0, 3, 1], [2, 0, 2]], np.int32)


@pytest.mark.parametrize("room", [8, 4])
def test_rows_arrive_in_the_senders_order(room):
    """Each row carries (sender, its place there); gradients take the way back."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:3]), ("expert",))
    sent = np.full((3, 5, 2), -1.0, np.float32)
    for device, total in enumerate(COUNTS.sum(1)):
        sent[device, :total] = [(device, place) for place in range(total)]

    def part(x, dy):
        there, back = routes(COUNTS, room, jax.lax.axis_index("expert"))
        y, pull = jax.vjp(
            lambda x: exchange_rows("all_to_all", "expert", room, x, there, back), x[0]
        )
        return y[None], pull(dy[0])[0][None]

    spec = jax.sharding.PartitionSpec("expert")
    run = jax.shard_map(part, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    tags = np.arange(1, 1 + 3 * room, dtype=np.float32).reshape(3, room)
    y, dx = jax.jit(run)(sent, np.stack([tags, tags], axis=-1))
    starts = np.cumsum(COUNTS, axis=1) - COUNTS
    want_dx = np.zeros((3, 5), np.float32)
    for device in range(3):
        rows = [
            (sender, starts[sender, device] + i)
            for sender in range(3)
            for i in range(COUNTS[sender, device])
        ][:room]
        np.testing.assert_array_equal(y[device, : len(rows)], rows)
        assert not np.any(y[device, len(rows) :])
        for place, (sender, row) in enumerate(rows):
            want_dx[sender, row] = tags[device, place]
    np.testing.assert_array_equal(dx[..., 0], want_dx)


def test_routes_tell_places_on_the_receiver():
    there, back = routes(jnp.asarray(COUNTS), 8, jnp.asarray(2))
    want = Route(start=[0, 2, 2], size=[2, 0, 2], place=[1, 5, 1], received=[0, 1, 2])
    assert jax.tree.map(lambda a: a.tolist(), there) == want
    # Back to where each sender's slice for device 2 began.
    want = Route(start=[0, 0, 1], size=[0, 1, 2], place=[3, 3, 2], received=[2, 0, 2])
    assert jax.tree.map(lambda a: a.tolist(), back) == want


def _sharding(exchange, devices=4):
    devices = np.array(jax.devices()[:devices])
    return ExpertSharding(
        mesh=jax.sharding.Mesh(devices, ("expert",)),
        axis="expert",
        batch_axes=("expert",),
        exchange=exchange,
    )


def _shapes(dtype=jnp.float32, batch=4, time=2):
    shape = jax.ShapeDtypeStruct
    experts = ExpertWeights(shape((E, D, 2 * D), dtype), shape((E, 2 * D, D), dtype))
    return (
        shape((batch, time, D), dtype),
        shape((batch, time, K), jnp.float32),
        shape((batch, time, K), jnp.int32),
        experts,
    )


def test_the_ragged_exchange_lowers_for_gpus(monkeypatch):
    """XLA has it for GPUs only; "all_to_all" above follows the same routes on CPUs."""
    ops = ExpertOps(activation="relu2", dtype=jnp.float32)
    sharding = _sharding("ragged_all_to_all")
    with pytest.raises(NotImplementedError, match="cannot run on 'cpu'"):
        jax.eval_shape(lambda *a: sharded_experts(sharding, ops, *a), *_shapes())
    monkeypatch.setattr(expert_parallel, "_RAGGED_BACKENDS", ("cpu",))

    def step(h, weights, ids, experts):
        def loss(h, weights, experts):
            y, *_ = sharded_experts(sharding, ops, h, weights, ids, experts)
            return jnp.sum(y)

        return jax.grad(loss, argnums=(0, 1, 2))(h, weights, experts)

    text = jax.jit(step).trace(*_shapes()).lower(lowering_platforms=("cuda",)).as_text()
    # Rows and weights there; the gradients of rows back, rows there and weights there.
    assert text.count("@ragged_all_to_all(") == 5
    assert "@all_to_all(" not in text


def test_the_exchange_that_moves_less_is_taken_and_said_once(caplog):
    """Nemotron 3 Super on two devices: 22 experts a token, 8192 tokens a device."""
    sizes = {"tokens": 8192, "slots": 22, "width": 1024, "itemsize": 2}
    moved = traffic(devices=2, **sizes)
    assert moved.allgather == 2 * 16_777_216 + 8 * 22 * 8192
    assert moved.ragged_all_to_all == 2 * 184_549_376 + 4 * 22 * 8192 // 2
    expert_parallel._announce.cache_clear()
    with caplog.at_level(logging.INFO, logger="jaxaccel"):
        for _ in range(2):
            assert choose_exchange(_sharding("auto", 2), **sizes) == "allgather"
    (record,) = caplog.records
    for part in ("2 devices", "35.00 MB", "369.46 MB", "takes allgather"):
        assert part in record.getMessage()


def test_bytes_of_parameters_are_said_once(caplog):
    ops = ExpertOps(activation="relu2", dtype=jnp.float32)
    run = functools.partial(sharded_experts, _sharding("allgather"), ops)
    expert_parallel._announce_parameters.cache_clear()
    with caplog.at_level(logging.INFO, logger="jaxaccel"):
        for time in (2, 3):
            jax.eval_shape(run, *_shapes(time=time))
    # Eight experts of two f32[8, 16] over four devices.
    assert caplog.text.count("0.002 MB of parameters on each") == 1


def test_few_experts_a_token_on_many_devices_are_sent(monkeypatch, caplog):
    sizes = {"tokens": 64, "slots": 1, "width": 8, "itemsize": 4}
    sharding = _sharding("auto", 8)
    with caplog.at_level(logging.INFO, logger="jaxaccel"):
        assert choose_exchange(sharding, **sizes) == "allgather"
    assert "does not run on cpu" in caplog.text
    monkeypatch.setattr(expert_parallel, "_RAGGED_BACKENDS", ("cpu",))
    assert choose_exchange(sharding, **sizes) == "ragged_all_to_all"


def test_errors_name_the_value():
    with pytest.raises(ValueError, match="axis='tensor'"):
        ExpertSharding(mesh=None, axis="tensor", batch_axes=("data",))
    with pytest.raises(ValueError, match="exchange='ring'"):
        ExpertSharding(mesh=None, axis="data", batch_axes=("data",), exchange="ring")
    ops = ExpertOps(activation="relu2", dtype=jnp.float32)
    run = functools.partial(sharded_experts, _sharding("allgather", 3), ops)
    with pytest.raises(ValueError, match=r"num_experts is 8.*or expert_axis"):
        jax.eval_shape(run, *_shapes(batch=3))
    run = functools.partial(sharded_experts, _sharding("allgather"), ops)
    with pytest.raises(ValueError, match=r"batch rows is 3.*number of rows"):
        jax.eval_shape(run, *_shapes(batch=3))


@pytest.mark.gpu
def test_the_ragged_exchange_equals_the_one_by_blocks_on_the_card():
    """On all devices that there are; on two and more, rows change devices."""
    devices = min(1 << (len(jax.devices()).bit_length() - 1), E)
    ops = ExpertOps(activation="relu2", dtype=jnp.float32)
    keys = jax.random.split(jax.random.key(0), 5)
    h_shape, weights_shape, _, experts_shape = _shapes(batch=8, time=16)
    h = jax.random.normal(keys[0], h_shape.shape)
    weights = jax.random.uniform(keys[1], weights_shape.shape)
    _, ids = jax.lax.top_k(jax.random.uniform(keys[2], (8, 16, E)), K)
    experts = ExpertWeights(
        jax.random.normal(keys[3], experts_shape.w_in.shape),
        jax.random.normal(keys[4], experts_shape.w_out.shape),
    )

    def step(exchange):
        sharding = _sharding(exchange, devices)

        def loss(h, weights, experts):
            y, *_ = sharded_experts(sharding, ops, h, weights, ids, experts)
            return jnp.sum(jnp.sin(y)), y

        gradient = jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True)
        return jax.jit(gradient)(h, weights, experts)

    got, want = step("ragged_all_to_all"), step("all_to_all")
    jax.tree.map(functools.partial(assert_close, rel=1e-5), got, want)
