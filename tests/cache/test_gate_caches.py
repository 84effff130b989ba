"""What gates allow to leave out: nothing at tolerance 0, and never more than told."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxaccel.cache import reference
from jaxaccel.cache.gate_chunks import attend_unforgotten, largest_keys
from jaxaccel.cache.gate_heads import attend_open_heads, largest_values
from jaxaccel.cache.gate_writes import LazyState, error_limit, lazy_step
from jaxaccel.cache.layer_state import AttentionSpec


SPEC = AttentionSpec(num_heads=4, num_kv_heads=2, head_dim=8, scale=8**-0.5)
CASES, TOKENS, CHUNK = 250, 48, 8  # four heads each: a thousand cases


def drawn(seed=0, cases=CASES):
    rng = np.random.default_rng(seed)

    def normal(*shape):
        return rng.normal(size=(cases, *shape)).astype(np.float32)

    q, k, v = normal(1, 4, 8), normal(2, TOKENS, 8), normal(2, TOKENS, 8)
    length = rng.integers(1, TOKENS + 1, size=cases).astype(np.int32)
    return rng, q, k, v, length


def exact(q, k, v, length, bias=None):
    """Attention in f64, [cases, H, K]; bias [cases, H, N] is added to scores."""
    scores = (
        np.einsum("bgrk,bgnk->bgrn", q[:, 0].reshape(-1, 2, 2, 8).astype(np.float64), k)
        * SPEC.scale
    )
    scores = scores.reshape(-1, 4, k.shape[2])
    if bias is not None:
        scores = scores + bias
    held = np.arange(k.shape[2])[None, None] < length[:, None, None]
    scores = np.where(held, scores, -np.inf)
    p = np.exp(scores - scores.max(axis=-1, keepdims=True))
    p /= p.sum(axis=-1, keepdims=True)
    o = np.einsum("bgrn,bgnk->bgrk", p.reshape(-1, 2, 2, k.shape[2]), v)
    return o.reshape(-1, 4, 8)


@functools.partial(jax.jit, static_argnums=5)
def open_heads(q, k, v, length, gate, tolerance):
    valid = (jnp.arange(k.shape[2])[None] < length[:, None])[:, None]
    largest = largest_values(v, valid)
    return attend_open_heads(q, k, v, valid, gate, largest, SPEC, tolerance)


@pytest.mark.parametrize("tolerance", [0.0, 0.05])
def test_closed_heads_are_left_out_within_their_bound(tolerance):
    rng, q, k, v, length = drawn()
    gate = rng.uniform(size=(CASES, 4, 8)).astype(np.float32)
    gate *= rng.choice([1.0, 0.01, 0.0], size=(CASES, 4, 1)).astype(np.float32)
    # A value far larger than all others, alone in being looked at: bounds are tight.
    v[0, :, 0], length[0] = -100.0, 1
    found = jax.tree.map(np.asarray, open_heads(q, k, v, length, gate, tolerance))
    want = gate * exact(q, k, v, length)
    error = np.abs(found.y - want).max(axis=-1)
    assert np.all(error <= found.bound + 1e-5 * (1 + np.abs(want).max(axis=-1)))
    assert np.all(found.bound <= tolerance)
    is_shut = gate.max(axis=-1) == 0
    assert np.all(found.is_skipped[is_shut])
    if tolerance == 0:
        np.testing.assert_array_equal(found.is_skipped, is_shut)
    else:
        assert 0.4 < found.is_skipped.mean() < 0.9
        # The first row's gate of 1 % lets a value of 100 through.
        big = gate[0].max(axis=-1) * 100 > tolerance
        np.testing.assert_array_equal(found.is_skipped[0], ~big)
    # Keys and values are spared only where both heads of a kv head are shut.
    pairs = found.is_skipped.reshape(CASES, 2, 2)
    np.testing.assert_array_equal(found.is_unread, pairs.all(axis=-1))


def test_a_gate_that_stays_says_nothing_of_what_is_looked_at():
    """Reusing outputs while gates are still would return the last query's."""
    _, q, k, v, _ = drawn(cases=1)
    k[0, :, 5], v[0, :, 5] = 0.0, 7.0
    q[0, 0] = 0.0
    gate, length = np.full((1, 4, 8), 0.5, np.float32), np.asarray([TOKENS])
    before = open_heads(q, k, v, length, gate, 0.05).y
    k[0, :, 5], q[0, 0] = 8.0, 8.0  # the same gate, and a query that finds its needle
    found = open_heads(q, k, v, length, gate, 0.05)
    assert np.abs(np.asarray(before)).max() < 1.0
    np.testing.assert_allclose(found.y, 0.5 * 7.0, rtol=1e-4)
    assert not np.any(found.is_skipped)


