"""`jaxaccel bench offload`: a stack's gradients, with layer inputs in each memory.

    jaxaccel bench offload --tokens 8192,16384,32768 --json FILE
    jaxaccel bench offload --longest tokens --json FILE
    jaxaccel bench offload --longest layers --tokens 32768 --json FILE

All modes run in one process, in turns, from the same weights. A mode is one of
`core.offload.MODES`; "MODE+graphs" compiles it with XLA's own flags, whose command
buffers (CUDA graphs) put copies in line with kernels, and "MODE+double" with
double-buffered loops. No speed is written for a mode whose gradients are not remat's.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import pathlib
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxaccel.benchmarks import results
from jaxaccel.core.offload import MODES, offload_scan
from jaxaccel.core.offload_plan import ScanSizes, compiler_options
from pallas_kernels._common.bench import digits, stamp
from pallas_kernels.attention import attention


GRADIENT_TOLERANCE = 1e-2
"""Largest relative difference of a layer's gradient from remat's, in bf16."""

DEFAULT_MODES = (
    *("remat", "policy", "ring", "save"),
    *("remat+graphs", "policy+graphs", "ring+graphs"),
)
_VARIANTS = {
    "": {},
    "graphs": {},
    "double": {"xla_gpu_enable_while_loop_double_buffering": True},
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stack:
    """Layers of a Llama-3-8B, without rotary embedding: x += mixer; x += mlp.

    Attributes:
      num_layers: L.
      tokens: T of the one row.
      d_model: D.
      d_ff: F of the gated feed-forward part.
      num_heads: query heads H.
      num_kv_heads: key and value heads G.
      head_dim: K.
      dtype: of weights and activations.
      attention: "cudnn", or an implementation of `pallas_kernels.attention`.
      group: layers that share an input, for mode "group".
    """

    num_layers: int = 24
    tokens: int = 8192
    d_model: int = 4096
    d_ff: int = 14336
    num_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    dtype: str = "bfloat16"
    attention: str = "cudnn"
    group: int = 2

    @property
    def workload(self) -> str:
        """The name of a row."""
        return (
            f"{self.num_layers} layers, d {self.d_model}, ff {self.d_ff}, "
            f"heads {self.num_heads}/{self.num_kv_heads}, T {self.tokens}"
        )

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Weights by name, layers first."""
        d, f, k = self.d_model, self.d_ff, self.head_dim
        shapes = {
            "q": (d, self.num_heads * k),
            "k": (d, self.num_kv_heads * k),
            "v": (d, self.num_kv_heads * k),
            "o": (self.num_heads * k, d),
            "gate": (d, f),
            "up": (d, f),
            "down": (f, d),
        }
        return {name: (self.num_layers, *shape) for name, shape in shapes.items()}

    @property
    def flops(self) -> float:
        """Of the value and all gradients, without what is computed again."""
        matrices = sum(a * b for _, a, b in self.shapes.values())
        pairs = self.tokens * (self.tokens + 1) / 2
        attention = 4 * pairs * self.num_heads * self.head_dim
        return 3 * self.num_layers * (2 * self.tokens * matrices + attention)

    @property
    def sizes(self) -> ScanSizes:
        """What the scan keeps."""
        one = self.tokens * self.d_model * jnp.dtype(self.dtype).itemsize
        return ScanSizes(length=self.num_layers, activation_bytes=one)

    def arguments(self) -> tuple[dict[str, jax.Array], jax.Array]:
        """Weights, of another draw in each layer, and x [T, D]."""

        @jax.jit
        def draw(key):
            keys = jax.random.split(key, len(self.shapes) + 1)
            ws = {
                name: jax.random.normal(k, shape, self.dtype) * (shape[1] ** -0.5)
                for k, (name, shape) in zip(keys, self.shapes.items(), strict=False)
            }
            shape = (self.tokens, self.d_model)
            return ws, jax.random.normal(keys[-1], shape, self.dtype)

        return draw(jax.random.key(0))

    def layer(self, w: dict[str, jax.Array], x: jax.Array, consts: Any):
        """One layer on [T, D]."""
        del consts
        h = _normalized(x)
        q = (h @ w["q"]).reshape(1, -1, self.num_heads, self.head_dim)
        k, v = (
            (h @ w[name]).reshape(1, -1, self.num_kv_heads, self.head_dim)
            for name in ("k", "v")
        )
        # Scaled by the depth, so that the last of many layers still sees the first.
        gain = (2 * self.num_layers) ** -0.5
        x = x + gain * (self._attend(q, k, v).reshape(x.shape[0], -1) @ w["o"])
        h = _normalized(x)
        return x + gain * (
            (jax.nn.silu(h @ w["gate"]) * (h @ w["up"])) @ w["down"]
        ), None

    def _attend(self, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        if self.attention == "cudnn":
            return jax.nn.dot_product_attention(
                q, k, v, is_causal=True, implementation="cudnn"
            )
        named: Any = self.attention
        return attention(q, k, v, causal=True, implementation=named)


def _normalized(x: jax.Array) -> jax.Array:
    full = x.astype(jnp.float32)
    mean = jnp.mean(jnp.square(full), axis=-1, keepdims=True)
    return (full * jax.lax.rsqrt(mean + 1e-6)).astype(x.dtype)


def split_mode(text: str) -> tuple[str, str]:
    """ "ring+graphs" -> ("ring", "graphs").

    Raises:
      ValueError: the mode or the variant is unknown.
    """
    mode, _, variant = text.partition("+")
    if mode not in MODES or variant not in _VARIANTS:
        raise ValueError(
            f"bench offload: mode {text!r} is unknown, allowed are {', '.join(MODES)}, "
            f"with +{' or +'.join(filter(None, _VARIANTS))} behind it"
        )
    return mode, variant


def gradient_function(stack: Stack, text: str) -> Any:
    """Jitted (ws, x) -> (loss f32[], gradients of ws and x) in a mode."""
    mode, variant = split_mode(text)

    def loss(ws, x):
        y, _ = offload_scan(
            stack.layer, ws, x, mode=mode, group=stack.group if mode == "group" else 1
        )
        return jnp.mean(jnp.square(y.astype(jnp.float32)))

    options = {}
    if jax.default_backend() == "gpu":
        # Without command buffers in every mode, remat too: a fair comparison.
        if variant != "graphs":
            options = compiler_options("ring", "gpu")
        options |= _VARIANTS[variant]
    return jax.jit(jax.value_and_grad(loss, argnums=(0, 1)), compiler_options=options)


@jax.jit
def fingerprint(gradients: Any) -> dict[str, jax.Array]:
    """Small numbers that tell gradients apart layer by layer.

    Args:
      gradients: tree of [L, I, J], or [I, J].

    Returns:
      "norm" and "probe", f32 by leaf: Frobenius norms, and u^T G v for eight pairs of
      vectors of random signs, which is about as large as the norm.
    """

    def probes(g):
        g = g[None] if g.ndim == 2 else g
        signs = np.random.default_rng(1)
        u, v = (signs.choice([-1.0, 1.0], (8, size)) for size in g.shape[1:])
        u, v = jnp.asarray(u, jnp.float32), jnp.asarray(v, g.dtype)
        part = jnp.einsum("lij,pj->lpi", g, v, preferred_element_type=jnp.float32)
        return jnp.sum(part * u[None], axis=-1)  # [L, probes]

    def norms(g):
        g = g[None] if g.ndim == 2 else g
        square = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)
        return jnp.sqrt(square("lij,lij->l", g, g))  # [L]

    return {
        "norm": jax.tree.map(norms, gradients),
        "probe": jax.tree.map(probes, gradients),
    }


