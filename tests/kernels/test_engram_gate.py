"""`engram_gate`: every form against the reference and float64, kernels interpreted."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import engram_gate
from pallas_kernels._common import hw
from pallas_kernels._common.interpret import interpreted
from pallas_kernels._common.testing import assert_close
from pallas_kernels.engram_gate import api, config, reference, specs


CI = {spec.name: spec for spec in specs.specs("ci")}
MODEL = {spec.name: spec for spec in specs.specs("model")}

# One SM leaves blocks with more than one token.
SMALL = dataclasses.replace(hw.H200, sms=1)

NAMES = ("y", "gate", "dh", "dkv", "dquery_scale", "dkey_scale")


@functools.cache
def arguments(spec):
    """As `spec.arguments` draws them, without a program."""
    draw = np.random.default_rng(0)
    shapes = jax.eval_shape(spec.arguments, jax.random.key(0))
    h, kv, *scales, _, dy, dgate = (draw.normal(size=x.shape) for x in shapes)
    lean = 4.0 * spec.dim**-0.5 * draw.choice((-1.0, 1.0), h.shape[:3])
    kv[:, :, :-1] += lean[..., None] * h
    is_live = draw.random(h.shape[:2]) >= spec.dead
    is_live[:, 1] &= not spec.dead  # of a few tokens, one at least
    arrays = (h, kv, *(1.0 + 0.1 * x for x in scales), is_live, dy, dgate)
    return tuple(jnp.asarray(a, x.dtype) for a, x in zip(arrays, shapes, strict=True))


@functools.cache
def expected(spec):
    """Results and gradients of the reference from float32 copies of the arguments."""
    args = arguments(spec)
    exact = tuple(
        a.astype(jnp.float32) if jnp.issubdtype(a.dtype, jnp.floating) else a
        for a in args
    )

    def op(*arrays, **options):
        return reference.engram_gate(*arrays, eps=1e-6, clamp=1e-6, **options)

    return jax.jit(specs.run(spec, op, backward=True, exact=True))(*exact)


def program(spec, implementation):
    op = functools.partial(engram_gate, implementation=implementation)
    return jax.jit(specs.run(spec, op, backward=True))


compiled = functools.cache(program)


def of_small_card(spec, args, implementation):
    """Results on `SMALL`, interpreted, of kernels as the heuristic tiles them."""
    with hw.assume(SMALL), interpreted():
        return compiled(spec, implementation)(*args)


def assert_results(spec, got):
    want = expected(spec)
    assert got[0].dtype == (spec.out_dtype or spec.dtype)
    for name, a, b in zip(NAMES, got, want, strict=True):
        # The card's roots and exponentials are approximate.
        exact = 1e-5 if jax.default_backend() == "cpu" else 5e-5
        rel = exact if a.dtype == jnp.float32 else None
        assert_close(a, b, rel=rel, name=f"{spec.name} {name}")


# The options of the one that is left out are, pair by pair, those of others.
PAIRS = [name for name in CI if name != "ci_four_streams"]


@pytest.mark.parametrize("name", PAIRS)
def test_xla_and_the_kernels_are_the_reference(name):
    spec = CI[name]
    for implementation in ("xla", "mosaic"):
        got = of_small_card(spec, arguments(spec), implementation)
        assert_results(spec, got)


@pytest.mark.parametrize("stages", [1, 3])
def test_rings_of_any_depth(monkeypatch, stages):
    tiling = config.Config(stages=stages, blocks_per_sm=1)
    monkeypatch.setattr(config, "pick", lambda *_: tiling)
    spec = CI["ci_dead"]
    with hw.assume(SMALL), interpreted():
        got = program(spec, "mosaic")(*arguments(spec))
    assert_results(spec, got)


def scored(scores, dim=256):
    """h, kv and gains of one stream whose scores are these."""
    # Norms of constant rows are one; the gain says what their product gives.
    h = np.ones((1, len(scores), 1, dim), np.float32)
    signs = np.array(scores)
    # A share of the columns disagrees: <h, k> / D is the score over sqrt(D).
    lead = np.arange(dim)[None] < (dim * (1 + signs / dim**0.5) / 2)[:, None]
    keys = np.where(lead, 1.0, -1.0)[None, :, None]
    kv = np.concatenate([keys, np.full(keys.shape, 2.0)], axis=2)
    return h, kv.astype(np.float32), np.ones((1, dim), np.float32)


@pytest.mark.parametrize("copies_sign", [False, True])
def test_zeros_and_saturation(copies_sign):
    h, kv, ones = scored([0.0, 16.0, -16.0, 1.0])
    kv[0, 0, 0] = 0.0
    op = functools.partial(engram_gate, copies_sign=copies_sign)

    @jax.jit
    def all_of_them(*args):
        names = ("reference", "xla", "mosaic")
        return {name: op(*args, implementation=name) for name in names}

    with interpreted():
        found = all_of_them(h, kv, ones, ones)
    zero = 1 / (1 + np.exp(-1e-3)) if copies_sign else 0.5
    want = [zero] + [1 / (1 + np.exp(-s)) for s in (4.0, -4.0, 1.0)]
    for name, (y, gate) in found.items():
        close = functools.partial(np.testing.assert_allclose, rtol=1e-5, err_msg=name)
        close(gate[0, :, 0], want, atol=1e-6)
        close(y[0, 1:, 0, 0], 2 * np.array(want[1:]))


def test_a_score_within_the_clamp_has_no_gradient():
    h, kv, ones = scored([1e-9, 4.0])
    kv[0, 0, 0] = 1e-8 * kv[0, 1, 0]
    op = functools.partial(engram_gate, eps=1.0, clamp=1e-3)

    @jax.jit
    def both(h, kv):
        def gates(h, kv, name):
            return jnp.sum(op(h, kv, ones, ones, implementation=name)[1])

        pull = jax.grad(gates, argnums=(0, 1))
        return [pull(h, kv, name) for name in ("xla", "mosaic")]

    with interpreted():
        found = both(h, kv)
    for dh, dkv in found:
        assert not np.asarray(dh)[0, 0].any()
        assert not np.asarray(dkv)[0, 0].any()
        assert np.asarray(dkv)[0, 1, 0].any()


@pytest.mark.parametrize("implementation", ["xla", "mosaic"])
def test_dead_tokens_have_zeros_whatever_they_hold(implementation):
    spec = CI["ci_dead"]
    h, kv, q, k, live, dy, dgate = arguments(spec)
    dead = ~live[:, :, None, None]
    assert np.asarray(dead).any()
    h, kv, dy = (jnp.where(dead, jnp.nan, x).astype(x.dtype) for x in (h, kv, dy))
    got = of_small_card(spec, (h, kv, q, k, live, dy, dgate), implementation)
    for name, array in zip(NAMES, got, strict=True):
        array = np.asarray(array.astype(jnp.float32))
        assert np.isfinite(array).all(), name
        if array.ndim > 2:
            assert not array[~np.asarray(live)].any(), name


def test_the_gate_is_float32_under_16_bits():
    spec = CI["ci_f16"]
    args = h, kv, q, k, *_ = arguments(spec)
    gate = of_small_card(spec, args, "mosaic")[1]
    h, kv, q, k = (np.asarray(x).astype(np.float64) for x in (h, kv, q, k))

    def normed(x):
        return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + 1e-6)

    score = np.sum(normed(h) * q * normed(kv[:, :, :-1]) * k, -1) / h.shape[-1] ** 0.5
    want = 1 / (1 + np.exp(-np.sign(score) * np.sqrt(np.maximum(np.abs(score), 1e-6))))
    np.testing.assert_allclose(gate, want, rtol=1e-5, atol=1e-6)


def lowered(spec):
    args = jax.eval_shape(spec.arguments, jax.random.key(0))
    op = functools.partial(engram_gate, implementation="mosaic")
    step = jax.jit(specs.run(spec, op, backward=True))
    text = step.trace(*args).lower(lowering_platforms=("cuda",)).as_text()
    call = (spec.streams, spec.dim, spec.dtype, spec.options()["dtype"])
    has_bwd = config.refusal(1, *call, "bwd") is None
    return "pk_engram_gate_fwd" in text and has_bwd == ("pk_engram_gate_bwd" in text)


# Every width and number of streams, every dtype in and out, with dead tokens or not;
# more tokens are more turns of the same loop.
LOWERED = [*specs.specs("model"), CI["ci_f16"], CI["ci_two_streams_f32"]]


@pytest.mark.parametrize("spec", LOWERED, ids=lambda spec: f"{spec.tag}-{spec.name}")
def test_lowers_for_the_card_at_every_width(spec):
    with hw.assume():
        assert lowered(spec)


def test_the_rings_of_the_heuristic_fit():
    for direction in ("fwd", "bwd"):
        for out in ("bfloat16", "float32"):
            call = (4, 2560, "bfloat16", out, direction)
            tiling = config.heuristic(*call)
            need = tiling.stages * config.stage_bytes(*call)
            need += config.fixed_bytes(4, 2560, direction)
            assert need * tiling.blocks_per_sm <= hw.H200.smem_bytes


def test_a_ring_too_large_is_refused_before_the_launch(monkeypatch):
    tiling = config.Config(stages=8, blocks_per_sm=1)
    monkeypatch.setattr(config, "pick", lambda *_: tiling)
    with hw.assume(), pytest.raises(ValueError, match="shared memory"):
        lowered(MODEL["engram_27b"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"h": jnp.ones((2, 4, 8))}, r"float32\[2, 4, 8\]"),
        ({"kv": jnp.ones((1, 2, 4, 8))}, r"float\[1, 2, 5, 8\]"),
        ({"key_scale": jnp.ones((4, 7))}, r"key_scale has shape \[4, 7\]"),
        ({"is_live": jnp.ones((1, 3), bool)}, r"bool\[1, 3\]"),
        ({"clamp": 0.0}, "clamp=0.0"),
    ],
)
def test_caller_errors_name_the_value(arguments, message):
    call = {
        "h": jnp.ones((1, 2, 4, 8)),
        "kv": jnp.ones((1, 2, 5, 8)),
        "query_scale": jnp.ones((4, 8)),
        "key_scale": jnp.ones((4, 8)),
    } | arguments
    with pytest.raises(ValueError, match=message):
        engram_gate(**call)


@pytest.mark.parametrize(
    ("streams", "dim", "message"),
    [
        (3, 256, "G=3"),
        (4, 96, "D=96"),
        (4, 7680, "240 elements"),
        (4, 32, "32 threads"),
    ],
)
def test_what_the_kernels_cannot_do_is_said(streams, dim, message):
    h = jax.ShapeDtypeStruct((1, 2, streams, dim), jnp.bfloat16)
    kv = jax.ShapeDtypeStruct((1, 2, streams + 1, dim), jnp.bfloat16)
    scale = jax.ShapeDtypeStruct((streams, dim), jnp.float32)
    with hw.assume(), pytest.raises(NotImplementedError, match=message):
        api.choose(h, kv, scale, scale, implementation="mosaic")


def test_wide_streams_leave_the_gradient_to_xla(monkeypatch):
    spec = CI["ci_dead"]
    monkeypatch.setitem(config.MAX_ELEMENTS, "bwd", 1)
    args = arguments(spec)
    with hw.assume(SMALL), interpreted():
        kernels = api.choose(*args[:4], implementation="mosaic").config
        assert kernels.bwd is None
        assert "backward xla" in str(kernels)
        got = program(spec, "mosaic")(*args)
    assert_results(spec, got)


def test_none_keeps_xla_while_a_row_speaks_for_one_size():
    h = jax.ShapeDtypeStruct((1, 2, 4, 256), jnp.bfloat16)
    kv = jax.ShapeDtypeStruct((1, 2, 5, 256), jnp.bfloat16)
    scale = jax.ShapeDtypeStruct((4, 256), jnp.float32)
    with hw.assume():
        choice = api.choose(h, kv, scale, scale)
    assert choice.implementation == "xla"
    assert "one size alone" in choice.refused["mosaic"]


@pytest.mark.gpu
@pytest.mark.parametrize("name", [*CI, *MODEL])
def test_the_kernels_on_the_card(name):
    spec = (CI | MODEL)[name]
    assert_results(spec, program(spec, "mosaic")(*arguments(spec)))


@pytest.mark.gpu
@pytest.mark.parametrize("name", MODEL)
def test_a_hundred_runs_give_the_same_bits(name):
    spec = MODEL[name]
    args = jax.jit(spec.arguments)(jax.random.key(5))
    op = functools.partial(engram_gate, implementation="mosaic")
    step = jax.jit(specs.run(spec, op, backward=True))
    first = [np.asarray(leaf) for leaf in step(*args)]
    for _ in range(100):
        for a, b in zip(first, step(*args), strict=True):
            np.testing.assert_array_equal(a, np.asarray(b))
