"""Tokenizers: lossless, the bytes of each id add up, files come back the same."""

import functools
import json

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

from jaxaccel.data.sources import StdlibSource
from jaxaccel.data.tokenizer import ByteTokenizer, load_tokenizer, train_bpe


_SETTINGS = hypothesis.settings(max_examples=30, deadline=None, derandomize=True)


def _texts():
    return [document.text for document in StdlibSource(include=("stdlib/json/*",))]


@functools.cache
def _bpe():
    return train_bpe(_texts(), 400)


def _tokenizer(kind):
    return ByteTokenizer() if kind == "byte" else _bpe()


@pytest.fixture(params=["byte", "bpe"])
def tokenizer(request):
    return _tokenizer(request.param)


@pytest.mark.parametrize("kind", ["byte", "bpe"])
@_SETTINGS
@hypothesis.given(text=st.text(max_size=60))
@hypothesis.example(text="<|eos|> \r\n\t  \x00 naïve 日本 🏳️‍🌈 é")
@hypothesis.example(text="")
def test_any_text_comes_back_and_its_bytes_add_up(kind, text):
    tokenizer = _tokenizer(kind)
    ids = tokenizer.encode(text)
    assert ids.dtype == np.int32
    assert tokenizer.decode(ids) == text
    assert tokenizer.token_bytes()[ids].sum() == len(text.encode())
    assert not np.isin(
        ids, [tokenizer.pad_id, tokenizer.bos_id, tokenizer.eos_id]
    ).any()


def test_special_ids_are_the_last_and_stand_for_no_text(tokenizer):
    specials = [tokenizer.pad_id, tokenizer.bos_id, tokenizer.eos_id]
    assert specials == [tokenizer.vocab_size - n for n in (3, 2, 1)]
    assert tokenizer.token_bytes().shape == (tokenizer.vocab_size,)
    assert not tokenizer.token_bytes()[specials].any()
    assert tokenizer.decode([*tokenizer.encode("ab"), tokenizer.eos_id]) == "ab"


def test_a_batch_is_encoded_as_one_by_one(tokenizer):
    texts = ["def f(x):\n", "", "return x"]
    for text, ids in zip(texts, tokenizer.encode_batch(texts), strict=True):
        np.testing.assert_array_equal(ids, tokenizer.encode(text))


def test_bytes_that_are_not_utf8_decode_to_the_replacement(tokenizer):
    half = tokenizer.encode("é")[:1]
    assert len(tokenizer.decode_bytes(half)) in (1, 2)
    assert ByteTokenizer().decode([0xC3]) == "\ufffd"


def test_bpe_learns_and_is_the_same_each_time():
    texts = _texts()
    again = train_bpe(texts, 400)
    assert again.fingerprint == _bpe().fingerprint
    assert again.vocab_size == 400
    assert len(again.encode(texts[0])) < 0.7 * len(texts[0].encode())
    assert train_bpe(texts, 300).fingerprint != again.fingerprint


def test_little_text_gives_fewer_ids():
    tokenizer = train_bpe(["abab"], 1000)
    assert 259 <= tokenizer.vocab_size < 1000
    assert tokenizer.eos_id == tokenizer.vocab_size - 1


def test_save_and_load(tokenizer, tmp_path):
    path = tmp_path / "tokenizer.json"
    tokenizer.save(path)
    loaded = load_tokenizer(path)
    assert type(loaded) is type(tokenizer)
    assert loaded.fingerprint == tokenizer.fingerprint
    assert loaded.vocab_size == tokenizer.vocab_size
    np.testing.assert_array_equal(loaded.token_bytes(), tokenizer.token_bytes())
    text = "import json  # é\n"
    np.testing.assert_array_equal(loaded.encode(text), tokenizer.encode(text))


@pytest.mark.parametrize("ids", [[-1], [3, 10**6]])
def test_ids_outside_the_vocabulary_are_refused(tokenizer, ids):
    with pytest.raises(ValueError, match=rf"token id {ids[-1]} is not in \[0, "):
        tokenizer.decode(ids)


def test_bad_training_is_refused():
    with pytest.raises(ValueError, match="vocab_size is 258, must be at least 259"):
        train_bpe(["a"], 258)
    with pytest.raises(ValueError, match="no text"):
        train_bpe(["", ""], 300)


def test_bad_files_are_refused(tmp_path):
    path = tmp_path / "tokenizer.json"
    with pytest.raises(FileNotFoundError, match=r"tokenizer\.json"):
        load_tokenizer(path)
    path.write_text("not json")
    with pytest.raises(ValueError, match="is not a tokenizer file"):
        load_tokenizer(path)
    path.write_text("{}")
    with pytest.raises(ValueError, match="is not a tokenizer file of format"):
        load_tokenizer(path)
    path.write_text(json.dumps({"format": "jaxaccel-tokenizer-1", "kind": "word"}))
    with pytest.raises(ValueError, match="kind 'word', allowed are 'bpe' and 'byte'"):
        load_tokenizer(path)