def apart(got: dict[str, Any], want: dict[str, Any]) -> float:
    """The largest relative difference between two fingerprints, over all layers.

    A probe of a difference is about as large as its norm, so that both are measured in
    norms of the gradient that is wanted.
    """
    worst = 0.0
    leaves = zip(
        *(jax.tree.leaves(t) for t in (got["probe"], want["probe"])), strict=True
    )
    norms = zip(*(jax.tree.leaves(t) for t in (got["norm"], want["norm"])), strict=True)
    for (a, b), (m, n) in zip(leaves, norms, strict=True):
        ratio = jnp.abs(a - b) / n[:, None]
        value = float(jnp.maximum(jnp.max(ratio), jnp.max(jnp.abs(m - n) / n)))
        # `max` would drop a NaN.
        worst = value if not value <= worst else worst
    return worst


@dataclasses.dataclass(kw_only=True)
class Contender:
    """A compiled mode.

    Attributes:
      name: the mode, with its variant.
      call: (ws, x) -> (loss, gradients); `None` where it does not fit the device.
      compile_seconds: of tracing and compiling.
      device_bytes: arguments, results and temporaries on the device.
      host_bytes: temporaries in host memory.
      apart: see `apart`, from remat.
      rounds_ms: of a call, one entry a round.
      note: why there is no speed.
    """

    name: str
    call: Callable[..., Any] | None = None
    compile_seconds: float = 0.0
    device_bytes: int = 0
    host_bytes: int = 0
    apart: float | None = None
    rounds_ms: list[float] = dataclasses.field(default_factory=list)
    note: str = ""


