"""What a decoder consists of, as data."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp

from jaxaccel.nn.attention import AttentionConfig
from jaxaccel.nn.gated_deltanet import GatedDeltaNetConfig
from jaxaccel.nn.implementation import normalize
from jaxaccel.nn.mlp import MLPConfig
from jaxaccel.nn.router import MoEConfig


MIXERS = ("gdn", "attention", "sliding_attention")
DTYPES = ("float32", "bfloat16", "float16")
REMAT_POLICIES = ("none", "full", "dots", "save_names:NAME,...")


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """A decoder-only language model.

    Attributes:
      vocab_size: number of tokens.
      d_model: width D.
      num_layers: layers, a multiple of the pattern's length.
      pattern: mixer of each layer of one period, names of the fields below, such as
        ("gdn", "gdn", "gdn", "attention").
      attention: the mixer "attention".
      sliding_attention: the mixer "sliding_attention".
      gdn: the mixer "gdn".
      mlp: the feed-forward part of every layer, dense or a mixture of experts.
      norm_eps: of every norm.
      zero_centered_norms: norms scale by 1 + w, the Gated DeltaNet output norm apart.
      tie_embeddings: the output layer is the embedding table.
      num_mtp_layers: multi-token prediction blocks, 0 or 1.
      dtype: dtype of the computation; what must be f32 stays f32.
      param_dtype: dtype of the parameters, those that must be f32 apart.
      remat_policy: what the backward pass keeps of each layer: "none" rematerialises
        nothing, "full" all but the layer's input, "dots" all but matrix products, and
        "save_names:a,b" all but the values of these names (`attention_out`, `gdn_out`,
        `moe_hidden`, `mlp_up`, ... as the layers call them).
      implementation: implementation of the ops: `None`, one name for all, or
        op -> name.
    """

    vocab_size: int
    d_model: int
    num_layers: int
    pattern: tuple[str, ...]
    mlp: MLPConfig | MoEConfig
    attention: AttentionConfig | None = None
    sliding_attention: AttentionConfig | None = None
    gdn: GatedDeltaNetConfig | None = None
    norm_eps: float = 1e-6
    zero_centered_norms: bool = False
    tie_embeddings: bool = False
    num_mtp_layers: int = 0
    dtype: str = "float32"
    param_dtype: str = "float32"
    remat_policy: str = "none"
    implementation: Any = None

    def __post_init__(self):
        object.__setattr__(self, "pattern", tuple(self.pattern))
        object.__setattr__(self, "implementation", normalize(self.implementation))
        for name in ("vocab_size", "d_model", "num_layers"):
            if getattr(self, name) < 1:
                raise ValueError(
                    f"DecoderConfig: {name}={getattr(self, name)} must be positive"
                )
        if not self.pattern:
            raise ValueError("DecoderConfig: pattern=() must name at least one mixer")
        for name in self.pattern:
            if name not in MIXERS:
                raise ValueError(
                    f"DecoderConfig: pattern names {name!r}, allowed are "
                    f"{', '.join(map(repr, MIXERS))}"
                )
            self.mixer_config(name)
        if self.num_layers % len(self.pattern):
            raise ValueError(
                f"DecoderConfig: num_layers={self.num_layers} must be a multiple of "
                f"the pattern's {len(self.pattern)} layers"
            )
        if self.num_mtp_layers not in (0, 1):
            raise ValueError(
                f"DecoderConfig: num_mtp_layers={self.num_mtp_layers}, allowed are "
                "0 and 1"
            )
        if self.num_mtp_layers and self.attention is None:
            raise ValueError(
                "DecoderConfig: num_mtp_layers=1 needs `attention`, the mixer of the "
                "prediction block, got None"
            )
        for name in ("dtype", "param_dtype"):
            if getattr(self, name) not in DTYPES:
                raise ValueError(
                    f"DecoderConfig: {name}={getattr(self, name)!r} is unknown, "
                    f"allowed are {', '.join(map(repr, DTYPES))}"
                )
        if self.norm_eps < 0:
            raise ValueError(
                f"DecoderConfig: norm_eps={self.norm_eps} must not be negative"
            )
        kind, _, names = self.remat_policy.partition(":")
        if kind == "save_names":
            known = bool(names) and all(names.split(","))
        else:
            known = self.remat_policy in REMAT_POLICIES
        if not known:
            raise ValueError(
                f"DecoderConfig: remat_policy={self.remat_policy!r} is unknown, "
                f"allowed are {', '.join(map(repr, REMAT_POLICIES))}"
            )

    @property
    def num_periods(self) -> int:
        """How often the pattern repeats."""
        return self.num_layers // len(self.pattern)

    @property
    def layer_types(self) -> tuple[str, ...]:
        """The mixer of every layer."""
        return self.pattern * self.num_periods

    @property
    def compute_dtype(self) -> jnp.dtype:
        """`dtype` as a dtype."""
        return jnp.dtype(self.dtype)

    def mixer_config(self, name: str) -> AttentionConfig | GatedDeltaNetConfig:
        """Returns the config of a mixer of the pattern.

        Raises:
          ValueError: the field of that name is `None`.
        """
        config = getattr(self, name)
        if config is None:
            raise ValueError(
                f"DecoderConfig: the pattern has {name!r}, so the field `{name}` must "
                "be a config, got None"
            )
        return config
