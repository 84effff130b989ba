"""Mosaic kernels of `ssd`, interpreted, against the recurrence."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params
from running import jit

from pallas_kernels._common import hw
from pallas_kernels._common.interpret import interpreted
from pallas_kernels._common.testing import assert_close
from pallas_kernels.gated_delta_rule import document_starts
from pallas_kernels.gated_delta_rule.config_mosaic import CHUNK, MIN_LOG_DECAY, Gate
from pallas_kernels.gated_delta_rule.kernel_inverse import LOG2_E
from pallas_kernels.ssd import choose, specs, ssd
from pallas_kernels.ssd.config_mosaic import (
    HEAD_DIM,
    STATE_DIM,
    Config,
    Shapes,
    plan_segments,
    shapes_of,
)
from pallas_kernels.ssd.reference import NO_LIMIT


NAMES = ("y", "state", "dx", "ddt", "da", "db", "dc", "dd", "dbias", "dinitial")
LIMITS = dict.fromkeys(NAMES, 8e-3)
LIMITS |= dict.fromkeys(("y", "state"), 5e-3)
LIMITS |= dict.fromkeys(("ddt", "da", "dbias"), 2e-2)


def arguments(batch=1, time=CHUNK, heads=2, groups=1, dtype="bfloat16", seed=0):
    """x, dt, a, b, c, d, dt_bias, initial state; the first head never forgets."""
    rng = np.random.default_rng(seed)

    def normal(*shape):
        return rng.standard_normal(shape, np.float32)

    x = normal(batch, time, heads, HEAD_DIM).astype(dtype)
    bias = np.linspace(-0.5, 0.5, heads, dtype=np.float32)
    dt = normal(batch, time, heads) - 2 - bias
    a = -rng.uniform(0.1, 2.0, heads).astype(np.float32)
    a[0] = 0
    b, c = STATE_DIM**-0.5 * normal(2, batch, time, groups, STATE_DIM)
    d = normal(heads)
    state = normal(batch, heads, HEAD_DIM, STATE_DIM)
    arrays = (x, dt, a, b.astype(dtype), c.astype(dtype), d, bias, state)
    return tuple(jnp.asarray(m) for m in arrays)


def first(batch, time, *starts):
    is_first = np.zeros((batch, time), bool)
    for row, token in starts:
        is_first[row, token] = True
    return jnp.asarray(is_first)


def exact(args):
    return tuple(m.astype(jnp.float32) for m in args)


def rule(args, is_first, implementation, config=None, is_real=None, dt_limit=NO_LIMIT):
    *inputs, d, bias, state = args
    return ssd(
        *inputs,
        d=d,
        dt_bias=bias,
        dt_limit=dt_limit,
        is_first=is_first,
        is_real=is_real,
        initial_state=state,
        config=config,
        implementation=implementation,
    )


# One program for each implementation and each set of shapes. A forward is compiled
# longer than it runs, so not by `running.jit`.
compiled_rule = jax.jit(rule, static_argnums=(2, 3))


def cotangents(args):
    rng = np.random.default_rng(99)
    dy, d_state = (rng.standard_normal(args[i].shape, np.float32) for i in (0, -1))
    return jnp.asarray(dy.astype(args[0].dtype)), jnp.asarray(d_state)


def rule_with_gradients(args, is_first, cotangents, implementation, config=None):
    """y, final state and the eight gradients; some steps are clipped."""
    run = functools.partial(rule, dt_limit=(0.0, 3.5))
    out, pullback = jax.vjp(
        lambda *args: run(args, is_first, implementation, config), *args
    )
    dy, d_state = cotangents
    return *out, *pullback((dy.astype(out[0].dtype), d_state))


gradients = jit(rule_with_gradients, static_argnums=(3, 4))


def assert_all_close(got, want, names=NAMES):
    for name, a, b in zip(names, got, want, strict=True):
        assert_close(a, b, rel=LIMITS[name], name=name)


def test_factors_are_sums_over_a_document_of_any_size():
    """Log decays from none to the floor side by side, in float64 by hand."""
    from pallas_kernels.ssd import kernel_prepare

    rng = np.random.default_rng(0)
    x, _, _, b, *_ = arguments(time=2 * CHUNK)
    shapes = shapes_of(x, b)
    sizes = (2 * CHUNK, shapes.padded_heads)
    step = rng.choice(np.float32([0, 1e-4, 0.3, 7.7, 110, 200]), sizes)
    rate = -rng.uniform(0.5, 1.0, sizes[1]).astype(np.float32)
    g = np.maximum(step * rate, MIN_LOG_DECAY) * np.float32(LOG2_E)
    is_first = first(1, 2 * CHUNK, (0, 5), (0, CHUNK + 30), (0, CHUNK + 31))
    starts = document_starts(is_first, CHUNK)
    with interpreted():
        table = jit(kernel_prepare.prepare, static_argnums=0)(
            shapes, step, rate, starts
        )
    assert table.shape == (shapes.padded_heads, 2, len(Gate), CHUNK)
    for head, chunk in ((0, 0), (1, 1), (63, 1)):
        at = slice(chunk * CHUNK, (chunk + 1) * CHUNK)
        decay, begin = g[at, head].astype(np.float64), np.asarray(starts)[0, at]
        total = np.array([decay[begin[i] + 1 : i + 1].sum() for i in range(CHUNK)])
        left = np.array([decay[i + 1 :].sum() for i in range(CHUNK)])
        got = table[head, chunk]
        np.testing.assert_allclose(got[Gate.TOTAL], total, rtol=2e-6)
        enter = np.where(begin < 0, 2.0**total, 0)
        leave = np.where(begin == begin[-1], 2.0**left, 0)
        np.testing.assert_allclose(got[Gate.ENTER], enter, atol=2e-6)
        np.testing.assert_allclose(got[Gate.LEAVE], leave, atol=2e-6)
        np.testing.assert_array_equal(got[Gate.BETA], step[at, head])
        np.testing.assert_array_equal(got[Gate.START], begin)


def _left_operands(jaxpr):
    """Of the tensor cores' products, those inside other equations included."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "wgmma_ref":
            yield equation.invars[1].aval
        for inner in jaxprs_in_params(equation.params):
            yield from _left_operands(inner)


