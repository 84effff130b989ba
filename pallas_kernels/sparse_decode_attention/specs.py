"""Sizes at which `sparse_decode_attention` is tested and measured; its benchmark."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from pallas_kernels.sparse_decode_attention.held import Held, Rotary


if TYPE_CHECKING:
    from pallas_kernels._common.bench import Case


CHUNK = 8


@dataclasses.dataclass(frozen=True, kw_only=True)
class Spec:
    """One use of the op.

    Attributes:
      name: what it stands for.
      tag: "ci" (CPU), "model" (tests on the card) or "perf" (measured).
      batch, heads, kv_heads, head_dim: B, H, G, K.
      rank: r.
      chunks, chosen, places: C, N and M.
      outliers, ring: O and R.
      layers: whose arrays are one; `None` for arrays without that axis.
      theta: base of the rotary embedding, `None` for none.
      factor: on its cosine and sine.
      logit_cap: as for the op.
      sinks: whether there are sinks.
      partial: whether less than all counts; for tests.
    """

    name: str
    tag: str
    batch: int
    heads: int
    kv_heads: int
    head_dim: int = 128
    rank: int = 160
    chunks: int
    chosen: int
    places: int
    outliers: int = 64
    ring: int = 48
    layers: int | None = None
    theta: float | None = 500_000.0
    factor: float = 1.0
    logit_cap: float | None = None
    sinks: bool = False
    partial: bool = False

    @property
    def rotary(self) -> Rotary | None:
        if self.theta is None:
            return None
        count = self.head_dim // 2
        frequencies = tuple(self.theta ** (-i / count) for i in range(count))
        return Rotary(frequencies=frequencies, factor=self.factor)

    def arguments(self, key: jax.Array) -> tuple[Any, ...]:
        """q, what is held, ids, slots, count, sinks, layer; `None` for what isn't."""
        keys = iter(jax.random.split(key, 14))
        pair, width = (self.batch, self.kv_heads), self.head_dim

        def draw(*shape: int, scale: float = 1.0) -> jax.Array:
            return scale * jax.random.normal(next(keys), shape, jnp.bfloat16)

        def below(shape: tuple[int, ...], most: int) -> jax.Array:
            if not self.partial:
                return jnp.full(shape, most, jnp.int32)
            return jax.random.randint(next(keys), shape, most // 3, most, jnp.int32)

        layers = () if self.layers is None else (self.layers,)
        out = (*layers, *pair, self.outliers, CHUNK, width)
        rows = jax.random.uniform(next(keys), (*pair, self.chunks))
        ids = jnp.sort(jnp.argsort(rows, axis=-1)[..., : self.chosen], axis=-1)
        slots = jax.random.uniform(next(keys), (*pair, self.places))
        first = jnp.arange(self.chunks, dtype=jnp.int32) * CHUNK
        held = Held(
            a=draw(*layers, self.batch, self.chunks, CHUNK, self.rank),
            basis=draw(*pair, width, self.rank, scale=self.rank**-0.5),
            first=jnp.broadcast_to(first, (self.batch, self.chunks)),
            values=draw(*layers, *pair, self.places, CHUNK * width),
            out_k=draw(*out),
            out_v=draw(*out),
            out_count=below((self.batch,), self.outliers),
            ring_k=draw(*pair, self.ring, width),
            ring_v=draw(*pair, self.ring, width),
            ring_valid=jnp.arange(self.ring)[None] < below((self.batch, 1), self.ring),
        )
        return (
            draw(self.batch, self.heads, width),
            held,
            ids.astype(jnp.int32),
            jnp.argsort(slots, axis=-1)[..., : self.chosen].astype(jnp.int32),
            below(pair, self.chosen),
            jnp.linspace(-1.0, 4.0, self.heads) if self.sinks else None,
            None if self.layers is None else jnp.int32(self.layers - 1),
        )


SPECS = (
    Spec(
        name="ci_everything",
        tag="ci",
        batch=2,
        heads=6,
        kv_heads=2,
        head_dim=64,
        rank=32,
        chunks=40,
        chosen=7,
        places=9,
        outliers=9,
        ring=16,
        layers=2,
        factor=1.3,
        logit_cap=20.0,
        sinks=True,
        partial=True,
    ),
    Spec(
        name="ci_wide_rank",
        tag="ci",
        batch=1,
        heads=9,
        kv_heads=1,
        head_dim=64,
        rank=96,
        chunks=30,
        chosen=17,
        places=17,
        outliers=1,
        ring=72,
        theta=None,
    ),
    Spec(
        name="llama_ragged",
        tag="model",
        batch=3,
        heads=32,
        kv_heads=8,
        chunks=15_368,
        chosen=256,
        places=300,
        layers=2,
        partial=True,
    ),
    Spec(
        name="gpt_oss",
        tag="model",
        batch=2,
        heads=64,
        kv_heads=8,
        head_dim=64,
        rank=96,
        chunks=4_104,
        chosen=130,
        places=260,
        factor=1.35,
        sinks=True,
        logit_cap=30.0,
        partial=True,
    ),
    # Llama-3.1-8B: 24 sequences of 122,880 tokens and a budget of 2048, 48 of half of
    # both, 12 of twice both, and one sequence.
    *(
        Spec(
            name=name,
            tag="perf",
            batch=batch,
            heads=32,
            kv_heads=8,
            chunks=chunks,
            chosen=chosen,
            places=2 * chosen,
        )
        for name, batch, chunks, chosen in (
            ("shadowkv_a", 24, 15_368, 256),
            ("shadowkv_b", 48, 7_688, 128),
            ("shadowkv_c", 12, 30_728, 512),
            ("one_sequence", 1, 16_392, 256),
        )
    ),
)


def specs(tag: str) -> Iterator[Spec]:
    """The specs with a tag."""
    return (spec for spec in SPECS if spec.tag == tag)


def run(spec: Spec, op: Callable[..., Any]) -> Callable[..., Any]:
    """`op` as a function of `spec.arguments`."""

    def call(q, held, ids, slots, count, sinks, layer):
        return op(
            q,
            held,
            ids,
            slots,
            count,
            rotary=spec.rotary,
            logit_cap=spec.logit_cap,
            sinks=sinks,
            layer=layer,
        )

    return call


def minimal_bytes(spec: Spec) -> int:
    """Bytes that must cross device memory, if all counts.

    Rows in the basis and values of chosen chunks, keys and values of outliers and of
    the ring, and each kv head's basis.
    """
    width = 2 * spec.head_dim
    chosen = spec.chosen * CHUNK * (2 * spec.rank + width)
    exact = 2 * (spec.outliers * CHUNK + spec.ring) * width
    basis = 2 * spec.rank * spec.head_dim
    return spec.batch * spec.kv_heads * (chosen + exact + basis)


def flops(spec: Spec) -> int:
    """Operations of the keys that are made, and of the attention."""
    made = 2 * spec.chosen * CHUNK * spec.rank * spec.head_dim * spec.kv_heads
    tokens = (spec.chosen + spec.outliers) * CHUNK + spec.ring
    return spec.batch * (made + 4 * tokens * spec.head_dim * spec.heads)


def bench_cases(tag: str) -> Iterator[Case]:
    """What `python -m pallas_kernels.bench sparse_decode_attention` measures."""
    return (_case(spec) for spec in specs(tag))


def _case(spec: Spec) -> Case:
    # Imported here: the tests read this file for its sizes alone.
    from pallas_kernels._common.bench import Case
    from pallas_kernels.sparse_decode_attention import api

    args = jax.eval_shape(spec.arguments, jax.random.key(0))

    def arguments(key: jax.Array) -> tuple[jax.Array, ...]:
        return tuple(jax.tree.leaves(spec.arguments(key)))  # arrays alone

    def implementation(name: Any) -> Callable[..., Any]:
        op = functools.partial(api.sparse_decode_attention, implementation=name)

        def call(*leaves):
            return run(spec, op)(*jax.tree.unflatten(jax.tree.structure(args), leaves))

        return call

    def picked() -> str:
        choice = run(spec, api.choose)(*args)
        return str(choice.config or choice.implementation)

    heads = f"H{spec.heads} G{spec.kv_heads} K{spec.head_dim} r{spec.rank}"
    return Case(
        workload=f"{spec.name} B{spec.batch} {heads} {spec.chosen} of {spec.chunks}",
        dtype="bfloat16",
        arguments=jax.jit(arguments),
        implementation=implementation,
        reference=implementation("reference"),
        picked=picked,
        bytes=minimal_bytes(spec),
        flops=flops(spec),
        peers={"xla": lambda: (implementation("xla"), jax.__version__)},
        # Weights are rounded to 16 bits, which the reference does not.
        rel=1e-2,
    )
