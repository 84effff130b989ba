"""`decode_attention`: all forms against the formulas, the kernel in the interpreter."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import attention, decode_attention
from pallas_kernels._common import hw
from pallas_kernels._common.interpret import interpreted
from pallas_kernels._common.testing import assert_close
from pallas_kernels.decode_attention import api, kernel, padded_group, specs
from pallas_kernels.decode_attention.config import Config


CI = {spec.name: spec for spec in specs.specs("ci")}
SMALL, PAGES = CI["ci_small"], CI["ci_pages"]
KERNELS = [spec for spec in CI.values() if "kernel" in spec.name]


def arguments(spec, seed=0, holes=()):
    """As `spec.arguments`, NaN wherever no token is; pages of row 0 that are none."""
    draw = np.random.default_rng(seed)
    shapes = jax.eval_shape(spec.arguments, jax.random.key(0))
    q, k, v = (draw.normal(size=x.shape) for x in shapes[:3])
    table = spec.table() if spec.page else np.zeros((spec.batch, 1), np.int32)
    table[0, list(holes)] = -1
    layer = (-1,) if spec.layers else ()
    used = np.zeros(k.shape[:-1], bool)
    for row, length in enumerate(spec.held):
        for token in range(length):
            place = (row, token)
            if spec.page:
                place = table[row, token // spec.page], token % spec.page
            if spec.page and place[0] < 0:
                continue
            heads = (slice(None),)
            inside = heads + place[1:] if spec.heads_first else place[1:] + heads
            used[(*layer, place[0], *inside)] = True
    k, v = (np.where(used[..., None], x, np.nan) for x in (k, v))
    q, k, v = (jnp.asarray(x, spec.dtype) for x in (q, k, v))
    sinks = jnp.asarray(draw.normal(size=spec.heads), jnp.float32)
    return q, k, v, jnp.asarray(spec.held), jnp.asarray(table), sinks


def result(spec, args, implementation, behind=0, **options):
    """`behind`: how far the layer that is asked for lies behind the spec's."""
    options |= {"implementation": implementation, "out_dtype": jnp.float32}

    def op(*args, layer, **named):
        layer = None if layer is None else layer + behind
        return decode_attention(*args, layer=layer, **named, **options)

    return jax.jit(specs.run(spec, op))(*args)


def assert_results(got, want, rel=None):
    for name, a, b in zip(("o", "lse"), got, want, strict=True):
        assert_close(a, b, rel=rel, name=name)


def by_hand(spec, args):
    """o and lse of each query in float64, token by token."""
    q, k, v, held, table, sinks = (np.asarray(x, np.float64) for x in args)
    if spec.layers:
        k, v = k[-1], v[-1]
    if spec.heads_first:
        k, v = (np.swapaxes(x, 1, 2) for x in (k, v))
    o, lse = np.zeros(q.shape), np.full(q.shape[:3], -np.inf)
    for row, time, head in np.ndindex(lse.shape):
        place = int(held[row]) - spec.time + time
        start = 0 if spec.window is None else max(0, place - spec.window + 1)
        logits, values = [], []
        for token in range(start, place + 1):
            at = (row, token)
            if spec.page:
                page = int(table[row, token // spec.page])
                if page < 0:
                    continue
                at = (page, token % spec.page)
            at = (*at, head // (spec.heads // spec.kv_heads))
            logit = q[row, time, head] @ k[at] * spec.dim**-0.5
            if spec.logit_cap is not None:
                logit = spec.logit_cap * np.tanh(logit / spec.logit_cap)
            logits.append(logit)
            values.append(v[at])
        total = np.sum(np.exp(logits))
        if spec.sinks:
            total += np.exp(sinks[head])
        if total:
            lse[row, time, head] = np.log(total)
        for logit, value in zip(logits, values, strict=True):
            o[row, time, head] += np.exp(logit) / total * value
    return o, lse


@pytest.mark.parametrize("implementation", ["reference", "xla"])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"window": 3, "heads_first": True, "sinks": True},
        {"logit_cap": 1.5, "layers": 2, "lengths": (1, 0, 12)},
        {"page": 4},
        {"page": 4, "heads_first": True, "layers": 2, "window": 6},
    ],
    ids=str,
)
def test_the_formulas_and_nothing_of_empty_slots(implementation, changes):
    spec = dataclasses.replace(SMALL, **changes)
    args = arguments(spec)
    got = result(spec, args, implementation)
    assert_results(got, by_hand(spec, args))
    # Queries before the first token see nothing.
    empty = spec.held[:, None] - spec.time + np.arange(spec.time) < 0
    assert empty.any()
    assert not np.asarray(got[0])[empty].any()
    if not spec.sinks:
        assert (np.asarray(got[1])[empty] == -np.inf).all()


