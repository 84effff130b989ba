"""A packed batch and the metadata that every layer reads, built once per batch."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.attention import TileBounds, tile_bounds
from pallas_kernels.causal_conv1d import Borders, document_borders
from pallas_kernels.gated_delta_rule import document_starts


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class PackedBatch:
    """Rows that hold several documents each.

    Attributes:
      tokens: i32[B, T], zero where padded.
      targets: i32[B, T], the next token of the same document, zero elsewhere.
      segment_ids: i32[B, T], documents count from 1 in each row, 0 is padding.
      positions: i32[B, T], index inside the document, zero where padded.
      loss_mask: f32[B, T], weight of predicting `targets`; zero on the last token of
        a document and on padding.
      num_bytes: f32[B, T], bytes of UTF-8 text that `targets` stands for, so that a
        loss can be told in nats per byte under any tokenizer.
    """

    tokens: jax.Array
    targets: jax.Array
    segment_ids: jax.Array
    positions: jax.Array
    loss_mask: jax.Array
    num_bytes: jax.Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionTiles:
    """The table that kernels of causal attention read in place of segment ids.

    Attributes:
      window: tokens that a query sees, itself among them; `None` for all.
      block_q, block_kv: what `pallas_kernels.attention.tiling` says for the head dim.
    """

    window: int | None
    block_q: int
    block_kv: int

    def build(self, meta: PackingMetadata) -> TileBounds:
        """Makes the table of a batch."""
        ids = meta.segment_ids if meta.ids_are_given else None
        batch, time = meta.segment_ids.shape
        return tile_bounds(
            batch=batch,
            time=time,
            q_segment_ids=ids,
            kv_segment_ids=ids,
            causal=True,
            **dataclasses.asdict(self),
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChunkStarts:
    """The table that kernels of the gated delta rule read in place of `is_first`.

    Attributes:
      chunk: tokens per chunk.
    """

    chunk: int

    def build(self, meta: PackingMetadata) -> jax.Array:
        """Makes the table of a batch, i32[B, T]."""
        return document_starts(meta.is_first, self.chunk)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ConvBorders:
    """The tables that kernels of the causal convolution read, without a cache.

    Attributes:
      width: taps W.
    """

    width: int

    def build(self, meta: PackingMetadata) -> Borders:
        """Makes the tables of a batch."""
        batch, time = meta.segment_ids.shape
        given = meta.ids_are_given
        return document_borders(
            meta.is_first if given else None,
            meta.is_real if given else None,
            batch=batch,
            time=time,
            width=self.width,
        )


PackingTable = AttentionTiles | ChunkStarts | ConvBorders
"""Names a table that an op's kernels read; hashable, and it knows how to build it."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class PackingMetadata:
    """Where documents begin and end, in the form the layers read.

    It is built once per batch; layers get it whole and derive nothing from it again.

    Attributes:
      segment_ids: i32[B, T], documents count from 1 in each row, 0 is padding.
      positions: i32[B, T], index inside the document, counted on from the cache.
      is_real: bool[B, T], false on padding.
      is_first: bool[B, T], true on a token that must not see what came before it in
        its row: the recurrent state and the convolution window restart there.
      ids_are_given: whether a caller's segments are behind this; false means one
        document per row, so that attention needs no segment comparison.
      tables: what the kernels of the model's layers read, in the order of `names`;
        empty where no layer runs such a kernel.
      names: which tables these are, each once.
    """

    segment_ids: jax.Array
    positions: jax.Array
    is_real: jax.Array
    is_first: jax.Array
    ids_are_given: bool = dataclasses.field(default=True, metadata={"static": True})
    tables: tuple[Any, ...] = ()
    names: tuple[PackingTable, ...] = dataclasses.field(
        default=(), metadata={"static": True}
    )

    def table(self, name: PackingTable) -> Any:
        """The table of that name, `None` if it was not built."""
        if name not in self.names:
            return None
        return self.tables[self.names.index(name)]


def packing_metadata(
    shape: tuple[int, int],
    *,
    segment_ids: jax.Array | None = None,
    positions: jax.Array | None = None,
    cached_length: jax.Array | None = None,
    tables: Iterable[PackingTable] = (),
) -> PackingMetadata:
    """Builds the metadata of one batch.

    Args:
      shape: (B, T).
      segment_ids: i32[B, T], 0 or less is padding, else documents in any numbering
        that changes at each border; an id that comes back after another one or after
        padding is a new document. `None` means one document per row without padding.
      positions: i32[B, T]; `None` counts from the start of each document.
      cached_length: i32[B], tokens of the row's document that a cache already holds;
        the first token of the row then continues that document.
      tables: those that layers read, see `Decoder.packing_tables`; one that is named
        several times is built once.

    Returns:
      The metadata.

    Raises:
      ValueError: a shape is not (B, T).
    """
    for name, array in (("segment_ids", segment_ids), ("positions", positions)):
        if array is not None and array.shape != shape:
            raise ValueError(f"{name} has shape {array.shape}, expected {shape}")
    time = shape[1]
    index = jnp.broadcast_to(jnp.arange(time, dtype=jnp.int32), shape)
    ids_are_given = segment_ids is not None
    if segment_ids is None:
        segment_ids = jnp.ones(shape, jnp.int32)
    is_real = segment_ids > 0
    # [B, T]: the token before, with a sentinel that no document has in front.
    before = jnp.pad(segment_ids[:, :-1], ((0, 0), (1, 0)), constant_values=-1)
    is_first = is_real & (segment_ids != before)
    if ids_are_given:
        # Attention compares ids: one that comes back must not join two documents.
        number = jnp.cumsum(is_first, axis=1, dtype=jnp.int32)
        segment_ids = jnp.where(is_real, number, 0)
    start = jax.lax.cummax(jnp.where(is_first, index, 0), axis=1)
    if positions is None:
        positions = jnp.where(is_real, index - start, 0)
        if cached_length is not None:
            positions = jnp.where(is_real, positions + cached_length[:, None], 0)
    if cached_length is not None:
        # A document that the cache has begun goes on; only a fresh one restarts.
        is_first = is_first & (cached_length[:, None] == 0)
    meta = PackingMetadata(
        segment_ids=segment_ids,
        positions=positions,
        is_real=is_real,
        is_first=is_first,
        ids_are_given=ids_are_given,
    )
    names = tuple(dict.fromkeys(tables))
    built = tuple(name.build(meta) for name in names)
    return dataclasses.replace(meta, tables=built, names=names)
