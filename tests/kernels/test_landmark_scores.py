"""`landmark_scores`: every form against NumPy, the kernel in the interpreter."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import landmark_scores
from pallas_kernels._common import hw
from pallas_kernels._common.interpret import interpreted
from pallas_kernels._common.testing import assert_close
from pallas_kernels.landmark_scores import api, config, specs, tune


CI = {spec.name: spec for spec in specs.specs("ci")}
MODEL = {spec.name: spec for spec in specs.specs("model")}
# Of few heads, of many, with several layers, and what a cluster of 8 holds.
LOWERED = ("shadowkv_a", "shadowkv_c", "qwen3_next", "ci_group_1")


def arguments(spec, seed):
    """As the spec makes them, with NaN where no landmark is allowed."""
    q, landmarks, allowed, *layer = spec.arguments(jax.random.key(seed))
    # One row without any.
    allowed = allowed.at[-1, -1].set(False) if allowed.shape[1] > 1 else allowed
    landmarks = jnp.where(allowed[..., None], landmarks, jnp.nan)
    if layer:  # the other layer is not read
        landmarks = landmarks.at[0].set(jnp.nan)
    return q, landmarks, allowed, *layer


def by_hand(spec, q, landmarks, allowed, layer=None):
    """w and lse in float64."""
    if layer is not None:
        landmarks = landmarks[int(layer)]
    q, landmarks = (
        np.asarray(x.astype(jnp.float32), np.float64) for x in (q, landmarks)
    )
    allowed = np.asarray(allowed)
    rows = np.repeat(np.arange(spec.kv_heads), spec.heads // spec.kv_heads)
    s = np.einsum("bhk,bhck->bhc", q, landmarks[:, rows]) * spec.head_dim**-0.5
    if spec.logit_cap is not None:
        s = spec.logit_cap * np.tanh(s / spec.logit_cap)
    s = np.where(allowed[:, rows], s, -np.inf)
    top = np.maximum(s.max(-1, keepdims=True), -1e300)
    with np.errstate(divide="ignore"):
        lse = top + np.log(np.exp(s - top).sum(-1, keepdims=True))
    w = s - np.where(np.isfinite(lse), lse, 0.0)
    w = w.reshape(len(q), spec.kv_heads, -1, s.shape[-1]).max(2)
    return w, lse[..., 0]


def result(spec, args, implementation):
    op = functools.partial(landmark_scores, implementation=implementation)
    return jax.jit(specs.run(spec, op))(*args)


def assert_right(spec, args, got):
    want = by_hand(spec, *args)
    assert np.isneginf(want[0]).any()
    for name, a, b in zip(("w", "lse"), got, want, strict=True):
        assert a.dtype == jnp.float32
        assert_close(a, b, name=name)


@pytest.mark.parametrize("name", CI)
def test_xla_and_the_reference_are_the_formula(name):
    spec = CI[name]
    args = arguments(spec, 0)
    for implementation in ("reference", "xla"):
        assert_right(spec, args, result(spec, args, implementation))


CLUSTERS = {"ci_group_3": 2, "ci_group_1": 1, "ci_group_8": 2}


@pytest.mark.parametrize("name", CI)
def test_the_kernel_is_the_formula(monkeypatch, name):
    spec = CI[name]
    args = arguments(spec, 1)
    division = config.Config(cluster=CLUSTERS[name], slots=4)
    monkeypatch.setattr(config, "pick", lambda **_: division)
    # Two SMs: a cluster has one row after the other, and more tiles than slots.
    with hw.assume(dataclasses.replace(hw.H200, sms=2)), interpreted():
        got = result(spec, args, "mosaic")
    assert_right(spec, args, got)


@pytest.mark.parametrize("implementation", ["reference", "xla", "mosaic"])
def test_a_layer_that_is_none_is_the_nearest(monkeypatch, implementation):
    monkeypatch.setattr(config, "pick", lambda **_: config.Config(cluster=1, slots=4))
    draw = np.random.default_rng(4)
    q = jnp.asarray(draw.normal(size=(1, 1, 64)), jnp.bfloat16)
    landmarks = jnp.asarray(draw.normal(size=(3, 1, 1, 64, 64)), jnp.bfloat16)
    allowed = jnp.ones((1, 1, 64), bool)
    op = jax.jit(functools.partial(landmark_scores, implementation=implementation))
    with interpreted():
        for layer, nearest in ((-2, 0), (3, 2)):
            got = op(q, landmarks, allowed, layer=jnp.int32(layer))
            want = landmark_scores(
                q, landmarks[nearest], allowed, implementation="reference"
            )
            for a, b in zip(got, want, strict=True):
                assert_close(a, b)


@pytest.mark.parametrize("implementation", ["reference", "xla", "mosaic"])
def test_queries_and_landmarks_get_no_gradient(monkeypatch, implementation):
    monkeypatch.setattr(config, "pick", lambda **_: config.Config(cluster=1, slots=4))

    def loss(q, landmarks):
        w, lse = landmark_scores(
            q, landmarks, jnp.ones((1, 1, 64), bool), implementation=implementation
        )
        total = jnp.sum(q) + jnp.sum(landmarks)
        return jnp.sum(w) + jnp.sum(lse) + total.astype(jnp.float32)

    q, landmarks = jnp.ones((1, 1, 64), jnp.bfloat16), jnp.ones((1, 1, 64, 64))
    landmarks = landmarks.astype(jnp.bfloat16)
    with interpreted():
        grads = jax.jit(jax.grad(loss, (0, 1)))(q, landmarks)
    for grad in grads:
        assert (np.asarray(grad) == 1).all()


@pytest.mark.parametrize(
    "spec",
    [spec for spec in specs.SPECS if spec.name in LOWERED],
    ids=lambda spec: f"{spec.tag}-{spec.name}",
)
def test_lowers_for_the_card(spec):
    args = jax.eval_shape(spec.arguments, jax.random.key(0))
    op = functools.partial(landmark_scores, implementation="mosaic")
    with hw.assume():
        step = jax.jit(specs.run(spec, op)).trace(*args)
        text = step.lower(lowering_platforms=("cuda",)).as_text()
    assert "pk_landmark_scores" in text


def test_the_picked_division_fits_and_leaves_few_sms_idle():
    for spec in specs.SPECS:
        sizes = {
            "landmarks": spec.landmarks,
            "group": spec.heads // spec.kv_heads,
            "head_dim": spec.head_dim,
        }
        rows = spec.batch * spec.kv_heads
        picked = config.heuristic(rows=rows, **sizes)
        assert picked is not None
        division = config.Sizes(**sizes, cluster=picked.cluster)
        assert division.shared_bytes(picked.slots) <= hw.H200.smem_bytes
        assert division.share * picked.cluster >= division.results
        assert division.parts * division.heads == config.COLUMNS
        if spec.tag == "perf" and rows >= 66:
            places = hw.H200.sms // picked.cluster
            assert rows / (-(-rows // places) * places) > 0.9
        # As many tiles as have room, up to 8; a tuning run tries that cluster as well.
        full = division.shared_bytes(picked.slots + 1) > hw.H200.smem_bytes
        assert full or picked.slots == 8
        tried = config.candidates(**sizes)
        slots = [c.slots for c in tried if c.cluster == picked.cluster]
        assert config.MIN_SLOTS == min(slots) <= picked.slots
        assert max(slots) >= picked.slots
        for one in tried:
            division = config.Sizes(**sizes, cluster=one.cluster)
            assert division.shared_bytes(one.slots) <= hw.H200.smem_bytes


def test_the_tuning_command_tries_what_fits():
    for spec in specs.specs("perf"):
        (sweep,) = tune.sweeps(spec)
        assert len(sweep.tilings) >= 2
        assert sweep.key == config.table_key(
            rows=spec.batch * spec.kv_heads,
            landmarks=spec.landmarks,
            group=spec.heads // spec.kv_heads,
            head_dim=spec.head_dim,
        )


Q = jnp.ones((2, 4, 64), jnp.bfloat16)
L = jnp.ones((2, 2, 72, 64), jnp.bfloat16)
MAY = jnp.ones((2, 2, 72), bool)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": Q[0]}, r"q has shape \[4, 64\]"),
        ({"q": Q.astype(jnp.int32)}, "q is int32"),
        ({"q": Q[:, :3]}, "3 query heads are no multiple of the 2"),
        ({"landmarks": L[:, :, :71]}, r"landmarks have shape \[2, 2, 71, 64\]"),
        ({"layer": jnp.int32(0)}, r"expected \[L, B, G, C, K\]"),
        ({"landmarks": L[None], "layer": jnp.zeros(1)}, r"layer is float32\[1\]"),
        ({"allowed": MAY.astype(jnp.int32)}, "allowed is int32"),
        ({"logit_cap": 0.0}, "logit_cap=0.0"),
    ],
)
def test_caller_errors_name_the_value(change, message):
    call = {"q": Q, "landmarks": L, "allowed": MAY} | change
    with pytest.raises(ValueError, match=message):
        landmark_scores(**call)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dtype": "float32"}, "float32 and float32"),
        ({"head_dim": 96}, "K=96"),
        ({"heads": 9}, "9 query heads"),
        ({"landmarks": 68}, "1 rows of 68 landmarks"),
        ({"landmarks": 56}, "1 rows of 56 landmarks"),
        ({"landmarks": 200_000}, "scores of 200000 landmarks"),
    ],
)
def test_what_the_kernel_cannot_do_is_said(change, message):
    spec = dataclasses.replace(CI["ci_group_1"], **change)
    args = jax.eval_shape(spec.arguments, jax.random.key(0))
    with hw.assume(), pytest.raises(NotImplementedError, match=message):
        api.choose(*args, implementation="mosaic")


@pytest.mark.parametrize("scale", [0.0, -0.5, float("nan")])
def test_the_kernel_takes_positive_scales_alone(scale):
    with hw.assume(), pytest.raises(NotImplementedError, match=f"scale = {scale}"):
        landmark_scores(Q, L, MAY, scale=scale, implementation="mosaic")
    with hw.assume():
        choice = api.choose(Q, L, MAY, scale=0.5, implementation="mosaic")
    assert choice.implementation == "mosaic"


def test_none_keeps_xla_until_a_row_was_measured():
    with hw.assume():
        choice = api.choose(Q, L, MAY)
    assert choice.implementation == "xla"
    assert "not faster at every" in choice.refused["mosaic"]


def test_impossible_divisions_are_refused():
    with pytest.raises(ValueError, match="cluster=3"):
        config.Config(cluster=3)
    with pytest.raises(ValueError, match="slots=3"):
        config.Config(slots=3)


@pytest.mark.gpu
@pytest.mark.parametrize("name", [*CI, *MODEL])
def test_the_kernel_on_the_card(name):
    spec = (CI | MODEL)[name]
    args = arguments(spec, 2)
    op = functools.partial(landmark_scores, implementation="mosaic")
    step = jax.jit(specs.run(spec, op))
    first = step(*args)
    want = by_hand(spec, *args)
    for label, a, b in zip(("w", "lse"), first, want, strict=True):
        # The card's own exponential and logarithm.
        assert_close(a, b, rel=1e-5, name=label)
    for _ in range(100):
        for a, b in zip(step(*args), first, strict=True):
            np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("name", "cluster"), [("qwen3_next", 2), ("gpt_oss", 4), ("gpt_oss", 8)]
)
def test_any_cluster_on_the_card(monkeypatch, name, cluster):
    spec = MODEL[name]
    args = arguments(spec, 3)
    division = config.Config(cluster=cluster, slots=4)
    monkeypatch.setattr(config, "pick", lambda **_: division)
    got = result(spec, args, "mosaic")
    for label, a, b in zip(("w", "lse"), got, by_hand(spec, *args), strict=True):
        assert_close(a, b, rel=1e-5, name=label)
