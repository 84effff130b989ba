"""Sizes at which `gemv` is tested and measured, and its benchmark."""

from __future__ import annotations

import dataclasses
import functools
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
      tag: "ci" (CPU), "model" (tests on the card) or "perf" (measured).
      rows, depth, widths: M, K and N of each weight.
      dtype: of x and the weights.
      normed, zero_centered: whether an RMSNorm comes first, and which.
      swiglu: whether both weights make one result.
      adds: whether there is a residual.
      wide: weights with float32 results, counted from the end.
    """

    name: str
    tag: str
    rows: int
    depth: int
    widths: tuple[int, ...]
    dtype: str = "bfloat16"
    normed: bool = False
    zero_centered: bool = False
    swiglu: bool = False
    adds: bool = False
    wide: int = 0

    def arguments(self, key: jax.Array) -> tuple[Any, ...]:
        """x, weights, norm_scale and residual; the last two may be `None`."""
        keys = iter(jax.random.split(key, 3 + len(self.widths)))
        draw = functools.partial(jax.random.normal, dtype=jnp.dtype(self.dtype))
        x = draw(next(keys), (self.rows, self.depth))
        size = self.depth**-0.5
        weights = tuple(
            draw(next(keys), (self.depth, n)) * jnp.asarray(size, self.dtype)
            for n in self.widths
        )
        scale = residual = None
        if self.normed:
            scale = 0.1 * jax.random.normal(next(keys), (self.depth,))
            scale = scale if self.zero_centered else 1.0 + scale
        if self.adds:
            residual = draw(next(keys), (self.rows, self.widths[0]))
        return x, weights, scale, residual

    @property
    def out_dtypes(self) -> list[str]:
        """Of each result."""
        results = 1 if self.swiglu else len(self.widths)
        return [self.dtype] * (results - self.wide) + ["float32"] * self.wide


def _layer(name: str, d_model: int, heads: int, d_ff: int) -> Iterator[Spec]:
    """The products of a Gated DeltaNet layer that decodes one token."""
    make = functools.partial(Spec, tag="perf", rows=1, depth=d_model)
    normed = functools.partial(make, normed=True, zero_centered=True)
    inward = (heads * 256, heads * 128, heads, heads)
    yield normed(name=f"{name}_gdn_in", widths=inward, wide=2)
    yield make(name=f"{name}_out", widths=(d_model,), adds=True)
    yield normed(name=f"{name}_gate_up", widths=(d_ff, d_ff), swiglu=True)
    yield make(name=f"{name}_down", depth=d_ff, widths=(d_model,), adds=True)


SPECS = (
    # K and N that are no multiples of steps and strips.
    Spec(
        name="ci_layer",
        tag="ci",
        rows=1,
        depth=300,
        widths=(48, 24, 8),
        normed=True,
        zero_centered=True,
        wide=1,
    ),
    Spec(
        name="ci_swiglu",
        tag="ci",
        rows=3,
        depth=64,
        widths=(40, 40),
        normed=True,
        swiglu=True,
        adds=True,
        dtype="float16",
    ),
    Spec(name="ci_down", tag="ci", rows=4, depth=520, widths=(32,), adds=True),
    *_layer("qwen3_5_d1024", 1024, heads=8, d_ff=2816),
    *_layer("qwen3_5_d2048", 2048, heads=32, d_ff=6144),
    *(
        Spec(
            name=f"llama3_8b_m{rows}_{part}",
            tag=tag,
            rows=rows,
            depth=14336 if part == "down" else 4096,
            normed=part == "gate_up",
            swiglu=part == "gate_up",
            adds=part == "down",
            widths=(4096,) if part == "down" else (14336, 14336),
        )
        for rows, tag in ((1, "perf"), (2, "model"), (4, "model"))
        for part in ("gate_up", "down")
    ),
)


def specs(tag: str) -> Iterator[Spec]:
    """The specs with a tag."""
    return (spec for spec in SPECS if spec.tag == tag)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chain:
    """The products of a decoder's layers for one token, each of what the last one made.

    Attributes:
      name: where it comes from.
      layers: how many there are.
      d_model, heads, d_ff: of a Gated DeltaNet layer, see `_layer`.
    """

    name: str
    layers: int
    d_model: int
    heads: int
    d_ff: int

    @property
    def products(self) -> list[Spec]:
        """Those of one layer: in, out, gate and up, down."""
        first, out, *rest = _layer(self.name, self.d_model, self.heads, self.d_ff)
        return [first, dataclasses.replace(out, depth=self.heads * 128), *rest]

    def arguments(self, key: jax.Array) -> tuple[Any, ...]:
        """x [1, D], and of each product of each layer its weights and norm's scale."""
        keys = jax.random.split(key, (self.layers, 4))
        layers = [
            [spec.arguments(k)[1:3] for spec, k in zip(self.products, ks, strict=True)]
            for ks in keys
        ]
        # Small, so that a layer's rounding is small beside what it adds.
        return jax.random.normal(key, (1, self.d_model), jnp.bfloat16) / 64, layers

    def run(self, op: Callable[..., Any], *, fetches: bool = False) -> Any:
        """`op` as a function of `arguments`.

        Args:
          op: called as `gemv`.
          fetches: whether each product asks for the next one's weights.
        """

        def call(x, layers):
            following = [weights for layer in layers for weights, _ in layer][1:]
            following = iter([*following, ()] if fetches else [()] * 4 * self.layers)
            y = None
            for layer in layers:
                for spec, (weights, scale) in zip(self.products, layer, strict=True):
                    found = op(
                        x if spec.normed else y,
                        weights,
                        norm_scale=scale,
                        zero_centered=spec.zero_centered,
                        swiglu=spec.swiglu,
                        residual=x if spec.adds else None,
                        prefetch=[w for w in next(following) if w.size % 8 == 0],
                        out_dtype=spec.out_dtypes,
                    )
                    if spec.wide:  # one that is as wide as what a mixer makes
                        found = found[spec.widths.index(self.heads * 128)]
                    y = found[0] if isinstance(found, tuple) else found
                    x = y if spec.adds else x
            return (x,)

        return call

    def chained(self, op: Callable[..., Any], *, at_rest: bool = False) -> Any:
        """The same by `op`, called as `gemv_chain`: a launch a layer, and the first."""
        from pallas_kernels.gemv.chain import Product

        def product(spec: Spec, weights: Any, scale: Any) -> Any:
            return Product(
                weights=weights,
                norm_scale=scale,
                zero_centered=spec.zero_centered,
                swiglu=spec.swiglu,
                adds=spec.adds,
                out_dtypes=spec.out_dtypes,
            )

        def call(x, layers):
            flat = [
                product(spec, *given)
                for layer in layers
                for spec, given in zip(self.products, layer, strict=True)
            ]
            mixer = self.products[0].widths.index(self.heads * 128)
            each, y = len(self.products), None
            # After the first product, three of a layer and the first of the next.
            for first in range(1 - each, len(flat), each):
                own = flat[max(first, 0) : first + each]
                x, made = op(x, own, y=y, at_rest=at_rest)
                y = made[mixer if len(made) > 1 else 0]
            return (x,)

        return call


