"""The byte-bigram baseline against known entropies."""

import numpy as np
import pytest

from jaxaccel.data.bigram import byte_bigram_baseline, token_bigram_baseline
from jaxaccel.data.pipeline import DataConfig, prepare
from jaxaccel.data.sources import InMemorySource


def test_a_deterministic_cycle_costs_next_to_nothing():
    assert byte_bigram_baseline(["abc" * 10_000], ["abc" * 100]) < 0.02


def test_independent_bytes_cost_their_entropy():
    rng = np.random.default_rng(0)
    letters = np.array(list("abcd"))
    train = "".join(rng.choice(letters, 100_000, p=[0.4, 0.3, 0.2, 0.1]))
    held = "".join(rng.choice(letters, 100_000, p=[0.4, 0.3, 0.2, 0.1]))
    p = np.array([0.4, 0.3, 0.2, 0.1])
    expected = -(p * np.log(p)).sum()
    assert byte_bigram_baseline([train], [held]) == pytest.approx(expected, rel=0.01)


def test_probabilities_sum_to_one_for_seen_and_unseen_contexts():
    train = ["abracadabra", "", "é"]
    for context in "az":
        total = 0.0
        for byte in range(128):
            pair = byte_bigram_baseline(train, [context + chr(byte)]) * 2
            first = byte_bigram_baseline(train, [context])
            total += np.exp(first - pair)
        # The upper half of the bytes cannot follow alone in UTF-8; after "a" and "z"
        # they hold what the smoothing gives them, which is little.
        assert 0.5 < total < 1.0 + 1e-9


def test_no_pair_crosses_documents():
    joined = byte_bigram_baseline(["ab" * 500], ["ab" * 50])
    apart = byte_bigram_baseline(["a", "b"] * 500, ["ab" * 50])
    assert joined < 0.1 < apart


def test_pieces_of_characters_count_as_the_bytes_they_are():
    train = ["é" * 200]
    whole = byte_bigram_baseline(train, ["é" * 50])
    assert byte_bigram_baseline(train, [("é" * 50).encode()]) == whole
    # Cut inside a character: the same pairs, and not one replacement character.
    assert byte_bigram_baseline(train, [("é" * 50).encode()[1:-1]]) < 2 * whole < 0.1


def test_no_heldout_text_is_refused():
    with pytest.raises(ValueError, match="hold no byte"):
        byte_bigram_baseline(["a"], [""])
    assert byte_bigram_baseline([], ["a"]) == pytest.approx(np.log(256))


def _corpus(texts):
    source = InMemorySource(texts=tuple(texts))
    config = DataConfig(
        sources=(source,), tokenizer="byte", heldout_fraction=0.3, append_eos=False
    )
    return prepare(config)


def test_over_byte_tokens_the_token_bigram_is_the_byte_bigram():
    texts = [f"a{n}b{n * n}c{n % 7}" * 40 for n in range(60)]
    corpus = _corpus(texts)
    by_bytes = byte_bigram_baseline(corpus.texts("train"), corpus.texts("heldout"))
    # They differ in the first byte of a document and in three ids that never occur.
    assert token_bigram_baseline(corpus) == pytest.approx(by_bytes, rel=0.02)


def test_the_token_bigram_gives_every_pair_a_probability():
    corpus = _corpus(["ab", "cd", "ef", "gh", "zy", "qw", "mn", "op"])
    assert np.isfinite(token_bigram_baseline(corpus))
    with pytest.raises(ValueError, match="hold no byte to predict"):
        token_bigram_baseline(_corpus(["a"] * 8))
