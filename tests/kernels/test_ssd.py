"""`ssd`: the chunked form against the recurrence in float64."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels
from pallas_kernels._common.testing import assert_close
from pallas_kernels.ssd import api, choose, specs, ssd, ssd_step
from pallas_kernels.ssd.config import Config


CI = {spec.name: spec for spec in specs.specs("ci")}
NAMES = ("y", "state", "dx", "ddt", "da", "db", "dc", "dd", "dbias", "dstate")

# Compiling is most of what these tests do; speed of the result is not tested.
jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})


@functools.cache
def compiled(spec, implementation, **options):
    """Results and gradients of `arguments`."""
    op = functools.partial(ssd, implementation=implementation, **options)
    return jit(specs.run(spec, op, backward=True))


def arguments(spec, seed=0):
    """As `spec.arguments`, as numpy; one head never forgets, so that errors show."""
    rng = np.random.default_rng(seed)
    heads = (spec.batch, spec.time, spec.heads)
    x, dy = rng.standard_normal((2, *heads, spec.head_dim), np.float32)
    dt = rng.standard_normal(heads, np.float32) - 2
    groups = (spec.batch, spec.time, spec.groups, spec.state)
    b, c = spec.state**-0.5 * rng.standard_normal((2, *groups), np.float32)
    a = -rng.uniform(0.1, 2.0, spec.heads).astype(np.float32)
    a[0] = 0.0
    d, bias = rng.standard_normal((2, spec.heads), np.float32)
    border = spec.time // spec.documents + 1
    is_first = np.broadcast_to(np.arange(spec.time) % border == border - 1, heads[:2])
    shape = (2, spec.batch, spec.heads, spec.head_dim, spec.state)
    state, d_state = rng.standard_normal(shape, np.float32)
    x, b, c, dy = (m.astype(spec.dtype) for m in (x, b, c, dy))
    return x, dt, a, b, c, d, bias, is_first, state, dy, d_state


def recurrence(
    *arrays, limit=(0.0, math.inf), is_real=None
):  # x, dt, a, b, c, d, bias, is_first, state, dy, d_state
    """The recurrence and its gradient by hand, token by token in float64."""
    is_first = np.asarray(arrays[7])
    x, dt, a, b, c, d, bias, state, dy, d_state = (
        np.asarray(m, np.float64) for i, m in enumerate(arrays) if i != 7
    )
    groups, size = b.shape[2:]
    group = x.shape[2] // groups
    b, c = (np.repeat(m, group, axis=2) for m in (b, c))
    raw = dt + bias
    soft = np.logaddexp(0, raw)
    steps = np.clip(soft, *limit)
    inside = (soft > limit[0]) & (soft < limit[1])
    if is_real is not None:
        steps = steps * is_real[..., None]
        inside = inside & is_real[..., None]
    keep = ~is_first[:, :, None]
    y, tokens, before, after = d[:, None] * x, range(x.shape[1]), {}, {}
    decay = np.exp(steps * a)
    for t in tokens:
        before[t] = (keep[:, t])[..., None, None] * state
        written = (steps[:, t, :, None] * x[:, t])[..., None] * b[:, t, :, None]
        after[t] = state = decay[:, t, :, None, None] * before[t] + written
        y[:, t] += np.einsum("bhvn,bhn->bhv", state, c[:, t])
    dx, ds, da, db, dc = d[:, None] * dy, 0 * steps, 0 * a, 0 * b, 0 * c
    dd = np.einsum("bthv,bthv->h", dy, x)
    for t in reversed(tokens):
        dc[:, t] = np.einsum("bhvn,bhv->bhn", after[t], dy[:, t])
        d_state = d_state + dy[:, t, ..., None] * c[:, t, :, None]
        d_row = np.einsum("bhvn,bhn->bhv", d_state, b[:, t])
        dx[:, t] += steps[:, t, :, None] * d_row
        db[:, t] = np.einsum("bhvn,bhv->bhn", d_state, steps[:, t, :, None] * x[:, t])
        d_g = decay[:, t] * np.sum(d_state * before[t], axis=(-2, -1))
        ds[:, t] = np.sum(d_row * x[:, t], axis=-1) + a * d_g
        da += np.sum(steps[:, t] * d_g, axis=0)
        d_state = (decay[:, t] * keep[:, t])[..., None, None] * d_state
    ddt = ds * inside / (1 + np.exp(-raw))
    db, dc = (m.reshape(*m.shape[:2], groups, group, size).sum(3) for m in (db, dc))
    return y, state, dx, ddt, da, db, dc, dd, ddt.sum((0, 1)), d_state


def assert_all_close(got, want, rel=2e-5):
    for label, g, w in zip(NAMES, got, want, strict=True):
        axes = (0, 1) if label in ("state", "dstate") else (0,)
        assert_close(g, w, rel=rel, block_axes=axes, name=label)


@pytest.mark.parametrize("name", CI)
def test_chunked_form_is_the_recurrence_with_all_gradients(name):
    spec = CI[name]
    args = arguments(spec)
    rel = 1e-2 if spec.dtype == "bfloat16" else 5e-6
    assert_all_close(compiled(spec, "xla")(*args), recurrence(*args), rel)


def test_reference_is_the_recurrence_with_all_gradients():
    spec = CI["ci_t65_rep2"]
    args = arguments(spec)
    assert_all_close(compiled(spec, "reference")(*args), recurrence(*args), 5e-6)


LIMIT = (0.05, 1.5)


def test_limit_and_padding_in_groups_of_chunks(monkeypatch):
    """Padding inside, a limit that is met, and groups that are computed again."""
    monkeypatch.setattr(api, "heuristic", lambda **_: Config(chunk=16, group=2))
    spec = CI["ci_t65_rep2"]

    @jit
    def run(is_real, *args):
        op = functools.partial(ssd, dt_limit=LIMIT, is_real=is_real)
        return specs.run(spec, op, backward=True)(*args)

    args = list(arguments(spec))
    args[1] = 2 * args[1]
    is_real = np.arange(65)[None] % 7 > np.array([[0], [2]])
    steps = np.logaddexp(0, args[1] + args[6])
    assert (steps < LIMIT[0]).any()
    assert (steps > LIMIT[1]).any()
    got = run(is_real, *args)
    assert_all_close(got, recurrence(*args, limit=LIMIT, is_real=is_real))
    # Padding leaves its mark nowhere: other values there, equal results elsewhere.
    noisy = list(args)
    noisy[0] = np.where(is_real[..., None, None], args[0], 1e3).astype(np.float32)
    noisy[1] = np.where(is_real[..., None], args[1], 5.0).astype(np.float32)
    noisy[9] = np.where(is_real[..., None, None], args[9], 0).astype(np.float32)
    other = run(is_real, *noisy)
    np.testing.assert_array_equal(got[1], other[1])
    np.testing.assert_array_equal(got[0][is_real], other[0][is_real])
    assert not np.any(got[3][~is_real])


def test_extreme_steps_and_decay():
    """Steps of 1e-6 and 20 side by side with rates of 0 and 16."""
    spec = CI["ci_t65_rep2"]
    x, dt, a, b, c, d, bias, is_first, *rest = arguments(spec, 1)
    rng = np.random.default_rng(2)
    dt = rng.choice(np.float32([-13.8, 20.0, -3.0]), dt.shape, p=[0.4, 0.2, 0.4])
    a = np.float32([0.0, -16.0, -1.0, -16.0])
    args = (x, dt, a, b, c, d, 0 * bias, np.zeros_like(is_first), *rest)
    got = compiled(spec, "xla")(*args)
    assert all(np.isfinite(m).all() for m in got)
    assert_all_close(got, recurrence(*args))


def test_nothing_reaches_an_earlier_token_or_another_document():
    """Gradients of one output: exact zeros outside its document's past."""
    spec = CI["ci_t65_rep2"]
    *args, dy, d_state = arguments(spec)
    begin, token = 21, 40  # a document across the border of two chunks
    assert args[7][0, begin]
    dy[:, :token], dy[:, token + 1 :] = 0.0, 0.0
    found = dict(zip(NAMES, compiled(spec, "xla")(*args, dy, 0 * d_state), strict=True))
    outside = np.ones(spec.time, bool)
    outside[begin : token + 1] = False
    for name in ("dx", "ddt", "db", "dc"):
        grad = np.asarray(found[name])
        assert not np.any(grad[:, outside]), name
        assert np.any(grad[:, token - 1]) or name == "dc"
    assert not np.any(found["dstate"])


