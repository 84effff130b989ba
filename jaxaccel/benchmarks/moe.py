"""`jaxaccel bench moe`: experts by loop, by one-hot tables and by one sort.

    jaxaccel bench moe --json FILE
    jaxaccel bench moe --parts dispatch --experts 32,128,512 --json FILE
    jaxaccel bench moe --parts layer,kept --gin_file PRESET --json FILE

"dispatch": the routed experts alone, of the same work a token and more and more experts
(`benchmarks.moe_rivals`). "layer": whole layers of models (`MoEBenchConfig`), with the
time of what is no matrix product of theirs, and beside it the time that their products
would take at the rate at which this card multiplies large dense matrices in the same
run. "kept": the bytes that a compiled step keeps of each layer for its backward pass,
nothing is run. No speed is written for a wrong result.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import pathlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxaccel.benchmarks import moe_rivals, results
from jaxaccel.benchmarks.moe_rivals import Sizes
from jaxaccel.config.gin_utils import load_config
from jaxaccel.config.moe import MoEBenchConfig
from jaxaccel.data.batch import packing_metadata
from jaxaccel.nn.moe import MoE
from pallas_kernels._common import timing
from pallas_kernels._common.bench import ROOT, Ceilings, ceilings, digits, stamp
from pallas_kernels.grouped_matmul import grouped_matmul
from pallas_kernels.sort_dispatch import (
    row_weights,
    slot_values,
    sort_dispatch,
)


DIRECTIONS = ("fwd", "fwd+bwd")
PARTS = ("dispatch", "layer", "kept")
_IMPLEMENTATIONS = ("mosaic", "xla", "reference")
PRESETS = ("nemotron3_super", "qwen3_next", "nemotron3_nano", "gpt_oss_20b_layer")


@dataclasses.dataclass(frozen=True)
class Measured:
    """A program's time and memory; `ms` is `None` where it has no speed."""

    ms: float | None = None
    timer: str = ""
    temp_bytes: int = 0
    note: str = ""

    @property
    def fields(self) -> dict[str, Any]:
        """Of a row."""
        return {
            "ms": None if self.ms is None else digits(self.ms),
            "timer": self.timer,
            "temp_gib": digits(self.temp_bytes / 2**30),
            "note": self.note,
        }


def measure(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    check: Callable[[Any], str | None] | None = None,
) -> Measured:
    """Compiles, checks and times a function.

    Args:
      fn: to be jitted.
      args: what to call it with.
      check: its result -> what is wrong with it.

    Returns:
      Its time on the device, warm; or why it has none.
    """
    try:
        with timing.together():
            call = jax.jit(fn).lower(*args).compile()
            fault = None if check is None else check(call(*args))
        memory = call.memory_analysis()
        temp = 0 if memory is None else memory.temp_size_in_bytes
        if fault is not None:
            return Measured(temp_bytes=temp, note=f"wrong result: {fault}")
        with timing.alone():
            time = timing.measure(call, args, cold=False)[0]
    except NotImplementedError as error:
        return Measured(note=f"not available: {error}")
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return Measured(note="out of memory")
    return Measured(ms=time.ms, timer=time.timer, temp_bytes=temp)


