"""Sizes at which `causal_conv1d` is tested and measured, and its benchmark."""

from __future__ import annotations

import dataclasses
import functools
import importlib.metadata
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels._common import timing, torch_peer


if TYPE_CHECKING:
    from pallas_kernels._common.bench import Case


@dataclasses.dataclass(frozen=True, kw_only=True)
class Spec:
    """One use of the op.

    Attributes:
      name: where it comes from.
      tag: "ci" (CPU), "model" (tests on the card) or "perf" (measured).
      batch, time, dim, width: B, T, D, W.
      documents: documents per row; 0 gives the op no borders at all.
      bias: whether there is one.
    """

    name: str
    tag: str
    batch: int
    time: int
    dim: int
    width: int = 4
    dtype: str = "bfloat16"
    documents: int = 1
    bias: bool = False

    def arguments(self, key: jax.Array) -> tuple[jax.Array, ...]:
        """x, weight, bias, is_first, initial_state, dy, d_state."""
        keys = jax.random.split(key, 6)
        shape = (self.batch, self.time, self.dim)
        kept = (self.batch, self.width - 1, self.dim)
        x, dy = (jax.random.normal(keys[i], shape).astype(self.dtype) for i in (0, 1))
        state, d_state = (
            jax.random.normal(keys[i], kept).astype(self.dtype) for i in (2, 3)
        )
        weight = jax.random.normal(keys[4], (self.width, self.dim)) / self.width**0.5
        bias = jax.random.normal(keys[5], (self.dim,))
        border = self.time // max(1, self.documents) + 1
        is_first = jnp.arange(self.time) % border == border - 1
        is_first = jnp.broadcast_to(is_first[None], shape[:2])
        dtype = self.dtype
        return x, weight.astype(dtype), bias.astype(dtype), is_first, state, dy, d_state


SPECS = (
    Spec(name="ci_one", tag="ci", batch=2, time=1, dim=8, dtype="float32"),
    Spec(
        name="ci_packed",
        tag="ci",
        batch=2,
        time=17,
        dim=5,
        dtype="float32",
        documents=4,
        bias=True,
    ),
    Spec(name="ci_bf16", tag="ci", batch=2, time=33, dim=16, documents=2),
    Spec(name="ci_whole", tag="ci", batch=1, time=9, dim=8, width=3, documents=0),
    # Qwen3-Next-80B-A3B: q, k, v of a layer are 8192 channels.
    Spec(name="qwen3_next", tag="model", batch=2, time=1024, dim=8192, documents=3),
    Spec(
        name="nemotron3_mamba",
        tag="model",
        batch=1,
        time=1021,  # no multiple of a step or a strip
        dim=6144,
        documents=4,
        bias=True,
    ),
    *(
        Spec(
            name=name, tag="perf", batch=batch, time=8192, dim=8192, documents=documents
        )
        for batch in (1, 4)
        for name, documents in (("qwen3_next", 3), ("qwen3_next_whole", 0))
    ),
    Spec(
        name="nemotron3_mamba",
        tag="perf",
        batch=1,
        time=8192,
        dim=6144,
        documents=3,
        bias=True,
    ),
    Spec(
        name="qwen3_next_decode", tag="perf", batch=128, time=1, dim=8192, documents=0
    ),
)


def specs(tag: str) -> Iterator[Spec]:
    """The specs with a tag."""
    return (spec for spec in SPECS if spec.tag == tag)


def run(spec: Spec, op: Callable[..., Any], backward: bool) -> Callable[..., Any]:
    """`op` as a function of `spec.arguments`: (y, state), or those and gradients."""

    def forward(x, weight, bias, state, is_first):
        return op(
            x,
            weight,
            bias=bias if spec.bias else None,
            is_first=is_first if spec.documents else None,
            initial_state=state,
            activation="silu",
        )

    def only_forward(x, weight, bias, is_first, state, dy, d_state):
        del dy, d_state
        return forward(x, weight, bias, state, is_first)

    def both(x, weight, bias, is_first, state, dy, d_state):
        op = functools.partial(forward, is_first=is_first)
        results, pull = jax.vjp(op, x, weight, bias, state)
        return (*results, *pull((dy, d_state)))

    return both if backward else only_forward


def minimal_bytes(spec: Spec, backward: bool) -> int:
    """Bytes that must cross device memory: each tensor once each way."""
    item = jnp.dtype(spec.dtype).itemsize
    return spec.batch * spec.time * spec.dim * item * (5 if backward else 2)


def bench_cases(tag: str) -> Iterator[Case]:
    """What `python -m pallas_kernels.bench causal_conv1d` measures."""
    for spec in specs(tag):
        for backward in (False, True):
            if spec.time > 1 or not backward:
                yield _case(spec, backward)


