"""The kernels of `sort_dispatch`: in the interpreter, lowered, and on the card."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels._common import hw, indexed
from pallas_kernels._common.interpret import interpreted
from pallas_kernels._common.testing import assert_close
from pallas_kernels.sort_dispatch import (
    api,
    config,
    limit_rows,
    sort_dispatch,
    specs,
    top_experts,
    tune,
)


CI = {spec.name: spec for spec in specs.specs("ci")}
MODEL = {spec.name: spec for spec in specs.specs("model")}
MOVING = [
    part.name for part in specs.PARTS if part.has_kernel and part.name != "top-k fwd"
]
PARTS = {part.name: part for part in specs.PARTS}

# Compiling is most of what these tests would do; speed of the result is not tested.
jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})


def drawn(spec):
    """As `spec.arguments` draws them, without a program."""
    draw = np.random.default_rng(0)
    ids = draw.random((spec.tokens, spec.experts)).argsort(axis=1)[:, : spec.slots]
    ids[draw.random(spec.tokens) < spec.unrouted] = spec.experts
    x, do = (
        draw.standard_normal((spec.tokens, spec.dim)).astype(jnp.dtype(spec.dtype))
        for _ in range(2)
    )
    weights = draw.random((spec.tokens, spec.slots), np.float32)
    return ids.astype(np.int32), x, weights, do


@functools.cache
def plan_of(spec):
    """Arrays of the plan of what is drawn."""
    plan = jit(lambda ids: sort_dispatch(ids, spec.experts))(drawn(spec)[0])
    return plan.token, plan.row, plan.group_sizes


def arguments(spec, part):
    """Arguments of a part of this plan."""
    like = jax.eval_shape(functools.partial(part.arguments, spec), jax.random.key(0))
    draw = np.random.default_rng(1)
    arrays = (draw.standard_normal(x.shape).astype(x.dtype) for x in like[3:])
    return *plan_of(spec), *map(jnp.asarray, arrays)


def exact(args):
    return jax.tree.map(
        lambda a: a.astype(jnp.float32) if jnp.issubdtype(a.dtype, jnp.floating) else a,
        args,
    )


def with_junk(args):
    """NaN in what is [M, D] of the arguments, where no row is routed."""
    token, row, sizes, *arrays = args
    routed = jnp.arange(token.shape[0]) < jnp.sum(sizes)
    arrays = [
        jnp.where(routed[:, None], a, jnp.nan).astype(a.dtype)
        if a.ndim == 2 and a.shape[0] == token.shape[0]
        else a
        for a in arrays
    ]
    return token, row, sizes, *arrays


def tolerance(dtype):
    return {"float32": 1e-6, "float16": 1e-3, "bfloat16": 4e-3}[str(dtype)]


# Each of the rows has its kind of end: short last blocks, 4, 8 and 16 bytes in a piece.
@pytest.mark.parametrize(
    ("name", "part"),
    [
        *(("ci_bf16", part) for part in MOVING),
        *(("ci_odd_row", part) for part in ("permute fwd", "combine fwd")),
        *(("ci_t7_e3_k2", part) for part in ("permute bwd", "combine bwd")),
    ],
)
def test_every_way_of_a_row_equals_the_reference(name, part):
    spec, part = CI[name], PARTS[part]
    spec = dataclasses.replace(spec, dim=spec.dim + spec.dim % 2)

    def both(args):
        args, names = with_junk(args), ("mosaic", "reference")
        modules = map(specs.module_of, names)
        return [
            part.run(spec, module, *given)
            for module, given in zip(modules, (args, exact(args)), strict=True)
        ]

    with interpreted():
        got, want = map(jax.tree.leaves, jit(both)(arguments(spec, part)))
    for a, b in zip(got, want, strict=True):
        assert np.isfinite(np.asarray(a)).all()
        assert_close(a, b, rel=0.0 if part.exact else tolerance(a.dtype))


def test_pieces_of_a_thread_and_slots_in_flight_change_no_bit():
    spec = specs.Spec(name="", tag="ci", tokens=13, slots=4, experts=6, dim=24)
    (found,) = tune.sweeps(spec)
    args = drawn(spec)
    with interpreted():
        (want,) = jit(specs.run(spec, specs.module_of("mosaic"), False))(*args)
        for settings in ((1, 2, 1), (2, 1, 3)):
            names = ("copied", "summed", "unroll")
            tried = config.Config(**dict(zip(names, settings, strict=True)))
            (got,) = jit(found.make(tried))(*args)
            np.testing.assert_array_equal(got, want, err_msg=str(tried))
    assert found.key == "slots=4,dim=24,dtype=bfloat16"


def test_a_measured_table_is_read(monkeypatch):
    table = {"slots=4,dim=24,dtype=bfloat16": {"copied": 2, "unroll": 3, "ms": 0.1}}
    monkeypatch.setattr(config.tuning, "lookup", lambda op, key: table.get(key))
    assert config.pick(4, 24, "bfloat16") == config.Config(copied=2, unroll=3)
    assert config.pick(5, 24, "bfloat16") == config.Config()


def test_a_plan_that_is_cut_off_adds_nothing_from_behind():
    ids = np.random.default_rng(0).integers(0, 6, (21, 2)).astype(np.int32)
    y = np.random.default_rng(1).standard_normal((17, 8)).astype(np.float32)
    weights = np.random.default_rng(2).random((21, 2), np.float32)

    @jit
    def both(ids, y, weights):
        plan = limit_rows(sort_dispatch(ids, 5), 17)

        def run(name):
            combine = specs.module_of(name).combine
            o, pull = jax.vjp(lambda y, w: combine(y, plan, w), y, weights)
            return o, *pull(o)

        return run("mosaic"), run("reference")

    with interpreted():
        got, want = both(ids, y, weights)
    for a, b in zip(got, want, strict=True):
        assert_close(a, b, rel=1e-6)


def odd_scores(tokens, experts):
    """Ties, both zeros, NaN of both signs and infinities."""
    rng = np.random.default_rng(0)
    scores = np.round(rng.standard_normal((tokens, experts)) * 2) / 2
    scores[0, :3] = np.nan, -np.nan, np.inf
    scores[1, :] = np.nan
    scores[2, :] = 0.0
    scores[2, ::2] = -0.0
    scores[3, 1:] = -np.inf
    return scores.astype(np.float32)


CHOICES = {
    "plain": ((6, 40, 5), {}),
    "all": ((5, 33, 33), {}),
    "groups": ((6, 48, 4), {"num_groups": 4, "top_groups": 2}),
    "groups_of_a_warp": (
        (5, 64, 6),
        {"num_groups": 2, "top_groups": 1, "group_score_top": 3},
    ),
}


@pytest.mark.parametrize("name", CHOICES)
def test_choices_equal_a_stable_sort(name):
    (tokens, experts, top_k), groups = CHOICES[name]
    scores = odd_scores(tokens, experts)
    # Negative: a group that is not kept must not win by a zero.
    bias = np.round(np.random.default_rng(3).standard_normal(experts)) - 4
    bias = bias.astype(np.float32) if groups else None

    @jit
    def all_of_them(scores):
        op = functools.partial(top_experts, scores, top_k, bias=bias, **groups)
        return {i: op(implementation=i) for i in ("mosaic", "xla", "reference")}

    with interpreted():
        found = jax.tree.map(np.asarray, all_of_them(scores))
    np.testing.assert_array_equal(found["mosaic"], found["reference"])
    np.testing.assert_array_equal(found["xla"], found["reference"])
    assert all(len(set(row)) == top_k for row in found["mosaic"].tolist())
    if name == "plain":
        np.testing.assert_array_equal(found["mosaic"][1], np.arange(top_k))
        np.testing.assert_array_equal(found["mosaic"][2], np.arange(top_k))


def test_groups_that_are_not_kept_stay_out_below_zero():
    """All biased scores negative: a mask of zeros would win."""
    scores = jnp.zeros((1, 8))
    bias = jnp.full((8,), -2.0).at[jnp.array([2, 3])].set(-1.0)
    groups = {"num_groups": 4, "top_groups": 1}

    @jit
    def both(scores, bias):
        op = functools.partial(top_experts, scores, 2, bias=bias, **groups)
        return [op(implementation=name) for name in ("xla", "reference")]

    for ids in both(scores, bias):
        assert ids.tolist() == [[2, 3]]


@pytest.mark.parametrize("chosen", [1, 5])
def test_the_gradient_of_scores_is_that_of_a_gather(chosen):
    scores = np.random.default_rng(0).random((7, 12), np.float32)
    ids = np.argsort(-scores, axis=1)[:, :chosen].astype(np.int32)
    dy = np.random.default_rng(1).random((7, chosen), np.float32)

    def pulled(read):
        return jax.vjp(lambda scores: read(scores, ids), scores)[1](dy)[0]

    def plain(scores, ids):
        return jnp.take_along_axis(scores, ids, axis=1)

    assert_close(pulled(api.chosen_scores), pulled(plain), rel=0.0)
    text = str(jax.make_jaxpr(lambda: pulled(api.chosen_scores))())
    assert "scatter" not in text


def test_the_choice_has_no_gradient_in_scores_nor_in_bias():
    draw = np.random.default_rng(2)
    scores, bias = draw.random((7, 12), np.float32), draw.random(12, np.float32)

    def pull(implementation):
        def loss(scores, bias):
            ids = top_experts(scores, 3, bias=bias, implementation=implementation)
            return jnp.sum(api.chosen_scores(scores, ids)), ids

        return jax.grad(loss, (0, 1), has_aux=True)(scores, bias)

    taken = np.argsort(-(scores + bias), axis=1)[:, :3]
    want = np.zeros_like(scores)
    np.put_along_axis(want, taken, 1.0, axis=1)
    with interpreted():
        found = jit(lambda: [pull(i) for i in ("mosaic", "xla", "reference")])()
    for grads, ids in found:
        np.testing.assert_array_equal(ids, taken)
        np.testing.assert_array_equal(grads[0], want)
        assert not np.asarray(grads[1]).any()


def shapes_of(spec, part):
    return jax.eval_shape(
        functools.partial(PARTS[part].arguments, spec), jax.random.key(0)
    )


LAUNCHES = {
    "top-k fwd": ("top",),
    "permute fwd": ("gather",),
    "permute bwd": ("reduce",),
    "combine fwd": ("reduce",),
    "combine bwd": ("pull",),
    "spread": ("gather",),
}


# Slots of less than a turn of the loop, of one, and of two and a rest; an expert a lane
# and 16, with a bias and without, and groups.
LOWERED = [
    *(s for s in specs.specs("perf") if s.name in ("gpt_oss_20b", "nemotron3_super")),
    MODEL["deepseek_v3"],
]


@pytest.mark.parametrize("part", LAUNCHES)
@pytest.mark.parametrize("spec", LOWERED, ids=lambda spec: spec.name)
def test_lowers_for_the_card_at_every_kind_of_size(spec, part):
    run = functools.partial(PARTS[part].run, spec, specs.module_of("mosaic"))
    with hw.assume():
        step = jax.jit(run).trace(*shapes_of(spec, part))
        text = step.lower(lowering_platforms=("cuda",)).as_text()
    for name in LAUNCHES[part]:
        assert f"pk_sort_dispatch_{name}" in text


def test_none_keeps_xla_while_no_row_speaks_for_the_kernels():
    scores = jax.ShapeDtypeStruct((8, 4), jnp.float32)
    with hw.assume():
        choice = api.choose(scores, 2, function="top_experts")
        assert choice.implementation == "xla"
        assert "no measured row" in choice.refused["mosaic"]
        named = api.choose(scores, 2, function="top_experts", implementation="mosaic")
        assert named.implementation == "mosaic"


def test_what_the_kernels_cannot_do_is_said():
    spec = CI["ci_bf16"]
    plan = jax.eval_shape(
        lambda ids: sort_dispatch(ids, spec.experts),
        jax.ShapeDtypeStruct((spec.tokens, spec.slots), jnp.int32),
    )
    for shape, dtype, message in (
        ((spec.tokens, 3), jnp.bfloat16, "row of 3 bfloat16"),
        ((spec.tokens, 4), jnp.float8_e4m3fn, "dtype=float8_e4m3fn"),
    ):
        x = jax.ShapeDtypeStruct(shape, dtype)
        with hw.assume(), pytest.raises(NotImplementedError, match=message):
            api.choose(x, plan, function="permute", implementation="mosaic")
    scores = jax.ShapeDtypeStruct((4, 2048), jnp.float32)
    with hw.assume(), pytest.raises(NotImplementedError, match="2048 experts"):
        api.choose(scores, 4, function="top_experts", implementation="mosaic")
    if not hw.is_hopper():
        with pytest.raises(NotImplementedError, match="Hopper"):
            api.choose(scores, 4, function="top_experts", implementation="mosaic")


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ({"scores": np.zeros((3, 8), np.int32)}, r"scores is int32\[3, 8\]"),
        ({"bias": np.zeros(4, np.float32)}, r"bias is float32\[4\]"),
        ({"top_k": 9}, "top_k is 9, expected 1 to 8"),
        ({"num_groups": 3}, "num_groups is 3, expected a divisor of 8"),
        ({"num_groups": 4, "top_groups": 5}, "top_groups is 5, expected 1 to 4"),
        ({"num_groups": 4, "group_score_top": 3}, "group_score_top is 3"),
        ({"num_groups": 4, "top_groups": 1, "top_k": 3}, "top_k is 3, expected 1 to 2"),
    ],
)
def test_caller_errors_name_the_value(call, message):
    call = {"scores": np.zeros((3, 8), np.float32), "top_k": 2} | call
    with pytest.raises(ValueError, match=message):
        top_experts(call.pop("scores"), call.pop("top_k"), **call)
    with pytest.raises(ValueError, match="unroll=0"):
        config.Config(unroll=0)


@pytest.mark.parametrize(
    ("how", "dtype"), [("max", "float32"), ("sum", "int32"), ("mean", "float32")]
)
def test_what_a_warp_cannot_combine_is_said(how, dtype):
    with pytest.raises(ValueError, match=f"'{how}' of {dtype}"):
        indexed.across_warp(jnp.zeros(128, dtype), how)


@pytest.mark.gpu
@pytest.mark.parametrize("part", LAUNCHES)
@pytest.mark.parametrize("name", MODEL)
def test_on_the_card_at_model_shapes(name, part):
    spec = MODEL[name]
    args = jax.jit(functools.partial(PARTS[part].arguments, spec))(jax.random.key(4))
    if part != "top-k fwd":
        args = jax.jit(with_junk)(args)
    run = functools.partial(PARTS[part].run, spec)
    step = jax.jit(functools.partial(run, specs.module_of("mosaic")))
    want = jax.jit(functools.partial(run, specs.module_of("reference")))(*exact(args))
    first = step(*args)
    for a, b in zip(jax.tree.leaves(first), jax.tree.leaves(want), strict=True):
        rel = 0.0 if PARTS[part].exact else 4 * tolerance(a.dtype)
        assert_close(a, b, rel=rel, name=part)
    for _ in range(100):
        for a, b in zip(
            jax.tree.leaves(step(*args)), jax.tree.leaves(first), strict=True
        ):
            assert bool(jnp.all(a == b))


@pytest.mark.gpu
@pytest.mark.parametrize("implementation", ["xla", "mosaic"])
def test_ties_go_to_the_lowest_id_on_the_card(implementation):
    """Few distinct scores of many experts, with what may be in none of them."""
    scores = jnp.asarray(odd_scores(4096, 512))
    for top_k in (10, 22):
        want = top_experts(scores, top_k, implementation="reference")
        got = top_experts(scores, top_k, implementation=implementation)
        np.testing.assert_array_equal(got, want)