@functools.partial(jax.jit, static_argnums=5)
def unforgotten(q, k, v, decay, length, tolerance):
    largest = largest_keys(k, CHUNK)
    return attend_unforgotten(
        q, k, v, decay, length, largest, SPEC, chunk=CHUNK, tolerance=tolerance
    )


@pytest.mark.parametrize("tolerance", [0.0, 1e-3])
def test_forgotten_chunks_are_left_out_within_their_bound(tolerance):
    rng, q, k, v, length = drawn(1)
    speed = rng.choice([0.0, 0.05, 1.0, 3.0], size=(CASES, 4, 1))
    decay = -np.cumsum(speed * rng.uniform(size=(CASES, 4, TOKENS)), axis=-1)
    decay = decay.astype(np.float32)
    # A needle in the first chunk that only just outlives its forgetting.
    k[0], q[0], length[0] = 0.0, 1.0, TOKENS
    k[0, :, 0] = 6.0
    decay[0] = -np.linspace(0.1, 16.0, TOKENS)
    for row in range(CASES):
        k[row, :, length[row] :] = np.nan
        v[row, :, length[row] :] = np.nan
    # A chunk's largest key is noted when it is full; what is not there has none.
    clean = np.nan_to_num(k)
    found = jax.tree.map(np.asarray, unforgotten(q, clean, v, decay, length, tolerance))
    now = np.take_along_axis(decay, (length - 1)[:, None, None], axis=2)
    v = np.nan_to_num(v)
    want = exact(q, clean, v, length, bias=(now - decay).astype(np.float64))
    held = np.arange(TOKENS)[None] < length[:, None]
    shown = np.where(held[:, None, :, None], v, 0.0)
    diameter = 2 * np.linalg.norm(shown, axis=-1).max(axis=2)  # [cases, G], at least
    error = np.linalg.norm(found.o - want, axis=-1)
    limit = found.bound * np.repeat(diameter, 2, axis=1)
    assert np.all(error <= limit + 1e-5)
    assert np.all(found.bound <= tolerance * 1.0001)
    assert not np.any(found.is_pruned[0, :, 0])  # the needle
    if tolerance == 0:
        assert not found.is_pruned.any()
    else:
        assert found.is_pruned[speed[..., 0] == 3.0].mean() > 0.2
        # With nothing forgotten, only what cannot be seen at all is left out.
        assert not found.is_pruned[speed[..., 0] == 0.0].any()
    pairs = found.is_pruned.reshape(CASES, 2, 2, -1)
    np.testing.assert_array_equal(found.is_unread, pairs.all(axis=2))


def recurrence(q, k, v, log_a, b):
    """The state and outputs in f64, step by step."""
    state = np.zeros((*v.shape[1:], k.shape[-1]))
    outputs = []
    for t in range(len(q)):
        state = np.exp(log_a[t])[..., None, None] * state
        recalled = np.einsum("bhvk,bhk->bhv", state, k[t])
        correction = b[t][..., None] * (v[t] - recalled)
        state = state + correction[..., None] * k[t][..., None, :]
        outputs.append(np.einsum("bhvk,bhk->bhv", state, q[t]))
    return state, np.stack(outputs)


@functools.partial(jax.jit, static_argnums=5)
def lazily(q, k, v, log_a, b, tolerance):
    start = LazyState.of(jnp.zeros((*v.shape[1:], k.shape[-1])))

    def step(state, token):
        o, state = lazy_step(state, *token, tolerance=tolerance)
        return state, (o, state.bound)

    return jax.lax.scan(step, start, (q, k, v, log_a, b))


