"""Quest, SnapKV, H2O and pages against their definitions."""

import dataclasses
import functools

import jax.numpy as jnp
import layer_text as lt
import numpy as np
import pytest

from jaxaccel.cache import reference
from jaxaccel.cache.full import DenseCacheConfig
from jaxaccel.cache.h2o import H2OCacheConfig
from jaxaccel.cache.paged import PagedCacheConfig
from jaxaccel.cache.quest import QuestCacheConfig, upper_bounds
from jaxaccel.cache.snapkv import SnapKVCacheConfig


LENGTHS, COUNT = [29, 0, 14], 12
# Of the longest prompt: with the same width and count, tests share their programs.
WIDTH = 29
QUEST = QuestCacheConfig(budget=8, page=4, local_window=5)
SNAPKV = SnapKVCacheConfig(budget=6, window=4, kernel=3, generated=16)
H2O = H2OCacheConfig(heavy=5, recent=4)
PAGED = PagedCacheConfig(page=4)
SCALE = lt.SPEC.scale
NAMES = ["quest", "h2o", "snapkv", "paged"]


@pytest.fixture(scope="module")
def text():
    return lt.draw(length=41)


def quest_keep(lengths, b, q, k, v, n):
    pages = reference.quest_pages(
        q[-1], k, max(n - 5, 0), page=4, chosen=2, scale=SCALE
    )
    return reference.quest_keep(pages, n, page=4, local_window=5)


def snapkv_keep(lengths, b, q, k, v, n):
    return reference.snapkv_keep(
        q, k, lengths[b], budget=6, window=4, kernel=3, scale=SCALE
    )


def h2o_keep(lengths, b, q, k, v, n):
    return reference.h2o_keep(q, k, lengths[b], heavy=5, recent=4, scale=SCALE)


@pytest.mark.parametrize(
    ("policy", "keep"),
    [(QUEST, quest_keep), (SNAPKV, snapkv_keep), (H2O, h2o_keep)],
    ids=["quest", "snapkv", "h2o"],
)
def test_it_reads_what_the_definition_says(text, policy, keep):
    _, dense, _ = lt.run(DenseCacheConfig(), text, LENGTHS, COUNT)
    # Around the borders of pages, windows and budgets, and a prompt of no tokens.
    for lengths in (LENGTHS, [9, 10, 11], [4, 5, 3], [8, 1, 12]):
        _, o, state = lt.run(policy, text, lengths, COUNT, width=WIDTH)
        of = functools.partial(keep, lengths)
        expected = lt.expected(text, lengths, COUNT, of)
        np.testing.assert_allclose(o, expected, atol=2e-6)
        np.testing.assert_array_equal(state.length, np.array(lengths) + COUNT)
        if lengths == LENGTHS:
            assert np.abs(o - dense)[-1, 0].max() > 1e-3


@pytest.mark.parametrize(
    "policy",
    [
        QuestCacheConfig(budget=44, page=4, local_window=5),
        QuestCacheConfig(budget=44, page=4, local_window=9, refresh_every=5),
        SnapKVCacheConfig(budget=32, window=4, generated=16),
        H2OCacheConfig(heavy=30, recent=11),
        PAGED,
    ],
    ids=["quest", "scheduled", "snapkv", "h2o", "paged"],
)
def test_the_whole_budget_is_dense_under_sinks_and_a_cap(policy):
    text = lt.draw(length=41, sinks=True)
    spec = dataclasses.replace(lt.SPEC, logit_cap=3.0)
    _, o, _ = lt.run(policy, text, LENGTHS, COUNT, spec=spec)
    _, dense, _ = lt.run(DenseCacheConfig(), text, LENGTHS, COUNT, spec=spec)
    np.testing.assert_allclose(o, dense, atol=3e-6)


def test_no_key_of_a_page_scores_above_its_bound():
    rng = np.random.default_rng(0)
    q = jnp.asarray(rng.normal(size=(2, 1, 4, 8)), jnp.float32)
    k = jnp.asarray(rng.normal(size=(2, 2, 5, 4, 8)), jnp.float32)  # [B, G, P, page, K]
    low, high = k.min(axis=3), k.max(axis=3)
    may = jnp.asarray([[[True] * 5], [[True] * 4 + [False]]])
    bounds = upper_bounds(q, low, high, may, lt.SPEC)
    heads = q.reshape(2, 2, 2, 8)
    scores = SCALE * np.einsum("bgrk,bgpnk->bgrpn", heads, k)
    assert (np.asarray(bounds)[0] >= scores.max(axis=(2, 4))[0] - 1e-6).all()
    # Tight where a page is one key.
    tight = upper_bounds(q, k[:, :, :, 0], k[:, :, :, 0], may, lt.SPEC)
    np.testing.assert_allclose(tight[0], scores.max(axis=2)[0, :, :, 0], atol=1e-6)


