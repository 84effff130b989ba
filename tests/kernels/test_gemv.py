"""`gemv`: every form against the reference, the kernel in the interpreter."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import gemv
from pallas_kernels._common import hw, indexed, overlap
from pallas_kernels._common.interpret import interpreted
from pallas_kernels._common.testing import assert_close
from pallas_kernels.gemv import api, config, specs
from pallas_kernels.gemv.config import Config


CI = {spec.name: spec for spec in specs.specs("ci")}
CARD = [*specs.specs("model"), *specs.specs("perf")]


def few_blocks():
    """A card on which sizes of tests are as few blocks as they can be."""
    return hw.assume(dataclasses.replace(hw.H200, sms=1))


@functools.cache
def arguments(spec):
    return jax.jit(spec.arguments)(jax.random.key(0))


def result(spec, args, implementation):
    op = functools.partial(gemv, implementation=implementation)
    return jax.jit(specs.run(spec, op))(*args)


@functools.cache
def expected(spec):
    """Of `arguments`, in float32, from float32."""
    exact = dataclasses.replace(spec, dtype="float32")
    args = jax.tree.map(lambda x: x.astype(jnp.float32), arguments(spec))
    return result(exact, args, "reference")


def assert_equal(spec, got, want, rel):
    assert [x.dtype for x in got] == [jnp.dtype(d) for d in spec.out_dtypes]
    for i, (a, b) in enumerate(zip(got, want, strict=True)):
        assert a.shape == b.shape
        assert_close(a, b, rel=rel, name=f"result {i}")


@pytest.mark.parametrize("name", CI)
def test_every_form_is_the_reference(name):
    spec = CI[name]
    args = arguments(spec)
    want = expected(spec)
    assert_equal(spec, result(spec, args, "reference"), want, 3e-3)
    # It rounds the norm, and both factors of SwiGLU.
    assert_equal(spec, result(spec, args, "xla"), want, 6e-3)
    with few_blocks(), interpreted():
        assert_equal(spec, result(spec, args, "mosaic"), want, 3e-3)


@pytest.mark.parametrize(
    "change",
    [
        Config(columns=8, burst=1),
        Config(columns=16, burst=3, warpgroups=4),
        Config(columns=64, burst=2, warpgroups=2),
        Config(columns=16, burst=5, warpgroups=2, paired=True),
        Config(columns=64, burst=2, paired=True),
        Config(columns=16, burst=2, warpgroups=2, ring=2),
        Config(columns=64, burst=1, warpgroups=4, ring=9),
    ],
    ids=str,
)
def test_the_division_does_not_matter(change):
    """Bursts in a loop, one that is no whole, and strips narrower than asked for.

    And rings of fewer bursts than there are, and of more.
    """
    spec = dataclasses.replace(CI["ci_layer"], depth=420, widths=(128, 40))
    spec = dataclasses.replace(spec, wide=2)
    args = arguments(spec)
    op = functools.partial(gemv, implementation="mosaic", config=change)
    with few_blocks(), interpreted():
        got = jax.jit(specs.run(spec, op))(*args)
    for a, b in zip(got, expected(spec), strict=True):
        # Results are not rounded: what is left is the order of the sums.
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("implementation", ["mosaic", "xla", "reference"])
def test_what_is_fetched_ahead_changes_no_result(implementation):
    spec = CI["ci_down"]
    x, weights, _, residual = arguments(spec)
    call = functools.partial(
        *(gemv, x, weights), residual=residual, implementation=implementation
    )
    ahead = jnp.full((3, 8), jnp.nan, jnp.bfloat16)
    with few_blocks(), interpreted():
        plain, fetching = jax.jit(lambda: (call(), call(prefetch=ahead)))()
        np.testing.assert_array_equal(plain, fetching)
        # An array alone is one array, not as many as it has rows.
        for given in (ahead[:, :7], (ahead[:, :7],)):
            with pytest.raises(ValueError, match=r"prefetch has bfloat16\[3, 7\]"):
                call(prefetch=given)


@pytest.mark.parametrize(
    ("size", "warps"), [(16, 4), (5 * 4096 + 32, 4), (9 << 20, 88)]
)
def test_each_byte_is_one_threads(size, warps):
    index, left = indexed.stretch(np.arange(32 * warps), size, warps)
    asked = np.zeros(size, int)
    for first, count in zip(np.asarray(index) * indexed.STRETCH, left, strict=True):
        asked[first : first + count] += 1
    assert (asked == 1).all()


def test_a_large_array_is_shared_out_by_many_warps():
    """More bytes than an i32 has, and warps whose lanes would be asked beyond it."""
    index, left = indexed.stretch(np.arange(32 * 20_000), 5 << 30, 20_000)
    assert int(np.asarray(left, np.int64).sum()) == min(5 << 30, 32 * 20_000 * 4096)
    assert (np.asarray(index) >= 0).all()


def test_the_kernel_asks_for_what_is_fetched_ahead():
    spec = CI["ci_down"]
    x, weights, _, residual = jax.eval_shape(spec.arguments, jax.random.key(0))
    ahead = jax.ShapeDtypeStruct((264, 1024), jnp.bfloat16)

    def run(x, weights, residual, *ahead):
        return gemv(
            *(x, weights), residual=residual, prefetch=ahead, implementation="mosaic"
        )

    def text(*ahead):
        with hw.assume():
            traced = jax.jit(run).trace(x, weights, residual, *ahead)
            return traced.lower(lowering_platforms=("cuda",)).as_text()

    assert "cp.async.bulk.prefetch.L2" in text(ahead)
    assert "cp.async.bulk.prefetch.L2" not in text()


def test_launches_overlap_unless_they_are_to_be_timed():
    spec = CI["ci_down"]
    args = jax.eval_shape(spec.arguments, jax.random.key(0))

    def text(config, **options):
        op = functools.partial(gemv, implementation="mosaic", config=config, **options)
        with hw.assume():
            traced = jax.jit(specs.run(spec, op)).trace(*args)
            return traced.lower(lowering_platforms=("cuda",)).as_text()

    ring = Config(columns=8, burst=3, ring=2)
    waiting, asking = text(ring), text(ring, at_rest=True)
    assert waiting != asking
    for found in (waiting, asking, text(Config(columns=8, burst=9))):
        assert "griddepcontrol.launch_dependents" in found
        assert "griddepcontrol.wait" in found
    assert "cp.async.cg" in asking
    with overlap.one_by_one():
        assert "griddepcontrol" not in text(ring)
    assert "griddepcontrol.wait" in text(ring)


def test_a_row_knows_nothing_of_the_others():
    spec = dataclasses.replace(CI["ci_swiglu"], depth=136, widths=(16, 16))
    x, *rest = arguments(spec)
    other = x.at[1].set(jnp.nan)
    call = jax.jit(specs.run(spec, functools.partial(gemv, implementation="mosaic")))
    with few_blocks(), interpreted():
        (got,), (alone,) = (call(v, *rest) for v in (other, x))
    assert np.isnan(np.asarray(got[1], np.float32)).all()
    np.testing.assert_array_equal(got[::2], alone[::2])


def test_a_gradient_through_the_kernel_is_refused_by_name():
    x = jax.ShapeDtypeStruct((2, 512), jnp.bfloat16)
    w = jax.ShapeDtypeStruct((512, 512), jnp.bfloat16)

    def pull(x, w, implementation):
        def loss(w):
            y = gemv(x, w, out_dtype=jnp.float32, implementation=implementation)
            return jnp.sum(y)

        return jax.grad(loss)(w)

    with hw.assume():
        with pytest.raises(NotImplementedError, match=r"gemv: .*xla"):
            jax.eval_shape(functools.partial(pull, implementation="mosaic"), x, w)
        got = jax.eval_shape(functools.partial(pull, implementation="xla"), x, w)
    assert got == w


def test_one_weight_gives_one_array():
    x, w = jnp.ones((2, 8)), jnp.ones((8, 16))
    assert gemv(x, w, implementation="xla").shape == (2, 16)
    (y,) = gemv(x, (w,), implementation="xla", out_dtype=jnp.bfloat16)
    assert y.dtype == jnp.bfloat16
    gated = gemv(x, (w, w), swiglu=True, implementation="xla")
    np.testing.assert_allclose(gated, 64.0, rtol=1e-2)


@pytest.mark.parametrize("name", CI)
def test_the_kernel_lowers_for_the_card(name):
    spec = CI[name]
    run = specs.run(spec, functools.partial(gemv, implementation="mosaic"))
    args = jax.eval_shape(spec.arguments, jax.random.key(0))
    with hw.assume():
        text = jax.jit(run).trace(*args).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("pk_gemv") >= 1


def test_strips_leave_at_most_a_third_of_the_sms_without_work():
    pick = functools.partial(config.heuristic, rows=1, gated=False, sms=132)
    narrow = pick(depth=2816, widths=(1024,))
    assert (narrow.columns, narrow.warpgroups) == (8, 4)
    assert pick(depth=1024, widths=(2048, 1024, 8, 8)).columns == 32
    wide = pick(depth=4096, widths=(14336,))
    assert (wide.columns, wide.warpgroups) == (64, 2)
    assert config.strip(40, 32) == 8
    # Few rows are all asked for at once, many in several bursts.
    assert pick(depth=1024, widths=(1024,)).burst == 2
    assert pick(depth=14336, widths=(4096,)).burst < 14336 // 128


@pytest.mark.parametrize("spec", specs.SPECS, ids=lambda spec: spec.name)
def test_loads_fit_the_registers_and_fill_them(spec):
    weights = 2 if spec.swiglu else 1
    picked = config.heuristic(
        depth=spec.depth,
        widths=spec.widths[:1] if spec.swiglu else spec.widths,
        rows=spec.rows,
        gated=spec.swiglu,
        sms=132,
    )
    # f32 sums, 16 bytes of each weight, and what x has in that row.
    needs = 8 * weights * spec.rows + picked.burst * (4 * weights + spec.rows)
    assert needs <= config.REGISTERS
    reads = 1024 // picked.columns * picked.warpgroups * picked.burst
    assert needs + 4 * weights + spec.rows > config.REGISTERS or reads >= spec.depth


def test_limits_are_named():
    x, w = jnp.ones((2, 16), jnp.bfloat16), jnp.ones((16, 8), jnp.bfloat16)
    for args, options, text in (
        ((x[0], w), {}, r"x is bfloat16\[16\], expected float\[M, K\]"),
        ((x, w[:8]), {}, r"a weight is bfloat16\[8, 8\], expected float\[16, N\]"),
        ((x, ()), {}, r"weights are \(\)"),
        ((x, w), {"norm_scale": jnp.ones(8)}, r"norm_scale is float32\[8\]"),
        ((x, (w, w[:, :4])), {"swiglu": True}, "of one shape"),
        ((x, w), {"swiglu": True}, "gate and up"),
        ((x, (w, w)), {"residual": x}, "with 2 weights, expected one result"),
        ((x, w), {"residual": x}, r"expected float\[2, 8\]"),
        ((x, (w, w)), {"out_dtype": [jnp.float32]}, "expected one for each of 2"),
    ):
        with pytest.raises(ValueError, match=text):
            gemv(*args, **options)
    with hw.assume():
        for args, text in (
            ((jnp.ones((5, 16), jnp.bfloat16), w), "M = 5, the kernel has 1 to 4"),
            ((x, w[:, :4]), "N = 4, the kernel has multiples of 8"),
            ((x, w.astype(jnp.float32)), "bfloat16, float32, the kernel has one"),
        ):
            with pytest.raises(NotImplementedError, match=text):
                gemv(*args, implementation="mosaic")
        choice = api.choose(x, w)
        assert choice.implementation == "xla"
        assert "no measured row speaks for M = 2" in choice.refused["mosaic"]
        assert api.choose(x[:1], w).implementation == "mosaic"
        deep = [jnp.ones(shape, jnp.bfloat16) for shape in ((1, 48), (48, 16))]
        assert "XLA is faster" in api.choose(*deep).refused["mosaic"]
        assert api.choose(x, w, implementation="mosaic").config == Config(
            columns=8, burst=1, warpgroups=4
        )
    with pytest.raises(NotImplementedError, match="Hopper"):
        gemv(x, w, implementation="mosaic")
    for change, text in (
        ({"columns": 24}, "columns=24, allowed are 8, 16, 32, 64"),
        ({"burst": 0}, "burst=0"),
        ({"burst": 1, "paired": True}, "burst=1, allowed are numbers from 2 on"),
        ({"warpgroups": 3}, "warpgroups=3, allowed are 1, 2, 4"),
        ({"ring": -1}, "ring=-1 with paired=False"),
        ({"ring": 2, "burst": 2, "paired": True}, "ring=2 with paired=True"),
    ):
        with pytest.raises(ValueError, match=text):
            Config(**change)
    with pytest.raises(ValueError, match="is for \"mosaic\", implementation='xla'"):
        gemv(x, w, config=Config(), implementation="xla")


@pytest.mark.gpu
@pytest.mark.parametrize("spec", CARD, ids=lambda spec: spec.name)
def test_model_shapes_on_the_card(spec):
    args = arguments(spec)
    op = functools.partial(gemv, implementation="mosaic")
    call = jax.jit(specs.run(spec, op))
    got = call(*args)
    assert_equal(spec, got, expected(spec), 3e-3)
    for _ in range(100):
        for a, b in zip(call(*args), got, strict=True):
            assert jnp.array_equal(a, b)
    paired = jax.jit(specs.run(spec, specs.paired))
    assert_equal(spec, paired(*args), expected(spec), 3e-3)


@pytest.mark.gpu
def test_a_chain_that_fetches_ahead_has_the_same_bits_on_the_card():
    args = jax.jit(specs.CHAIN.arguments)(jax.random.key(0))
    op = functools.partial(gemv, implementation="mosaic")
    plain, fetching = (
        jax.jit(specs.CHAIN.run(op, fetches=x))(*args)[0] for x in (False, True)
    )
    assert jnp.array_equal(plain, fetching)