def dispatch_rows(
    sizes: Sizes, implementations: Sequence[str], directions: Sequence[str]
) -> Iterator[dict[str, Any]]:
    """Measures all rivals at one size; one row a rival and direction.

    Args:
      sizes: the workload.
      implementations: of `grouped_matmul` for "sort"; the first is what `ratio`
        compares with, a rival's time over it.
      directions: of `DIRECTIONS`.
    """
    args = sizes.arguments()
    want = moe_rivals.expected(sizes, args)
    capacity = moe_rivals.capacity_of(sizes, args[2])
    rivals = {f"sort {i}": moe_rivals.sort(sizes, i) for i in implementations}
    rivals["one_hot"] = moe_rivals.one_hot(sizes, capacity)
    rivals["loop"] = moe_rivals.loop(sizes)
    if moe_rivals.has_visits(sizes) and "mosaic" in implementations:
        rivals["visits"] = moe_rivals.visits(sizes, "mosaic")
    for direction in directions:
        backward = direction != "fwd"
        wrap = moe_rivals.with_gradients if backward else moe_rivals.only_forward
        first: float | None = None
        for name, rival in rivals.items():
            if backward and name == "visits":
                continue
            is_own = name.startswith("sort")
            slack = 1.0 if is_own else moe_rivals.RIVAL_SLACK
            check = functools.partial(moe_rivals.wrong, want=want, slack=slack)
            found = measure(wrap(rival), args, check)
            first = found.ms if first is None and is_own else first
            flops = sizes.flops * (3 if backward else 1)
            ratio = found.ms / first if found.ms and first else None
            yield {
                "op": "moe_dispatch",
                "workload": f"{sizes.workload} {direction}",
                "implementation": name,
                "dtype": sizes.dtype,
                **found.fields,
                "experts": sizes.experts,
                "tflops": digits(flops / found.ms / 1e9) if found.ms else None,
                "ratio": None if ratio is None else digits(ratio),
                "capacity": capacity if name == "one_hot" else None,
            }


@dataclasses.dataclass(frozen=True)
class Layer:
    """A built layer and what goes into it.

    Attributes:
      config: its sizes.
      graphdef, params, rest: of the module.
      x, dy: [1, T, D].
    """

    config: MoEBenchConfig
    graphdef: Any
    params: Any
    rest: Any
    x: jax.Array
    dy: jax.Array

    @classmethod
    def build(
        cls, config: MoEBenchConfig, implementation: str, dispatch: str = "xla"
    ) -> Layer:
        """Draws parameters and input in one call."""
        dtype = jnp.dtype(config.dtype)

        def make(key: jax.Array) -> MoE:
            return MoE(
                config.moe,
                config.d_model,
                dtype=dtype,
                param_dtype=dtype,
                implementation=(
                    ("grouped_matmul", implementation),
                    ("sort_dispatch", dispatch),
                ),
                rngs=nnx.Rngs(key),
            )

        @jax.jit
        def draw(key):
            keys = jax.random.split(key, 3)
            _, params, rest = nnx.split(make(keys[0]), nnx.Param, ...)
            shape = (1, config.tokens, config.d_model)
            x, dy = (jax.random.normal(k, shape, dtype) for k in keys[1:])
            return params, rest, x, dy

        graphdef, _ = nnx.split(nnx.eval_shape(lambda: make(jax.random.key(0))))
        return cls(config, graphdef, *draw(jax.random.key(0)))

    def module(self, params: Any, rest: Any) -> MoE:
        return nnx.merge(self.graphdef, params, rest)

    def forward(self, params, rest, x):
        """(y, auxiliary losses)."""
        meta = packing_metadata(x.shape[:2])
        y, aux = self.module(params, rest)(x, meta)
        return y, aux.balance_loss + aux.z_loss

    def backward(self, params, rest, x, dy):
        """The gradients of parameters and x."""
        outputs, pull = jax.vjp(lambda p, x: self.forward(p, rest, x), params, x)
        return pull((dy, jnp.ones_like(outputs[1])))

    def run(self, direction: str) -> Measured:
        """The whole layer."""
        if direction == "fwd":
            return measure(self.forward, (self.params, self.rest, self.x))
        return measure(self.backward, (self.params, self.rest, self.x, self.dy))

    def parts(self, direction: str) -> dict[str, Measured]:
        """What is no large matrix product, each alone, and the grouped products.

        The parts of "fwd+bwd" are all that a forward and a backward pass do.
        """
        backward, moe = direction != "fwd", self.config.moe
        layer = self.module(self.params, self.rest)
        ops, (router, state) = layer.ops, nnx.split(layer.router)

        def route(state, x):
            routing = nnx.merge(router, state)(x)
            return routing.weights, routing.expert_ids

        def route_back(state, x):
            (weights, ids), pull = jax.vjp(route, state, x)
            zeros = jax.tree.map(lambda a: jnp.zeros(a.shape, jax.dtypes.float0), ids)
            return weights, ids, pull((weights, zeros))

        weights, ids = jax.jit(route)(state, self.x)
        weights, ids = (a.reshape(-1, moe.top_k) for a in (weights, ids))
        make_plan = functools.partial(
            sort_dispatch, num_experts=moe.num_experts, implementation=ops.dispatch
        )
        plan = jax.jit(make_plan)(ids)
        h = self.x.reshape(-1, self.config.d_model)[:, : self.config.d_expert]
        rows = jax.jit(ops.permute)(h, plan)

        def permute_all(h, plan, weights):
            if not backward:
                return ops.permute(h, plan)
            # Once for h, once again for it, once for the cotangent; sums for dh.
            y, pull = jax.vjp(lambda h: ops.permute(h, plan), h)
            all_rows = y, ops.permute(h + h, plan), ops.permute(-h, plan), pull(y)
            if ops.scales_hidden(h.shape[1], moe.d_ff):
                return all_rows
            return *all_rows, ops.spread(h, plan, weights)

        def combine_all(rows, plan, weights):
            y = ops.combine(rows, plan, weights)
            if not backward:
                return y
            by_row = row_weights(plan, weights)
            return y, by_row, slot_values(plan, by_row)

        return {
            "router": measure(route_back if backward else route, (state, self.x)),
            "plan": measure(make_plan, (ids,)),
            "permute": measure(permute_all, (h, plan, weights)),
            "combine": measure(combine_all, (rows, plan, weights)),
            "experts": self._experts(rows, plan.group_sizes, backward),
        }

    def _experts(self, rows, sizes, backward: bool) -> Measured:
        """The grouped products and the activation between them."""
        layer = self.module(self.params, self.rest)
        ops, w_in, w_out = layer.ops, layer.w_in[...], layer.w_out[...]

        def products(rows, w_in, w_out):
            hidden = grouped_matmul(
                rows,
                w_in,
                sizes,
                activation=ops.fused,
                implementation=ops.matmul,
            )
            return ops.product(hidden, w_out, sizes)

        def both(rows, w_in, w_out):
            y, pull = jax.vjp(products, rows, w_in, w_out)
            return pull(y)

        return measure(both if backward else products, (rows, w_in, w_out))


