"""Time sharded over devices equals one device: results and every gradient."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxaccel.nn import context_parallel
from jaxaccel.nn.context_parallel import TimeSharding
from pallas_kernels import causal_conv1d, gated_delta_rule
from pallas_kernels._common import hw
from pallas_kernels._common.dispatch import recorded_choices
from pallas_kernels._common.testing import assert_close


B, T, HK, HV, K, V, W = 2, 96, 2, 4, 16, 24, 4
NAMES = ("o", "state", "dq", "dk", "dv", "dg", "dbeta", "dinitial")


def make_sharding(devices, rows=1, heads=1):
    """`devices` along time, and more along rows and heads."""
    count = devices * rows * heads
    grid = np.asarray(jax.devices()[:count]).reshape(rows, devices, heads)
    mesh = jax.sharding.Mesh(grid, ("data", "time", "tensor"))
    return TimeSharding(
        mesh=mesh, axis="time", batch_axes=("data",), head_axes=("tensor",)
    )


def first(*starts):
    is_first = np.zeros((B, T), bool)
    for row, token in starts:
        is_first[row, token] = True
    return is_first


# At 4 devices a part has 24 tokens, at 2 it has 48. Row 0: a document over three
# borders; row 1: one that begins at a border, one of a single token before a border.
DOCUMENTS = first((0, 0), (0, 7), (1, 24), (1, 47), (1, 48), (1, 60))


def tokens():
    """q, k, v, g, beta, initial state; one head never forgets, so that leaks show.

    Row 0 ends in 60 tokens of padding: of four devices two have none of its tokens.
    """
    rng = np.random.default_rng(0)
    q, k = rng.standard_normal((2, B, T, HK, K), np.float32)
    q, k = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
    v = rng.standard_normal((B, T, HV, V), np.float32)
    g = -0.1 * rng.random((B, T, HV), np.float32)
    g[..., 0] = 0.0
    beta = rng.random((B, T, HV), np.float32)
    state = rng.standard_normal((B, HV, V, K), np.float32)
    g[0, T - 60 :], beta[0, T - 60 :] = 0.0, 0.0
    return q, k, v, g, beta, state


@functools.cache
def compiled(*grid):
    """The rule on a grid of devices, on one without: o, state and six gradients."""
    rule = gated_delta_rule
    if grid:
        rule = functools.partial(
            context_parallel.gated_delta_rule, sharding=make_sharding(*grid)
        )

    @jax.jit
    def run(args, is_first, cotangents):
        def op(*args):
            *inputs, state = args
            return rule(
                *inputs,
                is_first=is_first,
                initial_state=state,
                chunk_size=16,
                implementation="xla",
            )

        out, pullback = jax.vjp(op, *args)
        return *out, *pullback(cotangents)

    return run


def cotangents():
    rng = np.random.default_rng(1)
    do = rng.standard_normal((B, T, HV, V), np.float32)
    return do, rng.standard_normal((B, HV, V, K), np.float32)


@pytest.mark.parametrize("grid", [(4, 1, 1), (2, 2, 2)])
def test_the_rule_equals_one_device_with_all_gradients(grid):
    got = compiled(*grid)(tokens(), DOCUMENTS, cotangents())
    want = compiled()(tokens(), DOCUMENTS, cotangents())
    for name, a, b in zip(NAMES, got, want, strict=True):
        assert_close(a, b, rel=1e-5, name=name)


def test_a_document_sees_nothing_of_what_other_devices_have_before_it():
    """Bits do not change when everything before a border does."""
    is_first = first((0, 48), (1, 48))
    run = compiled(4, 1, 1)
    args = tokens()
    changed = [np.concatenate([-x[:, :48], x[:, 48:]], axis=1) for x in args[:3]]
    o, state, *_ = run(args, is_first, cotangents())
    other, last, *_ = run((*changed, *args[3:]), is_first, cotangents())
    np.testing.assert_array_equal(o[:, 48:], other[:, 48:])
    np.testing.assert_array_equal(state, last)
    assert np.any(np.asarray(o[:, :48]) != np.asarray(other[:, :48]))


def test_the_recurrence_may_be_named():
    """Its passes over the state alone run "xla", and that is what is recorded."""
    keys, gates = (np.zeros(s, np.float32) for s in ((1, 32, 1, 16), (1, 32, 1)))
    rule = functools.partial(
        context_parallel.gated_delta_rule,
        sharding=make_sharding(2),
        implementation="reference",
    )
    with recorded_choices() as choices:
        jax.eval_shape(rule, keys, keys, keys, gates, gates)
    taken = {choice.op: choice.implementation for choice in choices}
    assert taken == {
        "gated_delta_rule.summaries": "xla",
        "gated_delta_rule": "reference",
    }


@functools.cache
def convolved(*grid):
    """The convolution on a grid of devices, on one without: y and four gradients."""
    rng = np.random.default_rng(2)
    dim = 6
    x, dy = rng.standard_normal((2, B, T, dim), np.float32)
    weight = rng.standard_normal((W, dim), np.float32)
    bias = rng.standard_normal((dim,), np.float32)
    state = rng.standard_normal((B, W - 1, dim), np.float32)

    def op(x, weight, bias, state):
        rest: dict[str, Any] = {
            "bias": bias,
            "is_first": DOCUMENTS,
            "initial_state": state,
            "activation": "silu",
            "implementation": "xla",
        }
        if grid:
            sharding = make_sharding(*grid)
            return context_parallel.causal_conv1d(x, weight, sharding=sharding, **rest)
        return causal_conv1d(x, weight, **rest)[0]

    @jax.jit
    def run(x, weight, bias, state, dy):
        y, pullback = jax.vjp(op, x, weight, bias, state)
        return y, *pullback(dy)

    return run(x, weight, bias, state, dy)


@pytest.mark.parametrize("grid", [(4, 2, 1), (2, 1, 2)])
def test_the_convolution_equals_one_device_with_all_gradients(grid):
    names = ("y", "dx", "dweight", "dbias", "dinitial")
    for name, a, b in zip(names, convolved(*grid), convolved(), strict=True):
        assert_close(a, b, rel=1e-6, name=name)


def test_kernels_lower_for_cards_that_share_rows():
    def like(*shape, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct(shape, dtype)

    keys, gates = like(2, 128, 1, 128), like(2, 128, 1, dtype=jnp.float32)
    rule = functools.partial(
        context_parallel.gated_delta_rule,
        sharding=make_sharding(2, rows=2),
        implementation="mosaic",
    )
    with hw.assume():
        traced = jax.jit(rule).trace(keys, keys, keys, gates, gates)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    for name in ("pk_gdn_summary", "pk_gdn_fwd", "all_gather"):
        assert name in text


def test_errors_name_the_value():
    sharding = make_sharding(4)
    *args, _ = tokens()
    short = [x[:, :95] for x in args]
    with pytest.raises(ValueError, match="T = 95 has no 4 equal parts"):
        context_parallel.gated_delta_rule(*short, sharding=sharding)
    x, weight = jnp.zeros((1, 8, 2)), jnp.zeros((4, 2))
    with pytest.raises(ValueError, match="leaves 2 tokens each"):
        context_parallel.causal_conv1d(x, weight, sharding=sharding)
    with pytest.raises(ValueError, match="'expert' is no axis of the mesh"):
        TimeSharding(mesh=sharding.mesh, axis="expert")
    with pytest.raises(ValueError, match="twice"):
        TimeSharding(mesh=sharding.mesh, axis="time", batch_axes=("time",))
