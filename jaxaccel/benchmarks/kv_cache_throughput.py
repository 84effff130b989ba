"""Decoding with a stack of layers over long contexts, one row a cache and batch.

A step reads one token a row through all layers; the cache is filled beforehand, see
`kv_cache_fill`. Beside the time stands the least that the step's bytes could take: at
the copy bandwidth that the same run measures, and, of values in the host's memory, at
the speed of a copy from there; the larger of both. A cache that does not read what it
would read without the kernels that it names has no time; see `kv_cache_check`.
"""

from __future__ import annotations

import dataclasses
import statistics
import time as clock
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxaccel.benchmarks.guards import KernelMissing, implementations_used
from jaxaccel.benchmarks.kv_cache_check import (
    WrongResult,
    compare_step,
    require_named,
)
from jaxaccel.benchmarks.kv_cache_fill import fill
from jaxaccel.cache.decoder import DecoderCache
from jaxaccel.cache.full import DenseCacheConfig
from jaxaccel.cache.host_values import check_host_budget
from jaxaccel.cache.plan import PolicyCache
from jaxaccel.cache.policy import CachePolicy
from jaxaccel.cache.quest import QuestCacheConfig
from jaxaccel.cache.shadowkv import ShadowKVCacheConfig
from jaxaccel.config.kv_cache import KVCacheBenchConfig
from jaxaccel.decoding.layer_loop import read_tokens
from jaxaccel.models.decoder import init_decoder
from pallas_kernels._common.bench import Ceilings, ceilings, digits
from pallas_kernels._common.dispatch import recorded_choices


_TIMES = ("ms", "tokens_per_s", "share_of_floor", "calls_ms", "hit_rate", "floor_ms")
"""What a row holds `None` of until it is measured."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Traffic:
    """Bytes that a step must move, at the least.

    Attributes:
      weights: of all layers.
      cache: read of the caches of all layers and rows on the device.
      link: fetched from the host's memory.
    """

    weights: int
    cache: int
    link: int


def chosen(config: KVCacheBenchConfig, names: Sequence[str]) -> KVCacheBenchConfig:
    """The config with some of its methods only.

    Raises:
      ValueError: one is unknown.
    """
    for name in names:
        if name not in config.methods:
            raise ValueError(
                f"method {name!r} is unknown, allowed are {', '.join(config.methods)}"
            )
    return dataclasses.replace(
        config,
        methods={name: config.methods[name] for name in names},
        batches={name: config.batches[name] for name in names},
    )


def cache_traffic(policy: CachePolicy, cache: PolicyCache, context: int) -> int:
    """Bytes that a step reads of the caches of all layers, whatever it fetches.

    Keys and values of the tokens that are attended to, and what they are chosen by.

    Raises:
      NotImplementedError: the policy is none of dense, Quest and ShadowKV.
    """
    state: Any = cache.states[0]
    if isinstance(policy, DenseCacheConfig):
        per_token = 2 * _row_bytes(state.k)
        return per_token * context
    if isinstance(policy, QuestCacheConfig):
        tokens = min(policy.budget, context) + policy.local_window
        pages = -(-context // policy.page)
        return 2 * _row_bytes(state.k) * tokens + 2 * _row_bytes(state.low) * pages
    if isinstance(policy, ShadowKVCacheConfig):
        count = state.ids.shape[-1]
        values = _row_bytes(state.values) * count
        # A head reads rows of its own of the factors, which all heads share.
        factors = state.a.shape[:2] + state.values.shape[2:3]
        width = policy.chunk * state.a.shape[-1] * state.a.dtype.itemsize
        factors = int(np.prod(factors)) * width * count
        landmarks = _row_bytes(state.landmark) * (context // policy.chunk)
        exact = 2 * (state.out_k.nbytes + state.ring_k.nbytes)
        return values + factors + landmarks + exact + state.basis.nbytes
    raise NotImplementedError(f"{type(policy).__name__}: its bytes are not known here")


def _row_bytes(array: jax.Array) -> int:
    """Bytes of one place of [layers, B, G, places, K], over everything else."""
    return array.nbytes // array.shape[3]


class _Stack:
    """The layers with random weights, and compiled programs that decode with them."""

    def __init__(self, config: KVCacheBenchConfig):
        self.config = config
        decoder = config.model.decoder()
        model = init_decoder(decoder, config.seed)
        self.graphdef, self.state = nnx.split(model)
        self.spec = model.layers[0].mixer.cache_spec
        self.decoder = decoder
        table = nnx.split(model.embed)[1]
        self.weight_bytes = _nbytes(self.state) - _nbytes(table)
        if not decoder.tie_embeddings:
            self.weight_bytes -= _nbytes(nnx.split(model.lm_head)[1])

    def program(self, cache: DecoderCache, tokens: jax.Array, key: jax.Array) -> Any:
        """Compiles a call: (state, cache, tokens, key) -> (cache, tokens, sum)."""
        config, vocab = self.config, self.decoder.vocab_size

        def run(state, cache, tokens, key):
            model: Any = nnx.merge(self.graphdef, state)
            ones = jnp.ones((tokens.shape[0], 1), jnp.int32)

            def step(i, carry):
                cache, tokens, total = carry
                hidden, cache = read_tokens(model, tokens[:, None], ones, cache)
                stay, other = jax.random.split(jax.random.fold_in(key, i))
                again = jax.random.bernoulli(stay, config.repeat, tokens.shape)
                fresh = jax.random.randint(other, tokens.shape, 0, vocab)
                total = total + jnp.sum(hidden.astype(jnp.float32))
                return cache, jnp.where(again, tokens, fresh), total

            zero = jnp.zeros((), jnp.float32)
            return jax.lax.fori_loop(0, config.steps, step, (cache, tokens, zero))

        return (
            jax.jit(run, donate_argnums=1)
            .lower(self.state, cache, tokens, key)
            .compile()
        )


def _nbytes(tree: Any) -> int:
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))


def _host_copy_gbps(size: int = 2**28) -> float:
    """Speed of a copy from pinned host memory to the device, 1e9 bytes a second."""
    device = jax.local_devices()[0]
    if jax.default_backend() != "gpu":
        return 0.0
    sharding = jax.sharding.SingleDeviceSharding(device, memory_kind="pinned_host")
    source = jax.device_put(np.zeros(size // 4, np.uint32), sharding)
    copy = jax.jit(lambda x: jax.device_put(x, jax.memory.Space.Device))
    seconds = []
    for _ in range(4):
        start = clock.perf_counter()
        jax.block_until_ready(copy(source))
        seconds.append(clock.perf_counter() - start)
    return size / min(seconds) / 1e9


def measure(config: KVCacheBenchConfig) -> Iterator[dict[str, Any]]:
    """Measures every cache at every batch.

    Args:
      config: what to measure.

    Yields:
      One row each; `ms`, the time of a step, is `None` where there is none, with the
      reason in `note`: "no speed: ..." where the cache's kernels cannot run or are
      wrong, else what has no room.
    """
    limits, link = ceilings(), _host_copy_gbps()
    stack = _Stack(config)
    for name, policy in config.methods.items():
        verdict = _checked(stack, policy, config.batches[name][0])
        for batch in config.batches[name]:
            yield _row(stack, name, policy, batch, verdict, limits, link)


def _checked(stack: _Stack, policy: CachePolicy, batch: int) -> dict[str, Any]:
    """What a cache's rows say of its results; a note where they are not right."""
    config, decoder = stack.config, stack.decoder
    layers, sizes = decoder.num_layers, (config.room, decoder.compute_dtype)
    try:
        host = layers * policy.host_bytes(stack.spec, batch, *sizes)
        refused = _no_host_room(host, batch)
        if refused:
            return {"note": refused}
        found = compare_step(
            policy,
            stack.spec,
            layers=layers,
            batch=batch,
            context=config.context,
            room=config.room,
            dtype=decoder.compute_dtype,
            seed=config.seed,
        )
    except NotImplementedError as error:
        return {"note": f"no speed: not available: {error}"}
    except WrongResult as error:
        return {"note": f"no speed: {error}"}
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return {"note": f"no speed: not compared: {str(error).splitlines()[0][:200]}"}
    finally:
        # What was traced here would not be traced, and recorded, again.
        jax.clear_caches()
    return {name: digits(value) for name, value in found.items()}


