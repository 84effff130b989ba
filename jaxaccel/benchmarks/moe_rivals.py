"""Ways to send tokens through experts, as functions of the same arguments.

Each maps (h, weights, ids, *experts) to the tokens' weighted sums, nothing dropped, of
the fields of `ExpertWeights` that there are:

- "loop": expert by expert over all tokens, the others' weight set to 0. Work grows
  with the number of experts.
- "one_hot": a table [tokens, experts, places] says who sits where, and two einsums with
  it move the tokens (Lepikhin et al., GShard, arXiv 2006.16668). Memory grows with it.
- "sort": this project's, one sort and grouped products.
- "visits": of a handful of tokens, forward only: each reads the experts it visits.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxaccel.nn.experts import (
    ExpertOps,
    ExpertWeights,
    routed_experts,
    visited_experts,
)
from jaxaccel.nn.mlp import clamped_swiglu, relu2, swiglu
from pallas_kernels._common.bench import assert_close_on_device
from pallas_kernels.gemv import MAX_ROWS
from pallas_kernels.sort_dispatch import sort_dispatch


RESULTS = ("y", "dh", "dweights", "dw_in", "dw_out", "dbias_in", "dbias_out")
TOLERANCES = {"float32": 1e-5, "float16": 1e-3, "bfloat16": 4e-3}
"""Largest relative error of a result by the dtype of the computation."""
RIVAL_SLACK = 1.5
"""Times that of the rivals, which round weights or sums that "sort" keeps in f32."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes:
    """One workload.

    Attributes:
      tokens, slots, experts, width, d_ff: T, k, E, D, F.
      activation: "swiglu" or "relu2".
      swiglu_limit, use_bias: see `MoEConfig`.
      dtype: of tokens and experts.
    """

    tokens: int
    slots: int
    experts: int
    width: int
    d_ff: int
    activation: str = "swiglu"
    swiglu_limit: float | None = None
    use_bias: bool = False
    dtype: str = "bfloat16"

    @property
    def workload(self) -> str:
        """The name of a row."""
        return (
            f"E{self.experts} k{self.slots} T{self.tokens} D{self.width} F{self.d_ff} "
            f"{self.activation}"
        )

    @property
    def flops(self) -> int:
        """Of the routed products, forward."""
        matrices = 3 if self.activation == "swiglu" else 2
        return 2 * self.tokens * self.slots * matrices * self.width * self.d_ff

    def arguments(self, seed: int = 0) -> tuple[jax.Array, ...]:
        """h, weights, ids, the experts and a cotangent; drawn on the device."""

        @jax.jit
        def draw(key):
            keys = jax.random.split(key, 7)
            shape = (self.tokens, self.width)
            scores = jax.random.uniform(keys[0], (self.tokens, self.experts))
            _, ids = jax.lax.top_k(scores, self.slots)
            weights = jax.random.uniform(keys[1], (self.tokens, self.slots))
            twice = 2 if self.activation == "swiglu" else 1
            shapes = (
                (self.experts, self.width, twice * self.d_ff),
                (self.experts, self.d_ff, self.width),
            )
            w_in, w_out = (
                jax.random.normal(k, s, self.dtype) * s[1] ** -0.5
                for k, s in zip(keys[2:4], shapes, strict=True)
            )
            h, dy = (jax.random.normal(k, shape, self.dtype) for k in keys[4:6])
            biases = self._biases(keys[6]) if self.use_bias else ()
            return h, weights, ids.astype(jnp.int32), w_in, w_out, *biases, dy

        return draw(jax.random.key(seed))

    def _biases(self, key: jax.Array) -> tuple[jax.Array, jax.Array]:
        """[E, F] or [E, 2F] and [E, D]."""
        keys = jax.random.split(key)
        twice = 2 if self.activation == "swiglu" else 1
        shapes = (self.experts, twice * self.d_ff), (self.experts, self.width)
        first, second = (
            jax.random.normal(k, s, self.dtype)
            for k, s in zip(keys, shapes, strict=True)
        )
        if self.swiglu_limit is not None:
            # So far beyond the limit that no rounding decides who is clamped: some
            # gates, and some other columns' ups.
            column = jnp.arange(2 * self.d_ff)
            which = (column % self.d_ff) % 8 == jnp.where(column < self.d_ff, 0, 4)
            beyond = jnp.asarray(self.swiglu_limit + 8, first.dtype)
            first = jnp.where(which[None, :], beyond, first)
        return first, second

    def activate(self, z: jax.Array) -> jax.Array:
        """[..., F] from the first product."""
        if self.activation != "swiglu":
            return relu2(z)
        gate, up = jnp.split(z, 2, axis=-1)
        if self.swiglu_limit is None:
            return swiglu(gate, up)
        return clamped_swiglu(gate, up, self.swiglu_limit)


def _plus(y: jax.Array, bias: jax.Array | None) -> jax.Array:
    """y of [..., N] and, where there is one, a bias that broadcasts to it."""
    return y if bias is None else y + bias.astype(y.dtype)


Rival = Callable[..., jax.Array]