@pytest.mark.parametrize("implementation", ["reference", "xla"])
def test_a_page_that_is_none_holds_no_token(implementation):
    args = arguments(PAGES, 1, holes=(1,))
    assert_results(result(PAGES, args, implementation), by_hand(PAGES, args))


def test_it_is_attention_at_the_last_positions():
    spec = dataclasses.replace(SMALL, window=4, sinks=True, lengths=(3, 12, 7))
    args = arguments(spec, 2)
    args = tuple(np.nan_to_num(np.asarray(x)) for x in args)
    q, k, v, held, _, sinks = args
    slots = np.broadcast_to(np.arange(spec.length)[None], (spec.batch, spec.length))
    whole = functools.partial(
        attention, window=spec.window, sinks=sinks, implementation="reference"
    )
    want = jax.jit(whole)(
        *(q, k, v),
        q_positions=held[:, None] - spec.time + np.arange(spec.time)[None],
        kv_positions=np.where(slots < held[:, None], slots, -1),
    )
    assert_close(result(spec, args, "xla")[0], want)


def test_parts_of_a_cache_join_to_the_whole():
    spec = dataclasses.replace(SMALL, time=1, lengths=(12, 9, 6))
    q, k, v, held, *rest = arguments(spec, 3)
    whole = result(spec, (q, k, v, held, *rest), "xla")
    first = (q, k[:, :5], v[:, :5], jnp.minimum(held, 5), *rest)
    o, lse = result(spec, first, "xla")
    second = (q, k[:, 5:], v[:, 5:], held - 5, *rest)
    other_o, other_lse = result(spec, second, "xla")
    total = jnp.logaddexp(lse, other_lse)
    o = jnp.exp(lse - total)[..., None] * o
    o = o + jnp.exp(other_lse - total)[..., None] * other_o
    assert_results((o, total), whole)