def test_packed_equals_separate_and_a_row_may_be_cut():
    spec = CI["ci_t65_rep2"]
    x, dt, a, b, c, d, bias, _, state, *_ = arguments(spec)
    begins = (0, 17, 18)
    is_first = np.zeros((2, 65), bool)
    is_first[:, begins] = True
    call = jit(functools.partial(ssd, chunk_size=16))
    rest = {"d": d, "dt_bias": bias}
    y, final = call(
        x,
        dt,
        a,
        b,
        c,
        is_first=is_first,
        is_real=np.ones_like(is_first),
        initial_state=state,
        **rest,
    )
    for begin, end in zip(begins, (*begins[1:], 65), strict=True):

        def alone(m, begin=begin, end=end):
            out = np.zeros_like(m)
            out[:, : end - begin] = m[:, begin:end]
            return out

        one, last = call(
            alone(x),
            alone(dt),
            a,
            alone(b),
            alone(c),
            is_first=np.broadcast_to(np.arange(65) == 0, (2, 65)),
            is_real=np.broadcast_to(np.arange(65) < end - begin, (2, 65)),
            initial_state=state,
            **rest,
        )
        assert_close(one[:, : end - begin], y[:, begin:end])
    assert_close(last, final)

    # One token at a time, behind a prefill of the rest, with the same limit.
    step = jit(functools.partial(ssd_step, d=d, dt_bias=bias))
    now, outputs = state, []
    for t in range(65):
        out, now = step(
            x[:, t], dt[:, t], a, b[:, t], c[:, t], now, is_first=is_first[:, t]
        )
        outputs.append(out)
    assert_close(np.stack(outputs, 1), y)
    assert_close(now, final)
    still = ssd_step(
        x[:, 0], dt[:, 0], a, b[:, 0], c[:, 0], now, is_real=np.array([True, False])
    )[1]
    np.testing.assert_array_equal(still[1], now[1])
    assert np.any(np.asarray(still[0]) != np.asarray(now[0]))


