"""A tokenised corpus: flat token array, document borders, split, and its cache."""

from __future__ import annotations

import dataclasses
import hashlib
import heapq
import json
import logging
import os
import pathlib
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from typing import IO, Any

import numpy as np

from jaxaccel.data import sources as sources_lib
from jaxaccel.data import tokenizer as tokenizer_lib
from jaxaccel.data.sources import Document, Source


_LOGGER = logging.getLogger(__name__)
_FORMAT = 1
# Text is tokenised this many characters at a time: enough to keep all cores busy, and
# all of the text that is ever held.
_CHUNK_CHARS = 4_000_000
# One giant document must not be the whole of the tokenizer's training text.
_SAMPLE_CHARS = 100_000

Tokenizer = tokenizer_lib.ByteTokenizer | tokenizer_lib.BPETokenizer


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class TokenStore:
    """All documents' tokens end to end.

    A store that lies in a file is mapped, not read, and travels to worker processes as
    its path.

    Attributes:
      tokens: u16[total] or i32[total].
      starts: i64[N + 1], where each document begins; the last entry is the total.
      path: file of the tokens, None where they are in memory only.
    """

    tokens: np.ndarray
    starts: np.ndarray
    path: str | None = None

    @property
    def lengths(self) -> np.ndarray:
        """i64[N], tokens of each document."""
        return np.diff(self.starts)

    def __getstate__(self) -> dict[str, Any]:
        state = dict(self.__dict__)
        if self.path is not None:
            state["tokens"] = self.tokens.dtype.str
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        if state["path"] is not None:
            state["tokens"] = _map_tokens(state["path"], state["tokens"])
        self.__dict__.update(state)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Corpus:
    """Documents of all sources as tokens, with the tokenizer that made them.

    Attributes:
      tokenizer: the tokenizer.
      store: the tokens, special ones included.
      names: of the documents, source after source.
      source: i32[N], index of each document's source.
      heldout: bool[N], which documents are held out.
      num_bytes: i64[N], bytes of each document's UTF-8.
      num_sources: how many sources there are.
      fingerprint: sha256 of tokens, borders and split, hex: two machines that prepared
        the same corpus agree on it.
    """

    tokenizer: Tokenizer
    store: TokenStore
    names: tuple[str, ...]
    source: np.ndarray
    heldout: np.ndarray
    num_bytes: np.ndarray
    num_sources: int
    fingerprint: str

    def documents(self, split: str) -> np.ndarray:
        """i64[n], indices of a split's documents.

        Raises:
          ValueError: the split is neither "train" nor "heldout".
        """
        if split not in ("train", "heldout"):
            raise ValueError(f"split is {split!r}, allowed are 'train' and 'heldout'")
        return np.flatnonzero(self.heldout == (split == "heldout"))

    def tokens(self, document: int) -> np.ndarray:
        """i32[n], the tokens of one document."""
        begin, end = self.store.starts[document : document + 2]
        return self.store.tokens[begin:end].astype(np.int32)

    def texts(self, split: str) -> Iterator[str]:
        """Yields a split's texts one by one, decoded from the tokens."""
        for document in self.documents(split).tolist():
            yield self.tokenizer.decode(self.tokens(document))

    def num_tokens(self, split: str) -> int:
        """Tokens of a split, special ones included."""
        return int(self.store.lengths[self.documents(split)].sum())

    def summary(self) -> dict[str, dict[str, int]]:
        """Documents, tokens and bytes of each split."""
        return {
            split: {
                "documents": len(self.documents(split)),
                "tokens": self.num_tokens(split),
                "bytes": int(self.num_bytes[self.documents(split)].sum()),
            }
            for split in ("train", "heldout")
        }