@pytest.mark.parametrize("tolerance", [0.0, 0.1])
def test_small_corrections_are_not_written_within_their_bound(tolerance):
    rng = np.random.default_rng(2)
    steps, shape = 60, (25, 4)

    def unit(*more):
        x = rng.normal(size=(steps, *shape, *more))
        return x / np.linalg.norm(x, axis=-1, keepdims=True)

    q, k, v = unit(6), unit(6), unit(5)
    # Tokens that come again recall what they wrote; some values change their sign.
    k[20:40], v[20:40] = k[:20], v[:20] * rng.choice([1, 1, 1, -1], (20, *shape, 1))
    k[40:], v[40:] = k[39:40], v[39:40]
    log_a = np.log(rng.choice([0.9, 0.99, 0.9999], size=(1, *shape)))
    log_a = np.broadcast_to(log_a, (steps, *shape))
    b = rng.uniform(0.3, 1.0, size=(steps, *shape))
    arrays = [x.astype(np.float32) for x in (q, k, v, log_a, b)]
    state, (o, bounds) = lazily(*arrays, tolerance)
    want_state, want = recurrence(*(x.astype(np.float64) for x in arrays))
    apart = np.linalg.norm(np.asarray(state.value) - want_state, ord=2, axis=(2, 3))
    assert np.all(apart <= np.asarray(state.bound) + 1e-5)
    # A token's own correction is in its output: what is wrong is the past's.
    error = np.linalg.norm(np.asarray(o) - want, axis=-1)
    before = np.concatenate([np.zeros((1, *shape)), np.asarray(bounds)[:-1]])
    assert np.all(error <= before * np.exp(log_a) + 1e-5)
    saved = np.asarray(state.traffic_saved)
    if tolerance == 0:
        assert np.all(np.asarray(bounds) == 0)
        np.testing.assert_allclose(o, want, atol=1e-5)
    else:
        assert np.all(np.asarray(bounds) <= error_limit(tolerance, 0.9999))
        assert saved.mean() > 0.05
        assert np.asarray(state.bound).max() > tolerance
    assert saved.max() <= 0.5
    np.testing.assert_array_equal(state.steps, steps)


def test_a_decay_of_a_long_idle_state_is_written_before_it_underflows():
    idle = 400
    one = np.ones((idle, 1, 1), np.float32)
    k = np.zeros((idle, 1, 1, 2), np.float32)
    k[0, ..., 0] = 1.0
    v = np.zeros((idle, 1, 1, 1), np.float32)
    v[0] = 1.0
    log_a = np.full((idle, 1, 1), -0.2, np.float32)
    state, (_, bounds) = lazily(k, k, v, log_a, one, 0.01)
    np.testing.assert_allclose(
        state.value[0, 0, 0, 0], np.exp(-0.2 * (idle - 1)), rtol=1e-3
    )
    assert 2 <= int(state.writes[0, 0]) <= 8
    assert float(bounds.max()) == 0


@pytest.mark.parametrize(
    "bad, text",
    [
        (lambda: error_limit(0.1, 1.0), "largest_decay=1.0"),
        (lambda: open_heads(*drawn(cases=1)[1:], np.ones((1, 4, 8)), -1.0), "-1.0"),
        (
            lambda: unforgotten(
                *drawn(cases=1)[1:4], np.zeros((1, 4, TOKENS)), np.ones(1, int), 1.0
            ),
            "tolerance=1.0",
        ),
    ],
)
def test_impossible_tolerances_are_refused(bad, text):
    with pytest.raises(ValueError, match=text):
        bad()


def test_the_reference_agrees():
    _, q, k, v, length = drawn(cases=3)
    for row in range(3):
        keep = np.broadcast_to(np.arange(TOKENS) < length[row], (2, TOKENS))
        want = reference.attend(
            q[row, 0],
            np.swapaxes(k[row], 0, 1),
            np.swapaxes(v[row], 0, 1),
            keep,
            SPEC.scale,
        )
        np.testing.assert_allclose(exact(q, k, v, length)[row], want, atol=1e-6)
