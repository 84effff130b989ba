"""From text to packed batches: sources, tokenizers, mixtures, packing, iterators.

`prepare(DataConfig(...))` reads and tokenises a corpus, `make_iterator` packs it into
an endless, exactly resumable stream of `PackedBatch`.
"""

import importlib


_HOME = {
    "BPETokenizer": "tokenizer",
    "ByteTokenizer": "tokenizer",
    "Corpus": "corpus",
    "DataConfig": "pipeline",
    "Document": "sources",
    "InMemorySource": "sources",
    "JsonlSource": "sources",
    "PackedBatch": "batch",
    "PackedIterator": "pipeline",
    "Packing": "packing",
    "PackingMetadata": "batch",
    "RecallConfig": "recall",
    "RulerConfig": "ruler",
    "RulerTask": "ruler",
    "StdlibSource": "sources",
    "TextFolderSource": "sources",
    "byte_bigram_baseline": "bigram",
    "load_tokenizer": "tokenizer",
    "make_iterator": "pipeline",
    "pack": "packing",
    "packing_metadata": "batch",
    "prepare": "pipeline",
    "recall_accuracy": "recall",
    "recall_batch": "recall",
    "ruler_batch": "ruler",
    "ruler_rows": "ruler",
    "token_bigram_baseline": "bigram",
    "train_bpe": "tokenizer",
}

__all__ = sorted(_HOME)


def __getattr__(name: str):
    if name in _HOME:
        home = importlib.import_module(f"{__name__}.{_HOME[name]}")
        return getattr(home, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
