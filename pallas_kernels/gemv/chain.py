"""`gemv_chain`: products of few rows, each of what the last one made, in one launch."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels._common import hw, interpret
from pallas_kernels._common.dispatch import Choice, Implementation, select
from pallas_kernels._common.forward_only import forward_only
from pallas_kernels.gemv import api
from pallas_kernels.gemv import config as configs


@dataclasses.dataclass(frozen=True, kw_only=True)
class Product:
    """One product of a chain; see `gemv` for what it computes.

    Attributes:
      weights: [K, N] each; with `swiglu` gate and up, else one for each result.
      norm_scale: [K] of an RMSNorm in front, whose input is the stream; without one the
        product is of what the last product made.
      zero_centered, eps: of the norm.
      swiglu: whether the weights make one result.
      adds: whether the one result is added to the stream, and is the stream from here.
      out_dtypes: of the results, the stream's by default.
    """

    weights: Sequence[jax.Array]
    norm_scale: jax.Array | None = None
    zero_centered: bool = False
    eps: float = 1e-6
    swiglu: bool = False
    adds: bool = False
    out_dtypes: Sequence[Any] | None = None

    @property
    def widths(self) -> tuple[int, ...]:
        """N of each result."""
        own = self.weights[:1] if self.swiglu else self.weights
        return tuple(w.shape[1] for w in own)

    def dtypes(self, stream: Any) -> tuple[Any, ...]:
        """Of each result."""
        wanted = None if self.out_dtypes is None else list(self.out_dtypes)
        return tuple(api.dtypes_of(stream, len(self.widths), wanted))


def gemv_chain(
    stream: jax.Array,
    products: Sequence[Product],
    *,
    y: jax.Array | None = None,
    prefetch: Sequence[jax.Array] = (),
    at_rest: bool = False,
    config: configs.Config | None = None,
    implementation: Implementation | None = None,
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    """A layer's products from its mixer's result on, for decoding.

    Between two launches memory is idle, and it is again until the second one's loads
    have come back; here the weights of a product are on their way while the one before
    it ends. The kernel has no gradient. Its blocks wait for each other, so all of them
    must be on the card at once: not beside kernels of another stream that do the same,
    nor on a part of the card's SMs.

    Args:
      stream: [M, D], what norms read and results are added to; bfloat16 or float16 for
        the kernel, M of at most `MAX_ROWS`.
      products: one after the other.
      y: [M, K] for a first product without a norm.
      prefetch: as for `gemv`.
      at_rest: as for `gemv`, of all weights.
      config: `burst` and `ring` of "mosaic", `None` for its own choice.
      implementation: "mosaic", by name only until measured, and "xla", "reference",
        which call `gemv` for each product; `None` takes the best that can.

    Returns:
      (the stream after all products, [M, N] of each result of the last one).

    Raises:
      ValueError: a shape or dtype is not allowed.
      NotImplementedError: the named implementation cannot run this call, or "mosaic" is
        differentiated or vmapped.

    Source: as for `gemv`; several products in one launch as in cooperative launches
    with grid synchronisation (CUDA C++ Programming Guide).
    """
    if not products:
        raise ValueError("products are (), expected one or more")
    _check(stream, y, products)
    api.check_prefetch(prefetch)
    choice = choose(stream, products, y=y, config=config, implementation=implementation)
    if choice.implementation == "mosaic":
        return _in_one_launch(choice.config, stream, products, y, prefetch, at_rest)
    found: tuple[jax.Array, ...] = ()
    for product in products:
        x = y if product.norm_scale is None else stream
        assert x is not None
        made = api.gemv(
            x,
            tuple(product.weights),
            norm_scale=product.norm_scale,
            zero_centered=product.zero_centered,
            eps=product.eps,
            swiglu=product.swiglu,
            residual=stream if product.adds else None,
            out_dtype=product.dtypes(stream),
            at_rest=at_rest,
            implementation=choice.implementation,
        )
        found = made if isinstance(made, tuple) else (made,)
        stream, y = found[0] if product.adds else stream, found[0]
    return stream, found


def _check(stream: Any, y: Any, products: Sequence[Product]) -> None:
    """Shapes along the chain; what one product alone allows is `gemv`'s to say."""
    last = y
    for n, product in enumerate(products):
        x = last if product.norm_scale is None else stream
        if x is None:
            raise ValueError(
                f"product {n} has no norm, and there is nothing in front of it: y is "
                "None"
            )
        like = jax.ShapeDtypeStruct
        residual = like(stream.shape, stream.dtype) if product.adds else None
        weights, scale = list(product.weights), product.norm_scale
        api.check(x, weights, scale, product.swiglu, residual)
        dtypes = product.dtypes(stream)
        if product.adds and dtypes[0] != stream.dtype:
            raise ValueError(
                f"product {n} adds to a stream of {stream.dtype}, its out_dtypes are "
                f"{dtypes}"
            )
        if len(product.widths) == 1 or n + 1 == len(products):
            last = like((stream.shape[0], product.widths[0]), dtypes[0])
            continue
        raise ValueError(
            f"product {n} has {len(product.widths)} results, only the last of a chain "
            "may have several"
        )


