"""The slot map against a dictionary and a clock."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxaccel.cache import slot_map
from jaxaccel.cache.choose import best, every
from pallas_kernels.landmark_scores.reference import weights_of


CHUNKS, WANTED, STEPS = 9, 4, 40


class Clock:
    """One head's slots: what each holds, and when it was last asked for."""

    def __init__(self, slots):
        self.chunk, self.age = [-1] * slots, [-1] * slots

    def ask(self, chunks, step):
        """The slot of each chunk, and which of them were not held."""
        held = {chunk: slot for slot, chunk in enumerate(self.chunk) if chunk in chunks}
        free = [slot for slot in range(len(self.chunk)) if slot not in held.values()]
        free.sort(key=lambda slot: self.age[slot])
        missing = [chunk for chunk in chunks if chunk not in held]
        for chunk, slot in zip(missing, free, strict=False):
            held[chunk] = slot
            self.chunk[slot] = chunk
        for chunk in chunks:
            self.age[held[chunk]] = step
        return [held[chunk] for chunk in chunks], [c in missing for c in chunks]


@jax.jit
def _ask_all(slot_chunk, slot_age, chunks, valid):
    def step(state, asked):
        number, chunks, valid = asked
        plan = slot_map.assign(*state, chunks, valid, number)
        return (plan.slot_chunk, plan.slot_age), plan

    numbers = jnp.arange(STEPS, dtype=jnp.int32)
    return jax.lax.scan(step, (slot_chunk, slot_age), (numbers, chunks, valid))[1]


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), slots=st.sampled_from([4, 6, 9]))
def test_it_is_the_dictionary_and_the_clock(seed, slots):
    rng = np.random.default_rng(seed)
    shape = (2, 2)
    # Few or many of the chunks in use, so that hits and misses both are common.
    pool = rng.integers(WANTED, CHUNKS + 1)
    order = rng.random((STEPS, *shape, CHUNKS))
    order[..., pool:] = 2
    chunks = np.argsort(order, axis=-1)[..., :WANTED].astype(np.int32)
    valid = rng.random(chunks.shape) < rng.choice([0.3, 1.0])
    empty = jnp.full((*shape, slots), -1, jnp.int32)
    plans = jax.tree.map(np.asarray, _ask_all(empty, empty, chunks, valid))
    for b, g in np.ndindex(shape):
        clock = Clock(slots)
        for t in range(STEPS):
            ok = valid[t, b, g]
            before = set(clock.chunk)
            expected, missing = clock.ask(chunks[t, b, g][ok].tolist(), t)
            assert plans.slots[t, b, g][ok].tolist() == expected
            assert plans.is_miss[t, b, g][ok].tolist() == missing
            assert not plans.is_miss[t, b, g][~ok].any()
            # Fetched is the set difference, and every chunk is in one slot.
            fetched = set(chunks[t, b, g][plans.is_miss[t, b, g]].tolist())
            assert fetched == set(chunks[t, b, g][ok].tolist()) - before
            assert plans.slot_chunk[t, b, g].tolist() == clock.chunk
            assert plans.slot_age[t, b, g].tolist() == clock.age
            held = [chunk for chunk in clock.chunk if chunk >= 0]
            assert len(held) == len(set(held))


def test_more_slots_than_chosen_chunks_keep_what_comes_back():
    """Two sets of chunks in turn: twice the slots hold both."""
    turns = np.tile(np.arange(8, dtype=np.int32).reshape(2, 4), (STEPS // 2, 1))
    chunks = jnp.asarray(turns.reshape(STEPS, 1, 1, 4))
    valid = jnp.ones(chunks.shape, bool)
    for slots, misses in ((4, 4 * STEPS), (8, 8)):
        empty = jnp.full((1, 1, slots), -1, jnp.int32)
        plan = _ask_all(empty, empty, chunks, valid)
        assert int(plan.is_miss.sum()) == misses


def test_fewer_slots_than_chosen_chunks_are_refused():
    empty, ones = jnp.zeros((1, 1, 3), jnp.int32), jnp.zeros((1, 1, 4), jnp.int32)
    with pytest.raises(ValueError, match="4 chunks are requested of 3 slots"):
        slot_map.assign(empty, empty, ones, ones > 0, jnp.int32(0))


def test_the_best_are_taken_exactly_and_the_first_of_equal_ones():
    scores = jnp.asarray([[[1.0, 3.0, 3.0, -jnp.inf, 3.0, 2.0]]])
    ids, valid = best(scores, 2)
    np.testing.assert_array_equal(ids[0, 0], [1, 2])
    assert valid.all()
    # By their numbers and not by their scores, so that a sum over them has one order.
    np.testing.assert_array_equal(best(scores, 4)[0][0, 0], [1, 2, 4, 5])
    np.testing.assert_array_equal(best(-scores[..., :3], 1)[0][0, 0], [0])
    rising = jnp.asarray([[[1.0, 2.0, 5.0]]])
    np.testing.assert_array_equal(best(rising, 2)[0][0, 0], [1, 2])
    ids, valid = best(jnp.where(scores > 2.5, scores, -jnp.inf), 4)
    np.testing.assert_array_equal(ids[0, 0], [1, 2, 4, 0])
    np.testing.assert_array_equal(valid[0, 0], [True, True, True, False])


def test_weights_far_below_what_bfloat16_or_exp_can_tell_apart_are_ordered():
    # Probabilities near 1e-60: their exponentials are 0 in f32.
    scores = jnp.asarray([0.0, -138.0, -138.001, -139.0, 5.0])[None, None, None]
    may = jnp.asarray([[[True, True, True, True, False]]])
    weights = weights_of(jnp.tile(scores, (1, 1, 2, 1)), may)[0]
    assert np.isneginf(weights[0, 0, 4])
    assert (np.diff(weights[0, 0, :4]) < 0).all()
    # The larger of two heads counts, each by its own softmax.
    two = jnp.stack([scores[0, 0, 0, :2], 100 - scores[0, 0, 0, :2]])[None, None]
    weights = weights_of(two, jnp.ones((1, 1, 2), bool))[0]
    np.testing.assert_allclose(weights[0, 0], [0.0, 0.0], atol=1e-6)
    nothing = weights_of(two, jnp.zeros((1, 1, 2), bool))[0]
    assert np.isneginf(nothing).all()


def test_a_choice_is_made_at_every_nth_step():
    @jax.jit
    def run(steps):
        def step(last, number):
            made = every(3, number, lambda: (number, number > 0), last)
            return made, made[0]

        return jax.lax.scan(step, (jnp.int32(-1), jnp.asarray(False)), steps)[1]

    chosen = run(jnp.arange(8, dtype=jnp.int32))
    np.testing.assert_array_equal(chosen, [0, 0, 0, 3, 3, 3, 6, 6])
