"""`gated_delta_rule`: the chunked form against the recurrence."""

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
    inverse,
    specs,
    xla,
)
from pallas_kernels.gated_delta_rule.config import Config
from pallas_kernels.gated_delta_rule.config_mosaic import Config as KernelConfig


CI = {spec.name: spec for spec in specs.specs("ci")}
NAMES = ("o", "state", "dq", "dk", "dv", "dg", "dbeta", "dstate")

xla_rule = functools.partial(gated_delta_rule, implementation="xla")


@functools.cache
def compiled(spec, implementation):
    """Results and gradients of `arguments`."""
    op = functools.partial(gated_delta_rule, implementation=implementation)
    return jax.jit(specs.run(spec, op, backward=True))


def arguments(spec, seed=0):
    """q, k, v, g, beta, is_first, initial state, do, d_state as numpy.

    Of three key heads one has random keys, one keys of cosine 0.9, one a single key.
    Of the value heads some never forget, so that errors and leaks show.
    """
    rng = np.random.default_rng(seed)
    heads = (spec.batch, spec.time, spec.value_heads)
    keys = (spec.batch, spec.time, spec.key_heads, spec.key_dim)
    q, k = rng.standard_normal((2, *keys), np.float32)
    shared = np.float32([0, 3, 1e6])[np.arange(spec.key_heads) % 3, None]
    k = k + shared * rng.standard_normal(keys[2:], np.float32)
    q, k = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
    v, do = rng.standard_normal((2, *heads, spec.value_dim), np.float32)
    g = -0.1 * rng.random(heads, np.float32)
    g[..., ::2] = 0.0
    beta = rng.random(heads, np.float32)
    border = spec.time // spec.documents + 1
    is_first = np.broadcast_to(np.arange(spec.time) % border == border - 1, heads[:2])
    state = (2, spec.batch, spec.value_heads, spec.value_dim, spec.key_dim)
    state, d_state = rng.standard_normal(state, np.float32)
    q, k, v, do = (x.astype(spec.dtype) for x in (q, k, v, do))
    return q, k, v, g, beta, is_first, state, do, d_state


def recurrence(q, k, v, g, beta, is_first, state, do, d_state, scale=None):
    """The recurrence and its gradient by hand, token by token in float64."""
    q, k, v, g, beta, state, do, d_state = (
        np.asarray(x, np.float64) for x in (q, k, v, g, beta, state, do, d_state)
    )
    key_heads, dim = k.shape[2:]
    group = v.shape[2] // key_heads
    scale = dim**-0.5 if scale is None else scale
    q, k = (np.repeat(x, group, axis=2) for x in (q, k))
    decay, keep = np.exp(g), ~np.asarray(is_first)[:, :, None]
    o, tokens = np.zeros_like(v), range(v.shape[1])
    decayed, error, states = {}, {}, {}
    for t in tokens:
        decayed[t] = (decay[:, t] * keep[:, t])[..., None, None] * state
        error[t] = v[:, t] - np.einsum("bhvk,bhk->bhv", decayed[t], k[:, t])
        row = beta[:, t, :, None] * error[t]
        states[t] = state = decayed[t] + row[..., None] * k[:, t, :, None]
        o[:, t] = scale * np.einsum("bhvk,bhk->bhv", state, q[:, t])
    dq, dk, dv, dg, dbeta = (np.zeros_like(x) for x in (q, k, v, g, beta))
    for t in reversed(tokens):
        dq[:, t] = scale * np.einsum("bhvk,bhv->bhk", states[t], do[:, t])
        d_state = d_state + scale * do[:, t, ..., None] * q[:, t, :, None]
        d_row = np.einsum("bhvk,bhk->bhv", d_state, k[:, t])
        dbeta[:, t] = np.sum(d_row * error[t], axis=-1)
        dv[:, t] = beta[:, t, :, None] * d_row
        row = beta[:, t, :, None] * error[t]
        dk[:, t] = np.einsum("bhvk,bhv->bhk", d_state, row)
        dk[:, t] -= np.einsum("bhvk,bhv->bhk", decayed[t], dv[:, t])
        d_state = d_state - dv[:, t, ..., None] * k[:, t, :, None]
        dg[:, t] = np.sum(d_state * decayed[t], axis=(-2, -1))
        d_state = (decay[:, t] * keep[:, t])[..., None, None] * d_state
    dq, dk = (
        x.reshape(*x.shape[:2], key_heads, group, dim).sum(axis=3) for x in (dq, dk)
    )
    return o, state, dq, dk, dv, dg, dbeta, d_state


