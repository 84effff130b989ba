"""What a decoder consists of, as data."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from typing import Any

import jax.numpy as jnp

from jaxaccel.nn.attention import AttentionConfig
from jaxaccel.nn.engram_config import EngramConfig
from jaxaccel.nn.gated_deltanet import GatedDeltaNetConfig
from jaxaccel.nn.implementation import normalize
from jaxaccel.nn.mamba2 import Mamba2Config
from jaxaccel.nn.mlp import MLPConfig
from jaxaccel.nn.router import MoEConfig


MIXERS = ("gdn", "mamba", "attention", "sliding_attention")
FEED_FORWARDS = ("moe", "mlp")
"""Layers of their own in models whose layers have one part."""
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


type MixerConfig = AttentionConfig | GatedDeltaNetConfig | Mamba2Config


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


@dataclasses.dataclass(frozen=True)
class Run:
    """Layers that are scanned together.

    Attributes:
      kinds: the layers of one iteration.
      repeats: iterations, the leading axis of these layers' parameters.
    """

    kinds: tuple[str, ...]
    repeats: int


@functools.cache
def repeated_runs(kinds: tuple[str, ...]) -> tuple[Run, ...]:
    """Cuts a sequence into repeated units, with few layers to compile.

    Every layer of a unit is compiled once, however often the unit repeats; a run costs
    about another layer, for its loop. The cheapest cut is taken, and of equal ones the
    one whose first runs are longest.

    Args:
      kinds: what the layers are, in order.

    Returns:
      Runs that make up the sequence.
    """
    count = len(kinds)
    # best[i]: cost of the layers from i on, and the first run of them.
    best: list[tuple[int, Run | None]] = [(0, None)] * (count + 1)
    for start in reversed(range(count)):
        found: tuple[int, Run | None] = (2 * count + 2, None)
        for length in range(1, count - start + 1):
            unit = kinds[start : start + length]
            repeats, end = 0, start
            while kinds[end : end + length] == unit and end + length <= count:
                repeats, end = repeats + 1, end + length
                cost = length + 1 + best[end][0]
                if cost <= found[0]:
                    found = (cost, Run(unit, repeats))
        best[start] = found
    runs, at = [], 0
    while at < count:
        run = best[at][1]
        assert run is not None  # a unit of one layer always fits
        runs.append(run)
        at += len(run.kinds) * run.repeats
    return tuple(runs)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """A decoder-only language model.

    Attributes:
      vocab_size: number of tokens.
      d_model: width D.
      num_layers: layers, a multiple of the pattern's length.
      pattern: mixer of each layer of one period, names of the fields below, such as
        ("gdn", "gdn", "gdn", "attention"). With `single_part`, also "moe" and "mlp".
      attention: the mixer "attention".
      sliding_attention: the mixer "sliding_attention".
      gdn: the mixer "gdn".
      mamba: the mixer "mamba".
      mlp: the feed-forward part of every layer, dense or a mixture of experts. With
        `single_part`, of the layers "moe" if it is a mixture, else of the layers
        "mlp", and of the prediction block.
      dense_mlp: with `single_part`, the layers "mlp" beside a mixture in `mlp`.
      single_part: a layer is one mixer or one feed-forward part, with one norm, in
        place of one of each (Nemotron-H, arXiv:2504.03624). Layers that do not repeat
        as a whole are scanned in runs, see `runs`.
      engram: an n-gram memory, added to the inputs of some layers.
      norm_eps: of every norm.
      zero_centered_norms: norms scale by 1 + w, the Gated DeltaNet output norm apart.
      tie_embeddings: the output layer is the embedding table.
      num_mtp_layers: multi-token prediction blocks, 0 or 1.
      mtp_depth: how many further tokens the block is meant to predict, applied to its
        own output again and again; a fact for checkpoints, which changes no result.
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
    mamba: Mamba2Config | None = None
    dense_mlp: MLPConfig | None = None
    single_part: bool = False
    engram: EngramConfig | None = None
    norm_eps: float = 1e-6
    zero_centered_norms: bool = False
    tie_embeddings: bool = False
    num_mtp_layers: int = 0
    mtp_depth: int = 1
    dtype: str = "float32"
    param_dtype: str = "float32"
    remat_policy: str = "none"
    implementation: Any = None

    def __post_init__(self):
        object.__setattr__(self, "pattern", tuple(self.pattern))
        object.__setattr__(self, "implementation", normalize(self.implementation))
        for name in ("vocab_size", "d_model", "num_layers", "mtp_depth"):
            if getattr(self, name) < 1:
                raise ValueError(
                    f"DecoderConfig: {name}={getattr(self, name)} must be positive"
                )
        if not self.pattern:
            raise ValueError("DecoderConfig: pattern=() must name at least one mixer")
        allowed = (*MIXERS, *FEED_FORWARDS) if self.single_part else MIXERS
        for name in dict.fromkeys(self.pattern):
            if name not in allowed:
                raise ValueError(
                    f"DecoderConfig: pattern names {name!r}, allowed are "
                    f"{', '.join(map(repr, allowed))}"
                )
            self.layer_parts(name)
        if self.dense_mlp is not None and not self.single_part:
            raise ValueError(
                f"DecoderConfig: dense_mlp={self.dense_mlp} needs single_part=True"
            )
        if self.num_layers % len(self.pattern):
            raise ValueError(
                f"DecoderConfig: num_layers={self.num_layers} must be a multiple of "
                f"the pattern's {len(self.pattern)} layers"
            )
        self._check_engram()
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
        for run in self.runs if policy.group > 1 else ():
            if run.repeats % policy.group:
                raise ValueError(
                    f"DecoderConfig: remat_policy={self.remat_policy!r} must divide "
                    f"the {run.repeats} periods of the pattern"
                )

    def _check_engram(self) -> None:
        if self.engram is None:
            return
        if self.engram.places[-1] >= self.num_layers:
            raise ValueError(
                f"DecoderConfig: engram.layers={self.engram.layers} counted from "
                f"{self.engram.index_base}, the model has {self.num_layers} layers"
            )
        if self.engram.streams != 1:
            raise ValueError(
                f"DecoderConfig: engram.streams={self.engram.streams}, the decoder has "
                "1 stream"
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

    @property
    def runs(self) -> tuple[Run, ...]:
        """The layers as `Decoder` scans them.

        One run of the whole pattern; or, where layers have one part and the pattern
        comes once, as published ones do, the units that repeat inside of it. A memory
        stands between two runs.
        """
        if self.engram is not None:
            cuts = sorted({0, *self.engram.places, self.num_layers})
            pieces = (self.layer_types[a:b] for a, b in itertools.pairwise(cuts))
            return tuple(run for piece in pieces for run in repeated_runs(piece))
        if self.single_part and self.num_periods == 1:
            return repeated_runs(self.pattern)
        return (Run(self.pattern, self.num_periods),)

    @property
    def positions(self) -> tuple[tuple[str, int], ...]:
        """Kind and repeats of each of `Decoder.layers`, run after run."""
        return tuple((kind, run.repeats) for run in self.runs for kind in run.kinds)

    @property
    def layer_places(self) -> tuple[tuple[int, int], ...]:
        """Where each layer's parameters are: position in `Decoder.layers`, and row."""
        places, first = [], 0
        for run in self.runs:
            for row in range(run.repeats):
                places += [(first + i, row) for i in range(len(run.kinds))]
            first += len(run.kinds)
        return tuple(places)

    @property
    def router_places(self) -> tuple[tuple[int, int], ...]:
        """`layer_places` of layers with a mixture, the rows of `ModelOutput.aux`."""
        kinds = zip(self.layer_types, self.layer_places, strict=True)
        return tuple(
            place
            for kind, place in kinds
            if isinstance(self.layer_parts(kind)[1], MoEConfig)
        )

    def layer_parts(
        self, kind: str
    ) -> tuple[MixerConfig | None, MLPConfig | MoEConfig | None]:
        """Returns the configs of the mixer and of the feed-forward part of a layer.

        Args:
          kind: a name of the pattern.

        Raises:
          ValueError: the field behind the name is not set.
        """
        if kind not in FEED_FORWARDS:
            return self.mixer_config(kind), None if self.single_part else self.mlp
        mlp = self.mlp
        if kind == "mlp" and self.dense_mlp is not None:
            mlp = self.dense_mlp
        if isinstance(mlp, MoEConfig) != (kind == "moe"):
            field = "mlp" if kind == "moe" else "dense_mlp"
            raise ValueError(
                f"DecoderConfig: the pattern has {kind!r}, so the field `{field}` must "
                f"be of that kind, got {mlp}"
            )
        return None, mlp

    def mixer_config(self, name: str) -> MixerConfig:
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
