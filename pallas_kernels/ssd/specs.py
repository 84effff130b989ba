"""Sizes at which `ssd` is tested and measured, and its benchmark."""

from __future__ import annotations

import dataclasses
import functools
import importlib.metadata
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.gated_delta_rule.specs import _Fla as PeerOfRule
from pallas_kernels.ssd.config_mosaic import Config


if TYPE_CHECKING:
    from pallas_kernels._common.bench import Case


@dataclasses.dataclass(frozen=True, kw_only=True)
class Spec:
    """One use of the op.

    Attributes:
      name: where it comes from.
      tag: "ci" (CPU), "model" (tests on the card), "perf" (measured) or "long"
        (measured if asked for).
      batch, time, heads, groups, head_dim, state: B, T, H, G, V, N.
      documents: documents per row, of lengths that don't divide into chunks.
      chunk: tokens per chunk.
    """

    name: str
    tag: str
    batch: int
    time: int
    heads: int
    groups: int
    head_dim: int = 64
    state: int = 128
    dtype: str = "bfloat16"
    documents: int = 1
    chunk: int = 128

    def arguments(self, key: jax.Array) -> tuple[jax.Array, ...]:
        """x, dt, a, b, c, d, dt_bias, is_first, initial_state, dy, d_state."""
        keys = jax.random.split(key, 10)
        heads = (self.batch, self.time, self.heads)
        groups = (self.batch, self.time, self.groups, self.state)
        x, dy = (
            jax.random.normal(keys[i], (*heads, self.head_dim)).astype(self.dtype)
            for i in (0, 1)
        )
        dt = jax.random.normal(keys[2], heads)
        b, c = (
            (jax.random.normal(keys[i], groups) * self.state**-0.5).astype(self.dtype)
            for i in (3, 4)
        )
        # As a layer starts: rates from 1 to 16, steps from 0.001 to 0.1.
        a = -jax.random.uniform(keys[5], (self.heads,), jnp.float32, 1.0, 16.0)
        d = jax.random.normal(keys[6], (self.heads,))
        steps = jnp.exp(
            jax.random.uniform(keys[7], (self.heads,), minval=-7, maxval=-2)
        )
        dt_bias = jnp.log(jnp.expm1(steps))
        border = self.time // self.documents + 1
        is_first = jnp.arange(self.time) % border == border - 1
        is_first = jnp.broadcast_to(is_first[None], heads[:2])
        shape = (self.batch, self.heads, self.head_dim, self.state)
        state, d_state = (jax.random.normal(keys[i], shape) for i in (8, 9))
        return x, dt, a, b, c, d, dt_bias, is_first, state, dy, d_state


# Heads, groups, head dim and state of the published models.
_NANO: dict[str, Any] = {"heads": 64, "groups": 8}
_SUPER: dict[str, Any] = {"heads": 128, "groups": 8}

SPECS = (
    # Four chunks and a token.
    Spec(
        name="ci_t65_rep2",
        tag="ci",
        batch=2,
        time=65,
        heads=4,
        groups=2,
        head_dim=8,
        state=16,
        dtype="float32",
        documents=3,
        chunk=16,
    ),
    Spec(
        name="ci_bf16",
        tag="ci",
        batch=1,
        time=64,
        heads=4,
        groups=1,
        head_dim=16,
        state=32,
        documents=2,
        chunk=32,
    ),
    Spec(name="nemotron3_nano", tag="model", batch=2, time=1024, **_NANO),
    Spec(
        name="nemotron3_nano_packed",
        tag="model",
        batch=1,
        time=2048,
        documents=5,
        **_NANO,
    ),
    *(
        Spec(name=name, tag=tag, batch=batch, time=time, documents=documents, **sizes)
        for name, tag, batch, time, documents, sizes in (
            ("nemotron3_nano", "perf", 1, 8192, 1, _NANO),
            ("nemotron3_nano", "perf", 4, 8192, 1, _NANO),
            ("nemotron3_nano_packed", "perf", 1, 8192, 5, _NANO),
            ("nemotron3_super", "perf", 1, 8192, 1, _SUPER),
            ("nemotron3_nano", "long", 1, 32768, 1, _NANO),
        )
    ),
)


def specs(tag: str) -> Iterator[Spec]:
    """The specs with a tag."""
    return (spec for spec in SPECS if spec.tag == tag)


def run(spec: Spec, op: Callable[..., Any], backward: bool) -> Callable[..., Any]:
    """`op` as a function of `spec.arguments`: (y, state), or those and gradients."""

    def forward(x, dt, a, b, c, d, dt_bias, state, is_first):
        return op(
            *(x, dt, a, b, c),
            d=d,
            dt_bias=dt_bias,
            is_first=is_first,
            initial_state=state,
            chunk_size=spec.chunk,
        )

    def only_forward(x, dt, a, b, c, d, dt_bias, is_first, state, dy, d_state):
        del dy, d_state
        return forward(x, dt, a, b, c, d, dt_bias, state, is_first)

    def both(x, dt, a, b, c, d, dt_bias, is_first, state, dy, d_state):
        op = functools.partial(forward, is_first=is_first)
        results, pull = jax.vjp(op, x, dt, a, b, c, d, dt_bias, state)
        return (*results, *pull((dy, d_state)))

    return both if backward else only_forward


def minimal_bytes(spec: Spec, backward: bool) -> int:
    """Bytes that must cross device memory: each tensor once each way."""
    tokens = spec.batch * spec.time
    item = jnp.dtype(spec.dtype).itemsize
    bc = 2 * spec.groups * spec.state * item
    value = spec.heads * spec.head_dim * item
    steps = spec.heads * 4
    state = spec.batch * spec.heads * spec.head_dim * spec.state * 4
    total = tokens * (bc + 2 * value + steps) + 2 * state
    if backward:
        # The inputs and dy again, the gradients of the inputs out.
        total += tokens * (2 * (bc + value + steps) + value) + 3 * state
    return total


