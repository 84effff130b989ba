"""What gin files may name, and the one entry point they bind: `Experiment`.

Model, data and training code knows nothing of gin; the names are given here.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
from typing import Protocol, runtime_checkable

import gin

from jaxaccel.cache.plan import CachePlanConfig
from jaxaccel.data.pipeline import DataConfig
from jaxaccel.decoding.sampling import SamplingConfig
from jaxaccel.models.config import DecoderConfig
from jaxaccel.training.config import TrainConfig


@runtime_checkable
class ModelConfig(Protocol):
    """What each model's config offers: its plan for the decoder."""

    def decoder(self) -> DecoderConfig: ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class SampleConfig:
    """The text that a training run writes when it ends.

    Attributes:
      prompts: beginnings to continue. Best without a blank at the end: in a trained
        tokenizer a word begins with its blank, so that a blank by itself is rare.
      max_new_tokens: length of each continuation.
      sampling: how tokens are drawn.
      seed: of the draws.
      cache: what the attention layers keep and read; `None` keeps and reads all.
    """

    prompts: tuple[str, ...] = ("def", "The")
    max_new_tokens: int = 64
    sampling: SamplingConfig = dataclasses.field(
        default_factory=lambda: SamplingConfig(temperature=0.8, top_p=0.95)
    )
    seed: int = 0
    cache: CachePlanConfig | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Experiment:
    """Everything that a training run is made from.

    Attributes:
      model: for example `@Qwen3NextConfig()`.
      data: corpus, tokenizer and packing.
      train: steps, optimizer, evaluation, checkpoints, mesh.
      sample: the text written at the end; `None` writes none.
      require: names of kernels, such as "pk_gdn_fwd", without which
        `jaxaccel bench step` fails instead of measuring something else.
    """

    model: ModelConfig
    data: DataConfig
    train: TrainConfig
    sample: SampleConfig | None = dataclasses.field(default_factory=SampleConfig)
    require: tuple[str, ...] = ()


# Configurable -> the module it lives in.
_HOME = {
    "CachePlanConfig": "jaxaccel.cache.plan",
    "DataConfig": "jaxaccel.data.pipeline",
    "DenseCacheConfig": "jaxaccel.cache.full",
    "DecodeBenchConfig": "jaxaccel.decoding.waterfall",
    "EngramConfig": "jaxaccel.nn.engram_config",
    "Experiment": __name__,
    "GptOssConfig": "jaxaccel.models.gpt_oss",
    "H2OCacheConfig": "jaxaccel.cache.h2o",
    "MeshConfig": "jaxaccel.core.sharding",
    "NemotronHConfig": "jaxaccel.models.nemotron_h",
    "OptimConfig": "jaxaccel.training.config",
    "PagedCacheConfig": "jaxaccel.cache.paged",
    "QuestCacheConfig": "jaxaccel.cache.quest",
    "Qwen3NextConfig": "jaxaccel.models.qwen3_next",
    "Qwen3_5TextConfig": "jaxaccel.models.qwen3_5_text",
    "SampleConfig": __name__,
    "SamplingConfig": "jaxaccel.decoding.sampling",
    "ShadowKVCacheConfig": "jaxaccel.cache.shadowkv",
    "SnapKVCacheConfig": "jaxaccel.cache.snapkv",
    "StdlibSource": "jaxaccel.data.sources",
    "StreamingCacheConfig": "jaxaccel.cache.streaming",
    "TextFolderSource": "jaxaccel.data.sources",
    "JsonlSource": "jaxaccel.data.sources",
    "InMemorySource": "jaxaccel.data.sources",
    "TrainConfig": "jaxaccel.training.config",
    "WithEngramConfig": "jaxaccel.models.with_engram",
}


def names() -> tuple[str, ...]:
    """The names that a gin file may use."""
    return tuple(_HOME)


@functools.cache
def register_all() -> None:
    """Gives the configurables their names; direct Python calls are not altered."""
    for name, home in _HOME.items():
        gin.register(getattr(importlib.import_module(home), name), module="jaxaccel")
