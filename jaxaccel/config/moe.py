"""Mixtures of experts for gin files that say `import jaxaccel.config.moe`.

`@MoEConfig()` is the layer's own config. `LatentHybridConfig` is a language model with
it, `MoEBenchConfig` one layer that `jaxaccel bench moe` measures.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import gin

from jaxaccel.config import registry
from jaxaccel.models.config import DecoderConfig
from jaxaccel.nn.attention import AttentionConfig
from jaxaccel.nn.gated_deltanet import GatedDeltaNetConfig
from jaxaccel.nn.rope import RopeConfig
from jaxaccel.nn.router import MoEConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class LatentHybridConfig:
    """Gated DeltaNet and attention layers, each with a mixture of any config.

    Attributes:
      vocab_size: number of tokens.
      d_model: width D.
      num_layers: a multiple of the pattern's length.
      moe: of every layer, with or without a latent.
      num_heads, num_kv_heads, head_dim: of gated attention.
      gdn_heads, gdn_head_dim: key and value heads of Gated DeltaNet, and their width.
      pattern: the mixers of one period, "gdn" and "attention".
      rope_theta: of attention's rotary embedding, on a quarter of a head.
      tie_embeddings, dtype, param_dtype, remat_policy, implementation: as in
        `DecoderConfig`.
    """

    vocab_size: int
    d_model: int
    num_layers: int
    moe: MoEConfig
    num_heads: int
    num_kv_heads: int
    head_dim: int
    gdn_heads: int
    gdn_head_dim: int
    pattern: tuple[str, ...] = ("gdn", "gdn", "gdn", "attention")
    rope_theta: float = 500_000.0
    tie_embeddings: bool = True
    dtype: str = "bfloat16"
    param_dtype: str = "float32"
    remat_policy: str = "none"
    implementation: Any = None

    def __post_init__(self):
        self.decoder()  # the parts check themselves and name what is wrong

    def decoder(self) -> DecoderConfig:
        """The model as data that `Decoder` builds.

        Raises:
          ValueError: sizes do not fit together.
        """
        return DecoderConfig(
            vocab_size=self.vocab_size,
            d_model=self.d_model,
            num_layers=self.num_layers,
            pattern=self.pattern,
            mlp=self.moe,
            attention=AttentionConfig(
                num_heads=self.num_heads,
                num_kv_heads=self.num_kv_heads,
                head_dim=self.head_dim,
                rope=RopeConfig(theta=self.rope_theta, fraction=0.25),
                qk_norm=True,
                output_gate=True,
            ),
            gdn=GatedDeltaNetConfig(
                num_key_heads=self.gdn_heads,
                num_value_heads=self.gdn_heads,
                key_dim=self.gdn_head_dim,
                value_dim=self.gdn_head_dim,
            ),
            zero_centered_norms=True,
            tie_embeddings=self.tie_embeddings,
            dtype=self.dtype,
            param_dtype=self.param_dtype,
            remat_policy=self.remat_policy,
            implementation=self.implementation,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class MoEBenchConfig:
    """One layer of a model, for `jaxaccel bench moe`.

    Attributes:
      moe: the mixture.
      d_model: width D.
      tokens: of a call.
      dtype: of the computation; parameters have it too, the router's are f32.
    """

    moe: MoEConfig
    d_model: int
    tokens: int = 8192
    dtype: str = "bfloat16"

    def __post_init__(self):
        for name in ("d_model", "tokens"):
            if getattr(self, name) < 1:
                raise ValueError(
                    f"MoEBenchConfig: {name}={getattr(self, name)} must be positive"
                )

    @property
    def d_expert(self) -> int:
        """Width in which the routed experts work."""
        return self.moe.d_latent or self.d_model

    @property
    def matrices(self) -> int:
        """Of [d_expert, F] in an expert."""
        return 3 if self.moe.activation == "swiglu" else 2

    @property
    def routed_weights(self) -> int:
        """Numbers in all experts' matrices."""
        return self.moe.num_experts * self.matrices * self.d_expert * self.moe.d_ff

    @property
    def routed_flops(self) -> int:
        """Operations of the routed experts in a forward pass."""
        rows = self.tokens * self.moe.top_k
        return 2 * rows * self.matrices * self.d_expert * self.moe.d_ff

    @property
    def other_flops(self) -> int:
        """Operations of router, latent projections and shared expert, forward."""
        moe = self.moe
        token = moe.num_experts * self.d_model
        token += 2 * moe.d_latent * self.d_model
        token += self.matrices * moe.shared_d_ff * self.d_model
        return 2 * self.tokens * token


for _configurable in (LatentHybridConfig, MoEBenchConfig, MoEConfig):
    if _configurable.__name__ not in registry.names():
        gin.register(_configurable, module="jaxaccel")