def _is_out_of_memory(error: jax.errors.JaxRuntimeError) -> bool:
    return "RESOURCE_EXHAUSTED" in str(error) or "Out of host memory" in str(error)


def contend(stack: Stack, name: str, ws: Any, x: jax.Array) -> tuple[Contender, Any]:
    """Compiles a mode and runs it once; returns it and its fingerprint."""
    contender = Contender(name=name)
    try:
        start = time.perf_counter()
        call = gradient_function(stack, name).lower(ws, x).compile()
        contender.compile_seconds = time.perf_counter() - start
        if (memory := call.memory_analysis()) is not None:
            contender.device_bytes = (
                memory.argument_size_in_bytes
                + memory.output_size_in_bytes
                + memory.temp_size_in_bytes
            )
            contender.host_bytes = memory.host_temp_size_in_bytes
        print_of = jax.block_until_ready(fingerprint(call(ws, x)[1]))
    except jax.errors.JaxRuntimeError as error:
        if not _is_out_of_memory(error):
            raise
        contender.note = "out of memory"
        return contender, None
    contender.call = call
    return contender, print_of


def measure(
    stack: Stack,
    modes: Sequence[str],
    *,
    rounds: int,
    link: dict[str, Any] | None = None,
) -> list[dict[str, Any]]:
    """Measures modes in turns; one row each.

    Args:
      stack: the layers.
      modes: see the module; "remat", which all are compared with, comes first.
      rounds: turns of each mode; the first warms up and is not counted.
      link: figures of the bus for the rows, see `link_speed`.

    Raises:
      ValueError: a mode is unknown, or the first one is not "remat".
    """
    if not modes or modes[0] != "remat":
        raise ValueError(f"bench offload: modes {list(modes)} must begin with 'remat'")
    for name in modes:
        split_mode(name)
    ws, x = stack.arguments()
    contenders, expected, first = [], None, ""
    for name in modes:
        contender, prints = contend(stack, name, ws, x)
        if expected is None and prints is not None:
            expected, first = prints, name
        if prints is not None and expected is not None:
            contender.apart = apart(prints, expected)
            if first != "remat":
                contender.note = f"remat did not fit: gradients compared with {first}"
        contenders.append(contender)
    for _ in range(rounds):
        for contender in contenders:
            _run_round(contender, ws, x)
    return [_row(stack, c, contenders[0], link or {}) for c in contenders]


def _run_round(contender: Contender, ws: Any, x: jax.Array) -> None:
    """Times one call; a mode that runs out of memory is out."""
    if contender.call is None:
        return
    try:
        start = time.perf_counter()
        # The gradients, as large as the weights, are gone before the next mode's turn.
        jax.block_until_ready(contender.call(ws, x))
        contender.rounds_ms.append(1e3 * (time.perf_counter() - start))
    except jax.errors.JaxRuntimeError as error:
        if not _is_out_of_memory(error):
            raise
        contender.call, contender.note = None, "out of memory after the first call"


