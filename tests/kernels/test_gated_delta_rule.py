"""`gated_delta_rule`: chunked form and decode step against the recurrence."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels._common import bench
from pallas_kernels._common.testing import assert_close
from pallas_kernels.gated_delta_rule import (
    document_starts,
    gated_delta_rule,
    gated_delta_rule_step,
    inverse,
    reference,
    specs,
    xla,
)
from pallas_kernels.gated_delta_rule.config import Config


CI = {spec.name: spec for spec in specs.specs("ci")}
NAMES = ("o", "state", "dq", "dk", "dv", "dg", "dbeta", "dstate")

xla_rule = functools.partial(gated_delta_rule, implementation="xla")

# Compiling is most of what these tests would do; speed of the result is not tested.
jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})


rule = jit(xla_rule)


@functools.cache
def compiled(spec, implementation):
    op = functools.partial(gated_delta_rule, implementation=implementation)
    return jit(specs.run(spec, op, backward=True))


def inputs(time, *, batch=1, key_heads=1, value_heads=2, dim=16, seed=0):
    """q, k, v, g, beta as numpy f32; one head never forgets, so that leaks show."""
    rng = np.random.default_rng(seed)
    q, k = rng.standard_normal((2, batch, time, key_heads, dim), np.float32)
    q, k = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
    v = rng.standard_normal((batch, time, value_heads, dim), np.float32)
    g = -0.1 * rng.random((batch, time, value_heads), np.float32)
    g[..., 0] = 0.0
    beta = rng.random((batch, time, value_heads), np.float32)
    return q, k, v, g, beta


def arguments(spec, seed):
    return jit(spec.arguments)(jax.random.key(seed))


def numpy_recurrence(q, k, v, g, beta, is_first, state, scale):
    """The recurrence in float64, one head at a time."""
    q, k, v, g, beta, state = (
        np.asarray(x, np.float64) for x in (q, k, v, g, beta, state)
    )
    group = v.shape[2] // k.shape[2]
    o = np.zeros_like(v)
    state = state.copy()
    for b, t, h in np.ndindex(v.shape[:3]):
        s = 0 * state[b, h] if is_first[b, t] else state[b, h]
        s = np.exp(g[b, t, h]) * s
        key = k[b, t, h // group]
        s = s + np.outer(beta[b, t, h] * (v[b, t, h] - s @ key), key)
        o[b, t, h] = scale * s @ q[b, t, h // group]
        state[b, h] = s
    return o, state


@pytest.mark.parametrize("implementation", ["reference", "xla"])
@pytest.mark.parametrize("name", ["ci_t63_rep3", "ci_t130_rep2"])
def test_equals_the_float64_recurrence(name, implementation):
    spec = CI[name]
    args = arguments(spec, 1)
    o, state, *_ = compiled(spec, implementation)(*args)
    want = numpy_recurrence(*args[:7], scale=spec.key_dim**-0.5)
    assert_close(o, want[0], rel=2e-6, name="o")
    assert_close(state, want[1], rel=2e-6, name="state")


@pytest.mark.parametrize("name", CI)
def test_chunked_form_equals_the_scan_with_all_gradients(name):
    spec = CI[name]
    args = arguments(spec, 2)
    exact = [x.astype(jnp.float32) if x.dtype == jnp.bfloat16 else x for x in args]
    want = compiled(spec, "reference")(*exact)
    for label, a, b in zip(NAMES, compiled(spec, "xla")(*args), want, strict=True):
        # The inverse grows where keys agree; gates' gradients are sums of products
        # that cancel.
        rel = 2e-5 if spec.dtype == "float32" else 2e-2 if "g" in label else 8e-3
        axes = (0, 1) if label in ("state", "dstate") else (0, 2)
        assert_close(a, b, rel=rel, block_axes=axes, name=label)


def test_groups_of_chunks_change_nothing():
    """Recomputing group by group is the same function as one group."""
    args = inputs(70)
    first = np.arange(70)[None] == 40
    state = np.full((1, 2, 16, 16), 0.1, np.float32)

    def loss(config, *args):
        o, final = xla.gated_delta_rule(
            *args, is_first=first, initial_state=state, scale=0.25, config=config
        )
        return jnp.sum(o * jnp.cos(o)) + jnp.sum(final**2)

    @functools.partial(jit, static_argnums=0)
    def grads(config, *args):
        return jax.value_and_grad(loss, argnums=(1, 2, 3, 4, 5))(config, *args)

    want = grads(Config(chunk=16, group=5, save=True), *args)
    got = grads(Config(chunk=16, group=2, save=False), *args)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert_close(a, b)


@pytest.mark.parametrize("strength", [0.98, 1.9])
def test_inverse_is_stable_for_identical_keys(strength):
    """What the Neumann product of 64 x 64 fails at."""
    size = 64
    lower = np.tril(np.full((1, size, size), strength, np.float32), -1)
    got = jit(inverse.unit_lower_inverse)(lower)
    want = np.linalg.inv(np.eye(size) + lower.astype(np.float64))
    assert_close(got, want, rel=1e-5)


def test_no_decay_total_decay_and_zero_rows():
    q, k, v, _, beta = inputs(70)
    q[:, 3] = 0.0
    beta[:, 5:9] = 0.0
    g = np.zeros((1, 70, 2), np.float32)
    g[:, 20:22], g[:, 50, 1] = -1e4, -30.0

    def both(rule):
        def loss(*args):
            o, state = rule(*args)
            return jnp.sum(jnp.sin(o)) + jnp.sum(state), (o, state)

        return jit(jax.value_and_grad(loss, argnums=(0, 1, 2, 3, 4), has_aux=True))

    got = both(xla_rule)(q, k, v, g, beta)
    ref = functools.partial(gated_delta_rule, implementation="reference")
    want = both(ref)(q, k, v, g, beta)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert np.isfinite(a).all()
        assert_close(a, b, rel=2e-5)


LENGTHS = (37, 1, 37)


def _documents():
    starts = np.cumsum((0, *LENGTHS[:-1]))
    first = np.zeros((1, sum(LENGTHS)), bool)
    first[0, starts] = True
    return [slice(a, a + n) for a, n in zip(starts, LENGTHS, strict=True)], first


def test_packed_documents_equal_separate_ones():
    args = inputs(sum(LENGTHS), value_heads=4, key_heads=2)
    documents, first = _documents()
    o, state = rule(*args, is_first=first)
    for place in documents:
        alone, final = rule(*(x[:, place] for x in args))
        assert_close(o[:, place], alone, rel=1e-6)
    assert_close(state, final, rel=1e-6)


@pytest.mark.parametrize("chunk", [16, 64])
def test_starts_built_once_say_what_is_first(chunk):
    args = inputs(sum(LENGTHS))
    _, first = _documents()
    starts = document_starts(first, chunk)
    same = functools.partial(xla_rule, *args, chunk_size=chunk)
    for a, b in zip(jit(same)(starts=starts), jit(same)(is_first=first), strict=True):
        np.testing.assert_array_equal(a, b)
    with pytest.raises(ValueError, match="give one of them"):
        same(starts=starts, is_first=first)
    with pytest.raises(ValueError, match="starts has shape"):
        same(starts=starts[:, 1:])


def test_documents_that_begin_with_a_chunk_are_bit_equal():
    args = inputs(192)
    first = np.arange(192)[None] % 64 == 0
    o, state = rule(*args, is_first=first)
    alone, final = rule(*(x[:, 64:] for x in args), is_first=first[:, 64:])
    np.testing.assert_array_equal(o[:, 64:], alone)
    np.testing.assert_array_equal(state, final)


@pytest.mark.parametrize("implementation", ["reference", "xla"])
def test_nothing_reaches_an_earlier_token_or_another_document(implementation):
    """Gradients of one output: exact zeros outside its document's past."""
    args = inputs(sum(LENGTHS))
    documents, first = _documents()
    token = documents[2].start + 30

    def one(*args):
        o, _ = gated_delta_rule(*args, is_first=first, implementation=implementation)
        return jnp.sum(o[:, token])

    for name, grad in zip(
        "qkvgb", jit(jax.grad(one, (0, 1, 2, 3, 4)))(*args), strict=True
    ):
        outside = np.ones(sum(LENGTHS), bool)
        outside[documents[2].start : token + 1] = False
        assert not np.any(np.asarray(grad)[:, outside]), name
        assert np.any(np.asarray(grad)[:, token - 1]) or name == "q"


