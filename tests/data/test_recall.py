"""Associative recall: rows that can be answered, and only by looking back."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxaccel.data.recall import RecallConfig, recall_accuracy, recall_batch


CONFIG = RecallConfig(num_pairs=5, num_queries=3, num_keys=7, num_values=4)


def batch(seed=0, rows=50):
    return recall_batch(CONFIG, jax.random.key(seed), rows)


def test_every_query_repeats_a_pair_of_its_row():
    for tokens in np.asarray(batch().tokens):
        pairs, asked = tokens.reshape(-1, 2)[:5], tokens.reshape(-1, 2)[5:]
        assert len(set(pairs[:, 0])) == 5
        assert len(set(asked[:, 0])) == 3
        table = dict(map(tuple, pairs))
        assert all(table[key] == value for key, value in asked)
        assert np.all((pairs[:, 0] >= 0) & (pairs[:, 0] < 7))
        assert np.all((pairs[:, 1] >= 7) & (pairs[:, 1] < CONFIG.vocab_size))


def test_only_the_answers_are_learned():
    rows = batch(rows=4)
    assert rows.tokens.shape == (4, CONFIG.seq_len)
    np.testing.assert_array_equal(rows.targets[:, :-1], rows.tokens[:, 1:])
    places = np.flatnonzero(np.asarray(rows.loss_mask[0]))
    np.testing.assert_array_equal(places, [10, 12, 14])
    assert np.all(np.asarray(rows.tokens)[:, places] < CONFIG.num_keys)


def test_every_key_is_asked_for_and_seeds_differ():
    rows = np.asarray(batch(rows=200).tokens)
    places = {int(np.flatnonzero(row[:10:2] == row[10])[0]) for row in rows}
    assert places == set(range(5))
    np.testing.assert_array_equal(rows, batch(rows=200).tokens)
    assert np.any(rows != np.asarray(batch(seed=1, rows=200).tokens))


def test_accuracy_counts_the_queries_alone():
    rows = batch(rows=2)
    right = jax.nn.one_hot(rows.targets, CONFIG.vocab_size)
    assert recall_accuracy(right, rows) == 1.0
    wrong = jnp.where(rows.loss_mask[:, :, None] > 0, -right, right)
    assert recall_accuracy(wrong, rows) == 0.0
    half = jnp.concatenate([right[:1], wrong[1:]])
    assert recall_accuracy(half, rows) == pytest.approx(0.5)


@pytest.mark.parametrize(
    "bad, text",
    [
        ({"num_pairs": 8}, "num_pairs=8.*num_keys=7"),
        ({"num_queries": 6}, "num_queries=6.*num_pairs=5"),
        ({"num_values": 0}, "num_values=0"),
    ],
)
def test_impossible_sizes_are_refused(bad, text):
    sizes = {"num_pairs": 5, "num_queries": 3, "num_keys": 7, "num_values": 4}
    with pytest.raises(ValueError, match=text):
        RecallConfig(**(sizes | bad))
