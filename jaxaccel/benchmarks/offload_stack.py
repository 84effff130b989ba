"""The stack of `jaxaccel bench offload`, and its gradients in a mode."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxaccel.core.offload import MODES, offload_scan
from jaxaccel.core.offload_plan import ScanSizes, compiler_options
from pallas_kernels.attention import attention


PROBES = 64
"""Of a difference of gradients: the norm in a layer is then known to about a tenth, if
the difference has many directions. The largest of all layers reads somewhat high."""

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
    attention: str = "mosaic"
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
      "norm" and "probe", f32 by leaf: Frobenius norms, and u^T G v for `PROBES` pairs
      of vectors of random signs, whose mean square is the norm's square.
    """

    def probes(g):
        g = g[None] if g.ndim == 2 else g
        signs = np.random.default_rng(1)
        u, v = (signs.choice([-1.0, 1.0], (PROBES, size)) for size in g.shape[1:])
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

    The norm of a layer's difference, estimated from its probes, or the difference of
    norms, in norms of the gradient that is wanted.
    """
    found = []
    leaves = zip(
        *(jax.tree.leaves(t) for t in (got["probe"], want["probe"])), strict=True
    )
    norms = zip(*(jax.tree.leaves(t) for t in (got["norm"], want["norm"])), strict=True)
    for (a, b), (m, n) in zip(leaves, norms, strict=True):
        difference = jnp.sqrt(jnp.mean(jnp.square(a - b), axis=1))
        found.append(jnp.max(jnp.maximum(difference, jnp.abs(m - n)) / n))
    return float(np.max(found))  # Python's `max` would drop a NaN


@dataclasses.dataclass(kw_only=True)
class Contender:
    """A compiled mode.

    Attributes:
      name: the mode, with its variant.
      call: (ws, x) -> (loss, gradients); `None` where it does not fit the device.
      compile_seconds: of tracing and compiling, beside other modes.
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


def is_out_of_memory(error: jax.errors.JaxRuntimeError) -> bool:
    return "RESOURCE_EXHAUSTED" in str(error) or "Out of host memory" in str(error)


def device_bytes(memory: Any) -> int:
    """Arguments, results and temporaries, of what `memory_analysis` returns."""
    return (
        memory.argument_size_in_bytes
        + memory.output_size_in_bytes
        + memory.temp_size_in_bytes
    )


def bytes_limit() -> int | None:
    """Bytes of the device that JAX may take, `None` where it does not say."""
    return (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit")


def compiled(stack: Stack, name: str) -> Contender:
    """Compiles a mode, without a call: `note` says if the device has no room for it."""
    contender, start = Contender(name=name), time.perf_counter()
    arguments = jax.eval_shape(stack.arguments)
    try:
        call = gradient_function(stack, name).lower(*arguments).compile()
    except jax.errors.JaxRuntimeError as error:
        if not is_out_of_memory(error):
            raise
        contender.note = "out of memory"
        return contender
    contender.compile_seconds = time.perf_counter() - start
    if (memory := call.memory_analysis()) is not None:
        contender.device_bytes = device_bytes(memory)
        contender.host_bytes = memory.host_temp_size_in_bytes
    if contender.device_bytes > (bytes_limit() or contender.device_bytes):
        contender.note = "out of memory"
    else:
        contender.call = call
    return contender


def compiled_together(stack: Stack, names: Sequence[str]) -> list[Contender]:
    """Compiles modes side by side."""
    with concurrent.futures.ThreadPoolExecutor(len(names)) as pool:
        return list(pool.map(lambda name: compiled(stack, name), names))


def first_call(contender: Contender, ws: Any, x: jax.Array) -> Any:
    """The fingerprint of a mode's gradients; `None` for a mode that does not fit."""
    if contender.call is None:
        return None
    try:
        _, gradients = jax.block_until_ready(contender.call(ws, x))
        return jax.block_until_ready(fingerprint(gradients))
    except jax.errors.JaxRuntimeError as error:
        if not is_out_of_memory(error):
            raise
        contender.call, contender.note = None, "out of memory"
        return None