def test_a_schedule_of_quest_keeps_to_its_choice(text):
    every = dataclasses.replace(QUEST, local_window=8, refresh_every=3)
    _, o, _ = lt.run(every, text, LENGTHS, COUNT)
    chosen = {}

    def keep(b, q, k, v, n):
        if (n - LENGTHS[b] - 1) % 3 == 0:
            # What will have left the window before the next choice, too.
            outside = max(n - 8 + 2, 0)
            chosen[b] = reference.quest_pages(
                q[-1], k, outside, page=4, chosen=2, scale=SCALE
            )
        return reference.quest_keep(chosen[b], n, page=4, local_window=8)

    expected = lt.expected(text, LENGTHS, COUNT, keep)
    np.testing.assert_allclose(o, expected, atol=2e-6)


def test_snapkv_lets_the_oldest_generated_tokens_go(text):
    """With room for 3 of them, the ring holds the last 4 + 3 tokens."""
    policy = dataclasses.replace(SNAPKV, generated=3)
    _, o, _ = lt.run(policy, text, LENGTHS, COUNT)

    def keep(b, q, k, v, n):
        kept = snapkv_keep(LENGTHS, b, q, k, v, n)
        token = np.arange(n)
        late = token >= max(LENGTHS[b] - 4, 0)
        return kept & ~(late & (token < n - 7))

    expected = lt.expected(text, LENGTHS, COUNT, keep)
    np.testing.assert_allclose(o, expected, atol=2e-6)


@pytest.mark.parametrize("policy", [QUEST, H2O, SNAPKV, PAGED], ids=NAMES)
def test_what_was_never_written_is_never_read(text, policy):
    _, o, _ = lt.run(policy, text, LENGTHS, COUNT)
    _, poisoned, _ = lt.run(policy, text, LENGTHS, COUNT, poison=True)
    np.testing.assert_array_equal(o, poisoned)


@pytest.mark.parametrize("policy", [QUEST, H2O, SNAPKV, PAGED], ids=NAMES)
def test_a_row_of_padding_keeps_its_cache(text, policy):
    _, _, before = lt.run(policy, text, [17, 9, 14], COUNT, width=WIDTH)
    arrays = tuple(text.__dict__.values())
    real = jnp.asarray([True, False, True])
    o, after = lt.steps(policy, lt.SPEC, COUNT, arrays, before.length, before, real)
    assert not np.isnan(o).any()
    for name in after.names():
        if name not in (*after.SHARED, "ids"):
            np.testing.assert_array_equal(
                np.asarray(after[name])[1], np.asarray(before[name])[1], name
            )


def test_pages_are_taken_once_and_given_back(text):
    """Rows of 29, 1 and 14 tokens grow by 6; then one ends, and another begins."""
    policy = PagedCacheConfig(page=4, num_pages=16)
    policy.check_lengths([35, 7, 20])
    arrays = tuple(text.__dict__.values())
    ones, first = jnp.ones((3,), bool), jnp.asarray([True, False, False])

    def on(state, length, real):
        return lt.steps(policy, lt.SPEC, 3, arrays, length, state, real)

    _, start, state = lt.run(policy, text, [29, 1, 14], 3)
    o, state = on(state, state.length, ones)
    _, dense, _ = lt.run(DenseCacheConfig(), text, [29, 1, 14], COUNT)
    np.testing.assert_allclose(np.concatenate([start, o]), dense[:6], atol=2e-6)
    table = np.asarray(state.table)
    assert (table >= 0).sum(axis=1).tolist() == [9, 2, 5]
    assert sorted(table[table >= 0]) == list(range(16))
    # The pool is full: what comes without a page is counted, and hurts no row.
    _, full = on(state, state.length, ones)
    np.testing.assert_array_equal(full.lost, [2, 2, 3])
    empty = lt.reset(full, [True, False, False])
    assert (np.asarray(empty.table)[0] == -1).all()
    _, alone, _ = lt.run(DenseCacheConfig(), text, [0, 0, 0], COUNT, width=WIDTH)
    again = empty
    for at in (0, 3, 6):
        o, again = on(again, jnp.full((3,), at, jnp.int32), first)
        np.testing.assert_allclose(o[:, 0], alone[at : at + 3, 0], atol=2e-6)
    held = np.asarray(again.table)
    assert len(set(held[held >= 0])) == (held >= 0).sum() == 10


def test_what_does_not_fit_is_refused(text):
    with pytest.raises(ValueError, match="2 rows of 12 tokens together need 4 pages"):
        PagedCacheConfig(page=4, num_pages=3).check_lengths([7, 5])
    with pytest.raises(ValueError, match="T=29 tokens, more than the 28 slots"):
        lt.run(PAGED, text, LENGTHS, 1, room=28)
    with pytest.raises(ValueError, match="T=29 tokens, more than the 20 slots"):
        lt.run(QUEST, text, LENGTHS, 1, room=20)
    with pytest.raises(ValueError, match="budget=6 must be a multiple of page=4"):
        dataclasses.replace(QUEST, budget=6)
    with pytest.raises(ValueError, match=r"local_window=5 must be at least"):
        dataclasses.replace(QUEST, refresh_every=2)
    with pytest.raises(ValueError, match="kernel=4 must be odd"):
        dataclasses.replace(SNAPKV, kernel=4)
    with pytest.raises(ValueError, match="heavy=0 must be positive"):
        dataclasses.replace(H2O, heavy=0)
