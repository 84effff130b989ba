"""Mixtures: shares, ends of epochs, and that nothing is drawn unfairly."""

import numpy as np
import pytest

from jaxaccel.data.mixture import make_mixture


def test_without_weights_an_epoch_is_every_document_once():
    mixture = make_mixture([3, 0, 5], [30, 0, 500])
    orders = [mixture.epoch(e, seed=0) for e in range(3)]
    for order in orders:
        assert sorted(order) == list(range(8))
    assert any((orders[0] != other).any() for other in orders[1:])
    np.testing.assert_array_equal(orders[1], mixture.epoch(1, seed=0))
    assert (mixture.epoch(0, seed=1) != orders[0]).any()


def test_first_exhausted_repeats_nothing_inside_an_epoch():
    mixture = make_mixture([10, 100], [10, 100], weights=(0.5, 0.5))
    assert mixture.draws == (10, 10)
    order = mixture.epoch(4, seed=0)
    assert len(set(order.tolist())) == 20
    # The large source goes on where the last epoch ended: ten epochs are one pass.
    drawn = np.concatenate([mixture.epoch(e, seed=0) for e in range(10)])
    large = drawn[drawn >= 10]
    assert sorted(large) == list(range(10, 110))
    np.testing.assert_array_equal(np.bincount(drawn[drawn < 10]), 10)


def test_all_exhausted_repeats_the_small_source():
    mixture = make_mixture(
        [10, 100], [10, 100], weights=(1, 1), unit="documents", end="all_exhausted"
    )
    assert mixture.draws == (100, 100)
    counts = np.bincount(mixture.epoch(0, seed=0))
    np.testing.assert_array_equal(counts, [10] * 10 + [1] * 100)


def test_weights_are_shares_of_tokens_or_of_documents():
    # Documents of the second source are ten times as long.
    by_tokens = make_mixture([1000, 1000], [10_000, 100_000], weights=(3, 1))
    tokens = np.array(by_tokens.draws) * [10, 100]
    assert tokens[0] / tokens.sum() == pytest.approx(0.75, abs=0.01)
    by_documents = make_mixture(
        [1000, 1000], [10_000, 100_000], weights=(3, 1), unit="documents"
    )
    assert by_documents.draws == (1000, 333)


def test_a_source_of_no_weight_is_not_read():
    mixture = make_mixture([5, 5], [5, 5], weights=(0, 2))
    assert mixture.draws == (0, 5)
    assert mixture.epoch(0, seed=0).min() >= 5


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"weights": (1,)}, "1 weights for 2 sources"),
        ({"weights": (1, -1)}, r"weights are \(1, -1\)"),
        ({"weights": (0, 0)}, r"weights are \(0, 0\)"),
        ({"weights": (1, float("nan"))}, "weights are"),
        ({"weights": (1, 1), "num_documents": (0, 5)}, "source 0 has weight 1 but no"),
        ({"num_documents": (0, 0)}, "no document to draw from"),
        ({"unit": "bytes"}, "weight unit is 'bytes'"),
        ({"end": "never"}, "mixture end is 'never'"),
    ],
)
def test_bad_mixtures_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        make_mixture(**{"num_documents": (5, 5), "num_tokens": (5, 5), **arguments})
