"""Generation over hybrid caches: rows do not see each other, nor the padding."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxaccel.data.tokenizer import ByteTokenizer
from jaxaccel.decoding import generate as generate_lib
from jaxaccel.decoding.generate import generate, generate_stream, generate_text
from jaxaccel.decoding.sampling import SamplingConfig
from jaxaccel.models.qwen3_5_text import Qwen3_5TextConfig


GREEDY = SamplingConfig(temperature=0.0)
DRAWN = SamplingConfig(top_k=50)
PROMPTS = [[5, 3, 8], [1], [7, 7, 2, 9, 4, 11, 6, 100], [12, 13, 14, 15, 16]]
NEW = 6


@pytest.fixture(scope="module")
def model(random_model):
    config = Qwen3_5TextConfig.tiny(pattern=("gdn", "attention"), num_layers=2)
    return random_model(config.decoder())


@pytest.fixture(scope="module")
def greedy(model):
    return generate(model, PROMPTS, max_new_tokens=NEW, sampling=GREEDY)


def test_greedy_equals_the_argmax_of_whole_forwards(model, greedy):
    texts = [[*p, *new] for p, new in zip(PROMPTS, greedy, strict=True)]
    width = max(map(len, texts))
    tokens = np.zeros((len(texts), width), np.int32)
    segments = np.zeros_like(tokens)
    for row, text in enumerate(texts):
        tokens[row, : len(text)] = text
        segments[row, : len(text)] = 1
    graphdef, state = nnx.split(model)

    @jax.jit
    def likeliest(state, tokens, segments):
        output = nnx.merge(graphdef, state)(tokens, segments)
        return jnp.argmax(output.logits, axis=-1)

    best = np.asarray(likeliest(state, tokens, segments))
    for row, (prompt, new) in enumerate(zip(PROMPTS, greedy, strict=True)):
        assert best[row, len(prompt) - 1 : len(prompt) - 1 + NEW].tolist() == new


def test_a_ragged_batch_equals_each_prompt_among_its_like(model, greedy):
    for prompt, expected in zip(PROMPTS, greedy, strict=True):
        rows = generate(model, [prompt] * 4, max_new_tokens=NEW, sampling=GREEDY)
        assert rows == [expected] * 4


def test_streaming_gives_the_same_tokens_in_order(model, greedy):
    events = []
    rows = generate(
        model,
        PROMPTS,
        max_new_tokens=NEW,
        sampling=GREEDY,
        stream=lambda row, token: events.append((row, token)),
    )
    assert rows == greedy
    by_step = [(row, greedy[row][step]) for step in range(NEW) for row in range(4)]
    assert events == by_step
    iterator = generate_stream(
        model, PROMPTS, max_new_tokens=NEW, sampling=GREEDY, tokens_per_call=4
    )
    assert list(iterator) == by_step


def test_each_row_ends_before_its_own_stop_token(model, greedy):
    # As many as in the next test: they share a program.
    stops = [greedy[0][2], greedy[3][0]] * 2
    expected = []
    for row in greedy:
        ends = [i for i, token in enumerate(row) if token in stops]
        expected.append(row[: ends[0]] if ends else row)
    options = {"max_new_tokens": NEW, "sampling": GREEDY, "stop_tokens": stops}
    assert generate(model, PROMPTS, **options) == expected
    assert generate(model, PROMPTS, **options, stream=lambda *_: None) == expected
    assert expected[3] == []


def test_rows_that_all_ended_stop_the_loop(model, greedy):
    stops = [row[0] for row in greedy]
    options = {"max_new_tokens": NEW, "sampling": GREEDY, "stop_tokens": stops}
    assert generate(model, PROMPTS, **options) == [[], [], [], []]


def test_a_row_draws_by_its_own_seed(model):
    options = {"max_new_tokens": NEW, "sampling": DRAWN, "vocab_limit": 27}
    rows = generate(model, PROMPTS, seed=[4, 5, 6, 7], **options)
    assert rows == generate(model, PROMPTS, seed=[4, 5, 6, 7], **options)
    swapped = [PROMPTS[1], PROMPTS[0], PROMPTS[3], PROMPTS[2]]
    again = generate(model, swapped, seed=[5, 4, 7, 6], **options)
    assert again == [rows[1], rows[0], rows[3], rows[2]]
    assert generate(model, PROMPTS, seed=1, **options) != rows
    same = generate(model, [PROMPTS[0]] * 4, seed=1, **options)
    assert len({tuple(row) for row in same}) == 4


def test_one_seed_gives_a_row_the_same_whatever_stands_behind_it(model):
    options = {"max_new_tokens": NEW, "sampling": DRAWN, "vocab_limit": 27, "seed": 3}
    first = generate(model, PROMPTS, **options)[0]
    assert generate(model, [PROMPTS[0], [99], [98], [97, 96]], **options)[0] == first


def test_no_token_at_or_above_the_limit_is_drawn(model, greedy):
    options = {"max_new_tokens": NEW, "sampling": DRAWN, "seed": 2}
    assert sum(token >= 27 for row in greedy for token in row) > NEW
    rows = generate(model, PROMPTS, vocab_limit=27, **options)
    assert max(max(row) for row in rows) < 27
    events = generate_stream(model, PROMPTS, vocab_limit=27, **options)
    assert max(token for _, token in events) < 27
    # A limit that excludes nothing changes nothing.
    asked = {"max_new_tokens": NEW, "sampling": DRAWN, "stop_tokens": ()}
    free, beyond = (
        generate_lib.check_request(model, PROMPTS, vocab_limit=limit, **asked)
        for limit in (None, 10_000)
    )
    assert beyond == free


def test_a_tokenizer_with_fewer_ids_than_the_model_decodes_every_draw(model):
    class Small:
        """Letters as ids 0 to 25, then the end of a document; refuses others."""

        vocab_size, bos_id, eos_id = 27, None, 26

        def encode(self, text):
            return np.array([ord(letter) - ord("a") for letter in text], np.int32)

        def decode(self, ids):
            assert all(0 <= number < 27 for number in ids)
            return "".join(chr(number + ord("a")) for number in ids)

    options = {"max_new_tokens": NEW, "sampling": DRAWN}
    texts = generate_text(model, Small(), ["abc", "", "z", "hi"], **options)
    assert any(texts)


def test_programs_are_compiled_once_per_bucket(model):
    generate(model, PROMPTS, max_new_tokens=NEW, sampling=GREEDY)
    compiled = generate_lib._decode._cache_size(), generate_lib._prefill._cache_size()
    for change in ([9] * 11, [9] * 16):
        generate(model, [change, *PROMPTS[1:]], max_new_tokens=9, sampling=GREEDY)
    assert compiled == (
        generate_lib._decode._cache_size(),
        generate_lib._prefill._cache_size(),
    )


def test_a_bucket_holds_its_length_and_wastes_little():
    for length in range(1, 200):
        size = generate_lib.bucket(length)
        assert length <= size <= max(16, 1.5 * length)


@pytest.mark.parametrize(
    "prompts, options, message",
    [
        ([[1], []], {}, r"prompts\[1\] is empty"),
        (
            [[1, -2]],
            {},
            r"prompts\[0\]\[1\] is token -2, outside the vocabulary 0..127",
        ),
        ([[1], [128]], {}, r"prompts\[1\]\[0\] is token 128"),
        ([[1]], {"max_new_tokens": 0}, "max_new_tokens=0"),
        ([[1]], {"vocab_limit": 0}, "vocab_limit=0"),
        ([[1]], {"stop_tokens": [-1]}, r"stop_tokens\[0\] is token -1"),
        ([[1]], {"seed": [1, 2]}, "2 seeds are given for 1 prompts"),
    ],
)
def test_bad_input_is_named(model, prompts, options, message):
    with pytest.raises(ValueError, match=message):
        generate(model, prompts, **{"max_new_tokens": 2, **options})


def test_no_prompts_give_no_rows(model):
    assert generate(model, [], max_new_tokens=2) == []


class FixedModel:
    """Stands in for a model: `generate_text` hands it on and never calls it."""


def test_text_arrives_in_whole_characters(monkeypatch):
    tokenizer = ByteTokenizer()
    answers = [[*"aé".encode(), 0xE2, 0x82], [*b"ok"]]

    def fake(model, prompts, *, stream, stop_tokens, **options):
        assert prompts == [[104, 105], [tokenizer.bos_id]]
        assert stop_tokens == (tokenizer.eos_id,)
        for step in range(5):
            for row, answer in enumerate(answers):
                if stream and step < len(answer):
                    stream(row, answer[step])
        return answers

    monkeypatch.setattr(generate_lib, "generate", fake)
    pieces = []
    texts = generate_text(
        FixedModel(),
        tokenizer,
        ["hi", ""],
        max_new_tokens=5,
        stream=lambda row, text: pieces.append((row, text)),
    )
    assert texts == ["aé\ufffd", "ok"]
    assert pieces == [(0, "a"), (1, "o"), (1, "k"), (0, "é"), (0, "\ufffd")]
    assert generate_text(FixedModel(), tokenizer, ["hi", ""], max_new_tokens=5) == texts
