"""A packed batch and the metadata that every layer reads, built once per batch."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp


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


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class PackingMetadata:
    """Where documents begin and end, in the form the layers read.

    Attributes:
      segment_ids: i32[B, T], documents count from 1 in each row, 0 is padding.
      positions: i32[B, T], index inside the document, counted on from the cache.
      is_real: bool[B, T], false on padding.
      is_first: bool[B, T], true on a token that must not see what came before it in
        its row: the recurrent state and the convolution window restart there.
      ids_are_given: whether a caller's segments are behind this; false means one
        document per row, so that attention needs no segment comparison.
    """

    segment_ids: jax.Array
    positions: jax.Array
    is_real: jax.Array
    is_first: jax.Array
    ids_are_given: bool = dataclasses.field(default=True, metadata={"static": True})


def packing_metadata(
    shape: tuple[int, int],
    *,
    segment_ids: jax.Array | None = None,
    positions: jax.Array | None = None,
    cached_length: jax.Array | None = None,
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
    return PackingMetadata(
        segment_ids=segment_ids,
        positions=positions,
        is_real=is_real,
        is_first=is_first,
        ids_are_given=ids_are_given,
    )