# The layers of `experiments/gdn/decode_base.gin`.
CHAIN = Chain(name="decoder", layers=12, d_model=1536, heads=16, d_ff=3072)


def run(spec: Spec, op: Callable[..., Any]) -> Callable[..., Any]:
    """`op` as a function of `spec.arguments`."""

    def call(x, weights, norm_scale, residual):
        found = op(
            x,
            weights,
            norm_scale=norm_scale,
            zero_centered=spec.zero_centered,
            swiglu=spec.swiglu,
            residual=residual,
            out_dtype=spec.out_dtypes,
        )
        return found if isinstance(found, tuple) else (found,)

    return call


def minimal_bytes(spec: Spec) -> int:
    """Bytes that must cross device memory: everything once."""
    item = jnp.dtype(spec.dtype).itemsize
    results = sum(spec.widths) // (2 if spec.swiglu else 1)
    values = spec.depth * sum(spec.widths) + spec.rows * (spec.depth + results)
    return item * (values + (spec.rows * results if spec.adds else 0))


def bench_cases(tag: str) -> Iterator[Case]:
    """What `python -m pallas_kernels.bench gemv` measures."""
    yield from (_case(spec) for spec in specs(tag))
    if tag == "perf":
        yield _chain_case(CHAIN)


def _case(spec: Spec) -> Case:
    # Imported here: the tests read this file for its sizes alone.
    from pallas_kernels._common.bench import Case
    from pallas_kernels.gemv import api, reference

    def implementation(name: Any) -> Callable[..., Any]:
        return run(spec, functools.partial(api.gemv, implementation=name))

    def exact(x, weights, *, out_dtype, **options):
        return reference.gemv(x, weights, eps=1e-6, out_dtypes=out_dtype, **options)

    def picked() -> str:
        x, weights, scale, residual = jax.eval_shape(spec.arguments, jax.random.key(0))
        choice = api.choose(
            *(x, weights),
            norm_scale=scale,
            swiglu=spec.swiglu,
            residual=residual,
            out_dtype=spec.out_dtypes,
        )
        return str(choice.config or choice.implementation)

    widths = "+".join(map(str, spec.widths))
    return Case(
        workload=f"{spec.name} {spec.rows}x{spec.depth}x{widths}",
        dtype=spec.dtype,
        arguments=jax.jit(spec.arguments),
        implementation=implementation,
        reference=run(spec, exact),
        picked=picked,
        bytes=minimal_bytes(spec),
        flops=2 * spec.rows * spec.depth * sum(spec.widths),
        peers={
            "xla": lambda: (implementation("xla"), jax.__version__),
            "paired": lambda: (run(spec, paired), jax.__version__),
        },
        rel=5e-3,
    )


