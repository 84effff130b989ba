"""Sizes, limits and document tables of the kernels of `gated_delta_rule`."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from running import jit

from pallas_kernels import gated_delta_rule
from pallas_kernels._common import hw, tuning
from pallas_kernels._common.dispatch import recorded_choices
from pallas_kernels._common.testing import assert_close
from pallas_kernels.gated_delta_rule import (
    config_mosaic,
    entry_gradients,
    reference,
    summaries,
    tables,
)
from pallas_kernels.gated_delta_rule.config_mosaic import (
    CHUNK,
    Config,
    Shapes,
    refusal,
)


def shapes(batch, time, heads, segments=1):
    return Shapes(
        batch=batch,
        time=time,
        key_heads=1,
        value_heads=heads,
        key_dim=128,
        value_dim=128,
        dtype=jnp.dtype("bfloat16"),
        segments=segments,
    )


def test_starts_are_counted_inside_chunks():
    begins = np.zeros((2, 2 * CHUNK), bool)
    for row, token in ((0, 0), (0, 3), (1, CHUNK), (1, CHUNK + 2)):
        begins[row, token] = True
    is_first = jnp.asarray(begins)
    start = np.asarray(tables.document_starts(is_first, CHUNK))
    assert start[0, :4].tolist() == [0, 0, 0, 3]
    assert (start[0, 3:CHUNK] == 3).all()
    assert (start[0, CHUNK:] == tables.BEGAN_BEFORE).all()
    assert (start[1, :CHUNK] == tables.BEGAN_BEFORE).all()
    assert start[1, CHUNK : CHUNK + 3].tolist() == [0, 0, 2]
    # The last chunk may be shorter; nothing is lost on the way.
    part = tables.document_starts(is_first[:, : CHUNK + 9])
    np.testing.assert_array_equal(part, start[:, : CHUNK + 9])
    np.testing.assert_array_equal(tables.first_tokens(part, CHUNK), is_first[:, :73])
    longer = np.asarray(tables.padded(part, 3 * CHUNK, CHUNK))
    np.testing.assert_array_equal(longer[:, : 2 * CHUNK], start)
    assert (longer[:, 2 * CHUNK :] == tables.BEGAN_BEFORE).all()


def test_segments_lie_in_memory_like_rows():
    from pallas_kernels.gated_delta_rule import mosaic

    batch, count, heads = 2, 3, 2
    rows = shapes(batch * count, CHUNK, heads, segments=count)
    # Row, segment and head of each state, in the order of tokens.
    want = np.stack(np.unravel_index(np.arange(12), (batch, count, heads)), axis=1)
    states = np.zeros((count, batch * heads, 1, 3), int)
    for segment, item in np.ndindex(count, batch * heads):
        states[segment, item, 0] = (item // heads, segment, item % heads)
    merged = mosaic._merge(rows, jnp.asarray(states))
    np.testing.assert_array_equal(merged[:, 0], want)


def test_segments_are_planned_to_fill_the_card():
    plan = config_mosaic.plan_segments
    with hw.assume() as card:
        # A full card gains nothing, nor do rows that end before the launches pay.
        assert plan(items=card.sms, chunks=512) == 1
        assert plan(items=256, chunks=16) == 1
        assert plan(items=32, chunks=4) == 1
        for items in (8, 16, 32):
            count = plan(items=items, chunks=512)
            assert card.sms / 4 < count * items <= card.sms
        assert plan(items=1, chunks=1) == 1
        # Only equal segments: others would copy the tokens.
        assert all(n % plan(items=8, chunks=n) == 0 for n in range(1, 200))
        assert plan(items=8, chunks=127) == 1
    with pytest.raises(ValueError, match="segments=0"):
        Config(segments=0)
    with pytest.raises(ValueError, match="stages=4"):
        Config(stages=4)
    with pytest.raises(ValueError, match="order='any'"):
        Config(order="any")
    with pytest.raises(ValueError, match="grads='any', allowed are"):
        Config(grads="any")
    with pytest.raises(ValueError, match="keep='any', allowed are"):
        Config(keep="any")
    tokens = jax.ShapeDtypeStruct((1, CHUNK, 1, 128), jnp.bfloat16)
    gates = jax.ShapeDtypeStruct((1, CHUNK, 1), jnp.float32)
    rule = functools.partial(
        gated_delta_rule, config=Config(segments=2), implementation="mosaic"
    )
    with hw.assume(), pytest.raises(ValueError, match="segments=2, T = 64 has 1"):
        jax.eval_shape(rule, tokens, tokens, tokens, gates, gates)


def test_measured_launch_parameters_are_taken(monkeypatch):
    sizes = shapes(2, 128, 3)
    assert config_mosaic.heuristic(sizes) == Config()
    key = "items=8,group=3,time=128,dtype=bfloat16"
    assert config_mosaic.table_key(sizes) == key
    table = {key: {"segments": None, "stages": 3}}
    monkeypatch.setattr(tuning, "lookup", lambda op, key: table.get(key))
    assert config_mosaic.heuristic(sizes) == Config(segments=None, stages=3)


def test_measured_segments_divide_the_chunks_of_each_call(monkeypatch):
    """A bucket of the table has rows of several lengths."""
    monkeypatch.setattr(tuning, "lookup", lambda op, key: {"segments": 8})
    for chunks, segments in ((1, 1), (5, 5), (6, 6), (8, 8), (12, 6), (127, 1)):
        config = config_mosaic.heuristic(shapes(1, chunks * CHUNK, 2))
        assert config == Config(segments=segments)
    tokens = jax.ShapeDtypeStruct((1, CHUNK, 1, 128), jnp.bfloat16)
    gates = jax.ShapeDtypeStruct((1, CHUNK, 1), jnp.float32)
    with hw.assume():
        o, _ = jax.eval_shape(gated_delta_rule, tokens, tokens, tokens, gates, gates)
    assert o.shape == tokens.shape


def test_passes_over_the_state_run_kernels_only_if_named():
    keys = jax.ShapeDtypeStruct((1, CHUNK, 1, 128), jnp.bfloat16)
    gates = jax.ShapeDtypeStruct((1, CHUNK, 1), jnp.float32)
    is_first = jax.ShapeDtypeStruct((1, CHUNK), jnp.bool_)
    passes = {
        "summaries": (summaries, (keys, keys, gates, gates)),
        "entry_gradients": (
            functools.partial(entry_gradients, scale=1.0),
            (keys, keys, gates, gates, keys),
        ),
    }
    for name, (run, args) in passes.items():
        for asked, taken in ((None, "xla"), ("xla", "xla"), ("mosaic", "mosaic")):
            fn = functools.partial(run, implementation=asked)
            with hw.assume(), recorded_choices() as choices:
                jax.eval_shape(
                    lambda *x, fn=fn: fn(*x[:-1], is_first=x[-1]), *args, is_first
                )
            assert [x.implementation for x in choices] == [taken]
            assert choices[0].op == f"gated_delta_rule.{name}"
        with pytest.raises(ValueError, match="'reference' is unknown"):
            run(*args, is_first=is_first, implementation="reference")
        with pytest.raises(NotImplementedError, match="Hopper"):
            run(*args, is_first=is_first, implementation="mosaic")
        with pytest.raises(ValueError, match="chunk_size is 8,"):
            run(*args, is_first=is_first, chunk_size=8)
        with pytest.raises(ValueError, match="is_first has dtype bfloat16"):
            run(*args, is_first=is_first.update(dtype=jnp.bfloat16))
        wrong = [x if x is keys else x.update(shape=(1, CHUNK, 3)) for x in args]
        with pytest.raises(ValueError, match="g has shape"):
            run(*wrong, is_first=is_first)


def test_limits_are_named():
    sizes = {
        "time": 64,
        "key_heads": 2,
        "value_heads": 4,
        "key_dim": 128,
        "value_dim": 128,
        "chunk": 64,
        "dtype": jnp.bfloat16,
    }
    assert refusal(**sizes) is None
    assert refusal(**(sizes | {"key_dim": 64, "value_dim": 256})) is None
    for change, text in (
        ({"key_dim": 256}, "K = 256, the kernels have 64, 128"),
        ({"value_dim": 96}, "V = 96"),
        ({"value_dim": 256, "value_heads": 6}, "3 value heads of 256"),
        ({"chunk": 32}, "chunk_size = 32"),
        ({"dtype": jnp.float32}, "float32"),
        ({"value_heads": 10}, "5 value heads"),
        ({"time": 0}, "T = 0"),
    ):
        assert text in refusal(**(sizes | change))


@pytest.mark.parametrize("key_dim, value_dim", [(64, 256), (128, 64)])
def test_other_head_dims_are_the_same_rule(monkeypatch, key_dim, value_dim):
    """With the recurrence in place of the kernels, which have one size."""
    from pallas_kernels.gated_delta_rule import mosaic

    sizes = []

    def kernels(shapes, scale, config, q, k, v, g, beta, starts, state):
        sizes.append((q.shape[3], v.shape[3], state.shape[2:], shapes.value_heads))
        return reference.gated_delta_rule(
            *(q, k, v, g, beta),
            is_first=tables.first_tokens(starts, CHUNK),
            initial_state=state,
            scale=scale,
        )

    monkeypatch.setattr(mosaic, "_rule", kernels)
    rng = np.random.default_rng(0)
    time, heads = 70, 2
    q, k = rng.standard_normal((2, 1, time, 1, key_dim), np.float32)
    q, k = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
    v, do = rng.standard_normal((2, 1, time, heads, value_dim), np.float32)
    g, beta = rng.random((2, 1, time, heads), np.float32) * [[[[-0.1]]], [[[1.0]]]]
    state = rng.standard_normal((1, heads, value_dim, key_dim), np.float32)
    first = np.arange(time)[None] == 67
    args = (q, k, v, np.float32(g), np.float32(beta), state)

    def with_gradients(rule, **documents):
        def run(*args):
            *inputs, state = args
            return rule(*inputs, initial_state=state, scale=0.1, **documents)

        out, pullback = jax.vjp(run, *args)
        return *out, *pullback((do, state))

    starts = tables.document_starts(first)
    config = Config()
    got = jit(
        lambda: with_gradients(
            functools.partial(mosaic.gated_delta_rule, config=config), starts=starts
        )
    )()
    want = jit(lambda: with_gradients(reference.gated_delta_rule, is_first=first))()
    for a, b in zip(got, want, strict=True):
        assert_close(a, b, rel=1e-5)
    assert sizes[0] == (128, 128, (128, 128), heads * max(1, value_dim // 128))