def _no_host_room(num_bytes: int, batch: int) -> str:
    """Why values would not fit in the host's memory; empty where they do."""
    try:
        if num_bytes:
            check_host_budget(num_bytes, f"the values of {batch} rows")
    except ValueError as error:
        return str(error)
    return ""


def _row(
    stack: _Stack,
    name: str,
    policy: CachePolicy,
    batch: int,
    verdict: dict[str, Any],
    limits: Ceilings,
    link: float,
) -> dict[str, Any]:
    config, decoder = stack.config, stack.decoder
    row = {
        "op": "kv_cache",
        "implementation": "jaxaccel",
        "workload": f"{name} B{batch} S{config.context}",
        "method": name,
        "policy": str(policy),
        "dtype": decoder.dtype,
        "layers": decoder.num_layers,
        "batch": batch,
        "context": config.context,
        "repeat": config.repeat,
        **dict.fromkeys(_TIMES),
        "note": "",
        **verdict,
    }
    if row["note"]:
        return row
    layers, dtype = decoder.num_layers, decoder.compute_dtype
    sizes = (stack.spec, batch, config.room, dtype)
    one = jax.eval_shape(lambda: policy.init(*sizes))
    host = layers * policy.host_bytes(*sizes)
    device = layers * _nbytes(one) - host
    scale = config.full_layers / layers
    full = scale * device + config.full_weight_bytes
    row |= {
        "device_gib": digits(device / 2**30),
        "host_gib": digits(host / 2**30),
        # Of the whole model, at the same batch.
        "full_device_gib": digits(full / 2**30),
        "full_host_gib": digits(scale * host / 2**30),
        "full_fits_device": bool(full <= config.device_bytes),
        "weights_gib": digits(stack.weight_bytes / 2**30),
        "copy_gbps": digits(limits.gbps),
        "link_gbps": digits(link),
    }
    stats = jax.local_devices()[0].memory_stats() or {}
    limit = stats.get("bytes_limit")
    if limit is not None and device + stack.weight_bytes > limit:
        note = (
            f"needs {device / 1e9:.0f} GB beside the weights, {limit / 1e9:.0f} there"
        )
        return {**row, "note": note}
    refused = _no_host_room(host, batch)
    if refused:
        return {**row, "note": refused}
    try:
        return {**row, **_timed(stack, policy, batch, limits, link)}
    except (NotImplementedError, KernelMissing) as error:
        return {**row, "note": f"no speed: not available: {error}"}
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return {**row, "note": str(error).splitlines()[0][:200]}


