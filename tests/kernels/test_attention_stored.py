"""The backward of `attention` that stores dS, interpreted, against the whole matrix."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import (
    NAMES,
    arguments,
    assert_all_close,
    assert_equal_to_reference,
    assert_model_shape,
    exact,
    interpreted_results,
    lengths,
    program,
    results,
)

from pallas_kernels._common import hw
from pallas_kernels._common.interpret import interpreted
from pallas_kernels.attention import (
    attention,
    config_mosaic,
    kernel_bwd_stored,
    mosaic,
    specs,
    tile_bounds,
    tune,
)
from pallas_kernels.attention.config_mosaic import Config


GRADIENTS = ("dq", "dk", "dv")


def stored(dim, **changes):
    """Launch parameters of a head dim."""
    changes = {"backward": "stored"} | changes
    return dataclasses.replace(config_mosaic.heuristic(head_dim=dim), **changes)


def sizes(dim, config, *, batch=1, time=300, length=None, heads=4, kv_heads=2, **mask):
    """The plan of a call, and its bounds of no values."""
    length = time if length is None else length
    blocks = {"block_q": config.block_q, "block_kv": config.block_kv}
    make = functools.partial(
        tile_bounds, batch=batch, time=time, length=length, **blocks, **mask
    )
    bounds = jax.eval_shape(make)
    like = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.bfloat16)
    q, k = like((batch, time, heads, dim)), like((batch, length, kv_heads, dim))
    options = {"scale": 1.0, "logit_cap": None, "bounds": bounds, "config": config}
    return mosaic.plan_of(q, k, **options), bounds


def test_packed_documents_part_by_part_with_every_option():
    """Four parts, of a row and a kv head; three warpgroups, two staged tiles.

    What the second row has outside its third document is other: no bit of that
    document's gradients may know. Padding has gradients of exactly 0.
    """
    time, first, last = 190, 64, 129  # of the third document
    config = stored(64, warpgroups=3, step_kv=64, slots=3, scores_slots=2)
    config = dataclasses.replace(config, scores_bytes=1 << 18)
    index = np.arange(time)
    inside = (index >= first) & (index < last)
    is_prefix = np.repeat((inside & (index < 94))[None], 2, axis=0)
    mask = {"window": 50, "is_prefix": is_prefix}
    plan, bounds = sizes(64, config, batch=2, time=time, **mask)
    assert kernel_bwd_stored.parts_of(plan, bounds).count(plan) == 4
    args = [np.repeat(x, 2, axis=0) for x in arguments(time, 4, 2)]
    for x in args:
        mine = inside.reshape(time, *[1] * (x.ndim - 2))
        x[1] = np.where(mine, x[1], -x[1, ::-1])
    options = {
        "ids": np.repeat(lengths(1, 63, 65, time=time), 2, axis=0),
        "sinks": np.asarray([0.5, -0.3, 0.1, 0.2], np.float32),
        "logit_cap": 30.0,
        # Logits of 20 to 40, at which the cap counts.
        "scale": 3.0,
        **mask,
    }
    got = interpreted_results(args, config=config, **options)
    assert_equal_to_reference(args, got, **options)
    for name, x in zip(NAMES[:-1], got, strict=False):
        np.testing.assert_array_equal(x[0, first:last], x[1, first:last], err_msg=name)
        if name in GRADIENTS:
            assert not x[:, last:].any(), name


def test_a_window_leaves_tiles_that_half_of_a_block_sees():
    """Warpgroups of the dq kernel skip tiles, the first and the last of a block."""
    args = arguments(200, 2, 1, 128)
    options = {"window": 40, "ids": lengths(30, 1, 165, time=200)}
    got = interpreted_results(args, config=stored(128), **options)
    assert_equal_to_reference(args, got, **options)


def test_large_heads_see_other_rows_in_both_directions():
    """Head dim 256, where one warpgroup has dS; T != S, and queries without keys."""
    args = arguments(128, 1, 1, dim=256, length=100, dtype="float16")
    ids, kv_ids = np.ones((1, 128), np.int32), np.ones((1, 100), np.int32)
    ids[:, :70] = 2
    options = {"ids": ids, "kv_ids": kv_ids, "causal": False}
    got = interpreted_results(args, config=stored(256), **options)
    assert_equal_to_reference(args, got, **options)
    assert not got[2][:, :70].any()


@pytest.mark.parametrize(
    "dim, options",
    [
        (64, {"warpgroups": 3}),
        (128, {"sinks": True, "window": 128, "logit_cap": 30.0}),
        (256, {"causal": False, "scores_bytes": 1 << 20}),
    ],
)
def test_kernels_lower_for_the_card(dim, options):
    options = dict(options)
    changes = {
        x: options.pop(x) for x in ("warpgroups", "scores_bytes") if x in options
    }
    like = jax.ShapeDtypeStruct
    q, k = (like((2, 300, h, dim), jnp.bfloat16) for h in (4, 2))
    d_lse = like((2, 300, 4), jnp.float32)
    sinks = like((4,), jnp.float32) if options.pop("sinks", False) else None

    def run(args, sinks, ids):
        config = stored(dim, **changes)
        return results(args, "mosaic", sinks=sinks, ids=ids, config=config, **options)

    with hw.assume():
        traced = jax.jit(run).trace(
            (q, k, k, q, d_lse), sinks, like((2, 300), jnp.int32)
        )
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    for kernel in ("dq", "dkv"):
        assert f"pk_attention_{kernel}_stored" in text


def test_parts_are_the_largest_within_the_limit():
    """A pair of 128 keys and 64 queries takes 16 KB, for each of two query heads."""
    plan, bounds = sizes(128, stored(128), batch=4, time=256, kv_heads=6, heads=12)
    assert bounds.most_pairs == 4 + 2
    one = 6 * 2 * 16384
    for many, expected in (
        (0.99, None),
        (1, (1, 1)),
        (5.99, (1, 3)),
        (6, (1, 6)),
        (18, (2, 6)),  # a part of three rows leaves one
        (24, (4, 6)),
    ):
        config = dataclasses.replace(plan.config, scores_bytes=int(one * many))
        parts = kernel_bwd_stored.parts_of(
            dataclasses.replace(plan, config=config), bounds
        )
        assert (parts and (parts.rows, parts.kv_heads)) == expected
        if parts:
            scores = parts.scores(plan)
            assert scores.size * 2 == parts.rows * parts.kv_heads * one


def test_the_scores_are_recomputed_where_they_take_too_much():
    q, k, v, *_ = (jnp.asarray(x) for x in arguments(300, 2, 1, 64))

    def kernels(scores_bytes):
        config = stored(64, scores_bytes=scores_bytes)

        def loss(q, k, v):
            o = attention(q, k, v, config=config, implementation="mosaic")
            return jnp.sum(o.astype(jnp.float32))

        with hw.assume():
            return str(jax.make_jaxpr(jax.grad(loss, (0, 1, 2)))(q, k, v))

    one = sizes(64, stored(64), heads=2, kv_heads=1)[1].most_pairs * 2 * 16384
    assert "pk_attention_dq_stored" in kernels(one)
    assert "pk_attention_dq_stored" not in kernels(one - 1)


def test_scores_of_documents_are_stored_where_theirs_fit(monkeypatch):
    """Room for 5 pairs, where a row can have 6: one has 4, one has 6.

    What stores gives twice the gradients here, so that it shows where it ran.
    """
    time, heads, batch = 200, 1, 2
    config = stored(64, scores_bytes=5 * 16384)
    plan, bounds = sizes(64, config, batch=batch, time=time, heads=heads, kv_heads=1)
    assert bounds.most_pairs == 6
    assert kernel_bwd_stored.parts_of(plan, bounds) is None
    assert kernel_bwd_stored.parts_for_documents(plan, bounds) is None
    gradients = kernel_bwd_stored.gradients

    def twice(*args):
        return jax.tree.map(lambda x: 2 * x, gradients(*args))

    monkeypatch.setattr(kernel_bwd_stored, "gradients", twice)
    args = arguments(time, heads, 1, 64, batch=batch)
    many, one = lengths(64, 64, 64, 8, time=time), lengths(200, time=time)
    # The documents are a program's arguments: one for both.
    kernels, reference = program("mosaic", config=config), program("reference")
    blocks = {"block_q": config.block_q, "block_kv": config.block_kv}
    make = jax.jit(functools.partial(tile_bounds, batch=batch, time=time, **blocks))
    for rows, pairs, factor in (((many, many), 4, 2), ((many, one), 6, 1)):
        ids = np.concatenate(rows)
        bounds = make(q_segment_ids=ids, kv_segment_ids=ids)
        assert bounds.pairs == pairs
        assert kernel_bwd_stored.parts_for_documents(plan, bounds).pairs == 5
        with interpreted():
            o, lse, *grads = map(np.asarray, kernels(args, None, ids, None, None))
        got = [o, lse, *(x / factor for x in grads)]
        assert_all_close(got, reference(exact(args), None, ids, None, None))


def test_documents_may_need_fewer_parts_than_their_row():
    """Two heads of 12 pairs each are two parts of 12, or one if they have 6 or less."""
    config = stored(64, scores_bytes=12 * 16384)
    plan, _ = sizes(64, config, kv_heads=2, heads=2)
    q = jax.ShapeDtypeStruct((1, 300, 2, 64), jnp.bfloat16)
    ids = jax.ShapeDtypeStruct((1, 300), jnp.int32)

    def grads(q, ids, whole):
        ids = None if whole else ids
        run = functools.partial(
            attention, q_segment_ids=ids, kv_segment_ids=ids, config=config
        )
        o, pull = jax.vjp(functools.partial(run, implementation="mosaic"), q, q, q)
        return pull(o)

    def text(whole):
        with hw.assume():
            return str(jax.make_jaxpr(grads, static_argnums=2)(q, ids, whole))

    bounds = jax.eval_shape(
        lambda ids: tile_bounds(
            batch=1, time=300, q_segment_ids=ids, kv_segment_ids=ids
        ),
        ids,
    )
    parts = kernel_bwd_stored.parts_of(plan, bounds)
    fewer = kernel_bwd_stored.parts_for_documents(plan, bounds)
    assert (parts.kv_heads, parts.pairs, parts.count(plan)) == (1, 12, 2)
    assert (fewer.kv_heads, fewer.pairs, fewer.count(plan)) == (2, 6, 1)
    of_documents, of_one = text(False), text(True)
    name = "pk_attention_dkv_stored"
    assert of_documents.count(name) == 2 * of_one.count(name)  # either way they store
    assert not re.search(r"pk_attention_dkv\b", of_documents)


def test_tuning_takes_a_whole_backward_as_it_was_measured():
    """It does not mix the one that stores dS with what the others' kernels won by."""
    guess = tune.first_guess(64)
    found = dataclasses.replace(guess, slots=6)
    adopt = functools.partial(tune._adopt, guess=guess)
    other = dataclasses.replace(guess, dkv_step_q=128, dkv_stages=4)
    best = adopt("dkv", found, other)
    assert best == dataclasses.replace(found, dkv_step_q=128, dkv_stages=4)
    candidates = list(tune._configs("bwd", 64, best))
    assert candidates[0] == best
    assert {x.backward for x in candidates[1:]} == {"stored"}
    assert adopt("bwd", best, best) == best
    taken = adopt("bwd", best, candidates[1])
    assert taken == dataclasses.replace(candidates[1], slots=6)


