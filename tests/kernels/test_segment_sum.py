"""`segment_sum`: every form against float64, the kernel in the interpreter."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import segment_sum
from pallas_kernels._common import hw
from pallas_kernels._common.interpret import interpreted
from pallas_kernels._common.testing import assert_close
from pallas_kernels.segment_sum import api, config, sort_ids, specs


CI = {spec.name: spec for spec in specs.specs("ci")}
MODEL = {spec.name: spec for spec in specs.specs("model")}


@functools.cache
def arguments(spec):
    """As `spec.arguments` draws them, without a program."""
    draw = np.random.default_rng(0)
    values, ids, dy = jax.eval_shape(spec.arguments, jax.random.key(0))
    top = spec.num_segments - 1
    share = draw.random(spec.count)
    number = {
        "equal": np.full(spec.count, top // 2),
        "uniform": np.floor(share * spec.num_segments),
        "skewed": np.floor(spec.num_segments**share) - 1,
    }[spec.ids].clip(0, top)
    away = draw.random(spec.count) < spec.dropped
    number = np.where(away, np.where(number % 2 == 0, -1, spec.num_segments), number)
    values, dy = (jnp.asarray(draw.normal(size=x.shape), x.dtype) for x in (values, dy))
    return values, jnp.asarray(number, ids.dtype), dy


def expected(values, ids, num_segments):
    """The sums in float64."""
    values, ids = np.asarray(values).astype(np.float64), np.asarray(ids)
    total = np.zeros((num_segments, values.shape[1]))
    kept = (ids >= 0) & (ids < num_segments)
    np.add.at(total, ids[kept], values[kept])
    return total


def results(spec, args, *implementations):
    """Of each implementation, by one program."""
    ops = [functools.partial(segment_sum, implementation=x) for x in implementations]

    @jax.jit
    def all_of_them(args):
        return [specs.run(spec, op, backward=True)(*args) for op in ops]

    return all_of_them(args)


def assert_results(spec, args, got):
    values, ids, dy = args
    y, dvalues = got
    assert y.dtype == jnp.float32
    assert_close(y, expected(values, ids, spec.num_segments), name="y")
    ids, dy = np.asarray(ids), np.asarray(dy)
    kept = (ids >= 0) & (ids < spec.num_segments)
    want = np.where(kept[:, None], dy[np.where(kept, ids, 0)], 0.0)
    assert_close(dvalues, want, name="dvalues")


@functools.cache
def every_form(spec):
    """Results by implementation."""
    names = ("reference", "xla", "mosaic")
    with interpreted():
        found = results(spec, arguments(spec), *names)
    return dict(zip(names, found, strict=True))


@pytest.mark.parametrize("name", CI)
def test_every_form_gives_the_sums_and_their_gradient(name):
    spec = CI[name]
    for got in every_form(spec).values():
        assert_results(spec, arguments(spec), got)


RUNS = {
    "one run over all strips": [0] * 9,
    "a run that begins and ends inside strips": [0, 1, 1, 1, 1, 1, 1, 2, 2],
    "runs as long as strips": [3, 3, 3, 3, 0, 0, 0, 0, 1],
    "sums without rows, rows without sums": [2, 2, 5, 5, 5, 5, 5, -1, 6],
    "no sums": [-1] * 9,
    "runs of one": list(range(9)),
}


@pytest.mark.parametrize(
    "tiling",
    [config.Config(positions=4, unroll=4), config.Config(positions=2, unroll=1)],
    ids=str,
)
def test_runs_of_every_kind_over_strips(monkeypatch, tiling):
    monkeypatch.setattr(config, "pick", lambda *_: tiling)
    values = jax.random.normal(jax.random.key(1), (9, 2))
    step = jax.jit(lambda v, i: segment_sum(v, i, 6, implementation="mosaic"))
    with interpreted():
        for name, run in RUNS.items():
            ids = jnp.array(run, jnp.int32)
            got = step(values, ids)
            assert_close(got, expected(values, ids, 6), name=name)
            untouched = ~np.isin(np.arange(6), run)
            assert not np.asarray(got)[untouched].any(), name


def test_a_nan_stays_in_its_sum():
    values, ids = np.ones((40, 4), np.float32), np.arange(40, dtype=np.int32) // 4
    values[17] = np.nan
    step = jax.jit(lambda v, i: segment_sum(v, i, 10, implementation="mosaic"))
    with interpreted():
        got = step(values, ids)
    bad = np.isnan(np.asarray(got)).all(axis=1)
    assert bad.tolist() == [k == 4 for k in range(10)]
    np.testing.assert_array_equal(np.asarray(got)[~bad], 4.0)


@pytest.mark.parametrize("implementation", ["xla", "mosaic"])
def test_an_order_is_shared(implementation):
    spec = CI["ci_f16"]
    values, ids, _ = arguments(spec)
    order = sort_ids(ids, spec.num_segments)
    run = functools.partial(
        segment_sum, values, ids, spec.num_segments, implementation=implementation
    )
    with interpreted():
        got = jax.jit(lambda order: run(order=order))(order)
        np.testing.assert_array_equal(got, every_form(spec)[implementation][0])
        with pytest.raises(ValueError, match=r"expected \[64\]"):
            run(order=sort_ids(ids[:7], 3))


def lowered(spec):
    args = jax.eval_shape(spec.arguments, jax.random.key(0))
    op = functools.partial(segment_sum, implementation="mosaic")
    step = jax.jit(specs.run(spec, op))
    text = step.trace(*args).lower(lowering_platforms=("cuda",)).as_text()
    return text.count("pk_segment_sum")


@pytest.mark.parametrize(
    "spec",
    # What the ids are is no part of the program.
    [*(x for x in specs.specs("perf") if x.ids != "uniform"), CI["ci_f16"]],
    ids=lambda spec: f"{spec.tag}-{spec.name}",
)
def test_lowers_for_the_card_at_every_size(spec):
    with hw.assume():
        assert lowered(spec)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"values": jnp.ones(3)}, r"float32\[3\]"),
        ({"values": jnp.ones((3, 2), jnp.int32)}, "int32"),
        ({"ids": jnp.zeros(4, jnp.int32)}, r"int32\[4\]"),
        ({"ids": jnp.zeros(3)}, "float32"),
        ({"num_segments": -1}, "num_segments=-1"),
    ],
)
def test_caller_errors_name_the_value(arguments, message):
    call = {
        "values": jnp.ones((3, 2)),
        "ids": jnp.zeros(3, jnp.int32),
        "num_segments": 2,
    }
    with pytest.raises(ValueError, match=message):
        segment_sum(**(call | arguments))


@pytest.mark.parametrize(
    ("shape", "dtype", "num_segments", "message"),
    [
        ((3, 1), "bfloat16", 2, "row of 1 bfloat16"),
        ((0, 4), "float32", 2, "0 rows"),
        ((3, 4), "float32", 0, "0 sums"),
        ((3, 8192), "float32", 2, "16 pieces"),
        ((2**31, 4), "float32", 7, "counted in int32"),
    ],
)
def test_what_the_kernel_cannot_do_is_said(shape, dtype, num_segments, message):
    values = jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))
    ids = jax.ShapeDtypeStruct(shape[:1], jnp.int32)
    with hw.assume(), pytest.raises(NotImplementedError, match=message):
        api.choose(values, ids, num_segments, implementation="mosaic")


@pytest.mark.parametrize(
    ("count", "dtype", "picked"),
    [
        (api.MEASURED_ROWS, "float32", "mosaic"),
        (api.MEASURED_ROWS, "bfloat16", "mosaic"),
        (api.MEASURED_ROWS, "float16", "xla"),
        (api.MEASURED_ROWS - 1, "float32", "xla"),
    ],
)
def test_none_takes_the_kernel_where_a_row_is_near(count, dtype, picked):
    values = jax.ShapeDtypeStruct((count, 80), jnp.dtype(dtype))
    ids = jax.ShapeDtypeStruct((count,), jnp.int32)
    with hw.assume():
        choice = api.choose(values, ids, 2)
    assert choice.implementation == picked
    if picked == "xla":
        assert "no measured row is near" in choice.refused["mosaic"]
    assert api.choose(values, ids, 2).implementation == "xla" or hw.is_hopper()


@pytest.mark.parametrize("fields", [{"positions": 1}, {"unroll": 3}])
def test_impossible_tilings_are_refused(fields):
    with pytest.raises(ValueError, match="allowed are"):
        config.Config(**fields)


@pytest.mark.gpu
@pytest.mark.parametrize("name", [*CI, *MODEL])
def test_the_kernel_on_the_card(name):
    spec = (CI | MODEL)[name]
    args = jax.jit(spec.arguments)(jax.random.key(3))
    (got,) = results(spec, args, "mosaic")
    assert_results(spec, args, got)


@pytest.mark.gpu
@pytest.mark.parametrize("name", MODEL)
def test_a_hundred_runs_give_the_same_bits(name):
    spec = MODEL[name]
    args = jax.jit(spec.arguments)(jax.random.key(4))
    op = functools.partial(segment_sum, implementation="mosaic")
    step = jax.jit(specs.run(spec, op))
    first = np.asarray(step(*args))
    for _ in range(100):
        np.testing.assert_array_equal(first, np.asarray(step(*args)))
