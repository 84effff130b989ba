"""Mosaic kernels of `attention`, interpreted, against the whole score matrix."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import (
    LIMITS,
    NAMES,
    arguments,
    assert_equal_to_reference,
    assert_model_shape,
    exact,
    in_tiles,
    interpreted_results,
    lengths,
    results,
)

from pallas_kernels._common import hw
from pallas_kernels._common.interpret import interpreted
from pallas_kernels._common.testing import assert_close
from pallas_kernels.attention import (
    attention,
    choose,
    config_mosaic,
    kernel_fwd,
    specs,
    tile_bounds,
    tiling,
    tune,
)
from pallas_kernels.attention.config_mosaic import Config, refusal


@pytest.fixture
def config(monkeypatch):
    """Sets launch parameters."""

    def set_to(config):
        monkeypatch.setattr(config_mosaic, "pick", lambda **_: config)

    return set_to


def test_packed_documents_with_every_option(config):
    """Documents of 1, tile - 1, tile + 1, and padding; three warpgroups in turn.

    The grid is smaller than the work. The second row has other inputs and cotangents
    outside its third document, which must not know: no bit of its outputs and
    gradients may change.
    """
    time, first, last = 190, 64, 129  # of the third document
    config(Config(warpgroups=3, persistent=True, step_kv=64, slots=3))
    index = np.arange(time)
    inside = (index >= first) & (index < last)
    args = [np.repeat(x, 2, axis=0) for x in arguments(time, 2, 1)]
    for x in args:
        mine = inside.reshape(time, *[1] * (x.ndim - 2))
        x[1] = np.where(mine, x[1], -x[1, ::-1])
    ids = np.repeat(lengths(1, 63, 65, time=time), 2, axis=0)
    options = {
        "ids": ids,
        "sinks": np.asarray([0.5, -0.3], np.float32),
        "is_prefix": np.repeat((inside & (index < 94))[None], 2, axis=0),
        "window": 50,
        "logit_cap": 30.0,
        # Logits of 20 to 40, at which the cap counts.
        "scale": 3.0,
    }
    with hw.assume(dataclasses.replace(hw.H200, sms=3)):
        got = interpreted_results(args, share_bounds=True, **options)
    assert_equal_to_reference(args, got, **options)
    for name, x in zip(NAMES[:-1], got, strict=False):
        np.testing.assert_array_equal(x[0, first:last], x[1, first:last], err_msg=name)
        if name != "lse":
            assert not x[:, last:].any(), name


@pytest.mark.parametrize("warpgroups", [2, 3])
def test_a_block_goes_through_items_of_many_and_few_steps(warpgroups):
    """One SM: queries of both places come and go, behind steps of 1, 2 and more."""
    config = Config(warpgroups=warpgroups, persistent=True, step_kv=64, slots=2)
    time, heads = 6 * 64 * warpgroups, 1
    q, k, v, *_ = arguments(time, heads, 1, 64)
    ids = lengths(70, 20, time - 154, 64, time=time)
    run = functools.partial(attention, q_segment_ids=ids, kv_segment_ids=ids)
    with hw.assume(dataclasses.replace(hw.H200, sms=1)), interpreted():
        op = functools.partial(run, implementation="mosaic", config=config)
        got = np.asarray(jax.jit(op)(q, k, v))
    want = jax.jit(functools.partial(run, implementation="reference"))(
        *exact((q, k, v))
    )
    assert_close(in_tiles(got), in_tiles(want), rel=LIMITS["o"], block_axes=(0, 1, 3))


def test_large_heads_see_other_rows_in_both_directions(config):
    """Head dim 256, whose sums of dk and dv are in two warpgroups; T != S.

    The keys of the second row are no runs: it is not a number, and the first is.
    """
    guess = tune.first_guess(256)
    config(dataclasses.replace(guess, ping_pong=False, slots=2))
    args = arguments(128, 1, 1, dim=256, length=100, batch=2, dtype="float16")
    kv_ids = np.ones((2, 100), np.int32)
    kv_ids[1, 3] = 2
    options = {"ids": np.ones((2, 128), np.int32), "kv_ids": kv_ids, "causal": False}
    got = interpreted_results(args, **options)
    assert np.isnan(got[0][1]).all()
    options |= {name: options[name][:1] for name in ("ids", "kv_ids")}
    args, got = ([x[:1] for x in values] for values in (args, got))
    assert_equal_to_reference(args, got, **options)


def test_capped_scores_are_those_of_an_exact_tanh():
    """No tanh reaches the card, whose instruction for it errs by 2^-11."""
    plan = kernel_fwd.Plan(
        **dict.fromkeys(
            ("batch", "heads", "kv_heads", "head_dim", "q_blocks", "kv_blocks"), 1
        ),
        dtype=jnp.bfloat16,
        scale=0.5,
        logit_cap=50.0,
        config=Config(),
    )
    scores = np.linspace(-400, 400, 1001, dtype=np.float32)
    scores[:2] = -1e6, 1e6
    run = functools.partial(kernel_fwd.capped, plan)
    logits, ratio = jax.jit(run)(scores)
    want = np.tanh(scores.astype(np.float64) * 0.5 / 50.0)
    np.testing.assert_allclose(np.asarray(ratio), want, rtol=0, atol=5e-7)
    np.testing.assert_allclose(np.asarray(logits), 50 * want, rtol=0, atol=2.5e-5)
    assert "tanh" not in str(jax.make_jaxpr(run)(scores))


@pytest.mark.parametrize("kernel", tune.KERNELS)
def test_tuning_takes_lengths_that_are_no_whole_blocks(kernel):
    spec = specs.Spec(
        name="odd", tag="ci", batch=1, time=200, heads=2, kv_heads=1, dim=64
    )
    config = tune.first_guess(64)
    q, k, v, _, _, do = jax.eval_shape(spec.arguments, jax.random.key(0))

    def run(q, k, v, do):
        o = jnp.zeros((1, 256, 2, 64), q.dtype)
        lse = jnp.zeros((1, 2, 256), jnp.float32)
        return tune._call(spec, kernel, config)(q, k, v, o, lse, do)

    with hw.assume():
        results = jax.tree.leaves(jax.eval_shape(run, q, k, v, do))
    heads = {"fwd": [2], "dq": [2], "dkv": [1, 1], "bwd": [2, 1, 1]}[kernel]
    assert [x.shape for x in results if x.ndim == 4] == [(1, 256, h, 64) for h in heads]


@pytest.mark.parametrize(
    "dim, options",
    [
        (128, {"sinks": True, "window": 128, "logit_cap": 30.0}),
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
        config = tune.first_guess(dim)
        return results(args, "mosaic", sinks=sinks, ids=ids, config=config, **options)

    # Fewer SMs than items: a block of a persistent kernel goes through several.
    with hw.assume(dataclasses.replace(hw.H200, sms=3)):
        traced = jax.jit(run).trace((q, k, k, q, d_lse), sinks, ids)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    for kernel in ("fwd", "dq", "dkv"):
        assert f"pk_attention_{kernel}" in text
    assert "stored" not in text


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
    bounds = jax.eval_shape(functools.partial(tile_bounds, batch=1, time=64))
    with pytest.raises(ValueError, match="built for window = None, this call has 5"):
        attention(q, k, v, window=5, bounds=bounds)
    with pytest.raises(ValueError, match=r"built for \[B, T, S\] = \(1, 64, 64\)"):
        attention(q[:, :9], k[:, :9], v[:, :9], bounds=bounds)
    with pytest.raises(ValueError, match="is_prefix is given without causal"):
        attention(q, k, v, causal=False, is_prefix=jnp.ones((1, 64), bool))
    with pytest.raises(ValueError, match="expected bool"):
        attention(q, k, v, is_prefix=jnp.ones((1, 63), bool))


def test_the_kernels_are_picked_on_the_card_alone():
    q, k, v, *_ = arguments(64, 1, 1)
    with pytest.raises(NotImplementedError, match="Hopper"):
        attention(q, k, v, implementation="mosaic")
    assert choose(q, k, v).implementation == "xla"
    with hw.assume():
        assert choose(q, k, v).implementation == "mosaic"
        assert choose(q, k, v, implementation="mosaic").config == Config(
            backward="stored",
            persistent=True,
            slots=8,
            dq_step_kv=128,
            dq_slots=6,
            dkv_stages=6,
        )
        with pytest.raises(NotImplementedError, match="positions are given"):
            choose(q, k, v, q_positions=q, implementation="mosaic")


@pytest.mark.gpu
@pytest.mark.parametrize("spec", list(specs.specs("model")), ids=lambda x: x.name)
def test_model_shapes_on_the_card(spec):
    assert_model_shape(spec, 100, config=tune.first_guess(spec.dim))


@pytest.mark.gpu
@pytest.mark.parametrize("dim", config_mosaic.HEAD_DIMS)
@pytest.mark.parametrize(
    "change", [{"ping_pong": False}, {"persistent": False}, {"persistent": True}]
)
def test_launch_parameters_do_not_matter_on_the_card(monkeypatch, dim, change):
    if change.get("persistent") and dim == 256:
        change = change | {"slots": 3}
    config = dataclasses.replace(tune.first_guess(dim), **change)
    args = arguments(1500, 32, 4, dim)  # more items than SMs
    ids = lengths(700, 3, 500, 290, time=1500)
    monkeypatch.setattr(config_mosaic, "pick", lambda **_: config)
    assert_equal_to_reference(args, results(args, "mosaic", ids=ids), ids=ids)
