"""Any model with an n-gram memory in front of some of its layers."""

from __future__ import annotations

import dataclasses
from typing import Any

from jaxaccel.data.compressed_vocab import (
    CompressedVocabulary,
    compressed_vocabulary,
)
from jaxaccel.models.config import DecoderConfig
from jaxaccel.nn.engram_config import EngramConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class WithEngramConfig:
    """A model and its memory.

    Attributes:
      model: a model's config, with `.decoder()`, such as `Qwen3NextConfig`.
      engram: the memory; `None` leaves it out, for comparisons.
    """

    model: Any
    engram: EngramConfig | None = dataclasses.field(default_factory=EngramConfig)

    @property
    def vocab_size(self) -> int:
        """Number of the model's tokens."""
        return self.model.vocab_size

    def decoder(self) -> DecoderConfig:
        """The model's decoder with the memory.

        Raises:
          ValueError: a layer of the memory is none of the model's.
        """
        return dataclasses.replace(self.model.decoder(), engram=self.engram)


def with_tokenizer(
    decoder: DecoderConfig, tokenizer: Any
) -> tuple[DecoderConfig, CompressedVocabulary | None]:
    """A decoder whose memory hashes the classes of a run's tokenizer.

    Args:
      decoder: the model; without a memory that has `compress` it stays as it is.
      tokenizer: `ByteTokenizer` or `BPETokenizer`.

    Returns:
      (the decoder's config, the map for `Decoder.memory.ngrams.set_vocabulary`, or
      `None` where the model needs none).

    Raises:
      ValueError: the config was made with another tokenizer's classes.
    """
    engram = decoder.engram
    if engram is None or not engram.compress:
        return decoder, None
    vocabulary = compressed_vocabulary(tokenizer)
    engram = dataclasses.replace(engram, pad_id=tokenizer.pad_id)
    engram = engram.with_vocabulary(vocabulary)
    return dataclasses.replace(decoder, engram=engram), vocabulary
