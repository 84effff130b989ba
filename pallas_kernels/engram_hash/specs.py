"""Sizes at which `engram_hash` is tested and measured, and its benchmark."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from pallas_kernels.engram_hash.layout import HashLayout


if TYPE_CHECKING:
    from pallas_kernels._common.bench import Case


@dataclasses.dataclass(frozen=True, kw_only=True)
class Spec:
    """One use of the op.

    Attributes:
      name: where it comes from.
      tag: "ci" (CPU), "model" (tests on the card) or "perf" (measured).
      batch, time: B, T.
      vocab_size, pad_id, layer_ids, orders, heads, bases: see `HashLayout.create`.
    """

    name: str
    tag: str
    batch: int
    time: int
    vocab_size: int
    layer_ids: tuple[int, ...]
    orders: tuple[int, ...]
    heads: int
    bases: int | tuple[int, ...]
    pad_id: int = 2

    @functools.cached_property
    def layout(self) -> HashLayout:
        """Multipliers and primes."""
        return HashLayout.create(
            vocab_size=self.vocab_size,
            pad_id=self.pad_id,
            layer_ids=self.layer_ids,
            orders=self.orders,
            heads=self.heads,
            bases=self.bases,
        )

    def arguments(self, key: jax.Array) -> tuple[jax.Array, ...]:
        """tokens, is_first, is_real, history."""
        keys = jax.random.split(key, 3)
        shape = (self.batch, self.time)
        tokens = jax.random.randint(keys[0], shape, 0, self.vocab_size, jnp.int32)
        is_real = jax.random.uniform(keys[1], shape) < 0.9
        is_first = is_real & (jax.random.uniform(keys[2], shape) < 0.2)
        history = jnp.full((self.batch, self.orders[-1] - 1), -1, jnp.int32)
        return tokens, is_first, is_real, history


# V' of DeepSeek's tokenizer after compression.
_DEEPSEEK = 99_092

SPECS = (
    Spec(
        name="ci_tiny",
        tag="ci",
        batch=2,
        time=13,
        vocab_size=97,
        layer_ids=(1,),
        orders=(2, 3),
        heads=2,
        bases=101,
    ),
    Spec(
        name="ci_v41",
        tag="ci",
        batch=2,
        time=9,
        vocab_size=_DEEPSEEK,
        layer_ids=(1, 14),
        orders=(2, 3, 4),
        heads=8,
        bases=16_000_000,
    ),
    *(
        Spec(
            name=name,
            tag="perf",
            batch=8,
            time=8192,
            vocab_size=_DEEPSEEK,
            layer_ids=layers,
            orders=orders,
            heads=8,
            bases=bases,
        )
        for name, layers, orders, bases in (
            ("engram_27b", (2, 15), (2, 3), 2_262_400),
            ("deepseek_v41_flash", (1, 14), (2, 3, 4), 16_000_000),
        )
    ),
)


def specs(tag: str) -> Iterator[Spec]:
    """The specs with a tag."""
    return (spec for spec in SPECS if spec.tag == tag)


def run(spec: Spec, implementation: Any) -> Callable[..., Any]:
    """The op as a function of `spec.arguments`."""
    from pallas_kernels.engram_hash import api

    def call(tokens, is_first, is_real, history):
        return api.engram_hash(
            tokens,
            spec.layout,
            is_first=is_first,
            is_real=is_real,
            history=history,
            implementation=implementation,
        )

    return call


def bench_cases(tag: str) -> Iterator[Case]:
    """What `python -m pallas_kernels.bench engram_hash` measures."""
    return (_case(spec) for spec in specs(tag))


def _case(spec: Spec) -> Case:
    # Imported here: the tests read this file for its sizes alone.
    from pallas_kernels._common.bench import Case
    from pallas_kernels.engram_hash import api

    layout = spec.layout
    rows = spec.batch * spec.time * layout.num_layers * layout.num_columns
    return Case(
        workload=f"{spec.name} {spec.batch}x{spec.time} C{layout.num_columns}",
        dtype="int32",
        arguments=spec.arguments,
        implementation=functools.partial(run, spec),
        reference=run(spec, "reference"),
        picked=lambda: str(api.choose().implementation),
        bytes=4 * (rows + spec.batch * spec.time),
        flops=0,
        peers={
            "xla": lambda: (run(spec, "xla"), jax.__version__),
            "int64": lambda: (run(spec, "reference"), jax.__version__),
        },
        rel=0.0,  # these are numbers of rows
    )
