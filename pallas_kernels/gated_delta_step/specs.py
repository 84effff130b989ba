"""Sizes at which `gated_delta_step` is tested and measured, and its benchmark."""

from __future__ import annotations

import dataclasses
import functools
import importlib.metadata
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels._common import timing
from pallas_kernels.gated_delta_rule.specs import _Fla as PeerOfRule
from pallas_kernels.gated_delta_step.layer import Layer


if TYPE_CHECKING:
    from pallas_kernels._common.bench import Case

POOLS = slice(4, 6)  # where the pools stand in `Spec.arguments`


@dataclasses.dataclass(frozen=True, kw_only=True)
class Spec:
    """One use of the op.

    Attributes:
      name: where it comes from.
      tag: "ci" (CPU), "model" (tests on the card) or "perf" (measured).
      batch, key_heads, value_heads, key_dim, value_dim, width: B, Hk, Hv, K, V, W.
      dtype: of qkv, z and the convolution's windows.
      state_dtype: of the state.
      spare: slots more than rows; rows name slots in an order of their own if there
        are any, else row b is at slot b.
      skipped: whether the second row names no slot.
      negative_eigenvalues: as in `Layer`.
    """

    name: str
    tag: str
    batch: int
    key_heads: int
    value_heads: int
    key_dim: int = 128
    value_dim: int = 128
    width: int = 4
    dtype: str = "bfloat16"
    state_dtype: str = "float32"
    spare: int = 0
    skipped: bool = False
    negative_eigenvalues: bool = False

    @property
    def channels(self) -> int:
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

    def tokens(self, key: jax.Array, *time: int) -> tuple[jax.Array, ...]:
        """qkv, a, b, z of a batch of tokens, with a T axis if there is a time."""
        keys = jax.random.split(key, 4)
        lead = (self.batch, *time)
        wide = (*lead, self.value_heads * self.value_dim)
        qkv, z = (
            jax.random.normal(k, shape).astype(self.dtype)
            for k, shape in ((keys[0], (*lead, self.channels)), (keys[3], wide))
        )
        a, b = (jax.random.normal(k, (*lead, self.value_heads)) for k in keys[1:3])
        return qkv, a, b, z

    def layer(self, *parameters: jax.Array) -> Layer:
        """The layer of conv_weight, A_log, dt_bias, norm_scale."""
        conv_weight, A_log, dt_bias, norm_scale = parameters
        return Layer(
            conv_weight=conv_weight,
            A_log=A_log,
            dt_bias=dt_bias,
            norm_scale=norm_scale,
            key_heads=self.key_heads,
            negative_eigenvalues=self.negative_eigenvalues,
        )

    def arguments(self, key: jax.Array) -> tuple[jax.Array, ...]:
        """qkv, a, b, z, conv_pool, state_pool, the layer's parameters[, slots]."""
        keys = jax.random.split(key, 6)
        heads = (self.value_heads,)
        weight = jax.random.normal(keys[0], (self.width, self.channels))
        # Heads of half-lives from a fraction of a token to thousands.
        A_log = jnp.linspace(-6.0, 2.0, self.value_heads)
        parameters = (
            (0.5 * weight).astype(self.dtype),
            A_log.astype(jnp.float32),
            jax.random.normal(keys[1], heads),
            1 + 0.1 * jax.random.normal(keys[2], (self.value_dim,)),
        )
        count = self.batch + self.spare
        window = jax.random.normal(keys[3], (count, self.width - 1, self.channels))
        entry = (count, self.value_heads, self.value_dim, self.key_dim)
        state = 0.3 * jax.random.normal(keys[4], entry)
        arguments = (
            *self.tokens(keys[5]),
            window.astype(self.dtype),
            state.astype(self.state_dtype),
            *parameters,
        )
        return (
            arguments if self.slots is None else (*arguments, jnp.asarray(self.slots))
        )

    @property
    def slots(self) -> np.ndarray | None:
        """i32[B], the last slot first; `None` where row b is at slot b."""
        if not (self.spare or self.skipped):
            return None
        slots = self.batch + self.spare - 1 - np.arange(self.batch, dtype=np.int32)
        if self.skipped:
            slots[1] = -1
        return slots


