"""Needles, variables and word counts in long contexts: what a cache must not forget.

Tasks in the manner of RULER (Hsieh et al. 2024, arXiv:2404.06654, section 3), drawn
from tokens without any text: needles with one or several keys, values and questions,
chains of variables, and the most common or most frequent words. A row is a context and
then questions of two tokens; a question's answer is a set of tokens, those that a model
finds likeliest behind it.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from jaxaccel.data.batch import PackedBatch


type Kind = Literal["needles", "variables", "common", "frequent"]

KINDS: tuple[Kind, ...] = ("needles", "variables", "common", "frequent")
MOST_ANSWERS = 4
"""A, tokens of the largest answer."""
QUESTION = 2
"""Tokens of a question: a mark, and what is asked for."""

_MARK, _ASK, _COMMON, _FREQUENT = range(4)
_NUM_SPECIAL = 4
_NUM_COMMON, _NUM_FREQUENT = 4, 3


@dataclasses.dataclass(frozen=True, kw_only=True)
class RulerConfig:
    """Sizes of the rows.

    Attributes:
      context: S, tokens before the questions.
      num_questions: Q, questions of a row.
      num_words: words there are, which fill contexts and are counted.
      num_keys: names of needles and variables.
      num_values: what they can hold.
      most_pairs: places for needles and assignments in a row.
    """

    context: int = 4096
    num_questions: int = 4
    num_words: int = 128
    num_keys: int = 256
    num_values: int = 64
    most_pairs: int = 64

    def __post_init__(self):
        for name in (
            *("context", "num_questions", "num_words", "num_keys", "num_values"),
            "most_pairs",
        ):
            if getattr(self, name) < 1:
                raise ValueError(
                    f"RulerConfig: {name}={getattr(self, name)} must be positive"
                )
        if self.num_words <= _NUM_COMMON:
            raise ValueError(
                f"RulerConfig: num_words={self.num_words} must be above {_NUM_COMMON}, "
                "the most common ones"
            )
        if self.most_pairs > self.num_keys:
            raise ValueError(
                f"RulerConfig: most_pairs={self.most_pairs} needs as many names, "
                f"num_keys={self.num_keys}"
            )
        if self.most_pairs > self.num_places:
            raise ValueError(
                f"RulerConfig: most_pairs={self.most_pairs} has no place in "
                f"context={self.context}, which has {self.num_places}"
            )

    @property
    def num_places(self) -> int:
        """Places for pairs: two tokens each, behind the first token."""
        return (self.context - 2) // 2

    @property
    def vocab_size(self) -> int:
        """Tokens there are: marks, words, keys and values, in this order."""
        return _NUM_SPECIAL + self.num_words + self.num_keys + self.num_values

    @property
    def seq_len(self) -> int:
        """T of a row."""
        return self.context + QUESTION * self.num_questions


@dataclasses.dataclass(frozen=True, kw_only=True)
class RulerTask:
    """What rows ask for.

    Attributes:
      kind: "needles" are pairs of a key and a value; "variables" are chains of
        assignments, of a value and then of the variable before; "common" asks for the
        four words that are drawn ten times as often as others, "frequent" for the
        three most frequent words of a zeta distribution with exponent 2.
      keys: different keys of needles, or chains of variables.
      values: needles with each key, whose values together are the answer.
      hops: assignments of a chain behind the first; the last variable is asked for.
      questions: questions of a row that count, all of which must be answered.
    """

    kind: Kind = "needles"
    keys: int = 1
    values: int = 1
    hops: int = 0
    questions: int = 1

    def __post_init__(self):
        if self.kind not in KINDS:
            raise ValueError(
                f"RulerTask: kind={self.kind!r} is unknown, allowed are "
                f"{', '.join(map(repr, KINDS))}"
            )
        for name, least in (("keys", 1), ("values", 1), ("hops", 0), ("questions", 1)):
            if getattr(self, name) < least:
                raise ValueError(
                    f"RulerTask: {name}={getattr(self, name)} is less than {least}"
                )
        if self.values > MOST_ANSWERS:
            raise ValueError(
                f"RulerTask: values={self.values} is above {MOST_ANSWERS}, the tokens "
                "of the largest answer"
            )

    @property
    def pairs(self) -> int:
        """Needles or assignments of a row."""
        if self.kind == "needles":
            return self.keys * self.values
        return self.keys * (self.hops + 1) if self.kind == "variables" else 0

    def check(self, config: RulerConfig) -> None:
        """Refuses rows that have no room for the task.

        Raises:
          ValueError: names the numbers.
        """
        if self.pairs > config.most_pairs:
            raise ValueError(
                f"RulerTask: {self.pairs} pairs are more than most_pairs="
                f"{config.most_pairs}"
            )
        if self.questions > config.num_questions:
            raise ValueError(
                f"RulerTask: questions={self.questions} are more than num_questions="
                f"{config.num_questions}"
            )


TASKS: dict[str, RulerTask] = {
    "single": RulerTask(),
    "multikey_4": RulerTask(keys=4),
    "multikey_64": RulerTask(keys=64),
    "multivalue": RulerTask(keys=4, values=4),
    "multiquery": RulerTask(keys=8, questions=4),
    "variables_2": RulerTask(kind="variables", keys=4, hops=2),
    "variables_4": RulerTask(kind="variables", keys=4, hops=4),
    "common": RulerTask(kind="common"),
    "frequent": RulerTask(kind="frequent"),
}
"""The tasks by name."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class RulerRows:
    """Rows of tasks.

    Attributes:
      tokens: i32[B, T], the context and then Q questions of two tokens.
      answers: i32[B, Q, A], the answer of each question, -1 in places beyond it.
      places: i32[B, P], where the pairs' first tokens stand, T where there is none.
    """

    tokens: jax.Array
    answers: jax.Array
    places: jax.Array