def routed_sizes(config: MoEBenchConfig) -> Sizes:
    """The routed experts of a layer."""
    return Sizes(
        tokens=config.tokens,
        slots=config.moe.top_k,
        experts=config.moe.num_experts,
        width=config.d_expert,
        d_ff=config.moe.d_ff,
        activation=config.moe.activation,
        swiglu_limit=config.moe.swiglu_limit,
        use_bias=config.moe.use_bias,
        dtype=config.dtype,
    )


def routed_check(
    config: MoEBenchConfig, implementation: str, dispatch: str = "xla"
) -> str | None:
    """What is wrong with the routed experts at a layer's sizes, `None` if nothing."""
    sizes = routed_sizes(config)
    args = sizes.arguments()
    run = moe_rivals.with_gradients(moe_rivals.sort(sizes, implementation, dispatch))
    got = jax.jit(run)(*args)
    return moe_rivals.wrong(got, moe_rivals.expected(sizes, args))


def kept_row(
    config: MoEBenchConfig, name: str, implementation: str, dispatch: str = "xla"
) -> dict[str, Any]:
    """Bytes that a compiled step keeps of a layer; nothing is run.

    Args:
      config: the layer.
      name: of the model.
      implementation: of `grouped_matmul`.
      dispatch: of `sort_dispatch`.

    Returns:
      A row. "kept_gib" is what a step over six layers of the same experts has more in
      temporaries than one over two, for each layer; "expected_gib" the tokens, what is
      kept of the activation and the plan, and "ratio" the first over the second.
    """
    sizes = routed_sizes(config)
    h, weights, ids, *experts, _ = jax.eval_shape(sizes.arguments)
    run = moe_rivals.sort(sizes, implementation, dispatch)

    def step(h, weights, ids, *experts):
        def loss(h, weights, experts):
            def layer(h, own):
                return h + run(h, *own, *experts), None

            h, _ = jax.lax.scan(layer, h, (weights, ids))
            return jnp.sum(h.astype(jnp.float32))

        # Without those of the experts, h need not be kept.
        return jax.grad(loss, argnums=(0, 1, 2))(h, weights, experts)

    def temporaries(layers: int) -> int:
        stacked = (
            jax.ShapeDtypeStruct((layers, *a.shape), a.dtype) for a in (weights, ids)
        )
        memory = jax.jit(step).lower(h, *stacked, *experts).compile().memory_analysis()
        return 0 if memory is None else memory.temp_size_in_bytes

    rows = sizes.tokens * sizes.slots
    hidden = sizes.d_ff * (2 if sizes.activation == "swiglu" else 1)
    item = jnp.dtype(sizes.dtype).itemsize
    expected = item * (sizes.tokens * sizes.width + rows * hidden)
    expected += 4 * (2 * rows + sizes.experts)
    about = {
        "op": "moe_kept",
        "workload": f"{name} T{config.tokens}",
        "implementation": implementation,
        "dispatch": dispatch,
        "dtype": config.dtype,
        "ms": None,
        "expected_gib": digits(expected / 2**30),
    }
    try:
        kept = (temporaries(6) - temporaries(2)) / 4
    except NotImplementedError as error:
        return {**about, "note": f"not available: {error}"}
    return {
        **about,
        "kept_gib": digits(kept / 2**30),
        "ratio": digits(kept / expected),
        "note": "",
    }