def _qwen3_next(tag: str, batch: int, **options: Any) -> Spec:
    # Qwen3-Next-80B-A3B: 16 key heads and 32 value heads of 128.
    return Spec(
        name="qwen3_next",
        tag=tag,
        batch=batch,
        key_heads=16,
        value_heads=32,
        **options,
    )


SPECS = (
    *(
        Spec(
            name=f"ci_rep{rep}",
            tag="ci",
            batch=3,
            key_heads=2,
            value_heads=2 * rep,
            key_dim=16,
            value_dim=24,
            width=width,
            dtype="float32",
            state_dtype=state_dtype,
            spare=spare,
            skipped=skipped,
            negative_eigenvalues=rep == 3,
        )
        for rep, width, spare, skipped, state_dtype in (
            (1, 4, 0, False, "float32"),
            (2, 2, 2, True, "float32"),
            (3, 4, 1, False, "bfloat16"),
            (4, 3, 0, True, "float32"),
        )
    ),
    *(
        _qwen3_next("model", batch, state_dtype=state_dtype, spare=3, skipped=True)
        for batch in (64, 256)
        for state_dtype in ("float32", "bfloat16")
    ),
    *(
        _qwen3_next("perf", batch, state_dtype=state_dtype)
        for state_dtype in ("float32", "bfloat16")
        for batch in (1, 8, 64, 256, 1024)
    ),
)


def specs(tag: str) -> Iterator[Spec]:
    """The specs with a tag."""
    return (spec for spec in SPECS if spec.tag == tag)


def run(spec: Spec, op: Callable[..., Any]) -> Callable[..., Any]:
    """`op` as a function of `spec.arguments`."""

    def step(qkv, a, b, z, conv_pool, state_pool, *rest):
        parameters, slots = rest[:4], rest[4:]
        layer = spec.layer(*parameters)
        return op(qkv, a, b, z, layer, conv_pool, state_pool, *slots)

    return step


def minimal_bytes(spec: Spec) -> int:
    """Bytes that must cross device memory: what is read once, what changes twice."""
    item = jnp.dtype(spec.dtype).itemsize
    wide = spec.value_heads * spec.value_dim
    state = wide * spec.key_dim * jnp.dtype(spec.state_dtype).itemsize
    window = (spec.width - 1) * spec.channels * item
    tokens = (spec.channels + 2 * wide) * item + 2 * spec.value_heads * 4
    return spec.batch * (2 * state + 2 * window + tokens)


def bench_cases(tag: str) -> Iterator[Case]:
    """What `python -m pallas_kernels.bench gated_delta_step` measures."""
    return map(_case, specs(tag))


def _case(spec: Spec) -> Case:
    # Imported here: the tests read this file for its sizes alone.
    from pallas_kernels._common.bench import Case
    from pallas_kernels.gated_delta_step import api

    def step(name: Any) -> Callable[..., Any]:
        return run(spec, functools.partial(api.gated_delta_step, implementation=name))

    def implementation(name: Any) -> Any:
        return InPlace(step(name))

    def picked() -> str:
        arguments = jax.eval_shape(spec.arguments, jax.random.key(0))
        choice = run(spec, api.choose)(*arguments)
        return str(choice.config or choice.implementation)

    heads = f"Hk{spec.key_heads} Hv{spec.value_heads} K{spec.key_dim} V{spec.value_dim}"
    return Case(
        workload=f"{spec.name} B{spec.batch} {heads} {spec.state_dtype} state",
        dtype=spec.dtype,
        arguments=spec.arguments,
        implementation=implementation,
        reference=step("reference"),
        picked=picked,
        bytes=minimal_bytes(spec),
        flops=0,
        peers={
            "xla": lambda: (implementation("xla"), jax.__version__),
            "fla": lambda: _fla(spec),
        },
        # Against a reference that rounds nothing to bf16 on the way.
        rel=1e-2,
    )


