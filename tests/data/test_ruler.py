"""Rows of the tasks of long contexts hold what they ask for."""

import collections
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxaccel.data.ruler import (
    MOST_ANSWERS,
    TASKS,
    RulerConfig,
    RulerTask,
    is_right,
    ruler_batch,
    ruler_rows,
)


CONFIG = RulerConfig(
    context=80,
    num_questions=4,
    num_words=10,
    num_keys=24,
    num_values=12,
    most_pairs=20,
)
WORDS, KEYS, VALUES = range(4, 14), range(14, 38), range(38, 50)
ROWS = 16


@functools.cache
def drawn(name):
    task = TASKS[name]
    if name == "multikey_64":
        task = dataclasses.replace(task, keys=20)
    program = jax.jit(functools.partial(ruler_rows, CONFIG, task, batch_size=ROWS))
    return task, jax.tree.map(np.asarray, program(key=jax.random.key(3)))


def pairs_of(rows, row):
    """(place, key, content) of each pair of a row."""
    tokens = rows.tokens[row]
    places = rows.places[row]
    return [
        (p, tokens[p], tokens[p + 1]) for p in places.tolist() if p < CONFIG.context
    ]


@pytest.mark.parametrize("name", ["single", "multikey_64", "multivalue", "variables_4"])
def test_needles_and_chains_lead_to_their_answers(name):
    task, rows = drawn(name)
    assert rows.tokens.shape == (ROWS, CONFIG.seq_len) == (ROWS, 88)
    asked_last, borders = 0, set()
    for row in range(ROWS):
        pairs = pairs_of(rows, row)
        assert len(pairs) == task.pairs
        held = collections.defaultdict(list)
        for place, key, content in pairs:
            assert 1 <= place <= CONFIG.context - 2
            assert key in KEYS
            assert content in VALUES or content in KEYS
            # A variable holds what the variable that it was made from held then.
            held[key] += held[content] if content in KEYS else [content]
            borders.add(place % 8)
        in_pairs = {p for place, _, _ in pairs for p in (place, place + 1)}
        rest = [t for t in range(1, CONFIG.context) if t not in in_pairs]
        assert set(rows.tokens[row, rest].tolist()) <= set(WORDS)
        questions = rows.tokens[row, CONFIG.context :].reshape(-1, 2)
        assert (questions[:, 0] == 1).all()
        for (_, key), answer in zip(questions, rows.answers[row], strict=True):
            answer = answer[answer >= 0].tolist()
            assert sorted(answer) == sorted(held[key])
            assert len(answer) == task.values
        distinct = min(task.keys, CONFIG.num_questions)
        assert len(set(questions[:distinct, 1].tolist())) == distinct
        asked_last += pairs[-1][1] in questions[:, 1]
    if task.kind == "variables":
        assert asked_last == ROWS  # the last assignment ends a chain
    else:
        # A needle may lie across a chunk's border.
        assert task.pairs == 1 or borders == set(range(8))


@pytest.mark.parametrize("name, count", [("common", 4), ("frequent", 3)])
def test_words_are_counted(name, count):
    _, rows = drawn(name)
    for row in range(ROWS):
        words = rows.tokens[row, 1 : CONFIG.context]
        assert set(words.tolist()) <= set(WORDS)
        # The first token took the place of a word that was counted.
        counts = np.bincount(words, minlength=14)
        answer = rows.answers[row, 0]
        assert (answer[count:] == -1).all()
        answer = answer[:count]
        others = [w for w in WORDS if w not in answer]
        assert counts[answer].min() + 1 >= counts[others].max()


def test_batches_teach_all_tasks_and_the_token_before():
    batch = jax.jit(lambda key: ruler_batch(CONFIG, key, 128))(jax.random.key(0))
    batch = jax.tree.map(np.asarray, batch)
    tokens, targets = batch.tokens, batch.targets
    np.testing.assert_array_equal(targets[:, 1:80], tokens[:, :79])
    asks = np.arange(81, 88, 2)
    assert (batch.loss_mask[:, asks] == 1).all()
    assert (batch.loss_mask[:, 80::2] == 0).all()
    share = batch.loss_mask[:, :80].sum(axis=1) / 4
    np.testing.assert_allclose(share, 0.3 * 79 / 80, rtol=1e-5)
    asked = tokens[:, asks]
    kinds = [
        np.isin(asked, KEYS).all(axis=1).mean(),
        (asked == 2).all(axis=1).mean(),
        (asked == 3).all(axis=1).mean(),
    ]
    assert sum(kinds) == 1
    assert min(kinds) > 0.03
    assert kinds[0] > 0.6
    is_needle = np.isin(asked, KEYS).all(axis=1)
    assert np.isin(targets[is_needle][:, asks], VALUES).all()
    assert np.isin(targets[~is_needle][:, asks], WORDS).all()
    numbers = {np.isin(row[:80], KEYS).sum() for row in tokens[is_needle]}
    assert min(numbers) == 1
    assert max(numbers) >= 15


def test_a_needle_can_be_put_anywhere():
    places = jnp.asarray([1, 7, 40, 78], jnp.int32)
    draw = functools.partial(ruler_rows, CONFIG, TASKS["single"], batch_size=4)
    rows = jax.jit(draw)(key=jax.random.key(1), place=places)
    for row, place in enumerate([1, 7, 40, 78]):
        ((found, _, value),) = pairs_of(rows, row)
        assert found == place
        assert rows.answers[row, 0].tolist() == [value, *[-1] * (MOST_ANSWERS - 1)]


def test_an_answer_is_a_set_of_the_likeliest_tokens():
    logits = jnp.asarray([[0.0, 3.0, 2.0, 1.0, -1.0]] * 4)
    answers = jnp.asarray(
        [[1, -1, -1, -1], [2, 1, -1, -1], [1, 3, -1, -1], [2, -1, -1, -1]]
    )
    assert is_right(logits, answers).tolist() == [True, True, False, False]
    # A model that tells nothing apart, or nothing at all, answers nothing.
    assert not is_right(jnp.zeros_like(logits), answers).any()
    assert not is_right(jnp.full_like(logits, jnp.nan), answers).any()
    tied = jnp.asarray([0.0, 3.0, 3.0, 1.0, -1.0])
    assert is_right(tied[None], answers).tolist() == [False, True, False, False]


@pytest.mark.parametrize(
    "bad, text",
    [
        (lambda: RulerConfig(context=0), "context=0"),
        (lambda: RulerConfig(context=64), "most_pairs=64 has no place in context=64"),
        (lambda: RulerConfig(num_keys=8), "most_pairs=64 needs as many names"),
        (lambda: RulerConfig(num_words=4), "num_words=4 must be above 4"),
        (lambda: RulerTask(kind="riddle"), "kind='riddle' is unknown"),
        (lambda: RulerTask(values=5), "values=5 is above 4"),
        (lambda: RulerTask(keys=0), "keys=0 is less than 1"),
        (
            lambda: ruler_rows(CONFIG, RulerTask(keys=21), jax.random.key(0), 1),
            "21 pairs are more than most_pairs=20",
        ),
        (
            lambda: ruler_rows(CONFIG, RulerTask(questions=5), jax.random.key(0), 1),
            "questions=5 are more than num_questions=4",
        ),
        (
            lambda: ruler_rows(
                CONFIG, TASKS["multikey_4"], jax.random.key(0), 1, jnp.zeros(1)
            ),
            "the task has 4 pairs",
        ),
    ],
)
def test_impossible_rows_are_refused(bad, text):
    with pytest.raises(ValueError, match=text):
        bad()
