"""Sizes at which `engram_gather` is tested and measured, and its benchmark."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from pallas_kernels.engram_gather.reference import BLOCK


if TYPE_CHECKING:
    from pallas_kernels._common.bench import Case


@dataclasses.dataclass(frozen=True, kw_only=True)
class Spec:
    """One use of the op.

    Attributes:
      name: where it comes from.
      tag: "ci" (CPU), "model" (tests on the card) or "perf" (measured).
      num_rows, dim: N and d of the table.
      lookups: shape of the ids.
      dtype: of the table; "float8_e4m3fn" comes with scales.
      skewed: whether few rows have most lookups: the k-th has 1 / k of the first's.
      missing: ids that are no row, among the first; for tests.
    """

    name: str
    tag: str
    num_rows: int
    dim: int
    lookups: tuple[int, ...]
    dtype: str = "bfloat16"
    skewed: bool = False
    missing: int = 0

    @property
    def is_narrow(self) -> bool:
        """Whether rows have 8 bits and scales."""
        return jnp.dtype(self.dtype).itemsize == 1

    def arguments(self, key: jax.Array) -> tuple[jax.Array, ...]:
        """table, ids, and with 8-bit rows the scale; those rows come as u8."""
        keys = jax.random.split(key, 2)
        ids = self._ids(keys[0])
        # Random numbers would take more memory than the table has.
        noise = _noise((self.num_rows, self.dim))
        if not self.is_narrow:
            values = noise.astype(jnp.float32) / 128.0 - 1.0
            return values.astype(self.dtype), ids
        # Not NaN, whose bits are all ones but the sign.
        table = (noise & jnp.uint32(0xFE)).astype(jnp.uint8)
        scale = 120 + _noise((self.num_rows, self.dim // BLOCK)) % 16
        return table, ids, scale.astype(jnp.uint8)

    def _ids(self, key: jax.Array) -> jax.Array:
        if self.skewed:
            u = jax.random.uniform(key, self.lookups)
            rank = jnp.float32(self.num_rows) ** u
            rank = jnp.clip(rank.astype(jnp.int32) - 1, 0, self.num_rows - 1)
            # Frequent rows lie anywhere.
            spread = rank.astype(jnp.uint32) * jnp.uint32(2_654_435_761)
            ids = (spread % jnp.uint32(self.num_rows)).astype(jnp.int32)
        else:
            ids = jax.random.randint(key, self.lookups, 0, self.num_rows, jnp.int32)
        flat = ids.reshape(-1)
        first, last = jnp.array([0, self.num_rows - 1], jnp.int32)
        flat = flat.at[0].set(first).at[-1].set(last)
        for i in range(self.missing):
            flat = flat.at[i + 1].set(jnp.int32(-1 if i % 2 else self.num_rows + i))
        return flat.reshape(self.lookups)


def _noise(shape: tuple[int, int]) -> jax.Array:
    """u32 below 256, anything at any place; XLA keeps no array of it."""
    row = jax.lax.broadcasted_iota(jnp.uint32, shape, 0)
    column = jax.lax.broadcasted_iota(jnp.uint32, shape, 1)
    mixed = row * jnp.uint32(2_654_435_761) + column * jnp.uint32(40_503)
    mixed = (mixed ^ (mixed >> 15)) * jnp.uint32(2_246_822_519)
    return mixed >> 24


SPECS = (
    Spec(name="ci_160_bytes", tag="ci", num_rows=50, dim=80, lookups=(7, 9), missing=3),
    Spec(name="ci_one_lookup", tag="ci", num_rows=3, dim=64, lookups=(1,)),
    Spec(name="ci_f32", tag="ci", num_rows=33, dim=6, lookups=(70,), dtype="float32"),
    Spec(name="ci_f16", tag="ci", num_rows=33, dim=10, lookups=(2, 3), dtype="float16"),
    Spec(
        name="ci_8_bits",
        tag="ci",
        num_rows=40,
        dim=256,
        lookups=(3, 5, 2),
        dtype="float8_e4m3fn",
        missing=2,
    ),
    # Numbers of rows are small, those of bytes are not: beyond 2^31 and 2^32.
    Spec(
        name="beyond_31_bits",
        tag="model",
        num_rows=9_000_000,
        dim=256,
        lookups=(4096,),
        dtype="float8_e4m3fn",
    ),
    Spec(
        name="beyond_32_bits",
        tag="model",
        num_rows=17_000_000,
        dim=256,
        lookups=(4096,),
        dtype="float8_e4m3fn",
        missing=2,
    ),
    Spec(
        name="engram_27b_row",
        tag="model",
        num_rows=36_200_000,
        dim=80,
        lookups=(512, 16),
        missing=2,
    ),
    # Engram-27B reads 16 rows of 80 a token; DeepSeek-V4.1-Flash 24 of 256 in 8 bits.
    *(
        Spec(
            name=name,
            tag="perf",
            num_rows=36_200_000,
            dim=80,
            lookups=(65_536, 16),
            skewed=skewed,
        )
        for name, skewed in (("engram_27b", False), ("engram_27b_zipf", True))
    ),
    Spec(
        name="demo",
        tag="perf",
        num_rows=10_344_164,
        dim=64,
        lookups=(65_536, 16),
    ),
    *(
        Spec(
            name=name,
            tag="perf",
            num_rows=64_000_000,
            dim=256,
            lookups=(16_384, 24),
            dtype="float8_e4m3fn",
            skewed=skewed,
        )
        for name, skewed in (
            ("deepseek_v41_flash", False),
            ("deepseek_v41_flash_zipf", True),
        )
    ),
    Spec(
        name="one_long_row", tag="perf", num_rows=2_000_000, dim=1280, lookups=(65_536,)
    ),
    Spec(name="decode_256", tag="perf", num_rows=36_200_000, dim=80, lookups=(256, 16)),
)


def specs(tag: str) -> Iterator[Spec]:
    """The specs with a tag."""
    return (spec for spec in SPECS if spec.tag == tag)


def run(spec: Spec, op: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """`op` as a function of `spec.arguments`."""

    def call(table, ids, scale=None):
        if scale is not None:
            table = jax.lax.bitcast_convert_type(table, jnp.float8_e4m3fn)
        return op(table, ids, scale=scale)

    return call


def minimal_bytes(spec: Spec) -> int:
    """Bytes that must cross device memory: ids, rows in and rows out."""
    lookups = 1
    for size in spec.lookups:
        lookups *= size
    if spec.is_narrow:
        row = spec.dim + spec.dim // BLOCK + 2 * spec.dim
    else:
        row = 2 * spec.dim * jnp.dtype(spec.dtype).itemsize
    return lookups * (4 + row)


def bench_cases(tag: str) -> Iterator[Case]:
    """What `python -m pallas_kernels.bench engram_gather` measures."""
    return (_case(spec) for spec in specs(tag))


def _case(spec: Spec) -> Case:
    # Imported here: the tests read this file for its sizes alone.
    from pallas_kernels._common.bench import Case
    from pallas_kernels.engram_gather import api, reference

    def implementation(name: Any) -> Callable[..., Any]:
        return run(spec, functools.partial(api.engram_gather, implementation=name))

    def picked() -> str:
        table = jax.ShapeDtypeStruct((spec.num_rows, spec.dim), jnp.dtype(spec.dtype))
        ids = jax.ShapeDtypeStruct(spec.lookups, jnp.int32)
        scale = None
        if spec.is_narrow:
            shape = (spec.num_rows, spec.dim // BLOCK)
            scale = jax.ShapeDtypeStruct(shape, jnp.uint8)
        choice = api.choose(table, ids, scale=scale)
        return str(choice.config or choice.implementation)

    size = "x".join(map(str, spec.lookups))
    return Case(
        workload=f"{spec.name} {size} of {spec.num_rows}x{spec.dim} {spec.dtype}",
        dtype="bfloat16" if spec.is_narrow else spec.dtype,
        arguments=jax.jit(spec.arguments),
        implementation=implementation,
        reference=run(spec, reference.engram_gather),
        picked=picked,
        bytes=minimal_bytes(spec),
        flops=0,
        peers={"xla": lambda: (implementation("xla"), jax.__version__)},
        rel=0.0,  # nothing is rounded twice
    )