def assert_all_close(got, want, dtype="float32"):
    for label, a, b in zip(NAMES, got, want, strict=True):
        # The inverse grows where keys agree; gates' gradients are sums of products
        # that cancel.
        rel = 2e-6 if label in ("o", "state") else 2e-5
        if dtype == "bfloat16":
            rel = 2e-2 if "g" in label else 8e-3
        axes = (0, 1) if label in ("state", "dstate") else (0, 2)
        assert_close(a, b, rel=rel, block_axes=axes, name=label)


@pytest.mark.parametrize("name", CI)
def test_chunked_form_is_the_recurrence_with_all_gradients(name):
    args = arguments(CI[name])
    got = compiled(CI[name], "xla")(*args)
    assert_all_close(got, recurrence(*args), CI[name].dtype)


def test_reference_is_the_recurrence_with_all_gradients():
    spec = CI["ci_t129_rep2"]
    args = arguments(spec)
    assert_all_close(compiled(spec, "reference")(*args), recurrence(*args))


def test_groups_of_chunks_change_nothing():
    """Recomputing group by group is the same function."""
    spec = specs.Spec(
        name="groups",
        tag="ci",
        batch=1,
        time=70,
        key_heads=1,
        value_heads=2,
        key_dim=16,
        value_dim=16,
        dtype="float32",
        documents=2,
    )
    config = Config(chunk=16, group=2, save=False)
    rule = functools.partial(xla.gated_delta_rule, scale=0.25, config=config)
    args = arguments(spec)
    got = jax.jit(specs.run(spec, rule, backward=True))(*args)
    for label, a, b in zip(NAMES, got, recurrence(*args), strict=True):
        assert_close(a, b, name=label)


def test_inverse_is_stable_for_identical_keys():
    """What the Neumann product of 64 x 64 fails at."""
    size = 64
    strengths = np.float32([0.98, 1.9])[:, None, None]
    lower = np.tril(np.broadcast_to(strengths, (2, size, size)), -1)
    got = jax.jit(inverse.unit_lower_inverse)(lower)
    want = np.linalg.inv(np.eye(size) + lower.astype(np.float64))
    for a, b in zip(got, want, strict=True):
        assert_close(a, b, rel=1e-5)


def test_no_decay_total_decay_and_zero_rows():
    spec = CI["ci_t129_rep2"]
    q, k, v, g, beta, is_first, *rest = arguments(spec, 1)
    q[:, 3] = 0.0
    beta[:, 5:9] = 0.0
    g[:] = 0.0
    g[:, 20:22], g[:, 50, 1] = -1e4, -30.0
    args = (q, k, v, g, beta, np.zeros_like(is_first), *rest)
    got = compiled(spec, "xla")(*args)
    for a, b in zip(got, recurrence(*args), strict=True):
        assert np.isfinite(a).all()
        assert_close(a, b, rel=2e-5)


@pytest.mark.parametrize("implementation", ["reference", "xla"])
def test_nothing_reaches_an_earlier_token_or_another_document(implementation):
    """Gradients of one output: exact zeros outside its document's past."""
    spec = CI["ci_t129_rep2"]
    *args, do, d_state = arguments(spec)
    begin, token = 43, 80  # a document across the border of two chunks
    assert args[5][0, begin]
    do[:, :token], do[:, token + 1 :] = 0.0, 0.0
    run = compiled(spec, implementation)
    _, _, *grads, d_initial = run(*args, do, 0 * d_state)
    for name, grad in zip("qkvgb", grads, strict=True):
        outside = np.ones(spec.time, bool)
        outside[begin : token + 1] = False
        assert not np.any(np.asarray(grad)[:, outside]), name
        assert np.any(np.asarray(grad)[:, token - 1]) or name == "q"
    assert not np.any(d_initial)


def test_a_restart_cuts_the_initial_state():
    spec = CI["ci_t63_rep3"]
    *args, is_first, state, do, d_state = arguments(spec)
    is_first = np.arange(spec.time)[None] == np.zeros((spec.batch, 1))
    run = compiled(spec, "xla")
    got = run(*args, is_first, state, do, d_state)
    want = run(*args, is_first, 0 * state, do, d_state)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_array_equal(a, b)
    assert not np.any(got[-1])


ROWS = specs.Spec(
    name="rows",
    tag="ci",
    batch=3,
    time=75,
    key_heads=2,
    value_heads=4,
    key_dim=16,
    value_dim=16,
    dtype="float32",
)
rows_rule = jax.jit(functools.partial(xla_rule, chunk_size=16))


def moved(x, begin, end, to=0):
    """Tokens from `begin` to `end` placed at `to`, zeros elsewhere."""
    out = np.zeros_like(x)
    out[:, to : to + end - begin] = x[:, begin:end]
    return out


