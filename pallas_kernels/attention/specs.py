"""Sizes at which `attention` is tested and measured, and its benchmark."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.attention.config_mosaic import pick, tiling
from pallas_kernels.attention.tiles import TileBounds, tile_bounds


if TYPE_CHECKING:
    from pallas_kernels._common.bench import Case


@dataclasses.dataclass(frozen=True, kw_only=True)
class Spec:
    """One use of the op.

    Attributes:
      name: where it comes from.
      tag: "ci" (CPU), "model" (tests on the card) or "perf" (measured).
      batch, time, heads, kv_heads, dim: B, T = S, H, G, K = V.
      documents: documents of one length per row; 0 gives the op no segments.
      lengths: lengths of a row's documents instead; what is left is padding.
      window, logit_cap: of `attention`.
      sinks: whether there are sinks.
      prefix: tokens at the start of each document that all its queries see.
    """

    name: str
    tag: str
    batch: int
    time: int
    heads: int
    kv_heads: int
    dim: int = 128
    dtype: str = "bfloat16"
    documents: int = 0
    lengths: tuple[int, ...] = ()
    window: int | None = None
    logit_cap: float | None = None
    sinks: bool = False
    prefix: int = 0

    def __post_init__(self):
        if sum(self.lengths) > self.time:
            raise ValueError(f"{sum(self.lengths)} tokens in a row of {self.time}")

    @property
    def document_lengths(self) -> tuple[int, ...]:
        """Of one row; the whole row if the op gets no segments."""
        if self.lengths:
            return self.lengths
        length = -(-self.time // max(1, self.documents))
        starts = range(0, self.time, length)
        return tuple(min(length, self.time - start) for start in starts)

    @property
    def is_packed(self) -> bool:
        """Whether the op gets segments."""
        return bool(self.documents or self.lengths)

    def segments(self) -> tuple[np.ndarray, np.ndarray]:
        """i32[B, T] segment ids, and bool[B, T], the prefixes of documents."""
        ids, prefix = np.zeros(self.time, np.int32), np.zeros(self.time, bool)
        start = 0
        for index, length in enumerate(self.document_lengths):
            ids[start : start + length] = index + 1
            prefix[start : start + min(self.prefix, length)] = True
            start += length
        rows = (self.batch, 1)
        return np.tile(ids, rows), np.tile(prefix, rows)

    def arguments(self, key: jax.Array) -> tuple[jax.Array, ...]:
        """q, k, v, segment_ids, sinks, do."""
        keys = jax.random.split(key, 5)
        rows = (self.batch, self.time)
        q, do = (
            jax.random.normal(keys[i], (*rows, self.heads, self.dim)) for i in (0, 1)
        )
        k, v = (
            jax.random.normal(keys[i], (*rows, self.kv_heads, self.dim)) for i in (2, 3)
        )
        segments = jnp.asarray(self.segments()[0])
        sinks = jax.random.normal(keys[4], (self.heads,))
        q, k, v, do = (x.astype(self.dtype) for x in (q, k, v, do))
        return q, k, v, segments, sinks, do


# Drawn once from a log-normal distribution (median 600, sigma 1), as lengths of web
# documents are; the last one fills the row of 32768.
LENGTHS = (
    *(33, 1269, 3466, 328, 437, 76, 1930, 2307, 1184, 379, 777, 764, 317, 558),
    *(749, 1206, 446, 482, 609, 405, 256, 901, 571, 819, 341, 2062, 158, 934),
    *(532, 589, 1054, 289, 1366, 766, 376, 2214, 113, 739, 902, 64),
)

# The same in whole blocks of 128 tokens; the longest one makes up for the rest.
_BLOCKS = tuple(max(1, round(x / 128)) for x in LENGTHS)
_MISSING = 32768 // 128 - sum(_BLOCKS)
WHOLE_LENGTHS = tuple(128 * (x + _MISSING if x == max(_BLOCKS) else x) for x in _BLOCKS)

SPECS = (
    Spec(
        name="ci_packed",
        tag="ci",
        batch=2,
        time=40,
        heads=4,
        kv_heads=2,
        dim=8,
        dtype="float32",
        documents=3,
    ),
    Spec(
        name="ci_bf16",
        tag="ci",
        batch=1,
        time=40,
        heads=4,
        kv_heads=1,
        dim=16,
        window=9,
        sinks=True,
    ),
    # Qwen3-Next-80B-A3B: 16 query heads and 2 kv heads of 256.
    Spec(
        name="qwen3_next",
        tag="model",
        batch=1,
        time=1024,
        heads=16,
        kv_heads=2,
        dim=256,
        documents=3,
    ),
    # 32 query heads and 8 kv heads of 128, as Llama-3-8B; documents end in tiles.
    Spec(
        name="llama3",
        tag="model",
        batch=2,
        time=1000,
        heads=32,
        kv_heads=8,
        lengths=(1, 127, 128, 129, 300, 250),
    ),
    Spec(
        name="gpt_oss",
        tag="model",
        batch=1,
        time=1024,
        heads=64,
        kv_heads=8,
        dim=64,
        window=128,
        sinks=True,
        documents=2,
    ),
    # Gemma 2 caps logits at 50; PaliGemma has prefixes. Together they are no model.
    Spec(
        name="capped_prefixes",
        tag="model",
        batch=1,
        time=900,
        heads=8,
        kv_heads=4,
        documents=2,
        logit_cap=50.0,
        prefix=200,
    ),
    Spec(name="gqa_8", tag="perf", batch=1, time=8192, heads=32, kv_heads=8),
    Spec(
        name="qwen3_next",
        tag="perf",
        batch=1,
        time=8192,
        heads=16,
        kv_heads=2,
        dim=256,
    ),
    Spec(
        name="packed",
        tag="perf",
        batch=1,
        time=8192,
        heads=32,
        kv_heads=8,
        documents=8,
    ),
    Spec(
        name="packed_lengths",
        tag="perf",
        batch=1,
        time=32768,
        heads=32,
        kv_heads=8,
        lengths=LENGTHS,
    ),
    Spec(
        name="packed_blocks",
        tag="perf",
        batch=1,
        time=32768,
        heads=32,
        kv_heads=8,
        lengths=WHOLE_LENGTHS,
    ),
    Spec(
        name="gpt_oss_window",
        tag="perf",
        batch=1,
        time=8192,
        heads=64,
        kv_heads=8,
        dim=64,
        window=128,
        sinks=True,
    ),
)


def specs(tag: str) -> Iterator[Spec]:
    """The specs with a tag."""
    return (spec for spec in SPECS if spec.tag == tag)


def run(
    spec: Spec, op: Callable[..., Any], backward: bool, bounds: Any = None
) -> Callable[..., Any]:
    """`op` as a function of `spec.arguments`: (o,), or that and gradients.

    Args:
      spec: sizes and mask.
      op: called as `attention`.
      backward: whether gradients are computed too.
      bounds: passed to `op` if given.
    """
    options: dict[str, Any] = {"window": spec.window, "logit_cap": spec.logit_cap}
    if spec.prefix:
        options["is_prefix"] = jnp.asarray(spec.segments()[1])
    if bounds is not None:
        options["bounds"] = bounds

    def forward(q, k, v, sinks, segments):
        ids = segments if spec.is_packed else None
        return op(
            q,
            k,
            v,
            q_segment_ids=ids,
            kv_segment_ids=ids,
            sinks=sinks if spec.sinks else None,
            **options,
        )

    def only_forward(q, k, v, segments, sinks, do):
        del do
        return (forward(q, k, v, sinks, segments),)

    def both(q, k, v, segments, sinks, do):
        op = functools.partial(forward, segments=segments)
        o, pull = jax.vjp(op, q, k, v, sinks)
        return (o, *pull(do))

    return both if backward else only_forward


def bounds_of(spec: Spec, blocks: Mapping[str, int]) -> TileBounds:
    """The bounds of a spec's mask, as a model makes them once per batch.

    Args:
      spec: sizes and mask.
      blocks: block_q and block_kv.
    """
    ids, prefix = (jnp.asarray(x) for x in spec.segments())
    make = functools.partial(
        tile_bounds,
        batch=spec.batch,
        time=spec.time,
        window=spec.window,
        block_q=blocks["block_q"],
        block_kv=blocks["block_kv"],
    )
    ids = ids if spec.is_packed else None
    prefix = prefix if spec.prefix else None
    return jax.jit(make)(q_segment_ids=ids, kv_segment_ids=ids, is_prefix=prefix)


def minimal_bytes(spec: Spec, backward: bool) -> int:
    """Bytes that must cross device memory: each tensor once each way."""
    item = jnp.dtype(spec.dtype).itemsize
    tokens = spec.batch * spec.time * spec.dim * item
    forward = 2 * spec.heads + 2 * spec.kv_heads
    # Backward: q, k, v, o, do in and dq, dk, dv out.
    backwards = 4 * spec.heads + 4 * spec.kv_heads if backward else 0
    return tokens * (forward + backwards)


def _pairs(spec: Spec, length: int) -> int:
    """What the mask allows in one document."""
    if spec.window is None:
        prefix = min(spec.prefix, length)
        return length * (length + 1) // 2 + prefix * (prefix - 1) // 2
    beyond = max(0, length - spec.window)
    return length * (length + 1) // 2 - beyond * (beyond + 1) // 2


def minimal_flops(spec: Spec, backward: bool) -> int:
    """Operations on the pairs that the mask allows."""
    pairs = sum(_pairs(spec, length) for length in spec.document_lengths)
    pairs *= spec.batch * spec.heads
    # Two products forward; five more backward, the scores again among them.
    return 2 * pairs * spec.dim * (7 if backward else 2)


# Launch parameters that no heuristic picks, measured with --peers NAME,...
VARIANTS: dict[str, dict[str, Any]] = {
    "recomputed": {"backward": "recomputed"},
    "stored_gib1": {"backward": "stored", "scores_bytes": 1 << 30},
    "stored_heads1": {"backward": "stored", "scores_heads": 1},
    "stored_slots2": {"backward": "stored", "scores_slots": 2, "dkv_stages": 3},
    "stored_stages3": {"backward": "stored", "scores_stages": 3},
}


def bench_cases(tag: str) -> Iterator[Case]:
    """What `python -m pallas_kernels.bench attention` measures."""
    for spec in specs(tag):
        for backward in (False, True):
            yield _case(spec, backward)


def _case(spec: Spec, backward: bool) -> Case:
    # Imported here: the tests read this file for its sizes alone.
    from pallas_kernels._common.bench import Case
    from pallas_kernels.attention import api

    def implementation(
        name: Any, inside: bool = False, **changes: Any
    ) -> Callable[..., Any]:
        config = None
        if changes:
            config = dataclasses.replace(pick(head_dim=spec.dim), **changes)
        op = functools.partial(api.attention, implementation=name, config=config)
        bounds = None
        if name == "mosaic" and not inside:
            bounds = bounds_of(spec, tiling(spec.dim))
        return run(spec, op, backward, bounds)

    def variant(changes: dict[str, Any]) -> tuple[Callable[..., Any], str]:
        return implementation("mosaic", **changes), jax.__version__

    def picked() -> str:
        arguments = jax.eval_shape(spec.arguments, jax.random.key(0))
        choice = api.choose(*arguments[:3])
        return str(choice.config or choice.implementation)

    peers = {
        "xla": lambda: (implementation("xla"), jax.__version__),
        # What a layer costs that makes its bounds itself.
        "bounds_inside": lambda: (implementation("mosaic", True), jax.__version__),
    }
    if backward:
        peers |= {x: functools.partial(variant, y) for x, y in VARIANTS.items()}
    if not spec.sinks and not spec.prefix:
        peers["tokamax"] = lambda: _tokamax(spec, backward)
        if spec.logit_cap is None and not (spec.is_packed and spec.window):
            cudnn = _cudnn_packed if spec.is_packed else _cudnn
            peers["cudnn"] = lambda: cudnn(spec, backward)
            if spec.is_packed and spec.heads > spec.kv_heads:
                # Whether grouped heads are what its wrong gradients come from.
                peers["cudnn_repeated"] = lambda: _cudnn_packed(spec, backward, True)
    size = f"{spec.batch}x{spec.time} H{spec.heads} G{spec.kv_heads} K{spec.dim}"
    return Case(
        workload=f"{spec.name} {size} {'fwd+bwd' if backward else 'fwd'}",
        dtype=spec.dtype,
        arguments=spec.arguments,
        implementation=implementation,
        # The reference holds every score at once, which these lengths don't allow.
        reference=implementation("xla"),
        picked=picked,
        bytes=minimal_bytes(spec, backward),
        flops=minimal_flops(spec, backward),
        peers=peers,
        rel=1e-2,
    )


def _cudnn(spec: Spec, backward: bool) -> tuple[Callable[..., Any], str]:
    def op(q, k, v, *, window, **unused):
        del unused
        window = None if window is None else (window - 1, 0)
        return jax.nn.dot_product_attention(
            q, k, v, is_causal=True, local_window_size=window, implementation="cudnn"
        )

    return run(spec, op, backward), jax.__version__


def documents_of_cudnn(spec: Spec) -> tuple[np.ndarray, np.ndarray]:
    """Lengths of the documents, i32[B, M], and where they begin and end, i32[B, M + 1].

    Raises:
      NotImplementedError: rows have padding, of which cuDNN's results are anything.
    """
    lengths = np.asarray(spec.document_lengths, np.int32)
    if lengths.sum() != spec.time:
        raise NotImplementedError(
            f"documents of {lengths.sum()} tokens in a row of {spec.time}"
        )
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    rows = (spec.batch, 1)
    return np.tile(lengths, rows), np.tile(offsets, rows)


def _cudnn_packed(
    spec: Spec, backward: bool, repeated: bool = False
) -> tuple[Callable[..., Any], str]:
    from pallas_kernels._common.cudnn_peer import packed_attention

    lengths, offsets = documents_of_cudnn(spec)

    def op(q, k, v, **unused):
        del unused
        if repeated:
            k, v = (jnp.repeat(x, spec.heads // spec.kv_heads, axis=2) for x in (k, v))
        return packed_attention(q, k, v, lengths, offsets, scale=spec.dim**-0.5)

    return run(spec, op, backward), jax.__version__


def _tokamax(spec: Spec, backward: bool) -> tuple[Callable[..., Any], str]:
    import tokamax  # pyrefly: ignore[missing-import]

    # Starts of documents are no part of its public function.
    from tokamax._src.ops.attention import (  # pyrefly: ignore[missing-import]
        api,
        base,
    )

    def op(q, k, v, *, window, logit_cap, **unused):
        del unused
        index = np.arange(spec.time, dtype=np.int32)
        start = np.zeros((spec.batch, spec.time), np.int32)
        if spec.is_packed:
            ids, _ = spec.segments()
            new = np.diff(ids, axis=1, prepend=-1) != 0
            start = np.maximum.accumulate(np.where(new, index, 0), axis=1)
        if window is not None:
            start = np.maximum(start, index - (window - 1))
        bounded = spec.is_packed or window is not None
        k_start = jnp.asarray(start)[:, None] if bounded else None
        mask = base.Mask(is_causal=True, k_start=k_start)
        return api.IMPLEMENTATIONS["mosaic_gpu"](
            q, k, v, mask=mask, logits_soft_cap=logit_cap
        )

    return run(spec, op, backward), tokamax.__version__