def train_tokenizer(
    sources: Sequence[Source], vocab_size: int, sample_bytes: int, fraction: float
) -> tokenizer_lib.BPETokenizer:
    """Trains a BPE on a sample of the train split.

    The sample is the documents with the smallest name hash, so that it holds a bit of
    everything and does not depend on the order of the files.

    Args:
      sources: of the documents.
      vocab_size: number of ids wanted.
      sample_bytes: about how many characters to train on.
      fraction: held-out share.

    Returns:
      The tokenizer.
    """
    chosen: list[tuple[int, int, str]] = []
    total = 0
    for index, document in enumerate(_train_documents(sources, fraction)):
        text = document.text[:_SAMPLE_CHARS]
        heapq.heappush(chosen, (-sources_lib.name_hash(document.name), index, text))
        total += len(text)
        while total - len(chosen[0][2]) >= sample_bytes:
            total -= len(heapq.heappop(chosen)[2])
    if not chosen:
        raise ValueError(
            f"the train split is empty at a held-out fraction of {fraction}, so there "
            "is no text to train a tokenizer on"
        )
    texts = [text for _, _, text in sorted(chosen, reverse=True)]
    return tokenizer_lib.train_bpe(texts, vocab_size)


def _train_documents(sources: Sequence[Source], fraction: float) -> Iterator[Document]:
    for source in sources:
        yield from sources_lib.split_documents(source, "train", fraction)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Build:
    """What decides the content of a corpus besides the text."""

    sources: tuple[Source, ...]
    heldout_fraction: float
    prepend_bos: bool
    append_eos: bool


def build_corpus(
    sources: Sequence[Source],
    make_tokenizer: Callable[[], Tokenizer],
    *,
    tokenizer_key: str,
    heldout_fraction: float,
    prepend_bos: bool = False,
    append_eos: bool = True,
    cache_dir: str | os.PathLike[str] | None = None,
) -> Corpus:
    """Reads and tokenises a corpus, or maps it from the cache.

    Args:
      sources: of the documents.
      make_tokenizer: called without arguments where nothing is cached.
      tokenizer_key: what decides that tokenizer, for the cache's key.
      heldout_fraction: expected share of held-out documents, in [0, 1).
      prepend_bos: puts `bos_id` in front of each document.
      append_eos: puts `eos_id` behind each document.
      cache_dir: folder for tokenised corpora, one sub-folder for each; it appears
        whole or not at all, also when several processes prepare at once.

    Returns:
      The corpus.

    Raises:
      FileNotFoundError: a source's file is missing.
      ValueError: a source is empty after its filter, or a file is not what it should
        be.
    """
    sources_lib.check_fraction(heldout_fraction)
    build = _Build(
        sources=tuple(sources),
        heldout_fraction=heldout_fraction,
        prepend_bos=prepend_bos,
        append_eos=append_eos,
    )
    if cache_dir is None:
        return _tokenise(build, make_tokenizer(), None)
    key = hashlib.sha256(
        json.dumps(
            [
                _FORMAT,
                [source.fingerprint() for source in sources],
                tokenizer_key,
                [heldout_fraction, prepend_bos, append_eos],
            ]
        ).encode()
    ).hexdigest()
    root = pathlib.Path(cache_dir)
    folder = root / key[:32]
    if folder.is_dir():
        _LOGGER.info("mapping the tokenised corpus in %s", folder)
        return _load(folder)
    root.mkdir(parents=True, exist_ok=True)
    draft = pathlib.Path(tempfile.mkdtemp(prefix=".draft-", dir=root))
    try:
        _save(_tokenise(build, make_tokenizer(), draft), draft)
        try:
            draft.rename(folder)
        except OSError:
            # Another process was first; its corpus is the same.
            if not folder.is_dir():
                raise
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return _load(folder)


