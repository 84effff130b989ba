"""Single layers of a Nemotron 3; see `jaxaccel.benchmarks.nemotron`."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxaccel.benchmarks.guards import named_ops
from jaxaccel.benchmarks.moe import Measured
from jaxaccel.benchmarks.nemotron_decode import compiler_options
from jaxaccel.cache.dense import KVCache
from jaxaccel.core.tree import num_bytes, path_names
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
    *("attention", "causal_conv1d", "decode_attention", "expert_gemv", "gemv"),
    *("grouped_matmul", "sort_dispatch", "ssd", "ssd_step"),
)
# Of what a layer adds and of caches: the widest of the ops' own tests. On the way to a
# gradient a layer rounds several times beside its op.
_RELATIVE = 2e-2
_GRADIENTS = 3e-2
# Of many steps, each of which reads the one before: roundings grow, and routers meet
# near ties. A step of its own is held to the limit above.
_DRIFT = 0.3
# Small, so that the sum of both rounds away nothing of what the layer adds; its norm
# undoes that.
_SMALL = 2**-7
# Tokens of a row that are compared as a block.
_BLOCK = 64
# Slots of the caches that a step of decoding reads, and steps that fill the last ones:
# in a loop caches are updated where they are.
_CONTEXT = 4096
_STEPS = 32


@dataclasses.dataclass(frozen=True)
class Program:
    """A compiled function and the bytes of its temporaries."""

    call: Callable[..., Any]
    temp_bytes: int


class Layer:
    """A layer of one kind and what goes into it.

    Attributes:
      config: the model's decoder.
      kind: "mamba", "attention" or "moe".
    """

    def __init__(self, config: NemotronHConfig, kind: str):
        """Takes note of the layer; nothing is drawn yet."""
        self.config, self.kind = config.decoder(), kind
        self._programs: dict[tuple[Any, ...], Program] = {}

    def _drawn(self, key: jax.Array) -> Any:
        return nnx.split(self._make(key))[1]

    @functools.cached_property
    def state(self) -> Any:
        """Parameters, drawn in one call."""
        return jax.jit(self._drawn)(jax.random.key(0))

    @functools.cached_property
    def shapes(self) -> Any:
        """Those of `state`."""
        return jax.eval_shape(self._drawn, jax.random.key(0))

    def _make(self, key: Any, implementation: str | None = None) -> Block:
        config = self.config
        if implementation is not None:
            named = named_ops(implementation, OPS)
            config = dataclasses.replace(config, implementation=named)
        return Block(config, *config.layer_parts(self.kind), rngs=nnx.Rngs(key))

    def block(self, implementation: str) -> Any:
        """The abstract block, and (state, x, meta, cache, length) -> y, cache."""
        abstract = nnx.eval_shape(lambda: self._make(0, implementation))
        graphdef = nnx.split(abstract)[0]

        def run(state, x, meta, cache=None, length=None):
            return nnx.merge(graphdef, state)(x, meta, cache, length)[:2]

        return abstract, run

    def input(self, *shape: int, seed: int = 1) -> jax.Array:
        """Random [*shape, D]."""
        shape = (*shape, self.config.d_model)
        return jax.random.normal(jax.random.key(seed), shape, self.config.compute_dtype)

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

    def steps(self, implementation: str, count: int) -> Any:
        """(state, x, cache, length) -> x, cache, length, after `count` steps.

        Each reads what the one before made of its token.
        """
        run = self.block(implementation)[1]

        def steps(state, x, cache, length):
            def step(carry, _):
                x, cache, length = carry
                meta = packing_metadata(x.shape[:2], cached_length=length)
                x, cache = run(state, x, meta, cache, length)
                return (x, cache, length + 1), None

            return jax.lax.scan(step, (x, cache, length), length=count)[0]

        return steps

    def inputs(self, direction: str, size: int, scale: float = 1.0) -> tuple[Any, ...]:
        """What programs of a direction take behind the state.

        Args:
          direction: "fwd", "fwd+bwd" or "decode".
          size: tokens of a row, of "decode" rows with a token, behind a random cache
            that lacks the last `_STEPS` tokens of `_CONTEXT`.
          scale: of x.
        """
        scaled = jnp.asarray(scale, self.config.compute_dtype)
        if direction != "decode":
            x = self.input(1, size) * scaled
            return (x,) if direction == "fwd" else (x, self.input(1, size, seed=2))
        length = jnp.full((size,), _CONTEXT - _STEPS, jnp.int32)
        cache = self._cache(size)
        if isinstance(cache, KVCache):
            slots = jnp.arange(_CONTEXT, dtype=jnp.int32)
            places = jnp.broadcast_to(slots, cache.positions.shape)
            full = dataclasses.replace(cache, positions=places)
            cache = full.truncate(length)
        return self.input(size, 1) * scaled, cache, length

    def _cache(self, batch: int) -> Any:
        """Of random numbers, `None` in a layer without one."""
        mixer = self.block("xla")[0].mixer
        if mixer is None:
            return None

        def normal(leaf):
            if not jnp.issubdtype(leaf.dtype, jnp.floating):
                return leaf
            return jax.random.normal(jax.random.key(3), leaf.shape, leaf.dtype)

        dtype = self.config.compute_dtype
        return jax.tree.map(normal, mixer.init_cache(batch, _CONTEXT, dtype))

    def program(
        self, implementation: str, direction: str, size: int, count: int = _STEPS
    ) -> Program:
        """Compiles a function of the state and `inputs(direction, size)`, once.

        Args:
          implementation: of `OPS`.
          direction: as in `inputs`.
          size: likewise.
          count: steps of "decode".

        Raises:
          NotImplementedError: the implementation does not take this layer.
        """
        key = (implementation, direction, size, count)
        if key not in self._programs:
            options: dict[str, str] = {}
            if direction == "decode":
                fn, options = self.steps(implementation, count), compiler_options(size)
            elif direction == "fwd":
                fn = self.forward(implementation)
            else:
                fn = self.backward(implementation)
            inputs = jax.eval_shape(lambda: self.inputs(direction, size))
            lowered = jax.jit(fn).lower(self.shapes, *inputs)
            call = lowered.compile(compiler_options=options)
            memory = call.memory_analysis()
            temp = 0 if memory is None else memory.temp_size_in_bytes
            self._programs[key] = Program(call, temp)
        return self._programs[key]

    def results(
        self, implementation: str, direction: str, size: int, count: int = _STEPS
    ) -> dict[str, jax.Array]:
        """What a program adds to its small input; rows, or blocks, on leading axes."""
        program = self.program(implementation, direction, size, count)
        inputs = self.inputs(direction, size, _SMALL)
        got = program.call(self.state, *inputs)
        if direction == "fwd":
            return {"y - x": _blocks(_minus(got, inputs[0]))}
        if direction == "fwd+bwd":
            parameters, dx = got
            return {
                "dx - dy": _blocks(_minus(dx, inputs[1])),
                # Of experts one by one.
                **{
                    f"the gradient of {name}": leaf if leaf.ndim > 2 else leaf[None]
                    for name, leaf in _named(parameters)
                },
            }
        y, cache, _ = got
        changed = jax.tree.map(_minus, cache, inputs[1])
        return {
            "y - x": _minus(y, inputs[0]),
            **{f"the change of {name}": leaf for name, leaf in _named(changed)},
        }

    def fault(self, implementation: str, direction: str, size: int) -> str | None:
        """What is wrong with the results of a program, `None` if nothing is.

        Those of "xla" need be finite alone; others are held against them.

        Raises:
          NotImplementedError: the implementation does not take this layer.
        """
        limits = {_STEPS: _GRADIENTS if direction == "fwd+bwd" else _RELATIVE}
        if direction == "decode":
            limits = {1: _RELATIVE, _STEPS: _DRIFT}
        if implementation == "xla":
            return _not_finite(self.results("xla", direction, size))
        for count, limit in limits.items():
            got = self.results(implementation, direction, size, count)
            try:
                want = self.results("xla", direction, size, count)
                fault = _not_finite(want)
            except jax.errors.JaxRuntimeError as error:
                if "RESOURCE_EXHAUSTED" not in str(error):
                    raise
                return "unchecked: xla is out of memory"
            # `assert_close` takes a NaN where one is expected.
            if fault is not None:
                return f"unchecked: xla has a {fault}"
            try:
                for name, expected in want.items():
                    assert_close_on_device(got[name], expected, rel=limit, name=name)
            except AssertionError as error:
                return f"wrong result: {error}"
        return None

    def step_bytes(self, batch: int) -> int:
        """Weights that some row reads, of experts their expected number; the cache."""
        cache = jax.eval_shape(lambda: self._cache(batch))
        found = 2 * num_bytes(cache) if self.kind == "mamba" else num_bytes(cache)
        found += num_bytes(self.shapes)
        moe = self.config.layer_parts(self.kind)[1]
        if isinstance(moe, MoEConfig):
            matrices = num_bytes(
                (self.shapes["mlp"]["w_in"], self.shapes["mlp"]["w_out"])
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
            forward = None
            for direction in ("fwd", "fwd+bwd"):
                times = 1 if direction == "fwd" else 3
                floor = times * flops / limits.tflops / 1e9 if limits.tflops else None
                if forward is None or forward.ms:
                    found = _timed(layer, implementation, direction, tokens)
                else:
                    found = Measured(note=forward.note)
                forward = forward or found
                workload = f"{name} {kind} 1x{tokens} {direction}"
                yield _row(layer, workload, implementation, found, floor) | {
                    "tflops": digits(times * flops / found.ms / 1e9)
                    if found.ms
                    else None
                }
            for batch in batches:
                found = _timed(layer, implementation, "decode", batch)
                ms = found.ms and found.ms / _STEPS
                found = dataclasses.replace(found, ms=ms)
                moved = layer.step_bytes(batch)
                floor = moved / limits.gbps / 1e6
                workload = f"{name} {kind} decode batch {batch}, {_CONTEXT} held"
                row = _row(layer, workload, implementation, found, floor)
                yield row | {"bytes": moved, "copy_gbps": digits(limits.gbps)}


def _timed(layer: Layer, implementation: str, direction: str, size: int) -> Measured:
    """Compiles a program, checks it and times it on the device, warm."""
    try:
        with timing.together():
            program = layer.program(implementation, direction, size)
            fault = layer.fault(implementation, direction, size)
        if fault is not None:
            return Measured(note=f"no speed: {fault}")
        arguments = (layer.state, *layer.inputs(direction, size))
        with timing.alone():
            time = timing.measure(program.call, arguments)[0]
    except NotImplementedError as error:
        return Measured(note=f"no speed: not available: {error}")
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return Measured(note="out of memory")
    return Measured(ms=time.ms, timer=time.timer, temp_bytes=program.temp_bytes)


@jax.jit
def _finite(results: dict[str, jax.Array]) -> dict[str, jax.Array]:
    return jax.tree.map(lambda x: jnp.isfinite(x).all(), results)


def _not_finite(results: dict[str, jax.Array]) -> str | None:
    finite = _finite(results)
    names = [name for name in results if not finite[name]]
    return f"wrong result: {names[0]} is not finite" if names else None


def _minus(a: jax.Array, b: jax.Array) -> jax.Array:
    return a.astype(jnp.float32) - b.astype(jnp.float32)


def _blocks(y: jax.Array) -> jax.Array:
    """[1, T, D] in blocks of `_BLOCK` tokens, one block if they do not fill it."""
    count = y.shape[1] // _BLOCK if y.shape[1] % _BLOCK == 0 else 1
    return y.reshape(count, -1)


def _named(tree: Any) -> Iterator[tuple[str, jax.Array]]:
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        yield ".".join(path_names(path)).removesuffix(".value"), leaf


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
        "weights_gb": digits(num_bytes(layer.shapes) / 1e9),
        **found.fields,
        "floor_ms": None if floor is None else digits(floor),
        "share_of_limit": share,
    }