class InPlace:
    """A step that is given its pools to keep, a `bench.TimedPeer`.

    Without donation every call would copy the pools before it changes them.

    Args:
      step: a function of a spec's arguments.
    """

    note = ""

    def __init__(self, step: Callable[..., Any]):
        self._step: Any = jax.jit(step, donate_argnums=tuple(range(6))[POOLS])

    def compile(self, args: tuple[Any, ...]) -> None:
        """Compiles ahead of the first call."""
        self._step = self._step.lower(*args).compile()

    def results(self, args: tuple[Any, ...]) -> tuple[jax.Array, ...]:
        """y and the new pools."""
        pools = [jnp.copy(pool) for pool in args[POOLS]]
        return self._step(*args[:4], *pools, *args[6:])

    def measure(self, args: tuple[Any, ...]) -> list[timing.Timing]:
        """Times the same token again and again; the state goes on from call to call."""
        pools = [jnp.copy(pool) for pool in args[POOLS]]

        def once(*tokens):
            y, *pools[:] = self._step(*tokens, *pools, *args[6:])
            return y

        return timing.measure(once, args[:4])


def _fla(spec: Spec) -> tuple[_Fla, str]:
    if spec.state_dtype != "float32":
        raise NotImplementedError("fla keeps the state in float32")
    peer = _Fla(spec)
    names = ("fla-core", "torch", "triton")
    return peer, ", ".join(f"{x} {importlib.metadata.version(x)}" for x in names)


class _Fla(PeerOfRule):
    """flash-linear-attention's recurrent Triton kernel, a `bench.TimedPeer`.

    Timed as the chunked one of `gated_delta_rule` is.

    Raises:
      ImportError: it, PyTorch or a GPU that PyTorch sees is missing.
    """

    def __init__(self, spec: Spec):
        super().__init__(backward=False)
        self._spec = spec
        from fla.ops.gated_delta_rule import (  # pyrefly: ignore[missing-import]
            fused_recurrent_gated_delta_rule,
        )

        self._op = fused_recurrent_gated_delta_rule
        self.note = (
            "the recurrence alone: no convolution, norms or gates; a new state each "
            "call"
        )

    def _call(self, args: tuple[Any, ...]) -> Callable[[], tuple[Any, ...]]:
        from pallas_kernels.gated_delta_step import xla

        qkv, a, b, _, conv_pool, state_pool, *parameters = args
        layer = self._spec.layer(*parameters)
        q, k, v, _ = xla.projected(layer, qkv[:, None], conv_pool, state_pool)
        g, beta = xla.gates(layer, a[:, None], b[:, None])
        named = {"q": q, "k": k, "v": v, "g": g, "beta": beta}
        inputs = {name: self._tensor(x) for name, x in named.items()}
        # Its states are [K, V].
        initial = self._tensor(state_pool).transpose(-1, -2).contiguous()
        return functools.partial(
            self._op, **inputs, initial_state=initial, output_final_state=True
        )

    def results(self, args: tuple[Any, ...]) -> tuple[jax.Array, ...]:
        """y by way of our norm, the new windows by ours, its state."""
        from pallas_kernels.gated_delta_step import xla

        qkv, _, _, z, conv_pool, state_pool, *parameters = args
        layer = self._spec.layer(*parameters)
        window = xla.projected(layer, qkv[:, None], conv_pool, state_pool)[3]
        o, state = (jnp.asarray(x.float().cpu().numpy()) for x in self._call(args)())
        y = xla.normed(layer, o.astype(qkv.dtype), z[:, None])
        return y[:, 0], window, jnp.swapaxes(state, -1, -2)