@dataclasses.dataclass(frozen=True)
class _Numbers:
    """A row's task as traced numbers; `any_hop` asks for any variable of a chain."""

    kind: Any
    keys: Any
    values: Any
    hops: Any
    any_hop: bool = False


def ruler_rows(
    config: RulerConfig,
    task: RulerTask,
    key: jax.Array,
    batch_size: int,
    place: jax.Array | None = None,
) -> RulerRows:
    """Draws rows of one task.

    Args:
      config: sizes.
      task: what is asked for.
      key: random key; equal keys give equal rows.
      batch_size: rows B.
      place: i32[B], where a row's only needle begins, 1 to S - 2; drawn if `None`.

    Returns:
      The rows. Questions ask for different keys as long as there are some left.

    Raises:
      ValueError: the task has no room in the rows, or `place` is given for a task with
        several pairs.
    """
    task.check(config)
    if place is not None and task.pairs != 1:
        raise ValueError(f"place is given, but the task has {task.pairs} pairs")
    numbers = _Numbers(
        *map(jnp.int32, (KINDS.index(task.kind), task.keys, task.values, task.hops))
    )

    def row(key, place):
        return _row(config, numbers, key, place)

    keys = jax.random.split(key, batch_size)
    return jax.vmap(row, in_axes=(0, None if place is None else 0))(keys, place)


