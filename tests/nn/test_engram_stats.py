"""Statistics of a hashed memory, on hashes small enough to count by hand."""

import itertools

import numpy as np
import pytest

from jaxaccel.nn.engram_stats import (
    collision_stats,
    coverage,
    gate_histogram,
    silenced,
)
from pallas_kernels.engram_hash import HashLayout, hash_on_host


LAYOUT = HashLayout.create(
    vocab_size=97, pad_id=2, layer_ids=(1, 3), orders=(2, 3), heads=2, bases=1009
)


def test_collisions_are_those_of_a_random_hash():
    grams = np.array(list(itertools.product(range(40), range(40))))
    stats = collision_stats(np.concatenate([grams, grams[:7]]), LAYOUT, layer=1)
    assert [head.rows for head in stats.heads] == list(LAYOUT.primes[1][:2])
    for head in stats.heads:
        # Three deviations of a share of 1,600.
        assert abs(head.collided - head.expected_collided) < 0.05
        assert abs(head.occupied - head.expected_occupied) < 0.05
    # By hand: how often each row is met.
    ids = hash_on_host(grams, LAYOUT.layer(1))[0][:, 1, 0, :2]
    met = [np.bincount(ids[:, h])[ids[:, h]] > 1 for h in (0, 1)]
    both = np.bincount(met[0].astype(int) + met[1], minlength=3)
    np.testing.assert_array_equal(stats.heads_collided, both)
    pairs = {tuple(x) for x in ids.tolist()}
    assert (stats.indistinct == 0) == (len(pairs) == len(grams))
    with pytest.raises(ValueError, match="n-grams of 4 tokens"):
        collision_stats(np.zeros((1, 4), int), LAYOUT)
    with pytest.raises(ValueError, match="no n-grams"):
        collision_stats(np.zeros((0, 2), int), LAYOUT)


def test_coverage_ranks_rows():
    ids = np.repeat([7, 3, 9, 1], [50, 40, 9, 1])
    needed, ranked = coverage(ids, (0.5, 0.9, 0.99, 1.0))
    assert needed == {0.5: 1, 0.9: 2, 0.99: 3, 1.0: 4}
    assert ranked.tolist() == [7, 3, 9, 1]
    assert coverage([4, 2])[1].tolist() == [2, 4]
    with pytest.raises(ValueError, match="share 0"):
        coverage(ids, (0.0,))


def test_histogram_leaves_padding_out():
    gates = np.array([[[0.1, 0.9], [0.1, 0.6], [0.5, 0.5]]])
    counts, borders = gate_histogram(gates, np.array([[True, True, False]]), bins=2)
    assert counts.tolist() == [[2, 0], [0, 2]]
    assert borders.tolist() == [0.0, 0.5, 1.0]


def test_parameters_without_a_memory_are_refused():
    with pytest.raises(ValueError, match="without a memory"):
        silenced({"embed/embedding": np.zeros(3)})
