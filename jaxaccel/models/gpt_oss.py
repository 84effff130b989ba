"""gpt-oss: attention with sinks, every other layer in a window, and clamped experts.

Sizes are those of the published 20B and 120B models, names those of their checkpoints
(read in the transformers implementation, `models/gpt_oss`). The published files keep
the experts in MXFP4; they are read as numbers, and saved as numbers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar, Self

from jaxaccel.models.config import DecoderConfig
from jaxaccel.models.hf_config import (
    HFConfig,
    check_kept,
    shortest_period,
    stored_layer_types,
)
from jaxaccel.models.names import Interleaved, NameTable, Rule, Same, rule
from jaxaccel.nn.attention import AttentionConfig
from jaxaccel.nn.rope import RopeConfig, YarnScaling
from jaxaccel.nn.router import MoEConfig


_PATTERN = ("sliding_attention", "attention")
_LAYER_WORDS = {
    "sliding_attention": "sliding_attention",
    "full_attention": "attention",
}
# Our field -> the key of config.json, for the plain integers.
_SIZE_KEYS = {
    "vocab_size": "vocab_size",
    "d_model": "hidden_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "window": "sliding_window",
    "num_experts": "num_local_experts",
    "experts_per_token": "num_experts_per_tok",
    "d_expert": "intermediate_size",
}
# Fields of training and placement that we share with `MoEConfig`.
_MOE_FIELDS = (
    *("balance_loss_coef", "sequence_balance_loss_coef", "balance_counts"),
    *("z_loss_coef", "expert_axis", "expert_exchange", "expert_capacity"),
)
# What the two published models differ in.
_PUBLISHED: Mapping[str, Mapping[str, int]] = {
    "20b": {"num_layers": 24, "num_experts": 32},
    "120b": {"num_layers": 36, "num_experts": 128},
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class GptOssConfig:
    """A gpt-oss model (arXiv 2508.10925).

    Attributes:
      vocab_size: number of tokens.
      d_model: width D.
      num_layers: layers, a multiple of the pattern's length.
      pattern: mixers of one period, of "sliding_attention" and "attention".
      num_heads: query heads H.
      num_kv_heads: key and value heads G.
      head_dim: K.
      window: tokens that a query of "sliding_attention" sees, itself among them.
      rope_theta: base of the rotary embedding.
      rope_factor: how many times longer than `rope_original_length` contexts get, by
        YaRN; 1 scales nothing.
      rope_original_length: context length of the unscaled training.
      rope_beta_fast: see `YarnScaling`, and so the next two.
      rope_beta_slow: dimensions with fewer rotations are slowed by the factor.
      rope_truncate: round the bounds of the ramp between the two.
      num_experts: experts E of every layer.
      experts_per_token: experts k that a token visits.
      d_expert: hidden width F of an expert.
      swiglu_limit: bound of the experts' gates and linear parts.
      balance_loss_coef: coefficient of the router's balance loss.
      sequence_balance_loss_coef: the same within each row of the batch.
      balance_counts: what those losses count, see `MoEConfig`.
      z_loss_coef: coefficient of the router's z loss.
      expert_axis: mesh axis over which experts lie, see `MoEConfig`, and so the next
        two; a checkpoint has none of the three.
      expert_exchange: how tokens get to their experts' devices.
      expert_capacity: rows that a device has room for.
      norm_eps: of every norm.
      tie_embeddings: the output layer is the embedding table.
      dtype: dtype of the computation.
      param_dtype: dtype of the parameters that need not be f32.
      remat_policy: what the backward pass keeps, see `DecoderConfig`.
      implementation: of the ops: `None`, one name, or op -> name.
    """

    MODEL_TYPE: ClassVar[str] = "gpt_oss"
    ARCHITECTURE: ClassVar[str] = "GptOssForCausalLM"

    vocab_size: int
    d_model: int
    num_layers: int
    pattern: tuple[str, ...] = _PATTERN
    num_heads: int
    num_kv_heads: int
    head_dim: int
    window: int = 128
    rope_theta: float = 150_000.0
    rope_factor: float = 32.0
    rope_original_length: int = 4096
    rope_beta_fast: float = 32.0
    rope_beta_slow: float = 1.0
    rope_truncate: bool = False
    num_experts: int
    experts_per_token: int
    d_expert: int
    swiglu_limit: float = 7.0
    balance_loss_coef: float = 0.001
    sequence_balance_loss_coef: float = 0.0
    balance_counts: str = "selected"
    z_loss_coef: float = 0.0
    expert_axis: str = ""
    expert_exchange: str = "auto"
    expert_capacity: float = 0.0
    norm_eps: float = 1e-5
    tie_embeddings: bool = False
    dtype: str = "bfloat16"
    param_dtype: str = "float32"
    remat_policy: str = "none"
    implementation: Any = None

    def __post_init__(self):
        object.__setattr__(self, "pattern", tuple(self.pattern))
        wrong = [kind for kind in self.pattern if kind not in _PATTERN]
        if wrong:
            raise ValueError(f"pattern has {wrong}, allowed are {list(_PATTERN)}")
        self.decoder()  # the parts check themselves and name what is wrong

    @classmethod
    def published(cls, size: str = "20b", **changes: Any) -> Self:
        """Sizes of a published model.

        Args:
          size: "20b" or "120b".
          **changes: fields that differ.

        Raises:
          ValueError: there is no such size.
        """
        if size not in _PUBLISHED:
            raise ValueError(f"size={size!r}, allowed are {', '.join(_PUBLISHED)}")
        sizes: dict[str, Any] = {
            "vocab_size": 201_088,
            "d_model": 2880,
            "num_heads": 64,
            "num_kv_heads": 8,
            "head_dim": 64,
            "experts_per_token": 4,
            "d_expert": 2880,
            **_PUBLISHED[size],
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
            "num_heads": 4,
            "num_kv_heads": 2,
            "head_dim": 16,
            "window": 8,
            "rope_theta": 10_000.0,
            "rope_factor": 4.0,
            "rope_original_length": 64,
            "num_experts": 4,
            "experts_per_token": 2,
            "d_expert": 32,
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
        hf.require("attention_bias", (True,))
        hf.require("attention_dropout", (0, 0.0))
        hf.require("hidden_act", ("silu",))
        hf.require("swiglu_alpha", (1.702,))
        quantized = hf.take("quantization_config", {}).get("quant_method", "mxfp4")
        if quantized != "mxfp4":
            raise NotImplementedError(
                f"config.json has quant_method={quantized!r}, supported: ['mxfp4']"
            )
        sizes = {field: hf.take(key) for field, key in _SIZE_KEYS.items()}
        hf.require("experts_per_token", (sizes["experts_per_token"],))  # said twice
        theta, scaling = hf.yarn(default_theta=150_000.0)
        kinds = hf.layer_types(sizes["num_layers"], _LAYER_WORDS)
        dtype = hf.dtype()
        config = cls(
            **sizes,
            **_yarn_fields(scaling),
            pattern=_PATTERN if kinds is None else shortest_period(kinds),
            rope_theta=theta,
            swiglu_limit=float(hf.take("swiglu_limit", 7.0)),
            balance_loss_coef=float(hf.take("router_aux_loss_coef", 0.9)),
            norm_eps=float(hf.take("rms_norm_eps", 1e-5)),
            tie_embeddings=hf.take("tie_word_embeddings", False),
            dtype=dtype,
            param_dtype=dtype,
        )
        hf.report_unknown()
        return config

    def to_hf(self) -> dict[str, Any]:
        """A config.json, as transformers 5 spells it."""
        rope: dict[str, Any] = {"rope_theta": self.rope_theta, "rope_type": "default"}
        if self.rope_factor != 1:
            rope |= {
                "rope_type": "yarn",
                "factor": self.rope_factor,
                "original_max_position_embeddings": self.rope_original_length,
                "beta_fast": self.rope_beta_fast,
                "beta_slow": self.rope_beta_slow,
                "truncate": self.rope_truncate,
            }
        return {
            "architectures": [self.ARCHITECTURE],
            "model_type": self.MODEL_TYPE,
            **{key: getattr(self, field) for field, key in _SIZE_KEYS.items()},
            "attention_bias": True,
            "attention_dropout": 0.0,
            "dtype": self.param_dtype,
            "hidden_act": "silu",
            "layer_types": stored_layer_types(self.pattern, self.num_layers),
            "max_position_embeddings": round(
                self.rope_factor * self.rope_original_length
            ),
            "rms_norm_eps": self.norm_eps,
            "rope_parameters": rope,
            "router_aux_loss_coef": self.balance_loss_coef,
            "swiglu_alpha": 1.702,
            "swiglu_limit": self.swiglu_limit,
            "tie_word_embeddings": self.tie_embeddings,
        }

    def decoder(self) -> DecoderConfig:
        """The model as data that `Decoder` builds.

        Raises:
          ValueError: a size is not positive, or sizes do not fit together.
        """
        scaling = None
        if self.rope_factor != 1:
            scaling = YarnScaling(
                factor=self.rope_factor,
                original_max_position=self.rope_original_length,
                beta_fast=self.rope_beta_fast,
                beta_slow=self.rope_beta_slow,
                truncate=self.rope_truncate,
            )
        attention = AttentionConfig(
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            rope=RopeConfig(theta=self.rope_theta, scaling=scaling),
            sinks=True,
            use_bias=True,
        )
        return DecoderConfig(
            vocab_size=self.vocab_size,
            d_model=self.d_model,
            num_layers=self.num_layers,
            pattern=self.pattern,
            attention=attention,
            sliding_attention=dataclasses.replace(attention, window=self.window),
            mlp=MoEConfig(
                num_experts=self.num_experts,
                top_k=self.experts_per_token,
                d_ff=self.d_expert,
                swiglu_limit=self.swiglu_limit,
                use_bias=True,
                score="topk_softmax",
                **{name: getattr(self, name) for name in _MOE_FIELDS},
            ),
            norm_eps=self.norm_eps,
            tie_embeddings=self.tie_embeddings,
            dtype=self.dtype,
            param_dtype=self.param_dtype,
            remat_policy=self.remat_policy,
            implementation=self.implementation,
        )

    @classmethod
    def from_decoder(cls, config: DecoderConfig) -> Self:
        """The inverse of `decoder`.

        Raises:
          ValueError: `config` has something that this family's checkpoints cannot say.
        """
        attention, windowed, mlp = (
            config.attention,
            config.sliding_attention,
            config.mlp,
        )
        if attention is None or attention.rope is None or windowed is None:
            raise ValueError(
                f"a {cls.MODEL_TYPE} checkpoint needs the configs of both mixers and a "
                f"rotary embedding, got attention={attention}, "
                f"sliding_attention={windowed}"
            )
        scaling = attention.rope.scaling
        if not isinstance(scaling, YarnScaling | None):
            raise ValueError(f"a {cls.MODEL_TYPE} checkpoint cannot say {scaling}")
        if not isinstance(mlp, MoEConfig) or mlp.swiglu_limit is None:
            raise ValueError(f"a {cls.MODEL_TYPE} checkpoint cannot say mlp={mlp!r}")
        if windowed.window is None:
            raise ValueError(
                f"a {cls.MODEL_TYPE} checkpoint cannot say sliding_attention.window="
                "None"
            )
        found = cls(
            vocab_size=config.vocab_size,
            d_model=config.d_model,
            num_layers=config.num_layers,
            pattern=config.pattern,
            num_heads=attention.num_heads,
            num_kv_heads=attention.num_kv_heads,
            head_dim=attention.head_dim,
            window=windowed.window,
            rope_theta=attention.rope.theta,
            **_yarn_fields(scaling),
            num_experts=mlp.num_experts,
            experts_per_token=mlp.top_k,
            d_expert=mlp.d_ff,
            swiglu_limit=mlp.swiglu_limit,
            **{name: getattr(mlp, name) for name in _MOE_FIELDS},
            norm_eps=config.norm_eps,
            tie_embeddings=config.tie_embeddings,
            dtype=config.dtype,
            param_dtype=config.param_dtype,
            remat_policy=config.remat_policy,
            implementation=config.implementation,
        )
        check_kept(cls.MODEL_TYPE, found.decoder(), config)
        return found

    def name_table(self) -> NameTable:
        """Ties the names of a checkpoint to the parameters of `self.decoder()`."""
        top = [
            rule("model.embed_tokens.weight", "embed.embedding", layout=Same()),
            rule("model.norm.weight", "final_norm.scale", layout=Same()),
        ]
        if not self.tie_embeddings:
            top.append(rule("lm_head.weight", "lm_head.kernel"))
        block = (*_ATTENTION_RULES, *_AROUND_RULES, *_EXPERT_RULES)
        return NameTable(
            top=tuple(top),
            blocks=(block,) * len(self.pattern),
            num_layers=self.num_layers,
        )


def _yarn_fields(scaling: YarnScaling | None) -> dict[str, Any]:
    """Our fields of a scaling; of the attention factor there is none."""
    if scaling is None:
        return {"rope_factor": 1.0}
    return {
        "rope_factor": scaling.factor,
        "rope_original_length": scaling.original_max_position,
        "rope_beta_fast": scaling.beta_fast,
        "rope_beta_slow": scaling.beta_slow,
        "rope_truncate": scaling.truncate,
    }


_ATTENTION_RULES: tuple[Rule, ...] = (
    *(
        rule(f"self_attn.{name}.weight", f"mixer.{name}.kernel")
        for name in ("q_proj", "k_proj", "v_proj", "o_proj")
    ),
    *(
        rule(f"self_attn.{name}.bias", f"mixer.{name}.bias", layout=Same())
        for name in ("q_proj", "k_proj", "v_proj", "o_proj")
    ),
    rule("self_attn.sinks", "mixer.sinks", layout=Same()),
)
_AROUND_RULES: tuple[Rule, ...] = (
    rule("input_layernorm.weight", "mixer_norm.scale", layout=Same()),
    rule("post_attention_layernorm.weight", "mlp_norm.scale", layout=Same()),
    rule("mlp.router.weight", "mlp.router.kernel"),
    rule("mlp.router.bias", "mlp.router.logit_bias", layout=Same()),
)
# All experts in one tensor [E, in, out]. Gate and up stand column by column in turn;
# ours are halves, which the grouped product and the activation read without a gather.
_EXPERT_RULES: tuple[Rule, ...] = (
    rule("mlp.experts.gate_up_proj", "mlp.w_in", layout=Interleaved()),
    rule("mlp.experts.gate_up_proj_bias", "mlp.bias_in.bias", layout=Interleaved()),
    rule("mlp.experts.down_proj", "mlp.w_out", layout=Same()),
    rule("mlp.experts.down_proj_bias", "mlp.bias_out.bias", layout=Same()),
)
