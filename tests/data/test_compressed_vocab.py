"""Classes of tokens: fixed strings, the `tokenizers` library, the artifact."""

import json

import numpy as np
import pytest

from jaxaccel.data.compressed_vocab import (
    compress_vocabulary,
    compressed_vocabulary,
    load_compressed_vocabulary,
    normalize_token,
)
from jaxaccel.data.tokenizer import ByteTokenizer
from pallas_kernels.engram_hash import HashLayout


@pytest.mark.parametrize(
    "text, expected",
    [
        (" The", "the"),
        ("ÀÉ", "ae"),
        ("ΑΣ", "ασ"),  # the last sigma of a word is no other letter
        ("İ", "i"),
        ("½", "1⁄2"),
        ("ﬁ", "fi"),
        ("\n\n", " "),
        ("   ", " "),
        ("\t x \r\n y", "x y"),
        ("\u3000", " "),  # NFKC makes a blank of it
        ("\x1c", "\x1c"),  # no White_Space, though `str.strip` takes it
        ("\u0301", ""),
    ],
)
def test_normal_forms(text, expected):
    assert normalize_token(text) == expected


def test_equals_the_tokenizers_library():
    from tokenizers import Regex, normalizers

    theirs = normalizers.Sequence(
        [
            normalizers.NFKC(),
            normalizers.NFD(),
            normalizers.StripAccents(),
            normalizers.Lowercase(),
            normalizers.Replace(Regex(r"[ \t\r\n]+"), " "),
            normalizers.Replace(Regex(r"^ $"), "\ue000"),
            normalizers.Strip(),
            normalizers.Replace("\ue000", " "),
        ]
    )
    # Scripts whose tables have been the same for many versions of Unicode.
    places = (*range(0x0, 0x370), *range(0x370, 0x530), *range(0x1E00, 0x2100))
    places += (*range(0x3000, 0x3100), *range(0xFF00, 0xFFF0))
    different = [
        hex(c)
        for c in places
        for text in (chr(c), " " + chr(c), "A" + chr(c))
        if theirs.normalize_str(text) != normalize_token(text)
    ]
    assert different == []


def test_map_numbers_classes_by_first_appearance():
    texts = ["The", " the", "\ufffd", "THE", " ", "\n", "\ufffd", "", "é"]
    strings = ["The", "Ġthe", "Ã", "THE", "Ġ", "Ċ", "Ä", "", "é"]
    made = compress_vocabulary(
        len(texts),
        decode=texts.__getitem__,
        token_string=strings.__getitem__,
        tokenizer="t",
    )
    assert made.token_map.tolist() == [0, 0, 1, 0, 2, 2, 3, 4, 5]
    assert made.size == 6
    assert made.token_map.dtype == np.int32


def test_map_of_the_byte_tokenizer():
    tokenizer = ByteTokenizer()
    made = compressed_vocabulary(tokenizer)
    assert made.compressed(ord("A")) == made.compressed(ord("a"))
    assert made.compressed(ord("\n")) == made.compressed(ord(" "))
    # Bytes that are no text, and special ids, stay apart.
    alone = [*range(128, 256), tokenizer.pad_id, tokenizer.bos_id, tokenizer.eos_id]
    assert len({made.compressed(t) for t in alone}) == len(alone)
    # 26 letters in two cases, and blanks: space, \t, \n, \r, and \v, \f stripped away
    # to nothing, which stay as they are.
    assert made.size == tokenizer.vocab_size - 26 - 3
    with pytest.raises(ValueError, match="token id 259 is outside"):
        made.compressed(259)


def test_artifact_round_trip_and_refusals(tmp_path):
    tokenizer = ByteTokenizer()
    made = compressed_vocabulary(tokenizer)
    layout = HashLayout.create(
        vocab_size=made.size, pad_id=0, layer_ids=(1,), heads=2, bases=101
    )
    path = tmp_path / "vocabulary.json"
    made.save(path, layout=layout)
    read, kept = load_compressed_vocabulary(path, tokenizer=tokenizer.fingerprint)
    np.testing.assert_array_equal(read.token_map, made.token_map)
    assert (read.size, read.fingerprint) == (made.size, made.fingerprint)
    assert HashLayout.from_json(kept) == layout

    with pytest.raises(ValueError, match="every row number would be wrong"):
        load_compressed_vocabulary(path, tokenizer="0" * 64)
    with pytest.raises(ValueError, match="drawn for 97"):
        made.check(size=97)
    with pytest.raises(FileNotFoundError):
        load_compressed_vocabulary(tmp_path / "absent.json")
    data = json.loads(path.read_text())
    path.write_text(json.dumps({**data, "fingerprint": "0" * 64}))
    with pytest.raises(ValueError, match="damaged"):
        load_compressed_vocabulary(path)
    path.write_text(json.dumps({"format": "engram-vocabulary-0"}))
    with pytest.raises(ValueError, match="no compressed vocabulary of format"):
        load_compressed_vocabulary(path)
    path.write_text("{")
    with pytest.raises(ValueError, match="no compressed vocabulary"):
        load_compressed_vocabulary(path)
