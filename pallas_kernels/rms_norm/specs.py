"""Sizes at which `rms_norm` is tested, measured and tuned, and its benchmark."""

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
      shape: of x.
      gate: "no", "before" (gate, then norm) or "after" (norm, then gate).
    """

    name: str
    tag: str
    shape: tuple[int, ...]
    dtype: str = "bfloat16"
    scale_dtype: str = "float32"
    gate: str = "no"
    zero_centered: bool = False
    num_groups: int = 1

    def options(self) -> dict[str, Any]:
        """The keywords of `rms_norm` that are no arrays."""
        return {
            "zero_centered": self.zero_centered,
            "norm_before_gate": self.gate != "before",
            "num_groups": self.num_groups,
        }

    def arguments(self, key: jax.Array) -> tuple[jax.Array, ...]:
        """x, scale, dy, and gate if there is one."""
        keys = jax.random.split(key, 4)
        scale = jax.random.normal(keys[1], self.shape[-1:]) * 0.1 + 1.0
        if self.zero_centered:
            scale = scale - 1.0
        x, dy, gate = (
            jax.random.normal(k, self.shape).astype(self.dtype)
            for k in (keys[0], keys[2], keys[3])
        )
        scale = scale.astype(self.scale_dtype)
        return (x, scale, dy) if self.gate == "no" else (x, scale, dy, gate)


SPECS = (
    # At most four tiles an axis: the interpreter takes milliseconds a tile.
    Spec(name="ci_row", tag="ci", shape=(3, 1024)),
    Spec(name="ci_zero_centered", tag="ci", shape=(2, 4, 256), zero_centered=True),
    Spec(name="ci_f32", tag="ci", shape=(4, 512), dtype="float32"),
    Spec(name="ci_f16", tag="ci", shape=(8, 256), dtype="float16"),
    Spec(
        name="ci_head_gate_after",
        tag="ci",
        shape=(2, 16, 128),
        gate="after",
        scale_dtype="bfloat16",
    ),
    Spec(name="ci_head_gate_before", tag="ci", shape=(32, 64), gate="before"),
    Spec(name="ci_groups", tag="ci", shape=(8, 512), gate="before", num_groups=2),
    Spec(name="ci_groups_after", tag="ci", shape=(4, 768), gate="after", num_groups=3),
    # Qwen3-Next-80B-A3B: d 2048, 16 q heads of 256, 32 value heads of 128 per layer.
    Spec(
        name="qwen3_next_residual", tag="model", shape=(1024, 2048), zero_centered=True
    ),
    Spec(
        name="qwen3_next_q_norm", tag="model", shape=(256, 16, 256), zero_centered=True
    ),
    Spec(name="qwen3_next_gdn_norm", tag="model", shape=(256, 32, 128), gate="after"),
    Spec(
        name="nemotron3_mamba_norm",
        tag="model",
        shape=(512, 8192),
        gate="before",
        num_groups=8,
    ),
    Spec(name="f32_row", tag="model", shape=(512, 4096), dtype="float32"),
    Spec(name="row_4096", tag="perf", shape=(16384, 4096)),
    Spec(
        name="qwen3_next_residual", tag="perf", shape=(16384, 2048), zero_centered=True
    ),
    Spec(
        name="qwen3_next_q_norm", tag="perf", shape=(8192, 16, 256), zero_centered=True
    ),
    Spec(name="qwen3_next_gdn_norm", tag="perf", shape=(8192, 32, 128), gate="after"),
    Spec(
        name="nemotron3_mamba_norm",
        tag="perf",
        shape=(8192, 8192),
        gate="before",
        num_groups=8,
    ),
    Spec(name="decode_residual", tag="perf", shape=(128, 2048), zero_centered=True),
)


def specs(tag: str) -> Iterator[Spec]:
    """The specs with a tag."""
    return (spec for spec in SPECS if spec.tag == tag)


def run(spec: Spec, op: Callable[..., jax.Array], backward: bool) -> Callable[..., Any]:
    """`op` as a function of `spec.arguments`: y, or (y, dx, dscale[, dgate])."""

    def forward(x, scale, gate):
        return op(x, scale, gate=gate, **spec.options())

    def only_forward(x, scale, dy, gate=None):
        del dy
        return forward(x, scale, gate)

    def both(x, scale, dy, gate=None):
        y, pull = jax.vjp(forward, x, scale, gate)
        return (y, *(grad for grad in pull(dy) if grad is not None))

    return both if backward else only_forward


def minimal_bytes(spec: Spec, backward: bool) -> int:
    """Bytes that must cross device memory: each tensor once each way."""
    gated = spec.gate != "no"
    tensors = 2 + gated + (3 + 2 * gated if backward else 0)
    return math.prod(spec.shape) * jnp.dtype(spec.dtype).itemsize * tensors


def bench_cases(tag: str) -> Iterator[Case]:
    """What `python -m pallas_kernels.bench rms_norm` measures."""
    for spec in specs(tag):
        for backward in (False, True):
            yield _case(spec, backward)


def _case(spec: Spec, backward: bool) -> Case:
    # Imported here: the tests read this file for its sizes alone.
    from pallas_kernels._common.bench import Case
    from pallas_kernels.rms_norm import api, reference

    def implementation(name: Any) -> Callable[..., Any]:
        op = functools.partial(api.rms_norm, implementation=name)
        return run(spec, op, backward)

    def picked() -> str:
        x = jax.ShapeDtypeStruct(spec.shape, jnp.dtype(spec.dtype))
        scale = jax.ShapeDtypeStruct(spec.shape[-1:], jnp.dtype(spec.scale_dtype))
        gate = None if spec.gate == "no" else x
        choice = api.choose(x, scale, gate=gate, **spec.options())
        return str(choice.config or choice.implementation)

    peers = {"xla": lambda: (implementation("xla"), jax.__version__)}
    if spec.gate == "no" and spec.num_groups == 1:
        peers["tokamax"] = lambda: _tokamax(spec, backward)
    size = "x".join(map(str, spec.shape))
    return Case(
        workload=f"{spec.name} {size} {'fwd+bwd' if backward else 'fwd'}",
        dtype=spec.dtype,
        arguments=spec.arguments,
        implementation=implementation,
        reference=run(spec, reference.rms_norm, backward),
        picked=picked,
        bytes=minimal_bytes(spec, backward),
        flops=0,
        peers=peers,
    )


def _tokamax(spec: Spec, backward: bool) -> tuple[Callable[..., Any], str]:
    import tokamax  # pyrefly: ignore[missing-import]

    def op(x, scale, *, gate, zero_centered, norm_before_gate, num_groups):
        del gate, norm_before_gate, num_groups
        return tokamax.layer_norm(
            x,
            scale,
            None,
            epsilon=1e-6,
            scale_offset=1.0 if zero_centered else 0.0,
            subtract_mean=False,
        )

    return run(spec, op, backward), tokamax.__version__
