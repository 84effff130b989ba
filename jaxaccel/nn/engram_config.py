"""What an Engram memory consists of, as data."""

from __future__ import annotations

import dataclasses
import functools

import jax.numpy as jnp

from jaxaccel.data.compressed_vocab import CompressedVocabulary
from jaxaccel.quant.mxfp8 import BLOCK_SIZE
from pallas_kernels.engram_hash import HashLayout


BOUNDARIES = ("none", "eos", "segment")
TABLE_DTYPES = ("float32", "bfloat16", "float8_e4m3fn")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Variant:
    """What published versions of the module differ in.

    Attributes:
      has_conv: a short convolution over time behind the gate.
      zero_init_conv: its filters begin at zero, so that the gated value passes alone.
      has_bias: the projection has a bias.
      copies_sign: a score of +0 counts as positive, of -0 as negative; otherwise both
        give a gate of exactly one half.
      boundary: default of `EngramConfig.boundary`.
      index_base: number of the first layer, as the checkpoint counts.
    """

    has_conv: bool
    zero_init_conv: bool = True
    has_bias: bool
    copies_sign: bool = False
    boundary: str = "none"
    index_base: int = 0


VARIANTS = {
    "demo": Variant(has_conv=True, zero_init_conv=False, has_bias=True),
    "paper": Variant(has_conv=True, has_bias=True, index_base=1),
    "v41": Variant(has_conv=False, has_bias=False, copies_sign=True),
    "qwen": Variant(has_conv=True, has_bias=False, boundary="eos"),
}
"""Engram's demo and paper, DeepSeek-V4.1-Flash, and Qwen's use of the module."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngramConfig:
    """A hashed n-gram memory in front of some layers.

    Attributes:
      layers: in front of which layers memory is added, numbered as the checkpoint
        does: the numbers seed the hash.
      variant: "paper", "demo", "v41" or "qwen", see `VARIANTS`.
      orders: lengths of the n-grams.
      heads: rows that a token reads for each order.
      head_dim: width d of a row.
      bases: rows per head at least, one number or one for each order.
      pad_id: raw id of padding; its class stands where nothing can be looked back at.
      seed: of the hash.
      compress: hash classes of tokens, those of the run's tokenizer; the fields below
        say which, and `models.with_engram.with_tokenizer` sets them.
      compressed_size: V', number of token classes; `None` hashes the ids themselves.
      pad_class: class of `pad_id`, needed with `compressed_size`.
      vocabulary: fingerprint of the map to classes; `with_vocabulary` sets all three.
      index_base: number of the first layer, 0 or 1; `None` for the variant's.
      boundary: what ends a window: "none", "eos" (a token `eos_id`), "segment" (a
        document's border, for windows and convolution); `None` for the variant's.
      eos_id: raw id that ends a document, with boundary "eos".
      conv_width: taps of the convolution, `orders[-1]` tokens apart.
      streams: residual streams G, each with its own keys.
      gate_clamp: smallest |score| whose root is taken.
      gate_norm_eps: of the norms of query and key.
      conv_norm_eps: of the norm in front of the convolution.
      table_dtype: "float32", "bfloat16" or "float8_e4m3fn". The last has a power of two
        for every 32 values beside the rows, gives bfloat16, and is read only.
      table_lr_factor: learning rate of the table, in units of the model's.
      table_optimizer: "adam", "rowwise_adam" or "sinkhorn_momentum", see
        `training.sparse_table`. Both are part of what a table's size was chosen for.

    Source: Engram (arXiv 2601.07372).
    """

    layers: tuple[int, ...] = (2,)
    variant: str = "paper"
    orders: tuple[int, ...] = (2, 3)
    heads: int = 8
    head_dim: int = 64
    bases: int | tuple[int, ...] = 646_400
    pad_id: int = 2
    seed: int = 0
    compress: bool = False
    compressed_size: int | None = None
    pad_class: int | None = None
    vocabulary: str | None = None
    index_base: int | None = None
    boundary: str | None = None
    eos_id: int | None = None
    conv_width: int = 4
    streams: int = 1
    gate_clamp: float = 1e-6
    gate_norm_eps: float = 1e-6
    conv_norm_eps: float = 1e-5
    table_dtype: str = "float32"
    table_lr_factor: float = 5.0
    table_optimizer: str = "adam"

    def __post_init__(self):
        object.__setattr__(self, "layers", tuple(self.layers))
        object.__setattr__(self, "orders", tuple(self.orders))
        if not isinstance(self.bases, int):
            object.__setattr__(self, "bases", tuple(self.bases))
        self._check_choice("variant", VARIANTS)
        preset = VARIANTS[self.variant]
        for name in ("boundary", "index_base"):
            if getattr(self, name) is None:
                object.__setattr__(self, name, getattr(preset, name))
        self._check_choice("boundary", BOUNDARIES)
        self._check_choice("index_base", (0, 1))
        self._check_choice("table_dtype", TABLE_DTYPES)
        if self.is_narrow and self.head_dim % BLOCK_SIZE:
            raise ValueError(
                f"EngramConfig: head_dim={self.head_dim} must be a multiple of the "
                f"{BLOCK_SIZE} values of {self.table_dtype} that share a scale"
            )
        self._check_choice(
            "table_optimizer", ("adam", "rowwise_adam", "sinkhorn_momentum")
        )
        for name in ("heads", "head_dim", "conv_width", "streams"):
            if getattr(self, name) < 1:
                raise ValueError(
                    f"EngramConfig: {name}={getattr(self, name)} must be positive"
                )
        for name in ("gate_clamp", "gate_norm_eps", "conv_norm_eps", "table_lr_factor"):
            if getattr(self, name) <= 0:
                raise ValueError(
                    f"EngramConfig: {name}={getattr(self, name)} must be positive"
                )
        if not self.layers or sorted(set(self.layers)) != list(self.layers):
            raise ValueError(
                f"EngramConfig: layers={self.layers} must ascend and name at least one"
            )
        if self.places[0] < 0:
            raise ValueError(
                f"EngramConfig: layers={self.layers} count from {self.index_base}"
            )
        if self.compressed_size is not None and self.pad_class is None:
            raise ValueError(
                f"EngramConfig: compressed_size={self.compressed_size} needs "
                "pad_class, got None; `with_vocabulary` sets both"
            )
        if self.boundary == "eos" and self.eos_id is None:
            raise ValueError("EngramConfig: boundary='eos' needs eos_id, got None")

    def _check_choice(self, name: str, allowed) -> None:
        if getattr(self, name) not in allowed:
            raise ValueError(
                f"EngramConfig: {name}={getattr(self, name)!r} is unknown, allowed are "
                f"{', '.join(map(repr, allowed))}"
            )

    @property
    def preset(self) -> Variant:
        """What the variant says."""
        return VARIANTS[self.variant]

    @property
    def places(self) -> tuple[int, ...]:
        """The layers, counted from 0."""
        return tuple(layer - (self.index_base or 0) for layer in self.layers)

    @property
    def is_narrow(self) -> bool:
        """Whether rows have scales beside them."""
        return self.table_dtype == "float8_e4m3fn"

    @property
    def row_bytes(self) -> int:
        """Bytes of a row, its scales included."""
        size = self.head_dim * jnp.dtype(self.table_dtype).itemsize
        return size + self.head_dim // BLOCK_SIZE * self.is_narrow

    @property
    def dilation(self) -> int:
        """Tokens between two taps of the convolution."""
        return self.orders[-1]

    @property
    def num_columns(self) -> int:
        """C, rows that a token reads."""
        return len(self.orders) * self.heads

    @property
    def width(self) -> int:
        """Numbers that a token reads."""
        return self.num_columns * self.head_dim

    def with_vocabulary(self, vocabulary: CompressedVocabulary) -> EngramConfig:
        """The config with the classes of a tokenizer.

        Raises:
          ValueError: the config is of another map, or `pad_id` is no token.
        """
        fingerprint = vocabulary.fingerprint
        if self.vocabulary not in (None, fingerprint):
            raise ValueError(
                f"EngramConfig: vocabulary={self.vocabulary} is another map than "
                f"{fingerprint}: every row number would be wrong"
            )
        return dataclasses.replace(
            self,
            compressed_size=vocabulary.size,
            pad_class=vocabulary.compressed(self.pad_id),
            vocabulary=fingerprint,
        )

    def layout(self, vocab_size: int) -> HashLayout:
        """The hash of all layers.

        Args:
          vocab_size: number of raw ids V.

        Returns:
          The layout.

        Raises:
          ValueError: `compress` is set, and no tokenizer's classes are.
        """
        if self.compress and self.compressed_size is None:
            raise ValueError(
                "EngramConfig: compress=True needs the classes of a tokenizer, see "
                "`with_vocabulary`; compressed_size is None"
            )
        return _layout(self, vocab_size)


@functools.cache
def _layout(config: EngramConfig, vocab_size: int) -> HashLayout:
    pad = config.pad_id if config.pad_class is None else config.pad_class
    return HashLayout.create(
        vocab_size=config.compressed_size or vocab_size,
        pad_id=pad,
        layer_ids=config.layers,
        orders=config.orders,
        heads=config.heads,
        bases=config.bases,
        seed=config.seed,
    )