def columns_of(product: Product, blocks: int) -> int | None:
    """Columns of a block, the fewest with which every strip has a block of its own."""
    least = 32 // (2 if product.swiglu else 1)  # bytes that memory is read in: 64
    for columns in configs.RING_COLUMNS:
        strips = sum(-(-n // columns) for n in product.widths)
        if strips <= blocks and columns >= min(least, *product.widths):
            return columns
    return None


def choose(
    stream: Any,
    products: Sequence[Product],
    *,
    y: Any = None,
    config: configs.Config | None = None,
    implementation: Implementation | None = None,
) -> Choice:
    """Says what a call of `gemv_chain` would run; arguments as there."""
    refused = {}
    sms = hw.device().sms
    if not (hw.is_hopper() or interpret.is_interpreting()):
        refused["mosaic"] = (
            f"the kernel needs a Hopper GPU, this is {jax.default_backend()}"
        )
    others = [] if y is None else [y.dtype]
    for product in products:
        sizes = {"rows": stream.shape[0], "depth": product.weights[0].shape[0]}
        dtypes = [stream.dtype, *others, *(w.dtype for w in product.weights)]
        reason = configs.refusal(**sizes, widths=product.widths, dtypes=dtypes)
        if reason is None and columns_of(product, sms) is None:
            reason = (
                f"N = {product.widths} would be more than {sms} strips of "
                f"{configs.RING_COLUMNS[-1]} columns, one for each SM"
            )
        if reason is not None:
            refused.setdefault("mosaic", reason)
    if "mosaic" not in refused:
        config, reason = _fitting(stream, products, config)
        if reason is not None:
            refused["mosaic"] = reason
    only_named = {"mosaic": "no measured row speaks for it yet"}
    return select(
        "gemv_chain", implementation, refused, only_named=only_named, config=config
    )


def _fitting(
    stream: Any, products: Sequence[Product], config: configs.Config | None
) -> tuple[configs.Config | None, str | None]:
    """The division that shared memory has room for, or why there is none."""
    from pallas_kernels.gemv import kernel_ring

    found = 0
    for candidate in configs.RINGS if config is None else (config,):
        plan, _ = _plan(candidate, stream, products, at_rest=False)
        if (found := kernel_ring.bytes_of(plan)) <= hw.device().smem_bytes:
            return candidate, None
    return None, (
        f"M = {stream.shape[0]} rows of x and the fewest bursts take {found} bytes of "
        f"shared memory, the card has {hw.device().smem_bytes}"
    )


def _plan(
    config: Any, stream: Any, products: Sequence[Product], *, at_rest: bool
) -> tuple[Any, list[tuple[str, int, Any]]]:
    """Of a launch, and name, N and dtype of each result."""
    # Imported on first use: Mosaic GPU takes a second that others need not pay.
    from pallas_kernels.gemv import kernel_ring

    phases, outs, own, last = [], [], "stream", "y"
    for n, product in enumerate(products):
        results = tuple(f"y{n}_{i}" for i in range(len(product.widths)))
        columns = columns_of(product, hw.device().sms)
        assert columns is not None
        scale = None if product.norm_scale is None else f"scale{n}"
        phases.append(
            kernel_ring.Phase(
                source=last if scale is None else own,
                weights=tuple(f"w{n}_{i}" for i in range(len(product.weights))),
                results=results,
                depth=product.weights[0].shape[0],
                widths=product.widths,
                columns=columns,
                gated=product.swiglu,
                scale=scale,
                eps=product.eps,
                zero_centered=product.zero_centered,
                residual=own if product.adds else None,
            )
        )
        outs += zip(results, product.widths, product.dtypes(stream), strict=True)
        last = results[0]
        own = last if product.adds else own
    plan = kernel_ring.Plan(
        rows=stream.shape[0],
        phases=tuple(phases),
        blocks=max(sum(phase.strips) for phase in phases),
        at_rest=at_rest,
        dtype=jnp.dtype(stream.dtype),
        config=config,
    )
    return plan, outs


def _unbatched(launch: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """A launch whose blocks meet: those of a batch would count as one launch's."""
    alone = jax.custom_batching.custom_vmap(launch)

    @alone.def_vmap
    def refuse(*_: Any) -> Any:
        raise NotImplementedError(
            'gemv_chain: implementation="mosaic" has no vmap, implementation="xla" has '
            "one"
        )

    return alone


def _in_one_launch(
    config: Any,
    stream: jax.Array,
    products: Sequence[Product],
    y: jax.Array | None,
    prefetch: Sequence[jax.Array],
    at_rest: bool,
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    from pallas_kernels.gemv import kernel_ring

    plan, outs = _plan(config, stream, products, at_rest=at_rest)
    ahead = {f"ahead{i}": array for i, array in enumerate(prefetch)}
    plan = dataclasses.replace(plan, ahead=tuple(ahead))
    inputs = {"stream": stream} | ({} if y is None else {"y": y}) | ahead
    for phase, product in zip(plan.phases, products, strict=True):
        inputs |= dict(zip(phase.weights, product.weights, strict=True))
        if phase.scale is not None and product.norm_scale is not None:
            inputs[phase.scale] = product.norm_scale
    launch = functools.partial(kernel_ring.chain, plan, tuple(outs))
    found = forward_only("gemv_chain", _unbatched(launch))(inputs)
    added = [p.results[0] for p in plan.phases if p.residual is not None]
    after = found[added[-1]] if added else stream
    return after, tuple(found[name] for name in plan.phases[-1].results)
