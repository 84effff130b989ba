"""Sources: what they yield, in which order, and what they say when they cannot."""

import gzip
import json

import pytest

from jaxaccel.data.sources import (
    InMemorySource,
    JsonlSource,
    StdlibSource,
    TextFolderSource,
    is_heldout,
    split_documents,
)


_HELDOUT = [2, 11, 17, 24]  # of 40, at a fraction of 0.1


def test_the_standard_library_is_millions_of_characters_of_code_and_prose():
    documents = list(StdlibSource())
    names = [document.name for document in documents]
    assert len(set(names)) == len(names)
    assert sum(len(document.text) for document in documents) > 5_000_000
    assert "stdlib/json/decoder.py" in names
    assert "stdlib/topics/assert" in names
    assert not [n for n in names if "/test/" in n or "site-packages" in n]
    assert not [n for n in names if n.startswith("stdlib/encodings/cp")]
    assert documents == list(StdlibSource())


def test_docstrings_share_the_split_of_their_module():
    source = StdlibSource(include=("stdlib/json/*",), code=False, docstrings=True)
    documents = {document.name: document.text for document in source}
    assert (
        "JSON (JavaScript Object Notation)"
        in (documents["stdlib/json/__init__.py#docstrings"])
    )
    assert "import" not in documents["stdlib/json/scanner.py#docstrings"]
    for name in documents:
        for fraction in (0.1, 0.5, 0.9):
            assert is_heldout(name, fraction) == is_heldout(name[:-11], fraction)


def test_splits_are_disjoint_complete_and_depend_on_the_name_alone():
    source = InMemorySource(texts=tuple(f"text {n}" for n in range(2000)))
    train = list(split_documents(source, "train", 0.1))
    heldout = list(split_documents(source, "heldout", 0.1))
    assert not {d.name for d in train} & {d.name for d in heldout}
    assert sorted(d.name for d in train + heldout) == sorted(d.name for d in source)
    assert 150 < len(heldout) < 250
    # Known values: another hash would move every file of every corpus.
    assert [n for n in range(40) if is_heldout(f"memory/{n}", 0.1)] == (_HELDOUT)
    assert set(heldout) < set(split_documents(source, "heldout", 0.2))
    assert not list(split_documents(source, "heldout", 0.0))


def test_text_folder(tmp_path):
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "two.txt").write_text("zwei")
    (tmp_path / "a.txt").write_text("eins")
    (tmp_path / "c.md").write_text("drei")
    folder = str(tmp_path)
    assert [(d.name, d.text) for d in TextFolderSource(path=folder)] == [
        ("a.txt", "eins"),
        ("b/two.txt", "zwei"),
    ]
    (only,) = TextFolderSource(path=folder, glob="*.md")
    assert only.text == "drei"
    (only,) = TextFolderSource(path=f"{folder}/c.md")
    assert only.name == "c.md"


def test_jsonl_file_folder_and_gzip(tmp_path):
    lines = [json.dumps({"text": text, "n": 1}) for text in ("eins", "zwei \ud800")]
    (tmp_path / "a.jsonl").write_text("\n\n".join(lines))
    with gzip.open(tmp_path / "b.jsonl.gz", "wt") as file:
        file.write(json.dumps({"text": "drei"}))
    found = [(d.name, d.text) for d in JsonlSource(path=str(tmp_path))]
    assert found == [
        ("a.jsonl:1", "eins"),
        ("a.jsonl:3", "zwei ?"),
        ("b.jsonl.gz:1", "drei"),
    ]
    assert len(list(JsonlSource(path=str(tmp_path / "a.jsonl")))) == 2


