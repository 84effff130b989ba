"""Sizes at which `rope_append` is tested and measured, and its benchmark."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np


if TYPE_CHECKING:
    from pallas_kernels._common.bench import Case

CACHES = slice(4, 6)  # where those of keys and values stand in `Spec.arguments`


@dataclasses.dataclass(frozen=True, kw_only=True)
class Spec:
    """One use of the op.

    Attributes:
      name: where it comes from.
      tag: "ci" (CPU), "model" (tests on the card) or "perf" (measured).
      batch, time, heads, kv_heads, dim: B, T, H, G, K.
      length: S, tokens that a row has room for.
      rotary_dim: R, 0 for no rotation.
      norms: whether q and k are normed, zero-centred.
      layers: of the cache, 0 for arrays of one layer; the last one is written.
      padded_group: as for the op.
      dropped: whether the last row's last token has no slot.
    """

    name: str
    tag: str
    batch: int
    heads: int
    kv_heads: int
    length: int
    time: int = 1
    dim: int = 128
    rotary_dim: int = 128
    norms: bool = True
    layers: int = 0
    padded_group: int | None = None
    dropped: bool = False
    dtype: str = "bfloat16"
    cache_dtype: str = "bfloat16"

    @property
    def slots(self) -> np.ndarray:
        """i32[B, T], behind a number of tokens of each row's own."""
        last = self.length - self.time
        held = np.arange(self.batch, dtype=np.int32) * 37 % (last + 1)
        slots = held[:, None] + np.arange(self.time, dtype=np.int32)[None]
        if self.dropped:
            slots[-1, -1] = self.length
        return slots

    def arguments(self, key: jax.Array) -> tuple[jax.Array, ...]:
        """q, k, v, slots, the caches of keys and values, positions and their cache,
        the table of the rotation, and the scales of q and k.
        """
        keys = jax.random.split(key, 7)
        lead = (self.batch, self.time)
        heads = (self.heads, self.kv_heads, self.kv_heads)
        q, k, v = (
            jax.random.normal(key, (*lead, n, self.dim)).astype(self.dtype)
            for key, n in zip(keys[:3], heads, strict=True)
        )
        layers = (self.layers,) if self.layers else ()
        place = (*layers, self.batch, self.length)
        cached = (*place, self.kv_heads, self.dim)
        caches = (
            jax.random.normal(key, cached).astype(self.cache_dtype) for key in keys[3:5]
        )
        slots = jnp.asarray(self.slots)
        half = max(self.rotary_dim, 2) // 2
        rate = 10_000.0 ** (-jnp.arange(half, dtype=jnp.float32) / half)
        angle = slots.astype(jnp.float32)[..., None] * rate[None, None]
        scales = (0.1 * jax.random.normal(key, (self.dim,)) for key in keys[5:])
        return (
            *(q, k, v, slots, *caches, slots, jnp.full(place, -1, jnp.int32)),
            jnp.concatenate([jnp.cos(angle), jnp.sin(angle)], axis=-1),
            *(scale.astype(self.dtype) for scale in scales),
        )


# Qwen3.5 9B turns a quarter of each head, Llama 3 8B all of it and without norms.
_MODELS: tuple[dict[str, Any], ...] = (
    {
        "name": "qwen3_5",
        "heads": 16,
        "kv_heads": 4,
        "dim": 256,
        "rotary_dim": 64,
        "length": 4096,
        "padded_group": 8,
    },
    {
        "name": "llama3",
        "heads": 32,
        "kv_heads": 8,
        "norms": False,
        "length": 4096,
        "padded_group": 8,
    },
)

