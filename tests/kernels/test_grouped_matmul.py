"""`grouped_matmul`: tiles and tasks against a loop over experts."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params

from pallas_kernels._common.testing import assert_close
from pallas_kernels.grouped_matmul import api, grouped_matmul, specs, xla
from pallas_kernels.grouped_matmul.config import Config, heuristic


# The sizes named for the kernels are those of the kernels' own tests.
CI = {s.name: s for s in specs.specs("ci") if not s.name.startswith("ci_kernel")}

# Compiling is most of what these tests would do; speed of the result is not tested.
jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})


@functools.cache
def compiled(spec, implementation):
    op = functools.partial(grouped_matmul, implementation=implementation)
    return jit(specs.run(spec, op, backward=True))


@functools.cache
def _drawn(spec):
    return jit(spec.arguments)(jax.random.key(0))


def arguments(spec):
    return [np.array(a) for a in _drawn(spec)]


def by_hand(x, w, sizes, dy):
    """y, dx, dw expert by expert in float64."""
    x, w, dy = (a.astype(np.float64) for a in (x, w, dy))
    y, dx, dw = np.zeros_like(dy), np.zeros_like(x), np.zeros_like(w)
    start = 0
    for expert, size in enumerate(sizes):
        rows = slice(start, start + size)
        y[rows], dx[rows] = x[rows] @ w[expert], dy[rows] @ w[expert].T
        dw[expert] = x[rows].T @ dy[rows]
        start += size
    return y, dx, dw


@pytest.mark.parametrize("implementation", ["reference", "xla"])
# The others are routings of `test_one_compilation_serves_every_routing`.
@pytest.mark.parametrize("name", ["ci_one_expert", "ci_tail", "ci_mixed", "ci_bf16"])
def test_equals_float64(name, implementation):
    spec = CI[name]
    args = arguments(spec)
    got = compiled(spec, implementation)(*args)
    for label, a, b in zip(("y", "dx", "dw"), got, by_hand(*args), strict=True):
        assert_close(a, b, name=label, rel=2e-6 if spec.dtype == "float32" else None)
    y, dx, dw = (np.asarray(a) for a in got)
    routed = sum(spec.sizes)
    assert not np.any(y[routed:])
    assert not np.any(dx[routed:])
    assert not np.any(dw[np.array(spec.sizes) == 0])


CUTS = (
    Config(tile=16, slab=1, window=1, experts=1, overflow=8),
    Config(tile=16, slab=3, window=16, experts=2, overflow=16),
    Config(tile=32, slab=64, window=31, experts=8, overflow=64),
    Config(tile=256, slab=2, window=256, experts=4),
)


@pytest.mark.parametrize("config", CUTS, ids=lambda config: f"window{config.window}")
def test_how_it_is_cut_changes_nothing(config, monkeypatch):
    spec = CI["ci_mixed"]
    args = arguments(spec)
    monkeypatch.setattr(api, "heuristic", lambda **_: config)
    got = jit(specs.run(spec, grouped_matmul, backward=True))(*args)
    for a, b in zip(got, by_hand(*args), strict=True):
        assert_close(a, b, rel=2e-6)


@pytest.mark.parametrize("implementation", ["reference", "xla"])
def test_nan_of_one_expert_stays_there(implementation):
    """Rows, weights and rows behind the last expert, each in turn."""
    spec = CI["ci_mixed"]
    run = compiled(spec, implementation)
    x, w, sizes, dy = arguments(spec)
    want = [np.asarray(a) for a in run(x, w, sizes, dy)]
    ends = np.cumsum(sizes)
    owner = np.searchsorted(ends, np.arange(spec.rows), side="right")

    bad = x.copy()
    bad[ends[1] - 1] = np.nan  # The last row of expert 1, in one tile with expert 2.
    y, dx, dw = (np.asarray(a) for a in run(bad, w, sizes, dy))
    np.testing.assert_array_equal(
        np.delete(dw, 1, axis=0), np.delete(want[2], 1, axis=0)
    )
    np.testing.assert_array_equal(
        np.delete(y, ends[1] - 1, axis=0), np.delete(want[0], ends[1] - 1, axis=0)
    )
    np.testing.assert_array_equal(dx, want[1])
    assert np.isnan(dw[1]).all()

    bad = w.copy()
    bad[[0, 2]] = np.nan  # Expert 0 has no rows.
    y, dx, dw = (np.asarray(a) for a in run(x, bad, sizes, dy))
    np.testing.assert_array_equal(y[owner != 2], want[0][owner != 2])
    np.testing.assert_array_equal(dx[owner != 2], want[1][owner != 2])
    np.testing.assert_array_equal(dw, want[2])

    bad_x, bad_dy = x.copy(), dy.copy()
    bad_x[ends[-1] :] = bad_dy[ends[-1] :] = np.nan
    for a, b in zip(run(bad_x, w, sizes, bad_dy), want, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("implementation", ["reference", "xla"])
def test_one_compilation_serves_every_routing(implementation):
    """All to one, none routed and one row each among them."""
    spec = CI["ci_tail"]
    run = compiled(spec, implementation)
    x, w, _, dy = arguments(spec)
    before = run._cache_size()
    routings = ((0, 0, 133), (133, 0, 0), (0, 0, 0), (1, 1, 1), (1, 131, 1))
    for sizes in (*routings, (44, 44, 45), (0, 7, 100)):
        sizes = np.array(sizes, np.int32)
        got = [np.asarray(a) for a in run(x, w, sizes, dy)]
        for a, b in zip(got, by_hand(x, w, sizes, dy), strict=True):
            assert_close(a, b, rel=2e-6)
        for a in got[:2]:
            assert not np.any(a[sizes.sum() :])
        assert not np.any(got[2][sizes == 0])
    assert run._cache_size() <= before + 1


def test_twice_the_same_bits():
    args = arguments(CI["ci_mixed"])
    first, second = (compiled(CI["ci_mixed"], "xla")(*args) for _ in range(2))
    for a, b in zip(first, second, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("implementation", ["reference", "xla"])
def test_squared_relu_and_its_gradients(implementation):
    spec = CI["ci_tail"]
    x, w, sizes, da = arguments(spec)
    op = functools.partial(
        grouped_matmul, activation="relu2", implementation=implementation
    )
    a, dx, dw = jit(specs.run(spec, op, backward=True))(x, w, sizes, da)
    z = np.maximum(by_hand(x, w, sizes, da)[0], 0.0)
    _, want_dx, want_dw = by_hand(x, w, sizes, 2.0 * z * da)
    for label, got, want in (("a", a, z**2), ("dx", dx, want_dx), ("dw", dw, want_dw)):
        assert_close(got, want, name=label, rel=2e-6)


def test_result_dtype():
    x, w, sizes, _ = arguments(CI["ci_bf16"])
    y = jit(functools.partial(grouped_matmul, preferred_element_type=jnp.float32))(
        x, w, sizes
    )
    assert y.dtype == jnp.float32
    assert_close(y, by_hand(x, w, sizes, np.zeros(y.shape))[0])


def _equations(jaxpr):
    for equation in jaxpr.eqns:
        yield equation
        for inner in jaxprs_in_params(equation.params):
            yield from _equations(inner)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_nothing_is_as_large_as_rows_times_experts(dtype):
    """And nothing adds floats in an order that a scatter would choose."""
    spec = specs.Spec(
        name="many",
        tag="ci",
        rows=4096,
        in_dim=64,
        out_dim=64,
        experts=64,
        dtype=dtype,
    )
    shapes = jax.eval_shape(spec.arguments, jax.random.key(0))
    op = functools.partial(grouped_matmul, implementation="xla")
    jaxpr = jax.make_jaxpr(specs.run(spec, op, backward=True))(*shapes)
    equations = list(_equations(jaxpr.jaxpr))
    sizes = [v.aval.size for e in equations for v in e.outvars]
    assert max(sizes) < spec.rows * spec.experts * 64 // 4
    assert not [e for e in equations if e.primitive.name.startswith("scatter")]


def test_every_row_has_a_task_of_its_expert():
    """In the static table, whatever the sizes."""
    rng = np.random.default_rng(0)
    config = Config(tile=16, slab=4)
    build = jit(lambda sizes: xla._tasks(sizes, 100, config))
    for _ in range(20):
        sizes = rng.multinomial(rng.integers(0, 101), rng.dirichlet(np.full(7, 0.3)))
        tasks = jax.tree.map(np.asarray, build(sizes.astype(np.int32)))
        row = np.arange(100)
        np.testing.assert_array_equal(tasks.routed, row < sizes.sum())
        row, task = row[tasks.routed], tasks.task[tasks.routed]
        place = tasks.place[tasks.routed]
        np.testing.assert_array_equal(tasks.tile[task] * 16 + place, row)
        owner = np.repeat(np.arange(7), sizes)
        np.testing.assert_array_equal(tasks.expert[task], owner)
        assert np.all(np.diff(tasks.expert) >= 0)


def test_heuristic_bounds_what_is_alive_at_a_time():
    sizes = {"rows": 81920, "in_dim": 2048, "out_dim": 1024, "itemsize": 2}
    config = heuristic(experts=512, **sizes)
    assert config.tile == 128
    assert config.slab * 2048 * 1024 * 4 <= 64 * 2**20
    # 160 rows on average: a batch covers them and four standard deviations.
    assert 160 + 4 * 160**0.5 <= config.window + 4 <= 160 * 1.5
    gradients = config.experts * (2048 * 1024 * 4 + config.window * (2048 + 1024) * 2)
    assert 128 * 2**20 <= gradients <= 256 * 2**20
    assert 512 % config.experts == 0
    assert heuristic(experts=7, **sizes | {"rows": 700}).experts == 7
    assert heuristic(experts=8, **sizes | {"in_dim": 2**16}).experts == 1
    assert heuristic(experts=1, **sizes | {"rows": 2**20}).window == 2**14


@pytest.mark.parametrize("backward", [False, True])
def test_lowers_for_cuda(backward):
    spec = next(specs.specs("perf"))
    shapes = jax.eval_shape(spec.arguments, jax.random.key(0))
    op = functools.partial(grouped_matmul, implementation="xla")
    run = jax.jit(specs.run(spec, op, backward))
    run.trace(*shapes).lower(lowering_platforms=("cuda",))


def test_errors_name_the_value():
    x, w, sizes, _ = arguments(CI["ci_tail"])
    with pytest.raises(ValueError, match="expected \\[M, K\\] and"):
        grouped_matmul(x[:, :3], w, sizes)
    with pytest.raises(ValueError, match="activation is 'gelu'"):
        grouped_matmul(x, w, sizes, activation="gelu")
    with pytest.raises(ValueError, match="w has dtype float16"):
        grouped_matmul(x, w.astype(np.float16), sizes)
    with pytest.raises(ValueError, match="group_sizes is int64"):
        grouped_matmul(x, w, sizes.astype(np.int64))
