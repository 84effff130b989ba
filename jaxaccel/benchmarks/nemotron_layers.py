"""Single layers of a Nemotron 3; see `jaxaccel.benchmarks.nemotron`."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxaccel.benchmarks.moe import Measured
from jaxaccel.benchmarks.nemotron_decode import compiler_options
from jaxaccel.core.tree import num_bytes
from jaxaccel.data.batch import packing_metadata
from jaxaccel.models.decoder import Block
from jaxaccel.models.describe import describe
from jaxaccel.models.nemotron_h import NemotronHConfig
from jaxaccel.nn.router import MoEConfig
from pallas_kernels._common import timing
from pallas_kernels._common.bench import Ceilings, assert_close_on_device, digits


KINDS = ("mamba", "attention", "moe")
# Ops of the layers that have both implementations; norms choose for themselves, so that
# routers read the same numbers.
OPS = (
    *("attention", "causal_conv1d", "decode_attention", "gemv", "grouped_matmul"),
    *("sort_dispatch", "ssd", "ssd_step"),
)
# The first tokens of a row, which no later one changes, are compared with "xla".
_CHECKED = 256
_RELATIVE = 2e-2
# Slots of the caches that a step of decoding reads, and steps that fill the last ones:
# in a loop caches are updated where they are.
_CONTEXT = 4096
_STEPS = 32


class Layer:
    """A layer of one kind and what goes into it.

    Attributes:
      config: the model's decoder.
      kind: "mamba", "attention" or "moe".
      state: parameters, drawn in one call.
    """

    def __init__(self, config: NemotronHConfig, kind: str):
        """Draws the parameters."""
        self.config, self.kind = config.decoder(), kind
        self.state = jax.jit(lambda key: nnx.split(self._make(key))[1])(
            jax.random.key(0)
        )

    def _make(self, key: Any, implementation: str | None = None) -> Block:
        config = self.config
        if implementation is not None:
            named = dict.fromkeys(OPS, implementation)
            config = dataclasses.replace(config, implementation=named)
        return Block(config, *config.layer_parts(self.kind), rngs=nnx.Rngs(key))

    def block(self, implementation: str) -> Any:
        """The abstract block, and (state, x, meta, cache, length) -> y, cache."""
        abstract = nnx.eval_shape(lambda: self._make(0, implementation))
        graphdef = nnx.split(abstract)[0]

        def run(state, x, meta, cache=None, length=None):
            return nnx.merge(graphdef, state)(x, meta, cache, length)[:2]

        return abstract, run

    def input(self, *shape: int) -> jax.Array:
        """Random [*shape, D]."""
        shape = (*shape, self.config.d_model)
        return jax.random.normal(jax.random.key(1), shape, self.config.compute_dtype)

    def forward(self, implementation: str) -> Any:
        """(state, x) -> y, of one document a row."""
        abstract, run = self.block(implementation)
        mixer = abstract.mixer

        def forward(state, x):
            tables = () if mixer is None else mixer.tables(*x.shape[:2])
            return run(state, x, packing_metadata(x.shape[:2], tables=tables))[0]

        return forward

    def backward(self, implementation: str) -> Any:
        """(state, x, dy) -> the gradients of parameters and x."""
        forward = self.forward(implementation)

        def backward(state, x, dy):
            # The selection bias among them is moved by load: its gradient is zero.
            return jax.vjp(forward, state, x)[1](dy)

        return backward

    def steps(self, implementation: str, batch: int) -> tuple[Any, tuple[Any, ...]]:
        """The last `_STEPS` steps of decoding `_CONTEXT` tokens, and their arguments.

        Each reads what the one before made of its token.
        """
        abstract, run = self.block(implementation)
        length = jnp.full((batch,), _CONTEXT - _STEPS, jnp.int32)
        cache = None
        if abstract.mixer is not None:
            dtype = self.config.compute_dtype
            cache = abstract.mixer.init_cache(batch, _CONTEXT, dtype)

        def steps(state, x, cache, length):
            def step(carry, _):
                x, cache, length = carry
                meta = packing_metadata(x.shape[:2], cached_length=length)
                x, cache = run(state, x, meta, cache, length)
                return (x, cache, length + 1), None

            return jax.lax.scan(step, (x, cache, length), length=_STEPS)[0]

        return steps, (self.state, self.input(batch, 1), cache, length)

    def fault(self, implementation: str, tokens: int) -> str | None:
        """What is wrong with the first outputs of a row, `None` if nothing is."""
        if implementation == "xla":
            return None
        # Small, so that the sum of both rounds away nothing of what the layer adds; its
        # norm undoes that.
        x = self.input(1, tokens) * jnp.asarray(2**-5, self.config.compute_dtype)
        few = x[:, :_CHECKED]
        try:
            got = jax.jit(self.forward(implementation))(self.state, x)
        except NotImplementedError as error:
            return f"not available: {error}"
        want = jax.jit(self.forward("xla"))(self.state, few)
        got, want = (
            y.astype(jnp.float32) - few.astype(jnp.float32)
            for y in (got[:, :_CHECKED], want)
        )
        try:
            assert_close_on_device(got, want, rel=_RELATIVE, name="y - x")
        except AssertionError as error:
            return f"wrong result: {error}"
        return None

    def step_bytes(self, batch: int, cache: Any) -> int:
        """Weights that some row reads, of experts their expected number; the cache."""
        found = 2 * num_bytes(cache) if self.kind == "mamba" else num_bytes(cache)
        found += num_bytes(self.state)
        moe = self.config.layer_parts(self.kind)[1]
        if isinstance(moe, MoEConfig):
            matrices = num_bytes(
                (self.state["mlp"]["w_in"], self.state["mlp"]["w_out"])
            )
            visited = 1 - (1 - moe.top_k / moe.num_experts) ** batch
            found -= round(matrices * (1 - visited))
        return found


def measure(
    config: NemotronHConfig,
    name: str,
    *,
    implementations: Sequence[str],
    kinds: Sequence[str],
    tokens: int,
    batches: Sequence[int],
    limits: Ceilings,
) -> Iterator[dict[str, Any]]:
    """Measures layers of each kind.

    Args:
      config: the model.
      name: of the model.
      implementations: of `OPS`.
      kinds: of `KINDS`.
      tokens: T of a row that is read at once.
      batches: rows B of a step of decoding.
      limits: of this run.

    Yields:
      One row a kind, implementation and direction: "fwd" and "fwd+bwd" of 1 x T tokens
      beside their products at this card's dense rate, and "decode" of B rows beside
      their bytes at its copy rate. `floor_ms` is that time, `share_of_limit` its part
      of `ms`.
    """
    for kind in kinds:
        layer = Layer(config, kind)
        flops = _forward_flops(config, kind, tokens)
        for implementation in implementations:
            fault = layer.fault(implementation, tokens)
            for direction in ("fwd", "fwd+bwd"):
                found = Measured(note=f"no speed: {fault}")
                times = 1 if direction == "fwd" else 3
                floor = times * flops / limits.tflops / 1e9 if limits.tflops else None
                if fault is None:
                    found = _time(layer, implementation, direction, tokens)
                workload = f"{name} {kind} 1x{tokens} {direction}"
                yield _row(layer, workload, implementation, found, floor) | {
                    "tflops": digits(times * flops / found.ms / 1e9)
                    if found.ms
                    else None
                }
            for batch in batches:
                found = Measured(note=f"no speed: {fault}")
                steps, arguments = layer.steps(implementation, batch)
                moved = layer.step_bytes(batch, arguments[2])
                if fault is None:
                    found = _timed(steps, arguments, compiler_options(batch))
                    ms = found.ms and found.ms / _STEPS
                    found = dataclasses.replace(found, ms=ms)
                floor = moved / limits.gbps / 1e6
                workload = f"{name} {kind} decode batch {batch}, {_CONTEXT} held"
                row = _row(layer, workload, implementation, found, floor)
                yield row | {"bytes": moved, "copy_gbps": digits(limits.gbps)}


def _time(layer: Layer, implementation: str, direction: str, tokens: int) -> Measured:
    x = layer.input(1, tokens)
    if direction == "fwd":
        return _timed(layer.forward(implementation), (layer.state, x))
    return _timed(layer.backward(implementation), (layer.state, x, x))


def _timed(
    fn: Any, arguments: tuple[Any, ...], options: Mapping[str, str] | None = None
) -> Measured:
    """Compiles a function and times it on the device, warm."""
    try:
        lowered = jax.jit(fn).lower(*arguments)
        call = lowered.compile(compiler_options=dict(options or {}))
        memory = call.memory_analysis()
        temp = 0 if memory is None else memory.temp_size_in_bytes
        time = timing.measure(call, arguments)[0]
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return Measured(note="out of memory")
    return Measured(ms=time.ms, timer=time.timer, temp_bytes=temp)


def _forward_flops(config: NemotronHConfig, kind: str, tokens: int) -> float:
    (row,) = (
        row
        for row in describe(config.decoder(), tokens).rows
        if row.name == f"layer: {kind}"
    )
    return row.cost.forward_flops * tokens


def _row(
    layer: Layer,
    workload: str,
    implementation: str,
    found: Measured,
    floor: float | None,
) -> dict[str, Any]:
    share = digits(floor / found.ms, 3) if floor and found.ms else None
    return {
        "op": "nemotron_layer",
        "workload": workload,
        "implementation": implementation,
        "dtype": layer.config.dtype,
        "weights_gb": digits(num_bytes(layer.state) / 1e9),
        **found.fields,
        "floor_ms": None if floor is None else digits(floor),
        "share_of_limit": share,
    }
