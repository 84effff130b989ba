"""Sizes at which `segment_sum` is tested and measured, and its benchmark."""

from __future__ import annotations

import dataclasses
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
      count, dim, num_segments: M, d, K.
      dtype: of the values.
      ids: "skewed" (the k-th most frequent has 1 / k of the first's rows), "equal" (all
        rows have one id) or "uniform".
      dropped: share of rows without a sum.
    """

    name: str
    tag: str
    count: int
    dim: int
    num_segments: int
    dtype: str = "bfloat16"
    ids: str = "skewed"
    dropped: float = 0.0

    def arguments(self, key: jax.Array) -> tuple[jax.Array, ...]:
        """values, ids, dy."""
        keys = jax.random.split(key, 4)
        values = jax.random.normal(keys[0], (self.count, self.dim)).astype(self.dtype)
        dy = jax.random.normal(keys[1], (self.num_segments, self.dim))
        top = self.num_segments - 1
        if self.ids == "equal":
            ids = jnp.full(self.count, top // 2, jnp.int32)
        elif self.ids == "uniform":
            ids = jax.random.randint(keys[2], (self.count,), 0, top + 1, jnp.int32)
        else:
            u = jax.random.uniform(keys[2], (self.count,))
            ids = (jnp.float32(self.num_segments) ** u).astype(jnp.int32) - 1
            ids = jnp.clip(ids, 0, top)
        away = jax.random.uniform(keys[3], (self.count,)) < self.dropped
        none = jnp.where(ids % 2 == 0, -1, self.num_segments)
        return values, jnp.where(away, none, ids), dy


SPECS = (
    # Strips have 16 rows, those of heads 64: three levels, two, one.
    Spec(name="ci_skewed", tag="ci", count=300, dim=16, num_segments=40, dropped=0.2),
    Spec(
        name="ci_equal",
        tag="ci",
        count=1100,
        dim=2,
        num_segments=3,
        dtype="float32",
        ids="equal",
    ),
    Spec(name="ci_one_strip", tag="ci", count=5, dim=80, num_segments=9),
    Spec(
        name="ci_f16",
        tag="ci",
        count=64,
        dim=6,
        num_segments=200,
        dtype="float16",
        ids="uniform",
    ),
    Spec(name="engram_row", tag="model", count=40_960, dim=80, num_segments=50_000),
    # What makes a scatter of atomic exchanges take hundreds of times as long.
    Spec(
        name="all_equal",
        tag="model",
        count=40_960,
        dim=128,
        num_segments=399,
        dtype="float32",
        ids="equal",
    ),
    # 65,536 tokens of Engram-27B, their rows' gradients.
    Spec(
        name="engram_27b", tag="perf", count=1_048_576, dim=80, num_segments=1_048_576
    ),
    Spec(
        name="engram_27b_uniform",
        tag="perf",
        count=1_048_576,
        dim=80,
        num_segments=1_048_576,
        ids="uniform",
    ),
    Spec(
        name="deepseek_v41_flash",
        tag="perf",
        count=393_216,
        dim=256,
        num_segments=393_216,
    ),
    Spec(
        name="all_equal",
        tag="perf",
        count=40_960,
        dim=128,
        num_segments=399,
        dtype="float32",
        ids="equal",
    ),
)


def specs(tag: str) -> Iterator[Spec]:
    """The specs with a tag."""
    return (spec for spec in SPECS if spec.tag == tag)


def run(
    spec: Spec, op: Callable[..., jax.Array], backward: bool = False
) -> Callable[..., Any]:
    """`op` as a function of `spec.arguments`: y, or (y, dvalues)."""

    def forward(values, ids, dy):
        del dy
        return op(values, ids, spec.num_segments)

    def both(values, ids, dy):
        y, pull = jax.vjp(lambda v: op(v, ids, spec.num_segments), values)
        return y, *pull(dy)

    return both if backward else forward


def minimal_bytes(spec: Spec) -> int:
    """Bytes that must cross device memory: rows and ids in, sums out."""
    row = 4 + spec.dim * jnp.dtype(spec.dtype).itemsize
    return spec.count * row + 4 * spec.num_segments * spec.dim


def bench_cases(tag: str) -> Iterator[Case]:
    """What `python -m pallas_kernels.bench segment_sum` measures."""
    for spec in specs(tag):
        for sorted_before in (False, True):
            yield _case(spec, sorted_before)


def _case(spec: Spec, sorted_before: bool) -> Case:
    # Imported here: the tests read this file for its sizes alone.
    from pallas_kernels._common.bench import Case
    from pallas_kernels.segment_sum import api, reference

    def arguments(key):
        args = spec.arguments(key)
        if not sorted_before:
            return args
        order = api.sort_ids(args[1], spec.num_segments)
        return *args, order.ids, order.source

    def op(name: Any) -> Callable[..., Any]:
        def call(values, ids, dy, *order):
            del dy
            order = api.Order(ids=order[0], source=order[1]) if order else None
            return api.segment_sum(
                values, ids, spec.num_segments, order=order, implementation=name
            )

        return call

    def exact(values, ids, dy, *order):
        del dy, order
        return reference.segment_sum(values, ids, spec.num_segments)

    def picked() -> str:
        values, ids, _ = jax.eval_shape(spec.arguments, jax.random.key(0))
        choice = api.choose(values, ids, spec.num_segments)
        return str(choice.config or choice.implementation)

    size = f"{spec.count}x{spec.dim} to {spec.num_segments}"
    return Case(
        workload=f"{spec.name} {size}{' sorted before' if sorted_before else ''}",
        dtype=spec.dtype,
        arguments=jax.jit(arguments),
        implementation=op,
        reference=exact,
        picked=picked,
        bytes=minimal_bytes(spec),
        flops=0,
        peers={"xla": lambda: (op("xla"), jax.__version__)},
        rel=1e-4,  # the order of summation is another one
    )