def minimal_flops(spec: Spec, backward: bool) -> int:
    """Operations of the chunked form's products (README.md)."""
    size, value, state = spec.chunk, spec.head_dim, spec.state
    per_head = 2 * (size * size * value + 2 * size * value * state)
    per_group = 2 * size * size * state
    per_chunk = spec.heads * per_head + spec.groups * per_group
    chunks = spec.batch * -(-spec.time // size)
    # Each product has two in its gradient.
    return chunks * per_chunk * (3 if backward else 1)


# Launch parameters that no heuristic picks yet, measured with --peers NAME,...
VARIANTS: dict[str, Config] = {
    **{f"segments{count}": Config(segments=count) for count in (1, 2, 4, 8)},
    "stages2": Config(stages=2),
}


def bench_cases(tag: str) -> Iterator[Case]:
    """What `python -m pallas_kernels.bench ssd` measures."""
    for spec in specs(tag):
        for backward in (False, True):
            yield _case(spec, backward)


def _case(spec: Spec, backward: bool) -> Case:
    # Imported here: the tests read this file for its sizes alone.
    from pallas_kernels._common.bench import Case
    from pallas_kernels.ssd import api

    def implementation(name: Any, config: Config | None = None) -> Callable[..., Any]:
        op = functools.partial(api.ssd, implementation=name, config=config)
        return run(spec, op, backward)

    def variant(config: Config) -> tuple[Callable[..., Any], str]:
        return implementation("mosaic", config), jax.__version__

    def picked() -> str:
        arguments = jax.eval_shape(spec.arguments, jax.random.key(0))
        choice = api.choose(*arguments[:5], chunk_size=spec.chunk)
        return str(choice.config or choice.implementation)

    # The recurrence would keep the state of every token for its gradient. The chunked
    # form in f32, tested against it, stands in for it.
    exact = "reference" if spec.tag in ("ci", "model") else "xla"
    size = f"{spec.batch}x{spec.time}"
    if spec.documents > 1:
        size += f" in {spec.documents}"
    heads = f"H{spec.heads} G{spec.groups} V{spec.head_dim} N{spec.state}"
    return Case(
        workload=f"{spec.name} {size} {heads} {'fwd+bwd' if backward else 'fwd'}",
        dtype=spec.dtype,
        arguments=spec.arguments,
        implementation=implementation,
        reference=implementation(exact),
        picked=picked,
        bytes=minimal_bytes(spec, backward),
        flops=minimal_flops(spec, backward),
        peers={
            "xla": lambda: (implementation("xla"), jax.__version__),
            "fla": lambda: _fla(spec, backward),
            **{x: functools.partial(variant, y) for x, y in VARIANTS.items()},
        },
        # As for the gated delta rule, whose chunked form this is without the delta.
        rel=2e-2 if backward else 5e-3,
    )


def _fla(spec: Spec, backward: bool) -> tuple[_Fla, str]:
    if spec.documents > 1:
        raise NotImplementedError("this peer is measured with one document a row")
    names = ("fla-core", "torch", "triton")
    version = ", ".join(f"{x} {importlib.metadata.version(x)}" for x in names)
    return _Fla(spec, backward), version


class _Fla(PeerOfRule):
    """flash-linear-attention's `simple_gla`, which is the recurrence without the skip.

    It is given step sizes, their products with x and with a, and b and c of each head,
    which are not measured.

    Args:
      spec: the sizes.
      backward: whether to compute gradients as well.

    Raises:
      ImportError: it, PyTorch or a GPU that PyTorch sees is missing.
    """

    def __init__(self, spec: Spec, backward: bool):
        super().__init__(backward)
        from fla.ops.simple_gla import (  # pyrefly: ignore[missing-import]
            chunk_simple_gla,
        )

        self._op = chunk_simple_gla
        self._group = spec.heads // spec.groups
        self.note = "without softplus, s x, s a and the skip"
        if backward:
            self.note += "; its gradients are those of these, not checked"

    def _call(self, args: tuple[jax.Array, ...]) -> Callable[[], tuple[Any, ...]]:
        from pallas_kernels.ssd.reference import step_sizes

        torch = self._torch
        x, dt, a, b, c, _, dt_bias, _, state, dy, d_state = args
        steps = step_sizes(dt, dt_bias)
        written = (steps[..., None] * x.astype(jnp.float32)).astype(x.dtype)
        b, c = (jnp.repeat(m, self._group, axis=2) for m in (b, c))
        decay = steps * a[None, None, :]
        inputs = [self._tensor(m) for m in (c, b, written, decay)]
        # Its states are [N, V].
        initial, d_last = (
            self._tensor(m).transpose(-1, -2).contiguous() for m in (state, d_state)
        )
        inputs.append(initial)
        cotangents = [self._tensor(dy), d_last]
        for tensor in inputs:
            tensor.requires_grad_(self._backward)

        def call():
            results = self._op(
                *inputs[:4],
                scale=1.0,
                initial_state=inputs[4],
                output_final_state=True,
            )
            if self._backward:
                return *results, *torch.autograd.grad(results, inputs, cotangents)
            return results

        return call

    def results(self, args: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        """y and the final state."""
        y, last, *_ = self._call(args)()
        y, last = (
            jnp.asarray(np.array(m.detach().float().cpu().numpy()))
            for m in (y, last.transpose(-1, -2))
        )
        return y + args[5][None, None, :, None] * args[0].astype(jnp.float32), last
