"""Sizes at which `grouped_matmul` is tested and measured, and its benchmark."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from pallas_kernels.grouped_matmul import specs_layers
from pallas_kernels.grouped_matmul.specs_layers import uniform_sizes


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
      products: what is measured, keys of `PRODUCTS`.
    """

    name: str
    tag: str
    rows: int
    in_dim: int
    out_dim: int
    experts: int
    dtype: str = "bfloat16"
    sizes: tuple[int, ...] = ()
    products: tuple[str, ...] = ("forward", "data gradient", "weight gradient")

    def arguments(self, key: jax.Array) -> tuple[jax.Array, ...]:
        """x, w, group_sizes, dy."""
        keys = jax.random.split(key, 4)
        x = jax.random.normal(keys[0], (self.rows, self.in_dim))
        w = jax.random.normal(keys[1], (self.experts, self.in_dim, self.out_dim))
        dy = jax.random.normal(keys[2], (self.rows, self.out_dim))
        if self.sizes:
            sizes = jnp.array(self.sizes, jnp.int32)
        else:
            sizes = uniform_sizes(keys[3], self.rows, self.experts)
        x, w, dy = (a.astype(self.dtype) for a in (x, w / self.in_dim**0.5, dy))
        return x, w, sizes, dy


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
        name="gpt_oss_20b_down",
        tag="perf",
        rows=32768,
        in_dim=2880,
        out_dim=2880,
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
    # T = 32768.
    Spec(
        name="nemotron3_super_up",
        tag="perf",
        rows=720896,
        in_dim=1024,
        out_dim=2688,
        experts=512,
    ),
    Spec(
        name="nemotron3_super_down",
        tag="perf",
        rows=720896,
        in_dim=2688,
        out_dim=1024,
        experts=512,
    ),
    # One token each of 1, 32 and 64 sequences.
    Spec(
        name="qwen3_next_decode",
        tag="perf",
        rows=10,
        in_dim=2048,
        out_dim=1024,
        experts=512,
        products=("forward",),
    ),
    Spec(
        name="qwen3_next_decode",
        tag="perf",
        rows=320,
        in_dim=2048,
        out_dim=1024,
        experts=512,
        products=("forward",),
    ),
    Spec(
        name="nemotron3_super_decode",
        tag="perf",
        rows=1408,
        in_dim=1024,
        out_dim=2688,
        experts=512,
        products=("forward",),
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


def _forward(op, x, w, sizes, dy):
    del dy
    return (op(x, w, sizes),)


def _data_gradient(op, x, w, sizes, dy):
    return jax.vjp(lambda x: op(x, w, sizes), x)[1](dy)


def _weight_gradient(op, x, w, sizes, dy):
    return jax.vjp(lambda w: op(x, w, sizes), w)[1](dy)


# What is measured of an op (x, w, sizes) -> y: each is a function of the op and of
# `Spec.arguments`, and what it does not need of the others the compiler drops.
PRODUCTS: dict[str, Callable[..., tuple[jax.Array, ...]]] = {
    "forward": _forward,
    "data gradient": _data_gradient,
    "weight gradient": _weight_gradient,
}


def minimal_bytes(spec: Spec) -> int:
    """Bytes that a product must move through device memory: each tensor once.

    Of the matrices those of experts with rows, at least one row each.
    """
    item = jnp.dtype(spec.dtype).itemsize
    x = spec.rows * spec.in_dim
    y = spec.rows * spec.out_dim
    # A decoding step draws its experts; distinct ones are about as many.
    drawn = spec.experts * (1.0 - (1.0 - 1.0 / spec.experts) ** spec.rows)
    visited = sum(n > 0 for n in spec.sizes) if spec.sizes else round(drawn)
    return item * (x + y + visited * spec.in_dim * spec.out_dim)


def minimal_flops(spec: Spec) -> int:
    """Operations of a product on real rows."""
    rows = sum(spec.sizes) if spec.sizes else spec.rows
    return 2 * rows * spec.in_dim * spec.out_dim


def bench_cases(tag: str) -> Iterator[Case]:
    """What `python -m pallas_kernels.bench grouped_matmul` measures."""
    for spec in specs(tag):
        for what in spec.products:
            yield _case(spec, what)
    yield from specs_layers.bench_cases(tag)


def _case(spec: Spec, what: str) -> Case:
    # Imported here: the tests read this file for its sizes alone.
    from pallas_kernels._common.bench import Case
    from pallas_kernels.grouped_matmul import api

    def implementation(name: Any) -> Callable[..., Any]:
        op = functools.partial(api.grouped_matmul, implementation=name)
        return functools.partial(PRODUCTS[what], op)

    def picked() -> str:
        arguments = jax.eval_shape(spec.arguments, jax.random.key(0))
        choice = api.choose(*arguments[:3])
        return str(choice.config or choice.implementation)

    size = f"M{spec.rows} K{spec.in_dim} N{spec.out_dim} E{spec.experts}"
    return Case(
        workload=f"{spec.name} {size} {what}",
        dtype=spec.dtype,
        arguments=spec.arguments,
        implementation=implementation,
        # The reference multiplies all rows with all experts: hours at these sizes.
        reference=implementation("xla"),
        picked=picked,
        bytes=minimal_bytes(spec),
        flops=minimal_flops(spec),
        peers={
            "xla": lambda: (implementation("xla"), jax.__version__),
            "tokamax": lambda: _tokamax(what),
            "jax": lambda: _jax_example(spec, what, 128),
            "jax_low": lambda: _jax_example(spec, what, 64),
        },
        rel=5e-3 if what == "forward" else 1e-2,
    )


def _tokamax(what: str) -> tuple[Callable[..., Any], str]:
    import tokamax  # pyrefly: ignore[missing-import]

    return functools.partial(PRODUCTS[what], tokamax.ragged_dot), tokamax.__version__


def _jax_example(spec: Spec, what: str, block_m: int) -> tuple[Callable[..., Any], str]:
    """The example kernels that come with JAX, in tiles of `block_m` x 128 x 64."""
    from jax.experimental.pallas.ops.gpu import (
        ragged_dot_mgpu,
        transposed_ragged_dot_mgpu,
    )

    def sizes_of(columns: int) -> dict[str, Any]:
        block_n = 128 if columns % 128 == 0 else 64
        wide = (n for n in (16, 8, 4, 2, 1) if columns // block_n % n == 0)
        return {
            "block_m": block_m,
            "block_n": block_n,
            "block_k": 64,
            "max_concurrent_steps": 4,
            "grid_block_n": next(wide),
        }

    def example(x, w, sizes, dy):
        if what == "weight gradient":
            op = transposed_ragged_dot_mgpu.transposed_ragged_dot
            return (op(x, dy, group_sizes=sizes, **sizes_of(spec.out_dim)),)
        op = functools.partial(ragged_dot_mgpu.ragged_dot, group_sizes=sizes)
        if what == "forward":
            return (op(x, w, **sizes_of(spec.out_dim)),)
        return (op(dy, w, transpose_rhs=True, **sizes_of(spec.in_dim)),)

    return example, f"{jax.__version__} {block_m}x128x64"