def test_masks_are_multiplied_from_shared_memory():
    """In registers their constants are lost: ptxas 13.0 to 13.2 sets one of them only
    after the products that read it, and neither the interpreter nor lowering shows it.
    """
    from pallas_kernels.ssd import kernel_prepare, kernel_steps

    x, _, _, b, *_ = arguments(time=2 * CHUNK)
    shapes = shapes_of(x, b)
    table = jax.ShapeDtypeStruct((2 * CHUNK, shapes.padded_heads), jnp.float32)
    start = jax.ShapeDtypeStruct((1, 2 * CHUNK), jnp.int32)
    by_head = jax.ShapeDtypeStruct((shapes.padded_heads, 2 * CHUNK), jnp.float32)
    grads = dict.fromkeys(kernel_steps.BY_HEAD, by_head)
    gates = (shapes.padded_heads, 2, len(Gate), CHUNK)
    gates = jax.ShapeDtypeStruct(gates, jnp.float32)
    rate = jax.ShapeDtypeStruct((shapes.padded_heads,), jnp.float32)
    steps = functools.partial(kernel_steps.step_gradients, shapes, NO_LIMIT)
    with hw.assume():
        for kernel, args, sums in (
            (
                functools.partial(kernel_prepare.prepare, shapes),
                (table, rate, start),
                2,
            ),
            (steps, (grads, gates, rate), 1),
        ):
            operands = list(_left_operands(jax.make_jaxpr(kernel)(*args).jaxpr))
            assert len(operands) == sums * kernel_prepare.PARTS
            assert all(str(x).startswith("Ref<smem>") for x in operands), operands