def loop(sizes: Sizes, *, checkpoint: bool = False) -> Rival:
    """See the module; `checkpoint` keeps nothing of an expert for the backward."""

    def run(h, weights, ids, *experts):
        def expert(total, own):
            index, (w_in, w_out, bias_in, bias_out) = own
            mine = jnp.sum(jnp.where(ids == index, weights, 0.0), axis=1)  # [T]
            precision = _precision(h.dtype)
            z = jnp.matmul(h, w_in.astype(h.dtype), precision=precision)
            z = _plus(z, None if bias_in is None else bias_in[None, :])
            y = jnp.matmul(
                sizes.activate(z), w_out.astype(h.dtype), precision=precision
            )
            y = _plus(y, None if bias_out is None else bias_out[None, :])
            return total + mine[:, None] * y.astype(jnp.float32), None

        body = jax.checkpoint(expert) if checkpoint else expert
        indices = jnp.arange(sizes.experts, dtype=jnp.int32)
        total = jnp.zeros(h.shape, jnp.float32)
        total, _ = jax.lax.scan(body, total, (indices, ExpertWeights(*experts)))
        return total.astype(h.dtype)

    return run


def _precision(dtype: Any) -> jax.lax.Precision:
    # Without HIGHEST a GPU multiplies f32 operands as tf32.
    is_f32 = dtype == jnp.float32
    return jax.lax.Precision.HIGHEST if is_f32 else jax.lax.Precision.DEFAULT


def one_hot(sizes: Sizes, capacity: int) -> Rival:
    """See the module; each expert has `capacity` places."""

    def run(h, weights, ids, *experts):
        w_in, w_out, bias_in, bias_out = ExpertWeights(*experts)
        chosen = ids[:, :, None] == jnp.arange(sizes.experts)[None, None, :]
        flat = chosen.reshape(-1, sizes.experts).astype(jnp.int32)  # [T k, E]
        before = (jnp.cumsum(flat, axis=0) - flat).reshape(chosen.shape)
        place = jnp.sum(jnp.where(chosen, before, 0), axis=2)  # [T, k]
        sits = place[:, :, None] == jnp.arange(capacity)[None, None, :]  # [T, k, C]
        expert, sits = chosen.astype(h.dtype), sits.astype(h.dtype)
        table = jnp.einsum("tke,tkc->tec", expert, sits)
        weighted = jnp.einsum("tke,tkc,tk->tec", expert, sits, weights.astype(h.dtype))
        rows = jnp.einsum("tec,td->ecd", table, h)
        z = jnp.einsum("ecd,edf->ecf", rows, w_in)
        z = _plus(z, None if bias_in is None else bias_in[:, None])
        y = jnp.einsum("ecf,efd->ecd", sizes.activate(z), w_out)
        y = _plus(y, None if bias_out is None else bias_out[:, None])
        return jnp.einsum("tec,ecd->td", weighted, y)

    return run


def sort(sizes: Sizes, implementation: Any, dispatch: Any = None) -> Rival:
    """See the module; implementations of `grouped_matmul` and `sort_dispatch`."""
    ops = ExpertOps(
        activation=sizes.activation,
        dtype=jnp.dtype(sizes.dtype),
        swiglu_limit=sizes.swiglu_limit,
        matmul=implementation,
        dispatch=dispatch,
    )

    def run(h, weights, ids, *experts):
        plan = sort_dispatch(ids, sizes.experts, implementation=dispatch)
        return routed_experts(ops, h, weights, plan, ExpertWeights(*experts))

    return run


def has_visits(sizes: Sizes) -> bool:
    """Whether `visits` can run a workload, without gradients."""
    is_plain = not sizes.use_bias and sizes.swiglu_limit is None
    return is_plain and sizes.tokens <= MAX_ROWS


def visits(sizes: Sizes, implementation: Any) -> Rival:
    """See the module; an implementation of `expert_gemv`."""
    options = {"activation": sizes.activation, "implementation": implementation}
    return functools.partial(visited_experts, **options)


def capacity_of(sizes: Sizes, ids: jax.Array) -> int:
    """Places that the fullest expert needs, rounded up to 8."""
    fullest = np.bincount(np.asarray(ids).reshape(-1), minlength=sizes.experts).max()
    return -(-int(fullest) // 8) * 8


def with_gradients(rival: Rival) -> Callable[..., tuple[jax.Array, ...]]:
    """(h, weights, ids, *experts, dy) -> the `RESULTS`, of biases if there are."""

    def run(h, weights, ids, *rest):
        *experts, dy = rest
        y, pull = jax.vjp(
            lambda h, weights, *experts: rival(h, weights, ids, *experts),
            *(h, weights, *experts),
        )
        return y, *pull(dy)

    return run


def only_forward(rival: Rival) -> Callable[..., tuple[jax.Array, ...]]:
    """(h, weights, ids, *experts, dy) -> (y,)."""

    def run(h, weights, ids, *rest):
        return (rival(h, weights, ids, *rest[:-1]),)

    return run


def expected(sizes: Sizes, args: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    """The `RESULTS` of the loop in f32; gradients of parameters in their dtype."""
    h, weights, ids, *experts, dy = args
    run = jax.jit(with_gradients(loop(sizes, checkpoint=True)))
    f32 = jnp.float32
    return run(h.astype(f32), weights, ids, *experts, dy.astype(f32))


def wrong(
    got: tuple[jax.Array, ...], want: tuple[jax.Array, ...], *, slack: float = 1.0
) -> str | None:
    """What is wrong with results, `None` if nothing is; as many as there are.

    Each is held to `slack` times the `TOLERANCES` of y's dtype. Gradients of experts
    are compared expert by expert, too, y and dh token by token.
    """
    rel = slack * TOLERANCES[str(got[0].dtype)]
    try:
        for name, a, b in zip(RESULTS, got, want, strict=False):
            # A token's few numbers may be small beside the terms that were rounded.
            whole = name == "dweights"
            assert_close_on_device(a, b, rel=rel, name=name, whole=whole)
    except AssertionError as error:
        return str(error)
    return None
