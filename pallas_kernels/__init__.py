"""Hopper kernels for language models, each with a readable reference.

Table of contents; every name is imported on first use:

=====================  =========================================================
``rms_norm``           root-mean-square norm, plain, zero-centred, gated, grouped
``gated_delta_rule``   the Gated DeltaNet recurrence, chunked
``gated_delta_step``   one token of a Gated DeltaNet layer, state in place
``causal_conv1d``      short depthwise causal convolution with state
``attention``          grouped-query attention over packed segments
``decode_attention``   newest tokens over a cache, in one block or in pages
``grouped_matmul``     one matrix product per expert over sorted rows
``sort_dispatch``      sort-based routing of tokens to experts
``ssd``                the Mamba-2 recurrence, chunked, and one token of it
``ssd_step``           one token of a Mamba-2 layer, state in place
``engram_gate``        how much of a memory each stream takes, and that much of it
``engram_gather``      rows of a table, in 16 bits or in 8 with scales
``engram_hash``        row numbers of hashed n-grams
``gemv``               few rows times matrices, norm and SwiGLU with them
``host_gather``        rows of a table that stays in the host's memory
``landmark_scores``    how much a query group weighs each chunk's landmark
``sparse_decode_attention``  newest token over chosen chunks, keys made on the fly
``rope_append``        norm and rotation of new tokens, their keys into a cache
``segment_sum``        sums of rows with equal ids, in one order
``top_k_select``       the largest scores of a row, exactly, as ascending places
``explain``            which implementation a call would run, and why
=====================  =========================================================
"""

import importlib
import sys
import types


_OPS = (
    "attention",
    "causal_conv1d",
    "decode_attention",
    "engram_gate",
    "engram_gather",
    "engram_hash",
    "gated_delta_rule",
    "gated_delta_step",
    "gemv",
    "grouped_matmul",
    "host_gather",
    "landmark_scores",
    "rms_norm",
    "rope_append",
    "segment_sum",
    "sort_dispatch",
    "sparse_decode_attention",
    "ssd",
    "ssd_step",
    "top_k_select",
)

__all__ = [*_OPS, "explain"]


def __getattr__(name: str):
    if name in _OPS:
        module = importlib.import_module(f"{__name__}.{name}")
        return getattr(module, name)
    if name == "explain":
        from pallas_kernels._common.dispatch import explain

        return explain
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)


class _TableOfContents(types.ModuleType):
    """Keeps `pallas_kernels.<op>` the function, whichever way it was imported.

    An op's folder has the name of its public function. The import system binds the
    folder's module under that name once it is loaded; users mean the function.
    """

    def __setattr__(self, name, value):
        if name in _OPS and isinstance(value, types.ModuleType):
            value = getattr(value, name)
        super().__setattr__(name, value)


sys.modules[__name__].__class__ = _TableOfContents
