"""`sort_dispatch`, `permute` and `combine` against argsort and a loop over tokens."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels._common.testing import assert_close
from pallas_kernels.sort_dispatch import (
    api,
    combine,
    limit_rows,
    permute,
    reference,
    row_weights,
    slot_values,
    sort_dispatch,
    specs,
    xla,
)


CI = {spec.name: spec for spec in specs.specs("ci")}

# Compiling is most of what these tests would do; speed of the result is not tested.
jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})


@functools.partial(jit, static_argnums=(1, 2))
def plan_of(ids, experts, implementation="xla"):
    return sort_dispatch(ids, experts, implementation=implementation)


def patterns(tokens=21, slots=2, experts=5):
    """Routings, some of which no router should make but a plan must survive."""
    rng = np.random.default_rng(0)
    shape = (tokens, slots)
    drawn = rng.integers(0, experts + 1, shape)
    return {
        "uniform": drawn % experts,
        "with_unrouted": drawn,
        "all_to_one": np.full(shape, 2),
        "last_only": np.full(shape, experts - 1),
        "first_only": np.zeros(shape, int),
        "none_routed": np.full(shape, experts),
        "half_empty": drawn % 2,
        "same_slot_twice": np.repeat(drawn[:, :1], slots, axis=1),
    }


@pytest.mark.parametrize("implementation", ["reference", "xla"])
@pytest.mark.parametrize("name", patterns())
def test_plan_equals_a_stable_argsort(name, implementation):
    ids = patterns()[name].astype(np.int32)
    plan = plan_of(ids, 5, implementation)
    order = np.argsort(ids.reshape(-1), kind="stable")
    np.testing.assert_array_equal(plan.token, order // 2)
    np.testing.assert_array_equal(plan.row.reshape(-1)[order], np.arange(order.size))
    np.testing.assert_array_equal(
        plan.group_sizes, np.bincount(ids.reshape(-1), minlength=6)[:5]
    )
    assert {a.dtype for a in jax.tree.leaves(plan)} == {jnp.dtype(jnp.int32)}


@pytest.mark.parametrize("name", CI)
def test_equals_argsort_with_all_gradients(name):
    spec = CI[name]
    args = jit(spec.arguments)(jax.random.key(0))
    exact = [x.astype(jnp.float32) if x.dtype == jnp.bfloat16 else x for x in args]
    steps = [specs.run(spec, module, backward=True) for module in (xla, reference)]
    got, want = jit(lambda a, b: (steps[0](*a), steps[1](*b)))(args, exact)
    for label, a, b in zip(("o", "dx", "dweights"), got, want, strict=True):
        # dx and dweights pass through rows that are rounded to x's dtype.
        rel = 8e-3 if spec.dtype == "bfloat16" else None
        assert_close(a, b, rel=rel, name=label)


def test_equals_a_loop_over_tokens():
    ids = patterns()["with_unrouted"].astype(np.int32)
    rng = np.random.default_rng(1)
    x = rng.standard_normal((21, 4), np.float32)
    weights = rng.random((21, 2), np.float32)
    plan = plan_of(ids, 5)
    rows = jit(permute)(x, plan)
    routed = ids < 5
    for t, j in np.ndindex(ids.shape):
        row = np.asarray(rows)[plan.row[t, j]]
        np.testing.assert_array_equal(row, x[t] if routed[t, j] else 0 * x[t])
    o = jit(combine)(rows, plan, weights)
    assert_close(o, (weights * routed).sum(1, keepdims=True) * x, rel=1e-6)


def test_what_stands_in_unrouted_rows_reaches_nothing():
    ids = patterns()["with_unrouted"].astype(np.int32)
    plan = plan_of(ids, 5)
    total = int(np.sum(plan.group_sizes))
    y = np.random.default_rng(1).standard_normal((42, 4)).astype(np.float32)
    junk = y.copy()
    junk[total:] = np.nan
    weights = np.ones((21, 2), np.float32)

    @jit
    def both(y):
        o, pull = jax.vjp(lambda y, w: combine(y, plan, w), y, weights)
        return o, *pull(jnp.cos(o))

    for a, b in zip(both(junk), both(y), strict=True):
        np.testing.assert_array_equal(a, b)
    assert not np.any(np.asarray(both(y)[1])[total:])

    @jit
    def back(dy):
        return jax.vjp(lambda x: permute(x, plan), y[:21])[1](dy)[0]

    np.testing.assert_array_equal(back(junk), back(y))


def test_gradient_at_zero_weight_and_one_slot():
    """The weight's gradient is <y, do>, not <y, weighted do> / weight."""
    ids = np.arange(6, dtype=np.int32)[:, None] % 3
    plan = plan_of(ids, 3)
    y = np.random.default_rng(2).standard_normal((6, 4)).astype(np.float32)

    def loss(weights):
        return jnp.sum(combine(y, plan, weights))

    got = jit(jax.grad(loss))(np.zeros((6, 1), np.float32))
    assert_close(got[:, 0], y[np.asarray(plan.row)[:, 0]].sum(1), rel=1e-6)


