"""Sizes at which `sort_dispatch` is tested and measured, and its benchmark."""

from __future__ import annotations

import dataclasses
import functools
import types
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
      tokens, slots, experts, dim: T, k, E, D.
      unrouted: share of tokens that go nowhere.
    """

    name: str
    tag: str
    tokens: int
    slots: int
    experts: int
    dim: int
    dtype: str = "bfloat16"
    unrouted: float = 0.0

    def arguments(self, key: jax.Array) -> tuple[jax.Array, ...]:
        """expert_ids, x, weights, do."""
        keys = jax.random.split(key, 5)
        scores = jax.random.uniform(keys[0], (self.tokens, self.experts))
        _, ids = jax.lax.top_k(scores, self.slots)
        away = jax.random.uniform(keys[1], (self.tokens, 1)) < self.unrouted
        ids = jnp.where(away, self.experts, ids)
        shape = (self.tokens, self.dim)
        x, do = (jax.random.normal(keys[i], shape).astype(self.dtype) for i in (2, 3))
        weights = jax.random.uniform(keys[4], (self.tokens, self.slots))
        return ids.astype(jnp.int32), x, weights, do


SPECS = (
    *(
        Spec(
            name=f"ci_t{tokens}_e{experts}_k{slots}",
            tag="ci",
            tokens=tokens,
            slots=slots,
            experts=experts,
            dim=5,
            dtype="float32",
            unrouted=unrouted,
        )
        for tokens, experts, slots, unrouted in (
            (1, 1, 1, 0.0),
            (7, 3, 2, 0.3),
            (64, 8, 8, 0.0),
            (129, 64, 2, 0.2),
        )
    ),
    Spec(name="ci_bf16", tag="ci", tokens=33, slots=3, experts=8, dim=16, unrouted=0.2),
    Spec(name="qwen3_next", tag="model", tokens=1024, slots=10, experts=512, dim=2048),
    Spec(name="qwen3_next", tag="perf", tokens=8192, slots=10, experts=512, dim=2048),
    Spec(
        name="nemotron3_nano", tag="perf", tokens=8192, slots=6, experts=128, dim=2688
    ),
    Spec(
        name="nemotron3_super", tag="perf", tokens=8192, slots=22, experts=512, dim=1024
    ),
    Spec(name="gpt_oss_20b", tag="perf", tokens=8192, slots=4, experts=32, dim=2880),
)


def specs(tag: str) -> Iterator[Spec]:
    """The specs with a tag."""
    return (spec for spec in SPECS if spec.tag == tag)


def run(spec: Spec, module: Any, backward: bool) -> Callable[..., Any]:
    """Plan, permute and combine of `module` as a function of `spec.arguments`.

    Args:
      spec: the sizes.
      module: has `sort_dispatch`, `permute` and `combine`.
      backward: whether to return (o, dx, dweights) or (o,).

    Returns:
      The function.
    """

    def forward(x, weights, ids):
        plan = module.sort_dispatch(ids, spec.experts)
        return module.combine(module.permute(x, plan), plan, weights)

    def only_forward(ids, x, weights, do):
        del do
        return (forward(x, weights, ids),)

    def both(ids, x, weights, do):
        o, pull = jax.vjp(lambda x, weights: forward(x, weights, ids), x, weights)
        return (o, *pull(do))

    return both if backward else only_forward


def minimal_bytes(spec: Spec, backward: bool) -> int:
    """Bytes that must cross device memory: x and o once, the sorted rows twice."""
    item = jnp.dtype(spec.dtype).itemsize
    row = spec.tokens * spec.dim * item
    return row * (2 + 2 * spec.slots) * (2 if backward else 1)


def bench_cases(tag: str) -> Iterator[Case]:
    """What `python -m pallas_kernels.bench sort_dispatch` measures."""
    for spec in specs(tag):
        for backward in (False, True):
            yield _case(spec, backward)


def _case(spec: Spec, backward: bool) -> Case:
    # Imported here: the tests read this file for its sizes alone.
    from pallas_kernels._common.bench import Case
    from pallas_kernels.sort_dispatch import api

    def implementation(name: Any) -> Callable[..., Any]:
        named = types.SimpleNamespace(
            **{
                function: functools.partial(getattr(api, function), implementation=name)
                for function in ("sort_dispatch", "permute", "combine")
            }
        )
        return run(spec, named, backward)

    size = f"T{spec.tokens} k{spec.slots} E{spec.experts} D{spec.dim}"
    return Case(
        workload=f"{spec.name} {size} {'fwd+bwd' if backward else 'fwd'}",
        dtype=spec.dtype,
        arguments=spec.arguments,
        implementation=implementation,
        reference=implementation("reference"),
        picked=lambda: str(api.choose().implementation),
        bytes=minimal_bytes(spec, backward),
        flops=0,
        peers={"argsort": lambda: (implementation("reference"), jax.__version__)},
    )