def paired(x: Any, weights: Any, **options: Any) -> Any:
    """`gemv` with bursts in two halves."""
    from pallas_kernels.gemv import api

    named = functools.partial(api.choose, implementation="mosaic")
    sizes = {k: v for k, v in options.items() if k != "prefetch"}
    config = named(x, weights, **sizes).config
    config = dataclasses.replace(config, paired=True, burst=max(2, config.burst))
    return api.gemv(x, weights, config=config, implementation="mosaic", **options)


def _chain_case(chain: Chain) -> Case:
    from pallas_kernels._common.bench import Case
    from pallas_kernels.gemv import api
    from pallas_kernels.gemv.chain import gemv_chain

    def op(name: Any) -> Callable[..., Any]:
        return functools.partial(api.gemv, implementation=name)

    def implementation(name: Any) -> Callable[..., Any]:
        return chain.run(op(name))

    def peer(op: Callable[..., Any], fetches: bool) -> Any:
        return lambda: (chain.run(op, fetches=fetches), jax.__version__)

    def chained() -> Any:
        op = functools.partial(gemv_chain, implementation="mosaic")
        return chain.chained(op, at_rest=True), jax.__version__

    return Case(
        workload=f"{chain.name} {chain.layers} layers of {chain.d_model}",
        dtype="bfloat16",
        arguments=jax.jit(chain.arguments),
        implementation=implementation,
        reference=implementation("reference"),
        picked=lambda: "as each",
        bytes=chain.layers * sum(map(minimal_bytes, chain.products)),
        flops=chain.layers
        * sum(2 * spec.depth * sum(spec.widths) for spec in chain.products),
        peers={
            "xla": peer(op("xla"), False),
            "prefetch": peer(op("mosaic"), True),
            "paired": peer(paired, False),
            "paired_prefetch": peer(paired, True),
            "chain": chained,
        },
        # As many roundings to 16 bits as there are products, one after the other.
        rel=3e-2,
    )
