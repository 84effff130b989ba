"""Products of few rows in few launches: what a layer of decoding spends its time on."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
from jax.typing import DTypeLike

from jaxaccel.nn.implementation import Implementations, implementation_of
from jaxaccel.nn.linear import Linear
from jaxaccel.nn.norm import RMSNorm
from pallas_kernels.gemv import MAX_ROWS, Product, gemv, gemv_chain


def named(implementation: Implementations, op: str = "gemv") -> Any:
    """What an op was named to run in a setting of `nn.implementation`, or `None`.

    One name for all ops is none for this one: it would take products of f32 away from
    those that are decoded with them.
    """
    if isinstance(implementation, str):
        return None
    return implementation_of(op, implementation)


def applies(products: Any, x: Any) -> bool:
    """Whether the products with x [..., D] are those of few rows.

    Args:
      products: of `named`.
      x: of which at most `MAX_ROWS` rows are few.
    """
    return products is not None and math.prod(x.shape[:-1]) <= MAX_ROWS


class Stream:
    """A stream [..., D] some of whose products wait for others, to be one launch.

    A part that adds itself leaves its last products here, the next one's first join
    them: see `gemv_chain`. `settled` launches what waits.

    Args:
      x: the stream.
      chain: implementation of `gemv_chain`, of `named`.
    """

    def __init__(self, x: jax.Array, chain: Any):
        self._x, self._chain = x, chain
        self._y: jax.Array | None = None
        self._waiting: list[Product] = []
        self._ahead: list[jax.Array] = []

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the stream."""
        return self._x.shape

    @property
    def value(self) -> jax.Array:
        """The stream, with all that was added to it."""
        if self._waiting:
            self.launch()
        return self._x

    def add(self, product: Product, y: jax.Array | None = None) -> None:
        """Leaves a product to be launched.

        Args:
          product: the next one.
          y: [..., F] that it multiplies, where that is made by no product.
        """
        if y is not None:
            # What multiplies something of its own follows no other product.
            _ = self.value
            self._y = y.reshape(-1, y.shape[-1]).astype(product.weights[0].dtype)
        self._waiting.append(product)

    def foresee(self, parts: Sequence[Any]) -> None:
        """Says what the next launch has brought to L2, for the one behind it.

        Args:
          parts: a layer's mixer and feed-forward part, `None` for none. Their weights
            must be arrays of their own, no slices.
        """
        maps = [linear for part in parts for linear in getattr(part, "awaited", ())]
        self._ahead = [linear.kernel[...].astype(linear.dtype) for linear in maps]

    def launch(self, *more: Product) -> tuple[jax.Array, ...]:
        """Launches what waits and `more`; [..., F] of each result of the last one."""
        lead, wide = self._x.shape[:-1], self._x.shape[-1]
        stream, found = gemv_chain(
            self._x.reshape(-1, wide),
            [*self._waiting, *more],
            y=self._y,
            prefetch=self._ahead,
            implementation=self._chain,
        )
        self._x, self._y = stream.reshape(self._x.shape), None
        self._waiting, self._ahead = [], []
        return tuple(y.reshape(*lead, -1) for y in found)


def settled(x: jax.Array | Stream) -> jax.Array:
    """A stream's value; an array as it is."""
    return x.value if isinstance(x, Stream) else x


def adds_itself(part: Any, x: jax.Array | Stream, *, decodes: bool) -> bool:
    """Whether a mixer or feed-forward part takes the stream x [B, T, D] as it is.

    Such a part has `products`, of `named`, and a method `added`, which gets the norm in
    front of it and gives the stream after it. A call that does not decode may be
    differentiated, and `gemv` has no gradient.
    """
    return decodes and hasattr(part, "added") and applies(part.products, x)


def project(
    products: Any,
    x: jax.Array | Stream,
    linears: Sequence[Linear],
    *,
    norm: RMSNorm | None = None,
    swiglu: bool = False,
    residual: jax.Array | None = None,
    out_dtypes: Sequence[DTypeLike] | None = None,
) -> tuple[jax.Array, ...]:
    """Applies linear maps without biases to one x, see `pallas_kernels.gemv`.

    Args:
      products: of `named`.
      x: [..., D]; a `Stream` only with a norm.
      linears: the maps.
      norm: what comes before them.
      swiglu: whether they are gate and up projection of one result.
      residual: like the one result, added to it.
      out_dtypes: of the results, the maps' compute dtype by default.

    Returns:
      [..., F] of each map, or of both.
    """
    made = product(linears, norm, swiglu=swiglu, out_dtypes=out_dtypes)
    if isinstance(x, Stream):
        assert norm is not None
        return x.launch(made)
    lead = x.shape[:-1]
    if residual is not None:
        residual = residual.reshape(-1, residual.shape[-1])
    found = gemv(
        x.reshape(-1, x.shape[-1]).astype(linears[0].dtype),
        made.weights,
        norm_scale=made.norm_scale,
        zero_centered=made.zero_centered,
        eps=made.eps,
        swiglu=swiglu,
        residual=residual,
        out_dtype=made.out_dtypes,
        implementation=products,
    )
    found = found if isinstance(found, tuple) else (found,)
    return tuple(y.reshape(*lead, -1) for y in found)


def product(
    linears: Sequence[Linear],
    norm: RMSNorm | None = None,
    *,
    swiglu: bool = False,
    adds: bool = False,
    out_dtypes: Sequence[DTypeLike] | None = None,
) -> Product:
    """Linear maps without biases as a product of a chain; arguments as of `project`."""
    dtype = linears[0].dtype
    options: dict[str, Any] = {}
    if norm is not None:
        options = {
            "norm_scale": norm.scale[...],
            "zero_centered": norm.zero_centered,
            "eps": norm.eps,
        }
    results = 1 if swiglu else len(linears)
    return Product(
        weights=tuple(linear.kernel[...].astype(dtype) for linear in linears),
        swiglu=swiglu,
        adds=adds,
        out_dtypes=(dtype,) * results if out_dtypes is None else tuple(out_dtypes),
        **options,
    )


def output(
    products: Any,
    x: jax.Array | Stream,
    y: jax.Array,
    linear: Linear,
    norm: RMSNorm | None,
) -> Any:
    """The last map of a mixer's step.

    Args:
      products: of `named`.
      x: [..., D], what the mixer was given.
      y: [..., F], what it made of that.
      linear: the map.
      norm: that x is in front of, being the stream; `None` if x is behind it.

    Returns:
      [..., D], added to the stream where x is that; a `Stream` where x is one.
    """
    if isinstance(x, Stream):
        x.add(product((linear,), adds=True), y)
        return x
    if not applies(products, x):
        return linear(y)
    (y,) = project(products, y, (linear,), residual=None if norm is None else x)
    return y
