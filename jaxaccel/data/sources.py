"""Where documents come from: the standard library, folders, JSONL, memory.

A source is a frozen dataclass that can be iterated any number of times and yields the
same documents in the same order each time. Which split a document belongs to depends
on its name alone (`is_heldout`), so adding or removing files moves no other file.
"""

from __future__ import annotations

import ast
import dataclasses
import fnmatch
import gzip
import hashlib
import json
import os
import pathlib
import sys
import sysconfig
import tokenize
import warnings
from collections.abc import Iterable, Iterator
from typing import Protocol, runtime_checkable


@dataclasses.dataclass(frozen=True, slots=True)
class Document:
    """A text and the name that decides its split.

    Attributes:
      name: path-like name, unique in its source; what follows a `#` is ignored by the
        held-out split, so that two documents cut from one file stay together.
      text: the text, without lone surrogates.
    """

    name: str
    text: str


@runtime_checkable
class Source(Protocol):
    """What the pipeline needs of a source."""

    def __iter__(self) -> Iterator[Document]:
        """Yields the documents, in the same order each time."""
        ...

    def fingerprint(self) -> str:
        """Tells cheaply whether the documents may have changed: sha256, hex."""
        ...


def is_heldout(name: str, fraction: float) -> bool:
    """Whether a document belongs to the held-out split, by a hash of its name.

    Args:
      name: a document's name; what follows a `#` is ignored.
      fraction: expected share of held-out documents, in [0, 1).

    Returns:
      True for held-out. A larger fraction keeps every document held out that a smaller
      one did.
    """
    return name_hash(name.split("#", 1)[0]) < int(fraction * 2**64)