def test_tables_of_many_heads_are_those_of_each():
    """Two tiles of heads and two rows; heads behind the last one may hold anything."""
    from pallas_kernels.ssd import kernel_prepare, kernel_steps

    heads, padded = 66, 128
    shapes = Shapes(
        batch=2, time=2 * CHUNK, heads=heads, groups=1, dtype=jnp.dtype("bfloat16")
    )
    assert shapes.padded_heads == padded
    rng = np.random.default_rng(0)
    is_first = first(2, 2 * CHUNK, (0, 5), (1, CHUNK), (1, 2 * CHUNK - 1))
    starts = np.asarray(document_starts(is_first, CHUNK)).reshape(2, 2, CHUNK)
    by_token = abs(rng.normal(size=(4 * CHUNK, padded)).astype(np.float32))
    limit = (0.1, 2.0)
    # Some decays are at their floor.
    rate = -rng.choice(np.float32([0, 0.5, 16, 200]), padded)
    grads = {n: rng.normal(size=(2, padded, 2, CHUNK)) for n in kernel_steps.BY_HEAD}
    for array in grads.values():
        array[:, heads:] = np.nan
    flat = {
        n: a.reshape(2 * padded, 2 * CHUNK).astype(np.float32) for n, a in grads.items()
    }
    with interpreted():
        table = jit(kernel_prepare.prepare, static_argnums=0)(
            *(shapes, by_token, rate, starts.reshape(2, -1))
        )
        ddt, sums = jit(kernel_steps.step_gradients, static_argnums=(0, 1))(
            *(shapes, limit, flat, table, rate)
        )
    table = np.asarray(table).reshape(2, padded, 2, len(Gate), CHUNK)
    step = by_token.reshape(2, 2, CHUNK, padded).transpose(0, 3, 1, 2)
    np.testing.assert_array_equal(table[:, :, :, Gate.BETA], step)
    ddt = np.asarray(ddt).reshape(2, 2, CHUNK, padded)[..., :heads]
    grads = {n: a[:, :heads].astype(np.float32) for n, a in grads.items()}
    step, rate = step[:, :heads].astype(np.float64), rate[:heads, None, None]
    begin = starts[:, None, :, None, :]  # of the token that is summed
    token, other = np.arange(CHUNK)[:, None], np.arange(CHUNK)[None]
    later = (token <= other) & (token > begin)
    reaches = token[:, 0] > starts[:, None, :, -1:]
    dg = (later * grads["d_total"][..., None, :]).sum(-1)
    dg += reaches * grads["exits"].sum(-1, keepdims=True)
    dg *= step * rate > MIN_LOG_DECAY
    inside = (step > limit[0]) & (step < limit[1])
    want = (grads["dstep"] + dg * rate) * -np.expm1(-step) * inside
    np.testing.assert_allclose(ddt.transpose(0, 3, 1, 2), want, rtol=1e-5, atol=1e-4)
    for name, terms in (("da", step * dg), ("dbias", want), ("dd", grads["dd"])):
        got = np.asarray(sums[name]).reshape(2, 2, padded)[..., :heads]
        want = terms.sum(-1).transpose(0, 2, 1)
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=2e-3, err_msg=name)


def test_slopes_of_steps_of_any_size():
    from pallas_kernels.ssd.kernel_steps import slope

    step = np.geomspace(1e-12, 50, 1000, dtype=np.float32)
    want = -np.expm1(-step.astype(np.float64))
    np.testing.assert_allclose(jit(slope, static_argnums=1)(step, NO_LIMIT), want, 1e-6)


@pytest.mark.parametrize(
    "dtype, time, heads, groups, segments",
    [("bfloat16", 100, 4, 2, 1), ("float16", 2 * CHUNK + 10, 2, 1, 2)],
)
def test_forward_is_the_recurrence(dtype, time, heads, groups, segments):
    """Groups of two heads; documents begin inside chunks; rows are padded."""
    args = arguments(time=time, heads=heads, groups=groups, dtype=dtype)
    is_first = first(1, time, (0, 5), (0, time - 3))
    with interpreted():
        got = compiled_rule(args, is_first, "mosaic", Config(segments=segments))
    want = compiled_rule(exact(args), is_first, "reference")
    assert_all_close(got, want, NAMES[:2])


def test_states_cross_segments_and_what_ends_inside_one_does_not():
    """The middle one of three has both ends; the last one starts a document."""
    time = 6 * CHUNK
    args = arguments(batch=2, time=time)
    is_first = first(2, time, (0, 4 * CHUNK + 5), (1, 5))
    with interpreted():
        got = compiled_rule(args, is_first, "mosaic", Config(segments=3, stages=2))
    want = compiled_rule(exact(args), is_first, "reference")
    assert_all_close(got, want, NAMES[:2])


@pytest.mark.parametrize("stages", [2, 3])
def test_places_of_the_forward_ring_are_used_again(stages):
    time = 4 * CHUNK
    args = arguments(time=time)
    is_first = first(1, time, (0, 5))
    with interpreted():
        got = compiled_rule(args, is_first, "mosaic", Config(segments=1, stages=stages))
    want = compiled_rule(exact(args), is_first, "reference")
    assert_all_close(got, want, NAMES[:2])


def test_total_decay_and_padding_leave_finite_results():
    x, dt, a, *rest = arguments(time=100)
    dt, a = dt.at[:, 1::7].set(30.0), a.at[1].set(-16.0)
    args = (x, dt, a, *rest)
    is_real = jnp.arange(100)[None] < 90
    is_first = first(1, 100)
    with interpreted():
        got = jit(rule, static_argnums=(2, 3))(
            args, is_first, "mosaic", None, is_real=is_real
        )
    want = rule(exact(args), is_first, "reference", None, is_real)
    assert_all_close(got, want, NAMES[:2])


