"""`engram_gather`: every form against the reference, the kernel in the interpreter."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import engram_gather
from pallas_kernels._common import hw, pieces
from pallas_kernels._common.interpret import interpreted
from pallas_kernels._common.testing import assert_close
from pallas_kernels.engram_gather import api, config, reference, specs


CI = {spec.name: spec for spec in specs.specs("ci")}
MODEL = {spec.name: spec for spec in specs.specs("model")}


def expected(spec, args):
    exact = tuple(
        a.astype(jnp.float32) if jnp.issubdtype(a.dtype, jnp.floating) else a
        for a in args
    )
    return jax.jit(specs.run(spec, reference.engram_gather))(*exact)


def result(spec, args, implementation):
    op = functools.partial(engram_gather, implementation=implementation)
    return jax.jit(specs.run(spec, op))(*args)


def assert_same_bits(got, want, name=""):
    got, want = (np.asarray(x.astype(jnp.float32)) for x in (got, want))
    np.testing.assert_array_equal(got, want, name)


@pytest.mark.parametrize("name", CI)
def test_every_form_gives_the_rows_bit_for_bit(name):
    spec = CI[name]
    args = jax.jit(spec.arguments)(jax.random.key(0))
    want = expected(spec, args)
    missing = np.isnan(np.asarray(want.astype(jnp.float32))).all(axis=-1)
    assert missing.sum() == spec.missing
    with interpreted():
        for implementation in ("reference", "xla", "mosaic"):
            got = result(spec, args, implementation)
            assert got.shape == (*spec.lookups, spec.dim)
            assert got.dtype == (jnp.bfloat16 if spec.is_narrow else spec.dtype)
            assert_same_bits(got, want, implementation)


@pytest.mark.parametrize("implementation", ["reference", "xla", "mosaic"])
def test_every_8_bit_value_times_every_scale_is_rounded_once(implementation):
    bits = jnp.arange(256, dtype=jnp.uint8)
    table = jax.lax.bitcast_convert_type(
        jnp.tile(bits[None], (256, 1)), "float8_e4m3fn"
    )
    scale = jnp.tile(bits[:, None], (1, 8))
    ids = jnp.arange(256, dtype=jnp.int32)
    with interpreted():
        got = engram_gather(table, ids, scale=scale, implementation=implementation)
        e8m0 = jax.lax.bitcast_convert_type(scale, jnp.float8_e8m0fnu)
        again = engram_gather(table, ids, scale=e8m0, implementation=implementation)
    values = np.asarray(table[0]).astype(np.float64)
    powers = np.arange(256)
    exact = values[None] * np.exp2(powers[:, None] - 127.0)
    exact[255] = np.nan
    with np.errstate(over="ignore"):
        want = np.asarray(exact.astype(np.float32)).astype(jnp.bfloat16)
    want, got = want.astype(np.float64), np.asarray(got).astype(np.float64)
    # Processors may take what is below the least normal number for zero, 2^-127 too.
    tiny = np.abs(exact) < 2.0**-125
    tiny[0] = np.isfinite(values)
    np.testing.assert_array_equal(got[~tiny], want[~tiny])
    assert ((got == want) | (got == 0))[tiny].all()
    np.testing.assert_array_equal(np.asarray(again).astype(np.float64), got)


@pytest.mark.parametrize("rows", [64, 128])
def test_blocks_of_any_size_and_ends_of_any_length(monkeypatch, rows):
    monkeypatch.setattr(config, "pick", lambda *_: config.Config(rows=rows))
    spec = specs.Spec(name="ends", tag="ci", num_rows=9, dim=80, lookups=(rows + 1,))
    args = jax.jit(spec.arguments)(jax.random.key(1))
    with interpreted():
        assert_same_bits(result(spec, args, "mosaic"), expected(spec, args))


@pytest.mark.parametrize("implementation", ["xla", "mosaic"])
def test_the_gradient_is_the_reference_s(implementation):
    table = jax.random.normal(jax.random.key(2), (11, 8)).astype(jnp.bfloat16)
    ids = jnp.array([[3, 3, 0], [10, -1, 3], [11, 7, 0]], jnp.int32)
    dy = jax.random.normal(jax.random.key(3), (3, 3, 8)).astype(jnp.bfloat16)

    def pulled(table, op):
        return jax.vjp(lambda t: op(t, ids), table)[1](dy.astype(table.dtype))[0]

    exact = functools.partial(reference.engram_gather, scale=None)
    want = pulled(table.astype(jnp.float32), exact)
    op = functools.partial(engram_gather, implementation=implementation)
    with interpreted():
        got = jax.jit(lambda t: pulled(t, op))(table)
    assert got.dtype == jnp.bfloat16
    assert_close(got, want, name="dtable")
    assert not np.asarray(got)[[1, 2, 4, 5, 6, 8, 9]].any()


def lowered(spec):
    args = jax.eval_shape(spec.arguments, jax.random.key(0))
    op = functools.partial(engram_gather, implementation="mosaic")
    step = jax.jit(specs.run(spec, op))
    text = step.trace(*args).lower(lowering_platforms=("cuda",)).as_text()
    return "pk_engram_gather" in text


@pytest.mark.parametrize(
    "spec",
    [*specs.specs("perf"), *specs.specs("model"), CI["ci_f32"], CI["ci_f16"]],
    ids=lambda spec: f"{spec.tag}-{spec.name}",
)
def test_lowers_for_the_card_at_every_size(spec):
    with hw.assume():
        assert lowered(spec)


def test_the_picked_block_gives_threads_equal_shares():
    for dim, dtype in ((80, "bfloat16"), (256, "float8_e4m3fn"), (6, "float32")):
        rows = config.pick(dim, dtype, 64 * 81).rows
        assert rows * (dim // config.piece(dim, dtype)) % pieces.WARPGROUP == 0


@pytest.mark.parametrize("spec", [*specs.specs("perf")], ids=lambda spec: spec.name)
def test_a_block_divides_the_lookups_of_a_model(spec):
    lookups = math.prod(spec.lookups)
    assert lookups % config.pick(spec.dim, spec.dtype, lookups).rows == 0
    # Smaller blocks are taken where a larger one leaves a rest.
    least = config.step(spec.dim, spec.dtype)
    assert config.pick(spec.dim, spec.dtype, 3 * least).rows == least


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ({"table": jnp.ones(7)}, r"float32\[7\]"),
        ({"table": jnp.ones((7, 4), jnp.int32)}, "int32"),
        ({"ids": jnp.ones(3)}, "float32"),
        ({"scale": jnp.ones((7, 1), jnp.uint8)}, "8-bit rows only"),
        ({"table": jnp.ones((7, 32), jnp.float8_e4m3fn)}, "without scale"),
        (
            {
                "table": jnp.ones((7, 32), jnp.float8_e4m3fn),
                "scale": jnp.ones((7, 2), jnp.uint8),
            },
            r"uint8\[7, 2\]",
        ),
    ],
)
def test_caller_errors_name_the_value(call, message):
    call = {"table": jnp.ones((7, 4)), "ids": jnp.zeros(3, jnp.int32)} | call
    with pytest.raises(ValueError, match=message):
        engram_gather(call["table"], call["ids"], scale=call.get("scale"))


@pytest.mark.parametrize(
    ("shape", "dtype", "lookups", "message"),
    [
        ((7, 3), "bfloat16", 3, "row of 3 bfloat16"),
        ((0, 4), "float32", 3, "0 rows"),
        ((7, 4), "float32", 0, "0 lookups"),
    ],
)
def test_what_the_kernel_cannot_do_is_said(shape, dtype, lookups, message):
    table = jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))
    ids = jax.ShapeDtypeStruct((lookups,), jnp.int32)
    with hw.assume():
        assert message in api.choose(table, ids).refused["mosaic"]
        with pytest.raises(NotImplementedError, match=message):
            api.choose(table, ids, implementation="mosaic")


@pytest.mark.parametrize(
    ("lookups", "dtype", "picked"),
    [
        (2**12, "bfloat16", "mosaic"),
        (2**12 - 1, "bfloat16", "xla"),
        (2**18, "float8_e4m3fn", "mosaic"),
        (2**18 - 1, "float8_e4m3fn", "xla"),
        (2**20, "float32", "xla"),
    ],
)
def test_none_takes_the_kernel_where_a_row_is_near(lookups, dtype, picked):
    table = jax.ShapeDtypeStruct((700, 256), jnp.dtype(dtype))
    ids, scale = jax.ShapeDtypeStruct((lookups,), jnp.int32), None
    if table.dtype.itemsize == 1:
        scale = jax.ShapeDtypeStruct((700, 256 // 32), jnp.uint8)
    choose = functools.partial(api.choose, table, ids, scale=scale)
    with hw.assume():
        choice = choose()
        assert choice.implementation == picked
        if picked == "xla":
            assert "no measured row is near" in choice.refused["mosaic"]
        assert choose(implementation="mosaic").config is not None


def test_without_a_hopper_the_kernel_is_refused():
    if hw.is_hopper():
        return
    with pytest.raises(NotImplementedError, match="Hopper"):
        engram_gather(
            jnp.ones((7, 4)), jnp.zeros(3, jnp.int32), implementation="mosaic"
        )


@pytest.mark.gpu
@pytest.mark.parametrize("name", [*CI, *MODEL])
def test_the_kernel_on_the_card(name):
    spec = (CI | MODEL)[name]
    args = jax.jit(spec.arguments)(jax.random.key(4))
    want = expected(spec, args)
    op = functools.partial(engram_gather, implementation="mosaic")
    step = jax.jit(specs.run(spec, op))
    for _ in range(100 if spec.tag == "model" else 1):
        assert_same_bits(step(*args), want)
