"""Sizes at which `host_gather` is tested and measured, and its benchmark."""

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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Spec:
    """One use of the op.

    Attributes:
      name: what it stands for.
      tag: "ci" (CPU), "model" (tests on the card) or "perf" (measured).
      num_rows, dim: N and d of the table.
      lookups: shape of the ids.
      dtype: of the table.
      missing: whether some ids are no row; for tests.
    """

    name: str
    tag: str
    num_rows: int
    dim: int
    lookups: tuple[int, ...]
    dtype: str = "int16"
    missing: bool = False

    def table(self) -> np.ndarray:
        """The table [N, d], anything at any place."""
        row = np.arange(self.num_rows, dtype=np.uint32) * np.uint32(2_654_435_761)
        column = np.arange(self.dim, dtype=np.uint32) * np.uint32(40_503)
        mixed = (row[:, None] ^ column[None]) >> np.uint32(17)
        dtype = jnp.dtype(self.dtype)
        return mixed.astype(np.int16 if dtype.itemsize > 1 else np.uint8).astype(dtype)

    def ids(self, key: jax.Array) -> jax.Array:
        """The ids, the first and the last row among them."""
        ids = jax.random.randint(key, self.lookups, 0, self.num_rows, jnp.int32)
        flat = ids.reshape(-1).at[-1].set(self.num_rows - 1)
        if self.missing:
            flat = flat.at[1].set(-1).at[2].set(self.num_rows)
        return flat.reshape(self.lookups)

    def arguments(self, key: jax.Array) -> tuple[jax.Array, ...]:
        """table in the host's memory, ids."""
        return jax.device_put(self.table(), on_host()), self.ids(key)


SPECS = (
    Spec(
        name="ci_512_bytes", tag="ci", num_rows=9, dim=256, lookups=(5, 3), missing=True
    ),
    Spec(name="ci_one", tag="ci", num_rows=3, dim=128, lookups=(1,), dtype="float32"),
    Spec(
        name="ci_long_rows",
        tag="ci",
        num_rows=5,
        dim=3072,
        lookups=(9,),
        dtype="bfloat16",
        missing=True,
    ),
    Spec(
        name="ci_8_bits",
        tag="ci",
        num_rows=7,
        dim=256,
        lookups=(40,),
        dtype="uint8",
        missing=True,
    ),
    Spec(
        name="ci_160_bytes",
        tag="ci",
        num_rows=9,
        dim=80,
        lookups=(70, 2),
        dtype="bfloat16",
        missing=True,
    ),
    Spec(
        name="160_bytes",
        tag="model",
        num_rows=100_000,
        dim=80,
        lookups=(512, 16),
        missing=True,
    ),
    Spec(
        name="beyond_31_bits",
        tag="model",
        num_rows=2_200_000,
        dim=512,
        lookups=(4096,),
        missing=True,
    ),
    Spec(
        name="8_bits",
        tag="model",
        num_rows=100_000,
        dim=256,
        lookups=(512, 24),
        dtype="uint8",
        missing=True,
    ),
    *(
        Spec(
            name=f"rows_of_{2 * dim}_bytes",
            tag="perf",
            num_rows=2**29 // dim,
            dim=dim,
            lookups=(lookups,),
        )
        for dim, lookups in (
            (80, 262_144),
            (128, 262_144),
            (256, 131_072),
            (512, 65_536),
        )
    ),
    Spec(
        name="rows_of_2048_bytes",
        tag="perf",
        num_rows=2**19,
        dim=1024,
        lookups=(65_536,),
    ),
    Spec(name="decode", tag="perf", num_rows=2**20, dim=512, lookups=(256, 16)),
)


def on_host() -> jax.sharding.Sharding:
    """The host's memory, pinned."""
    return jax.sharding.SingleDeviceSharding(
        jax.devices()[0], memory_kind="pinned_host"
    )


def specs(tag: str) -> Iterator[Spec]:
    """The specs with a tag."""
    return (spec for spec in SPECS if spec.tag == tag)


def minimal_bytes(spec: Spec) -> int:
    """Bytes that must cross the link: rows and nothing else."""
    lookups = int(np.prod(spec.lookups))
    return lookups * spec.dim * jnp.dtype(spec.dtype).itemsize


def bench_cases(tag: str) -> Iterator[Case]:
    """What `python -m pallas_kernels.bench host_gather` measures."""
    return (_case(spec) for spec in specs(tag))


def _case(spec: Spec) -> Case:
    # Imported here: the tests read this file for its sizes alone.
    from pallas_kernels._common.bench import Case
    from pallas_kernels.host_gather import api, reference

    def implementation(name: Any) -> Callable[..., Any]:
        return functools.partial(api.host_gather, implementation=name)

    def picked() -> str:
        table = jax.ShapeDtypeStruct(
            (spec.num_rows, spec.dim), jnp.dtype(spec.dtype), sharding=on_host()
        )
        ids = jax.ShapeDtypeStruct(spec.lookups, jnp.int32)
        choice = api.choose(table, ids)
        return str(choice.config or choice.implementation)

    size = "x".join(map(str, spec.lookups))
    return Case(
        workload=f"{spec.name} {size} of {spec.num_rows}x{spec.dim}",
        dtype=spec.dtype,
        arguments=spec.arguments,
        implementation=implementation,
        reference=reference.host_gather,
        picked=picked,
        bytes=minimal_bytes(spec),
        flops=0,
        peers={"xla": lambda: (implementation("xla"), jax.__version__)},
        rel=0.0,  # nothing is computed
    )