def name_hash(name: str) -> int:
    """A 64-bit hash that is the same on every machine and Python version."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big")


def split_documents(
    documents: Iterable[Document], split: str, fraction: float
) -> Iterator[Document]:
    """Yields the documents of one split.

    Args:
      documents: any documents.
      split: "train" or "heldout".
      fraction: held-out share, in [0, 1).

    Raises:
      ValueError: the split or the fraction is not allowed.
    """
    if split not in ("train", "heldout"):
        raise ValueError(f"split is {split!r}, allowed are 'train' and 'heldout'")
    check_fraction(fraction)
    for document in documents:
        if is_heldout(document.name, fraction) == (split == "heldout"):
            yield document


def check_fraction(fraction: float) -> None:
    """Raises ValueError unless a held-out fraction is in [0, 1)."""
    if not 0.0 <= fraction < 1.0:
        raise ValueError(f"heldout fraction is {fraction}, must be in [0, 1)")


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Filtered:
    """Filters that every source has.

    Attributes:
      min_chars: documents with fewer characters are skipped.
      max_chars: documents with more characters are skipped; None keeps all.
      include: a document's name must match one of these globs (`*` crosses `/`).
      exclude: and none of these.
    """

    min_chars: int = 1
    max_chars: int | None = None
    include: tuple[str, ...] = ("*",)
    exclude: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.min_chars < 0:
            raise ValueError(f"min_chars is {self.min_chars}, must be at least 0")
        if self.max_chars is not None and self.max_chars < max(1, self.min_chars):
            raise ValueError(
                f"max_chars is {self.max_chars}, must be at least 1 and at least "
                f"min_chars, which is {self.min_chars}"
            )
        for field in ("include", "exclude"):
            if isinstance(getattr(self, field), str):
                raise ValueError(
                    f"{field} is the string {getattr(self, field)!r}, must be a tuple "
                    "of globs"
                )

    def _matches(self, name: str) -> bool:
        return any(fnmatch.fnmatchcase(name, glob) for glob in self.include) and not (
            any(fnmatch.fnmatchcase(name, glob) for glob in self.exclude)
        )

    def _filter(self, documents: Iterable[Document], where: str) -> Iterator[Document]:
        """Applies the filters; nothing left is an error that says what was asked."""
        seen = kept = 0
        for document in documents:
            seen += 1
            size = len(document.text)
            if size < self.min_chars or (self.max_chars or size) < size:
                continue
            if self._matches(document.name):
                kept += 1
                yield document
        if not kept:
            raise ValueError(
                f"no document is left of {seen} in {where} after the filter "
                f"min_chars={self.min_chars}, max_chars={self.max_chars}, "
                f"include={self.include}, exclude={self.exclude}"
            )

    def _settings(self) -> str:
        fields = dataclasses.fields(self)
        return repr([type(self).__name__, *(getattr(self, f.name) for f in fields)])


# Generated character tables: 1 MB of near-copies of each other, some of which would
# land in the held-out split and flatter the loss there.
_GENERATED = (
    "*/encodings/cp*.py",
    "*/encodings/iso8859_*.py",
    "*/encodings/koi8_*.py",
    "*/encodings/mac_*.py",
    "*/pydoc_data/topics.py",
)
_SKIPPED_FOLDERS = frozenset(
    {"__pycache__", "_bundled", "idle_test", "test", "tests"}
    | {"dist-packages", "site-packages"}
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class StdlibSource(_Filtered):
    """The running interpreter's standard library: about 10 MB of code and prose.

    Needs no network and is the same for everyone with the same Python version. Tests,
    installed packages and generated character tables are left out.

    Attributes:
      code: yields each module's source as `stdlib/PATH.py`.
      topics: yields the language reference's help topics as `stdlib/topics/NAME`.
      docstrings: yields each module's docstrings as `stdlib/PATH.py#docstrings`, which
        shares the split of its module; costs a parse of every file (a few seconds).
    """

    exclude: tuple[str, ...] = _GENERATED
    code: bool = True
    topics: bool = True
    docstrings: bool = False

    def __iter__(self) -> Iterator[Document]:
        return self._filter(self._documents(), f"the standard library at {_stdlib()}")

    def fingerprint(self) -> str:
        return _digest(self._settings(), sys.version, *_stats(self._files()))

    def _files(self) -> list[tuple[str, pathlib.Path]]:
        root = _stdlib()
        found = []
        for folder, subfolders, files in os.walk(root):
            subfolders[:] = sorted({*subfolders} - _SKIPPED_FOLDERS)
            for file in files:
                path = pathlib.Path(folder, file)
                name = f"stdlib/{path.relative_to(root).as_posix()}"
                if file.endswith(".py"):
                    found.append((name, path))
        return sorted(found)

    def _documents(self) -> Iterator[Document]:
        if self.code or self.docstrings:
            for name, path in self._files():
                if not self._matches(name):
                    continue
                # Python files declare their own encoding; a few are not UTF-8.
                with tokenize.open(path) as file:
                    text = file.read()
                if self.code:
                    yield Document(name, text)
                if self.docstrings and (prose := _docstrings(text)):
                    yield Document(f"{name}#docstrings", prose)
        if self.topics:
            from pydoc_data.topics import topics

            for topic in sorted(topics):
                yield Document(f"stdlib/topics/{topic}", topics[topic])


def _stdlib() -> pathlib.Path:
    return pathlib.Path(sysconfig.get_paths()["stdlib"])


def _docstrings(code: str) -> str:
    """All docstrings of a module, in the order of the file, a blank line between."""
    holders = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    with warnings.catch_warnings():
        # Old escapes in somebody else's strings are not this program's concern.
        warnings.simplefilter("ignore", SyntaxWarning)
        tree = ast.parse(code)
    nodes = [node for node in ast.walk(tree) if isinstance(node, holders)]
    nodes.sort(key=lambda node: getattr(node, "lineno", 0))
    return "\n\n".join(text for node in nodes if (text := ast.get_docstring(node)))


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextFolderSource(_Filtered):
    """One document for each text file of a folder, in the order of their paths.

    Attributes:
      path: a folder, or one file.
      glob: which files of the folder; `**` crosses folders.
      encoding: of the files.
      errors: "strict" refuses bytes that do not decode, "replace" and "ignore" do as
        `bytes.decode` does.
    """

    path: str
    glob: str = "**/*.txt"
    encoding: str = "utf-8"
    errors: str = "strict"

    def __iter__(self) -> Iterator[Document]:
        return self._filter(self._documents(), self.path)

    def fingerprint(self) -> str:
        return _digest(self._settings(), *_stats(_files(self.path, self.glob)))

    def _documents(self) -> Iterator[Document]:
        for name, path in _files(self.path, self.glob):
            if not self._matches(name):
                continue
            try:
                text = path.read_text(self.encoding, self.errors)
            except UnicodeDecodeError as error:
                raise ValueError(
                    f"{path} is not {self.encoding} at byte {error.start}; set "
                    "errors='replace' to read it anyway"
                ) from error
            yield Document(name, text)


@dataclasses.dataclass(frozen=True, kw_only=True)
class JsonlSource(_Filtered):
    """One document for each line of a JSONL file or of a folder of them.

    Documents are named `FILE:LINE`, so the held-out split is by line.

    Attributes:
      path: a folder, or one file; `.gz` files are read through gzip.
      key: the key of the text in each line's object.
      glob: which files of the folder; `**` crosses folders.
    """

    path: str
    key: str = "text"
    glob: str = "**/*.jsonl*"

    def __iter__(self) -> Iterator[Document]:
        return self._filter(self._documents(), self.path)

    def fingerprint(self) -> str:
        return _digest(self._settings(), *_stats(_files(self.path, self.glob)))

    def _documents(self) -> Iterator[Document]:
        for name, path in _files(self.path, self.glob):
            opened = gzip.open if path.suffix == ".gz" else open
            with opened(path, "rb") as file:
                for number, line in enumerate(file, start=1):
                    if line.strip():
                        text = self._text(line, f"{path}:{number}")
                        yield Document(f"{name}:{number}", text)

    def _text(self, line: bytes, where: str) -> str:
        try:
            row = json.loads(line.decode("utf-8"))
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise ValueError(f"{where} is not JSON: {error}") from error
        if not isinstance(row, dict):
            raise ValueError(f"{where} holds a {type(row).__name__}, must be an object")
        if not isinstance(row.get(self.key), str):
            raise ValueError(
                f"{where} has no string under {self.key!r}, its keys are {sorted(row)}"
            )
        # JSON can spell lone surrogates, which no UTF-8 can.
        return row[self.key].encode("utf-8", "replace").decode("utf-8")


@dataclasses.dataclass(frozen=True, kw_only=True)
class InMemorySource(_Filtered):
    """Texts that the caller holds.

    Attributes:
      texts: the texts.
      names: one for each text; empty counts them as `memory/0`, `memory/1`, ...
    """

    texts: tuple[str, ...]
    names: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.texts, str):
            raise ValueError("texts is one string, must be a tuple of strings")
        if self.names and len(self.names) != len(self.texts):
            raise ValueError(f"{len(self.names)} names for {len(self.texts)} texts")

    def __iter__(self) -> Iterator[Document]:
        names = self.names or tuple(f"memory/{i}" for i in range(len(self.texts)))
        documents = map(Document, names, self.texts)
        return self._filter(documents, f"{len(self.texts)} texts in memory")

    def fingerprint(self) -> str:
        return _digest(self._settings())


def _files(path: str, glob: str) -> list[tuple[str, pathlib.Path]]:
    """Names and paths of the files, sorted by name."""
    root = pathlib.Path(path)
    if root.is_file():
        return [(root.name, root)]
    if not root.is_dir():
        raise FileNotFoundError(f"no file or folder at {path}")
    paths = [path for path in root.glob(glob) if path.is_file()]
    found = [(path.relative_to(root).as_posix(), path) for path in paths]
    if not found:
        raise FileNotFoundError(f"no file in {path} matches the glob {glob!r}")
    return sorted(found)


def _stats(files: Iterable[tuple[str, pathlib.Path]]) -> Iterator[str]:
    for name, path in files:
        stat = path.stat()
        yield f"{name} {stat.st_size} {stat.st_mtime_ns}"


def _digest(*parts: str) -> str:
    digest = hashlib.sha256()
    for part in parts:
        # A length in front keeps ("ab", "c") and ("a", "bc") apart.
        encoded = part.encode("utf-8", "surrogatepass")
        digest.update(len(encoded).to_bytes(8, "big") + encoded)
    return digest.hexdigest()