def padded_and_gated(spec, args):
    """The arguments with NaN behind the heads that are meant, and what says so."""
    each = padded_group(spec.heads // spec.kv_heads)
    q = args[0].reshape(*args[0].shape[:2], spec.kv_heads, -1, spec.dim)
    missing = each - q.shape[3]
    q = jnp.pad(q, ((0, 0),) * 3 + ((0, missing), (0, 0)), constant_values=np.nan)
    q = q.reshape(*q.shape[:2], -1, spec.dim)
    gate = np.random.default_rng(9).normal(size=args[0].shape).astype(np.float32)
    return (q, *args[1:]), {"heads": spec.heads, "gate": jnp.asarray(gate)}


@pytest.mark.parametrize("implementation", ["reference", "xla"])
def test_heads_behind_those_meant_are_not_read_and_a_gate_multiplies(implementation):
    args = arguments(SMALL, 3)
    wide, options = padded_and_gated(SMALL, args)
    o, lse = result(SMALL, args, implementation)
    got = result(SMALL, wide, implementation, **options)
    assert_results(got, (o * jax.nn.sigmoid(options["gate"]), lse))


# Steps of several pages and one place for queries, which all items use.
TILINGS = {"ci_kernel_pages": Config(unit=256, step_kv=128, slots=2, q_places=1)}


@pytest.mark.parametrize("spec", KERNELS, ids=lambda spec: spec.name)
def test_the_kernel_is_the_reference(spec):
    """On one SM: items in turn, rings that go round, NaN wherever no token is."""
    args = arguments(spec, 4, holes=(1,) if spec.page else ())
    tiling = TILINGS.get(spec.name, Config(unit=128, slots=2))
    # Lengths and layers out of bounds are cut to them.
    held = jnp.where(args[3] == 0, -5, args[3])
    held = jnp.where(held == spec.length, 999, held)
    args, options = (*args[:3], held, *args[4:]), {}
    if spec.name == "ci_kernel_group_3":
        args, options = padded_and_gated(spec, args)
    with hw.assume(dataclasses.replace(hw.H200, sms=1)), interpreted():
        got = result(spec, args, "mosaic", config=tiling, behind=5, **options)
    want = result(spec, args, "reference", **options)
    assert_results(got, want, rel=4e-3)
    empty = spec.held[:, None] - spec.time + np.arange(spec.time) < 0
    assert not np.asarray(got[0])[empty].any()


def test_pages_of_several_steps_are_the_reference():
    """By one warpgroup, in units of half of a page."""
    tiling = Config(unit=64, warpgroups=1, slots=3)
    pages = {"page": 128, "length": 256, "lengths": (250,)}
    spec = dataclasses.replace(CI["ci_kernel_pages"], batch=1, kv_heads=1, **pages)
    args = arguments(spec, 5)
    with hw.assume(dataclasses.replace(hw.H200, sms=2)), interpreted():
        got = result(spec, args, "mosaic", config=tiling)
    assert_results(got, result(spec, args, "reference"), rel=4e-3)


@pytest.mark.parametrize("page", [0, 4])
@pytest.mark.parametrize("implementation", ["reference", "xla"])
def test_a_layer_that_is_none_is_the_nearest(implementation, page):
    spec = dataclasses.replace(SMALL, layers=3, page=page)
    q, k, v, held, table, _ = arguments(spec, 3)
    # Of all layers, not of the last alone.
    draw = np.random.default_rng(3)
    k, v = (draw.normal(size=x.shape).astype(np.float32) for x in (k, v))
    op = functools.partial(decode_attention, implementation=implementation)
    op = functools.partial(op, q, k, v, held, table=table if page else None)
    run = jax.jit(lambda layer: op(layer=layer)[0])
    below, above, first, last = (np.asarray(run(x)) for x in (-2, 3, 0, 2))
    np.testing.assert_array_equal(below, first)
    np.testing.assert_array_equal(above, last)
    assert not np.array_equal(first, last)


def test_a_gradient_through_the_kernel_is_refused_by_name():
    spec = CI["ci_kernel"]
    args = jax.eval_shape(spec.arguments, jax.random.key(0))

    def pull(implementation, q, *rest):
        op = functools.partial(decode_attention, implementation=implementation)

        def loss(q):
            o, _ = specs.run(spec, op)(q, *rest)
            return jnp.sum(o.astype(jnp.float32))

        return jax.grad(loss)(q)

    with hw.assume():
        with pytest.raises(NotImplementedError, match=r"decode_attention: .*xla"):
            jax.eval_shape(functools.partial(pull, "mosaic"), *args)
        got = jax.eval_shape(functools.partial(pull, "xla"), *args)
    assert got.shape == args[0].shape


def test_more_parts_than_are_joined_at_a_time():
    """Parts of units that no query sees, and what was never written, are NaN."""
    spec = dataclasses.replace(CI["ci_kernel"], layers=0, heads=2, length=8192)
    spec = dataclasses.replace(spec, lengths=(8100, 0), kv_heads=1, window=7000)
    shapes = jax.eval_shape(spec.arguments, jax.random.key(0))
    sizes = api._sizes(shapes[0], shapes[1], None, False, False)
    plan = kernel.Plan(
        sizes=sizes,
        dtype=jnp.dtype(spec.dtype),
        window=spec.window,
        logit_cap=None,
        scale=1.0,
        config=Config(unit=128),
    )
    draw, count = np.random.default_rng(8), 2 * 2 * plan.parts
    assert plan.parts == 128
    first, end = (8100 - 7000) // 128 * 2, -(-8100 // 128) * 2
    o = draw.normal(size=(2, 2, plan.parts, 64))
    lse = 3 * draw.normal(size=(2, 2, plan.parts))
    o[:, :, :first], lse[:, :, end:] = np.nan, np.nan
    lse[:, 0, first + 3], o[:, 0, first + 3] = -np.inf, 0.0
    sinks = draw.normal(size=2)
    padded = np.full((count + 64, 64), np.nan)
    padded[:count] = o.reshape(count, 64)
    logs = np.full((count + 64, kernel.STATS), np.nan)
    logs[:count] = lse.reshape(count, 1)
    inputs = {"o": padded, "lse": logs, "sinks": sinks}
    inputs = {n: jnp.asarray(x, jnp.float32) for n, x in inputs.items()}
    inputs["lengths"] = jnp.asarray(spec.held)
    with interpreted():
        got, log = kernel._join(plan, jnp.dtype("float32"), inputs)
    weight = np.exp2(lse[0, :, first:end])
    total = weight.sum(axis=1) + np.exp(sinks)
    want = (weight[..., None] * o[0, :, first:end]).sum(axis=1) / total[:, None]
    assert_close(got[:2], want.astype(np.float32), rel=2e-6)
    assert_close(log[:2], np.log(total).astype(np.float32))
    assert not np.asarray(got[2:]).any()
    assert_close(log[2:], sinks.astype(np.float32))


# A width, a page, a kind of mask and of cache each: those of the model that differ from
# each other, pages in one of several layers, and what the model has not.
LOWERED = [
    *(x for x in specs.specs("model") if x.dim != 128 or x.layers),
    *(dataclasses.replace(x, layers=2) for x in specs.specs("model") if x.page == 16),
    CI["ci_kernel_tokens"],
    CI["ci_kernel_group_3"],
]


@pytest.mark.parametrize("spec", LOWERED, ids=str)
def test_the_kernel_lowers_for_the_card(spec):
    args = jax.eval_shape(spec.arguments, jax.random.key(0))
    op = functools.partial(decode_attention, implementation="mosaic")
    with hw.assume():
        lowered = jax.jit(specs.run(spec, op)).trace(*args)
        text = lowered.lower(lowering_platforms=("cuda",)).as_text()
    assert "pk_decode_attention" in text


def chosen(spec, **options):
    args = jax.eval_shape(spec.arguments, jax.random.key(0))
    return specs.run(spec, functools.partial(api.choose, **options))(*args)


@pytest.mark.parametrize("spec", [*specs.specs("perf"), *specs.specs("model")], ids=str)
def test_launch_parameters_fit_and_are_the_same_for_any_batch(spec):
    with hw.assume():
        choice = chosen(spec, implementation="mosaic")
        other = dataclasses.replace(spec, batch=3)
        assert chosen(other, implementation="mosaic").config == choice.config
        assert chosen(spec).implementation == "xla"
        assert "one size alone" in chosen(spec).refused["mosaic"]


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"dim": 96}, "K = 96"),
        ({"dtype": "float32"}, "dtype = float32"),
        ({"time": 9}, "T = 9 new tokens"),
        ({"heads": 34}, "17 query heads"),
        ({"page": 24, "length": 192}, "pages of 24 tokens"),
        ({"length": 60}, "S = 60"),
        ({"length": 324}, "S = 324, the kernel has multiples of 8"),
    ],
)
def test_what_the_kernel_cannot_do_is_said(changes, message):
    spec = dataclasses.replace(CI["ci_kernel"], **changes)
    with hw.assume(), pytest.raises(NotImplementedError, match=message):
        chosen(spec, implementation="mosaic")