def _row(
    stack: Stack, contender: Contender, remat: Contender, link: dict[str, Any]
) -> dict[str, Any]:
    difference, timed = contender.apart, contender.rounds_ms[1:]
    agrees = difference is not None and difference <= GRADIENT_TOLERANCE
    note = contender.note
    if difference is not None and not agrees:
        note = f"gradients differ by {difference:.1e}: no speed"
    ms = statistics.median(timed) if timed and agrees else None
    pairs = zip(timed, remat.rounds_ms[1:], strict=False)
    ratios = [a / b for a, b in pairs] if ms else []
    mode, _ = split_mode(contender.name)
    planned = stack.sizes.host_bytes(mode, stack.group if mode == "group" else 1)
    return {
        "op": "offload",
        "workload": stack.workload,
        "implementation": contender.name,
        "dtype": stack.dtype,
        "ms": digits(ms, 5) if ms else None,
        "tokens_per_s": digits(stack.tokens / ms * 1e3) if ms else None,
        "tflops": digits(stack.flops / ms / 1e9) if ms else None,
        "ratio": digits(statistics.median(ratios), 5) if ratios else None,
        "rounds_ms": [digits(t, 5) for t in timed],
        "device_gib": digits(contender.device_bytes / 2**30, 5),
        "host_gib": digits(contender.host_bytes / 2**30, 5),
        "planned_host_gib": digits(planned / 2**30, 5),
        "gradients_apart": None if difference is None else digits(difference, 2),
        "attention": stack.attention,
        "compile_s": digits(contender.compile_seconds),
        "note": note,
        **link,
    }


