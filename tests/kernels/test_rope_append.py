"""New tokens on their way into a cache: every form against the formulas by hand."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import rope_append
from pallas_kernels._common import hw
from pallas_kernels._common.interpret import interpreted
from pallas_kernels._common.testing import assert_close
from pallas_kernels.rope_append import api, choose, config, specs


CI = {spec.name: spec for spec in specs.specs("ci")}
SMALL = CI["ci_small"]
KERNELS = [spec for name, spec in CI.items() if "kernel" in name]
NAMES = ("q", "k_cache", "v_cache", "position_cache")


def arguments(spec, seed=0):
    """As `spec.arguments`, without a program that draws them; empty slots are NaN."""
    draw = np.random.default_rng(seed)
    shapes = jax.eval_shape(spec.arguments, jax.random.key(0))
    args = [draw.normal(size=x.shape).astype(np.float32) for x in shapes]
    args[3], args[6], args[7] = spec.slots, spec.slots + 3, 0 * args[7] - 1
    args[4:6] = (np.full_like(x, np.nan) for x in args[specs.CACHES])
    half = args[8].shape[-1] // 2
    angle = args[8][..., :half]
    args[8] = np.concatenate([np.cos(angle), np.sin(angle)], axis=-1)
    return tuple(jnp.asarray(x, y.dtype) for x, y in zip(args, shapes, strict=True))


def compiled(spec, implementation):
    op = functools.partial(rope_append, implementation=implementation)
    return jax.jit(specs.run(spec, op))


def result(spec, args, implementation):
    return compiled(spec, implementation)(*args)


def by_hand(spec, args):
    """q and the caches in float64, a head of a token at a time."""
    q, k, v, slots, *caches, positions, cached, cos_sin, q_scale, k_scale = (
        np.asarray(x, np.float64) for x in args
    )
    caches = [*(x.copy() for x in caches), cached.copy()]
    half = spec.rotary_dim // 2
    turns = cos_sin[..., :half] + 1j * cos_sin[..., half:][..., :half]
    group = spec.heads // spec.kv_heads
    padded = spec.padded_group or group
    out = np.zeros((spec.batch, spec.time, spec.kv_heads * padded, spec.dim))

    def turned(x, scale, row, t):
        if spec.norms:
            x = x / np.sqrt((x**2).mean() + 1e-6) * (1 + scale)
        x = x.copy()
        pairs = (x[:half] + 1j * x[half : 2 * half]) * turns[row, t]
        x[:half], x[half : 2 * half] = pairs.real, pairs.imag
        return x

    for row, t in np.ndindex(slots.shape):
        for h in range(spec.heads):
            into = h // group * padded + h % group
            out[row, t, into] = turned(q[row, t, h], q_scale, row, t)
        slot = int(slots[row, t])
        if not 0 <= slot < spec.length:
            continue
        own = [x[-1] if spec.layers else x for x in caches]
        for h in range(spec.kv_heads):
            own[0][row, slot, h] = turned(k[row, t, h], k_scale, row, t)
            own[1][row, slot, h] = v[row, t, h]
        own[2][row, slot] = positions[row, t]
    return out, *caches


def assert_results(got, want, rel=None):
    for name, a, b in zip(NAMES, got, want, strict=True):
        a, b = (np.asarray(x, np.float64) for x in (a, b))
        # Slots that no token goes to keep what they had.
        np.testing.assert_array_equal(np.isnan(a), np.isnan(b), err_msg=name)
        assert_close(np.nan_to_num(a), np.nan_to_num(b), rel=rel, name=name)


@pytest.mark.parametrize("implementation", ["reference", "xla"])
@pytest.mark.parametrize(
    "changes",
    [{}, {"layers": 3, "padded_group": None}, {"norms": False, "rotary_dim": 0}],
    ids=str,
)
def test_the_formulas(implementation, changes):
    spec = dataclasses.replace(SMALL, **changes)
    args = arguments(spec)
    assert_results(result(spec, args, implementation), by_hand(spec, args), rel=2e-5)


@pytest.mark.parametrize("implementation", ["reference", "xla"])
def test_a_slot_that_is_none_and_a_layer_that_is_none(implementation):
    spec = dataclasses.replace(SMALL, layers=2)
    args = list(arguments(spec, 1))
    args[3] = args[3].at[0, 0].set(-1)
    op = functools.partial(rope_append, implementation=implementation)

    def call(layer):
        changed = functools.partial(op, layer=layer)
        return specs.run(spec, lambda *a, **k: changed(*a, **{**k, "layer": layer}))

    got = jax.jit(call(jnp.int32(7)))(*args)
    assert_results(got, by_hand(spec, args), rel=2e-5)


@pytest.mark.parametrize("spec", KERNELS, ids=lambda spec: spec.name)
def test_the_kernel_is_the_reference(spec):
    args = arguments(spec, 2)
    with interpreted():
        got = result(spec, args, "mosaic")
    want = result(spec, args, "reference")
    assert [x.dtype for x in got] == [x.dtype for x in want]
    # Rounded in the same places, only what lies at a rounding's edge differs.
    assert_results(got, want, rel=2e-3 if spec.dtype == "bfloat16" else 2e-5)


def lowered(spec):
    args = jax.eval_shape(spec.arguments, jax.random.key(0))
    op = functools.partial(rope_append, implementation="mosaic")
    traced = jax.jit(specs.run(spec, op), donate_argnums=(4, 5, 7)).trace(*args)
    return traced.lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize("spec", KERNELS, ids=lambda spec: spec.name)
def test_the_kernel_lowers_for_the_card(spec):
    with hw.assume():
        assert "pk_rope_append" in lowered(spec)


def test_a_gradient_through_the_kernel_is_refused_by_name():
    args = jax.eval_shape(KERNELS[0].arguments, jax.random.key(0))

    def pull(implementation, q, *rest):
        op = functools.partial(rope_append, implementation=implementation)
        run = specs.run(KERNELS[0], op)
        return jax.grad(lambda q: run(q, *rest)[0].astype(jnp.float32).sum())(q)

    with hw.assume():
        with pytest.raises(NotImplementedError, match=r"rope_append: .*xla"):
            jax.eval_shape(functools.partial(pull, "mosaic"), *args)
        got = jax.eval_shape(functools.partial(pull, "xla"), *args)
    assert got.shape == args[0].shape


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dim": 96, "rotary_dim": 96}, "K = 96, the kernel has 64, 128, 256"),
        ({"rotary_dim": 36}, "36 of 128 dimensions rotate.* multiples of 8"),
        ({"cache_dtype": "float8_e4m3fn"}, "the cache has dtype float8_e4m3fn"),
    ],
)
def test_what_the_kernel_cannot_do_is_said(changes, message):
    spec = dataclasses.replace(KERNELS[0], **changes)
    args = jax.eval_shape(spec.arguments, jax.random.key(0))
    run = specs.run(spec, functools.partial(choose, implementation="mosaic"))
    with hw.assume(), pytest.raises(NotImplementedError, match=message):
        run(*args)


def test_the_kernel_runs_by_name_alone():
    args = jax.eval_shape(KERNELS[0].arguments, jax.random.key(0))
    with hw.assume():
        choice = specs.run(KERNELS[0], choose)(*args)
    assert choice.implementation == "xla"
    assert "no measured row" in choice.refused["mosaic"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"k": jnp.ones((3, 2, 4, 8))}, "q has 6 heads, which is no multiple of the 4"),
        ({"v": jnp.ones((3, 2, 2, 7))}, r"v has shape \(3, 2, 2, 7\), expected"),
        ({"slots": jnp.zeros(3, jnp.int32)}, r"slots has shape \(3,\)"),
        ({"slots": jnp.zeros((3, 2))}, "slots has dtype float32, expected int32"),
        ({"k_cache": jnp.ones((3, 9, 2))}, r"\(3, 9, 2\), expected 4 axes"),
        ({"v_cache": jnp.ones((3, 8, 2, 8))}, r"v_cache has shape \(3, 8, 2, 8\)"),
        ({"layer": jnp.int32(0)}, r"\(3, 9, 2, 8\), expected 5 axes"),
        ({"positions": None}, "come together, got none and one"),
        ({"cos_sin": jnp.ones((3, 2, 5))}, r"\(3, 2, 5\), expected an even number up"),
        ({"cos_sin": jnp.ones((3, 4))}, r"\(3, 4\), expected \(3, 2, 4\)"),
        ({"q_scale": jnp.ones(7)}, r"q_scale has shape \(7,\), expected \(8,\)"),
        ({"padded_group": 2}, "padded_group is 2, expected at least H / G = 3"),
    ],
)
def test_caller_errors_name_the_value(change, message):
    names = ("q", "k", "v", "slots", "k_cache", "v_cache", "positions")
    names = (*names, "position_cache", "cos_sin", "q_scale", "k_scale")
    call = dict(zip(names, arguments(SMALL), strict=True)) | change
    with pytest.raises(ValueError, match=message):
        rope_append(**call)


def test_the_limits_hold_what_is_measured():
    for spec in (*specs.specs("perf"), *specs.specs("model")):
        args = jax.eval_shape(spec.arguments, jax.random.key(0))
        with hw.assume():
            run = functools.partial(api.choose, implementation="mosaic")
            assert specs.run(spec, run)(*args).implementation == "mosaic"
        assert spec.dim in config.HEAD_DIMS


def test_the_benchmark_gives_the_caches_away_and_is_right():
    case = specs._case(dataclasses.replace(SMALL, length=16))
    args = case.arguments(jax.random.key(0))
    got, want = case.implementation("xla").results(args), case.reference(*args)
    assert_results((*got, 0), (*want, 0), rel=2e-5)
    assert "B3 S16 H6 G2 K8 R4" in case.workload


@pytest.mark.gpu
@pytest.mark.parametrize("spec", [*KERNELS, *specs.specs("model")], ids=str)
def test_the_kernel_on_the_card(spec):
    args = arguments(spec, 3)
    want = result(spec, args, "reference")
    run = compiled(spec, "mosaic")
    first = run(*args)
    assert_results(first, want, rel=4e-3)
    for _ in range(100):
        again = run(*args)
        for a, b in zip(first, again, strict=True):
            assert bool(jnp.array_equal(a, b, equal_nan=a.dtype != jnp.int32))
