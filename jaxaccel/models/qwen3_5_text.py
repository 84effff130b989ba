"""Qwen3.5's language model: the mixers of Qwen3-Next under dense SwiGLU layers.

Its checkpoints keep the four input projections of Gated DeltaNet apart. The multi-axis
rotary embedding has equal positions on all axes for text, which is the plain one.
Names are those of the transformers implementation (`models/qwen3_5`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar, Self

from jaxaccel.models.hf_config import HFConfig
from jaxaccel.models.names import Rule, rule
from jaxaccel.models.qwen_hybrid import QwenHybridConfig, gdn_rest_rules
from jaxaccel.nn.mlp import MLPConfig
from jaxaccel.nn.router import MoEConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class Qwen3_5TextConfig(QwenHybridConfig):
    """A Qwen3.5 text model; the shared fields are described in `QwenHybridConfig`.

    Attributes:
      d_ff: hidden width F of the feed-forward layers.
    """

    MODEL_TYPE: ClassVar[str] = "qwen3_5_text"
    ARCHITECTURE: ClassVar[str] = "Qwen3_5ForCausalLM"

    d_ff: int

    @classmethod
    def published(cls, **changes: Any) -> Self:
        """Sizes of the 9B model, without its prediction block.

        Args:
          **changes: fields that differ.
        """
        sizes: dict[str, Any] = {
            "vocab_size": 248_320,
            "d_model": 4096,
            "num_layers": 32,
            "num_heads": 16,
            "num_kv_heads": 4,
            "head_dim": 256,
            "gdn_key_heads": 16,
            "gdn_value_heads": 32,
            "gdn_key_dim": 128,
            "gdn_value_dim": 128,
            "d_ff": 12_288,
        }
        return cls(**{**sizes, **changes})

    @classmethod
    def tiny(cls, **changes: Any) -> Self:
        """A model of 0.1 M parameters with every part, for tests; f32.

        Args:
          **changes: fields that differ.
        """
        sizes: dict[str, Any] = {
            "vocab_size": 128,
            "d_model": 32,
            "num_layers": 4,
            "num_heads": 2,
            "num_kv_heads": 1,
            "head_dim": 16,
            "gdn_key_heads": 1,
            "gdn_value_heads": 2,
            "gdn_key_dim": 16,
            "gdn_value_dim": 16,
            "d_ff": 64,
            "rope_theta": 10_000.0,
            "dtype": "float32",
        }
        return cls(**{**sizes, **changes})

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any]) -> Self:
        """Reads a parsed config.json in either spelling.

        Raises:
          ValueError: another model type, a missing key, sizes that do not fit.
          NotImplementedError: a value that this model does not compute.
        """
        hf = HFConfig(raw, model_type=cls.MODEL_TYPE)
        # The gate on the attention output is part of the layer here.
        hf.require("attn_output_gate", (True,))
        hf.require("mamba_ssm_dtype", ("float32",))
        hf.require("mtp_use_dedicated_embeddings", (False,))
        hf.require("mlp_only_layers", ([],))
        config = cls(**cls._fields_from_hf(hf), d_ff=hf.take("intermediate_size"))
        hf.report_unknown()
        return config

    def to_hf(self) -> dict[str, Any]:
        """A config.json, as transformers 5 spells it."""
        return {**self._hf_fields(), "intermediate_size": self.d_ff}

    def mlp_config(self) -> MLPConfig:
        return MLPConfig(d_ff=self.d_ff)

    @classmethod
    def _mlp_fields(cls, mlp: MLPConfig | MoEConfig) -> dict[str, Any]:
        if not isinstance(mlp, MLPConfig):
            raise ValueError(f"a {cls.MODEL_TYPE} checkpoint cannot say mlp={mlp!r}")
        return {"d_ff": mlp.d_ff}

    def _gdn_rules(self) -> tuple[Rule, ...]:
        return (
            rule("linear_attn.in_proj_qkv.weight", "mixer.qkv_proj.kernel"),
            rule("linear_attn.in_proj_z.weight", "mixer.z_proj.kernel"),
            rule("linear_attn.in_proj_b.weight", "mixer.b_proj.kernel"),
            rule("linear_attn.in_proj_a.weight", "mixer.a_proj.kernel"),
            *gdn_rest_rules(),
        )

    def _mlp_rules(self) -> tuple[Rule, ...]:
        return tuple(
            rule(f"mlp.{part}.weight", f"mlp.{part}.kernel")
            for part in ("gate_proj", "up_proj", "down_proj")
        )