def _case(spec: Spec, backward: bool) -> Case:
    # Imported here: the tests read this file for its sizes alone.
    from pallas_kernels._common.bench import Case
    from pallas_kernels.causal_conv1d import api

    def implementation(name: Any) -> Callable[..., Any]:
        op = functools.partial(api.causal_conv1d, implementation=name)
        return run(spec, op, backward)

    def picked() -> str:
        arguments = jax.eval_shape(spec.arguments, jax.random.key(0))
        x, weight, bias, *_ = arguments
        choice = api.choose(x, weight, bias=bias if spec.bias else None)
        return str(choice.config or choice.implementation)

    size = f"{spec.batch}x{spec.time}x{spec.dim}"
    return Case(
        workload=f"{spec.name} {size} {'fwd+bwd' if backward else 'fwd'}",
        dtype=spec.dtype,
        arguments=spec.arguments,
        implementation=implementation,
        reference=implementation("reference"),
        picked=picked,
        bytes=minimal_bytes(spec, backward),
        flops=0,
        peers={
            "xla": lambda: (implementation("xla"), jax.__version__),
            "fla": lambda: _fla(spec, backward),
        },
    )


def _fla(spec: Spec, backward: bool) -> tuple[_Fla, str]:
    if spec.documents > 1 and spec.batch > 1:
        raise NotImplementedError("fla takes packed documents in one row")
    names = ("fla-core", "torch", "triton")
    version = ", ".join(f"{x} {importlib.metadata.version(x)}" for x in names)
    return _Fla(spec, backward), version


class _Fla:
    """flash-linear-attention's Triton kernels, a `bench.TimedPeer`.

    Args:
      spec: the sizes.
      backward: whether to compute gradients as well.

    Raises:
      ImportError: it, PyTorch or a GPU that PyTorch sees is missing.
    """

    def __init__(self, spec: Spec, backward: bool):
        import torch  # pyrefly: ignore[missing-import]
        from fla.modules.causal_conv1d import (  # pyrefly: ignore[missing-import]
            causal_conv1d,
        )

        if not torch.cuda.is_available():
            raise ImportError("PyTorch sees no GPU")
        self._torch: Any = torch
        self._op: Callable[..., Any] = causal_conv1d
        self._spec, self._backward = spec, backward
        self.note = "" if not backward else "gradients not checked"

    def _tensor(self, x: jax.Array) -> Any:
        dtype = getattr(self._torch, x.dtype.name)
        host = self._torch.from_numpy(np.array(x.astype(jnp.float32)))
        return host.cuda().to(dtype)

    def _call(self, args: tuple[jax.Array, ...]) -> Callable[[], tuple[Any, ...]]:
        torch, spec = self._torch, self._spec
        x, weight, bias, is_first, state, dy, d_state = args

        # Its states are [D, W], the oldest of which no tap reaches; only the first
        # and the last document's are ours.
        def by_channel(state):
            state = jnp.pad(state, ((0, 0), (1, 0), (0, 0)))
            return self._tensor(jnp.swapaxes(state, 1, 2)).contiguous()

        initial, d_last = by_channel(state), by_channel(d_state)
        packed = {}
        if spec.documents > 1:
            borders = np.flatnonzero(np.asarray(is_first)[0])
            bounds = [0, *(int(t) for t in borders if t), spec.time]
            rest = torch.zeros_like(initial.repeat(len(bounds) - 2, 1, 1))
            initial, d_last = torch.cat([initial, rest]), torch.cat([rest, d_last])
            packed["cu_seqlens"] = torch.tensor(bounds, device="cuda")
        inputs = [self._tensor(x), self._tensor(weight).T.contiguous(), initial]
        inputs += [self._tensor(bias)] if spec.bias else []
        for tensor in inputs:
            tensor.requires_grad_(self._backward)
        cotangents = [self._tensor(dy), d_last]

        def call():
            results = self._op(
                inputs[0],
                inputs[1],
                bias=inputs[3] if spec.bias else None,
                initial_state=inputs[2],
                output_final_state=True,
                activation="silu",
                **packed,
            )
            if self._backward:
                return *results, *torch.autograd.grad(results, inputs, cotangents)
            return results

        return call

    def results(self, args: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        """y and the final state."""
        y, states, *_ = self._call(args)()
        last = states[-args[0].shape[0] :].transpose(1, 2)[:, 1:]
        host = (x.detach().float().cpu().numpy() for x in (y, last))
        return tuple(jnp.asarray(x, args[0].dtype) for x in host)

    def measure(self, args: tuple[jax.Array, ...]) -> list[timing.Timing]:
        """Times it; see `torch_peer.measure`."""
        return torch_peer.measure(self._call(args))
