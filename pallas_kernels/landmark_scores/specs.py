"""Sizes at which `landmark_scores` is tested and measured, and its benchmark."""

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
      name: what it stands for.
      tag: "ci" (CPU), "model" (tests on the card) or "perf" (measured).
      batch, heads, kv_heads, head_dim: B, H, G, K.
      landmarks: of a row, C.
      layers: whose landmarks are one array; `None` for one without that axis.
      logit_cap: as for the op.
      dtype: of queries and landmarks.
    """

    name: str
    tag: str
    batch: int
    heads: int
    kv_heads: int
    head_dim: int
    landmarks: int
    layers: int | None = None
    logit_cap: float | None = None
    dtype: str = "bfloat16"

    def arguments(self, key: jax.Array) -> tuple[jax.Array, ...]:
        """q, landmarks, allowed; with `layers`, the layer."""
        keys = jax.random.split(key, 3)
        draw = functools.partial(jax.random.normal, dtype=jnp.dtype(self.dtype))
        shape = (self.batch, self.kv_heads, self.landmarks)
        q = 2 * draw(keys[0], (self.batch, self.heads, self.head_dim))
        layers = () if self.layers is None else (self.layers,)
        landmarks = draw(keys[1], (*layers, *shape, self.head_dim))
        allowed = jax.random.uniform(keys[2], shape) < 0.97
        if self.layers is None:
            return q, landmarks, allowed
        return q, landmarks, allowed, jnp.int32(self.layers - 1)


SPECS = (
    # Three of four columns of a tile are heads; the last tile begins before its place.
    Spec(
        name="ci_group_3",
        tag="ci",
        batch=1,
        heads=6,
        kv_heads=2,
        head_dim=64,
        landmarks=200,
        logit_cap=5.0,
    ),
    Spec(
        name="ci_group_1",
        tag="ci",
        batch=1,
        heads=1,
        kv_heads=1,
        head_dim=64,
        landmarks=264,
        dtype="float16",
    ),
    Spec(
        name="ci_group_8",
        tag="ci",
        batch=1,
        heads=8,
        kv_heads=1,
        head_dim=128,
        landmarks=136,
        layers=2,
    ),
    Spec(
        name="qwen3_next",
        tag="model",
        batch=3,
        heads=16,
        kv_heads=2,
        head_dim=256,
        landmarks=4_104,
        layers=2,
    ),
    Spec(
        name="gpt_oss",
        tag="model",
        batch=2,
        heads=64,
        kv_heads=8,
        head_dim=64,
        landmarks=16_392,
        logit_cap=30.0,
    ),
    Spec(
        name="llama_odd",
        tag="model",
        batch=5,
        heads=28,
        kv_heads=4,
        head_dim=128,
        landmarks=1_000,
    ),
    # Llama-3.1-8B over chunks of 8 tokens: 24 sequences of 122,880, 48 of half, 12 of
    # twice that, and one of 131,072, whose landmarks the L2 cache holds.
    *(
        Spec(
            name=name,
            tag="perf",
            batch=batch,
            heads=32,
            kv_heads=8,
            head_dim=128,
            landmarks=landmarks,
        )
        for name, batch, landmarks in (
            ("shadowkv_a", 24, 15_368),
            ("shadowkv_b", 48, 7_688),
            ("shadowkv_c", 12, 30_728),
            ("one_sequence", 1, 16_392),
        )
    ),
)


def specs(tag: str) -> Iterator[Spec]:
    """The specs with a tag."""
    return (spec for spec in SPECS if spec.tag == tag)


def run(spec: Spec, op: Callable[..., Any]) -> Callable[..., Any]:
    """`op` as a function of `spec.arguments`."""

    def call(q, landmarks, allowed, layer=None):
        return op(q, landmarks, allowed, logit_cap=spec.logit_cap, layer=layer)

    return call


def minimal_bytes(spec: Spec) -> int:
    """Bytes that must cross device memory: landmarks and flags in, weights out."""
    count = spec.batch * spec.kv_heads * spec.landmarks
    return count * (spec.head_dim * jnp.dtype(spec.dtype).itemsize + 1 + 4)


def bench_cases(tag: str) -> Iterator[Case]:
    """What `python -m pallas_kernels.bench landmark_scores` measures."""
    return (_case(spec) for spec in specs(tag))


def _case(spec: Spec) -> Case:
    # Imported here: the tests read this file for its sizes alone.
    from pallas_kernels._common.bench import Case
    from pallas_kernels.landmark_scores import api

    def implementation(name: Any) -> Callable[..., Any]:
        return run(spec, functools.partial(api.landmark_scores, implementation=name))

    def picked() -> str:
        choice = run(spec, api.choose)(
            *jax.eval_shape(spec.arguments, jax.random.key(0))
        )
        return str(choice.config or choice.implementation)

    heads = f"H{spec.heads} G{spec.kv_heads} K{spec.head_dim}"
    return Case(
        workload=f"{spec.name} B{spec.batch} {heads} C{spec.landmarks}",
        dtype=spec.dtype,
        arguments=jax.jit(spec.arguments),
        implementation=implementation,
        reference=implementation("reference"),
        picked=picked,
        bytes=minimal_bytes(spec),
        flops=2 * spec.batch * spec.heads * spec.landmarks * spec.head_dim,
        peers={"xla": lambda: (implementation("xla"), jax.__version__)},
        rel=1e-5,  # f32, with the card's own exponential and logarithm
    )
