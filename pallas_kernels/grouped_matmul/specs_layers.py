"""Sizes at which `grouped_mlp` is tested and measured, and its benchmark."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp


if TYPE_CHECKING:
    from pallas_kernels._common.bench import Case


def uniform_sizes(key: jax.Array, rows: int, experts: int) -> jax.Array:
    """i32[E], rows of each expert if each row draws one."""
    owner = jax.random.randint(key, (rows,), 0, experts)
    borders = jnp.arange(experts + 1)
    sizes = jnp.diff(jnp.searchsorted(jnp.sort(owner), borders))
    return sizes.astype(jnp.int32)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layers:
    """One use of `grouped_mlp`.

    Attributes:
      name: where it comes from.
      tag: as for `Spec`.
      rows, d_model, d_ff, experts: M, D, F, E.
      activation: its name.
      biased: whether experts have biases.
    """

    name: str
    tag: str
    rows: int
    d_model: int
    d_ff: int
    experts: int
    activation: str
    biased: bool = False
    dtype: str = "bfloat16"

    @property
    def d_in(self) -> int:
        """Columns of the first matrix."""
        return self.d_ff * (1 if self.activation == "relu2" else 2)

    def arguments(self, key: jax.Array) -> tuple[jax.Array, ...]:
        """x, w_in, w_out, bias_in, bias_out, row_scale, group_sizes, dy."""
        shapes = {
            "x": (self.rows, self.d_model),
            "w_in": (self.experts, self.d_model, self.d_in),
            "w_out": (self.experts, self.d_ff, self.d_model),
            "bias_in": (self.experts, self.d_in),
            "bias_out": (self.experts, self.d_model),
            "dy": (self.rows, self.d_model),
        }
        *keys, scale, sizes = jax.random.split(key, len(shapes) + 2)
        fan_in = {"w_in": self.d_model, "w_out": self.d_ff}
        drawn = {
            name: (
                jax.random.normal(k, shape, self.dtype) / fan_in.get(name, 1) ** 0.5
            ).astype(self.dtype)
            for k, (name, shape) in zip(keys, shapes.items(), strict=True)
        }
        dy = drawn.pop("dy")
        row_scale = jax.random.uniform(scale, (self.rows,))
        sizes = uniform_sizes(sizes, self.rows, self.experts)
        return (*drawn.values(), row_scale, sizes, dy)


LAYERS = (
    Layers(
        name="relu2_layers",
        tag="model",
        rows=3001,
        d_model=512,
        d_ff=320,
        experts=16,
        activation="relu2",
    ),
    Layers(
        name="swiglu_layers",
        tag="model",
        rows=3001,
        d_model=512,
        d_ff=256,
        experts=16,
        activation="swiglu",
    ),
    Layers(
        name="clamped_swiglu_layers",
        tag="model",
        rows=3001,
        d_model=576,
        d_ff=576,
        experts=16,
        activation="clamped_swiglu",
        biased=True,
    ),
    # T = 8192.
    Layers(
        name="nemotron3_super_layers",
        tag="perf",
        rows=180224,
        d_model=1024,
        d_ff=2688,
        experts=512,
        activation="relu2",
    ),
    Layers(
        name="nemotron3_nano_layers",
        tag="perf",
        rows=49152,
        d_model=2688,
        d_ff=1856,
        experts=128,
        activation="relu2",
    ),
    Layers(
        name="qwen3_next_layers",
        tag="perf",
        rows=81920,
        d_model=2048,
        d_ff=512,
        experts=512,
        activation="swiglu",
    ),
    Layers(
        name="gpt_oss_20b_layers",
        tag="perf",
        rows=32768,
        d_model=2880,
        d_ff=2880,
        experts=32,
        activation="clamped_swiglu",
        biased=True,
    ),
)


def run(spec: Layers, op: Callable[..., Any], backward: bool) -> Callable[..., Any]:
    """`op`, called like `grouped_mlp`, as a function of `spec.arguments`.

    Gives (y,), or y and the gradients of all its floats.
    """

    def both(x, w_in, w_out, bias_in, bias_out, row_scale, sizes, dy):
        biases = (bias_in, bias_out) if spec.biased else ()

        def layers(x, w_in, w_out, row_scale, *biases):
            kind = dict(zip(("bias_in", "bias_out"), biases, strict=False))
            kind |= {"activation": spec.activation, "row_scale": row_scale}
            return op(x, w_in, w_out, sizes, **kind)

        arrays = x, w_in, w_out, row_scale, *biases
        if not backward:
            return (layers(*arrays),)
        y, pull = jax.vjp(layers, *arrays)
        return (y, *pull(dy))

    return both


def bench_cases(tag: str) -> Iterator[Case]:
    """What `python -m pallas_kernels.bench grouped_matmul` measures of whole layers."""
    for spec in LAYERS:
        if spec.tag == tag:
            for backward in (False, True):
                yield _case(spec, backward)


def _case(spec: Layers, backward: bool) -> Case:
    from pallas_kernels._common.bench import Case
    from pallas_kernels.grouped_matmul import mlp

    def implementation(name: Any) -> Callable[..., Any]:
        op = functools.partial(mlp.grouped_mlp, implementation=name)
        return run(spec, op, backward)

    def picked() -> str:
        arguments = jax.eval_shape(spec.arguments, jax.random.key(0))
        x, w_in, w_out, *_, sizes, _ = arguments
        choice = mlp.choose_mlp(x, w_in, w_out, sizes, activation=spec.activation)
        return str(choice.config or choice.implementation)

    item = jnp.dtype(spec.dtype).itemsize
    matrices = spec.experts * (spec.d_in + spec.d_model) * spec.d_ff
    # Forward reads x, writes what is saved, reads a and writes y.
    rows = spec.rows * (2 * spec.d_model + 2 * spec.d_in)
    flops = 2 * spec.rows * spec.d_model * (spec.d_in + spec.d_ff)
    times = 3 if backward else 1
    size = f"M{spec.rows} D{spec.d_model} F{spec.d_ff} E{spec.experts}"
    return Case(
        workload=f"{spec.name} {size} {'fwd+bwd' if backward else 'fwd'}",
        dtype=spec.dtype,
        arguments=spec.arguments,
        implementation=implementation,
        reference=implementation("xla"),
        picked=picked,
        bytes=item * (rows + matrices) * times,
        flops=flops * times,
        peers={
            "xla": lambda: (implementation("xla"), jax.__version__),
            "unfused": lambda: (
                run(spec, unfused_layers, backward),
                jax.__version__,
            ),
        },
        # Between the products results are rounded once more than in f32.
        rel=2e-2,
    )


def unfused_layers(
    x,
    w_in,
    w_out,
    sizes,
    *,
    activation: str,
    row_scale,
    bias_in=None,
    bias_out=None,
    implementation: Any = "mosaic",
) -> jax.Array:
    """`grouped_mlp` of plain products, with all else left to the compiler."""
    from pallas_kernels.grouped_matmul import api
    from pallas_kernels.grouped_matmul.activation import activate

    op = functools.partial(api.grouped_matmul, implementation=implementation)
    rows = jnp.arange(x.shape[0], dtype=jnp.int32)
    owner = jnp.searchsorted(
        jnp.cumsum(sizes), rows, side="right", method="scan_unrolled"
    )
    z = op(x, w_in, sizes).astype(jnp.float32)
    z = z if bias_in is None else z + bias_in[owner].astype(jnp.float32)
    y = op(activate(activation, z).astype(x.dtype), w_out, sizes)
    y = y.astype(jnp.float32)
    y = y if bias_out is None else y + bias_out[owner].astype(jnp.float32)
    return (y * row_scale[:, None]).astype(x.dtype)