def test_a_restart_cuts_the_initial_state():
    args = inputs(20)
    first = np.arange(20)[None] == 0
    state = np.ones((1, 2, 16, 16), np.float32)
    got = rule(*args, is_first=first, initial_state=state)
    want = rule(*args, is_first=first, initial_state=0 * state)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_array_equal(a, b)

    def total(s):
        return jnp.sum(xla_rule(*args, is_first=first, initial_state=s)[0])

    assert not np.any(jit(jax.grad(total))(state))


@pytest.mark.parametrize("split", [37, 63])
def test_a_sequence_may_be_cut_anywhere(split):
    args = inputs(100)
    o, state = rule(*args)
    head, middle = rule(*(x[:, :split] for x in args))
    tail, final = rule(*(x[:, split:] for x in args), initial_state=middle)
    assert_close(np.concatenate([head, tail], axis=1), o)
    assert_close(final, state)


def test_padding_passes_the_state_through():
    q, k, v, g, beta = inputs(40)
    g[:, 29:], beta[:, 29:] = 0.0, 0.0
    _, padded = rule(q, k, v, g, beta)
    _, state = rule(*(x[:, :29] for x in (q, k, v, g, beta)))
    assert_close(padded, state, rel=1e-6)


@pytest.mark.parametrize("implementation", ["reference", "xla"])
def test_steps_equal_the_whole(implementation):
    args = inputs(12, batch=2, key_heads=2, value_heads=6)
    o, want = rule(*args)
    state = np.zeros(want.shape, np.float32)
    step = jit(functools.partial(gated_delta_rule_step, implementation=implementation))
    for t in range(12):
        row, state = step(*(x[:, t] for x in args), state)
        assert_close(row, o[:, t], rel=1e-5, name=f"token {t}")
    assert_close(state, want)


