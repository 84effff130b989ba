"""Sizes at which `decode_attention` is tested and measured, and its benchmark."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.decode_attention.config import Config


if TYPE_CHECKING:
    from pallas_kernels._common.bench import Case


@dataclasses.dataclass(frozen=True, kw_only=True)
class Spec:
    """One use of the op.

    Attributes:
      name: where it comes from.
      tag: "ci" (CPU), "model" (tests on the card) or "perf" (measured).
      batch, time, heads, kv_heads, dim: B, T, H, G, K.
      length: S, tokens that a row has room for.
      lengths: tokens that rows hold, repeated over the rows; S each if empty.
      page: tokens of a page, 0 for a cache without.
      layers: of the cache, 0 for arrays of one layer; the last one is read.
      heads_first: as for the op.
      window, logit_cap: as for the op.
      sinks: whether there are sinks.
    """

    name: str
    tag: str
    batch: int
    heads: int
    kv_heads: int
    length: int
    dim: int = 128
    time: int = 1
    dtype: str = "bfloat16"
    lengths: tuple[int, ...] = ()
    page: int = 0
    layers: int = 0
    heads_first: bool = False
    window: int | None = None
    logit_cap: float | None = None
    sinks: bool = False

    @property
    def held(self) -> np.ndarray:
        """i32[B], tokens of each row."""
        lengths = self.lengths or (self.length,)
        return np.resize(np.asarray(lengths, np.int32), self.batch)

    @property
    def pages(self) -> int:
        """Of a row."""
        return -(-self.length // self.page)

    @property
    def pool(self) -> int:
        """Pages of all rows, and one that none has."""
        return self.batch * self.pages + 1

    def table(self) -> np.ndarray:
        """i32[B, N]: pages in an order of their own, -1 behind the last token."""
        order = 1 + np.random.default_rng(0).permutation(self.pool - 1)
        table = order.reshape(self.batch, -1).astype(np.int32)
        is_needed = np.arange(self.pages)[None] * self.page < self.held[:, None]
        return np.where(is_needed, table, -1)

    def cache_shape(self) -> tuple[int, ...]:
        """Of k and v."""
        rows, tokens = (
            (self.pool, self.page) if self.page else (self.batch, self.length)
        )
        inner = (tokens, self.kv_heads)
        inner = inner[::-1] if self.heads_first else inner
        layers = (self.layers,) if self.layers else ()
        return (*layers, rows, *inner, self.dim)

    def arguments(self, key: jax.Array) -> tuple[jax.Array, ...]:
        """q, k, v, lengths, table, sinks."""
        keys = jax.random.split(key, 4)
        shape = (self.batch, self.time, self.heads, self.dim)
        # Drawn as 16 bits: caches of f32 would not fit.
        kind = jnp.dtype(self.dtype)
        q = jax.random.normal(keys[0], shape, kind)
        k, v = (jax.random.normal(x, self.cache_shape(), kind) for x in keys[1:3])
        table = self.table() if self.page else np.zeros((self.batch, 1), np.int32)
        sinks = jax.random.normal(keys[3], (self.heads,))
        return q, k, v, jnp.asarray(self.held), jnp.asarray(table), sinks


# 32 query and 8 kv heads of 128, as Llama-3-8B; gpt-oss has 64 and 8 of 64, Qwen3-Next
# 16 and 2 of 256.
_LLAMA: dict[str, Any] = {"name": "llama3", "heads": 32, "kv_heads": 8}
_GPT_OSS: dict[str, Any] = {"name": "gpt_oss", "heads": 64, "kv_heads": 8, "dim": 64}
_QWEN: dict[str, Any] = {"name": "qwen3_next", "heads": 16, "kv_heads": 2, "dim": 256}
_RAGGED = (0, 1, 63, 1000, 2048, 64)

SPECS = (
    Spec(
        name="ci_small",
        tag="ci",
        batch=3,
        time=2,
        heads=4,
        kv_heads=2,
        length=12,
        dim=8,
        dtype="float32",
        lengths=(0, 5, 12),
    ),
    Spec(
        name="ci_pages",
        tag="ci",
        batch=3,
        heads=4,
        kv_heads=2,
        length=12,
        dim=8,
        dtype="float32",
        lengths=(12, 1, 7),
        page=4,
        layers=2,
        sinks=True,
    ),
    # Kernels: a row without tokens first, a last tile that reaches back.
    Spec(
        name="ci_kernel",
        tag="ci",
        batch=2,
        heads=4,
        kv_heads=2,
        length=104,
        dim=64,
        lengths=(0, 90),
        layers=2,
        sinks=True,
    ),
    # Queries that are no whole tiles of 8 rows, nor begin at them.
    Spec(
        name="ci_kernel_group_3",
        tag="ci",
        batch=3,
        heads=6,
        kv_heads=2,
        length=72,
        dim=64,
        lengths=(70, 3, 72),
    ),
    # 72 rows of queries, which is more than one product has.
    Spec(
        name="ci_kernel_tokens",
        tag="ci",
        batch=1,
        time=8,
        heads=9,
        kv_heads=1,
        length=256,
        dim=64,
        lengths=(250,),
        heads_first=True,
        window=100,
        logit_cap=2.0,
        dtype="float16",
    ),
    # The last tile has one page of two.
    Spec(
        name="ci_kernel_pages",
        tag="ci",
        batch=2,
        time=2,
        heads=4,
        kv_heads=2,
        length=160,
        dim=64,
        lengths=(70, 160),
        page=32,
        layers=2,
    ),
    *(
        Spec(tag="model", batch=6, length=2048, lengths=_RAGGED, **sizes)
        for sizes in (_LLAMA, _GPT_OSS | {"sinks": True, "window": 128}, _QWEN)
    ),
    Spec(
        tag="model",
        batch=6,
        time=4,
        length=2048,
        lengths=_RAGGED,
        logit_cap=50.0,
        layers=2,
        heads_first=True,
        **_LLAMA,
    ),
    *(
        Spec(
            tag="model",
            batch=6,
            length=2048,
            lengths=_RAGGED,
            page=page,
            heads_first=heads_first,
            **_LLAMA,
        )
        for page, heads_first in ((16, False), (64, True), (256, False))
    ),
    Spec(tag="model", batch=2, length=16384, lengths=(9001, 16384), **_LLAMA),
    # Groups that are no whole tiles of 8 queries, nor divide one.
    Spec(name="group_6", tag="model", batch=3, heads=12, kv_heads=2, length=320),
    Spec(tag="model", batch=3, time=3, length=1000, lengths=(1000, 2, 77), **_LLAMA),
    Spec(
        name="mha",
        tag="model",
        batch=2,
        heads=8,
        kv_heads=8,
        length=1000,
        dtype="float16",
    ),
    Spec(
        name="mqa_tokens",
        tag="model",
        batch=2,
        time=8,
        heads=16,
        kv_heads=1,
        length=1000,
        window=300,
    ),
    # Up to half of the card's memory.
    *(
        Spec(tag="perf", batch=batch, length=length, **_LLAMA)
        for batch, length in (
            (1, 8192),
            (1, 32768),
            (1, 131072),
            (8, 8192),
            (8, 32768),
            (8, 131072),
            (64, 8192),
            (64, 32768),
        )
    ),
    Spec(tag="perf", batch=8, length=131072, heads_first=True, **_LLAMA),
    *(
        Spec(tag="perf", batch=8, length=131072, page=page, **_LLAMA)
        for page in (16, 64)
    ),
    Spec(tag="perf", batch=64, length=8192, page=64, heads_first=True, **_LLAMA),
    Spec(tag="perf", batch=8, length=32768, time=4, **_LLAMA),
    Spec(
        tag="perf",
        batch=64,
        length=32768,
        lengths=(32768, 512, 8192, 1024, 2048, 700, 16384, 100),
        **_LLAMA,
    ),
    Spec(tag="perf", batch=8, length=131072, sinks=True, **_GPT_OSS),
    Spec(tag="perf", batch=8, length=131072, **_QWEN),
)


def specs(tag: str) -> Iterator[Spec]:
    """The specs with a tag."""
    return (spec for spec in SPECS if spec.tag == tag)


def options(spec: Spec) -> dict[str, Any]:
    """Keywords of a call that are no arrays."""
    return {
        "heads_first": spec.heads_first,
        "window": spec.window,
        "logit_cap": spec.logit_cap,
    }


def run(spec: Spec, op: Callable[..., Any]) -> Callable[..., Any]:
    """`op` as a function of `spec.arguments`."""

    def call(q, k, v, lengths, table, sinks):
        return op(
            *(q, k, v, lengths),
            table=table if spec.page else None,
            layer=jnp.int32(spec.layers - 1) if spec.layers else None,
            sinks=sinks if spec.sinks else None,
            **options(spec),
        )

    return call


def _seen(spec: Spec) -> tuple[int, int]:
    """Tokens that any query of a row sees, and pairs of a query and a token, summed."""
    tokens = pairs = 0
    for length in map(int, spec.held):
        starts = []
        for t in range(spec.time):
            place = length - spec.time + t
            if place < 0:
                continue
            start = 0 if spec.window is None else max(0, place + 1 - spec.window)
            starts.append(start)
            pairs += place + 1 - start
        tokens += length - min(starts, default=length)
    return tokens, pairs


def minimal_bytes(spec: Spec) -> int:
    """Bytes that must cross device memory: what is seen, q and o."""
    item = jnp.dtype(spec.dtype).itemsize
    queries = spec.batch * spec.time * spec.heads
    cached = 2 * _seen(spec)[0] * spec.kv_heads
    return (cached + 2 * queries) * spec.dim * item + 4 * queries


def minimal_flops(spec: Spec) -> int:
    """Operations of both products, for the queries that there are."""
    return 4 * _seen(spec)[1] * spec.heads * spec.dim


# Launch parameters worth measuring, with --peers NAME,...
VARIANTS: dict[str, dict[str, Any]] = {
    **{f"unit{unit}": {"unit": unit} for unit in (256, 512, 2048, 4096)},
    "slots2": {"slots": 2},
    "slots4": {"slots": 4},
    "warpgroups1": {"warpgroups": 1, "slots": 12},
    "q1": {"q_places": 1},
}


def bench_cases(tag: str) -> Iterator[Case]:
    """What `python -m pallas_kernels.bench decode_attention` measures."""
    return map(_case, specs(tag))


def _case(spec: Spec) -> Case:
    # Imported here: the tests read this file for its sizes alone.
    from pallas_kernels._common.bench import Case
    from pallas_kernels.decode_attention import api

    def implementation(name: Any, config: Config | None = None) -> Callable[..., Any]:
        op = functools.partial(api.decode_attention, implementation=name, config=config)
        return run(spec, op)

    def variant(changes: dict[str, Any]) -> tuple[Callable[..., Any], str]:
        arguments = jax.eval_shape(spec.arguments, jax.random.key(0))
        op = functools.partial(api.choose, implementation="mosaic")
        config = dataclasses.replace(run(spec, op)(*arguments).config, **changes)
        return implementation("mosaic", config), jax.__version__

    def picked() -> str:
        arguments = jax.eval_shape(spec.arguments, jax.random.key(0))
        choice = run(spec, api.choose)(*arguments)
        return str(choice.config or choice.implementation)

    peers = {
        "xla": lambda: (implementation("xla"), jax.__version__),
        **{x: functools.partial(variant, y) for x, y in VARIANTS.items()},
    }
    plain = not (spec.page or spec.layers or spec.heads_first or spec.sinks)
    if plain and spec.logit_cap is None and spec.window is None and spec.time == 1:
        peers["cudnn"] = lambda: (_cudnn(spec), jax.__version__)
    sizes = f"B{spec.batch} S{spec.length}"
    sizes += f" T{spec.time}" if spec.time > 1 else ""
    sizes += " ragged" if spec.lengths else ""
    sizes += f" page{spec.page}" if spec.page else ""
    sizes += " heads first" if spec.heads_first else ""
    heads = f"H{spec.heads} G{spec.kv_heads} K{spec.dim}"
    return Case(
        workload=f"{spec.name} {sizes} {heads}",
        dtype=spec.dtype,
        arguments=spec.arguments,
        implementation=implementation,
        # All at once in f32, keys would not fit into memory.
        reference=functools.partial(_blocked, spec),
        picked=picked,
        bytes=minimal_bytes(spec),
        flops=minimal_flops(spec),
        peers=peers,
        rel=1e-2,
    )


def _blocked(spec: Spec, q, k, v, lengths, table, sinks):
    """The exact result a row and a kv head at a time, of f32 arguments or others.

    Keys and values are cut and widened inside of the loop: all of them in f32 and once
    more for each head would be more than there is memory.
    """
    from pallas_kernels.decode_attention import reference
    from pallas_kernels.decode_attention.held import Sizes

    group, tokens = spec.heads // spec.kv_heads, spec.pages if spec.page else 1
    head_axis = 1 if spec.heads_first else 2
    if spec.layers:
        k, v = k[-1], v[-1]

    def one(index):
        row, head = index // spec.kv_heads, index % spec.kv_heads

        def part(x):
            x = jax.lax.dynamic_slice_in_dim(x, head, 1, axis=head_axis)
            if spec.page:
                return x[jnp.maximum(table[row], 0)]
            return jax.lax.dynamic_slice_in_dim(x, row, 1, axis=0)

        heads = jax.lax.dynamic_slice_in_dim(q, row, 1, axis=0)
        heads = jax.lax.dynamic_slice_in_dim(heads, head * group, group, axis=2)
        own = jax.lax.dynamic_slice_in_dim(sinks, head * group, group, axis=0)
        sizes = Sizes(
            batch=1,
            time=spec.time,
            heads=group,
            kv_heads=1,
            head_dim=spec.dim,
            length=tokens * spec.page if spec.page else spec.length,
            page=spec.page,
            pages=tokens,
            layers=0,
            heads_first=spec.heads_first,
        )
        pages = jnp.arange(tokens, dtype=jnp.int32)[None] if spec.page else None
        o, lse = reference.decode_attention(
            *(heads, part(k), part(v), lengths[row][None]),
            sizes=sizes,
            table=pages,
            layer=None,
            window=spec.window,
            sinks=own if spec.sinks else None,
            logit_cap=spec.logit_cap,
            scale=spec.dim**-0.5,
            out_dtype=jnp.float32,
        )
        return o[0], lse[0]

    o, lse = jax.lax.map(one, jnp.arange(spec.batch * spec.kv_heads, dtype=jnp.int32))

    def heads_together(x):  # [B G, T, H / G, ...] -> [B, T, H, ...]
        x = x.reshape(spec.batch, spec.kv_heads, *x.shape[1:])
        x = jnp.moveaxis(x, 1, 2)
        return x.reshape(spec.batch, spec.time, spec.heads, *x.shape[4:])

    return heads_together(o), heads_together(lse)


def _cudnn(spec: Spec) -> Callable[..., Any]:
    def op(q, k, v, lengths, table, sinks):
        del table, sinks
        return jax.nn.dot_product_attention(
            *(q, k, v),
            key_value_seq_lengths=lengths,
            implementation="cudnn",
            return_residual=True,
        )

    return op