def ruler_batch(
    config: RulerConfig, key: jax.Array, batch_size: int, *, previous: float = 0.3
) -> PackedBatch:
    """Draws rows of all kinds of tasks to train on.

    A third of the rows has needles with one value each, 1 to `most_pairs` of them; the
    others have needles with four values, chains of one to five variables, or words.

    To look a value up, a layer must first have told it which key it stands behind, and
    no gradient asks for that before others look. So context tokens have a target too,
    the token before them.

    Args:
      config: sizes.
      key: random key; equal keys give equal rows.
      batch_size: rows B.
      previous: what all targets of a context together weigh, of what questions do.

    Returns:
      One document a row. `loss_mask` is 1 at the last token of each question, whose
      target is drawn from its answer: what is likeliest is then all of it.
    """

    def row(key):
        keys = jax.random.split(key, 6)
        share = jax.random.uniform(keys[0])
        # Needles, needles of several values, variables, common and frequent words.
        drawn = jnp.searchsorted(jnp.asarray([0.35, 0.5, 0.8, 0.9]), share)
        kind = jnp.asarray([0, 0, 1, 2, 3], jnp.int32)[drawn]
        values = jnp.where(drawn == 1, MOST_ANSWERS, 1)
        hops = jnp.where(drawn == 2, jax.random.randint(keys[1], (), 1, 5), 0)
        most = config.most_pairs // (values * (hops + 1))
        # As many rows have few needles as many.
        scale = jax.random.uniform(keys[2])
        count = jnp.exp(scale * jnp.log(most.astype(jnp.float32) + 0.99))
        count = jnp.clip(count.astype(jnp.int32), 1, most)
        numbers = _Numbers(kind, count, values, hops, any_hop=True)
        rows = _row(config, numbers, keys[3], None)
        target = jax.random.categorical(
            keys[4], jnp.where(rows.answers >= 0, 0.0, -jnp.inf), axis=-1
        )
        targets = jnp.take_along_axis(rows.answers, target[:, None], axis=1)[:, 0]
        return rows.tokens, targets

    tokens, answers = jax.vmap(row)(jax.random.split(key, batch_size))
    shape = tokens.shape
    asks = config.context + QUESTION * np.arange(config.num_questions) + QUESTION - 1
    time = jnp.arange(config.seq_len, dtype=jnp.int32)
    weight = np.zeros(config.seq_len, np.float32)
    weight[1 : config.context] = previous * config.num_questions / config.context
    weight[asks] = 1.0
    mask = jnp.broadcast_to(jnp.asarray(weight), shape)
    before = jnp.pad(tokens[:, :-1], ((0, 0), (1, 0)))
    return PackedBatch(
        tokens=tokens,
        targets=before.at[:, asks].set(answers),
        segment_ids=jnp.ones(shape, jnp.int32),
        positions=jnp.broadcast_to(time, shape),
        loss_mask=mask,
        num_bytes=mask,
    )


def is_right(logits: jax.Array, answers: jax.Array) -> jax.Array:
    """Whether the likeliest tokens are an answer.

    Args:
      logits: [..., vocab] at the last token of a question.
      answers: i32[..., A], -1 in places beyond the answer.

    Returns:
      bool[...]: the answer's n tokens have larger logits than all others; a tie with
      another token is no answer.
    """
    size = jnp.sum(answers >= 0, axis=-1, keepdims=True)
    logits = logits.astype(jnp.float32)
    best, _ = jax.lax.top_k(logits, answers.shape[-1])
    least = jnp.take_along_axis(best, size - 1, axis=-1)  # the n-th largest
    given = jnp.take_along_axis(logits, jnp.maximum(answers, 0), axis=-1)
    # Equal logits know nothing, however many of them are the answer's.
    alone = jnp.sum(logits >= least, axis=-1, keepdims=True) <= size
    return jnp.all(((given >= least) & alone) | (answers < 0), axis=-1)


