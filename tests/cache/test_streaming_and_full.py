"""Caches that no query chooses from: all tokens, or the first and the newest."""

import dataclasses

import jax
import jax.numpy as jnp
import layer_text as lt
import numpy as np
import pytest

from jaxaccel.cache import reference
from jaxaccel.cache.full import DenseCacheConfig
from jaxaccel.cache.plan import PolicyCache
from jaxaccel.cache.streaming import StreamingCacheConfig


LENGTHS, COUNT = [13, 0, 21], 12
CAPPED = dataclasses.replace(lt.SPEC, logit_cap=3.0)


def test_dense_reads_all_tokens_under_sinks_and_a_cap():
    text = lt.draw(sinks=True)
    _, o, state = lt.run(DenseCacheConfig(), text, LENGTHS, COUNT, spec=CAPPED)
    expected = lt.expected(text, LENGTHS, COUNT, lt.everything, CAPPED)
    np.testing.assert_allclose(o, expected, atol=2e-6)
    np.testing.assert_array_equal(state.length, np.array(LENGTHS) + COUNT)


@pytest.mark.parametrize("sinks", [0, 3])
def test_streaming_reads_the_first_and_the_newest(sinks):
    text = lt.draw()
    policy = StreamingCacheConfig(num_sinks=sinks, window=9, move_sinks=False)
    _, o, _ = lt.run(policy, text, LENGTHS, COUNT)

    def keep(b, q, k, v, n):
        return reference.streaming_keep(n, sinks, 9)[None]

    expected = lt.expected(text, LENGTHS, COUNT, keep)
    np.testing.assert_allclose(o, expected, atol=2e-6)


def test_moved_sinks_stand_in_front_of_the_window():
    text = lt.draw()
    policy = StreamingCacheConfig(num_sinks=3, window=9)
    _, o, _ = lt.run(policy, text, LENGTHS, COUNT)
    for b, length in enumerate(LENGTHS):
        for i in range(COUNT):
            n = length + i + 1
            q, _, v = text.row(b, n)
            k = lt.rotated(text.k[b, :n], reference.streaming_positions(n, 3, 9))
            keep = np.tile(reference.streaming_keep(n, 3, 9), (2, 1))
            expected = reference.attend(q[-1], k, v, keep, lt.SPEC.scale)
            np.testing.assert_allclose(o[i, b], expected, atol=3e-6)


@pytest.mark.parametrize("move", [False, True])
def test_a_prompt_within_the_budget_is_read_as_step_by_step(move):
    text = lt.draw(sinks=True)
    policy = StreamingCacheConfig(
        num_sinks=3, window=9, move_sinks=move, prefill_budget=12, prefill_sinks=3
    )
    _, stepped, _ = lt.run(policy, text, [0, 0, 0], 25)
    prompt, after, _ = lt.run(policy, text, [20, 3, 11], 5)
    for b, length in enumerate([20, 3, 11]):
        np.testing.assert_allclose(prompt[b, :length], stepped[:length, b], atol=3e-6)
        np.testing.assert_allclose(
            after[:, b], stepped[length : length + 5, b], atol=3e-6
        )


def test_a_row_of_padding_changes_nothing():
    text = lt.draw()
    for policy in (DenseCacheConfig(), StreamingCacheConfig(num_sinks=2, window=6)):
        _, _, before = lt.run(policy, text, [5, 9, 12], 1)
        arrays = tuple(text.__dict__.values())
        real = jnp.asarray([True, False, True])
        length = before.length
        _, after = lt.steps(policy, lt.SPEC, 4, arrays, length, before, real)
        np.testing.assert_array_equal(after.length - length, [4, 0, 4])
        for a, b in zip(jax.tree.leaves(after), jax.tree.leaves(before), strict=True):
            np.testing.assert_array_equal(np.asarray(a)[1], np.asarray(b)[1])


def test_padding_may_stand_anywhere():
    text = lt.draw(rows=3)
    where = np.array([[0, 1, 2, 3, 4], [0, 0, 0, 1, 2], [0, 1, 1, 1, 2]])
    real = np.array([[1, 1, 1, 1, 1], [0, 0, 1, 1, 1], [1, 1, 0, 0, 1]], bool)
    tokens = text.tokens(where, real)
    aligned = tokens.left_aligned()
    np.testing.assert_array_equal(aligned.count, [5, 3, 3])
    np.testing.assert_array_equal(aligned.k_pre[1, :3], text.k[1, :3])
    policy = DenseCacheConfig(prefill_budget=4, prefill_sinks=1)
    cache = PolicyCache.init([policy], lt.SPEC, 3, 8, jnp.float32)
    mix = jax.jit(lambda tokens: cache.layer(jnp.int32(0)).mix(tokens, lt.SPEC)[0])
    o = mix(tokens)
    right = jax.jit(lambda aligned: policy.attend_prompt(aligned, lt.SPEC))(aligned)
    for row, places in ((1, [2, 3, 4]), (2, [0, 1, 4])):
        np.testing.assert_array_equal(o[row, np.array(places)], right[row, :3])


def test_what_does_not_fit_is_refused():
    text = lt.draw()
    with pytest.raises(ValueError, match="T=21 tokens, more than the 20 slots"):
        lt.run(DenseCacheConfig(), text, LENGTHS, 1, room=20)
    policy, state = DenseCacheConfig(), None
    with pytest.raises(ValueError, match=r"one token a row, got T=2"):
        lt.decode_step(policy, state, text.tokens([[0, 1]] * 3), lt.SPEC)
    with pytest.raises(ValueError, match="window=0 must be positive"):
        StreamingCacheConfig(window=0)
    with pytest.raises(ValueError, match="prefill_budget=4 must be above"):
        DenseCacheConfig(prefill_budget=4)