def layer_rows(
    config: MoEBenchConfig,
    name: str,
    limits: Ceilings,
    implementations: Sequence[str],
    directions: Sequence[str],
    dispatches: Sequence[str] = ("xla",),
) -> Iterator[dict[str, Any]]:
    """Measures whole layers; one row an implementation, dispatch and direction.

    Args:
      config: the layer.
      name: of the model.
      limits: of this run; its rate is what the products alone are told at.
      implementations: of `grouped_matmul`.
      directions: of `DIRECTIONS`.
      dispatches: implementations of `sort_dispatch`.

    Yields:
      Rows. `overhead_ms` is of router, plan, permute and combine; `share` is its part
      of the layer's time, `share_of_experts` its ratio to the grouped products';
      `gemm_ms` is the layer's products at the dense rate, `ratio` the layer's time over
      that.
    """
    for implementation, dispatch in itertools.product(implementations, dispatches):
        try:
            fault = routed_check(config, implementation, dispatch)
        except NotImplementedError as error:
            fault = f"not available: {error}"
        layer = None if fault else Layer.build(config, implementation, dispatch)
        for direction in directions:
            found = Measured(note=f"no speed: {fault}")
            parts: dict[str, Measured] = {}
            if layer is not None:
                found, parts = layer.run(direction), layer.parts(direction)
            yield {
                "op": "moe_layer",
                "workload": f"{name} T{config.tokens} {direction}",
                "implementation": implementation,
                "dispatch": dispatch,
                "dtype": config.dtype,
                **found.fields,
                **_accounts(config, found, parts, limits, direction),
            }


def _accounts(
    config: MoEBenchConfig,
    found: Measured,
    parts: dict[str, Measured],
    limits: Ceilings,
    direction: str,
) -> dict[str, Any]:
    """Where a layer's time goes; see `layer_rows`."""
    flops = config.routed_flops + config.other_flops
    flops *= 1 if direction == "fwd" else 3
    gemm_ms = flops / limits.tflops / 1e9 if limits.tflops else None
    times = {name: part.ms for name, part in parts.items()}
    experts = times.pop("experts", None)
    overhead = None
    if times and None not in times.values():
        overhead = sum(ms for ms in times.values() if ms is not None)

    def ratio(a: float | None, b: float | None) -> float | None:
        return digits(a / b) if a and b else None

    return {
        "parts_ms": {n: None if ms is None else digits(ms) for n, ms in times.items()},
        "experts_ms": None if experts is None else digits(experts),
        "overhead_ms": None if overhead is None else digits(overhead),
        "share": ratio(overhead, found.ms),
        "share_of_experts": ratio(overhead, experts),
        "gemm_ms": None if gemm_ms is None else digits(gemm_ms),
        "ratio": ratio(found.ms, gemm_ms),
        "tflops": None if not found.ms else digits(flops / found.ms / 1e9),
        "dense_tflops": digits(limits.tflops),
    }