def test_packed_documents_equal_separate_ones():
    *args, is_first, state, _, _ = arguments(ROWS)
    lengths = (37, 1, 37)
    begins = np.cumsum((0, *lengths[:-1]))
    is_first = np.zeros_like(is_first)
    is_first[:, begins] = True
    o, final = rows_rule(*args, is_first=is_first, initial_state=state)
    # Row i of the other call has nothing but document i of row 0.
    places = list(zip(begins, begins + lengths, strict=True))
    alone = [np.concatenate([moved(x[:1], *p) for p in places]) for x in args]
    apart, last = rows_rule(
        *alone, is_first=np.zeros_like(is_first), initial_state=0 * state
    )
    for row, (begin, end) in enumerate(places):
        assert_close(o[0, begin:end], apart[row, : end - begin], rel=1e-6)
    assert_close(final[0], last[2], rel=1e-6)


def test_documents_that_begin_with_a_chunk_are_bit_equal():
    *args, is_first, state, _, _ = arguments(ROWS)
    is_first = np.zeros_like(is_first)
    is_first[:, 32] = True
    o, final = rows_rule(*args, is_first=is_first, initial_state=state)
    later = [moved(x, 32, 75) for x in args]
    is_first = moved(is_first, 32, 75)
    alone, last = rows_rule(*later, is_first=is_first, initial_state=state)
    np.testing.assert_array_equal(o[:, 32:], alone[:, :43])
    np.testing.assert_array_equal(final, last)


@pytest.mark.parametrize("split", [37, 63])
def test_a_sequence_may_be_cut_anywhere_and_padded(split):
    *args, is_first, state, do, d_state = arguments(ROWS)
    is_first = np.zeros_like(is_first)
    head = [moved(x, 0, split) for x in args]
    before, middle = rows_rule(*head, is_first=is_first, initial_state=state)
    tail = [moved(x, split, 75) for x in args]
    after, final = rows_rule(*tail, is_first=is_first, initial_state=middle)
    o = np.concatenate([before[:, :split], after[:, : 75 - split]], axis=1)
    want = recurrence(*args, is_first, state, do, d_state)
    assert_close(o, want[0])
    assert_close(final, want[1])


def test_starts_built_once_say_what_is_first():
    *args, is_first, state, _, _ = arguments(ROWS)
    is_first = np.zeros_like(is_first)
    is_first[:, (0, 37, 38)] = True
    starts = np.asarray(document_starts(is_first, 16))
    want = rows_rule(*args, is_first=is_first, initial_state=state)
    got = rows_rule(*args, starts=starts, initial_state=state)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_array_equal(a, b)
    with pytest.raises(ValueError, match="give one of them"):
        xla_rule(*args, chunk_size=16, starts=starts, is_first=is_first)
    with pytest.raises(ValueError, match="starts has shape"):
        xla_rule(*args, chunk_size=16, starts=starts[:, 1:])


def test_twice_the_same_bits():
    spec = CI["ci_bf16"]
    args = arguments(spec)
    first, second = (compiled(spec, "xla")(*args) for _ in range(2))
    for a, b in zip(first, second, strict=True):
        np.testing.assert_array_equal(a, b)


def test_backward_keeps_no_state_per_chunk_of_a_long_row():
    """A long row keeps one f32 state per group, and recomputes the others."""
    keys, gates = (np.zeros(s, np.float32) for s in ((1, 64, 1, 8), (1, 64, 2)))
    args = (keys, keys, np.zeros((1, 64, 2, 8), np.float32), gates, gates)
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
    run = jax.jit(specs.run(spec, xla_rule, backward))
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
    q, k, v, g, beta, *_ = args = arguments(CI["ci_t1_rep1"])
    args = args[:5]
    heads = (q, k, v[:, :, :2], g[:, :, :2], beta[:, :, :2])
    with pytest.raises(ValueError, match="2 heads, which is no multiple of the 3"):
        gated_delta_rule(*heads)
    with pytest.raises(ValueError, match="k has shape"):
        gated_delta_rule(q, k[:, :, 1:], *args[2:])
    with pytest.raises(ValueError, match="expected four axes"):
        gated_delta_rule(q[0], *args[1:])
    with pytest.raises(ValueError, match="chunk_size is 48"):
        gated_delta_rule(*args, chunk_size=48)
    with pytest.raises(ValueError, match="g has dtype bfloat16, expected float32"):
        gated_delta_rule(q, k, v, g.astype(jnp.bfloat16), beta)
    with pytest.raises(ValueError, match="initial_state has shape"):
        gated_delta_rule(*args, initial_state=np.zeros((1, 2, 3, 4)))
    with pytest.raises(ValueError, match="implementation='fast' is unknown"):
        gated_delta_rule(*args, implementation="fast")
    for name in ("xla", "reference"):
        with pytest.raises(ValueError, match='is for "mosaic"'):
            gated_delta_rule(*args, config=KernelConfig(), implementation=name)
