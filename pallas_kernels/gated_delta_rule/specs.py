"""Sizes at which `gated_delta_rule` is tested and measured, and its benchmark."""

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
from pallas_kernels.gated_delta_rule.config_mosaic import Config


if TYPE_CHECKING:
    from pallas_kernels._common.bench import Case


@dataclasses.dataclass(frozen=True, kw_only=True)
class Spec:
    """One use of the op.

    Attributes:
      name: where it comes from.
      tag: "ci" (CPU), "model" (tests on the card), "perf" (measured) or "long"
        (measured if asked for).
      batch, time, key_heads, value_heads, key_dim, value_dim: B, T, Hk, Hv, K, V.
      documents: documents per row, of lengths that don't divide into chunks.
      chunk: tokens per chunk.
    """

    name: str
    tag: str
    batch: int
    time: int
    key_heads: int
    value_heads: int
    key_dim: int = 128
    value_dim: int = 128
    dtype: str = "bfloat16"
    documents: int = 1
    chunk: int = 64

    def arguments(self, key: jax.Array) -> tuple[jax.Array, ...]:
        """q, k, v, g, beta, is_first, initial_state, do, d_state."""
        keys = jax.random.split(key, 8)
        heads = (self.batch, self.time, self.value_heads)
        qk = (self.batch, self.time, self.key_heads, self.key_dim)
        q, k = (jax.random.normal(keys[i], qk) for i in (0, 1))
        q, k = (x / jnp.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
        v, do = (
            jax.random.normal(keys[i], (*heads, self.value_dim)).astype(self.dtype)
            for i in (2, 3)
        )
        # A quarter of the heads never forgets: errors of the state show there.
        g = jax.nn.log_sigmoid(jax.random.normal(keys[4], heads)) / 16
        slow = jnp.arange(self.value_heads) % 4 == 0
        g = jnp.where(slow[None, None], 0.0, g)
        beta = jax.nn.sigmoid(jax.random.normal(keys[5], heads))
        border = self.time // self.documents + 1
        is_first = jnp.arange(self.time) % border == border - 1
        is_first = jnp.broadcast_to(is_first[None], heads[:2])
        shape = (self.batch, self.value_heads, self.value_dim, self.key_dim)
        state, d_state = (jax.random.normal(keys[i], shape) for i in (6, 7))
        q, k = q.astype(self.dtype), k.astype(self.dtype)
        return q, k, v, g, beta, is_first, state, do, d_state


SPECS = (
    *(
        Spec(
            name=f"ci_t{time}_rep{rep}",
            tag="ci",
            batch=2,
            time=time,
            key_heads=3,
            value_heads=3 * rep,
            key_dim=16,
            value_dim=24,
            dtype="float32",
            documents=documents,
        )
        # A token, a chunk less one, two and a token.
        for time, rep, documents in ((1, 1, 1), (63, 3, 4), (129, 2, 3))
    ),
    Spec(
        name="ci_bf16",
        tag="ci",
        batch=1,
        time=128,
        key_heads=1,
        value_heads=4,
        key_dim=32,
        value_dim=32,
        documents=2,
    ),
    # Qwen3-Next-80B-A3B: 16 key heads and 32 value heads of 128.
    Spec(
        name="qwen3_next", tag="model", batch=2, time=1024, key_heads=16, value_heads=32
    ),
    Spec(
        name="qwen3_next_packed",
        tag="model",
        batch=1,
        time=2048,
        key_heads=16,
        value_heads=32,
        documents=5,
    ),
    *(
        Spec(
            name="qwen3_next",
            tag=tag,
            batch=batch,
            time=time,
            key_heads=16,
            value_heads=32,
        )
        for tag, batch, time in (
            ("perf", 1, 8192),
            ("perf", 4, 8192),
            ("perf", 8, 2048),
            ("long", 1, 32768),
            ("long", 8, 1024),
        )
    ),
    *(
        Spec(
            name="qwen3_next_packed",
            tag=tag,
            batch=1,
            time=time,
            key_heads=16,
            value_heads=32,
            documents=documents,
        )
        for tag, time, documents in (("perf", 8192, 5), ("long", 32768, 8))
    ),
    Spec(
        name="hybrid_125m", tag="long", batch=8, time=4096, key_heads=8, value_heads=16
    ),
)


def specs(tag: str) -> Iterator[Spec]:
    """The specs with a tag."""
    return (spec for spec in SPECS if spec.tag == tag)


def run(spec: Spec, op: Callable[..., Any], backward: bool) -> Callable[..., Any]:
    """`op` as a function of `spec.arguments`: (o, state), or those and gradients."""

    def forward(q, k, v, g, beta, state, is_first):
        return op(q, k, v, g, beta, is_first=is_first, initial_state=state)

    def only_forward(q, k, v, g, beta, is_first, state, do, d_state):
        del do, d_state
        return forward(q, k, v, g, beta, state, is_first)

    def both(q, k, v, g, beta, is_first, state, do, d_state):
        op = functools.partial(forward, is_first=is_first)
        results, pull = jax.vjp(op, q, k, v, g, beta, state)
        return (*results, *pull((do, d_state)))

    return both if backward else only_forward


def minimal_bytes(spec: Spec, backward: bool) -> int:
    """Bytes that must cross device memory: each tensor once each way."""
    tokens = spec.batch * spec.time
    item = jnp.dtype(spec.dtype).itemsize
    qk = 2 * spec.key_heads * spec.key_dim * item
    value = spec.value_heads * spec.value_dim * item
    gates = 2 * spec.value_heads * 4
    state = spec.batch * spec.value_heads * spec.key_dim * spec.value_dim * 4
    total = tokens * (qk + 2 * value + gates) + 2 * state
    if backward:
        # The inputs and do again, the gradients of the inputs out.
        total += tokens * (2 * (qk + value + gates) + value) + 3 * state
    return total


def minimal_flops(spec: Spec, backward: bool) -> int:
    """Operations of the chunked form's products (README.md), inverse not counted."""
    size, key, value = spec.chunk, spec.key_dim, spec.value_dim
    per_chunk = 2 * (3 * size * key * value + 2 * size * size * (key + value))
    chunks = spec.batch * spec.value_heads * -(-spec.time // size)
    # The gradient has twice as many, and computes the states again.
    return chunks * per_chunk * (4 if backward else 1)


# Launch parameters that no heuristic picks, measured with --peers NAME,...
VARIANTS: dict[str, Config] = {
    **{f"segments{count}": Config(segments=count) for count in (1, 2, 4, 8)},
    "stages2": Config(stages=2),
    "queries_last": Config(order="queries_last"),
    "values_first": Config(order="values_first"),
    "ring": Config(grads="ring"),
    "keep": Config(keep="states"),
}


def bench_cases(tag: str) -> Iterator[Case]:
    """What `python -m pallas_kernels.bench gated_delta_rule` measures."""
    for spec in specs(tag):
        for backward in (False, True):
            yield _case(spec, backward)


def _case(spec: Spec, backward: bool) -> Case:
    # Imported here: the tests read this file for its sizes alone.
    from pallas_kernels._common.bench import Case
    from pallas_kernels.gated_delta_rule import api

    def implementation(name: Any, config: Config | None = None) -> Callable[..., Any]:
        op = functools.partial(
            api.gated_delta_rule,
            implementation=name,
            chunk_size=spec.chunk,
            config=config,
        )
        return run(spec, op, backward)

    def variant(config: Config) -> tuple[Callable[..., Any], str]:
        return implementation("mosaic", config), jax.__version__

    def picked() -> str:
        arguments = jax.eval_shape(spec.arguments, jax.random.key(0))
        choice = api.choose(*arguments[:5], chunk_size=spec.chunk)
        return str(choice.config or choice.implementation)

    # The recurrence would keep states of every token for its gradient, 69 GB each time
    # at 4 x 8192. The chunked form in f32, tested against it, stands in for it.
    exact = "reference" if spec.tag in ("ci", "model") else "xla"
    size = f"{spec.batch}x{spec.time}"
    if spec.documents > 1:
        size += f" in {spec.documents}"
    heads = f"Hk{spec.key_heads} Hv{spec.value_heads} K{spec.key_dim} V{spec.value_dim}"
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
        # Tolerances of fla's own tests: 5e-3 forward, 2e-2 for the gates' gradients.
        rel=2e-2 if backward else 5e-3,
    )


def _fla(spec: Spec, backward: bool) -> tuple[_Fla, str]:
    if spec.documents > 1 and spec.batch > 1:
        raise NotImplementedError("fla takes packed documents in one row")
    peer = _Fla(backward)
    names = ("fla-core", "torch", "triton")
    return peer, ", ".join(f"{x} {importlib.metadata.version(x)}" for x in names)


class _Fla:
    """flash-linear-attention's chunked Triton kernels, a `bench.TimedPeer`.

    Args:
      backward: whether to compute gradients as well.

    Raises:
      ImportError: it, PyTorch or a GPU that PyTorch sees is missing.
    """

    def __init__(self, backward: bool):
        import torch  # pyrefly: ignore[missing-import]
        from fla.ops.gated_delta_rule import (  # pyrefly: ignore[missing-import]
            chunk_gated_delta_rule,
        )

        if not torch.cuda.is_available():
            raise ImportError("PyTorch sees no GPU")
        self._torch: Any = torch
        self._op: Callable[..., Any] = chunk_gated_delta_rule
        self._backward = backward
        self.note = ""
        if backward:
            self.note = (
                "gradients not checked: fla refuses them on Hopper with Triton 3.4 "
                "to 3.7.0 as wrong (fla #640) unless that check is taken out"
            )

    def _tensor(self, x: jax.Array) -> Any:
        dtype = getattr(self._torch, x.dtype.name)
        host = self._torch.from_numpy(np.array(x.astype(jnp.float32)))
        return host.cuda().to(dtype)

    def _call(self, args: tuple[jax.Array, ...]) -> Callable[[], tuple[Any, ...]]:
        torch = self._torch
        *floats, is_first, state, do, d_state = args
        borders = np.flatnonzero(np.asarray(is_first)[0])
        bounds = [0, *(int(t) for t in borders if t), is_first.shape[1]]
        documents = len(bounds) - 1

        # Its states are [K, V]; only the first and the last document's are ours.
        def by_key(x):
            return self._tensor(x).transpose(-1, -2).contiguous()

        initial, d_last = by_key(state), by_key(d_state)
        packed = {}
        if documents > 1:
            rest = torch.zeros_like(initial.repeat(documents - 1, 1, 1, 1))
            initial, d_last = torch.cat([initial, rest]), torch.cat([rest, d_last])
            packed["cu_seqlens"] = torch.tensor(bounds, device="cuda")
        inputs = [*(self._tensor(x) for x in floats), initial]
        cotangents = [self._tensor(do), d_last]
        for tensor in inputs:
            tensor.requires_grad_(self._backward)

        def call():
            results = self._op(
                *inputs[:5],
                initial_state=inputs[5],
                output_final_state=True,
                **packed,
            )
            if self._backward:
                return *results, *torch.autograd.grad(results, inputs, cotangents)
            return results

        return call

    def results(self, args: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        """o and the final state."""
        o, states, *_ = self._call(args)()
        last = states[-args[0].shape[0] :].transpose(-1, -2)
        return tuple(jnp.asarray(x.detach().float().cpu().numpy()) for x in (o, last))

    def measure(self, args: tuple[jax.Array, ...]) -> list[timing.Timing]:
        """Times it; see `torch_peer.measure`."""
        return torch_peer.measure(self._call(args))