def test_launch_parameters_that_do_not_fit_are_said():
    spec = CI["ci_kernel"]
    mosaic = functools.partial(chosen, implementation="mosaic")
    with pytest.raises(NotImplementedError, match="Hopper"):
        mosaic(spec)
    with hw.assume():
        with pytest.raises(NotImplementedError, match="bytes of shared memory"):
            mosaic(spec, config=Config(slots=20))
        paged = dataclasses.replace(spec, page=192, length=384)
        with pytest.raises(NotImplementedError, match="step_kv=128 and pages of 192"):
            mosaic(paged, config=Config(step_kv=128))
        assert mosaic(paged).config.step_kv == 64
        small = dataclasses.replace(spec, length=104)
        with pytest.raises(NotImplementedError, match="at least step_kv = 128"):
            mosaic(small, config=Config(step_kv=128))
        assert mosaic(small).config.step_kv == 64
    with pytest.raises(ValueError, match='is for "mosaic"'):
        chosen(spec, implementation="xla", config=Config())
    for wrong in ({"unit": 100}, {"step_kv": 96}, {"slots": 1}, {"warpgroups": 4}):
        ((name, value),) = wrong.items()
        with pytest.raises(ValueError, match=f"{name}={value}"):
            Config(**wrong)


@pytest.mark.parametrize(
    "index, change, message",
    [
        (0, lambda x: x[..., :4], "expected 4 at its end"),
        (0, lambda x: x[:2], "k has 3 rows, expected 2"),
        (0, lambda x: x.astype(jnp.bfloat16), "dtypes bfloat16, float32"),
        (0, lambda x: x[:, :, :3], "q has 3 heads"),
        (1, lambda x: x[0], "expected 4 and 4 axes"),
        (2, lambda x: x[:, 1:], "v has shape"),
        (3, lambda x: x[:2], r"lengths is int32\[2\]"),
        (3, lambda x: x.astype(jnp.float32), r"lengths is float32\[3\]"),
        (5, lambda x: x[1:], "sinks has shape"),
    ],
)
def test_errors_name_the_value(index, change, message):
    spec = dataclasses.replace(SMALL, sinks=True)
    args = list(arguments(spec))
    args[index] = change(args[index])
    with pytest.raises(ValueError, match=message):
        specs.run(spec, decode_attention)(*args)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"window": 0}, "window is 0"),
        ({"logit_cap": -1.0}, "logit_cap is -1.0"),
        ({"heads": 3}, "q has 3 heads, which is no multiple"),
        ({"heads": 8}, "heads is 8, expected at most the 4 of q"),
        ({"gate": jnp.ones((3, 1, 4))}, r"gate has shape \(3, 1, 4\), expected"),
        ({"layer": 0.5}, "expected 4 and 5 axes"),
        ({"table": jnp.zeros((2, 3), jnp.int32)}, r"table is int32\[2, 3\]"),
        ({"table": jnp.zeros((3, 0), jnp.int32)}, "at least one page"),
    ],
)
def test_options_that_are_not_allowed_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        decode_attention(*arguments(SMALL)[:4], **options)


