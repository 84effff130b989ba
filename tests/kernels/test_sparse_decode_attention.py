"""`sparse_decode_attention`: every form against NumPy, the kernel interpreted."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import sparse_decode_attention
from pallas_kernels._common import hw
from pallas_kernels._common.interpret import interpreted
from pallas_kernels._common.testing import assert_close
from pallas_kernels.sparse_decode_attention import (
    Rotary,
    api,
    config,
    join,
    kernel,
    specs,
)


CI = {spec.name: spec for spec in specs.specs("ci")}
MODEL = {spec.name: spec for spec in specs.specs("model")}
LOWERED = ("shadowkv_a", "ci_wide_rank")
BIG = CI["ci_everything"]


@functools.cache
def drawn(spec):
    """As the spec makes them."""
    return jax.jit(spec.arguments)(jax.random.key(0))


@functools.cache
def arguments(spec):
    """What is drawn, with NaN wherever nothing counts."""
    return jax.jit(functools.partial(dirty, spec))(drawn(spec))


def dirty(spec, args):
    q, held, ids, slots, count, sinks, layer = args
    row = jnp.arange(spec.batch)[:, None, None]
    head = jnp.arange(spec.kv_heads)[None, :, None]
    chosen = jnp.arange(spec.chosen)[None, None] < count[..., None]
    wanted = jnp.where(chosen, slots, spec.places)
    used = jnp.zeros((spec.batch, spec.kv_heads, spec.places), bool)
    used = used.at[row, head, wanted].set(True, mode="drop")
    out = jnp.arange(spec.outliers)[None] < held.out_count[:, None]
    lost = jnp.isin(jnp.arange(spec.chunks), jnp.where(chosen, ids, -1).reshape(-1))
    masks = {
        "a": jnp.broadcast_to(lost[None], (spec.batch, spec.chunks))[..., None, None],
        "values": used[..., None],
        "out_k": out[:, None, :, None, None],
        "out_v": out[:, None, :, None, None],
        "ring_k": held.ring_valid[:, None, :, None],
        "ring_v": held.ring_valid[:, None, :, None],
    }
    fields = {}
    for name, mask in masks.items():
        array = getattr(held, name)
        fields[name] = jnp.where(mask, array, jnp.nan)
        if spec.layers is not None and name in held.LAYERED:  # others are not read
            fields[name] = fields[name].at[: spec.layers - 1].set(jnp.nan)
    held = dataclasses.replace(held, **fields)
    # The places behind the last chosen chunk may name what there is not.
    ids, slots = jnp.where(chosen, ids, 0), jnp.where(chosen, slots, 0)
    return q, held, ids, slots, count, sinks, layer


def by_hand(spec, q, held, ids, slots, count, sinks, layer):
    """o and lse in float64, one query head after the other."""
    held = held.of_layer(layer)
    f = {
        field.name: np.asarray(
            getattr(held, field.name).astype(jnp.float32), np.float64
        )
        for field in dataclasses.fields(held)
    }
    q = np.asarray(q.astype(jnp.float32), np.float64)
    o, lse = np.zeros(q.shape), np.full(q.shape[:2], -np.inf)
    half = spec.head_dim // 2
    for b, h in np.ndindex(*q.shape[:2]):
        g = h // (spec.heads // spec.kv_heads)
        n = int(count[b, g])
        chosen = np.asarray(ids[b, g, :n])
        k = f["a"][b, chosen].reshape(-1, spec.rank) @ f["basis"][b, g].T
        if spec.rotary is not None:
            place = (f["first"][b, chosen][:, None] + np.arange(8)).reshape(-1, 1)
            angle = place * np.array(spec.rotary.frequencies)
            turned = (k[:, :half] + 1j * k[:, half:]) * np.exp(1j * angle)
            turned = turned * spec.rotary.factor
            k = np.concatenate([turned.real, turned.imag], axis=-1)
        k = np.asarray(
            jnp.asarray(k, held.ring_k.dtype).astype(jnp.float32), np.float64
        )
        v = f["values"][b, g, np.asarray(slots[b, g, :n])].reshape(-1, spec.head_dim)
        m, ring = int(held.out_count[b]), np.asarray(held.ring_valid[b])
        flat = -1, spec.head_dim
        k = np.concatenate(
            [k, f["out_k"][b, g, :m].reshape(flat), f["ring_k"][b, g, ring]]
        )
        v = np.concatenate(
            [v, f["out_v"][b, g, :m].reshape(flat), f["ring_v"][b, g, ring]]
        )
        s = k @ q[b, h] * spec.head_dim**-0.5
        if spec.logit_cap is not None:
            s = spec.logit_cap * np.tanh(s / spec.logit_cap)
        terms = s if sinks is None else np.append(s, float(sinks[h]))
        if terms.size:
            top = terms.max()
            lse[b, h] = top + np.log(np.exp(terms - top).sum())
            o[b, h] = np.exp(s - lse[b, h]) @ v
    return o, lse


def program(spec, implementation):
    op = functools.partial(sparse_decode_attention, implementation=implementation)
    return jax.jit(specs.run(spec, op))


compiled = functools.cache(program)


def result(spec, args, implementation):
    # What a kernel becomes depends on the card as well.
    make = program if implementation == "mosaic" else compiled
    return make(spec, implementation)(*args)


def assert_right(got, want, rel):
    for name, a, b in zip(("o", "lse"), got, want, strict=True):
        assert a.dtype == jnp.float32
        assert_close(a, b, rel=rel, name=name)


def without_a_row(args):
    """The first row has nothing, and what it holds is NaN."""
    q, held, ids, slots, count, *rest = args
    held = dataclasses.replace(
        held,
        out_count=held.out_count.at[0].set(0),
        ring_valid=held.ring_valid.at[0].set(False),
        ring_k=held.ring_k.at[0].set(jnp.nan),
        ring_v=held.ring_v.at[0].set(jnp.nan),
    )
    return q, held, ids, slots, count.at[0].set(0), *rest


@pytest.mark.parametrize("implementation", ["reference", "xla"])
@pytest.mark.parametrize("name", CI)
def test_it_is_one_softmax_over_all_that_counts(name, implementation):
    spec = CI[name]
    args = arguments(spec)
    got = result(spec, args, implementation)
    # Keys are rounded once, at times the other way.
    assert_right(got, by_hand(spec, *args), 1e-3)


def test_a_row_that_holds_nothing_gives_zeros():
    args = without_a_row(arguments(BIG))
    args = (*args[:5], None, args[6])
    o, lse = result(BIG, args, "xla")
    assert not np.asarray(o[0]).any()
    assert np.isneginf(np.asarray(lse[0])).all()
    assert_right((o, lse), by_hand(BIG, *args), 1e-3)


@pytest.mark.parametrize(
    ("name", "sms"),
    # Blocks that begin inside of an item, and one that has several.
    [("ci_everything", 5), ("ci_wide_rank", 1)],
)
def test_the_kernel_is_one_softmax_over_all_that_counts(name, sms):
    spec = CI[name]
    args = arguments(spec)
    if spec is BIG:
        args = without_a_row(args)
    # A layer behind the last is the last.
    given = args if args[6] is None else (*args[:6], args[6] + 5)
    with hw.assume(dataclasses.replace(hw.H200, sms=sms)), interpreted():
        got = result(spec, given, "mosaic")
    # Weights are rounded to 16 bits as well.
    assert_right(got, by_hand(spec, *args), 4e-3)


@pytest.mark.parametrize(
    ("change", "sms", "slots"),
    [
        # Two items share a box of 8 heads; places are used again.
        ({"heads": 8, "ring": 64}, 1, 2),
        # More heads than an item has, copies of half a tile, and K of the rows.
        ({"heads": 18, "kv_heads": 1, "ring": 32, "head_dim": 128}, 1, 2),
    ],
    ids=["side-by-side", "split"],
)
def test_heads_find_their_queries_and_results(monkeypatch, change, sms, slots):
    change = {"batch": 1, "chosen": 3, "outliers": 8, "layers": None, **change}
    spec = dataclasses.replace(BIG, **change)
    args = arguments(spec)
    monkeypatch.setattr(config, "heuristic", lambda _: config.Config(slots=slots))
    with hw.assume(dataclasses.replace(hw.H200, sms=sms)), interpreted():
        got = result(spec, args, "mosaic")
    assert_right(got, by_hand(spec, *args), 4e-3)


@pytest.mark.parametrize("spec", specs.SPECS, ids=lambda spec: spec.name)
def test_each_item_has_its_heads_in_one_box(spec):
    sizes = api._check(*shapes(spec)[:5], None, None, None, shapes(spec)[6])
    heads = jnp.arange(spec.batch * spec.heads).reshape(spec.batch, spec.heads)
    boxes = np.asarray(join.by_item(sizes, heads)).reshape(-1, sizes.columns)
    number = jnp.arange(sizes.items)
    found = boxes[np.asarray(join.box(sizes, number))]
    low = np.asarray(number) * sizes.stride % sizes.columns
    for i in range(sizes.group):
        mine = i // sizes.columns + np.arange(sizes.pairs) * sizes.splits
        column = low[mine] + i % sizes.columns
        want = np.arange(sizes.pairs) * sizes.group + i
        np.testing.assert_array_equal(found[mine, column], want)


@pytest.mark.parametrize("implementation", ["reference", "xla"])
def test_a_layer_that_is_none_is_the_nearest(implementation):
    args = drawn(BIG)[:-1]
    run = compiled(BIG, implementation)
    for layer, nearest in ((-2, 0), (2, 1)):
        got, want = (run(*args, jnp.int32(x)) for x in (layer, nearest))
        for a, b in zip(got, want, strict=True):
            np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
    assert not np.array_equal(want[0], run(*args, jnp.int32(0))[0])


def test_angles_are_right_at_any_position():
    spec = specs.SPECS[-1]
    plan = kernel.Plan(
        sizes=api._check(*shapes(spec)[:5], spec.rotary, None, None, None),
        dtype=jnp.dtype(jnp.bfloat16),
        rotary=spec.rotary,
        scale=1.0,
        logit_cap=None,
        config=config.Config(),
    )
    position = np.array([0, 1, 4_095, 122_879, 1_000_003], np.int32)[:, None]
    with np.errstate(over="ignore"):
        turns = position * kernel._turns(plan)[None]
    angle = turns.astype(np.float32) * np.float32(2 * np.pi / 2**32)
    exact = np.exp(1j * position * np.array(spec.rotary.frequencies))
    error = np.abs(np.exp(1j * angle) - exact).max(axis=1)
    # Half of 2^-32 turns a position, and one rounding.
    assert (error <= np.pi * 2.0**-32 * position[:, 0] + 1e-6).all()


@pytest.mark.parametrize("spec", specs.SPECS, ids=lambda spec: spec.name)
def test_blocks_have_equal_shares_of_what_there_is(spec):
    sizes = api._check(*shapes(spec)[:5], None, None, None, shapes(spec)[6])
    total = sizes.items * sizes.tiles
    assert (sizes.blocks - 1) * sizes.share < total <= sizes.blocks * sizes.share
    number = np.arange(sizes.items)
    last = ((number + 1) * sizes.tiles - 1) // sizes.share
    assert (last - sizes.first_block(number) + 1).max() <= sizes.parts
    if config.refusal(sizes, (jnp.bfloat16,), None) is None:
        picked = config.heuristic(sizes)
        assert sizes.shared_bytes(picked.slots) <= hw.H200.smem_bytes


@functools.cache
def shapes(spec):
    return jax.eval_shape(spec.arguments, jax.random.key(0))


@pytest.mark.parametrize(
    "spec",
    [spec for spec in specs.SPECS if spec.name in LOWERED],
    ids=lambda spec: f"{spec.tag}-{spec.name}",
)
def test_lowers_for_the_card(spec):
    op = functools.partial(sparse_decode_attention, implementation="mosaic")
    with hw.assume():
        step = jax.jit(specs.run(spec, op)).trace(*shapes(spec))
        text = step.lower(lowering_platforms=("cuda",)).as_text()
    assert "pk_sparse_decode_attention" in text


def changed(spec, **change):
    q, held, ids, slots, count, sinks, layer = shapes(spec)
    names = ("q", "ids", "slots", "count", "sinks", "layer")
    call = dict(zip(names, (q, ids, slots, count, sinks, layer), strict=True))
    fields = {name: change.pop(name) for name in [*change] if hasattr(held, name)}
    return {"held": dataclasses.replace(held, **fields)} | call | change


S = jax.ShapeDtypeStruct


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": S((2, 64), jnp.bfloat16)}, r"q has shape \[2, 64\], expected 3 axes"),
        ({"q": S((2, 5, 64), jnp.bfloat16)}, "5 query heads are no multiple of the 2"),
        ({"layer": None}, "expected 4 axes without layer"),
        ({"first": S((2, 39), jnp.int32)}, r"first is int32\[2, 39\], expected"),
        ({"ring_valid": S((2, 16), jnp.int32)}, "ring_valid is int32"),
        ({"slots": S((2, 2, 12), jnp.int32)}, r"slots is int32\[2, 2, 12\]"),
        ({"sinks": S((7,), jnp.float32)}, r"sinks is float32\[7\]"),
        ({"rotary": Rotary(frequencies=(1.0,))}, "rotary has 1 frequencies"),
        ({"logit_cap": -1.0}, "logit_cap=-1.0"),
    ],
)
def test_caller_errors_name_the_value(change, message):
    with pytest.raises(ValueError, match=message):
        api.choose(**changed(BIG, **change))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"head_dim": 96}, "K=96"),
        ({"rank": 40}, "rank=40, the kernel takes multiples of 32"),
        ({"ring": 20}, "ring=20, the kernel takes multiples of 8"),
        ({"outliers": 0}, "0 outliers"),
        ({"heads": 130}, "65 query heads of a kv head"),
        ({"rank": 512, "head_dim": 128}, "r=512 asks for"),
    ],
)
def test_what_the_kernel_cannot_do_is_said(change, message):
    call = changed(dataclasses.replace(BIG, **change))
    with hw.assume(), pytest.raises(NotImplementedError, match=message):
        api.choose(**call, implementation="mosaic")


def test_arrays_of_two_dtypes_are_refused_by_the_kernel():
    held = shapes(BIG)[1]
    basis = S(held.basis.shape, jnp.float32)
    with hw.assume(), pytest.raises(NotImplementedError, match="bfloat16 and float32"):
        api.choose(**changed(BIG, basis=basis), implementation="mosaic")


@pytest.mark.parametrize("scale", [0.0, -0.5, float("nan")])
def test_the_kernel_takes_positive_scales_alone(scale):
    call = changed(BIG)
    with hw.assume(), pytest.raises(NotImplementedError, match=f"scale = {scale}"):
        jax.eval_shape(
            lambda call: sparse_decode_attention(
                **call, scale=scale, implementation="mosaic"
            ),
            call,
        )
    with hw.assume():
        choice = api.choose(**call, scale=0.5, implementation="mosaic")
    assert choice.implementation == "mosaic"


def test_a_gradient_through_the_kernel_is_refused_by_name():
    args = shapes(BIG)

    def pull(implementation, q, *rest):
        op = functools.partial(sparse_decode_attention, implementation=implementation)

        def loss(q):
            return jnp.sum(specs.run(BIG, op)(q, *rest)[0])

        return jax.grad(loss)(q)

    with hw.assume():
        message = r"sparse_decode_attention: .*xla"
        with pytest.raises(NotImplementedError, match=message):
            jax.eval_shape(functools.partial(pull, "mosaic"), *args)
        got = jax.eval_shape(functools.partial(pull, "xla"), *args)
    assert got.shape == args[0].shape


def test_none_takes_the_kernel_for_the_size_of_head_that_was_measured():
    with hw.assume():
        for spec in specs.specs("perf"):
            assert api.choose(**changed(spec)).implementation == "mosaic", spec.name
        choice = api.choose(**changed(BIG))
    assert choice.implementation == "xla"
    assert "no measured row speaks for K = 64" in choice.refused["mosaic"]


@pytest.mark.gpu
@pytest.mark.parametrize("name", [*CI, *MODEL])
def test_the_kernel_on_the_card(name):
    spec = (CI | MODEL)[name]
    args = arguments(spec)
    op = functools.partial(sparse_decode_attention, implementation="mosaic")
    step = jax.jit(specs.run(spec, op))
    first = step(*args)
    assert_right(first, by_hand(spec, *args), 4e-3)
    for _ in range(100):
        for a, b in zip(step(*args), first, strict=True):
            np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
