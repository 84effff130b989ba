"""Sizes at which `grouped_matmul` is tested and measured, and its benchmark."""

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
      rows, in_dim, out_dim, experts: M, K, N, E.
      sizes: rows of each expert; drawn uniformly if empty.
    """

    name: str
    tag: str
    rows: int
    in_dim: int
    out_dim: int
    experts: int
    dtype: str = "bfloat16"
    sizes: tuple[int, ...] = ()

    def arguments(self, key: jax.Array) -> tuple[jax.Array, ...]:
        """x, w, group_sizes, dy."""
        keys = jax.random.split(key, 4)
        x = jax.random.normal(keys[0], (self.rows, self.in_dim))
        w = jax.random.normal(keys[1], (self.experts, self.in_dim, self.out_dim))
        dy = jax.random.normal(keys[2], (self.rows, self.out_dim))
        if self.sizes:
            sizes = jnp.array(self.sizes, jnp.int32)
        else:
            owner = jax.random.randint(keys[3], (self.rows,), 0, self.experts)
            borders = jnp.arange(self.experts + 1)
            sizes = jnp.diff(jnp.searchsorted(jnp.sort(owner), borders))
        x, w, dy = (a.astype(self.dtype) for a in (x, w / self.in_dim**0.5, dy))
        return x, w, sizes.astype(jnp.int32), dy


def _ci(
    name: str,
    out_dim: int,
    sizes: tuple[int, ...],
    *,
    in_dim: int = 24,
    tail: int = 0,
    dtype: str = "float32",
) -> Spec:
    return Spec(
        name=f"ci_{name}",
        tag="ci",
        rows=sum(sizes) + tail,
        in_dim=in_dim,
        out_dim=out_dim,
        experts=len(sizes),
        dtype=dtype,
        sizes=sizes,
    )


def _kernel(
    name: str, in_dim: int, out_dim: int, sizes: tuple[int, ...], *, tail: int
) -> Spec:
    return _ci(
        f"kernel_{name}", out_dim, sizes, tail=tail, in_dim=in_dim, dtype="bfloat16"
    )


SPECS = (
    _ci("one_expert", 33, (40,)),
    _ci("tail", 33, (57, 55, 1), tail=20),
    _ci("mixed", 160, (0, 17, 16, 0, 1, 63, 31, 0), tail=3),
    _ci("all_to_one", 33, (0, 0, 0, 0, 0, 0, 64, 0)),
    _ci("none_routed", 33, (0, 0, 0), tail=30),
    _ci("one_row_each", 160, (1,) * 8),
    _ci("bf16", 33, (30, 0, 45), tail=5, dtype="bfloat16"),
    # What the kernels run: one row over and under a tile's, columns not divided by it.
    _kernel("borders", 128, 320, (33, 31, 1, 63), tail=3),
    _kernel("empty", 64, 192, (0, 45, 0, 10), tail=3),
    _kernel("narrow", 192, 64, (5, 0, 60), tail=2),
    Spec(
        name="qwen3_next_up",
        tag="model",
        rows=10240,
        in_dim=2048,
        out_dim=1024,
        experts=64,
    ),
    Spec(
        name="borders",
        tag="model",
        rows=1030,
        in_dim=2688,
        out_dim=1856,
        experts=4,
        sizes=(257, 255, 1, 511),
    ),
    Spec(
        name="few_rows",
        tag="model",
        rows=3001,
        in_dim=512,
        out_dim=2048,
        experts=128,
    ),
    # Rows are T * top_k at T = 8192.
    Spec(
        name="qwen3_next_up",
        tag="perf",
        rows=81920,
        in_dim=2048,
        out_dim=1024,
        experts=512,
    ),
    Spec(
        name="qwen3_next_down",
        tag="perf",
        rows=81920,
        in_dim=512,
        out_dim=2048,
        experts=512,
    ),
    Spec(
        name="nemotron3_nano_up",
        tag="perf",
        rows=49152,
        in_dim=2688,
        out_dim=1856,
        experts=128,
    ),
    Spec(
        name="nemotron3_super_up",
        tag="perf",
        rows=180224,
        in_dim=1024,
        out_dim=2688,
        experts=512,
    ),
    Spec(
        name="nemotron3_super_down",
        tag="perf",
        rows=180224,
        in_dim=2688,
        out_dim=1024,
        experts=512,
    ),
    Spec(
        name="gpt_oss_20b_up",
        tag="perf",
        rows=32768,
        in_dim=2880,
        out_dim=5760,
        experts=32,
    ),
    Spec(
        name="dense_64",
        tag="perf",
        rows=65536,
        in_dim=4096,
        out_dim=3072,
        experts=64,
    ),
)


def specs(tag: str) -> Iterator[Spec]:
    """The specs with a tag."""
    return (spec for spec in SPECS if spec.tag == tag)


def run(spec: Spec, op: Callable[..., Any], backward: bool) -> Callable[..., Any]:
    """`op` as a function of `spec.arguments`: (y,) or (y, dx, dw)."""
    del spec

    def only_forward(x, w, sizes, dy):
        del dy
        return (op(x, w, sizes),)

    def both(x, w, sizes, dy):
        y, pull = jax.vjp(lambda x, w: op(x, w, sizes), x, w)
        return (y, *pull(dy))

    return both if backward else only_forward


def minimal_bytes(spec: Spec, backward: bool) -> int:
    """Bytes that must cross device memory: each tensor once each way."""
    item = jnp.dtype(spec.dtype).itemsize
    x = spec.rows * spec.in_dim
    y = spec.rows * spec.out_dim
    w = spec.experts * spec.in_dim * spec.out_dim
    return item * (x + y + w) * (3 if backward else 1)


def minimal_flops(spec: Spec, backward: bool) -> int:
    """Operations on real rows."""
    rows = sum(spec.sizes) if spec.sizes else spec.rows
    return 2 * rows * spec.in_dim * spec.out_dim * (3 if backward else 1)


def bench_cases(tag: str) -> Iterator[Case]:
    """What `python -m pallas_kernels.bench grouped_matmul` measures."""
    for spec in specs(tag):
        for backward in (False, True):
            yield _case(spec, backward)


def _case(spec: Spec, backward: bool) -> Case:
    # Imported here: the tests read this file for its sizes alone.
    from pallas_kernels._common.bench import Case
    from pallas_kernels.grouped_matmul import api

    def implementation(name: Any) -> Callable[..., Any]:
        op = functools.partial(api.grouped_matmul, implementation=name)
        return run(spec, op, backward)

    def picked() -> str:
        arguments = jax.eval_shape(spec.arguments, jax.random.key(0))
        choice = api.choose(*arguments[:3])
        return str(choice.config or choice.implementation)

    size = f"M{spec.rows} K{spec.in_dim} N{spec.out_dim} E{spec.experts}"
    return Case(
        workload=f"{spec.name} {size} {'fwd+bwd' if backward else 'fwd'}",
        dtype=spec.dtype,
        arguments=spec.arguments,
        implementation=implementation,
        # The reference multiplies all rows with all experts: hours at these sizes.
        reference=implementation("xla"),
        picked=picked,
        bytes=minimal_bytes(spec, backward),
        flops=minimal_flops(spec, backward),
        peers={
            "xla": lambda: (implementation("xla"), jax.__version__),
            "tokamax": lambda: _tokamax(spec, backward),
        },
        rel=1e-2 if backward else 5e-3,
    )


def _tokamax(spec: Spec, backward: bool) -> tuple[Callable[..., Any], str]:
    import tokamax  # pyrefly: ignore[missing-import]

    return run(spec, tokamax.ragged_dot, backward), tokamax.__version__
