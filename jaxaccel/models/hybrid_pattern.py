"""The pattern string of hybrid models: what each layer is, one symbol a layer.

`MEMEM*E` reads as Mamba-2, experts, Mamba-2, experts, Mamba-2, attention, experts. A
bar cuts the layers into pipeline stages. A slash begins a prediction block, once for
each depth it is applied at: `MEM*E/*E/*E` predicts two further tokens with one block
of attention and experts (Megatron-LM, `hybrid_layer_allocation.py`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Self


SYMBOLS: Mapping[str, str] = {
    "M": "mamba",
    "*": "attention",
    "E": "moe",
    "-": "mlp",
    "G": "gdn",
    "D": "sparse_attention",
    "+": "latent_attention",
}
"""Symbol -> kind of the layer."""

CUT, BLOCK = "|", "/"
_SYMBOL_OF = {kind: symbol for symbol, kind in SYMBOLS.items()}


@dataclasses.dataclass(frozen=True, kw_only=True)
class HybridPattern:
    """A pattern string, read; `str` writes it again.

    Attributes:
      layers: kind of each layer, one or more.
      cuts: before which layers a pipeline stage begins, rising, each from 1 to the
        last layer.
      block: kinds of the layers of the prediction block, empty where there is none.
      depth: how often the block is applied, 0 where there is none.
    """

    layers: tuple[str, ...]
    cuts: tuple[int, ...] = ()
    block: tuple[str, ...] = ()
    depth: int = 0

    def __post_init__(self):
        for name in ("layers", "cuts", "block"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        if not self.layers:
            raise ValueError("a pattern needs at least one layer, got none")
        unknown = sorted({*self.layers, *self.block} - set(_SYMBOL_OF))
        if unknown:
            raise ValueError(
                f"a pattern has no layers {unknown}, allowed are {sorted(_SYMBOL_OF)}"
            )
        if list(self.cuts) != sorted({*self.cuts} & {*range(1, len(self.layers))}):
            raise ValueError(
                f"cuts={self.cuts} must rise within 1 to {len(self.layers) - 1}"
            )
        if (self.depth > 0) != bool(self.block) or self.depth < 0:
            raise ValueError(
                f"depth={self.depth} does not fit the prediction block {self.block}"
            )

    @classmethod
    def parse(cls, text: str) -> Self:
        """Reads a pattern string.

        Args:
          text: symbols of `SYMBOLS`, bars between layers, then for each depth a slash
            and the symbols of the prediction block, every time the same.

        Raises:
          ValueError: says what is wrong and where.
        """
        main, *blocks = text.split(BLOCK)
        if len(set(blocks)) > 1:
            raise ValueError(
                f"pattern {text!r} has prediction blocks {blocks}, which must be "
                "equal: one block is applied at every depth"
            )
        stages = main.split(CUT)
        if not all(stages):
            raise ValueError(f"pattern {text!r} has a stage without layers")
        if blocks and not blocks[0]:
            raise ValueError(f"pattern {text!r} has a prediction block without layers")
        cuts, end = [], 0
        for stage in stages[:-1]:
            end += len(stage)
            cuts.append(end)
        return cls(
            layers=_kinds(text, "".join(stages)),
            cuts=tuple(cuts),
            block=_kinds(text, blocks[0]) if blocks else (),
            depth=len(blocks),
        )

    def __str__(self) -> str:
        starts = set(self.cuts)
        main = "".join(
            (CUT if i in starts else "") + _SYMBOL_OF[kind]
            for i, kind in enumerate(self.layers)
        )
        block = BLOCK + "".join(_SYMBOL_OF[kind] for kind in self.block)
        return main + block * self.depth


def _kinds(text: str, symbols: str) -> tuple[str, ...]:
    for symbol in symbols:
        if symbol not in SYMBOLS:
            raise ValueError(
                f"pattern {text!r} has {symbol!r}, allowed are "
                f"{' '.join((*SYMBOLS, CUT, BLOCK))}"
            )
    return tuple(SYMBOLS[symbol] for symbol in symbols)
