"""Tables that tie the tensors of a checkpoint to the parameters of a `Decoder`.

A model file states its names once, as `Rule`s: one tensor of the checkpoint, the
region of our parameters that holds the same numbers, and a `Layout` that turns one
into the other and exactly back. Loading, saving, checking and mapping gradients all
read the same table.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np


type Arrays = tuple[np.ndarray, ...]


class Layout(Protocol):
    """A bijection between one stored tensor and the pieces of ours."""

    def load(self, stored: np.ndarray) -> Arrays:
        """Splits a stored tensor into our pieces."""
        ...

    def save(self, pieces: Arrays) -> np.ndarray:
        """Rebuilds the stored tensor from our pieces."""
        ...


@dataclasses.dataclass(frozen=True)
class Same:
    """Stored as we hold it."""

    def load(self, stored: np.ndarray) -> Arrays:
        return (stored,)

    def save(self, pieces: Arrays) -> np.ndarray:
        return pieces[0]


@dataclasses.dataclass(frozen=True)
class Transposed:
    """A projection stored [out, in], held [in, out]."""

    def load(self, stored: np.ndarray) -> Arrays:
        return (stored.T,)

    def save(self, pieces: Arrays) -> np.ndarray:
        return pieces[0].T


@dataclasses.dataclass(frozen=True)
class DepthwiseConv:
    """A convolution stored [C, 1, W], held [W, C]."""

    def load(self, stored: np.ndarray) -> Arrays:
        return (stored[:, 0, :].T,)

    def save(self, pieces: Arrays) -> np.ndarray:
        return pieces[0].T[:, None, :]


@dataclasses.dataclass(frozen=True)
class Grouped:
    """Projections stored as one, interleaved group by group.

    The stored rows are `groups` blocks, each with `widths[0]` rows of the first
    projection, `widths[1]` of the second, and so on. `pieces` says which of these
    neighbours stay together in one of our kernels, one after the other.

    Attributes:
      groups: number of blocks.
      widths: rows of each part in a block.
      pieces: for each of our kernels, the parts it holds in order.
    """

    groups: int
    widths: tuple[int, ...]
    pieces: tuple[tuple[int, ...], ...]

    def load(self, stored: np.ndarray) -> Arrays:
        width_in = stored.shape[1]
        blocks = stored.reshape(self.groups, sum(self.widths), width_in)
        parts = np.split(blocks, np.cumsum(self.widths)[:-1], axis=1)
        flat = [part.reshape(-1, width_in).T for part in parts]  # each [in, out]
        return tuple(
            np.concatenate([flat[i] for i in members], axis=1)
            for members in self.pieces
        )

    def save(self, pieces: Arrays) -> np.ndarray:
        width_in = pieces[0].shape[0]
        parts: dict[int, np.ndarray] = {}
        for kernel, members in zip(pieces, self.pieces, strict=True):
            sizes = [self.groups * self.widths[i] for i in members]
            columns = np.split(kernel, np.cumsum(sizes)[:-1], axis=1)
            for i, column in zip(members, columns, strict=True):
                parts[i] = column.T.reshape(self.groups, self.widths[i], width_in)
        blocks = np.concatenate([parts[i] for i in range(len(self.widths))], axis=1)
        return blocks.reshape(-1, width_in)


@dataclasses.dataclass(frozen=True)
class Interleaved:
    """Two projections whose columns are stored in turn, held one after the other."""

    def load(self, stored: np.ndarray) -> Arrays:
        pairs = stored.reshape(*stored.shape[:-1], -1, 2)
        return (pairs.swapaxes(-1, -2).reshape(stored.shape),)

    def save(self, pieces: Arrays) -> np.ndarray:
        halves = pieces[0].reshape(*pieces[0].shape[:-1], 2, -1)
        return halves.swapaxes(-1, -2).reshape(pieces[0].shape)


@dataclasses.dataclass(frozen=True)
class Part:
    """A region of one of our parameters.

    Attributes:
      path: dotted path of the parameter inside its block (or the model).
      columns: first and last column (exclusive) of the last axis; `None` is all.
    """

    path: str
    columns: tuple[int, int] | None = None


@dataclasses.dataclass(frozen=True)
class Rule:
    """One tensor of the checkpoint, or one per expert.

    Attributes:
      name: stored name inside its block; `{expert}` counts the experts.
      parts: our regions, in the order `layout` gives them.
      layout: the bijection between them.
      experts: how many experts `{expert}` runs over, 0 where the name has none. Our
        parameter then has a leading expert axis.
    """

    name: str
    parts: tuple[Part, ...]
    layout: Layout
    experts: int = 0


def rule(name: str, *paths: str, layout: Layout | None = None) -> Rule:
    """A rule whose regions are whole parameters; `Transposed` unless told."""
    return Rule(name, tuple(Part(path) for path in paths), layout or Transposed())


@dataclasses.dataclass(frozen=True)
class Region:
    """A region of one of our parameters, leading axes included.

    Attributes:
      path: dotted path from the model.
      index: what selects the region in the whole parameter.
    """

    path: str
    index: tuple[Any, ...]


@dataclasses.dataclass(frozen=True)
class Entry:
    """One stored tensor with its full name and our regions."""

    name: str
    regions: tuple[Region, ...]
    layout: Layout


@dataclasses.dataclass(frozen=True)
class NameTable:
    """All the names of a model.

    Attributes:
      top: rules outside the blocks.
      blocks: for each position of the layer pattern, the rules of its block.
      num_layers: layers in all, a multiple of the pattern's length.
      places: for each layer, which of `blocks` it is and its row of their leading
        axis; empty where they follow each other period by period.
      prefix: what the names of all layers begin with.
      mtp: rules of the prediction block outside its layer, empty where there is none.
      mtp_block: rules of the layer inside the prediction block.
    """

    top: tuple[Rule, ...]
    blocks: tuple[tuple[Rule, ...], ...]
    num_layers: int
    places: tuple[tuple[int, int], ...] = ()
    prefix: str = "model.layers."
    mtp: tuple[Rule, ...] = ()
    mtp_block: tuple[Rule, ...] = ()

    def entries(self) -> list[Entry]:
        """Every stored tensor, in the order of the layers."""
        found = _expand(self.top, "", "", ())
        count = len(self.blocks)
        places = self.places or [
            (layer % count, layer // count) for layer in range(self.num_layers)
        ]
        for layer, (position, row) in enumerate(places):
            found += _expand(
                self.blocks[position],
                f"{self.prefix}{layer}.",
                f"layers.{position}.",
                (row,),
            )
        found += _expand(self.mtp, "mtp.", "mtp.", ())
        found += _expand(self.mtp_block, "mtp.layers.0.", "mtp.block.", ())
        return found


def _expand(
    rules: Sequence[Rule],
    stored_prefix: str,
    our_prefix: str,
    leading: tuple[int, ...],
) -> list[Entry]:
    found = []
    for item in rules:
        for expert in range(item.experts) if item.experts else [None]:
            index = leading if expert is None else (*leading, expert)
            regions = tuple(_region(our_prefix, part, index) for part in item.parts)
            name = item.name.replace("{expert}", str(expert))
            found.append(Entry(stored_prefix + name, regions, item.layout))
    return found


def _region(prefix: str, part: Part, leading: tuple[int, ...]) -> Region:
    if part.columns is None:
        return Region(prefix + part.path, leading)
    return Region(prefix + part.path, (*leading, ..., slice(*part.columns)))


def stored_shape(entry: Entry, shapes: dict[str, tuple[int, ...]]) -> tuple[int, ...]:
    """The shape that `entry` must have in a file, from the shapes of our parameters."""
    # A broadcast zero has the shape but no memory, so nothing of model size is made.
    pieces = tuple(
        np.broadcast_to(np.zeros((), np.int8), shapes[region.path])[region.index]
        for region in entry.regions
    )
    return entry.layout.save(pieces).shape