def test_a_document_is_bit_equal_wherever_it_stands():
    # Row 0 has two documents, row 1 the second of them and then padding.
    time = 2 * CHUNK
    x, dt, a, b, c, *rest = arguments(batch=2, time=time)
    x, dt, b, c = (m.at[1, :CHUNK].set(m[0, CHUNK:]) for m in (x, dt, b, c))
    is_real = jnp.arange(time)[None] < jnp.array([[time], [CHUNK]])
    is_first = first(2, time, (0, CHUNK), (1, 0))
    with interpreted():
        y, last = jit(rule, static_argnums=(2, 3))(
            (x, dt, a, b, c, *rest), is_first, "mosaic", None, is_real=is_real
        )
    np.testing.assert_array_equal(y[0, CHUNK:], y[1, :CHUNK])
    np.testing.assert_array_equal(last[0], last[1])


@pytest.mark.parametrize(
    "chunks, heads, groups, dtype, config",
    [
        (6, 2, 1, "float16", Config(segments=3)),
        (2, 4, 2, "bfloat16", Config(segments=1)),
    ],
    ids=["segments", "groups"],
)
def test_all_gradients_are_those_of_the_recurrence(
    chunks, heads, groups, dtype, config
):
    """Heads that never and that quickly forget, steps of almost zero; the middle one of
    three segments has both ends. One SM, so that a ring's only block takes one chunk
    after the other."""
    time = chunks * CHUNK - 10
    x, dt, a, *rest = arguments(time=time, heads=heads, groups=groups, dtype=dtype)
    dt, a = dt.at[:, 1::9, 1].set(4.0), a.at[1].set(-16.0)
    dt = dt.at[:, 4::25].set(-80.0).at[:, 6::50].set(-99.0)
    args = (x, dt, a, *rest)
    starts = (5, CHUNK + 30, CHUNK + 31)
    is_first = first(1, time, *((0, t) for t in starts))
    known = (is_first, cotangents(args))
    with hw.assume(dataclasses.replace(hw.H200, sms=1)), interpreted():
        got = gradients(args, *known, "mosaic", config)
    want = gradients(exact(args), *known, "reference")
    assert_all_close(got, want)
    # The quickly forgetting head alone: its gradients are the smaller ones.
    for name in ("dx", "ddt"):
        at = NAMES.index(name)
        assert_all_close([got[at][:, :, 1]], [want[at][:, :, 1]], [name])


def test_places_of_the_rings_are_used_again():
    time = 4 * CHUNK
    args = arguments(time=time)
    known = (first(1, time, (0, 70)), cotangents(args))
    with hw.assume(dataclasses.replace(hw.H200, sms=1)), interpreted():
        got = gradients(args, *known, "mosaic", Config(segments=1))
    want = gradients(exact(args), *known, "reference")
    for name, a, b in zip(NAMES, got, want, strict=True):
        # A sum over all tokens of two heads that cancels: mostly rounding in bf16.
        if name != "da":
            assert_close(a, b, rel=LIMITS[name], name=name)


def test_gradients_have_the_shapes_and_dtypes_of_their_inputs():
    args = jax.eval_shape(lambda: arguments(batch=2, time=100, heads=4))

    def loss(*args):
        y, state = rule(args, None, "mosaic")
        return jnp.sum(y.astype(jnp.float32)) + jnp.sum(state)

    with hw.assume():
        grads = jax.eval_shape(jax.grad(loss, argnums=range(8)), *args)
    for grad, arg in zip(grads, args, strict=True):
        assert (grad.shape, grad.dtype) == (arg.shape, arg.dtype)


def test_without_a_card_the_kernels_refuse_and_nothing_picks_them():
    args = arguments()[:5]
    with pytest.raises(NotImplementedError, match="Hopper"):
        choose(*args, implementation="mosaic")
    assert choose(*args).implementation == "xla"
    with hw.assume():
        assert choose(*args, implementation="mosaic").config == Config()
        assert "T is below 1024" in choose(*args).refused["mosaic"]
        x, dt, a, b, c = args
        long = [jnp.tile(t, (1, 1024, *[1] * (t.ndim - 2))) for t in (x, dt, b, c)]
        assert choose(*long[:2], a, *long[2:]).implementation == "mosaic"


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda x, b: (x[..., :32], b), "V = 32, the kernels have 64"),
        (lambda x, b: (x, b[..., :64]), "N = 64, the kernels have 128"),
        (lambda x, b: (x[:, :0], b[:, :0]), "T = 0"),
        (lambda x, b: (x[:, :, :1], b), "1 heads read each group"),
        (lambda x, b: exact((x, b)), "dtype = float32"),
    ],
)
def test_limits_are_named(change, message):
    x, _, _, b, *_ = arguments()
    x, b = change(x, b)
    with hw.assume(), pytest.raises(NotImplementedError, match=message):
        choose(x, None, None, b, implementation="mosaic")


