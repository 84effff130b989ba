"""Sizes at which `ssd_step` is tested and measured, and its benchmark."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.ssd_step.config import Config
from pallas_kernels.ssd_step.layer import Layer


if TYPE_CHECKING:
    from pallas_kernels._common.bench import Case


@dataclasses.dataclass(frozen=True, kw_only=True)
class Spec:
    """One use of the op.

    Attributes:
      name: where it comes from.
      tag: "ci" (CPU), "model" (tests on the card) or "perf" (measured).
      batch, heads, groups, head_dim, state, width: B, H, G, V, N, W.
      dtype: of xbc, z and the convolution's windows.
      state_dtype: of the state.
      spare: slots more than rows; rows name the last slot first.
      skipped: whether the second row names no slot.
    """

    name: str
    tag: str
    batch: int
    heads: int
    groups: int
    head_dim: int = 64
    state: int = 128
    width: int = 4
    dtype: str = "bfloat16"
    state_dtype: str = "float32"
    spare: int = 0
    skipped: bool = False

    @property
    def channels(self) -> int:
        return self.heads * self.head_dim + 2 * self.groups * self.state

    def layer(self, *parameters: jax.Array) -> Layer:
        """The layer of conv_weight, conv_bias, A_log, D, dt_bias, norm_scale."""
        names = ("conv_weight", "conv_bias", "A_log", "D", "dt_bias", "norm_scale")
        named: Any = dict(zip(names, parameters, strict=True))
        return Layer(**named, groups=self.groups)

    def arguments(self, key: jax.Array) -> tuple[jax.Array, ...]:
        """xbc, dt, z, slots, conv_pool, state_pool, the layer's parameters."""
        keys = jax.random.split(key, 9)
        heads, wide = (self.heads,), self.heads * self.head_dim
        count = self.batch + self.spare
        shapes = (
            (self.batch, self.channels),
            (self.batch, wide),
            (count, self.width - 1, self.channels),
            (self.width, self.channels),
            (self.channels,),
        )
        xbc, z, window, weight, bias = (
            jax.random.normal(k, shape).astype(self.dtype)
            for k, shape in zip(keys[:5], shapes, strict=True)
        )
        entry = (count, self.heads, self.head_dim, self.state)
        state = 0.3 * jax.random.normal(keys[5], entry)
        # As a layer starts: rates from 1 to 16, steps from 0.001 to 0.1.
        steps = jnp.exp(jax.random.uniform(keys[6], heads, minval=-7, maxval=-2))
        rates = jax.random.uniform(keys[7], heads, minval=1.0, maxval=16.0)
        return (
            xbc,
            jax.random.normal(keys[8], (self.batch, *heads)),
            z,
            jnp.asarray(self.slots),
            window,
            state.astype(self.state_dtype),
            weight * jnp.asarray(0.5, self.dtype),
            bias * jnp.asarray(0.1, self.dtype),
            jnp.log(rates),
            jnp.ones(heads),
            jnp.log(jnp.expm1(steps)),
            1 + 0.1 * jax.random.normal(keys[0], (wide,)),
        )

    @property
    def slots(self) -> np.ndarray:
        """i32[B], the last slot first."""
        slots = self.batch + self.spare - 1 - np.arange(self.batch, dtype=np.int32)
        if self.skipped:
            slots[1] = -1
        return slots


# Heads and groups of the published models.
_NANO: dict[str, Any] = {"name": "nemotron3_nano", "heads": 64, "groups": 8}
_SUPER: dict[str, Any] = {"name": "nemotron3_super", "heads": 128, "groups": 8}

