"""Sizes at which `attention` is tested and measured, and its benchmark."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp


if TYPE_CHECKING:
    from pallas_kernels._common.bench import Case


@dataclasses.dataclass(frozen=True, kw_only=True)
class Spec:
    """One use of the op.

    Attributes:
      name: where it comes from.
      tag: "ci" (CPU), "model" (tests on the card) or "perf" (measured).
      batch, time, heads, kv_heads, dim: B, T = S, H, G, K = V.
      documents: documents per row; 0 gives the op no segments.
      window: of `attention`.
      sinks: whether there are sinks.
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
    window: int | None = None
    sinks: bool = False

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
        length = -(-self.time // max(1, self.documents))
        segments = jnp.broadcast_to(jnp.arange(self.time)[None] // length + 1, rows)
        sinks = jax.random.normal(keys[4], (self.heads,))
        q, k, v, do = (x.astype(self.dtype) for x in (q, k, v, do))
        return q, k, v, segments, sinks, do


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


def run(spec: Spec, op: Callable[..., Any], backward: bool) -> Callable[..., Any]:
    """`op` as a function of `spec.arguments`: (o,), or that and gradients."""

    def forward(q, k, v, sinks, segments):
        ids = segments if spec.documents else None
        return op(
            q,
            k,
            v,
            q_segment_ids=ids,
            kv_segment_ids=ids,
            window=spec.window,
            sinks=sinks if spec.sinks else None,
        )

    def only_forward(q, k, v, segments, sinks, do):
        del do
        return (forward(q, k, v, sinks, segments),)

    def both(q, k, v, segments, sinks, do):
        op = functools.partial(forward, segments=segments)
        o, pull = jax.vjp(op, q, k, v, sinks)
        return (o, *pull(do))

    return both if backward else only_forward


def minimal_bytes(spec: Spec, backward: bool) -> int:
    """Bytes that must cross device memory: each tensor once each way."""
    item = jnp.dtype(spec.dtype).itemsize
    tokens = spec.batch * spec.time * spec.dim * item
    forward = 2 * spec.heads + 2 * spec.kv_heads
    # Backward: q, k, v, o, do in and dq, dk, dv out.
    backwards = 4 * spec.heads + 4 * spec.kv_heads if backward else 0
    return tokens * (forward + backwards)


def minimal_flops(spec: Spec, backward: bool) -> int:
    """Operations on the pairs that the mask allows."""
    length = -(-spec.time // max(1, spec.documents))
    pairs = length * (length + 1) // 2
    if spec.window is not None and spec.window < length:
        beyond = length - spec.window
        pairs -= beyond * (beyond + 1) // 2
    pairs *= spec.batch * spec.heads * max(1, spec.documents)
    # Two products forward; five more backward, the scores again among them.
    return 2 * pairs * spec.dim * (7 if backward else 2)


def bench_cases(tag: str) -> Iterator[Case]:
    """What `python -m pallas_kernels.bench attention` measures."""
    for spec in specs(tag):
        for backward in (False, True):
            yield _case(spec, backward)


def _case(spec: Spec, backward: bool) -> Case:
    # Imported here: the tests read this file for its sizes alone.
    from pallas_kernels._common.bench import Case
    from pallas_kernels.attention import api

    def implementation(name: Any) -> Callable[..., Any]:
        op = functools.partial(api.attention, implementation=name)
        return run(spec, op, backward)

    def picked() -> str:
        arguments = jax.eval_shape(spec.arguments, jax.random.key(0))
        choice = api.choose(*arguments[:3])
        return str(choice.config or choice.implementation)

    peers = {"xla": lambda: (implementation("xla"), jax.__version__)}
    if not spec.documents and not spec.sinks:
        peers["cudnn"] = lambda: _cudnn(spec, backward)
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
    def op(q, k, v, *, q_segment_ids, kv_segment_ids, window, sinks):
        del q_segment_ids, kv_segment_ids, sinks
        window = None if window is None else (window - 1, 0)
        return jax.nn.dot_product_attention(
            q, k, v, is_causal=True, local_window_size=window, implementation="cudnn"
        )

    return run(spec, op, backward), jax.__version__
