"""`attention`: blocks of queries against the whole matrix, and against numpy."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params

from pallas_kernels._common.testing import assert_close
from pallas_kernels.attention import api, attention, specs, xla
from pallas_kernels.attention.config import Config


# Compiling is most of what these tests would do; speed of the result is not tested.
jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})

BATCH, TIME, HEADS, KV_HEADS, DIM, VALUE = 2, 21, 4, 2, 8, 6
SEGMENTS = np.array([[1] * 5 + [2] * 9 + [3] * 4 + [0] * 3, [1] * 1 + [7] * 20])

OPTIONS = {
    "causal": {},
    "full": {"causal": False},
    "segments": {"segments": True},
    "full_segments": {"segments": True, "causal": False},
    "window": {"window": 5},
    "full_window": {"window": 5, "causal": False},
    "window_one": {"window": 1},
    "sinks": {"sinks": True, "segments": True},
    "cap": {"logit_cap": 2.0, "scale": 0.7},
    "all": {"segments": True, "window": 6, "sinks": True, "logit_cap": 3.0},
}


def qkv(time=TIME, seed=0):
    rng = np.random.default_rng(seed)
    shapes = ((HEADS, DIM), (KV_HEADS, DIM), (KV_HEADS, VALUE))
    return [rng.standard_normal((BATCH, time, *s), np.float32) for s in shapes]


def keywords(options):
    """The op's keywords, its arrays filled in."""
    options = dict(options)
    if options.pop("segments", False):
        options |= {"q_segment_ids": SEGMENTS, "kv_segment_ids": SEGMENTS}
    if options.pop("sinks", False):
        options["sinks"] = np.linspace(-1, 2, HEADS, dtype=np.float32)
    return options


def by_hand(q, k, v, options):
    """Query by query in float64."""
    segments, scale = options.get("segments"), options.get("scale", DIM**-0.5)
    cap = options.get("logit_cap")
    o = np.zeros((BATCH, TIME, HEADS, VALUE))
    for b, t, h in np.ndindex(o.shape[:3]):
        seen = [
            s
            for s in range(TIME)
            if (s <= t or not options.get("causal", True))
            and t - s < options.get("window", TIME + 1)
            and not (segments and SEGMENTS[b, s] != SEGMENTS[b, t])
            and not (segments and SEGMENTS[b, t] == 0)
        ]
        if not seen:
            continue
        g = h // (HEADS // KV_HEADS)
        logits = scale * k[b, seen, g].astype(np.float64) @ q[b, t, h]
        if cap:
            logits = cap * np.tanh(logits / cap)
        sink = np.exp(np.linspace(-1, 2, HEADS)[h]) if options.get("sinks") else 0.0
        weights = np.exp(logits)
        o[b, t, h] = weights / (weights.sum() + sink) @ v[b, seen, g]
    return o


def test_equals_float64():
    names = [(name, i) for name in OPTIONS for i in ("reference", "xla")]

    @jit
    def run(q, k, v):
        return [
            attention(q, k, v, implementation=i, **keywords(OPTIONS[name]))
            for name, i in names
        ]

    want = {name: by_hand(*qkv(), options) for name, options in OPTIONS.items()}
    for (name, implementation), got in zip(names, run(*qkv()), strict=True):
        assert_close(got, want[name], rel=1e-6, name=f"{name} {implementation}")
        if OPTIONS[name].get("segments"):
            assert not np.any(np.asarray(got)[SEGMENTS == 0]), (name, implementation)