def test_gradients_scatter_no_floats_but_the_weights_once():
    spec = CI["ci_t64_e8_k8"]
    shapes = jax.eval_shape(spec.arguments, jax.random.key(0))
    jaxpr = str(jax.make_jaxpr(specs.run(spec, xla, backward=True))(*shapes))
    assert "scatter-add" not in jaxpr
    assert "scatter_add" not in jaxpr


def test_twice_the_same_bits():
    spec = CI["ci_bf16"]
    args = jit(spec.arguments)(jax.random.key(0))
    run = jit(specs.run(spec, api, backward=True))
    for a, b in zip(run(*args), run(*args), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("backward", [False, True])
def test_lowers_for_cuda(backward):
    spec = next(specs.specs("perf"))
    shapes = jax.eval_shape(spec.arguments, jax.random.key(0))
    run = jax.jit(specs.run(spec, xla, backward))
    run.trace(*shapes).lower(lowering_platforms=("cuda",))


def test_errors_name_the_value():
    ids = np.zeros((4, 2), np.int32)
    with pytest.raises(ValueError, match=r"expert_ids is float32\[4, 2\]"):
        sort_dispatch(ids.astype(np.float32), 3)
    with pytest.raises(ValueError, match="num_experts is 0"):
        sort_dispatch(ids, 0)
    with pytest.raises(ValueError, match="split the batch"):
        sort_dispatch(jax.ShapeDtypeStruct((2**20, 8), jnp.int32), 512)
    plan = plan_of(ids, 3)
    x = np.zeros((4, 5), np.float32)
    with pytest.raises(ValueError, match=r"x has shape \(3, 5\)"):
        permute(x[:3], plan)
    with pytest.raises(ValueError, match=r"y has shape \(4, 5\)"):
        combine(x, plan, np.zeros((4, 2), np.float32))
    with pytest.raises(ValueError, match=r"weights is float16\[4, 2\]"):
        combine(np.zeros((8, 5), np.float32), plan, np.zeros((4, 2), np.float16))
    with pytest.raises(ValueError, match="implementation='triton' is unknown"):
        sort_dispatch(ids, 3, implementation="triton")
    with pytest.raises(ValueError, match="no function 'sort'"):
        api.choose(ids, 3, function="sort")


@pytest.mark.parametrize("rows", [1, 17, 42])
def test_a_plan_cut_off_drops_the_slots_behind(rows):
    """As if the slots of the rows behind were sent nowhere."""
    ids = patterns()["with_unrouted"].astype(np.int32)
    rng = np.random.default_rng(1)
    x = rng.standard_normal((21, 4), np.float32)
    weights = rng.random((21, 2), np.float32)

    @jit
    def run(ids, x, weights):
        plan = sort_dispatch(ids, 5)
        cut = limit_rows(plan, rows)

        def through(x, weights):
            return combine(permute(x, cut), cut, weights)

        o, pull = jax.vjp(through, x, weights)
        by_row = row_weights(cut, weights)
        return plan, cut, o, pull(o), by_row, slot_values(cut, by_row)

    plan, cut, o, (dx, d_weights), by_row, back = run(ids, x, weights)
    total = min(rows, int(np.sum(plan.group_sizes)))
    assert int(np.sum(cut.group_sizes)) == total
    kept = np.asarray(plan.row) < total
    share = np.where(kept, weights, 0)
    assert_close(o, share.sum(1, keepdims=True) * x, rel=1e-6)
    assert_close(dx, share.sum(1, keepdims=True) * np.asarray(o), rel=1e-6)
    inner = np.sum(x * np.asarray(o), axis=1, keepdims=True)
    assert_close(d_weights, np.where(kept, inner, 0), rel=1e-6)
    assert by_row.shape == (rows,)
    np.testing.assert_array_equal(back, share)
    with pytest.raises(ValueError, match="rows is 43"):
        limit_rows(plan, 43)
