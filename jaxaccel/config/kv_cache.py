"""Decoding over filled caches for gin files: `import jaxaccel.config.kv_cache`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import gin

import jaxaccel.config.ruler  # noqa: F401  registers the model
from jaxaccel.config import registry


@dataclasses.dataclass(frozen=True, kw_only=True)
class KVCacheBenchConfig:
    """What `jaxaccel bench kv_cache --only throughput` measures.

    Attributes:
      model: a stack of attention layers, such as `@RopeDecoderConfig()`; neither its
        output layer nor sampling is part of a step.
      methods: name -> a cache of all layers, such as `@ShadowKVCacheConfig()`.
      batches: name -> numbers of rows, ascending.
      context: tokens that every row holds already.
      steps: tokens a row that one call of the device decodes.
      calls: calls that are timed, after two that are not.
      repeat: chance that a row's next token is the last one again, so that its queries
        barely move and most of its chunks are chosen again; else it is any token, with
        other chunks. What hit rate that gives is measured.
      full_layers: layers of the model that the stack is cut from, to tell whether all
        of them would fit.
      full_weight_bytes: bytes of all its weights.
      device_bytes: of the card that they would have to fit on.
      seed: of all that is drawn.
    """

    model: Any
    methods: Mapping[str, Any]
    batches: Mapping[str, tuple[int, ...]]
    context: int = 122_880
    steps: int = 16
    calls: int = 3
    repeat: float = 0.7
    full_layers: int = 32
    full_weight_bytes: float = 16.1e9
    device_bytes: float = 141e9
    seed: int = 0

    def __post_init__(self):
        for name in ("context", "steps", "calls", "full_layers"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be positive")
        if not 0 <= self.repeat <= 1:
            raise ValueError(f"repeat={self.repeat} is a chance, allowed are 0 to 1")
        if set(self.methods) != set(self.batches) or not self.methods:
            raise ValueError(
                f"methods={tuple(self.methods)} and batches={tuple(self.batches)} must "
                "name the same"
            )
        for name, batches in self.batches.items():
            if not batches or list(batches) != sorted(set(batches)) or batches[0] < 1:
                raise ValueError(
                    f"batches of {name!r} are {batches}, must ascend from 1 or more"
                )
        pattern = set(self.model.decoder().pattern)
        if pattern != {"attention"}:
            raise ValueError(
                f"model has layers {sorted(pattern)}, allowed is 'attention'"
            )

    @property
    def room(self) -> int:
        """Tokens a row may hold."""
        return self.context + self.steps * (self.calls + 3)


if "KVCacheBenchConfig" not in registry.names():
    gin.register(KVCacheBenchConfig, module="jaxaccel")
