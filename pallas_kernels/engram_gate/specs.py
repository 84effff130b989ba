"""Sizes at which `engram_gate` is tested and measured, and its benchmark."""

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
      name: where it comes from.
      tag: "ci" (interpreter), "model" (tests on the card) or "perf" (measured).
      batch, time, streams, dim: B, T, G, D.
      dtype, out_dtype: of streams, keys and value, and of y.
      dead: share of tokens that take nothing; 0 gives the op no flags at all.
      copies_sign: as of the op.
    """

    name: str
    tag: str
    batch: int
    time: int
    streams: int
    dim: int
    dtype: str = "bfloat16"
    out_dtype: str | None = None
    dead: float = 0.0
    copies_sign: bool = False

    def options(self) -> dict[str, Any]:
        """The keywords of `engram_gate` that are no arrays."""
        return {"copies_sign": self.copies_sign, "dtype": self.out_dtype or self.dtype}

    def arguments(self, key: jax.Array) -> tuple[jax.Array, ...]:
        """h, kv, query_scale, key_scale, is_live, dy, dgate.

        Keys lean towards their stream or away from it, so that scores are about 4 or
        -4: the gradient at a score of nothing is that of its rounding.
        """
        keys = jax.random.split(key, 8)
        shape = (self.batch, self.time, self.streams, self.dim)
        h = jax.random.normal(keys[0], shape)
        kv = jax.random.normal(keys[1], (*shape[:2], self.streams + 1, self.dim))
        lean = jax.random.rademacher(keys[7], shape[:3], jnp.float32)
        lean = jnp.pad(4.0 * self.dim**-0.5 * lean, ((0, 0), (0, 0), (0, 1)))
        own = jnp.pad(h, ((0, 0), (0, 0), (0, 1), (0, 0)))
        h, kv = (x.astype(self.dtype) for x in (h, kv + lean[..., None] * own))
        scales = (
            1.0 + 0.1 * jax.random.normal(k, shape[2:], jnp.float32) for k in keys[2:4]
        )
        is_live = jax.random.uniform(keys[4], shape[:2]) >= self.dead
        dy = jax.random.normal(keys[5], shape).astype(self.out_dtype or self.dtype)
        dgate = jax.random.normal(keys[6], shape[:3], jnp.float32)
        return h, kv, *scales, is_live, dy, dgate


SPECS = (
    Spec(name="ci_four_streams", tag="ci", batch=1, time=3, streams=4, dim=512),
    Spec(
        name="ci_dead",
        tag="ci",
        batch=2,
        time=3,
        streams=4,
        dim=256,
        dead=0.4,
        copies_sign=True,
    ),
    Spec(
        name="ci_one_stream_f32_out",
        tag="ci",
        batch=1,
        time=3,
        streams=1,
        dim=1024,
        out_dtype="float32",
    ),
    Spec(
        name="ci_two_streams_f32",
        tag="ci",
        batch=1,
        time=3,
        streams=2,
        dim=256,
        dtype="float32",
        dead=0.4,
    ),
    Spec(
        name="ci_f16",
        tag="ci",
        batch=1,
        time=2,
        streams=4,
        dim=128,
        dtype="float16",
    ),
    Spec(
        name="engram_27b", tag="model", batch=1, time=600, streams=4, dim=2560, dead=0.1
    ),
    Spec(
        name="engram_27b_f32_out",
        tag="model",
        batch=1,
        time=600,
        streams=4,
        dim=2560,
        out_dtype="float32",
    ),
    Spec(name="deepseek_v41", tag="model", batch=1, time=300, streams=4, dim=5120),
    Spec(name="one_stream", tag="model", batch=2, time=300, streams=1, dim=2048),
    Spec(name="engram_27b", tag="perf", batch=8, time=8192, streams=4, dim=2560),
    Spec(
        name="engram_27b_padded",
        tag="perf",
        batch=8,
        time=8192,
        streams=4,
        dim=2560,
        dead=0.1,
    ),
    Spec(name="deepseek_v41", tag="perf", batch=2, time=8192, streams=4, dim=5120),
    Spec(name="one_stream", tag="perf", batch=8, time=8192, streams=1, dim=2048),
)


def specs(tag: str) -> Iterator[Spec]:
    """The specs with a tag."""
    return (spec for spec in SPECS if spec.tag == tag)


def run(
    spec: Spec, op: Callable[..., Any], backward: bool, *, exact: bool = False
) -> Callable[..., Any]:
    """`op` as a function of `spec.arguments`: y, gate, and the four gradients.

    Args:
      spec: the size.
      op: as `engram_gate`.
      backward: whether gradients come too.
      exact: whether y is wanted in float32, as from float32 arguments.
    """
    options = spec.options() | ({"dtype": "float32"} if exact else {})

    def call(h, kv, query_scale, key_scale, is_live, dy, dgate):
        def forward(h, kv, query_scale, key_scale):
            live = is_live if spec.dead else None
            return op(h, kv, query_scale, key_scale, is_live=live, **options)

        if not backward:
            return forward(h, kv, query_scale, key_scale)
        results, pull = jax.vjp(forward, h, kv, query_scale, key_scale)
        return *results, *pull((dy.astype(results[0].dtype), dgate))

    return call


def minimal_bytes(spec: Spec, backward: bool) -> int:
    """Bytes that must cross device memory: each tensor once each way."""
    itemsize = jnp.dtype(spec.dtype).itemsize
    out = jnp.dtype(spec.out_dtype or spec.dtype).itemsize
    read = (2 * spec.streams + 1) * itemsize
    rows = read + spec.streams * out
    if backward:
        rows += 2 * read + spec.streams * out
    return math.prod((spec.batch, spec.time, spec.dim)) * rows


def bench_cases(tag: str) -> Iterator[Case]:
    """What `python -m pallas_kernels.bench engram_gate` measures."""
    for spec in specs(tag):
        for backward in (False, True):
            yield _case(spec, backward)


def _case(spec: Spec, backward: bool) -> Case:
    # Imported here: the tests read this file for its sizes alone.
    from pallas_kernels._common.bench import Case
    from pallas_kernels.engram_gate import api

    def implementation(name: Any) -> Callable[..., Any]:
        op = functools.partial(api.engram_gate, implementation=name)
        return run(spec, op, backward)

    def picked() -> str:
        args = jax.eval_shape(spec.arguments, jax.random.key(0))
        choice = api.choose(*args[:4], dtype=spec.options()["dtype"])
        return str(choice.config or choice.implementation)

    # The reference's intermediates of float32 would not fit beside its inputs.
    exact = functools.partial(api.engram_gate, implementation="xla")
    size = f"{spec.batch}x{spec.time} G{spec.streams} D{spec.dim}"
    return Case(
        workload=f"{spec.name} {size} {'fwd+bwd' if backward else 'fwd'}",
        dtype=spec.dtype,
        arguments=jax.jit(spec.arguments),
        implementation=implementation,
        reference=run(spec, exact, backward, exact=True),
        picked=picked,
        bytes=minimal_bytes(spec, backward),
        flops=0,
        peers={"xla": lambda: (implementation("xla"), jax.__version__)},
    )