def test_lowers_for_cuda():
    spec = next(specs.specs("perf"))
    arguments = jax.eval_shape(spec.arguments, jax.random.key(0))
    run = jit(specs.run(spec, functools.partial(ssd, implementation="xla"), True))
    run.trace(*arguments).lower(lowering_platforms=("cuda",))


def test_the_benchmark_measures_the_sizes_of_a_model():
    cases = list(specs.bench_cases("perf"))
    assert cases[0].workload == "nemotron3_nano 1x8192 H64 G8 V64 N128 fwd"
    # 64 chunks of 128 tokens: x and the state per head, c b^T per group.
    per_head, per_group = 2 * 128 * 64 * (128 + 2 * 128), 2 * 128 * 128 * 128
    assert cases[0].flops == 64 * (64 * per_head + 8 * per_group)
    assert cases[1].flops == 3 * cases[0].flops
    assert cases[0].bytes == 8192 * (2 * 2048 + 2 * 8192 + 256) + 2 * 2_097_152
    args = jax.eval_shape(cases[1].arguments, jax.random.key(0))
    shapes = jax.tree.leaves(jax.eval_shape(cases[1].implementation("xla"), *args))
    assert [leaf.shape for leaf in shapes[:2]] == [(1, 8192, 64, 64), (1, 64, 64, 128)]
    assert len(shapes) == len(NAMES)
    assert cases[0].picked() == "xla"


def test_errors_name_the_value():
    x, dt, a, b, c, *_ = arguments(CI["ci_t65_rep2"])
    args = (x, dt, a, b, c)
    with pytest.raises(ValueError, match="3 heads, which is no multiple of the 2"):
        ssd(x[:, :, :3], dt[:, :, :3], a[:3], b, c)
    with pytest.raises(ValueError, match="c has shape"):
        ssd(x, dt, a, b, c[:, :, 1:])
    with pytest.raises(ValueError, match="expected four axes"):
        ssd(x[0], *args[1:])
    with pytest.raises(ValueError, match="dt has dtype bfloat16, expected float32"):
        ssd(x, jnp.asarray(dt, jnp.bfloat16), a, b, c)
    with pytest.raises(ValueError, match="chunk_size is 48"):
        ssd(*args, chunk_size=48)
    with pytest.raises(ValueError, match=r"dt_limit is \(1\.0, 0\.5\)"):
        ssd(*args, dt_limit=(1.0, 0.5))
    with pytest.raises(ValueError, match="d has shape"):
        ssd(*args, d=a[:3])
    with pytest.raises(ValueError, match="initial_state has shape"):
        ssd(*args, initial_state=np.zeros((1, 2, 3, 4), np.float32))
    with pytest.raises(NotImplementedError, match="Hopper"):
        ssd(*args, implementation="mosaic")
    with pytest.raises(ValueError, match="implementation='fast' is unknown"):
        ssd(*args, implementation="fast")
    token = (x[:, 0], dt[:, 0], a, b[:, 0], c[:, 0])
    state = np.zeros((len(x), *x.shape[2:], b.shape[3]), np.float32)
    with pytest.raises(NotImplementedError, match="kernel of a token"):
        ssd_step(*token, state, implementation="mosaic")
    with pytest.raises(ValueError, match="implementation='fast' is unknown"):
        ssd_step(*token, state, implementation="fast")
    assert choose(*args).implementation == "xla"
    assert pallas_kernels.explain("ssd", *args).refused["mosaic"]
    assert pallas_kernels.ssd is ssd