def test_blocks_equal_the_whole_with_all_gradients(monkeypatch):
    """Blocks of 8 of 21 queries: whole, partial, and with keys left out below."""
    monkeypatch.setattr(api, "heuristic", lambda **_: Config(block=8))

    def results(q, k, v, name, implementation):
        options = keywords(OPTIONS[name])
        sinks = options.pop("sinks", None)
        op = functools.partial(attention, implementation=implementation, **options)
        o, pull = jax.vjp(lambda *a: op(*a[:3], sinks=a[3]), q, k, v, sinks)
        return jax.tree.leaves((o, pull(jnp.cos(o))))

    @jit
    def run(q, k, v):
        return {
            name: [results(q, k, v, name, i) for i in ("xla", "reference")]
            for name in ("all", "full_segments")
        }

    for name, pair in run(*qkv()).items():
        for a, b in zip(*pair, strict=True):
            assert np.isfinite(a).all()
            assert_close(a, b, name=name)


@pytest.mark.parametrize("implementation", ["reference", "xla"])
def test_gradients_stay_inside_document_past_and_window(implementation):
    """Exact zeros outside, and everywhere for a query that sees nothing."""

    def grads(token):
        def one(q, k, v):
            o = attention(
                *(q, k, v),
                **keywords({"segments": True, "window": 4}),
                implementation=implementation,
            )
            return jnp.sum(
                jnp.where(jnp.arange(TIME)[None, :, None, None] == token, o, 0.0)[0]
            )

        return jax.grad(one, (0, 1, 2))(*qkv())

    grads = jit(grads)
    for name, grad in zip("qkv", grads(12), strict=True):
        grad = np.asarray(grad)
        seen = [12] if name == "q" else [9, 10, 11, 12]
        assert np.all(grad[0, seen].any(axis=(1, 2)))
        assert not np.any(np.delete(grad[0], seen, axis=0))
        assert not np.any(grad[1])
    for grad in grads(19):
        assert not np.any(np.asarray(grad))


@pytest.mark.parametrize("implementation", ["reference", "xla"])
def test_positions_equal_indices_wherever_the_keys_stand(implementation):
    """A cache in another order, with empty slots, gives what the row gives."""
    q, k, v = qkv()
    op = jit(functools.partial(attention, window=7, implementation=implementation))
    want = op(q, k, v)
    order = np.random.default_rng(1).permutation(30)
    positions = np.where(order < TIME, order, -1)[None].repeat(BATCH, 0)
    slots = np.minimum(order, TIME - 1)
    junk = (order >= TIME)[None, :, None, None]
    keys, values = (np.where(junk, 1e3, x[:, slots]) for x in (k, v))
    index = np.arange(TIME)[None].repeat(BATCH, 0)
    got = op(
        *(q, keys.astype(np.float32), values.astype(np.float32)),
        q_positions=index,
        kv_positions=positions,
    )
    assert_close(got, want, rel=1e-6)
    token = op(
        *(q[:, 9:10], keys.astype(np.float32), values.astype(np.float32)),
        q_positions=index[:, 9:10],
        kv_positions=positions,
    )
    assert_close(token, want[:, 9:10], rel=1e-6)


def test_an_empty_cache_gives_zeros():
    q, k, v = qkv()
    empty = np.full((BATCH, TIME), -1)
    o = jit(attention)(q, k, v, q_positions=empty + 1, kv_positions=empty)
    assert not np.any(np.asarray(o))


def _sizes(jaxpr):
    for equation in jaxpr.eqns:
        yield from (v.aval.size for v in equation.outvars)
        for inner in jaxprs_in_params(equation.params):
            yield from _sizes(inner)


def test_never_holds_the_whole_score_matrix():
    """Scores of a block at most, and none of them from forward to backward."""
    shape = jax.ShapeDtypeStruct((1, 2048, 2, 16), jnp.float32)
    op = functools.partial(attention, implementation="xla")
    jaxpr = jax.make_jaxpr(lambda *a: jax.vjp(op, *a)[1](a[0]))(shape, shape, shape)
    assert max(_sizes(jaxpr.jaxpr)) <= 2 * 512 * 2048
    pull = jax.eval_shape(lambda *a: jax.vjp(op, *a)[1], shape, shape, shape)
    kept = [a for a in jax.tree.leaves(pull) if a.dtype == jnp.float32]
    assert max(a.size for a in kept) <= shape.size