def _row(
    config: RulerConfig, task: _Numbers, key: jax.Array, place: jax.Array | None
) -> RulerRows:
    """One row; arrays without their axis B."""
    keys = jax.random.split(key, 8)
    words = _words(config, task, keys[0])
    counts = jnp.zeros(config.num_words, jnp.int32).at[words].add(1)
    names = _NUM_SPECIAL + config.num_words
    first_value = names + config.num_keys
    name = names + jax.random.permutation(keys[1], config.num_keys)
    value = first_value + jax.random.permutation(keys[2], config.num_values)
    value = value[jnp.arange(config.most_pairs) % config.num_values].astype(jnp.int32)
    name = name.astype(jnp.int32)
    is_chain = task.kind == KINDS.index("variables")
    length = jnp.where(is_chain, task.hops + 1, task.values)
    has_pairs = task.kind <= KINDS.index("variables")
    count = jnp.where(has_pairs, task.keys * length, 0)

    # Pairs in the order of their places: which key each has, and its how many-th.
    index = jnp.arange(config.most_pairs, dtype=jnp.int32)
    order = jax.random.uniform(keys[3], index.shape)
    order = jnp.argsort(jnp.where(index < count, order, 2.0)).astype(jnp.int32)
    label = order // length
    same = (label[:, None] == label[None, :]) & (index[None, :] < index[:, None])
    turn = jnp.sum(same, axis=1, dtype=jnp.int32)
    at = jnp.clip(label * length + turn, 0, config.most_pairs - 1)
    before = name[jnp.maximum(at - 1, 0)]
    link = jnp.where(turn == 0, value[jnp.minimum(label, value.size - 1)], before)
    content = jnp.where(is_chain, link, value[at])
    key_of = jnp.where(is_chain, name[at], name[jnp.minimum(label, name.size - 1)])

    places = jax.random.permutation(keys[4], config.num_places)[: config.most_pairs]
    places = jnp.sort(jnp.where(index < count, places, config.num_places))
    shift = jax.random.randint(keys[5], (), 1, 3)  # pairs may lie across any border
    where = (shift + 2 * places).astype(jnp.int32)
    where = jnp.where(index < count, where, config.seq_len)
    if place is not None:
        where = where.at[0].set(place.astype(jnp.int32))
    context = (_NUM_SPECIAL + words).astype(jnp.int32).at[0].set(_MARK)
    context = context.at[where].set(key_of, mode="drop")
    context = context.at[where + 1].set(content, mode="drop")

    asked, answers = _questions(config, task, keys[6:], name, value, length)
    for kind, word, number in (
        ("common", _COMMON, _NUM_COMMON),
        ("frequent", _FREQUENT, _NUM_FREQUENT),
    ):
        top = _NUM_SPECIAL + jax.lax.top_k(counts, MOST_ANSWERS)[1].astype(jnp.int32)
        top = jnp.where(jnp.arange(MOST_ANSWERS) < number, top, -1)
        is_kind = task.kind == KINDS.index(kind)
        asked = jnp.where(is_kind, word, asked)
        answers = jnp.where(is_kind, top[None], answers)
    questions = jnp.stack([jnp.full_like(asked, _ASK), asked], axis=1).reshape(-1)
    return RulerRows(
        tokens=jnp.concatenate([context, questions]), answers=answers, places=where
    )


def _words(config: RulerConfig, task: _Numbers, key: jax.Array) -> jax.Array:
    """The context's words i32[S], drawn as the row's kind asks for."""
    rank = np.arange(config.num_words)
    even = np.ones(config.num_words)
    common = np.where(rank < _NUM_COMMON, 10.0, 1.0)
    zeta = (rank + 1.0) ** -2
    table = np.stack([np.log(x / x.sum()) for x in (even, even, common, zeta)])
    chances = jnp.asarray(table, jnp.float32)[task.kind]
    draw, shuffle = jax.random.split(key)
    ranks = jnp.searchsorted(
        jnp.cumsum(jnp.exp(chances)), jax.random.uniform(draw, (config.context,))
    )
    ranks = jnp.minimum(ranks, config.num_words - 1)
    return jax.random.permutation(shuffle, config.num_words)[ranks].astype(jnp.int32)


def _questions(
    config: RulerConfig,
    task: _Numbers,
    keys: jax.Array,
    name: jax.Array,
    value: jax.Array,
    length: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """What needles and variables are asked for: i32[Q], and answers i32[Q, A]."""
    number = jnp.arange(config.num_questions, dtype=jnp.int32)
    label = jnp.arange(config.most_pairs, dtype=jnp.int32)
    first = jax.random.uniform(keys[0], label.shape)
    first = jnp.argsort(jnp.where(label < task.keys, first, 2.0)).astype(jnp.int32)
    again_key, hop_key = jax.random.split(keys[1])
    again = jax.random.randint(again_key, number.shape, 0, task.keys)
    chosen = first[jnp.minimum(number, config.most_pairs - 1)]
    chosen = jnp.where(number < task.keys, chosen, again)  # [Q]
    hop = jnp.broadcast_to(task.hops, number.shape)
    if task.any_hop:
        hop = jax.random.randint(hop_key, number.shape, 0, task.hops + 1)
    is_chain = task.kind == KINDS.index("variables")
    last = config.most_pairs - 1
    asked = jnp.where(is_chain, jnp.minimum(chosen * length + hop, last), chosen)
    turn = jnp.arange(MOST_ANSWERS, dtype=jnp.int32)[None, :]
    held = jnp.minimum(chosen[:, None] * task.values + turn, last)
    held = jnp.where(turn < task.values, value[held], -1)
    link = jnp.where(turn == 0, value[jnp.minimum(chosen, last)][:, None], -1)
    return name[asked], jnp.where(is_chain, link, held)
