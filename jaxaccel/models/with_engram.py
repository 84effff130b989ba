"""Any model with an n-gram memory in front of some of its layers."""

from __future__ import annotations

import dataclasses
from typing import Any

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