def test_limits_are_named():
    for change, text in (
        ({"backward": "atomics"}, "backward='atomics', allowed are recomputed, stored"),
        ({"backward": "stored", "dkv_step_q": 128}, "dkv_step_q=128, .* has 64"),
        ({"scores_bytes": 0}, "scores_bytes=0, allowed are 1 to 4294967295"),
        ({"scores_bytes": 1 << 32}, "scores_bytes=4294967296"),
        ({"scores_heads": 0}, "scores_heads=0"),
        ({"scores_slots": 0}, "scores_slots=0"),
    ):
        with pytest.raises(ValueError, match=text):
            Config(**change)

    def traced(dim, config, implementation):
        like = jax.ShapeDtypeStruct((1, 64, 1, dim), jnp.bfloat16)
        op = functools.partial(attention, config=config, implementation=implementation)
        return jax.eval_shape(op, like, like, like)

    for name in ("xla", "reference"):
        with pytest.raises(ValueError, match='is for "mosaic"'):
            traced(64, stored(64), name)
    with pytest.raises(NotImplementedError, match="Hopper"):
        traced(64, stored(64), "mosaic")
    with hw.assume(), pytest.raises(ValueError, match="128 queries and 128 keys"):
        traced(256, stored(256, block_kv=128), "mosaic")
    plan, bounds = sizes(128, stored(128, scores_slots=9))
    parts = kernel_bwd_stored.parts_of(plan, bounds)
    inputs = {"k": jax.ShapeDtypeStruct((1, 384, 2, 128), jnp.bfloat16)}
    with hw.assume(), pytest.raises(ValueError, match=r"asks for .* bytes of shared"):
        kernel_bwd_stored.dkv_stored(plan, parts, inputs)


@pytest.mark.gpu
@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("spec", list(specs.specs("model")), ids=lambda x: x.name)
def test_model_shapes_on_the_card(spec, parts):
    config = stored(spec.dim)
    blocks = {"block_q": config.block_q, "block_kv": config.block_kv}
    pairs = specs.bounds_of(spec, blocks).most_pairs
    whole = spec.batch * spec.heads * pairs * config.block_kv * 64 * 2
    config = dataclasses.replace(config, scores_bytes=whole // parts)
    assert_model_shape(spec, 50, config=config)


@pytest.mark.gpu
@pytest.mark.parametrize("dim", config_mosaic.HEAD_DIMS)
@pytest.mark.parametrize(
    "change", [{"scores_heads": 1}, {"scores_heads": 4}, {"scores_stages": 1}]
)
def test_launch_parameters_do_not_matter_on_the_card(dim, change):
    args = arguments(1500, 8, 2, dim)
    ids = lengths(700, 3, 500, 290, time=1500)
    got = results(args, "mosaic", ids=ids, config=stored(dim, **change))
    assert_equal_to_reference(args, got, ids=ids)