SPECS = (
    Spec(
        name="ci_small",
        tag="ci",
        batch=3,
        time=2,
        heads=6,
        kv_heads=2,
        dim=8,
        rotary_dim=4,
        length=9,
        padded_group=5,
        dropped=True,
        dtype="float32",
        cache_dtype="float32",
    ),
    Spec(
        name="ci_kernel",
        tag="ci",
        batch=2,
        heads=6,
        kv_heads=2,
        rotary_dim=32,
        length=16,
        layers=2,
        padded_group=4,
        dropped=True,
    ),
    Spec(
        name="ci_kernel_drafts",
        tag="ci",
        batch=1,
        time=3,
        heads=2,
        kv_heads=1,
        dim=64,
        rotary_dim=64,
        length=8,
        dropped=True,
        dtype="float32",
    ),
    Spec(
        name="ci_kernel_plain",
        tag="ci",
        batch=3,
        heads=1,
        kv_heads=1,
        dim=256,
        rotary_dim=0,
        norms=False,
        length=8,
    ),
    *(Spec(tag="model", batch=x, dropped=True, **y) for x in (1, 64) for y in _MODELS),
    *(Spec(tag="perf", batch=x, **y) for x in (1, 8, 64) for y in _MODELS),
)


def specs(tag: str) -> Iterator[Spec]:
    """The specs with a tag."""
    return (spec for spec in SPECS if spec.tag == tag)


def run(
    spec: Spec, op: Callable[..., Any], *, with_positions: bool = True
) -> Callable[..., Any]:
    """`op` as a function of `spec.arguments`."""

    def step(q, k, v, slots, k_cache, v_cache, positions, cached, cos_sin, *scales):
        if not with_positions:
            positions = cached = None
        q_scale, k_scale = scales if spec.norms else (None, None)
        return op(
            *(q, k, v, slots, k_cache, v_cache),
            positions=positions,
            position_cache=cached,
            cos_sin=cos_sin if spec.rotary_dim else None,
            layer=jnp.int32(spec.layers - 1) if spec.layers else None,
            q_scale=q_scale,
            k_scale=k_scale,
            zero_centered=True,
            padded_group=spec.padded_group,
        )

    return step


def minimal_bytes(spec: Spec) -> int:
    """Bytes that must cross device memory: what is read once and written once."""
    item, cached = (jnp.dtype(x).itemsize for x in (spec.dtype, spec.cache_dtype))
    out = spec.kv_heads * (spec.padded_group or spec.heads // spec.kv_heads)
    read = (spec.heads + 2 * spec.kv_heads) * spec.dim * item
    written = out * spec.dim * item + 2 * spec.kv_heads * spec.dim * cached
    tables = 4 * spec.rotary_dim + 3 * 4
    return spec.batch * spec.time * (read + written + tables)


def bench_cases(tag: str) -> Iterator[Case]:
    """What `python -m pallas_kernels.bench rope_append` measures."""
    return map(_case, specs(tag))


def _case(spec: Spec) -> Case:
    # Imported here: the tests read this file for its sizes alone.
    from pallas_kernels._common.bench import Case
    from pallas_kernels.gated_delta_step.specs import InPlace
    from pallas_kernels.rope_append import api

    def step(name: Any) -> Callable[..., Any]:
        op = functools.partial(api.rope_append, implementation=name)
        # `InPlace` has places for two caches.
        step = run(spec, op, with_positions=False)
        return lambda *args: step(*args)[:3]

    # Arguments stand where those of `gated_delta_step` do, the caches behind four.
    def implementation(name: Any) -> Any:
        return InPlace(step(name))

    def picked() -> str:
        arguments = jax.eval_shape(spec.arguments, jax.random.key(0))
        return run(spec, api.choose)(*arguments).implementation

    heads = f"H{spec.heads} G{spec.kv_heads} K{spec.dim} R{spec.rotary_dim}"
    return Case(
        workload=f"{spec.name} B{spec.batch} S{spec.length} {heads}",
        dtype=spec.dtype,
        arguments=spec.arguments,
        implementation=implementation,
        reference=step("reference"),
        picked=picked,
        bytes=minimal_bytes(spec),
        flops=0,
        peers={"xla": lambda: (implementation("xla"), jax.__version__)},
        rel=1e-2,
    )
