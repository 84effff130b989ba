"""A key that the last query looks for, wherever it stands."""

import dataclasses

import layer_text as lt
import numpy as np
import pytest

from jaxaccel.cache.full import DenseCacheConfig
from jaxaccel.cache.quest import QuestCacheConfig
from jaxaccel.cache.shadowkv import ShadowKVCacheConfig
from jaxaccel.cache.streaming import StreamingCacheConfig


# A prompt of 96 tokens and 8 more; chunks and pages of 8, of which one is chosen.
PROMPT, COUNT = 96, 8
SHADOWKV = ShadowKVCacheConfig(
    budget=8,
    chunk=8,
    rank=16,
    num_outliers=2,
    local_window=16,
    values="device",
    slots=2,
)
QUEST = QuestCacheConfig(budget=8, page=8, local_window=16)
STREAMING = StreamingCacheConfig(num_sinks=4, window=28, move_sinks=False)
# The first chunk, both sides of a border, the middle, the window, a generated token.
PLACES = [0, 7, 8, 50, 71, 72, 90, 99]


def with_needles(places, seed=5):
    """A text for each place, all the same but for the needle: a key and its value."""
    base = lt.draw(rows=1, length=PROMPT + COUNT, seed=seed)
    q, k, v = (np.repeat(x, len(places), axis=0) for x in (base.q, base.k, base.v))
    last = PROMPT + COUNT - 1
    for row, place in enumerate(places):
        # Where the last query, turned by its distance, points to; one head of each two.
        wanted = lt.rotated(q[row, last : last + 1, ::2], np.array([last - place]))[0]
        norm = np.linalg.norm(wanted, axis=-1, keepdims=True)
        k[row, place] = 40 * wanted / norm
        v[row, place] = 9.0
    return dataclasses.replace(base, q=q, k=k, v=v)


def missed(policy):
    """How far the last outputs of the heads that look are from dense ones, [places]."""
    text = with_needles(PLACES)
    lengths = [PROMPT] * len(PLACES)
    outputs = [lt.run(p, text, lengths, COUNT)[1] for p in (DenseCacheConfig(), policy)]
    dense, o = (x[-1, :, ::2] for x in outputs)
    assert dense.min() > 8.5  # the needle decides
    return np.abs(o - dense).max(axis=(1, 2))


@pytest.mark.parametrize("policy", [SHADOWKV, QUEST], ids=["shadowkv", "quest"])
def test_caches_that_choose_by_the_query_find_it(policy):
    assert missed(policy).max() < 0.1


def test_a_cache_that_forgets_finds_what_it_kept():
    found = missed(STREAMING) < 0.1
    assert dict(zip(PLACES, found.tolist(), strict=True)) == {
        **dict.fromkeys([0, 90, 99], True),
        **dict.fromkeys([7, 8, 50, 71, 72], False),
    }
