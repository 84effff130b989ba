"""Byte tokenizer and a byte-level BPE that a run trains on its own text.

Both are lossless on any text. The special ids stand behind the text's ids and are never
produced by `encode`: text that happens to spell a special token stays text.
"""

from __future__ import annotations

import hashlib
import json
import os
import pathlib
import sys
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

import numpy as np


_FORMAT = "jaxaccel-tokenizer-1"
_SPECIALS = ("pad", "bos", "eos")


class _Tokenizer:
    """What both tokenizers share: ids of text in front, special ids behind.

    Attributes:
      vocab_size: number of ids, specials included.
      pad_id: id of padding in decoded output; batches pad with zeros and segment 0.
      bos_id: id in front of a document, where asked for.
      eos_id: id behind a document.
      fingerprint: sha256 of everything that decides the encoding, hex.
    """

    kind: ClassVar[str]

    def __init__(self, pieces: Sequence[bytes], description: dict[str, Any]):
        self._pieces = [*pieces, *(b"" for _ in _SPECIALS)]
        self._description = {"format": _FORMAT, "kind": self.kind, **description}
        self.vocab_size = len(self._pieces)
        self.pad_id, self.bos_id, self.eos_id = range(len(pieces), self.vocab_size)
        canonical = json.dumps(self._description, sort_keys=True)
        self.fingerprint = hashlib.sha256(canonical.encode()).hexdigest()

    def encode(self, text: str) -> np.ndarray:
        """Returns i32[n], the ids of a text without special ids."""
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Returns the i32[n] ids of each text; much faster than one by one."""
        raise NotImplementedError

    def decode_bytes(self, ids: Iterable[int] | np.ndarray) -> bytes:
        """Returns the UTF-8 bytes that ids stand for; special ids stand for none.

        Raises:
          ValueError: an id is negative or not below `vocab_size`.
        """
        array = np.asarray(ids if isinstance(ids, np.ndarray) else list(ids), np.int64)
        outside = (array < 0) | (array >= self.vocab_size)
        if outside.any():
            raise ValueError(
                f"token id {array[outside][0]} is not in [0, {self.vocab_size})"
            )
        return b"".join(map(self._pieces.__getitem__, array.tolist()))

    def decode(self, ids: Iterable[int] | np.ndarray) -> str:
        """Returns the text of ids; bytes that are not UTF-8 become U+FFFD."""
        return self.decode_bytes(ids).decode("utf-8", "replace")

    def token_bytes(self) -> np.ndarray:
        """Returns i32[vocab_size], bytes of UTF-8 that each id stands for."""
        return np.array([len(piece) for piece in self._pieces], np.int32)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the tokenizer as one JSON file."""
        text = json.dumps(self._description, ensure_ascii=False, sort_keys=True)
        pathlib.Path(path).write_text(text, encoding="utf-8")


class ByteTokenizer(_Tokenizer):
    """The bytes of UTF-8 as ids 0 to 255, then pad, bos, eos."""

    kind = "byte"

    def __init__(self):
        super().__init__([bytes([value]) for value in range(256)], {})

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        return [
            np.frombuffer(text.encode(), np.uint8).astype(np.int32) for text in texts
        ]


class BPETokenizer(_Tokenizer):
    """Byte-level byte-pair encoding (Radford et al. 2019), made by `train_bpe`."""

    kind = "bpe"

    def __init__(self, model: dict[str, Any]):
        """Builds the tokenizer from the JSON object of the `tokenizers` library."""
        library = _library()
        self._encoder = library.Tokenizer.from_str(json.dumps(model))
        byte_of = {character: byte for byte, character in enumerate(_byte_characters())}
        by_id = sorted(model["model"]["vocab"].items(), key=lambda item: item[1])
        if [number for _, number in by_id] != list(range(len(by_id))):
            raise ValueError("the ids of a BPE vocabulary must be 0, 1, 2, ...")
        pieces = [bytes(byte_of[each] for each in piece) for piece, _ in by_id]
        super().__init__(pieces, {"model": model})

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        encoded = self._encoder.encode_batch_fast(texts, add_special_tokens=False)
        return [np.array(encoding.ids, np.int32) for encoding in encoded]


def train_bpe(
    texts: Iterable[str], vocab_size: int, *, min_frequency: int = 2
) -> BPETokenizer:
    """Trains a byte-level BPE; the same texts give the same tokenizer.

    Args:
      texts: training text; a few million characters are enough for 4,096 ids.
      vocab_size: number of ids wanted, specials included; little text gives fewer.
      min_frequency: how often a pair must occur to be merged.

    Returns:
      The tokenizer.

    Raises:
      ValueError: `vocab_size` cannot hold the 256 bytes and the specials, or there is
        no text.
    """
    smallest = 256 + len(_SPECIALS)
    if vocab_size < smallest:
        raise ValueError(f"vocab_size is {vocab_size}, must be at least {smallest}")
    texts = list(texts)
    if not any(texts):
        raise ValueError("cannot train a tokenizer on no text")
    library = _library()
    encoder = library.Tokenizer(library.models.BPE())
    encoder.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    encoder.decoder = library.decoders.ByteLevel()
    trainer = library.trainers.BpeTrainer(
        vocab_size=vocab_size - len(_SPECIALS),
        min_frequency=min_frequency,
        initial_alphabet=_byte_characters(),
        show_progress=sys.stderr.isatty(),
    )
    encoder.train_from_iterator(texts, trainer)
    return BPETokenizer(json.loads(encoder.to_str()))


def load_tokenizer(path: str | os.PathLike[str]) -> ByteTokenizer | BPETokenizer:
    """Loads what `save` wrote.

    Raises:
      FileNotFoundError: there is no such file.
      ValueError: the file is not a tokenizer of this library.
    """
    try:
        description = json.loads(pathlib.Path(path).read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not a tokenizer file: {error}") from error
    if not isinstance(description, dict) or description.get("format") != _FORMAT:
        raise ValueError(f"{path} is not a tokenizer file of format {_FORMAT!r}")
    if description["kind"] == "byte":
        return ByteTokenizer()
    if description["kind"] == "bpe":
        return BPETokenizer(description["model"])
    raise ValueError(
        f"{path} holds a tokenizer of kind {description['kind']!r}, allowed are "
        "'bpe' and 'byte'"
    )


def library_version() -> str:
    """Version of the `tokenizers` library, part of the key of a cached corpus."""
    return _library().__version__


def _library() -> Any:
    """Imports `tokenizers` on first use."""
    # Said outright, the library encodes on all cores and does not warn at each fork.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    import tokenizers

    return tokenizers


def _byte_characters() -> list[str]:
    """The printable character that stands for each byte in a byte-level vocabulary.

    Printable Latin-1 stands for itself; the rest moves to 256 and up in order.
    """
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    moved = iter(range(256, 512))
    return [chr(byte if byte in printable else next(moved)) for byte in range(256)]
