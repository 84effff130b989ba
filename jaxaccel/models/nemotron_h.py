"""Nemotron-H and Nemotron 3: Mamba-2, attention without positions, and experts.

Every layer is one mixer or one feed-forward part, and the pattern string says which.
Sizes are those of the published models (Nemotron 3, arXiv:2512.20856), names those of
their checkpoints (read in the transformers implementation, `models/nemotron_h`; the
prediction block's are Megatron-Bridge's).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Self

from jaxaccel.models.config import DecoderConfig
from jaxaccel.models.hf_config import HFConfig, check_kept
from jaxaccel.models.hybrid_pattern import SYMBOLS, HybridPattern
from jaxaccel.models.names import NameTable
from jaxaccel.models.nemotron_h_names import name_table
from jaxaccel.nn.attention import AttentionConfig
from jaxaccel.nn.mamba2 import Mamba2Config
from jaxaccel.nn.mlp import MLPConfig
from jaxaccel.nn.router import MoEConfig


_SUPPORTED = ("mamba", "attention", "moe", "mlp")
# Our field -> the key of config.json, for the plain integers.
_SIZE_KEYS = {
    "vocab_size": "vocab_size",
    "d_model": "hidden_size",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "mamba_heads": "mamba_num_heads",
    "mamba_head_dim": "mamba_head_dim",
    "mamba_groups": "n_groups",
    "state_dim": "ssm_state_size",
    "conv_width": "conv_kernel",
    "chunk_size": "chunk_size",
}
_MOE_KEYS = {
    "num_experts": "n_routed_experts",
    "experts_per_token": "num_experts_per_tok",
    "d_expert": "moe_intermediate_size",
    "expert_groups": "n_group",
    "top_expert_groups": "topk_group",
}
_DT_KEYS = {
    "dt_min": "time_step_min",
    "dt_max": "time_step_max",
    "dt_floor": "time_step_floor",
}
# What the files may say, and all that is computed here.
_REQUIRED: Mapping[str, tuple[Any, ...]] = {
    "attention_bias": (False,),
    "attention_dropout": (0, 0.0),
    "hidden_dropout": (0, 0.0),
    "mamba_hidden_act": ("silu",),
    "mamba_proj_bias": (False,),
    "mlp_bias": (False,),
    "mlp_hidden_act": ("relu2",),
    "norm_type": ("rms_norm",),
    "residual_in_fp32": (False,),
    "rope_parameters": (),
    "rope_scaling": (),
    "sliding_window": (),
    "use_bias": (False,),
    "use_conv_bias": (True,),
}
# Facts about initial values, kernels and generation; a rotary base that nothing reads.
_UNREAD = (
    *("expand", "moe_shared_expert_overlap", "num_logits_to_keep"),
    *("partial_rotary_factor", "rescale_prenorm_residual", "rope_theta"),
    *("use_mamba_kernels", "mtp_layers_block_type", "mtp_hybrid_override_pattern"),
)
_LAYER_WORDS = {
    "linear_attention": "mamba",
    "full_attention": "attention",
    "moe": "moe",
    "mlp": "mlp",
    # Older files use these words.
    "mamba": "mamba",
    "attention": "attention",
}
_STORED_WORDS = {
    "mamba": "linear_attention",
    "attention": "full_attention",
    "moe": "moe",
    "mlp": "mlp",
}
_DEFAULT_BLOCK = ("attention", "moe")
# Fields of training and placement that we share with `MoEConfig`.
_MOE_FIELDS = (
    *("balance_loss_coef", "sequence_balance_loss_coef", "balance_counts"),
    *("z_loss_coef", "expert_axis", "expert_exchange", "expert_capacity"),
)
# What the published models differ in.
_PUBLISHED: Mapping[str, Mapping[str, Any]] = {
    "nano": {
        "pattern": "MEMEM*E" * 5 + "MEMEMEM*EMEMEMEME",
        "d_model": 2688,
        "mamba_heads": 64,
        "num_experts": 128,
        "experts_per_token": 6,
        "d_expert": 1856,
        "d_shared_expert": 3712,
        "expert_weight_scale": 2.5,
    },
    "super": {
        "pattern": "MEMEMEM*E" * 3
        + "MEMEMEMEM*E" * 4
        + "MEMEMEM*EMEMEMEME"
        + "/*E" * 2,
        "d_model": 4096,
        "mamba_heads": 128,
        "num_experts": 512,
        "experts_per_token": 22,
        "d_expert": 2688,
        "d_latent": 1024,
        "d_shared_expert": 5376,
        "expert_weight_scale": 5.0,
    },
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class NemotronHConfig:
    """A Nemotron-H model (arXiv:2504.03624, arXiv:2512.20856).

    Attributes:
      vocab_size: number of tokens.
      d_model: width D.
      pattern: what each layer is, M (Mamba-2), * (attention), E (experts) or - (dense
        feed-forward part), see `hybrid_pattern`. `/*E` behind it is a block that
        predicts a further token, once for each depth. Bars change nothing here.
      num_heads: query heads H of attention.
      num_kv_heads: key and value heads G of attention.
      head_dim: K of attention.
      mamba_heads: heads H of Mamba-2.
      mamba_head_dim: V of Mamba-2.
      mamba_groups: groups G of Mamba-2.
      state_dim: N of Mamba-2.
      conv_width: taps W of its short convolution.
      chunk_size: tokens C per chunk of its chunked form.
      dt_limit: least and largest step size, in a prefill and in decoding alike; `None`
        for no largest one.
      dt_min, dt_max, dt_floor: of the initial step sizes, see `Mamba2Config`.
      state_dtype: of the state that a cache keeps.
      d_ff: hidden width of the layers "-".
      num_experts: experts E of the layers "E".
      experts_per_token: experts k that a token visits.
      d_expert: hidden width F of an expert.
      d_latent: width in which the routed experts work, 0 for the model's.
      d_shared_expert: hidden width of the expert that every token visits.
      expert_groups: experts are split into this many groups of neighbours.
      top_expert_groups: only the experts of this many groups are candidates.
      normalize_expert_weights: divide the chosen scores by their sum.
      expert_weight_scale: factor on the weights.
      router_bias_update_rate: step of the selection bias steered by load. Without one
        the model cannot be saved under the names of this family.
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

    MODEL_TYPE: ClassVar[str] = "nemotron_h"
    ARCHITECTURE: ClassVar[str] = "NemotronHForCausalLM"

    vocab_size: int
    d_model: int
    pattern: str
    num_heads: int
    num_kv_heads: int
    head_dim: int
    mamba_heads: int
    mamba_head_dim: int
    mamba_groups: int
    state_dim: int
    conv_width: int = 4
    chunk_size: int = 128
    dt_limit: tuple[float, float | None] = (0.0, None)
    dt_min: float = 1e-3
    dt_max: float = 0.1
    dt_floor: float = 1e-4
    state_dtype: str = "float32"
    d_ff: int = 0
    num_experts: int = 0
    experts_per_token: int = 0
    d_expert: int = 0
    d_latent: int = 0
    d_shared_expert: int = 0
    expert_groups: int = 1
    top_expert_groups: int = 1
    normalize_expert_weights: bool = True
    expert_weight_scale: float = 1.0
    router_bias_update_rate: float = 1e-3
    balance_loss_coef: float = 0.0
    sequence_balance_loss_coef: float = 1e-4
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
        object.__setattr__(self, "dt_limit", _open_ended(self.dt_limit))
        parsed = self.layers
        unknown = sorted({*parsed.layers, *parsed.block} - set(_SUPPORTED))
        if unknown:
            allowed = [s for s, kind in SYMBOLS.items() if kind in _SUPPORTED]
            raise NotImplementedError(
                f"pattern={self.pattern!r} has layers {unknown}, supported are "
                f"{' '.join(allowed)}"
            )
        if parsed.block and parsed.block != ("attention", self._feed_forward):
            raise NotImplementedError(
                f"pattern={self.pattern!r} has the prediction block {parsed.block}, "
                f"supported is {('attention', self._feed_forward)}"
            )
        self.decoder()  # the parts check themselves and name what is wrong

    @property
    def layers(self) -> HybridPattern:
        """The pattern, read."""
        return HybridPattern.parse(self.pattern)

    @property
    def _feed_forward(self) -> str:
        """What `DecoderConfig.mlp` describes."""
        parsed = self.layers
        return "moe" if "moe" in parsed.layers + parsed.block else "mlp"

    @classmethod
    def published(cls, size: str = "nano", **changes: Any) -> Self:
        """Sizes of a published Nemotron 3 model.

        Args:
          size: "nano" (30B-A3B) or "super" (120B-A12B, with its prediction block).
          **changes: fields that differ.

        Raises:
          ValueError: there is no such size.
        """
        if size not in _PUBLISHED:
            raise ValueError(f"size={size!r}, allowed are {', '.join(_PUBLISHED)}")
        sizes: dict[str, Any] = {
            "vocab_size": 131_072,
            "num_heads": 32,
            "num_kv_heads": 2,
            "head_dim": 128,
            "mamba_head_dim": 64,
            "mamba_groups": 8,
            "state_dim": 128,
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
            "pattern": "MEM*E-",
            "num_heads": 2,
            "num_kv_heads": 1,
            "head_dim": 16,
            "mamba_heads": 4,
            "mamba_head_dim": 16,
            "mamba_groups": 2,
            "state_dim": 16,
            "chunk_size": 32,
            "d_ff": 64,
            "num_experts": 4,
            "experts_per_token": 2,
            "d_expert": 32,
            "d_latent": 16,
            "d_shared_expert": 32,
            "expert_weight_scale": 2.5,
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
        for key, allowed in _REQUIRED.items():
            hf.require(key, allowed)
        for key in _UNREAD:
            hf.take(key, None)
        pattern = _pattern_of(hf)
        dtype = hf.dtype()
        shared = hf.take("n_shared_experts", 1)
        moe = {field: hf.take(key, 0) for field, key in _MOE_KEYS.items()}
        moe |= {
            "d_latent": hf.take("moe_latent_size", 0),
            "d_shared_expert": shared
            * hf.take("moe_shared_expert_intermediate_size", 0),
            "normalize_expert_weights": hf.take("norm_topk_prob", True),
            "expert_weight_scale": float(hf.take("routed_scaling_factor", 1.0)),
        }
        if "moe" not in pattern.layers + pattern.block:
            moe = {}  # facts about layers that are not there
        d_ff = hf.take("intermediate_size", 0)
        sizes = {field: hf.take(key) for field, key in _SIZE_KEYS.items()}
        for field, key in _DT_KEYS.items():
            sizes[field] = float(hf.take(key, getattr(cls, field)))
        config = cls(
            **sizes,
            **moe,
            pattern=str(pattern),
            d_ff=d_ff if "mlp" in pattern.layers + pattern.block else 0,
            dt_limit=hf.take("time_step_limit", cls.dt_limit),
            state_dtype=hf.take("mamba_ssm_cache_dtype", "float32"),
            norm_eps=float(hf.take("layer_norm_epsilon", 1e-5)),
            tie_embeddings=hf.take("tie_word_embeddings", False),
            dtype=dtype,
            param_dtype=dtype,
        )
        hf.report_unknown()
        return config

    def to_hf(self) -> dict[str, Any]:
        """A config.json, as transformers 5 spells it."""
        parsed = self.layers
        fields = {
            "architectures": [self.ARCHITECTURE],
            "model_type": self.MODEL_TYPE,
            **{key: getattr(self, field) for field, key in _SIZE_KEYS.items()},
            **{key: getattr(self, field) for field, key in _DT_KEYS.items()},
            "attention_bias": False,
            "attention_dropout": 0.0,
            "dtype": self.param_dtype,
            "hidden_dropout": 0.0,
            "layer_norm_epsilon": self.norm_eps,
            "layers_block_type": [_STORED_WORDS[kind] for kind in parsed.layers],
            "mamba_hidden_act": "silu",
            "mamba_proj_bias": False,
            "mamba_ssm_cache_dtype": self.state_dtype,
            "mlp_bias": False,
            "mlp_hidden_act": "relu2",
            "num_nextn_predict_layers": parsed.depth,
            "residual_in_fp32": False,
            "tie_word_embeddings": self.tie_embeddings,
            "time_step_limit": [
                # As transformers 5 writes it: JSON has no infinity.
                {"__float__": "Infinity"} if bound is None else bound
                for bound in self.dt_limit
            ],
            "use_bias": False,
            "use_conv_bias": True,
        }
        if parsed.block:
            fields["mtp_layers_block_type"] = [
                _STORED_WORDS[kind] for kind in parsed.block
            ]
        if self.d_ff:
            fields["intermediate_size"] = self.d_ff
        if self._feed_forward == "moe":
            fields |= {
                **{key: getattr(self, field) for field, key in _MOE_KEYS.items()},
                "moe_shared_expert_intermediate_size": self.d_shared_expert,
                "n_shared_experts": 1,
                "norm_topk_prob": self.normalize_expert_weights,
                "routed_scaling_factor": self.expert_weight_scale,
            }
            if self.d_latent:
                fields["moe_latent_size"] = self.d_latent
        return fields

    def decoder(self) -> DecoderConfig:
        """The model as data that `Decoder` builds.

        Raises:
          ValueError: a size is not positive, or sizes do not fit together.
        """
        parsed, (low, high) = self.layers, self.dt_limit
        has_dense = "mlp" in parsed.layers + parsed.block
        # Where no layer reads it, any width will do.
        dense = MLPConfig(
            d_ff=self.d_ff if has_dense else self.d_ff or self.d_model,
            activation="relu2",
        )
        has_experts = self._feed_forward == "moe"
        return DecoderConfig(
            vocab_size=self.vocab_size,
            d_model=self.d_model,
            num_layers=len(parsed.layers),
            pattern=parsed.layers,
            single_part=True,
            mamba=Mamba2Config(
                num_heads=self.mamba_heads,
                head_dim=self.mamba_head_dim,
                num_groups=self.mamba_groups,
                state_dim=self.state_dim,
                conv_width=self.conv_width,
                chunk_size=self.chunk_size,
                dt_limit=(low, math.inf if high is None else high),
                dt_min=self.dt_min,
                dt_max=self.dt_max,
                dt_floor=self.dt_floor,
                state_dtype=self.state_dtype,
            ),
            attention=AttentionConfig(
                num_heads=self.num_heads,
                num_kv_heads=self.num_kv_heads,
                head_dim=self.head_dim,
                rope=None,
            ),
            mlp=self._moe() if has_experts else dense,
            dense_mlp=dense if has_experts and has_dense else None,
            norm_eps=self.norm_eps,
            tie_embeddings=self.tie_embeddings,
            num_mtp_layers=min(1, parsed.depth),
            mtp_depth=max(1, parsed.depth),
            dtype=self.dtype,
            param_dtype=self.param_dtype,
            remat_policy=self.remat_policy,
            implementation=self.implementation,
        )

    def _moe(self) -> MoEConfig:
        return MoEConfig(
            num_experts=self.num_experts,
            top_k=self.experts_per_token,
            d_ff=self.d_expert,
            d_latent=self.d_latent,
            activation="relu2",
            score="sigmoid",
            normalize_weights=self.normalize_expert_weights,
            scale=self.expert_weight_scale,
            num_groups=self.expert_groups,
            top_groups=self.top_expert_groups,
            bias_update_rate=self.router_bias_update_rate,
            shared_d_ff=self.d_shared_expert,
            **{name: getattr(self, name) for name in _MOE_FIELDS},
        )

    @classmethod
    def from_decoder(cls, config: DecoderConfig) -> Self:
        """The inverse of `decoder`; bars of the pattern are lost.

        Raises:
          ValueError: `config` has something that this family's checkpoints cannot say.
        """
        attention, mamba, mlp = config.attention, config.mamba, config.mlp
        if attention is None or mamba is None:
            raise ValueError(
                f"a {cls.MODEL_TYPE} checkpoint needs the configs of both mixers, got "
                f"attention={attention}, mamba={mamba}"
            )
        has_experts = isinstance(mlp, MoEConfig)
        if has_experts and mlp.bias_update_rate == 0:
            raise ValueError(
                f"a {cls.MODEL_TYPE} checkpoint has a selection bias and cannot say "
                "mlp.bias_update_rate=0"
            )
        depth = config.mtp_depth if config.num_mtp_layers else 0
        pattern = HybridPattern(
            layers=config.layer_types,
            block=("attention", "moe" if has_experts else "mlp") if depth else (),
            depth=depth,
        )
        dense = config.dense_mlp if has_experts else mlp
        found = cls(
            vocab_size=config.vocab_size,
            d_model=config.d_model,
            pattern=str(pattern),
            num_heads=attention.num_heads,
            num_kv_heads=attention.num_kv_heads,
            head_dim=attention.head_dim,
            mamba_heads=mamba.num_heads,
            mamba_head_dim=mamba.head_dim,
            mamba_groups=mamba.num_groups,
            state_dim=mamba.state_dim,
            conv_width=mamba.conv_width,
            chunk_size=mamba.chunk_size,
            dt_limit=mamba.dt_limit,
            dt_min=mamba.dt_min,
            dt_max=mamba.dt_max,
            dt_floor=mamba.dt_floor,
            state_dtype=mamba.state_dtype,
            d_ff=0 if dense is None else dense.d_ff,
            **(_moe_fields(mlp) if has_experts else {}),
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
        return name_table(self.decoder(), self.layers.block)


def _pattern_of(hf: HFConfig) -> HybridPattern:
    """The pattern of a config.json: a string, or a list of words.

    Raises:
      ValueError: there is neither, they disagree, or words or their number are wrong.
    """

    def read(text_key: str, words_key: str) -> tuple[str, ...] | None:
        text, words = hf.take(text_key, None), hf.take(words_key, None)
        kinds = None if text is None else HybridPattern.parse(text).layers
        if words is None:
            return kinds
        unknown = sorted(set(words) - set(_LAYER_WORDS))
        if unknown:
            raise ValueError(
                f"{words_key} has {unknown}, expected words of {sorted(_LAYER_WORDS)}"
            )
        listed = tuple(_LAYER_WORDS[word] for word in words)
        if kinds not in (None, listed):
            raise ValueError(f"{text_key}={text!r} and {words_key} disagree")
        return listed

    layers = read("hybrid_override_pattern", "layers_block_type")
    if layers is None:
        raise ValueError(
            "config.json lacks 'hybrid_override_pattern' and 'layers_block_type'"
        )
    count = hf.take("num_hidden_layers", len(layers))
    if count != len(layers):
        raise ValueError(
            f"the pattern has {len(layers)} layers, num_hidden_layers={count}"
        )
    depth = hf.take("num_nextn_predict_layers", 0)
    block = read("mtp_hybrid_override_pattern", "mtp_layers_block_type")
    return HybridPattern(
        layers=layers, block=(block or _DEFAULT_BLOCK) if depth else (), depth=depth
    )


def _open_ended(limit: Sequence[float | None]) -> tuple[float, float | None]:
    """A limit with `None` for infinity, which gin files cannot spell."""
    low, high = limit
    if low is None:
        raise ValueError(f"dt_limit={tuple(limit)} must begin with a number")
    return float(low), None if high is None or high == math.inf else float(high)


def _moe_fields(mlp: MoEConfig) -> dict[str, Any]:
    """Our fields of a mixture."""
    return {
        "num_experts": mlp.num_experts,
        "experts_per_token": mlp.top_k,
        "d_expert": mlp.d_ff,
        "d_latent": mlp.d_latent,
        "d_shared_expert": mlp.shared_d_ff,
        "expert_groups": mlp.num_groups,
        "top_expert_groups": mlp.top_groups,
        "normalize_expert_weights": mlp.normalize_weights,
        "expert_weight_scale": mlp.scale,
        "router_bias_update_rate": mlp.bias_update_rate,
        **{name: getattr(mlp, name) for name in _MOE_FIELDS},
    }
