"""A decoder's memory whose tables stay off the device.

The rows that a batch reads follow from its tokens alone. `HostEngramMemory.prefetch`
hashes on the host and starts the gathers of all layers, the earliest first, before the
model runs; `with_rows` puts what came into the tables' places. `with_host_tables`
leaves all of it to the device, which reads single rows over the link. They stand alone
for now: nothing in the library calls them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx

from jaxaccel.core.host_table import Fetch, TableStore
from jaxaccel.data.compressed_vocab import CompressedVocabulary
from jaxaccel.nn.engram import GatheredRows, HostRows
from jaxaccel.nn.engram_config import EngramConfig
from jaxaccel.nn.implementation import Implementations
from jaxaccel.quant.mxfp8 import packed_width
from pallas_kernels.engram_hash import hash_on_host


Rows = tuple[tuple[jax.Array, jax.Array], ...]
"""(rows [K, d], slots i32[B, T, C]) for each layer with a memory."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PendingMemory:
    """Rows of a batch that are on their way.

    Attributes:
      fetches: one for each layer with a memory.
      history: i32[B, N - 1], for the call that continues these texts.
    """

    fetches: tuple[Fetch, ...]
    history: np.ndarray

    def rows(self) -> Rows:
        """Waits for them."""
        return tuple(fetch.result() for fetch in self.fetches)


class HostEngramMemory:
    """Hash and tables of a decoder's memory, on the host."""

    def __init__(
        self,
        config: EngramConfig,
        vocab_size: int,
        stores: Sequence[TableStore],
        *,
        vocabulary: CompressedVocabulary | None = None,
    ):
        """Checks that they belong together.

        Args:
          config: the model's memory.
          vocab_size: number of the model's raw ids.
          stores: the table of each of the config's layers; with 8 bits, the rows of
            `quant.mxfp8.pack`.
          vocabulary: the map to token classes, with `compressed_size`.

        Raises:
          ValueError: tables or map are not those of the config.
        """
        self.config, self.layout = config, config.layout(vocab_size)
        width = packed_width(config.head_dim) if config.is_narrow else config.head_dim
        expected = [(rows, width) for rows in self.layout.num_rows]
        found = [(store.num_rows, store.width) for store in stores]
        if found != expected:
            raise ValueError(
                f"tables have rows and widths {found}, expected {expected}"
            )
        fingerprint = None if vocabulary is None else vocabulary.fingerprint
        if fingerprint != config.vocabulary:
            raise ValueError(
                f"the memory's hash is for the map {config.vocabulary}, this one is "
                f"{fingerprint}: every row number would be wrong"
            )
        self._classes = None if vocabulary is None else vocabulary.token_map
        self._stores = tuple(stores)

    def lookups(
        self,
        tokens: np.ndarray,
        segments: np.ndarray | None = None,
        history: np.ndarray | None = None,
    ) -> tuple[np.ndarray, np.ndarray]:
        """What `NGramHash` computes on the device.

        Args:
          tokens: i32[B, T]; anything at padding.
          segments: i32[B, T] as a decoder takes them.
          history: i32[B, N - 1] of an earlier call, whose documents go on.

        Returns:
          (ids i32[B, T, L, C], history).

        Raises:
          ValueError: a token is outside of the vocabulary.
        """
        flags: dict[str, Any] = {}
        if segments is not None:
            segments = np.asarray(segments)
            flags["is_real"] = segments > 0
            tokens = np.where(flags["is_real"], tokens, 0)
            if self.config.boundary == "segment" and history is None:
                before = np.pad(segments[:, :-1], ((0, 0), (1, 0)), constant_values=-1)
                flags["is_first"] = flags["is_real"] & (segments != before)
        if self.config.boundary == "eos":
            flags["is_last"] = np.asarray(tokens) == self.config.eos_id
        return hash_on_host(
            tokens, self.layout, token_map=self._classes, history=history, **flags
        )

    def prefetch(
        self,
        tokens: np.ndarray,
        segments: np.ndarray | None = None,
        history: np.ndarray | None = None,
    ) -> PendingMemory:
        """Starts the gathers of all layers; arguments as of `lookups`."""
        ids, history = self.lookups(tokens, segments, history)
        fetches = tuple(
            store.prefetch(ids[:, :, index]) for index, store in enumerate(self._stores)
        )
        return PendingMemory(fetches=fetches, history=history)


def with_rows(model: Any, rows: Rows) -> Any:
    """The decoder that reads these rows in place of its tables.

    Args:
      model: a `Decoder` with a memory; its tables are dropped, not changed, so that a
        model whose tables were never made will do.
      rows: of `PendingMemory.rows`; traced or not.

    Returns:
      A copy of the model that shares all other arrays.
    """
    graphdef, state = nnx.split(model)
    model = nnx.merge(graphdef, state)
    for engram, (own, slots) in zip(model.memory.layers, rows, strict=True):
        engram.table = GatheredRows(own, slots)
    return model


def with_host_tables(
    model: Any, tables: Sequence[jax.Array], *, implementation: Implementations = None
) -> Any:
    """The decoder whose tables the device reads in the host's memory, row by row.

    Args:
      model: a `Decoder` with a memory; its tables are dropped, not changed.
      tables: one [rows, d] for each layer with a memory, in the memory kind
        "pinned_host".
      implementation: of `pallas_kernels.host_gather`.

    Returns:
      A copy of the model that shares all other arrays.
    """
    graphdef, state = nnx.split(model)
    model = nnx.merge(graphdef, state)
    for engram, rows in zip(model.memory.layers, tables, strict=True):
        engram.table = HostRows(rows, implementation=implementation)
    return model
