"""What Qwen3-Next and Qwen3.5 share: sizes of the mixers, config keys, tensor names."""

from __future__ import annotations

import abc
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
from jaxaccel.models.names import (
    DepthwiseConv,
    Grouped,
    NameTable,
    Rule,
    Same,
    rule,
)
from jaxaccel.nn.attention import AttentionConfig
from jaxaccel.nn.gated_deltanet import GatedDeltaNetConfig
from jaxaccel.nn.mlp import MLPConfig
from jaxaccel.nn.rope import RopeConfig
from jaxaccel.nn.router import MoEConfig


# Our field -> the key of config.json, for the plain integers.
_SIZE_KEYS = {
    "vocab_size": "vocab_size",
    "d_model": "hidden_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "gdn_key_heads": "linear_num_key_heads",
    "gdn_value_heads": "linear_num_value_heads",
    "gdn_key_dim": "linear_key_head_dim",
    "gdn_value_dim": "linear_value_head_dim",
    "conv_width": "linear_conv_kernel_dim",
}
# Three families of checkpoints say in three ways how many prediction layers there are.
_MTP_KEYS = ("num_mtp_layers", "num_nextn_predict_layers", "mtp_num_hidden_layers")


@dataclasses.dataclass(frozen=True, kw_only=True)
class QwenHybridConfig(abc.ABC):
    """Fields of both models; see the two subclasses.

    Attributes:
      vocab_size: number of tokens.
      d_model: width D.
      num_layers: layers, a multiple of the pattern's length.
      pattern: mixers of one period, of "gdn" and "attention".
      num_heads: query heads H of attention.
      num_kv_heads: key and value heads G of attention.
      head_dim: K of attention.
      rope_theta: base of the rotary embedding.
      rotary_fraction: share of the head dim that rotates.
      gdn_key_heads: Hk of Gated DeltaNet.
      gdn_value_heads: Hv of Gated DeltaNet.
      gdn_key_dim: K of Gated DeltaNet.
      gdn_value_dim: V of Gated DeltaNet.
      conv_width: taps W of the short convolution.
      chunk_size: tokens C per chunk of the chunked delta rule.
      dt_init: how `dt_bias` starts, see `GatedDeltaNetConfig`.
      norm_eps: of every norm.
      tie_embeddings: the output layer is the embedding table.
      num_mtp_layers: prediction blocks on top, 0 or 1.
      dtype: dtype of the computation.
      param_dtype: dtype of the parameters that need not be f32.
      remat_policy: what the backward pass keeps, see `DecoderConfig`.
      implementation: of the ops: `None`, one name, or op -> name.
    """

    MODEL_TYPE: ClassVar[str]
    ARCHITECTURE: ClassVar[str]

    vocab_size: int
    d_model: int
    num_layers: int
    pattern: tuple[str, ...] = ("gdn", "gdn", "gdn", "attention")
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope_theta: float = 10_000_000.0
    rotary_fraction: float = 0.25
    gdn_key_heads: int
    gdn_value_heads: int
    gdn_key_dim: int
    gdn_value_dim: int
    conv_width: int = 4
    chunk_size: int = 64
    dt_init: str = "inverse_softplus"
    norm_eps: float = 1e-6
    tie_embeddings: bool = False
    num_mtp_layers: int = 0
    dtype: str = "bfloat16"
    param_dtype: str = "float32"
    remat_policy: str = "none"
    implementation: Any = None

    def __post_init__(self):
        object.__setattr__(self, "pattern", tuple(self.pattern))
        allowed = ("gdn", "attention")
        wrong = [kind for kind in self.pattern if kind not in allowed]
        if wrong:
            raise ValueError(f"pattern has {wrong}, allowed are {list(allowed)}")
        self.decoder()  # the parts check themselves and name what is wrong

    @classmethod
    @abc.abstractmethod
    def from_hf(cls, raw: Mapping[str, Any]) -> Self:
        """Reads a parsed config.json."""

    @abc.abstractmethod
    def to_hf(self) -> dict[str, Any]:
        """A config.json, as transformers 5 spells it."""

    @abc.abstractmethod
    def mlp_config(self) -> MLPConfig | MoEConfig:
        """The feed-forward part of every layer."""

    def decoder(self) -> DecoderConfig:
        """The model as data that `Decoder` builds.

        Raises:
          ValueError: a size is not positive, or sizes do not fit together.
        """
        return DecoderConfig(
            vocab_size=self.vocab_size,
            d_model=self.d_model,
            num_layers=self.num_layers,
            pattern=self.pattern,
            mlp=self.mlp_config(),
            attention=AttentionConfig(
                num_heads=self.num_heads,
                num_kv_heads=self.num_kv_heads,
                head_dim=self.head_dim,
                rope=RopeConfig(theta=self.rope_theta, fraction=self.rotary_fraction),
                qk_norm=True,
                output_gate=True,
            ),
            gdn=GatedDeltaNetConfig(
                num_key_heads=self.gdn_key_heads,
                num_value_heads=self.gdn_value_heads,
                key_dim=self.gdn_key_dim,
                value_dim=self.gdn_value_dim,
                conv_width=self.conv_width,
                chunk_size=self.chunk_size,
                dt_init=self.dt_init,
            ),
            norm_eps=self.norm_eps,
            zero_centered_norms=True,
            tie_embeddings=self.tie_embeddings,
            num_mtp_layers=self.num_mtp_layers,
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
        attention, gdn = config.attention, config.gdn
        if attention is None or attention.rope is None or gdn is None:
            raise ValueError(
                f"a {cls.MODEL_TYPE} checkpoint needs the configs of both mixers and a "
                f"rotary embedding, got attention={attention}, gdn={gdn}"
            )
        found = cls(
            vocab_size=config.vocab_size,
            d_model=config.d_model,
            num_layers=config.num_layers,
            pattern=config.pattern,
            num_heads=attention.num_heads,
            num_kv_heads=attention.num_kv_heads,
            head_dim=attention.head_dim,
            rope_theta=attention.rope.theta,
            rotary_fraction=attention.rope.fraction,
            gdn_key_heads=gdn.num_key_heads,
            gdn_value_heads=gdn.num_value_heads,
            gdn_key_dim=gdn.key_dim,
            gdn_value_dim=gdn.value_dim,
            conv_width=gdn.conv_width,
            chunk_size=gdn.chunk_size,
            dt_init=gdn.dt_init,
            norm_eps=config.norm_eps,
            tie_embeddings=config.tie_embeddings,
            num_mtp_layers=config.num_mtp_layers,
            dtype=config.dtype,
            param_dtype=config.param_dtype,
            remat_policy=config.remat_policy,
            implementation=config.implementation,
            **cls._mlp_fields(config.mlp),
        )
        check_kept(cls.MODEL_TYPE, found.decoder(), config)
        return found

    @classmethod
    @abc.abstractmethod
    def _mlp_fields(cls, mlp: MLPConfig | MoEConfig) -> dict[str, Any]:
        """The fields behind `mlp_config`, from its result."""

    @classmethod
    def _fields_from_hf(cls, hf: HFConfig) -> dict[str, Any]:
        """The shared fields of a config.json; raises on what cannot be computed."""
        hf.require("attention_bias", (False,))
        hf.require("attention_dropout", (0, 0.0))
        hf.require("hidden_act", ("silu",))
        sizes = {field: hf.take(key) for field, key in _SIZE_KEYS.items()}
        theta, fraction = hf.rope(default_fraction=0.25, default_theta=None)
        kinds = hf.layer_kinds(sizes["num_layers"], default_interval=4)
        dtype = hf.dtype()
        hf.require("mtp_layer_types", (["full_attention"],))
        return {
            **sizes,
            "pattern": shortest_period(kinds),
            "rope_theta": theta,
            "rotary_fraction": fraction,
            "norm_eps": float(hf.take("rms_norm_eps", 1e-6)),
            "tie_embeddings": hf.take("tie_word_embeddings", False),
            "num_mtp_layers": max(hf.take(key, 0) for key in _MTP_KEYS),
            "dtype": dtype,
            "param_dtype": dtype,
        }

    def _hf_fields(self) -> dict[str, Any]:
        """The shared keys of a config.json, as transformers 5 spells them."""
        fields = {
            "architectures": [self.ARCHITECTURE],
            "model_type": self.MODEL_TYPE,
            **{key: getattr(self, field) for field, key in _SIZE_KEYS.items()},
            "attention_bias": False,
            "attention_dropout": 0.0,
            "dtype": self.param_dtype,
            "hidden_act": "silu",
            "layer_types": stored_layer_types(self.pattern, self.num_layers),
            "rms_norm_eps": self.norm_eps,
            "rope_parameters": {
                "partial_rotary_factor": self.rotary_fraction,
                "rope_theta": self.rope_theta,
                "rope_type": "default",
            },
            "tie_word_embeddings": self.tie_embeddings,
        }
        if self.num_mtp_layers:
            fields["num_mtp_layers"] = self.num_mtp_layers
            fields["mtp_layer_types"] = ["full_attention"] * self.num_mtp_layers
        return fields

    def name_table(self) -> NameTable:
        """Ties the names of a checkpoint to the parameters of `self.decoder()`."""
        mixers = {"gdn": self._gdn_rules(), "attention": self._attention_rules()}
        around = (
            rule("input_layernorm.weight", "mixer_norm.scale", layout=Same()),
            rule("post_attention_layernorm.weight", "mlp_norm.scale", layout=Same()),
            *self._mlp_rules(),
        )
        top = [
            rule("model.embed_tokens.weight", "embed.embedding", layout=Same()),
            rule("model.norm.weight", "final_norm.scale", layout=Same()),
        ]
        if not self.tie_embeddings:
            top.append(rule("lm_head.weight", "lm_head.kernel"))
        mtp = (
            rule("pre_fc_norm_embedding.weight", "embed_norm.scale", layout=Same()),
            rule("pre_fc_norm_hidden.weight", "hidden_norm.scale", layout=Same()),
            rule("fc.weight", "proj.kernel"),
            rule("norm.weight", "final_norm.scale", layout=Same()),
        )
        has_mtp = self.num_mtp_layers > 0
        return NameTable(
            top=tuple(top),
            blocks=tuple((*mixers[kind], *around) for kind in self.pattern),
            num_layers=self.num_layers,
            mtp=mtp if has_mtp else (),
            mtp_block=(*mixers["attention"], *around) if has_mtp else (),
        )

    def _attention_rules(self) -> tuple[Rule, ...]:
        # One projection per head [query | gate]; ours keep all queries together.
        query_and_gate = Grouped(
            groups=self.num_heads,
            widths=(self.head_dim, self.head_dim),
            pieces=((0,), (1,)),
        )
        return (
            rule(
                "self_attn.q_proj.weight",
                "mixer.q_proj.kernel",
                "mixer.gate_proj.kernel",
                layout=query_and_gate,
            ),
            rule("self_attn.k_proj.weight", "mixer.k_proj.kernel"),
            rule("self_attn.v_proj.weight", "mixer.v_proj.kernel"),
            rule("self_attn.o_proj.weight", "mixer.o_proj.kernel"),
            rule("self_attn.q_norm.weight", "mixer.q_norm.scale", layout=Same()),
            rule("self_attn.k_norm.weight", "mixer.k_norm.scale", layout=Same()),
        )

    @abc.abstractmethod
    def _gdn_rules(self) -> tuple[Rule, ...]:
        """Names of a Gated DeltaNet layer, inside its block."""

    @abc.abstractmethod
    def _mlp_rules(self) -> tuple[Rule, ...]:
        """Names of a feed-forward part, inside its block."""


def gdn_rest_rules() -> tuple[Rule, ...]:
    """Names of a Gated DeltaNet layer behind its input projections."""
    return (
        rule("linear_attn.conv1d.weight", "mixer.conv_kernel", layout=DepthwiseConv()),
        rule("linear_attn.A_log", "mixer.A_log", layout=Same()),
        rule("linear_attn.dt_bias", "mixer.dt_bias", layout=Same()),
        rule("linear_attn.norm.weight", "mixer.norm.scale", layout=Same()),
        rule("linear_attn.out_proj.weight", "mixer.out_proj.kernel"),
    )