SPECS = (
    Spec(
        name="ci_small",
        tag="ci",
        batch=3,
        heads=6,
        groups=2,
        head_dim=8,
        state=16,
        dtype="float32",
        spare=2,
        skipped=True,
    ),
    *(
        Spec(
            name=f"ci_kernel_{state_dtype}",
            tag="ci",
            batch=3,
            heads=8,
            groups=2,
            dtype=dtype,
            state_dtype=state_dtype,
            width=width,
            spare=1,
            skipped=True,
        )
        for dtype, state_dtype, width in (
            ("bfloat16", "float32", 4),
            ("float32", "bfloat16", 2),
        )
    ),
    *(
        Spec(tag="model", batch=64, state_dtype=x, spare=3, skipped=True, **sizes)
        for x in ("float32", "bfloat16")
        for sizes in (_NANO, _SUPER)
    ),
    *(
        Spec(tag="perf", batch=batch, state_dtype=x, **_NANO)
        for x in ("float32", "bfloat16")
        for batch in (1, 8, 64, 256, 1024)
    ),
    *(
        Spec(tag="perf", batch=batch, state_dtype="float32", **_SUPER)
        for batch in (1, 64)
    ),
)


def specs(tag: str) -> Iterator[Spec]:
    """The specs with a tag."""
    return (spec for spec in SPECS if spec.tag == tag)


def run(spec: Spec, op: Callable[..., Any]) -> Callable[..., Any]:
    """`op` as a function of `spec.arguments`."""

    def step(xbc, dt, z, slots, conv_pool, state_pool, *parameters):
        layer = spec.layer(*parameters)
        return op(xbc, dt, z, layer, conv_pool, state_pool, slots)

    return step


def minimal_bytes(spec: Spec) -> int:
    """Bytes that must cross device memory: what is read once, what changes twice."""
    item = jnp.dtype(spec.dtype).itemsize
    wide = spec.heads * spec.head_dim
    state = wide * spec.state * jnp.dtype(spec.state_dtype).itemsize
    window = (spec.width - 1) * spec.channels * item
    tokens = (spec.channels + 2 * wide) * item + spec.heads * 4
    return spec.batch * (2 * state + 2 * window + tokens)


# Tilings worth measuring, with --peers NAME,...
VARIANTS: dict[str, Config] = {
    f"part{part}_threads{threads}": Config(part=part, row_threads=threads)
    for part, threads in ((16, 8), (32, 8), (64, 8), (32, 16))
}


def bench_cases(tag: str) -> Iterator[Case]:
    """What `python -m pallas_kernels.bench ssd_step` measures."""
    return map(_case, specs(tag))


def _case(spec: Spec) -> Case:
    # Imported here: the tests read this file for its sizes alone.
    from pallas_kernels._common.bench import Case
    from pallas_kernels.gated_delta_step.specs import InPlace
    from pallas_kernels.ssd_step import api

    def step(name: Any, config: Config | None = None) -> Callable[..., Any]:
        op = functools.partial(api.ssd_step, implementation=name, config=config)
        return run(spec, op)

    # Arguments stand where those of `gated_delta_step` do, the pools behind four.
    def implementation(name: Any) -> Any:
        return InPlace(step(name))

    def variant(config: Config) -> tuple[Any, str]:
        return InPlace(step("mosaic", config)), jax.__version__

    def picked() -> str:
        arguments = jax.eval_shape(spec.arguments, jax.random.key(0))
        choice = run(spec, api.choose)(*arguments)
        return str(choice.config or choice.implementation)

    heads = f"H{spec.heads} G{spec.groups} V{spec.head_dim} N{spec.state}"
    return Case(
        workload=f"{spec.name} B{spec.batch} {heads} {spec.state_dtype} state",
        dtype=spec.dtype,
        arguments=spec.arguments,
        implementation=implementation,
        reference=step("reference"),
        picked=picked,
        bytes=minimal_bytes(spec),
        flops=0,
        peers={
            "xla": lambda: (implementation("xla"), jax.__version__),
            **{x: functools.partial(variant, y) for x, y in VARIANTS.items()},
        },
        # Against a reference that rounds nothing to bf16 on the way.
        rel=1e-2,
    )