def _timed(
    stack: _Stack, policy: CachePolicy, batch: int, limits: Ceilings, link: float
) -> dict[str, Any]:
    """Fills a cache, decodes, and tells times."""
    config, decoder = stack.config, stack.decoder
    start = clock.perf_counter()
    layer = PolicyCache.init(
        [policy] * decoder.num_layers,
        stack.spec,
        batch,
        config.room,
        decoder.compute_dtype,
    )
    layer = fill(layer, config.context, config.seed)
    length = jnp.full((batch,), config.context, jnp.int32)
    cache = DecoderCache(layers=(layer,), length=length)
    del layer
    key = jax.random.key(config.seed)
    tokens = jax.random.randint(key, (batch,), 0, decoder.vocab_size)
    jax.block_until_ready(cache)
    fill_s = clock.perf_counter() - start
    start = clock.perf_counter()
    with recorded_choices() as choices:
        program = stack.program(cache, tokens, key)
    compile_s = clock.perf_counter() - start
    require_named(program.as_text(), choices)
    seconds, before, is_finite = [], {}, True
    for call in range(config.calls + 2):
        if call == 2:
            before = _counted(policy, cache)
        start = clock.perf_counter()
        cache, tokens, total = program(
            stack.state, cache, tokens, jax.random.fold_in(key, call)
        )
        is_finite &= bool(np.isfinite(float(total)))  # waits for the device
        seconds.append(clock.perf_counter() - start)
    after = _counted(policy, cache)
    hits, misses = (after.get(n, 0) - before.get(n, 0) for n in ("hits", "misses"))
    steps = config.steps * config.calls
    (held,) = cache.layers
    assert isinstance(held, PolicyCache)
    fetched = (after.get("fetched_bytes", 0) - before.get("fetched_bytes", 0)) / steps
    on_host = bool(policy.host_names())
    moved = Traffic(
        weights=stack.weight_bytes,
        cache=cache_traffic(policy, held, config.context),
        link=int(fetched) if on_host else 0,
    )
    floor = (moved.weights + moved.cache) / (limits.gbps * 1e6)
    if moved.link and link:
        floor = max(floor, moved.link / (link * 1e6))
    ms = 1e3 * statistics.median(seconds[2:]) / config.steps
    memory = program.memory_analysis()
    return {
        **(_speeds(ms, seconds[2:], batch, floor, config.steps) if is_finite else {}),
        "hit_rate": digits(hits / (hits + misses)) if hits + misses else None,
        "fetched_mb_per_step": digits(fetched / 1e6),
        "floor_ms": digits(floor),
        "weight_bytes": moved.weights,
        "cache_bytes": moved.cache,
        "link_bytes": moved.link,
        "temp_gib": digits(memory.temp_size_in_bytes / 2**30) if memory else None,
        "fill_s": digits(fill_s),
        "compile_s": digits(compile_s),
        "runs": implementations_used(choices),
        "note": "" if is_finite else "no speed: the output is not finite",
    }


def _speeds(
    ms: float, seconds: Sequence[float], batch: int, floor: float, steps: int
) -> dict[str, Any]:
    """What a row says of time, once what was computed is right."""
    return {
        "ms": digits(ms),
        "tokens_per_s": digits(batch / ms * 1e3),
        "share_of_floor": digits(floor / ms),
        "calls_ms": [digits(1e3 * s / steps) for s in seconds],
    }


def _counted(policy: CachePolicy, cache: DecoderCache) -> dict[str, float]:
    """The policy's counters, summed over layers and rows."""
    (layer,) = cache.layers
    assert isinstance(layer, PolicyCache)
    told = policy.counters(layer.states[0])
    return {name: float(np.sum(np.asarray(x, np.float64))) for name, x in told.items()}


def line(row: dict[str, Any]) -> str:
    """A row as one line."""
    about = f"{row['method']:18s} B={row['batch']:<3d}"
    if row["ms"] is None:
        return f"{about} {row['note']}"
    hits = "" if row["hit_rate"] is None else f", hits {row['hit_rate']:.2f}"
    return (
        f"{about} {row['ms']:.2f} ms a step, {row['tokens_per_s']:.0f} tokens/s, "
        f"{100 * row['share_of_floor']:.0f} % of the floor{hits}, "
        f"{row['device_gib']:.1f} + {row['host_gib']:.1f} GiB"
    )