def link_speed(num_bytes: int, repeats: int = 5) -> dict[str, float]:
    """Copies between pinned host memory and the device within a jit, in GB/s."""
    device = jax.local_devices()[0]
    on_device = jnp.zeros((num_bytes // 2,), jnp.bfloat16)

    def sharding(kind: str):
        return jax.sharding.SingleDeviceSharding(device, memory_kind=kind)

    def seconds(source: jax.Array, space: jax.memory.Space, kind: str) -> float:
        copy = jax.jit(lambda a: jax.device_put(a, space), out_shardings=sharding(kind))
        jax.block_until_ready(copy(source))
        times = []
        for _ in range(repeats):
            start = time.perf_counter()
            jax.block_until_ready(copy(source))
            times.append(time.perf_counter() - start)
        return min(times)

    on_host = jax.device_put(on_device, sharding("pinned_host"))
    to_host = seconds(on_device, jax.memory.Space.Host, "pinned_host")
    to_device = seconds(on_host, jax.memory.Space.Device, "device")
    return {
        "to_host_gbps": digits(num_bytes / to_host / 1e9),
        "to_device_gbps": digits(num_bytes / to_device / 1e9),
    }


def largest(fits: Callable[[int], bool], first: int, step: int, most: int) -> int:
    """The largest multiple of a step that fits, 0 for none.

    Args:
      fits: must be monotone.
      first: where to begin, rounded down to a multiple.
      step: the granularity.
      most: never tried beyond.

    Returns:
      The largest that fits, and of which the next one does not, or is beyond `most`.
    """
    low, high, end = 0, None, most // step  # in steps: low fits, high does not
    probe = min(max(first // step, 1), end)
    while True:
        if fits(probe * step):
            low = probe
        else:
            high = probe
        if low == end or (high is not None and high - low <= 1):
            return low * step
        probe = min(2 * low, end) if high is None else (low + high) // 2


def longest(
    stack: Stack, modes: Sequence[str], axis: str, *, step: int, most: int
) -> list[dict[str, Any]]:
    """The longest sequence, or the deepest stack, whose gradients one device takes.

    Every candidate is compiled and run, weights and gradients on the device.

    Args:
      stack: where the search begins.
      modes: see the module.
      axis: "tokens" or "layers".
      step: the granularity.
      most: the search ends there.

    Returns:
      One row a mode: the largest size, its time and memory.
    """

    def sized(size: int) -> Stack:
        if axis == "tokens":
            return dataclasses.replace(stack, tokens=size)
        return dataclasses.replace(stack, num_layers=size)

    rows, first = [], stack.tokens if axis == "tokens" else stack.num_layers
    for name in modes:
        split_mode(name)
        best: dict[int, tuple[float, Contender]] = {}

        def fits(size: int, name=name, best=best) -> bool:
            found = _try(sized(size), name)
            if found is not None:
                best[size] = found
            return found is not None

        size = largest(fits, first, step, most)
        first = size or first
        ms, contender = best.get(size, (None, Contender(name=name)))
        rows.append(
            {
                "op": "offload_longest",
                "workload": f"most {axis}: {stack.workload}",
                "implementation": name,
                "dtype": stack.dtype,
                axis: size,
                "ms": digits(ms, 5) if ms else None,
                "tokens_per_s": digits(sized(size).tokens / ms * 1e3) if ms else None,
                "device_gib": digits(contender.device_bytes / 2**30, 5),
                "host_gib": digits(contender.host_bytes / 2**30, 5),
                "attention": stack.attention,
                "step": step,
                "note": f"the end of the search, {most}" if size == most else "",
            }
        )
    return rows


def _try(stack: Stack, name: str) -> tuple[float, Contender] | None:
    """Milliseconds of one warm call; `None` where memory does not suffice."""
    try:
        ws, x = stack.arguments()
        contender, prints = contend(stack, name, ws, x)
        if contender.call is None or prints is None:
            return None
        start = time.perf_counter()
        jax.block_until_ready(contender.call(ws, x))
        return 1e3 * (time.perf_counter() - start), contender
    except jax.errors.JaxRuntimeError as error:
        if not _is_out_of_memory(error):
            raise
        return None


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="jaxaccel bench offload",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    defaults = Stack()
    parser.add_argument(
        "--tokens", default=str(defaults.tokens), help="separated by commas"
    )
    for name in ("num_layers", "d_model", "d_ff", "num_heads", "num_kv_heads"):
        parser.add_argument(f"--{name}", type=int, default=getattr(defaults, name))
    parser.add_argument("--head_dim", type=int, default=defaults.head_dim)
    parser.add_argument("--dtype", default=defaults.dtype)
    parser.add_argument("--group", type=int, default=defaults.group)
    parser.add_argument(
        "--attention",
        default="cudnn" if jax.default_backend() == "gpu" else "xla",
        help='"cudnn", or an implementation of pallas_kernels.attention',
    )
    parser.add_argument("--modes", help="separated by commas, remat first")
    parser.add_argument("--rounds", type=int, default=8, help="one to warm up")
    parser.add_argument(
        "--longest", choices=("tokens", "layers"), help="search for the most of these"
    )
    parser.add_argument("--step", type=int, help="granularity of the search")
    parser.add_argument("--most", type=int, help="where the search ends")
    parser.add_argument("--commit", help="of the code, where git cannot say")
    parser.add_argument(
        "--json", type=pathlib.Path, required=True, help="where the rows go"
    )
    return parser


def main(argv: list[str]) -> int:
    """The command line; exit status 1 if a mode's gradients are not remat's."""
    options = _parser().parse_args(argv)
    fields = [
        field.name for field in dataclasses.fields(Stack) if field.name != "tokens"
    ]
    chosen = {name: getattr(options, name) for name in fields}
    stacks = [Stack(tokens=int(t), **chosen) for t in options.tokens.split(",")]
    about, rows = stamp(options.commit), []
    on_gpu = jax.default_backend() == "gpu"
    link = link_speed(2**29) if on_gpu else {}
    for stack in stacks:
        if options.longest:
            is_tokens = options.longest == "tokens"
            modes = (options.modes or "save,remat,ring").split(",")
            found = longest(
                stack,
                modes,
                options.longest,
                step=options.step or (4096 if is_tokens else 4),
                most=options.most or (2**19 if is_tokens else 256),
            )
        else:
            modes = (options.modes or ",".join(DEFAULT_MODES)).split(",")
            found = measure(stack, modes, rounds=options.rounds, link=link)
        for row in found:
            print(row, flush=True)
        # After each workload: a later one may not fit.
        rows += [{**row, **about} for row in found]
        results.write(options.json, rows)
    return 1 if any("differ" in row["note"] for row in rows) else 0
