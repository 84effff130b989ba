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
      biased: whether the choice of experts has a bias.
      groups: (G, groups that are kept, experts that are summed to a group's score).
    """

    name: str
    tag: str
    tokens: int
    slots: int
    experts: int
    dim: int
    dtype: str = "bfloat16"
    unrouted: float = 0.0
    biased: bool = False
    groups: tuple[int, int, int] = (1, 1, 2)

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

    def scores(self, key: jax.Array) -> tuple[jax.Array, ...]:
        """Sigmoids of normal numbers f32[T, E], and with `biased` the bias f32[E]."""
        keys = jax.random.split(key)
        shape = (self.tokens, self.experts)
        scores = jax.nn.sigmoid(jax.random.normal(keys[0], shape))
        if not self.biased:
            return (scores,)
        return scores, 0.1 * jax.random.normal(keys[1], (self.experts,))


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
    Spec(
        name="ci_odd_row",
        tag="ci",
        tokens=19,
        slots=2,
        experts=4,
        dim=6,
        dtype="float16",
        unrouted=0.2,
    ),
    Spec(name="qwen3_next", tag="model", tokens=1024, slots=10, experts=512, dim=2048),
    Spec(
        name="nemotron3_super",
        tag="model",
        tokens=1023,
        slots=22,
        experts=512,
        dim=1024,
        unrouted=0.1,
        biased=True,
    ),
    Spec(
        name="deepseek_v3",
        tag="model",
        tokens=1024,
        slots=8,
        experts=256,
        dim=7168,
        biased=True,
        groups=(8, 4, 2),
    ),
    Spec(name="qwen3_next", tag="perf", tokens=8192, slots=10, experts=512, dim=2048),
    Spec(
        name="nemotron3_nano",
        tag="perf",
        tokens=8192,
        slots=6,
        experts=128,
        dim=2688,
        biased=True,
    ),
    Spec(
        name="nemotron3_super",
        tag="perf",
        tokens=8192,
        slots=22,
        experts=512,
        dim=1024,
        biased=True,
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Part:
    """One step of the way to the experts and back, measured alone.

    Attributes:
      name: of the step.
      functions: of `api` that it calls.
      arguments: (spec, key) -> its arguments.
      run: (spec, module, *arguments) -> its results; `module` has `functions`.
      bytes: spec -> the least that must cross device memory.
      has_kernel: whether "mosaic" is another program than "xla".
      exact: whether nothing is rounded.
    """

    name: str
    functions: tuple[str, ...]
    arguments: Callable[[Spec, jax.Array], tuple[Any, ...]]
    run: Callable[..., Any]
    bytes: Callable[[Spec], int]
    has_kernel: bool = True
    exact: bool = False


def top_experts(spec: Spec, module: Any, scores: jax.Array, bias: Any = None) -> Any:
    """i32[T, k] of `module`."""
    names = ("num_groups", "top_groups", "group_score_top")
    groups = dict(zip(names, spec.groups, strict=True))
    return module.top_experts(scores, spec.slots, bias=bias, **groups)


def _ids(spec: Spec, key: jax.Array) -> tuple[jax.Array, ...]:
    return (spec.arguments(key)[0],)


def _planned(*which: str) -> Callable[[Spec, jax.Array], tuple[Any, ...]]:
    """Arrays of the plan, then "x", "do" [T, D], "rows" [M, D], "weights" f32[T, k]."""

    def make(spec: Spec, key: jax.Array) -> tuple[Any, ...]:
        from pallas_kernels.sort_dispatch import xla

        ids, x, weights, do = spec.arguments(key)
        plan = xla.sort_dispatch(ids, spec.experts)
        shape = (spec.tokens * spec.slots, spec.dim)
        rows = jax.random.normal(jax.random.fold_in(key, 1), shape).astype(spec.dtype)
        arrays = {"x": x, "do": do, "rows": rows, "weights": weights}
        parts = plan.token, plan.row, plan.group_sizes
        return *parts, *(arrays[name] for name in which)

    return make


def _with_plan(run: Callable[..., Any]) -> Callable[..., Any]:
    """(module, plan, *arrays) -> results, as `Part.run`."""

    def call(spec, module, token, row, group_sizes, *arrays):
        from pallas_kernels.sort_dispatch.plan import DispatchPlan

        del spec
        plan = DispatchPlan(token=token, row=row, group_sizes=group_sizes)
        return run(module, plan, *arrays)

    return call


def _scores_back(spec: Spec, key: jax.Array) -> tuple[Any, ...]:
    ids, _, weights, _ = spec.arguments(key)
    return spec.scores(key)[0], jnp.minimum(ids, spec.experts - 1), weights


def _row_bytes(spec: Spec, tokens: int, rows: int, numbers: int) -> int:
    """Bytes of so many [T, D], [M, D] and [M] of 32 bits."""
    item = jnp.dtype(spec.dtype).itemsize
    width = spec.dim * item
    each = rows * width + 4 * numbers
    return spec.tokens * (tokens * width + spec.slots * each)


def _pull(function: Callable[..., Any], primals: tuple[Any, ...], dy: Any) -> Any:
    return jax.vjp(function, *primals)[1](dy)


PARTS = (
    Part(
        name="top-k fwd",
        functions=("top_experts",),
        arguments=lambda spec, key: spec.scores(key),
        run=top_experts,
        bytes=lambda spec: 4 * spec.tokens * (spec.experts + spec.slots),
        exact=True,
    ),
    Part(
        name="top-k bwd",
        functions=("chosen_scores",),
        arguments=_scores_back,
        run=lambda spec, module, scores, ids, dy: _pull(
            lambda scores: module.chosen_scores(scores, ids), (scores,), dy
        ),
        bytes=lambda spec: 4 * spec.tokens * (spec.experts + 2 * spec.slots),
        has_kernel=False,
    ),
    Part(
        name="plan",
        functions=("sort_dispatch",),
        arguments=_ids,
        run=lambda spec, module, ids: module.sort_dispatch(ids, spec.experts),
        bytes=lambda spec: _row_bytes(spec, 0, 0, 3),
        has_kernel=False,
        exact=True,
    ),
    Part(
        name="permute fwd",
        functions=("permute",),
        arguments=_planned("x"),
        run=_with_plan(lambda module, plan, x: module.permute(x, plan)),
        bytes=lambda spec: _row_bytes(spec, 1, 1, 1),
        exact=True,
    ),
    Part(
        name="permute bwd",
        functions=("permute",),
        arguments=_planned("x", "rows"),
        run=_with_plan(
            lambda module, plan, x, dy: _pull(
                lambda x: module.permute(x, plan), (x,), dy
            )
        ),
        bytes=lambda spec: _row_bytes(spec, 1, 1, 1),
    ),
    Part(
        name="combine fwd",
        functions=("combine",),
        arguments=_planned("rows", "weights"),
        run=_with_plan(
            lambda module, plan, y, weights: module.combine(y, plan, weights)
        ),
        bytes=lambda spec: _row_bytes(spec, 1, 1, 2),
    ),
    Part(
        name="combine bwd",
        functions=("combine",),
        arguments=_planned("rows", "weights", "do"),
        run=_with_plan(
            lambda module, plan, y, weights, do: _pull(
                lambda y, weights: module.combine(y, plan, weights), (y, weights), do
            )
        ),
        bytes=lambda spec: _row_bytes(spec, 1, 2, 3),
    ),
    Part(
        name="spread",
        functions=("spread",),
        arguments=_planned("x", "weights"),
        run=_with_plan(
            lambda module, plan, x, weights: module.spread(x, plan, weights)
        ),
        bytes=lambda spec: _row_bytes(spec, 1, 1, 2),
    ),
)
"""`spread` is what the experts' written-out backward calls for `combine bwd`."""


def module_of(name: Any) -> Any:
    """The functions of `api` with their implementation named."""
    from pallas_kernels.sort_dispatch import api

    named = {
        function: functools.partial(getattr(api, function), implementation=name)
        for function in api.FUNCTIONS
    }
    return types.SimpleNamespace(**named, chosen_scores=api.chosen_scores)


def bench_cases(tag: str) -> Iterator[Case]:
    """What `python -m pallas_kernels.bench sort_dispatch` measures."""
    for spec in specs(tag):
        for part in PARTS:
            yield _part_case(spec, part)
        for backward in (False, True):
            yield _case(spec, backward)


def _workload(spec: Spec, what: str) -> str:
    size = f"T{spec.tokens} k{spec.slots} E{spec.experts} D{spec.dim}"
    return f"{spec.name} {size} {what}"


def _part_case(spec: Spec, part: Part) -> Case:
    # Imported here: the tests read this file for its sizes alone.
    from pallas_kernels._common.bench import Case
    from pallas_kernels._common.dispatch import UnknownImplementation

    def implementation(name: Any) -> Callable[..., Any]:
        if name == "mosaic" and not part.has_kernel:
            raise UnknownImplementation(f"{part.name} has no kernel")
        return functools.partial(part.run, spec, module_of(name))

    def by_autodiff(scores, ids, dy):
        def chosen(scores):
            return jnp.take_along_axis(scores, ids, axis=1)

        return _pull(chosen, (scores,), dy)

    def rival() -> tuple[Callable[..., Any], str]:
        if part.name == "top-k bwd":
            return by_autodiff, jax.__version__
        return implementation("reference"), jax.__version__

    reference = implementation("reference")
    if part.name == "top-k bwd":
        reference = by_autodiff
    return Case(
        workload=_workload(spec, part.name),
        dtype="float32" if part.name.startswith("top-k") else spec.dtype,
        arguments=jax.jit(functools.partial(part.arguments, spec)),
        implementation=implementation,
        reference=reference,
        picked=lambda: "xla",
        bytes=part.bytes(spec),
        flops=0,
        peers={
            "xla": lambda: (implementation("xla"), jax.__version__),
            "argsort": rival,
        },
        rel=0.0 if part.exact else None,
    )


def _case(spec: Spec, backward: bool) -> Case:
    from pallas_kernels._common.bench import Case

    def implementation(name: Any) -> Callable[..., Any]:
        return run(spec, module_of(name), backward)

    return Case(
        workload=_workload(spec, "fwd+bwd" if backward else "fwd"),
        dtype=spec.dtype,
        arguments=spec.arguments,
        implementation=implementation,
        reference=implementation("reference"),
        picked=lambda: "xla",
        bytes=minimal_bytes(spec, backward),
        flops=0,
        peers={
            "xla": lambda: (implementation("xla"), jax.__version__),
            "argsort": lambda: (implementation("reference"), jax.__version__),
        },
    )
