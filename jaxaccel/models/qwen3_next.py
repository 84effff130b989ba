"""Qwen3-Next: three Gated DeltaNet layers to one gated attention layer, with experts.

Sizes are those of the published 80B-A3B model, names those of its checkpoints (read in
the transformers implementation, `models/qwen3_next`; the prediction block's names are
Megatron-Bridge's and vLLM's). The layer is Gated DeltaNet's (arXiv 2412.06464).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar, Self

from jaxaccel.models.hf_config import HFConfig
from jaxaccel.models.names import (
    Grouped,
    Part,
    Rule,
    Transposed,
    rule,
)
from jaxaccel.models.qwen_hybrid import QwenHybridConfig, gdn_rest_rules
from jaxaccel.nn.mlp import MLPConfig
from jaxaccel.nn.router import MoEConfig


_MOE_KEYS = {
    "num_experts": "num_experts",
    "experts_per_token": "num_experts_per_tok",
    "d_expert": "moe_intermediate_size",
    "d_shared_expert": "shared_expert_intermediate_size",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Qwen3NextConfig(QwenHybridConfig):
    """A Qwen3-Next model; the shared fields are described in `QwenHybridConfig`.

    Attributes:
      num_experts: experts E of every layer.
      experts_per_token: experts k that a token visits.
      d_expert: hidden width F of an expert.
      d_shared_expert: hidden width of the expert that every token visits.
      normalize_expert_weights: divide the k chosen probabilities by their sum.
      balance_loss_coef: coefficient of the router's balance loss.
      sequence_balance_loss_coef: the same within each row of the batch.
      global_balance_loss_coef: the same over all micro-batches of a step.
      balance_counts: what those losses count, see `MoEConfig`.
      z_loss_coef: coefficient of the router's z loss.
      router_bias_update_rate: step of a selection bias steered by load; 0 has none.
        A model with it cannot be saved under the names of this family.
      expert_axis, expert_exchange, expert_capacity: where experts lie and how tokens
        get there, see `MoEConfig`.
    """

    MODEL_TYPE: ClassVar[str] = "qwen3_next"
    ARCHITECTURE: ClassVar[str] = "Qwen3NextForCausalLM"

    num_experts: int
    experts_per_token: int
    d_expert: int
    d_shared_expert: int
    normalize_expert_weights: bool = True
    balance_loss_coef: float = 0.001
    sequence_balance_loss_coef: float = 0.0
    global_balance_loss_coef: float = 0.0
    balance_counts: str = "selected"
    z_loss_coef: float = 0.0
    router_bias_update_rate: float = 0.0
    expert_axis: str = ""
    expert_exchange: str = "auto"
    expert_capacity: float = 0.0

    @classmethod
    def published(cls, **changes: Any) -> Self:
        """Sizes of 80B-A3B, without its prediction block (`num_mtp_layers=1` adds it).

        Args:
          **changes: fields that differ.
        """
        sizes: dict[str, Any] = {
            "vocab_size": 151_936,
            "d_model": 2048,
            "num_layers": 48,
            "num_heads": 16,
            "num_kv_heads": 2,
            "head_dim": 256,
            "gdn_key_heads": 16,
            "gdn_value_heads": 32,
            "gdn_key_dim": 128,
            "gdn_value_dim": 128,
            "num_experts": 512,
            "experts_per_token": 10,
            "d_expert": 512,
            "d_shared_expert": 512,
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
            "num_experts": 4,
            "experts_per_token": 2,
            "d_expert": 16,
            "d_shared_expert": 16,
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
        hf.require("decoder_sparse_step", (1,))
        hf.require("mlp_only_layers", ([],))
        hf.take("intermediate_size", None)  # of dense layers, of which there are none
        config = cls(
            **cls._fields_from_hf(hf),
            **{field: hf.take(key) for field, key in _MOE_KEYS.items()},
            normalize_expert_weights=hf.take("norm_topk_prob", True),
            balance_loss_coef=float(hf.take("router_aux_loss_coef", 0.001)),
        )
        hf.report_unknown()
        return config

    def to_hf(self) -> dict[str, Any]:
        """A config.json, as transformers 5 spells it."""
        return {
            **self._hf_fields(),
            **{key: getattr(self, field) for field, key in _MOE_KEYS.items()},
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "norm_topk_prob": self.normalize_expert_weights,
            "router_aux_loss_coef": self.balance_loss_coef,
        }

    def mlp_config(self) -> MoEConfig:
        return MoEConfig(
            num_experts=self.num_experts,
            top_k=self.experts_per_token,
            d_ff=self.d_expert,
            normalize_weights=self.normalize_expert_weights,
            shared_d_ff=self.d_shared_expert,
            shared_gate=True,
            balance_loss_coef=self.balance_loss_coef,
            sequence_balance_loss_coef=self.sequence_balance_loss_coef,
            global_balance_loss_coef=self.global_balance_loss_coef,
            balance_counts=self.balance_counts,
            z_loss_coef=self.z_loss_coef,
            bias_update_rate=self.router_bias_update_rate,
            expert_axis=self.expert_axis,
            expert_exchange=self.expert_exchange,
            expert_capacity=self.expert_capacity,
        )

    @classmethod
    def _mlp_fields(cls, mlp: MLPConfig | MoEConfig) -> dict[str, Any]:
        if not isinstance(mlp, MoEConfig):
            raise ValueError(f"a {cls.MODEL_TYPE} checkpoint cannot say mlp={mlp!r}")
        return {
            "num_experts": mlp.num_experts,
            "experts_per_token": mlp.top_k,
            "d_expert": mlp.d_ff,
            "d_shared_expert": mlp.shared_d_ff,
            "normalize_expert_weights": mlp.normalize_weights,
            "balance_loss_coef": mlp.balance_loss_coef,
            "sequence_balance_loss_coef": mlp.sequence_balance_loss_coef,
            "global_balance_loss_coef": mlp.global_balance_loss_coef,
            "balance_counts": mlp.balance_counts,
            "z_loss_coef": mlp.z_loss_coef,
            "router_bias_update_rate": mlp.bias_update_rate,
            "expert_axis": mlp.expert_axis,
            "expert_exchange": mlp.expert_exchange,
            "expert_capacity": mlp.expert_capacity,
        }

    def _gdn_rules(self) -> tuple[Rule, ...]:
        ratio = self.gdn_value_heads // self.gdn_key_heads
        d_key, d_value = self.gdn_key_dim, ratio * self.gdn_value_dim
        # Stored per key head [q | k | v | z]; ours is flat [q | k | v], z apart, so
        # that the convolution reads its input without a strided gather.
        return (
            rule(
                "linear_attn.in_proj_qkvz.weight",
                "mixer.qkv_proj.kernel",
                "mixer.z_proj.kernel",
                layout=Grouped(
                    groups=self.gdn_key_heads,
                    widths=(d_key, d_key, d_value, d_value),
                    pieces=((0, 1, 2), (3,)),
                ),
            ),
            rule(
                "linear_attn.in_proj_ba.weight",
                "mixer.b_proj.kernel",
                "mixer.a_proj.kernel",
                layout=Grouped(
                    groups=self.gdn_key_heads,
                    widths=(ratio, ratio),
                    pieces=((0,), (1,)),
                ),
            ),
            *gdn_rest_rules(),
        )

    def _mlp_rules(self) -> tuple[Rule, ...]:
        width, experts = self.d_expert, self.num_experts

        def expert(name: str, part: Part) -> Rule:
            return Rule(
                f"mlp.experts.{{expert}}.{name}.weight", (part,), Transposed(), experts
            )

        return (
            rule("mlp.gate.weight", "mlp.router.kernel"),
            expert("gate_proj", Part("mlp.w_in", (0, width))),
            expert("up_proj", Part("mlp.w_in", (width, 2 * width))),
            expert("down_proj", Part("mlp.w_out")),
            rule("mlp.shared_expert.gate_proj.weight", "mlp.shared.gate_proj.kernel"),
            rule("mlp.shared_expert.up_proj.weight", "mlp.shared.up_proj.kernel"),
            rule("mlp.shared_expert.down_proj.weight", "mlp.shared.down_proj.kernel"),
            rule("mlp.shared_expert_gate.weight", "mlp.shared_gate.kernel"),
        )