def test_causal_blocks_skip_later_keys():
    shape = jax.ShapeDtypeStruct((1, 64, 1, 16), jnp.float32)

    def flops(**options):
        op = functools.partial(
            xla.attention,
            **dict.fromkeys(
                (
                    "q_segment_ids",
                    "kv_segment_ids",
                    "q_positions",
                    "kv_positions",
                    "sinks",
                    "logit_cap",
                    "is_prefix",
                )
            ),
            scale=1.0,
            config=Config(block=8),
            **options,
        )
        return jax.jit(op).lower(shape, shape, shape).cost_analysis()["flops"]

    full = flops(causal=False, window=None)
    assert flops(causal=True, window=None) < 0.65 * full
    assert flops(causal=True, window=8) < 0.3 * full


def test_lowers_for_cuda():
    spec = next(specs.specs("perf"))
    shapes = jax.eval_shape(spec.arguments, jax.random.key(0))
    op = functools.partial(attention, implementation="xla")
    run = jax.jit(specs.run(spec, op, backward=True))
    run.trace(*shapes).lower(lowering_platforms=("cuda",))


def test_documents_are_told_to_cudnn():
    packed = [spec for spec in specs.specs("perf") if spec.is_packed]
    for spec in packed:
        if not spec.sinks:
            lengths, offsets = specs.documents_of_cudnn(spec)
            ids, _ = spec.segments()
            for row in range(spec.batch):
                begins = np.flatnonzero(np.diff(ids[row], prepend=0))
                np.testing.assert_array_equal(offsets[row], [*begins, spec.time])
                np.testing.assert_array_equal(lengths[row], np.diff(offsets[row]))
    padded = dataclasses.replace(packed[0], lengths=(3, 4))
    with pytest.raises(NotImplementedError, match="documents of 7 tokens in a row"):
        specs.documents_of_cudnn(padded)
    peers = {case.workload: case.peers for case in specs.bench_cases("perf")}
    assert sum("cudnn" in of for of in peers.values()) == 10  # all but with sinks
    assert sum("cudnn_repeated" in of for of in peers.values()) == 6


@pytest.mark.parametrize("spec", list(specs.specs("ci")), ids=lambda spec: spec.name)
def test_specs_run_and_agree(spec):
    """Those of bf16 with gradients, which f32 has in blocks above."""
    backward = spec.dtype == "bfloat16"
    ops = [functools.partial(attention, implementation=i) for i in ("xla", "reference")]

    @jit
    def both(args):
        exact = [x.astype(jnp.float32) if x.dtype == jnp.bfloat16 else x for x in args]
        return [
            specs.run(spec, op, backward)(*a)
            for op, a in zip(ops, (args, exact), strict=True)
        ]

    args = jit(spec.arguments)(jax.random.key(0))
    for a, b in zip(*both(args), strict=True):
        assert_close(a, b, rel=8e-3 if spec.dtype == "bfloat16" else None)


def test_errors_name_the_value():
    q, k, v = qkv()
    index = np.zeros((BATCH, TIME), np.int32)
    with pytest.raises(ValueError, match="q_positions is given without kv_positions"):
        attention(q, k, v, q_positions=index)
    with pytest.raises(ValueError, match="kv_segment_ids is given without"):
        attention(q, k, v, kv_segment_ids=index)
    with pytest.raises(ValueError, match="q has 4 heads, which is no multiple of"):
        attention(q, *(np.repeat(x[:, :, :1], 3, axis=2) for x in (k, v)))
    with pytest.raises(ValueError, match="q has 5 and k 21 places"):
        attention(q[:, :5], k, v)
    with pytest.raises(ValueError, match="window is 0"):
        attention(q, k, v, window=0)
    with pytest.raises(ValueError, match="have dtypes"):
        attention(q, k, v.astype(np.float16))
    with pytest.raises(ValueError, match=r"sinks has shape \(3,\)"):
        attention(q, k, v, sinks=np.zeros(3, np.float32))