def _tokenise(
    build: _Build, tokenizer: Tokenizer, folder: pathlib.Path | None
) -> Corpus:
    """Tokenises all documents, into a file where a folder is given."""
    dtype = np.dtype(np.uint16 if tokenizer.vocab_size <= 2**16 else np.int32)
    front = np.full(int(build.prepend_bos), tokenizer.bos_id, dtype)
    back = np.full(int(build.append_eos), tokenizer.eos_id, dtype)
    names: list[str] = []
    source_of: list[int] = []
    num_bytes: list[int] = []
    lengths: list[int] = []
    parts: list[np.ndarray] = []
    digest = hashlib.sha256()
    file = None if folder is None else open(folder / "tokens.bin", "wb")  # noqa: SIM115
    try:
        for index, documents in _chunks(build.sources):
            texts = [document.text for document in documents]
            encoded = tokenizer.encode_batch(texts)
            for document, ids in zip(documents, encoded, strict=True):
                names.append(document.name)
                source_of.append(index)
                num_bytes.append(len(document.text.encode()))
                tokens = np.concatenate([front, ids.astype(dtype), back])
                lengths.append(len(tokens))
                digest.update(tokens.data)
                _keep(tokens, parts, file)
            _progress(f"tokenised {len(names)} documents, {sum(lengths)} tokens")
    finally:
        if file is not None:
            file.close()
    _progress(None)
    fraction = build.heldout_fraction
    heldout = np.array([sources_lib.is_heldout(n, fraction) for n in names], bool)
    starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    digest.update(starts.data)
    digest.update(heldout.data)
    digest.update(tokenizer.fingerprint.encode())
    tokens = np.concatenate(parts) if parts else np.zeros(0, dtype)
    path = None
    if folder is not None:
        path = str(folder / "tokens.bin")
        tokens = _map_tokens(path, dtype.str)
    return Corpus(
        tokenizer=tokenizer,
        store=TokenStore(tokens=tokens, starts=starts, path=path),
        names=tuple(names),
        source=np.array(source_of, np.int32),
        heldout=heldout,
        num_bytes=np.array(num_bytes, np.int64),
        num_sources=len(build.sources),
        fingerprint=digest.hexdigest(),
    )


def _keep(tokens: np.ndarray, parts: list[np.ndarray], file: IO[bytes] | None) -> None:
    if file is None:
        parts.append(tokens)
    else:
        file.write(tokens.data)


def _chunks(sources: Sequence[Source]) -> Iterator[tuple[int, list[Document]]]:
    """Yields (source index, documents) of about `_CHUNK_CHARS` characters."""
    for index, source in enumerate(sources):
        documents: list[Document] = []
        size = 0
        for document in source:
            documents.append(document)
            size += len(document.text)
            if size >= _CHUNK_CHARS:
                yield index, documents
                documents, size = [], 0
        if documents:
            yield index, documents


def _progress(message: str | None) -> None:
    """Rewrites one line on a terminal, None clears it; silent elsewhere."""
    if sys.stderr.isatty():
        sys.stderr.write("\r\x1b[K" + (message or ""))
        sys.stderr.flush()


def _save(corpus: Corpus, folder: pathlib.Path) -> None:
    corpus.tokenizer.save(folder / "tokenizer.json")
    np.savez(
        folder / "documents.npz",
        starts=corpus.store.starts,
        source=corpus.source,
        heldout=corpus.heldout,
        num_bytes=corpus.num_bytes,
    )
    manifest = {
        "names": corpus.names,
        "num_sources": corpus.num_sources,
        "dtype": corpus.store.tokens.dtype.str,
        "fingerprint": corpus.fingerprint,
    }
    (folder / "corpus.json").write_text(json.dumps(manifest), encoding="utf-8")


def _load(folder: pathlib.Path) -> Corpus:
    manifest = json.loads((folder / "corpus.json").read_text(encoding="utf-8"))
    with np.load(folder / "documents.npz") as arrays:
        columns = {name: arrays[name] for name in arrays.files}
    path = str(folder / "tokens.bin")
    tokens = _map_tokens(path, manifest["dtype"])
    starts = columns["starts"]
    if len(tokens) != starts[-1]:
        raise ValueError(
            f"{path} holds {len(tokens)} tokens, expected {starts[-1]}; delete the "
            "folder to build it again"
        )
    return Corpus(
        tokenizer=tokenizer_lib.load_tokenizer(folder / "tokenizer.json"),
        store=TokenStore(tokens=tokens, starts=starts, path=path),
        names=tuple(manifest["names"]),
        source=columns["source"],
        heldout=columns["heldout"],
        num_bytes=columns["num_bytes"],
        num_sources=manifest["num_sources"],
        fingerprint=manifest["fingerprint"],
    )


def _map_tokens(path: str, dtype: str) -> np.ndarray:
    if not os.path.getsize(path):
        return np.zeros(0, np.dtype(dtype))
    return np.asarray(np.memmap(path, np.dtype(dtype), mode="r"))
