"""The delta rule's kernels on the card, at the shapes of a model."""

import functools
from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from delta_rule_cases import (
    NAMES,
    arguments,
    assert_all_close,
    cotangents,
    exact,
    first,
    gradients,
    rule,
    unit,
    with_gradients,
)
from running import jit

from pallas_kernels.gated_delta_rule import config_mosaic
from pallas_kernels.gated_delta_rule.config_mosaic import Config


pytestmark = pytest.mark.gpu


def model_arguments(batch, time, dtype=jnp.bfloat16):
    """Sixteen key heads, thirty-two value heads."""
    keys = jax.random.split(jax.random.key(3), 16)
    make = functools.partial(arguments, batch, time, 2, dtype)
    parts = [make(seed=int(i)) for i in range(len(keys))]
    heads = [jnp.concatenate(x, axis=2) for x in list(zip(*parts, strict=True))[:5]]
    return *heads, jnp.concatenate([x[5] for x in parts], axis=1)


@pytest.mark.parametrize(
    "batch, time, dtype, config",
    [
        (1, 1000, "bfloat16", Config(segments=1)),
        (3, 512, "float16", Config(segments=1)),
        (1, 1000, "float16", Config(segments=4, stages=3, order="values_first")),
        (3, 512, "bfloat16", Config(grads="ring", stages=2)),
        (3, 512, "bfloat16", Config(keep="states")),
        (1, 1000, "float16", Config(segments=4, keep="states")),
    ],
)
def test_model_shapes_on_the_card(batch, time, dtype, config):
    args = model_arguments(batch, time, jnp.dtype(dtype))
    starts = [(row, t) for row in range(batch) for t in (0, 130, 192, 400)]
    is_first = first(batch, time, *starts)
    run = functools.partial(
        gradients, args, is_first, cotangents(args), "mosaic", config
    )
    got = run()
    assert_all_close(got, with_gradients(exact(args), is_first, "reference"))
    for _ in range(100):
        for name, a, b in zip(NAMES, run(), got, strict=True):
            assert bool(jnp.array_equal(a, b)), name


@pytest.mark.parametrize("grads", ["ring", "stream"])
@pytest.mark.parametrize("group", [1, 3, 4])
def test_rings_of_other_groups_on_the_card(group, grads):
    """More chunks than there are SMs, so that blocks take several in turn."""
    parts = [arguments(4, 512, group, seed=i) for i in range(8)]
    heads = (jnp.concatenate(x, axis=2) for x in list(zip(*parts, strict=True))[:5])
    args = (*heads, jnp.concatenate([x[5] for x in parts], axis=1))
    is_first = first(4, 512, *((row, t) for row in range(4) for t in (0, 130, 192)))
    alone = Config(segments=1, grads=grads)
    got = gradients(args, is_first, cotangents(args), "mosaic", alone)
    assert_all_close(got, with_gradients(exact(args), is_first, "reference"))
    # What was kept is what would be computed again, to the bit.
    keep = Config(segments=1, grads=grads, keep="states")
    kept = gradients(args, is_first, cotangents(args), "mosaic", keep)
    for name, a, b in zip(NAMES, kept, got, strict=True):
        assert bool(jnp.array_equal(a, b)), name


def test_long_rows_on_the_card():
    """Against the chunked form: the recurrence would keep a state for every token."""
    args = model_arguments(1, 4096)
    is_first = first(1, 4096, *((0, t) for t in (0, 130, 192, 400)))
    planned = Config(segments=None)
    got = gradients(args, is_first, cotangents(args), "mosaic", planned)
    assert_all_close(got, with_gradients(exact(args), is_first, "xla"))


@pytest.mark.parametrize("order", get_args(config_mosaic.Order))
def test_variants_of_the_forward_on_the_card(order):
    args = model_arguments(1, 1000)
    is_first = first(1, 1000, (0, 130), (0, 192))
    run = jit(
        lambda args, config: rule(args, is_first, "mosaic", config), static_argnums=1
    )
    got = run(args, Config(order=order))
    assert_all_close(got, rule(exact(args), is_first, "reference"), NAMES[:2])
    # How many chunks wait in shared memory changes nothing.
    other = run(args, Config(order=order, stages=2))
    for a, b in zip(other, got, strict=True):
        np.testing.assert_array_equal(a, b)


def test_documents_that_no_border_cuts_have_the_same_bits():
    args = model_arguments(1, 1024)
    is_first = first(1, 1024, *((0, t) for t in (0, 64, 256, 512, 700, 768)))
    whole, split = (
        gradients(args, is_first, cotangents(args), "mosaic", Config(segments=count))
        for count in (1, 4)
    )
    for name, a, b in zip(NAMES, whole, split, strict=True):
        assert bool(jnp.array_equal(a, b)), name


def test_what_follows_in_a_chunk_changes_no_bits():
    """Row 0 goes on with another document where row 1 has padding."""
    args = model_arguments(1, 128)
    q, k, v, g, beta, state = (jnp.concatenate([x, x]) for x in args)
    g, beta = (x.at[1, 100:].set(0) for x in (g, beta))
    is_first = first(2, 128, (0, 100))
    config = Config(segments=1)
    run = jit(lambda *args: rule(args, is_first, "mosaic", config))
    o, _ = run(q, k, v, g, beta, state)
    np.testing.assert_array_equal(o[0, :100], o[1, :100])


@pytest.mark.parametrize("key_dim, value_dim", [(64, 64), (64, 256)])
def test_other_head_dims_on_the_card(key_dim, value_dim):
    q, k, v, g, beta, state = model_arguments(1, 300)
    q, k = (unit(x[..., :key_dim].astype(jnp.float32)).astype(q.dtype) for x in (q, k))
    v, state = (jnp.tile(x, (1, 1, *y)) for x, y in ((v, (1, 2)), (state, (2, 1))))
    args = (q, k, v[..., :value_dim], g, beta, state[:, :, :value_dim, :key_dim])
    is_first = first(1, 300, (0, 130), (0, 192))
    got = with_gradients(args, is_first, "mosaic")
    assert_all_close(got, with_gradients(exact(args), is_first, "reference"))