def test_the_benchmark_counts_what_is_seen_and_checks_row_by_row():
    cases = {x.workload: x for x in specs.bench_cases("perf")}
    case = cases["llama3 B8 S131072 H32 G8 K128"]
    assert case.bytes > 2 * 8 * 131072 * 8 * 128 * 2
    assert case.flops == 4 * 8 * 131072 * 32 * 128
    assert case.picked() == "xla"
    assert "cudnn" in case.peers
    windowed = dataclasses.replace(SMALL, window=3)
    assert specs._seen(windowed) == (0 + 4 + 4, 0 + 6 + 6)
    for spec in (SMALL, dataclasses.replace(PAGES, window=4)):
        args = jax.tree.map(jnp.nan_to_num, arguments(spec, 6))
        got = jax.jit(functools.partial(specs._blocked, spec))(*args)
        assert_results(got, result(spec, args, "reference"))


@pytest.mark.gpu
@pytest.mark.parametrize("spec", [*specs.specs("model")], ids=str)
def test_model_shapes_on_the_card(spec):
    args = arguments(spec, 7)
    want = result(spec, args, "reference")
    tilings = [None, Config(unit=128, slots=2), Config(unit=256, warpgroups=1, slots=2)]
    for tiling in tilings:
        run = jax.jit(
            specs.run(
                spec,
                functools.partial(
                    decode_attention,
                    implementation="mosaic",
                    config=tiling,
                    out_dtype=jnp.float32,
                ),
            )
        )
        got = run(*args)
        assert_results(got, want, rel=4e-3)
        for _ in range(50):
            for a, b in zip(run(*args), got, strict=True):
                assert bool(jnp.array_equal(a, b))
        if not spec.page:
            # A row alone has the bits that it has among others.
            axis, last = (1 if spec.layers else 0), spec.batch - 1
            alone = [
                jax.lax.slice_in_dim(x, last, None, axis=axis if i in (1, 2) else 0)
                for i, x in enumerate(args[:5])
            ]
            one = run(*alone, args[5])
            for a, b in zip(one, got, strict=True):
                assert bool(jnp.array_equal(a, b[last:]))
