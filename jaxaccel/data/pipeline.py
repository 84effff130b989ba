"""From a `DataConfig` to exactly resumable iterators of packed batches."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterator
from typing import Any, Self

import numpy as np

from jaxaccel.data import corpus as corpus_lib
from jaxaccel.data import mixture as mixture_lib
from jaxaccel.data import packing as packing_lib
from jaxaccel.data import tokenizer as tokenizer_lib
from jaxaccel.data.batch import PackedBatch
from jaxaccel.data.corpus import Corpus, Tokenizer
from jaxaccel.data.sources import Source, StdlibSource, check_fraction
from jaxaccel.data.stream import BatchSource, PackedStream, StreamSpec
from jaxaccel.data.worker import exit_with_parent


_STATE_VERSION = 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataConfig:
    """What a run reads and how it is packed.

    Attributes:
      sources: where documents come from.
      weights: share of each source; None takes every document once an epoch.
      weight_unit: "tokens" or "documents": what the weights are shares of.
      mixture_end: "first_exhausted" ends an epoch when the first source is used up,
        "all_exhausted" when the last one is, and repeats the others.
      tokenizer: "bpe" trains one on the train split, "byte" needs no training, else the
        path of a saved tokenizer.
      vocab_size: ids of a trained tokenizer, specials included.
      tokenizer_sample_bytes: about how much text a tokenizer is trained on.
      seq_len: T, tokens of a row.
      batch_size: rows of the global batch, over all processes.
      packing: "bfd", "first_fit" or "next_fit".
      window: pieces that are packed together, None packs an epoch at once.
      align: documents begin at multiples of this in their row.
      max_docs: most documents in a row, None sets no limit.
      overlong: "split", "truncate", "drop" or "error" for documents longer than a row.
      append_eos: ends each document with the eos id.
      prepend_bos: begins each document with the bos id, so that its first token of
        text is predicted too.
      heldout_fraction: share of documents that are held out, by a hash of their names.
      seed: of document order, mixture and row order.
      num_workers: grain worker processes that build train batches, 0 builds them in a
        thread of this process.
      prefetch: batches built ahead (in each worker); 0 builds them when asked.
    """

    sources: tuple[Source, ...] = (StdlibSource(),)
    weights: tuple[float, ...] | None = None
    weight_unit: str = "tokens"
    mixture_end: str = "first_exhausted"
    tokenizer: str = "bpe"
    vocab_size: int = 4096
    tokenizer_sample_bytes: int = 4_000_000
    seq_len: int = 256
    batch_size: int = 8
    packing: str = "bfd"
    window: int | None = 1024
    align: int = 1
    max_docs: int | None = None
    overlong: str = "split"
    append_eos: bool = True
    prepend_bos: bool = False
    heldout_fraction: float = 0.05
    seed: int = 0
    num_workers: int = 0
    prefetch: int = 2

    def __post_init__(self) -> None:
        if not self.sources:
            raise ValueError("sources is empty, there must be at least one")
        if self.weights is not None and len(self.weights) != len(self.sources):
            raise ValueError(
                f"{len(self.weights)} weights for {len(self.sources)} sources"
            )
        _check_least(self, 1, "seq_len", "batch_size", "align")
        _check_least(self, 1, "tokenizer_sample_bytes", "window", "max_docs")
        _check_least(self, 0, "seed", "num_workers", "prefetch")
        _check_one_of(self, "weight_unit", mixture_lib.UNITS)
        _check_one_of(self, "mixture_end", mixture_lib.ENDS)
        _check_one_of(self, "packing", packing_lib.ALGORITHMS)
        _check_one_of(self, "overlong", packing_lib.OVERLONG)
        check_fraction(self.heldout_fraction)


def _check_least(config: DataConfig, least: int, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        if value is not None and value < least:
            raise ValueError(f"{name} is {value}, must be at least {least}")


def _check_one_of(config: DataConfig, name: str, allowed: tuple[str, ...]) -> None:
    value = getattr(config, name)
    if value not in allowed:
        raise ValueError(f"{name} is {value!r}, allowed are {allowed}")


def prepare(
    config: DataConfig,
    cache_dir: str | os.PathLike[str] | None = None,
    *,
    tokenizer: Tokenizer | None = None,
) -> Corpus:
    """Reads, splits and tokenises the corpus of a config.

    Args:
      config: what to read.
      cache_dir: folder for tokenised corpora. A second call with the same sources and
        tokenizer maps the tokens from there; without it they are held in memory.
      tokenizer: takes the place of the config's, e.g. the one of a checkpoint.

    Returns:
      The corpus; `make_iterator` reads both of its splits.

    Raises:
      FileNotFoundError: a source or the tokenizer's file is missing.
      ValueError: a source is empty after its filter, the train split is empty, or a
        file is not what it should be.
    """
    make = _tokenizer_maker(config, tokenizer)
    if tokenizer is None and config.tokenizer == "bpe":
        # Known without training, so that a cached corpus needs no second training.
        key = f"{config.vocab_size} {config.tokenizer_sample_bytes} "
        key += tokenizer_lib.library_version()
    else:
        key = make().fingerprint
    corpus = corpus_lib.build_corpus(
        config.sources,
        make,
        tokenizer_key=key,
        heldout_fraction=config.heldout_fraction,
        prepend_bos=config.prepend_bos,
        append_eos=config.append_eos,
        cache_dir=cache_dir,
    )
    if not len(corpus.documents("train")):
        raise ValueError(
            f"the train split of {len(corpus.names)} documents is empty at "
            f"heldout_fraction={config.heldout_fraction}"
        )
    return corpus


def _tokenizer_maker(
    config: DataConfig, given: Tokenizer | None
) -> Callable[[], Tokenizer]:
    if given is not None:
        return lambda: given
    if config.tokenizer == "byte":
        return tokenizer_lib.ByteTokenizer
    if config.tokenizer == "bpe":
        return lambda: corpus_lib.train_tokenizer(
            config.sources,
            config.vocab_size,
            config.tokenizer_sample_bytes,
            config.heldout_fraction,
        )
    if not os.path.isfile(config.tokenizer):
        raise FileNotFoundError(
            f"tokenizer is {config.tokenizer!r}, which is neither 'bpe' nor 'byte' nor "
            "a file"
        )
    return lambda: tokenizer_lib.load_tokenizer(config.tokenizer)


def make_iterator(
    corpus: Corpus,
    config: DataConfig,
    split: str = "train",
    *,
    process_index: int = 0,
    process_count: int = 1,
    start: dict[str, Any] | None = None,
) -> PackedIterator:
    """Packs a split into batches.

    The train stream is endless: each epoch shuffles and packs the documents anew. The
    held-out stream reads every document once and fills its last batch with padding.

    Args:
      corpus: from `prepare`.
      config: how to pack; only what concerns packing is read.
      split: "train" or "heldout".
      process_index: which process this is.
      process_count: of how many. The processes' rows laid end to end are the batch
        that one process alone would read.
      start: a state from `get_state` to go on from; any number of processes and
        workers may go on from it.

    Returns:
      An iterator of `PackedBatch` with numpy leaves of shape
      [batch_size / process_count, seq_len].

    Raises:
      ValueError: the split is empty, the batch does not divide by the processes, a
        document is too long under `overlong="error"`, or the state is of another
        corpus or config.
    """
    if not 0 <= process_index < process_count:
        raise ValueError(
            f"process_index is {process_index}, must be in [0, {process_count})"
        )
    if config.batch_size % process_count:
        raise ValueError(
            f"batch_size {config.batch_size} does not divide by {process_count} "
            "processes"
        )
    documents = corpus.documents(split)
    if not len(documents):
        raise ValueError(
            f"the {split} split of {len(corpus.names)} documents is empty at "
            f"heldout_fraction={config.heldout_fraction}"
        )
    mixture = _mixture(corpus, config, documents) if split == "train" else None
    names = {field.name for field in dataclasses.fields(StreamSpec)}
    stream = PackedStream(
        StreamSpec(**{name: getattr(config, name) for name in names}),
        corpus.store,
        corpus.tokenizer.token_bytes(),
        documents,
        mixture,
        corpus.names,
    )
    stream.packing(0)  # A document that is too long is told now, not in a thread.
    settings = {name: getattr(config, name) for name in sorted(names)}
    settings["split"] = split
    settings["draws"] = None if mixture is None else list(mixture.draws)
    iterator = PackedIterator(
        stream=stream,
        identity={"corpus": corpus.fingerprint, **settings},
        process=(process_index, process_count),
        # A held-out pass is short: starting processes for it would cost more.
        num_workers=config.num_workers if split == "train" else 0,
        prefetch=config.prefetch,
    )
    if start is not None:
        iterator.set_state(start)
    return iterator


def _mixture(
    corpus: Corpus, config: DataConfig, documents: np.ndarray
) -> mixture_lib.Mixture:
    count = corpus.num_sources
    if config.weights is not None and len(config.weights) != count:
        raise ValueError(f"{len(config.weights)} weights for {count} sources")
    source = corpus.source[documents]
    lengths = corpus.store.lengths[documents]
    tokens = np.bincount(source, weights=lengths, minlength=count)
    return mixture_lib.make_mixture(
        np.bincount(source, minlength=count).tolist(),
        tokens.astype(np.int64).tolist(),
        weights=config.weights,
        unit=config.weight_unit,
        end=config.mixture_end,
    )


class PackedIterator(Iterator[PackedBatch]):
    """Batches of one process, with a state that says exactly where it stands.

    The state names the next batch, so it fits any number of processes and workers, and
    reading ahead never shows in it. Close an iterator that has workers when done with
    it (or use it in a `with`).
    """

    def __init__(
        self,
        *,
        stream: PackedStream,
        identity: dict[str, Any],
        process: tuple[int, int],
        num_workers: int,
        prefetch: int,
    ):
        self._stream = stream
        self._identity = identity
        self._process = process
        self._num_workers = num_workers
        self._prefetch = prefetch
        self._next_batch = 0
        self._reader: Any = None

    def __next__(self) -> PackedBatch:
        if self._next_batch >= self._stream.num_batches:
            self.close()
            raise StopIteration
        if self._reader is None:
            self._reader = self._open()
        arrays = next(self._reader)
        self._next_batch += 1
        return PackedBatch(**arrays)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    @property
    def epoch(self) -> int:
        """The epoch that the next batch begins in."""
        return self._stream.position(self._next_batch)[0]

    @property
    def efficiency(self) -> float:
        """Real tokens over all tokens of the rows of this epoch."""
        return self.packing.efficiency

    @property
    def packing(self) -> packing_lib.Packing:
        """How the rows of this epoch are packed."""
        return self._stream.packing(self.epoch)

    @property
    def num_batches(self) -> int | None:
        """Batches of the whole held-out stream; None for the endless train stream."""
        return self._stream.num_batches if self._identity["draws"] is None else None

    def get_state(self) -> dict[str, Any]:
        """Where the iterator stands, in types that JSON has."""
        epoch, first_row = self._stream.position(self._next_batch)
        return {
            "version": _STATE_VERSION,
            "batch": self._next_batch,
            "epoch": epoch,
            "epoch_first_row": first_row,
            "identity": dict(self._identity),
        }

    def set_state(self, state: dict[str, Any]) -> None:
        """Goes on from a state.

        Args:
          state: from `get_state`, of an iterator over the same corpus and packing.

        Raises:
          ValueError: the state is of another corpus, split or packing; names what
            differs.
        """
        if state.get("version") != _STATE_VERSION:
            raise ValueError(
                f"data state has version {state.get('version')!r}, expected "
                f"{_STATE_VERSION}"
            )
        saved, own = state["identity"], self._identity
        different = [k for k in own if saved.get(k) != own[k]]
        if different:
            told = ", ".join(f"{k} {saved.get(k)!r} -> {own[k]!r}" for k in different)
            raise ValueError(f"the data state is of another stream: {told}")
        self.close()
        self._stream = self._stream.based_at(state["epoch"], state["epoch_first_row"])
        self._next_batch = int(state["batch"])

    def close(self) -> None:
        """Ends reading ahead and the worker processes; a later `next` restarts them."""
        if self._reader is not None:
            self._reader.close()
            self._reader = None

    def _open(self) -> Any:
        """Starts grain at the next batch."""
        import grain
        from absl import flags

        index, count = self._process
        dataset = grain.MapDataset.source(
            BatchSource(
                stream=self._stream,
                first=self._next_batch,
                process_index=index,
                process_count=count,
            )
        )
        # One thread keeps batches ahead; more would only contend for the interpreter.
        threads = int(self._prefetch > 0 and self._num_workers == 0)
        options = grain.ReadOptions(
            num_threads=threads, prefetch_buffer_size=self._prefetch * threads
        )
        dataset = dataset.to_iter_dataset(options)
        if self._num_workers > 0:
            # Grain's workers read absl flags, which only an absl.app has parsed.
            if not flags.FLAGS.is_parsed():
                flags.FLAGS.mark_as_parsed()
            dataset = dataset.mp_prefetch(
                grain.MultiprocessingOptions(
                    num_workers=self._num_workers,
                    per_worker_buffer_size=max(self._prefetch, 1),
                ),
                worker_init_fn=exit_with_parent,
            )
        return iter(dataset)
