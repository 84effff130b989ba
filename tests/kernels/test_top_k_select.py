"""`top_k_select`: every form against NumPy, the kernel in the interpreter."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import top_k_select
from pallas_kernels._common import hw
from pallas_kernels._common.interpret import interpreted
from pallas_kernels.top_k_select import api, config, specs


CI = {spec.name: spec for spec in specs.specs("ci")}
MODEL = {spec.name: spec for spec in specs.specs("model")}
FORMS = ("reference", "xla", "mosaic")
# One of each length of a run, in registers and not.
LOWERED = ("ci_ties", "shadowkv_a", "shadowkv_c", "long_rows")
SPECIAL = [np.nan, -np.nan, np.inf, -np.inf, 0.0, -0.0, 1e-45, -1e-45, 3.4e38, -3.4e38]


def by_hand(scores, k):
    """Places of a row at a time, by Python's stable sort of pairs."""
    scores = np.asarray(scores)
    scores = np.where(np.abs(scores) < np.finfo(np.float32).tiny, 0.0, scores)
    rows = scores.reshape(-1, scores.shape[-1])
    out = np.full((len(rows), k), -1, np.int32)
    for row, ids in zip(rows, out, strict=True):
        allowed = [c for c in range(len(row)) if row[c] > -np.inf]
        taken = sorted(sorted(allowed, key=lambda c: (-row[c], c))[:k])
        ids[: len(taken)] = taken
    return out.reshape(*scores.shape[:-1], k)


def result(scores, k, implementation):
    op = functools.partial(top_k_select, k=k, implementation=implementation)
    return np.asarray(jax.jit(op)(scores))


@pytest.mark.parametrize("implementation", FORMS)
@pytest.mark.parametrize("name", CI)
def test_every_form_takes_the_same_places(name, implementation):
    spec = CI[name]
    (scores,) = spec.arguments(jax.random.key(0))
    want = by_hand(scores, spec.k)
    assert (spec.missing > 0) == (want < 0).any()
    with interpreted():
        got = result(scores, spec.k, implementation)
    assert got.dtype == np.int32
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("implementation", FORMS)
def test_special_numbers_have_their_place(implementation):
    k = 6
    # The second row has infinities of one sign alone, the third nothing to take.
    rows = [np.tile(SPECIAL, 13), np.full(130, -np.inf), np.full(130, np.nan)]
    rows[0][20:] = -np.inf
    rows[1][[7, 100]] = np.inf
    scores = jnp.asarray(np.stack(rows), jnp.float32)
    want = by_hand(scores, k)
    assert (want[0] >= 0).all()
    assert (want[1] >= 0).sum() == 2
    assert (want[2] < 0).all()
    with interpreted():
        np.testing.assert_array_equal(result(scores, k, implementation), want)


def test_minus_zero_is_zero():
    scores = jnp.asarray(np.tile([-0.0, 0.0, -1.0], 43), jnp.float32)
    want = np.array([0, 1, 3, 4, 6], np.int32)
    with interpreted():
        for implementation in FORMS:
            np.testing.assert_array_equal(result(scores, 5, implementation), want)


def test_scores_get_no_gradient():
    def loss(scores, implementation):
        ids = top_k_select(scores, 2, implementation=implementation)
        return jnp.sum(scores[ids] ** 2)

    scores = jnp.arange(130.0)
    want = np.where(np.arange(130) >= 128, 2 * np.arange(130.0), 0.0)
    for implementation in FORMS:
        with interpreted():
            got = jax.jit(jax.grad(loss), static_argnums=1)(scores, implementation)
        np.testing.assert_array_equal(np.asarray(got), want)


def test_a_row_that_registers_do_not_hold(monkeypatch):
    monkeypatch.setattr(config, "pick", lambda *_: config.Config(in_registers=False))
    spec = specs.Spec(name="long", tag="ci", rows=(1,), columns=2_100, k=65, levels=16)
    (scores,) = spec.arguments(jax.random.key(1))
    with interpreted():
        got = result(scores, spec.k, "mosaic")
    np.testing.assert_array_equal(got, by_hand(scores, spec.k))


@pytest.mark.parametrize(
    "spec",
    [spec for spec in specs.SPECS if spec.name in LOWERED],
    ids=lambda spec: f"{spec.tag}-{spec.name}",
)
def test_lowers_for_the_card_(spec):
    scores = jax.ShapeDtypeStruct((*spec.rows, spec.columns), jnp.float32)
    op = functools.partial(top_k_select, k=spec.k, implementation="mosaic")
    with hw.assume():
        step = jax.jit(op).trace(scores)
        text = step.lower(lowering_platforms=("cuda",)).as_text()
    assert "pk_top_k_select" in text


def test_threads_have_odd_runs_that_hold_the_row():
    for columns in (128, 129, 2_048, 2_049, 15_368, 30_728, 50_001):
        run = config.run(columns)
        assert run % 2 == 1
        assert columns <= 128 * run < columns + 128 * (config.UNROLL + 1)
    assert config.pick(15_368).in_registers
    assert not config.pick(30_728).in_registers


@pytest.mark.parametrize(
    ("scores", "k", "message"),
    [
        (jnp.ones(7, jnp.bfloat16), 3, r"bfloat16\[7\]"),
        (jnp.float32(1), 1, r"float32\[\]"),
        (jnp.ones((2, 7)), 8, "k=8, allowed are 1 to the 7"),
        (jnp.ones((2, 7)), 0, "k=0"),
    ],
)
def test_caller_errors_name_the_value(scores, k, message):
    with pytest.raises(ValueError, match=message):
        top_k_select(scores, k)


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((2, 127), "127 scores"),
        ((0, 300), "0 rows"),
        ((1, 60_000), "a row of 60000 scores asks for"),
    ],
)
def test_what_the_kernel_cannot_do_is_said(shape, message):
    scores = jax.ShapeDtypeStruct(shape, jnp.float32)
    with hw.assume(), pytest.raises(NotImplementedError, match=message):
        api.choose(scores, 5, implementation="mosaic")


def test_none_takes_the_kernel_where_rows_were_measured():
    with hw.assume():
        short, long = (
            api.choose(jax.ShapeDtypeStruct((2, n), jnp.float32), 5)
            for n in (4095, 4096)
        )
    assert short.implementation == "xla"
    assert "far from any measured one" in short.refused["mosaic"]
    assert long.implementation == "mosaic"


@pytest.mark.gpu
@pytest.mark.parametrize("name", [*CI, *MODEL, "shadowkv_a"])
def test_the_kernel_on_the_card(name):
    spec = {spec.name: spec for spec in specs.SPECS}[name]
    (scores,) = jax.jit(spec.arguments)(jax.random.key(2))
    want = by_hand(scores, spec.k)
    op = functools.partial(top_k_select, k=spec.k, implementation="mosaic")
    step = jax.jit(op)
    for _ in range(100 if spec.tag == "model" else 10):
        np.testing.assert_array_equal(np.asarray(step(scores)), want)
