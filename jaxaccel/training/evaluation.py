"""Held-out text: what is evaluated, and the baseline on the same text."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxaccel.core.sharding import global_batch
from jaxaccel.core.tree import ModelParts
from jaxaccel.data.batch import PackedBatch
from jaxaccel.data.bigram import byte_bigram_baseline
from jaxaccel.data.corpus import Corpus
from jaxaccel.data.pipeline import DataConfig, make_iterator
from jaxaccel.training.config import TrainConfig
from jaxaccel.training.step import TrainState, make_eval_step


class Heldout:
    """The held-out batches of a run.

    Attributes:
      batches: this process's rows, host arrays; empty without held-out text.
    """

    def __init__(
        self,
        corpus: Corpus,
        data_config: DataConfig,
        parts: ModelParts,
        config: TrainConfig,
        mesh: Mesh,
    ):
        """Reads the batches; compiles when first used."""
        self._corpus = corpus
        self._data_config = data_config
        self._mesh = mesh
        self._limit = config.eval_batches
        self._step = jax.jit(
            make_eval_step(parts, config),
            out_shardings=NamedSharding(mesh, PartitionSpec()),
        )
        self.batches: list[PackedBatch] = []
        if len(corpus.documents("heldout")):
            self.batches = self._read(jax.process_index(), jax.process_count())

    def _read(self, index: int, count: int) -> list[PackedBatch]:
        with make_iterator(
            self._corpus,
            self._data_config,
            "heldout",
            process_index=index,
            process_count=count,
        ) as iterator:
            return list(itertools.islice(iterator, self._limit))

    def byte_bigram(self) -> float:
        """Nats per byte of a byte bigram that has read the train split."""
        batches = self.batches if jax.process_count() == 1 else self._read(0, 1)
        pieces = _pieces(batches, self._corpus.tokenizer)
        return byte_bigram_baseline(self._corpus.texts("train"), pieces)

    def evaluate(self, state: TrainState) -> dict[str, float]:
        """Figures of the parameters, and of their running mean if there is one.

        Args:
          state: of the run.

        Returns:
          "nats_per_byte", "nats_per_token", "accuracy", and "ema_nats_per_byte": of
          the running mean, with buffers, tables of an n-gram memory among them, as
          they are.
        """
        values = self._figures(state.params, state.buffers)
        if state.ema is not None:
            ema = {
                name: x.astype(state.params[name].dtype)
                for name, x in state.ema.items()
            }
            mean = self._figures(ema, state.buffers)
            values["ema_nats_per_byte"] = mean["nats_per_byte"]
        return values

    def _figures(
        self, params: Mapping[str, jax.Array], buffers: Mapping[str, jax.Array]
    ) -> dict[str, float]:
        sums = [
            self._step(params, buffers, global_batch(batch, self._mesh))
            for batch in self.batches
        ]
        nats, weight, num_bytes, correct = (
            float(np.sum([float(s[name]) for s in sums]))
            for name in ("nats", "weight", "bytes", "correct")
        )
        return {
            "nats_per_byte": nats / max(num_bytes, 1.0),
            "nats_per_token": nats / max(weight, 1.0),
            "accuracy": correct / max(weight, 1.0),
        }


def _pieces(batches: Sequence[PackedBatch], tokenizer: Any) -> Iterator[bytes]:
    """The documents, or pieces of them, that lie in host batches.

    As bytes: a piece may be cut inside a character, and what replaces its halves in
    text is other and more bytes than the model is asked for.
    """
    for batch in batches:
        for tokens, segments in zip(batch.tokens, batch.segment_ids, strict=True):
            for segment in range(1, int(segments.max()) + 1):
                yield tokenizer.decode_bytes(np.asarray(tokens)[segments == segment])
