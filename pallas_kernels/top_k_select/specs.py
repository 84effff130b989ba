"""Sizes at which `top_k_select` is tested and measured, and its benchmark."""

from __future__ import annotations

import dataclasses
import functools
import math
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
      rows: leading axes of the scores.
      columns: scores of a row, C.
      k: places to take.
      levels: different scores that there are, `None` for as many as floats; few make
        ties.
      missing: share of the scores that are -inf.
    """

    name: str
    tag: str
    rows: tuple[int, ...]
    columns: int
    k: int
    levels: int | None = None
    missing: float = 0.0

    def arguments(self, key: jax.Array) -> tuple[jax.Array]:
        """scores, logarithms of weights as those of landmarks are."""
        keys = jax.random.split(key, 2)
        shape = (*self.rows, self.columns)
        scores = 2.0 * jax.random.normal(keys[0], shape) - 10.0
        if self.levels is not None:
            scores = jnp.round(scores * self.levels / 16.0)
        gone = jax.random.uniform(keys[1], shape) < self.missing
        return (jnp.where(gone, -jnp.inf, scores),)


SPECS = (
    Spec(name="ci_ties", tag="ci", rows=(2,), columns=300, k=70, levels=8),
    Spec(name="ci_few", tag="ci", rows=(1, 2), columns=129, k=128, missing=0.5),
    Spec(name="ci_all", tag="ci", rows=(1,), columns=128, k=128, levels=4),
    Spec(name="ci_one", tag="ci", rows=(2,), columns=640, k=1),
    Spec(
        name="odd",
        tag="model",
        rows=(3, 5),
        columns=7_681,
        k=333,
        levels=64,
        missing=0.1,
    ),
    Spec(
        name="long_rows",
        tag="model",
        rows=(2, 4),
        columns=50_001,
        k=2_000,
        levels=512,
        missing=0.9,
    ),
    # ShadowKV's landmarks: 24 sequences of 122,880 tokens, 48 of half and 12 of twice
    # that; chunks of 8 tokens, a place for what is no chunk yet, and up to 8 of them.
    Spec(name="shadowkv_a", tag="perf", rows=(24, 8), columns=15_368, k=256),
    Spec(name="shadowkv_b", tag="perf", rows=(48, 8), columns=7_688, k=128),
    Spec(name="shadowkv_c", tag="perf", rows=(12, 8), columns=30_728, k=512),
    Spec(name="one_sequence", tag="perf", rows=(1, 8), columns=16_392, k=256),
)


def specs(tag: str) -> Iterator[Spec]:
    """The specs with a tag."""
    return (spec for spec in SPECS if spec.tag == tag)


def run(spec: Spec, op: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """`op` as a function of `spec.arguments`."""
    return functools.partial(op, k=spec.k)


def minimal_bytes(spec: Spec) -> int:
    """Bytes that must cross device memory: scores in, places out."""
    return 4 * math.prod(spec.rows) * (spec.columns + spec.k)


def bench_cases(tag: str) -> Iterator[Case]:
    """What `python -m pallas_kernels.bench top_k_select` measures."""
    return (_case(spec) for spec in specs(tag))


def _case(spec: Spec) -> Case:
    # Imported here: the tests read this file for its sizes alone.
    from pallas_kernels._common.bench import Case
    from pallas_kernels.top_k_select import api, reference

    def implementation(name: Any) -> Callable[..., Any]:
        return run(spec, functools.partial(api.top_k_select, implementation=name))

    def picked() -> str:
        scores = jax.ShapeDtypeStruct((*spec.rows, spec.columns), jnp.float32)
        choice = api.choose(scores, spec.k)
        return str(choice.config or choice.implementation)

    size = "x".join(map(str, (*spec.rows, spec.columns)))
    return Case(
        workload=f"{spec.name} {spec.k} of {size}",
        dtype="float32",
        arguments=jax.jit(spec.arguments),
        implementation=implementation,
        reference=run(spec, reference.top_k_select),
        picked=picked,
        bytes=minimal_bytes(spec),
        flops=0,
        peers={"xla": lambda: (implementation("xla"), jax.__version__)},
        rel=0.0,  # places are exact
    )
