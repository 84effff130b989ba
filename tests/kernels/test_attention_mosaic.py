"""Mosaic kernels of `attention`, interpreted, against the whole score matrix."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels._common import hw
from pallas_kernels._common.interpret import interpreted
from pallas_kernels._common.testing import assert_close
from pallas_kernels.attention import (
    api,
    attention,
    attention_with_lse,
    choose,
    config_mosaic,
    specs,
    tile_bounds,
    tiling,
)
from pallas_kernels.attention.config_mosaic import Config, refusal


NAMES = ("o", "lse", "dq", "dk", "dv", "dsinks")
# Relative errors against the reference in f32; lse is computed in f32.
LIMITS = dict(zip(NAMES, (4e-3, 1e-5, 8e-3, 8e-3, 8e-3, 8e-3), strict=True))


def arguments(time, heads, kv_heads, dim=64, *, length=None, batch=1, dtype="bfloat16"):
    """q, k, v, do, dlse."""
    rng = np.random.default_rng(0)
    length = time if length is None else length
    sizes = ((time, heads), (length, kv_heads), (length, kv_heads), (time, heads))
    q, k, v, do = (
        jnp.asarray(rng.standard_normal((batch, *size, dim)), dtype) for size in sizes
    )
    return (
        q,
        k,
        v,
        do,
        jnp.asarray(rng.standard_normal((batch, time, heads)), "float32"),
    )


def lengths(*documents, time):
    """Segment ids [1, time] of documents of these lengths, then padding."""
    ids = np.repeat(np.arange(1, len(documents) + 1), documents)
    return jnp.asarray(np.pad(ids, (0, time - len(ids)))[None].astype(np.int32))


def results(args, implementation, *, sinks=None, ids=None, **options):
    """o, lse and all gradients, those of lse among them; -inf becomes 0."""

    def run(args, sinks, ids):
        q, k, v, do, d_lse = args

        def op(q, k, v, sinks):
            return attention_with_lse(
                *(q, k, v),
                sinks=sinks,
                q_segment_ids=ids,
                kv_segment_ids=ids,
                implementation=implementation,
                **options,
            )

        (o, lse), pull = jax.vjp(op, q, k, v, sinks)
        seen = jnp.isfinite(lse)
        grads = pull((do.astype(o.dtype), jnp.where(seen, d_lse, 0.0)))
        return o, jnp.where(seen, lse, 0.0), *(x for x in grads if x is not None)

    return jax.jit(run)(args, sinks, ids)


def interpreted_results(args, **options):
    with interpreted():
        return [np.asarray(x) for x in results(args, "mosaic", **options)]


def exact(args):
    return tuple(x.astype(jnp.float32) for x in args)


def assert_equal_to_reference(args, got, **options):
    options.pop("bounds", None)
    want = results(exact(args), "reference", **options)
    for name, a, b in zip(NAMES, got, want, strict=False):
        assert_close(a, b, rel=LIMITS[name], block_rel=np.inf, name=name)


@pytest.fixture
def config(monkeypatch):
    """Sets launch parameters."""

    def set_to(config):
        monkeypatch.setattr(config_mosaic, "pick", lambda **_: config)

    return set_to


def test_packed_documents_know_nothing_of_each_other(config):
    """Documents of 1, tile - 1, tile, tile + 1, and padding.

    The second row has other inputs and cotangents outside its third document, which
    must not know: no bit of its outputs and gradients may change.
    """
    config(Config(step_kv=64, slots=3))
    first, last = 64, 128  # of the third document
    inside = (jnp.arange(200) >= first) & (jnp.arange(200) < last)
    args = [jnp.repeat(x, 2, axis=0) for x in arguments(200, 1, 1)]
    for i, x in enumerate(args):
        mine = inside.reshape(200, *[1] * (x.ndim - 2))
        args[i] = x.at[1].set(jnp.where(mine, x[1], -x[1, ::-1]))
    ids = jnp.repeat(lengths(1, 63, 64, 65, time=200), 2, axis=0)
    options = {"ids": ids, "sinks": jnp.asarray([0.5])}
    bounds = jax.jit(functools.partial(tile_bounds, batch=2, time=200))(
        q_segment_ids=ids, kv_segment_ids=ids
    )
    got = interpreted_results(args, bounds=bounds, **options)
    assert_equal_to_reference(args, got, **options)
    for name, x in zip(NAMES[:-1], got, strict=False):
        np.testing.assert_array_equal(x[0, first:last], x[1, first:last], err_msg=name)
        if name != "lse":
            assert not x[:, 193:].any(), name


def test_windows_prefixes_caps_and_groups(config):
    config(Config(step_kv=64, ping_pong=False))
    args = arguments(128, 4, 1, dtype="float16")
    ids = lengths(30, 98, time=128)
    prefix = np.zeros((1, 128), bool)
    prefix[:, 30:90] = True
    options = {
        "ids": ids,
        "is_prefix": jnp.asarray(prefix),
        "window": 70,
        "logit_cap": 3.0,
        "scale": 0.3,
    }
    got = interpreted_results(args, **options)
    assert_equal_to_reference(args, got, **options)


def test_large_heads_see_other_rows_in_both_directions(config):
    """Head dim 256, whose sums of dk and dv are in two warpgroups; T != S."""
    guess = config_mosaic.heuristic(head_dim=256)
    config(dataclasses.replace(guess, overlap=False))
    args = arguments(64, 1, 1, dim=256, length=100)
    options = {"causal": False}
    got = interpreted_results(args, **options)
    assert_equal_to_reference(args, got, **options)


def test_launch_parameters_do_not_change_the_result(config):
    """Three warpgroups in turn, and a grid that is smaller than the work."""
    config(Config(warpgroups=3, persistent=True, overlap=False, step_kv=64, slots=2))
    args = arguments(200, 2, 1)
    ids = lengths(10, 185, time=200)
    op = functools.partial(attention, q_segment_ids=ids, kv_segment_ids=ids)
    small = dataclasses.replace(hw.H200, sms=3)
    with interpreted(), hw.assume(small):
        o = jax.jit(functools.partial(op, implementation="mosaic"))(*args[:3])
        o = np.asarray(o)
    assert_close(o, op(*exact(args[:3]), implementation="reference"), name="o")


def test_rows_that_are_no_runs_are_not_a_number(config):
    config(Config(step_kv=64))
    q, k, v, *_ = arguments(4, 1, 1, batch=2)
    ids = np.asarray([[1, 2, 1, 1], [1, 1, 0, 2]], np.int32)
    op = functools.partial(attention, implementation="mosaic")
    with interpreted():
        o = jax.jit(op)(q, k, v, q_segment_ids=ids, kv_segment_ids=ids)
        o = np.asarray(o, np.float32)
    assert np.isnan(o[0]).all()
    assert np.isfinite(o[1]).all()


@pytest.mark.parametrize(
    "dim, options",
    [
        (64, {"sinks": True, "window": 128}),
        (128, {"logit_cap": 30.0}),
        (256, {"causal": False}),
    ],
)
def test_kernels_lower_for_the_card(dim, options):
    options = dict(options)
    like = jax.ShapeDtypeStruct
    q, k = (like((2, 300, h, dim), jnp.bfloat16) for h in (4, 2))
    d_lse = like((2, 300, 4), jnp.float32)
    sinks = like((4,), jnp.float32) if options.pop("sinks", False) else None
    ids = like((2, 300), jnp.int32)

    def run(args, sinks, ids):
        return results(args, "mosaic", sinks=sinks, ids=ids, **options)

    with hw.assume():
        traced = jax.jit(run).trace((q, k, k, q, d_lse), sinks, ids)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    for kernel in ("fwd", "dq", "dkv"):
        assert f"pk_attention_{kernel}" in text


def test_bounds_stay_outside_the_scan_over_layers():
    """Layers that get bounds derive nothing from segment ids."""
    like = jax.ShapeDtypeStruct
    x = like((1, 256, 2, 64), jnp.bfloat16)

    def layers(x, ids):
        bounds = tile_bounds(batch=1, time=256, q_segment_ids=ids, kv_segment_ids=ids)

        def layer(x, _):
            return attention(x, x, x, bounds=bounds, implementation="mosaic"), None

        return jax.lax.scan(layer, x, None, length=3)[0]

    with hw.assume():
        jaxpr = jax.make_jaxpr(layers)(x, like((1, 256), jnp.int32))
    (scan,) = (e for e in jaxpr.eqns if e.primitive.name == "scan")
    inside = str(scan.params["jaxpr"])
    assert "mpmd_map" in inside
    for primitive in ("cummax", "sort", "gather"):
        assert primitive in str(jaxpr)
        assert f"{primitive}[" not in inside


def test_limits_are_named():
    call = {
        "time": 64,
        "length": 64,
        "heads": 2,
        "key_dim": 128,
        "value_dim": 128,
        "dtype": jnp.bfloat16,
        "scale": None,
        "has_positions": False,
    }
    assert refusal(**call) is None
    for change, text in (
        ({"key_dim": 96}, "K = 96"),
        ({"value_dim": 64}, "V = 64"),
        ({"dtype": jnp.float32}, "float32"),
        ({"scale": 0.0}, "scale = 0.0"),
        ({"time": 0}, "T = 0"),
        ({"has_positions": True}, "positions are given"),
    ):
        assert text in refusal(**(call | change))
    for change, text in (
        ({"warpgroups": 1}, "warpgroups=1"),
        ({"step_kv": 96}, "step_kv=96"),
        ({"block_kv": 192}, "block_kv=192"),
        ({"dkv_step_q": 192}, "dkv_step_q=192"),
        ({"slots": 1}, "slots=1"),
    ):
        with pytest.raises(ValueError, match=text):
            Config(**change)


@pytest.mark.parametrize("dim", config_mosaic.HEAD_DIMS)
def test_blocks_of_bounds_are_those_of_the_kernels(dim):
    blocks = tiling(dim)
    config = config_mosaic.heuristic(head_dim=dim)
    with_blocks = functools.partial(config_mosaic.with_blocks, config, head_dim=dim)
    assert with_blocks(**blocks) == config
    assert with_blocks(block_q=128, block_kv=64).block_kv == 64
    with pytest.raises(ValueError, match=f"blocks of 256 .* head dim {dim} are"):
        with_blocks(block_q=256, block_kv=64)


def test_bounds_of_another_mask_are_refused():
    q, k, v, *_ = arguments(64, 1, 1)
    bounds = jax.jit(functools.partial(tile_bounds, batch=1, time=64))()
    with pytest.raises(ValueError, match="built for window = None, this call has 5"):
        attention(q, k, v, window=5, bounds=bounds)
    with pytest.raises(ValueError, match=r"built for \[B, T, S\] = \(1, 64, 64\)"):
        attention(q[:, :9], k[:, :9], v[:, :9], bounds=bounds)
    with pytest.raises(ValueError, match="is_prefix is given without causal"):
        attention(q, k, v, causal=False, is_prefix=jnp.ones((1, 64), bool))
    with pytest.raises(ValueError, match="expected bool"):
        attention(q, k, v, is_prefix=jnp.ones((1, 63), bool))


def test_without_a_card_the_kernels_refuse_and_nothing_picks_them():
    q, k, v, *_ = arguments(64, 1, 1)
    with pytest.raises(NotImplementedError, match="Hopper"):
        attention(q, k, v, implementation="mosaic")
    with hw.assume():
        assert choose(q, k, v).implementation == "xla"
        assert choose(q, k, v, implementation="mosaic").config == Config(
            slots=8, dq_step_kv=128, dq_slots=6, dkv_stages=6
        )
        with pytest.raises(NotImplementedError, match="positions are given"):
            choose(q, k, v, q_positions=q, implementation="mosaic")


@pytest.mark.gpu
@pytest.mark.parametrize("spec", list(specs.specs("model")), ids=lambda x: x.name)
def test_model_shapes_on_the_card(spec):
    args = spec.arguments(jax.random.key(1))
    mosaic, reference = (
        functools.partial(api.attention, implementation=x)
        for x in ("mosaic", "reference")
    )
    run = jax.jit(specs.run(spec, mosaic, backward=True))
    got = run(*args)
    exact = [x.astype(jnp.float32) if x.dtype == jnp.bfloat16 else x for x in args]
    want = jax.jit(specs.run(spec, reference, backward=True))(*exact)
    for a, b in zip(got, want, strict=True):
        assert_close(a, b, rel=1e-2, block_rel=np.inf)

    @jax.jit
    def same(a, b):
        return jnp.all(
            jnp.asarray([jnp.array_equal(*x) for x in zip(a, b, strict=True)])
        )

    for _ in range(100):
        assert same(run(*args), got)


@pytest.mark.gpu
@pytest.mark.parametrize("dim", config_mosaic.HEAD_DIMS)
@pytest.mark.parametrize(
    "change",
    [
        {"overlap": False},
        {"ping_pong": False},
        {"overlap": False, "ping_pong": False},
        {"persistent": True},
    ],
)
def test_launch_parameters_do_not_matter_on_the_card(monkeypatch, dim, change):
    base = config_mosaic.heuristic(head_dim=dim)
    config = dataclasses.replace(base, **change)
    q, k, v, *_ = arguments(1500, 8, 2, dim)
    ids = lengths(700, 3, 500, 290, time=1500)
    op = functools.partial(attention, q_segment_ids=ids, kv_segment_ids=ids)
    monkeypatch.setattr(config_mosaic, "pick", lambda **_: config)
    got = jax.jit(functools.partial(op, implementation="mosaic"))(q, k, v)
    want = op(*exact((q, k, v)), implementation="reference")
    assert_close(got, want, rel=6e-3, block_rel=np.inf)
