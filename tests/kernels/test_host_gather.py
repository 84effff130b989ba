"""`host_gather`: every form against NumPy, the kernel in the interpreter."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import host_gather
from pallas_kernels._common import bench, hw, indexed
from pallas_kernels._common.interpret import interpreted
from pallas_kernels.host_gather import api, config, kernel, specs


CI = {spec.name: spec for spec in specs.specs("ci")}
MODEL = {spec.name: spec for spec in specs.specs("model")}


def expected(table, ids):
    ids = np.asarray(ids)
    is_row = (ids >= 0) & (ids < len(table))
    rows = table[np.where(is_row, ids, 0)]
    return np.where(is_row[..., None], rows, np.zeros((), table.dtype))


def result(table, ids, implementation):
    return jax.jit(functools.partial(host_gather, implementation=implementation))(
        table, ids
    )


@pytest.mark.parametrize("name", CI)
def test_every_form_gives_the_rows(name):
    spec = CI[name]
    ids, table = spec.ids(jax.random.key(0)), spec.table()
    want = expected(table, ids)
    assert spec.missing != want.reshape(-1, spec.dim).any(axis=1).all()
    with interpreted():
        for implementation in ("reference", "xla", "mosaic"):
            got = result(jnp.asarray(table), ids, implementation)
            assert got.dtype == spec.dtype
            np.testing.assert_array_equal(np.asarray(got), want, implementation)


@pytest.mark.parametrize("implementation", ["reference", "xla"])
def test_a_table_in_the_host_s_memory_gives_rows_on_the_device(implementation):
    spec = CI["ci_512_bytes"]
    table, ids = spec.arguments(jax.random.key(1))
    assert table.sharding.memory_kind == "pinned_host"
    got = result(table, ids, implementation)
    assert got.sharding.memory_kind == "device"
    np.testing.assert_array_equal(np.asarray(got), expected(spec.table(), ids))


def test_it_is_measured_with_the_table_on_the_host():
    """The reference is compiled before there is a result to compare with."""
    case = next(iter(specs.bench_cases("ci")))
    limits = bench.Ceilings(gbps=1000.0, tflops=10.0)
    (row,) = bench.measure_case(case, limits, [], ["xla"])
    assert row["ms"] > 0, row["note"]


@pytest.mark.parametrize(
    "reading",
    [
        config.Config(blocks=1, rows=1),
        config.Config(blocks=3, rows=2),
        config.Config(blocks=64, rows=16),
    ],
    ids=str,
)
def test_any_number_of_blocks_and_rows(monkeypatch, reading):
    monkeypatch.setattr(config, "pick", lambda *_: reading)
    spec = CI["ci_512_bytes"]
    ids, table = spec.ids(jax.random.key(2)), spec.table()
    with interpreted():
        got = result(jnp.asarray(table), ids, "mosaic")
    np.testing.assert_array_equal(np.asarray(got), expected(table, ids))


@pytest.mark.parametrize(
    "spec",
    [*specs.specs("perf"), *specs.specs("model"), *specs.specs("ci")],
    ids=lambda spec: f"{spec.tag}-{spec.name}",
)
def test_lowers_for_the_card_with_the_table_on_the_host(spec):
    place = jax.sharding.SingleDeviceSharding(
        jax.devices()[0], memory_kind="pinned_host"
    )
    table = jax.ShapeDtypeStruct(
        (spec.num_rows, spec.dim), jnp.dtype(spec.dtype), sharding=place
    )
    ids = jax.ShapeDtypeStruct(spec.lookups, jnp.int32)
    with hw.assume():
        step = jax.jit(functools.partial(host_gather, implementation="mosaic"))
        text = step.trace(table, ids).lower(lowering_platforms=("cuda",)).as_text()
    assert "pk_host_gather" in text


NO_ROWS = [-1, 4, -(2**31), 2**31 - 1, -2]


@pytest.mark.parametrize("dim", [128, 80])
def test_what_is_no_row_gives_zeros(dim):
    spec = specs.Spec(
        name="none", tag="ci", num_rows=4, dim=dim, lookups=(9,), dtype="bfloat16"
    )
    table = jnp.asarray(spec.table())
    ids = jnp.array([3, *NO_ROWS, 0, 2, -1], jnp.int32)
    with interpreted():
        got = result(table, ids, "mosaic")
    np.testing.assert_array_equal(np.asarray(got), expected(spec.table(), ids))


def test_what_is_no_row_is_not_read():
    """Of a table without rows the interpreter refuses any read."""
    table, ids = jnp.zeros((0, 128), jnp.bfloat16), jnp.array(NO_ROWS, jnp.int32)
    with interpreted():
        got = kernel.host_gather(config.Config(blocks=2, rows=1), table, ids)
    assert got.shape == (5, 128)
    assert not np.asarray(got).any()


def test_no_piece_of_what_is_no_row_is_read(monkeypatch):
    """The reads give 1 for each piece that is left out, and 0 for one that is read."""
    take = indexed.take

    def told(ref, indices, width=None, *, where=None, **named):
        if width is None:
            return take(ref, indices, where=where, **named)
        assert where is not None
        left_out = jnp.where(where, 0, 1).astype(ref.dtype)
        return jnp.broadcast_to(left_out[:, None], (*left_out.shape, width))

    monkeypatch.setattr(indexed, "take", told)
    ids = jnp.array([3, *NO_ROWS, 0, 2, -1], jnp.int32)
    with interpreted():
        got = result(jnp.zeros((4, 80), jnp.bfloat16), ids, "mosaic")
    is_row = (np.asarray(ids) >= 0) & (np.asarray(ids) < 4)
    want = np.broadcast_to(~is_row[:, None], got.shape)
    np.testing.assert_array_equal(np.asarray(got) == 1, want)


def test_rows_on_their_way_fill_the_registers_at_most():
    for dim in (128, 512, 1024, 4096, 8192):
        picked = config.heuristic(dim, "int16")
        assert picked.rows == 1 or picked.rows * 2 * dim <= config.FLIGHT_BYTES


@pytest.mark.parametrize(
    ("table", "ids", "message"),
    [
        (jnp.ones(7), jnp.zeros(3, jnp.int32), r"float32\[7\]"),
        (jnp.ones((7, 128)), jnp.zeros(3), "float32"),
    ],
)
def test_caller_errors_name_the_value(table, ids, message):
    with pytest.raises(ValueError, match=message):
        host_gather(table, ids)


@pytest.mark.parametrize(
    ("shape", "dtype", "lookups", "message"),
    [
        ((7, 80), "uint8", 3, "rows of 80 uint8"),
        ((7, 5), "bfloat16", 3, "rows of 5 bfloat16"),
        ((7, 16384), "bfloat16", 3, "32768 bytes"),
        ((0, 128), "float32", 3, "0 rows"),
        ((7, 128), "float32", 0, "0 lookups"),
    ],
)
def test_what_the_kernel_cannot_do_is_said(shape, dtype, lookups, message):
    table = jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))
    ids = jax.ShapeDtypeStruct((lookups,), jnp.int32)
    with hw.assume(), pytest.raises(NotImplementedError, match=message):
        api.choose(table, ids, implementation="mosaic")


def test_none_takes_the_kernel_for_what_is_on_the_host():
    ids, table = jnp.zeros((3,), jnp.int32), jnp.zeros((7, 128))
    place = jax.sharding.SingleDeviceSharding(
        jax.devices()[0], memory_kind="pinned_host"
    )
    with hw.assume():
        struct = jax.ShapeDtypeStruct(table.shape, table.dtype, sharding=place)
        for on_host in (jax.device_put(table, place), struct):
            assert api.choose(on_host, ids).implementation == "mosaic"
        case = next(iter(specs.bench_cases("perf")))
        assert case.picked().startswith("Config(")
        choice = api.choose(table, ids)
    assert choice.implementation == "xla"
    assert "on the device" in choice.refused["mosaic"]


def test_impossible_ways_to_read_are_refused():
    with pytest.raises(ValueError, match="allowed are"):
        config.Config(rows=129)
    with pytest.raises(ValueError, match="allowed are"):
        config.Config(blocks=0)


@pytest.mark.gpu
@pytest.mark.parametrize("name", [*CI, *MODEL])
def test_the_kernel_on_the_card(name):
    spec = (CI | MODEL)[name]
    table, ids = spec.arguments(jax.random.key(3))
    want = expected(spec.table(), ids)
    step = jax.jit(functools.partial(host_gather, implementation="mosaic"))
    for _ in range(20):
        got = step(table, ids)
        assert got.sharding.memory_kind == "device"
        np.testing.assert_array_equal(np.asarray(got), want)