def test_twice_the_same_bits():
    spec = CI["ci_bf16"]
    args = arguments(spec, 3)
    first, second = (compiled(spec, "xla")(*args) for _ in range(2))
    for a, b in zip(first, second, strict=True):
        np.testing.assert_array_equal(a, b)


def test_backward_keeps_no_state_per_chunk_of_a_long_row():
    """A long row keeps one f32 state per group, and recomputes the others."""
    args = inputs(64, dim=8)
    shape = (1, 2, 8, 8)
    first, state = np.zeros((1, 64), bool), np.zeros(shape, np.float32)

    def kept(save):
        rule = functools.partial(
            xla.gated_delta_rule,
            is_first=first,
            initial_state=state,
            scale=1.0,
            config=Config(chunk=16, group=2, save=save),
        )
        pull = jax.eval_shape(lambda *a: jax.vjp(rule, *a)[1], *args)
        return [leaf.shape for leaf in jax.tree.leaves(pull)]

    assert any(s[-2:] == (8, 8) and s[:2] == (2, 2) for s in kept(True))
    assert [s for s in kept(False) if s[-2:] == (8, 8)] == [(2, 1, 1, 2, 8, 8)]


@pytest.mark.parametrize("backward", [False, True])
def test_lowers_for_cuda(backward):
    spec = next(specs.specs("perf"))
    arguments = jax.eval_shape(spec.arguments, jax.random.key(0))
    run = jit(specs.run(spec, xla_rule, backward))
    run.trace(*arguments).lower(lowering_platforms=("cuda",))


def test_the_benchmark_measures_the_sizes_of_a_model():
    cases = list(specs.bench_cases("perf"))
    assert [case.workload.split(" Hk16")[0] for case in cases[::2]] == [
        "qwen3_next 1x8192",
        "qwen3_next 4x8192",
        "qwen3_next 8x2048",
        "qwen3_next_packed 1x8192 in 5",
    ]
    # 32 heads of 128 chunks, 10.5 MFLOP each; three times that for the gradient.
    assert cases[0].flops == 32 * 128 * 10_485_760
    assert cases[1].flops == 4 * cases[0].flops
    # q, k, v, o, g, beta and two states; and by hand for 4 x 8192.
    assert cases[2].bytes == 32768 * (8192 + 16384 + 256) + 2 * 8_388_608


def test_the_benchmark_checks_before_it_measures():
    forward, both = list(specs.bench_cases("ci"))[:2]
    limits = bench.Ceilings(gbps=1000.0, tflops=10.0)
    for case, results in ((forward, 2), (both, 8)):
        args = case.arguments(jax.random.key(0))
        assert len(jax.tree.leaves(jax.eval_shape(case.reference, *args))) == results
    fla, variant = bench.measure_case(forward, limits, ["fla", "segments2"], ["xla"])
    assert fla["ms"] > 0
    assert "fla did not run" in fla["note"]
    assert "segments2 did not run" in variant["note"]
    assert "Hopper" in variant["note"]


def test_errors_name_the_value():
    q, k, v, g, beta = inputs(8)
    with pytest.raises(ValueError, match="3 heads, which is no multiple of the 2"):
        gated_delta_rule(*inputs(8, key_heads=2, value_heads=3))
    with pytest.raises(ValueError, match="chunk_size is 48"):
        gated_delta_rule(q, k, v, g, beta, chunk_size=48)
    with pytest.raises(ValueError, match="g has dtype bfloat16, expected float32"):
        gated_delta_rule(q, k, v, g.astype(jnp.bfloat16), beta)
    with pytest.raises(ValueError, match="initial_state has shape"):
        gated_delta_rule(q, k, v, g, beta, initial_state=np.zeros((1, 2, 3, 4)))
    with pytest.raises(ValueError, match="implementation='fast' is unknown"):
        gated_delta_rule(q, k, v, g, beta, implementation="fast")
    with pytest.raises(ValueError, match="state has shape"):
        gated_delta_rule_step(
            *(x[:, 0] for x in (q, k, v, g, beta)), np.zeros((1, 2, 3, 4))
        )
    assert reference.__doc__