def test_other_values_are_refused():
    args = arguments()
    with hw.assume():
        with pytest.raises(NotImplementedError, match="chunk_size = 32"):
            choose(*args[:5], chunk_size=32, implementation="mosaic")
        with pytest.raises(ValueError, match="has segments=2, T = 64 has 1 chunks"):
            rule(args, None, "mosaic", Config(segments=2))
    with pytest.raises(ValueError, match="segments=0"):
        Config(segments=0)
    with pytest.raises(ValueError, match="stages=4"):
        Config(stages=4)
    with pytest.raises(ValueError, match="has none"):
        choose(*args[:5], config=Config(), implementation="xla")


def test_segments_fill_the_card_and_no_more():
    # 64 heads are 32 blocks; four segments of each fill 132 SMs.
    assert plan_segments(pairs=32, chunks=128) == 4
    assert plan_segments(pairs=128, chunks=128) == 1
    assert plan_segments(pairs=32, chunks=2) == 1


def lowered(fn, *args):
    with hw.assume():
        return jit(fn).trace(*args).lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize("segments", [1, 2])
def test_kernels_lower_for_the_card(segments):
    args = jax.eval_shape(lambda: arguments(time=4 * CHUNK, heads=4))
    config = Config(segments=segments)
    text = lowered(lambda *args: rule(args, None, "mosaic", config), *args)
    assert "pk_ssd_prepare" in text
    assert "pk_ssd_fwd" in text
    assert ("pk_ssd_summary" in text) == (segments > 1)


def test_layers_of_equal_sizes_share_their_kernels():
    args = jax.eval_shape(lambda: arguments(time=4 * CHUNK, heads=4))
    config = Config(segments=2)

    def three_layers(x, *rest):
        for _ in range(3):
            x, _ = rule((x, *rest), None, "mosaic", config)
        return jnp.sum(x.astype(jnp.float32))

    # Without the value, the last layer's forward would have a result less.
    text = lowered(jax.value_and_grad(three_layers, argnums=range(8)), *args)
    assert len(re.findall("custom_call @mosaic_gpu", text)) == 7
    for name in (
        "prepare",
        "summary",
        "fwd",
        "entry_gradients",
        "bwd",
        "grads",
        "steps",
    ):
        assert f"pk_ssd_{name}" in text


@pytest.mark.gpu
@pytest.mark.parametrize("name", [x.name for x in specs.specs("model")])
@pytest.mark.parametrize("segments", [1, 4])
def test_models_on_the_card(name, segments):
    """Any other bit in a repeat is a race."""
    (spec,) = (x for x in specs.specs("model") if x.name == name)
    args = spec.arguments(jax.random.key(0))

    def run(implementation, config=None):
        op = functools.partial(ssd, implementation=implementation, config=config)
        return jit(specs.run(spec, op, backward=True))

    mosaic = run("mosaic", Config(segments=segments))
    got = mosaic(*args)
    in_f32 = [m.astype(jnp.float32) if m.dtype == spec.dtype else m for m in args]
    want = run("reference")(*in_f32)
    assert_all_close(got, want)
    for _ in range(100):
        for label, a, b in zip(NAMES, mosaic(*args), got, strict=True):
            assert bool(jnp.array_equal(a, b)), label


@pytest.mark.gpu
@pytest.mark.parametrize("heads, groups", [(8, 1), (12, 2), (128, 8)])
def test_other_groups_and_the_planned_segments_on_the_card(heads, groups):
    """More chunks than there are SMs, so that blocks take several in turn."""
    args = arguments(3, 1000, heads, groups, "float16")
    is_first = first(3, 1000, *((row, t) for row in range(3) for t in (0, 130, 192)))
    got = gradients(args, is_first, cotangents(args), "mosaic")
    # The recurrence would keep a state for every token of 128 heads.
    assert_all_close(got, gradients(exact(args), is_first, cotangents(args), "xla"))


@pytest.mark.gpu
def test_documents_that_no_border_cuts_have_the_same_bits():
    args = arguments(1, 1024, 8, 2)
    is_first = first(1, 1024, *((0, t) for t in (0, 64, 256, 512, 700, 768)))
    whole, split = (
        gradients(args, is_first, cotangents(args), "mosaic", Config(segments=count))
        for count in (1, 4)
    )
    for name, a, b in zip(NAMES, whole, split, strict=True):
        # Of a head's gradients each chunk's terms are summed, in an order of XLA's.
        if name not in ("da", "dd", "dbias"):
            assert bool(jnp.array_equal(a, b)), name