def test_filters():
    texts = ("a", "bb", "ccc", "dddd")
    names = ("x/a.py", "x/b.py", "y/c.py", "y/d.md")

    def kept(**filters):
        source = InMemorySource(texts=texts, names=names, **filters)
        return [document.text for document in source]

    assert kept(min_chars=2, max_chars=3) == ["bb", "ccc"]
    assert kept(include=("*.py",)) == ["a", "bb", "ccc"]
    assert kept(include=("x/*", "*.md"), exclude=("*b.py",)) == ["a", "dddd"]


def test_fingerprints_follow_content_and_filter(tmp_path):
    assert (
        InMemorySource(texts=("ab", "c")).fingerprint()
        != InMemorySource(texts=("a", "bc")).fingerprint()
    )
    assert StdlibSource().fingerprint() == StdlibSource().fingerprint()
    assert StdlibSource(min_chars=2).fingerprint() != StdlibSource().fingerprint()
    (tmp_path / "a.txt").write_text("eins")
    source = TextFolderSource(path=str(tmp_path))
    before = source.fingerprint()
    (tmp_path / "a.txt").write_text("eins zwei")
    assert source.fingerprint() != before


@pytest.mark.parametrize("kind", [TextFolderSource, JsonlSource])
def test_missing_files_are_named(kind, tmp_path):
    with pytest.raises(FileNotFoundError, match="no file or folder at"):
        list(kind(path=str(tmp_path / "nowhere")))
    with pytest.raises(FileNotFoundError, match=r"matches the glob '\*\.xyz'"):
        list(kind(path=str(tmp_path), glob="*.xyz"))


def test_nothing_left_after_the_filter_names_source_and_filter(tmp_path):
    (tmp_path / "a.txt").write_text("eins")
    message = f"no document is left of 1 in {tmp_path} after the filter min_chars=99"
    with pytest.raises(ValueError, match=message):
        list(TextFolderSource(path=str(tmp_path), min_chars=99))
    with pytest.raises(ValueError, match=r"include=\('\*\.xyz',\)"):
        list(StdlibSource(include=("*.xyz",)))
    with pytest.raises(ValueError, match="no document is left of 0 in 0 texts"):
        list(InMemorySource(texts=()))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", r"bad\.jsonl:1 is not JSON"),
        ("[1]", r"bad\.jsonl:1 holds a list, must be an object"),
        ('{"body": "x"}', r"bad\.jsonl:1 has no string under 'text'.*\['body'\]"),
        ('{"text": "\udcff"}', r"bad\.jsonl:1 is not JSON: 'utf-8' codec"),
        ('{"text": 3}', r"bad\.jsonl:1 has no string under 'text'"),
    ],
)
def test_bad_jsonl_names_file_and_line(content, message, tmp_path):
    (tmp_path / "bad.jsonl").write_text(content, errors="surrogateescape")
    with pytest.raises(ValueError, match=message):
        list(JsonlSource(path=str(tmp_path)))


def test_bytes_that_are_not_text_name_the_file(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"ab\xff")
    with pytest.raises(ValueError, match=r"a\.txt is not utf-8 at byte 2"):
        list(TextFolderSource(path=str(tmp_path)))
    (document,) = TextFolderSource(path=str(tmp_path), errors="replace")
    assert document.text == "ab\ufffd"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"min_chars": -1}, "min_chars is -1"),
        ({"max_chars": 0}, "max_chars is 0"),
        ({"min_chars": 5, "max_chars": 4}, "max_chars is 4"),
        ({"include": "*.py"}, r"include is the string '\*\.py'"),
        ({"texts": "abc"}, "texts is one string"),
        ({"names": ("a", "b")}, "2 names for 1 texts"),
    ],
)
def test_bad_settings_are_named(settings, message):
    with pytest.raises(ValueError, match=message):
        InMemorySource(**{"texts": ("abc",), **settings})


def test_bad_split_and_fraction():
    with pytest.raises(ValueError, match="split is 'test'"):
        list(split_documents([], "test", 0.1))
    with pytest.raises(ValueError, match=r"heldout fraction is 1\.0"):
        list(split_documents([], "train", 1.0))
