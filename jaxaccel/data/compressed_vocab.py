"""Tokens that mean the same for a lookup: case, accents and blanks aside.

Engram (arXiv 2601.07372) hashes classes of tokens in place of tokens. The rules are
those of the published checkpoints, from the standard library's Unicode tables.
"""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import json
import os
import pathlib
import re
import unicodedata
from collections.abc import Callable
from typing import Any

import numpy as np


_FORMAT = "engram-vocabulary-1"
# Unicode's White_Space; `str.strip` without arguments also takes U+001C to U+001F.
_WHITE_SPACE = "".join(
    map(
        chr,
        (
            *(*range(0x9, 0xE), 0x20, 0x85, 0xA0, 0x1680),
            *(*range(0x2000, 0x200B), 0x2028, 0x2029, 0x202F, 0x205F, 0x3000),
        ),
    )
)
_BLANKS = re.compile("[ \t\r\n]+")
_MARKS = frozenset({"Mn", "Mc", "Me"})
_ONE_BLANK = "\ue000"
_REPLACEMENT = "\ufffd"


def normalize_token(text: str) -> str:
    """The form that tokens of one class share.

    NFKC, NFD, marks dropped, each character in lower case, runs of blanks made one,
    stripped; a lone blank stays.

    Args:
      text: what a token decodes to.

    Returns:
      The form; it may be empty.
    """
    text = unicodedata.normalize("NFD", unicodedata.normalize("NFKC", text))
    text = "".join(c for c in text if unicodedata.category(c) not in _MARKS)
    # Character by character: a sigma at the end of a word is no other letter here.
    text = "".join(c.lower() for c in text)
    text = _BLANKS.sub(" ", text)
    if text == " ":
        text = _ONE_BLANK
    return text.strip(_WHITE_SPACE).replace(_ONE_BLANK, " ")


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class CompressedVocabulary:
    """Which class each token belongs to.

    Attributes:
      token_map: i32[V], class of each token, numbered by first appearance.
      size: V', number of classes; multipliers of a hash depend on it.
      tokenizer: fingerprint of the tokenizer.
      unicode_version: of the tables that made the map.
    """

    token_map: np.ndarray
    size: int
    tokenizer: str
    unicode_version: str

    @property
    def fingerprint(self) -> str:
        """sha256 of the map, hex."""
        return hashlib.sha256(self.token_map.astype("<i4").tobytes()).hexdigest()

    def compressed(self, token: int) -> int:
        """The class of one token.

        Raises:
          ValueError: there is no such token.
        """
        if not 0 <= token < len(self.token_map):
            raise ValueError(
                f"token id {token} is outside, allowed are 0 to "
                f"{len(self.token_map) - 1}"
            )
        return int(self.token_map[token])

    def check(self, *, tokenizer: str | None = None, size: int | None = None) -> None:
        """Refuses a map that other ids were made with.

        Args:
          tokenizer: fingerprint of the tokenizer at hand.
          size: V' that a hash layout was drawn for.

        Raises:
          ValueError: one of them is another.
        """
        if tokenizer is not None and tokenizer != self.tokenizer:
            raise ValueError(
                f"this map is of tokenizer {self.tokenizer[:16]}, the one at hand is "
                f"{tokenizer[:16]}: every row number would be wrong"
            )
        if size is not None and size != self.size:
            raise ValueError(
                f"this map has {self.size} classes, the hash layout was drawn for "
                f"{size}: every row number would be wrong"
            )

    def save(self, path: str | os.PathLike[str], *, layout: Any = None) -> None:
        """Writes the artifact: one JSON file.

        Args:
          path: of the file.
          layout: a `HashLayout` to keep beside the map.

        Raises:
          ValueError: the layout is for another number of classes.
        """
        if layout is not None:
            self.check(size=layout.vocab_size)
        data = {
            "format": _FORMAT,
            "tokenizer": self.tokenizer,
            "unicode_version": self.unicode_version,
            "size": self.size,
            "fingerprint": self.fingerprint,
            "token_map": base64.b64encode(
                self.token_map.astype("<i4").tobytes()
            ).decode(),
            "layout": None if layout is None else layout.to_json(),
        }
        pathlib.Path(path).write_text(json.dumps(data, indent=1), encoding="utf-8")


def load_compressed_vocabulary(
    path: str | os.PathLike[str],
    *,
    tokenizer: str | None = None,
) -> tuple[CompressedVocabulary, Any]:
    """Reads what `CompressedVocabulary.save` wrote.

    Args:
      path: of the file.
      tokenizer: fingerprint of the tokenizer at hand.

    Returns:
      (the map, the JSON of its hash layout for `HashLayout.from_json`, or `None`).

    Raises:
      FileNotFoundError: there is no such file.
      ValueError: the file is something else, damaged, or of another tokenizer.
    """
    try:
        data = json.loads(pathlib.Path(path).read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is no compressed vocabulary: {error}") from error
    if not isinstance(data, dict) or data.get("format") != _FORMAT:
        raise ValueError(f"{path} is no compressed vocabulary of format {_FORMAT!r}")
    raw = base64.b64decode(data["token_map"])
    vocabulary = CompressedVocabulary(
        token_map=np.frombuffer(raw, "<i4").astype(np.int32),
        size=data["size"],
        tokenizer=data["tokenizer"],
        unicode_version=data["unicode_version"],
    )
    if vocabulary.fingerprint != data["fingerprint"]:
        raise ValueError(
            f"{path} is damaged: its map hashes to {vocabulary.fingerprint[:16]}, it "
            f"says {data['fingerprint'][:16]}"
        )
    vocabulary.check(tokenizer=tokenizer)
    return vocabulary, data["layout"]


def compress_vocabulary(
    num_tokens: int,
    *,
    decode: Callable[[int], str],
    token_string: Callable[[int], str],
    tokenizer: str,
) -> CompressedVocabulary:
    """Builds the map of any tokenizer.

    Args:
      num_tokens: ids, added tokens among them.
      decode: text of one id, special tokens and blanks kept.
      token_string: the vocabulary's own entry of an id; it stands for tokens that are
        no text by themselves, parts of a character.
      tokenizer: fingerprint of the tokenizer.

    Returns:
      The map.
    """
    classes: dict[str, int] = {}
    token_map = np.empty(num_tokens, np.int32)
    for token in range(num_tokens):
        text = decode(token)
        if _REPLACEMENT in text:
            key = token_string(token)
        else:
            key = normalize_token(text) or text
        token_map[token] = classes.setdefault(key, len(classes))
    return CompressedVocabulary(
        token_map=token_map,
        size=len(classes),
        tokenizer=tokenizer,
        unicode_version=unicodedata.unidata_version,
    )


def compressed_vocabulary(tokenizer: Any) -> CompressedVocabulary:
    """The map of a tokenizer of `jaxaccel.data.tokenizer`.

    Its special ids have no text, and each is a class of its own.

    Args:
      tokenizer: `ByteTokenizer` or `BPETokenizer`.

    Returns:
      The map.
    """
    specials = {tokenizer.pad_id, tokenizer.bos_id, tokenizer.eos_id}

    def decode(token: int) -> str:
        # No text holds a noncharacter, so that these keys are nobody else's.
        return f"\ufffe{token}" if token in specials else tokenizer.decode([token])

    def token_string(token: int) -> str:
        return "\ufffe" + tokenizer.decode_bytes([token]).hex()

    return compress_vocabulary(
        tokenizer.vocab_size,
        decode=decode,
        token_string=token_string,
        tokenizer=tokenizer.fingerprint,
    )
