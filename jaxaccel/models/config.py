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
REMAT_POLICIES = (
    *("none", "save", "full", "remat", "dots", "save_names:NAME,..."),
    *("offload", "offload_policy", "offload_policy:NAME,...", "offload_group:N"),
)

# `remat_policy` -> mode of `core.offload.offload_scan`; the two that keep more on the
# device than a layer's input are `jax.checkpoint` policies inside of "save".
_MODES = {
    **{"none": "save", "save": "save", "dots": "save", "save_names": "save"},
    **{"full": "remat", "remat": "remat"},
    **{"offload": "ring", "offload_policy": "policy", "offload_group": "group"},
}
_TAKES_NAMES = ("save_names", "offload_policy")


@dataclasses.dataclass(frozen=True, kw_only=True)
class RematPolicy:
    """`DecoderConfig.remat_policy`, read.

    Attributes:
      kind: what stands before the colon.
      names: of values that are kept besides the layers' inputs.
      group: periods of the pattern that share one stored input.
    """

    kind: str
    names: tuple[str, ...] = ()
    group: int = 1

    @classmethod
    def parse(cls, text: str) -> RematPolicy:
        """Reads a config's text.

        Raises:
          ValueError: it is not one of `REMAT_POLICIES`.
        """
        kind, colon, rest = text.partition(":")
        names = tuple(rest.split(",")) if kind in _TAKES_NAMES and colon else ()
        group = int(rest) if kind == "offload_group" and rest.isdecimal() else 1
        is_known = kind in _MODES and all(names)
        if kind == "save_names":
            is_known = is_known and bool(names)
        elif kind == "offload_group":
            is_known = is_known and group > 1
        elif colon and kind not in _TAKES_NAMES:
            is_known = False
        if not is_known:
            raise ValueError(
                f"remat_policy={text!r} is unknown, allowed are "
                f"{', '.join(map(repr, REMAT_POLICIES))}"
            )
        return cls(kind=kind, names=names, group=group)

    @classmethod
    def of_mode(cls, mode: str, *, group: int = 1, names: tuple[str, ...] = ()) -> str:
        """The text for a mode of `offload_scan`."""
        kind = {"ring": "offload", "policy": "offload_policy"}.get(mode, mode)
        if mode == "group":
            return f"offload_group:{group}"
        return f"{kind}:{','.join(names)}" if names and mode == "policy" else kind

    @property
    def mode(self) -> str:
        """The mode of `jaxaccel.core.offload.offload_scan`."""
        return _MODES[self.kind]


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
      remat_policy: what the backward pass keeps of each layer: "none" or "save"
        rematerialises nothing, "full" or "remat" all but the layer's input, "dots" all
        but matrix products, and "save_names:a,b" all but the values of these names
        (`attention_out`, `gdn_out`, `moe_hidden`, `mlp_up`, ... as the layers call
        them). As "remat", with the inputs in the host's memory: "offload" copies them
        beside the kernels, "offload_policy" through `jax.checkpoint`, with
        "offload_policy:a,b" these values too, and "offload_group:n" one input for n
        periods of the pattern. A training run takes the first of these that fits, see
        `jaxaccel.core.offload_plan`.
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
        try:
            policy = RematPolicy.parse(self.remat_policy)
        except ValueError as error:
            raise ValueError(f"DecoderConfig: {error}") from None
        if policy.group > 1 and self.num_periods % policy.group:
            raise ValueError(
                f"DecoderConfig: remat_policy={self.remat_policy!r} must divide the "
                f"{self.num_periods} periods of the pattern"
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