def preset_files() -> list[pathlib.Path]:
    """The committed layers."""
    return [ROOT / "experiments" / "moe" / f"{name}.gin" for name in PRESETS]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="jaxaccel bench moe",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    on_gpu = jax.default_backend() == "gpu"
    parser.add_argument("--parts", default="dispatch,layer", help=",".join(PARTS))
    parser.add_argument("--experts", default="32,128,512", help="of part dispatch")
    for name, value in (
        ("tokens", 8192),
        ("top_k", 8),
        ("d_model", 2048),
        ("d_ff", 768),
    ):
        parser.add_argument(f"--{name}", type=int, default=value, help="likewise")
    parser.add_argument("--activation", default="swiglu", help="likewise")
    parser.add_argument("--dtype", default="bfloat16", help="likewise")
    parser.add_argument(
        "--gin_file",
        action="append",
        type=pathlib.Path,
        help="of part layer, may be given repeatedly; experiments/moe by default",
    )
    parser.add_argument(
        "--implementations",
        default="mosaic,xla" if on_gpu else "xla",
        help="of grouped_matmul, separated by commas",
    )
    parser.add_argument(
        "--dispatch",
        default="xla",
        help="of sort_dispatch, separated by commas; of parts layer and kept",
    )
    parser.add_argument("--directions", default=",".join(DIRECTIONS))
    parser.add_argument("--commit", help="of the code, where git cannot say")
    parser.add_argument(
        "--json", type=pathlib.Path, required=True, help="where the rows go"
    )
    parser.add_argument(
        "--append", action="store_true", help="behind the rows that are there"
    )
    return parser


def _listed(text: str, allowed: Sequence[str], option: str) -> list[str]:
    names = [name for name in text.split(",") if name]
    for name in names:
        if name not in allowed:
            raise ValueError(
                f"bench moe: {option} {name!r} is unknown, allowed are "
                f"{', '.join(allowed)}"
            )
    return names


def _rows(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    parts = _listed(options.parts, PARTS, "--parts")
    directions = _listed(options.directions, DIRECTIONS, "--directions")
    implementations = _listed(
        options.implementations, _IMPLEMENTATIONS, "--implementations"
    )
    dispatches = _listed(options.dispatch, _IMPLEMENTATIONS, "--dispatch")
    configs = {
        path.stem: load_config("MoEBenchConfig", [path])
        for path in options.gin_file or preset_files()
    }
    if "dispatch" in parts:
        for experts in options.experts.split(","):
            sizes = Sizes(
                tokens=options.tokens,
                slots=options.top_k,
                experts=int(experts),
                width=options.d_model,
                d_ff=options.d_ff,
                activation=options.activation,
                dtype=options.dtype,
            )
            yield from dispatch_rows(sizes, implementations, directions)
    if "kept" in parts:
        for name, config in configs.items():
            for pair in itertools.product(implementations, dispatches):
                yield kept_row(config, name, *pair)
    if "layer" in parts:
        limits = ceilings()
        for name, config in configs.items():
            yield from layer_rows(
                config, name, limits, implementations, directions, dispatches
            )


def main(argv: list[str]) -> int:
    """The command line; exit status 1 if a result was wrong."""
    options = _parser().parse_args(argv)
    about, rows = stamp(options.commit), []
    if options.append:
        rows = results.read(options.json)
    for row in _rows(options):
        print(row, flush=True)
        rows.append({**row, **about})
        # After each row: a later one may not fit.
        results.write(options.json, rows)
    return 1 if any("wrong" in row["note"] for row in rows) else 0
