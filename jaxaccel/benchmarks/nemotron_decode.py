"""Decoding a Nemotron 3 that fills a device; see `jaxaccel.benchmarks.nemotron`."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxaccel.benchmarks.guards import (
    KernelMissing,
    implementations_used,
    kernels_in,
    named_ops,
    require_kernels,
)
from jaxaccel.cache.decoder import DecoderCache
from jaxaccel.cache.dense import KVCache
from jaxaccel.core.tree import num_bytes
from jaxaccel.decoding.by_layer import LayeredDecoder, Parameters
from jaxaccel.models.nemotron_h import NemotronHConfig
from pallas_kernels._common import timing
from pallas_kernels._common.bench import Ceilings, digits
from pallas_kernels._common.dispatch import recorded_choices
from pallas_kernels.gemv import MAX_ROWS


OPS = (
    *("decode_attention", "expert_gemv", "gemv", "grouped_matmul", "sort_dispatch"),
    "ssd_step",
)
"""Those that decoding may run by the implementation that is measured."""
_KERNELS = {
    "expert_gemv": "pk_expert_gemv",
    "grouped_matmul": "pk_grouped_matmul_fwd",
    "ssd_step": "pk_ssd_step",
}
# A near tie may fall either way in bfloat16; a token of no meaning is about four
# deviations of the logits below the best one.
_TOLERANCE = 0.5
_CHECKED_ROWS = 8


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes:
    """Of a measurement.

    Attributes:
      prompt: tokens that the caches hold at first.
      new: tokens of a row that one call draws, and a round times.
      rounds: timed calls.
      checked: drawn tokens of a row that are compared with whole passes.
      counted: steps whose experts are counted.
    """

    prompt: int = 128
    new: int = 64
    rounds: int = 4
    checked: int = 16
    counted: int = 4

    @property
    def slots(self) -> int:
        """Of the caches of keys; kernels have multiples of 8."""
        return -(-(self.prompt + self.new) // 8) * 8


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Carry:
    """Between two tokens: the newest of each row, i32[B], and the cache."""

    last: jax.Array
    cache: DecoderCache


@dataclasses.dataclass(frozen=True, kw_only=True)
class Traffic:
    """Bytes that one token of every row must move, at the least.

    Attributes:
      weights: parameters but experts, once for all rows; of an embedding table that is
        no output layer, the rows that are looked up.
      experts: matrices of the experts that some row visits.
      state: recurrent states and convolution inputs, read and written.
      kv: keys and values so far, read, and of the new token, written.
    """

    weights: int
    experts: int
    state: int
    kv: int

    @property
    def total(self) -> int:
        return self.weights + self.experts + self.state + self.kv


def traffic(
    model: LayeredDecoder,
    parameters: Any,
    batch: int,
    context: int,
    visited: Sequence[float],
) -> Traffic:
    """Counts what a token moves.

    Args:
      model: the decoder.
      parameters: its `Parameters`, of arrays or of their shapes.
      batch: rows B.
      context: tokens that each row holds.
      visited: experts of each layer with a mixture that some row visits.
    """
    config = model.config
    experts, held, counts = 0.0, 0, iter(visited)
    for state in parameters.layers:
        if "mlp" in state and "w_in" in state["mlp"]:
            matrices = num_bytes((state["mlp"]["w_in"], state["mlp"]["w_out"]))
            experts += matrices * next(counts) / state["mlp"]["w_in"].shape[0]
            held += matrices
    weights = num_bytes(parameters) - held
    if not config.tie_embeddings:
        table = num_bytes(parameters.ends["embed"])
        weights -= table - batch * table // config.vocab_size
    state = kv = 0
    for part in jax.eval_shape(lambda: model.init_cache(batch, 1)).layers:
        if isinstance(part, KVCache):
            kv += (context + 1) * num_bytes((part.k, part.v))
        else:
            state += 2 * num_bytes(part)
    return Traffic(weights=weights, experts=round(experts), state=state, kv=kv)


def with_ops(
    config: NemotronHConfig, implementation: str, ops: Sequence[str] = OPS
) -> LayeredDecoder:
    """The decoder whose `ops` run what is named, the others what they choose."""
    named = named_ops(implementation, ops)
    return LayeredDecoder(dataclasses.replace(config, implementation=named).decoder())


def required_kernels(ops: Sequence[str], batch: int) -> list[str]:
    """Kernels without which a step is another than the one that is measured.

    Args:
      ops: out of `OPS`, those that run "mosaic".
      batch: rows; few of them visit their experts without a sort.
    """
    visits = "expert_gemv" in ops and batch <= MAX_ROWS
    unused = "grouped_matmul" if visits else "expert_gemv"
    return [kernel for op, kernel in _KERNELS.items() if op in ops and op != unused]


def prefill(
    model: LayeredDecoder, parameters: Parameters, prompts: jax.Array, slots: int
) -> Carry:
    """Reads prompts i32[B, T], layer after layer."""
    cache = model.init_cache(prompts.shape[0], slots)
    output = model.read(parameters, prompts, cache)
    logits = model.unembed(parameters, output.hidden[:, -1])
    return Carry(last=jnp.argmax(logits, -1).astype(jnp.int32), cache=output.cache)


def visited_experts(
    model: LayeredDecoder, parameters: Parameters, carry: Carry, tokens: np.ndarray
) -> list[float]:
    """Mean number of experts of each mixture that some row visits in a step.

    Args:
      model: the decoder.
      parameters: its parameters.
      carry: after the prompt.
      tokens: i32[B, N], drawn behind it; N - 1 of them are read, after `carry.last`.
    """
    cache, last, found = carry.cache, carry.last, []
    for index in range(tokens.shape[1]):
        output = model.read(parameters, last[:, None], cache)
        found.append([int((np.asarray(count) > 0).sum()) for count in output.counts])
        cache, last = output.cache, jnp.asarray(tokens[:, index])
    return [statistics.mean(layer) for layer in zip(*found, strict=True)]


def logit_gap(
    model: LayeredDecoder,
    parameters: Parameters,
    prompts: jax.Array,
    first: jax.Array,
    tokens: np.ndarray,
) -> float:
    """How far below the best logit a drawn token is, in one pass over all of them.

    Args:
      model: the decoder that reads them, by other implementations than those that drew.
      parameters: its parameters.
      prompts: i32[B, T].
      first: i32[B], the token behind the prompt.
      tokens: i32[B, N], those behind it.

    Returns:
      The largest gap, as a share of the logits' standard deviation; infinite where
      logits are not finite.
    """
    text = jnp.concatenate([prompts, first[:, None], jnp.asarray(tokens)], axis=1)
    output = model.read(parameters, text, model.init_cache(*text.shape))
    start = prompts.shape[1]
    logits = model.unembed(parameters, output.hidden[:, start:-1])
    scores = np.asarray(logits, np.float64)  # [B, N, vocab]
    if not np.isfinite(scores).all():
        return float("inf")
    chosen = np.take_along_axis(scores, tokens[:, :, None], axis=-1)[..., 0]
    return float(((scores.max(-1) - chosen) / scores.std(-1)).max())


def measure(
    config: NemotronHConfig,
    name: str,
    *,
    implementation: str,
    batches: Sequence[int],
    sizes: Sizes,
    limits: Ceilings,
    ops: Sequence[str] = OPS,
) -> Iterator[dict[str, Any]]:
    """Draws the weights once and decodes at every batch size.

    Args:
      config: the model.
      name: of the model.
      implementation: of `ops`; those that it does not reach choose for themselves.
      batches: rows B, each measured in turn.
      sizes: of the measurement.
      limits: what floors are computed from.
      ops: out of `OPS`.

    Yields:
      One row a batch size: `ms` is the time from a row's token to its next, `None`
      where the tokens are wrong, with the reason in `note`.
    """
    model = with_ops(config, implementation, ops)
    start = time.perf_counter()
    parameters = jax.block_until_ready(model.init(jax.random.key(0)))
    seconds = time.perf_counter() - start
    for batch in batches:
        models = model, with_ops(config, "xla")
        required = required_kernels(ops, batch) if implementation == "mosaic" else []
        row = _row(*models, parameters, batch, sizes, limits, required)
        yield {
            "op": "nemotron_decode",
            "workload": f"{name} batch {batch}, {sizes.slots} slots",
            "implementation": implementation,
            "dtype": config.dtype,
            "parameters": sum(leaf.size for leaf in jax.tree.leaves(parameters)),
            "weights_gb": digits(num_bytes(parameters) / 1e9),
            "init_s": digits(seconds, 3),
            "batch": batch,
            **row,
        }


def _row(
    model: LayeredDecoder,
    plain: LayeredDecoder,
    parameters: Parameters,
    batch: int,
    sizes: Sizes,
    limits: Ceilings,
    required: Sequence[str],
) -> dict[str, Any]:
    empty = {"ms": None, "tokens_per_s": None, "share_of_limit": None}
    prompts = jax.random.randint(
        jax.random.fold_in(jax.random.key(1), batch),
        (batch, sizes.prompt),
        0,
        model.config.vocab_size,
    )
    try:
        filled = prefill(model, parameters, prompts, sizes.slots)
        call, about = _compile(model, parameters, filled, sizes.new)
    except NotImplementedError as error:
        return {**empty, "note": f"no speed: not available: {error}"}
    try:
        require_kernels(about.pop("text"), required)
    except KernelMissing as error:
        return {**empty, **about, "note": f"no speed: {error}"}
    tokens = np.asarray(call(parameters, _copy(filled))[1])
    few = min(batch, _CHECKED_ROWS)
    gap = logit_gap(
        plain,
        parameters,
        prompts[:few],
        filled.last[:few],
        tokens[:few, : sizes.checked],
    )
    visited = visited_experts(model, parameters, filled, tokens[:, : sizes.counted])
    moved = traffic(model, parameters, batch, sizes.prompt + sizes.new // 2, visited)
    floor = moved.total / limits.gbps / 1e6
    about |= {
        "logit_gap": digits(gap),
        "visited_experts": digits(statistics.mean(visited)) if visited else None,
        "weight_bytes": moved.weights,
        "expert_bytes": moved.experts,
        "state_bytes": moved.state,
        "kv_bytes": moved.kv,
        "floor_ms": digits(floor),
        "copy_gbps": digits(limits.gbps),
    }
    # Written so that NaN fails.
    if not gap <= _TOLERANCE:
        note = "no speed: other tokens than whole passes would draw"
        return {**empty, **about, "note": note}
    with timing.alone():
        times = [
            _time(call, parameters, filled, sizes.new) for _ in range(sizes.rounds)
        ]
    ms = statistics.median(times)
    return {
        "ms": digits(ms),
        "tokens_per_s": digits(batch * 1e3 / ms),
        "share_of_limit": digits(floor / ms, 3),
        "rounds_ms": [digits(value) for value in times],
        **about,
        "note": "",
    }


def _compile(
    model: LayeredDecoder, parameters: Parameters, filled: Carry, count: int
) -> tuple[Any, dict[str, Any]]:
    """(parameters, carry) -> carry, tokens [B, count], compiled, and facts about it."""
    # Choices are recorded while layers are traced, which `model` has done for a prompt
    # of one token.
    model = LayeredDecoder(model.config)

    def several(parameters, carry):
        def body(carry, _):
            last, cache = model.next_token(parameters, carry.last, carry.cache)
            return Carry(last=last, cache=cache), last

        carry, drawn = jax.lax.scan(body, carry, length=count)
        return carry, drawn.T

    options = compiler_options(filled.last.shape[0])
    start = time.perf_counter()
    with recorded_choices() as choices:
        lowered = jax.jit(several, donate_argnums=1).lower(parameters, filled)
    compiled = lowered.compile(compiler_options=options)
    seconds = time.perf_counter() - start
    memory, text = compiled.memory_analysis(), compiled.as_text() or ""
    return compiled, {
        "compile_s": digits(seconds, 3),
        "compiler_options": options,
        "temp_bytes": None if memory is None else memory.temp_size_in_bytes,
        "kernels": sorted(kernels_in(text)),
        "runs": implementations_used(choices),
        "text": text,
    }


def compiler_options(batch: int) -> dict[str, str]:
    """Of programs that multiply `batch` rows with a matrix."""
    if batch > 1 or jax.default_backend() != "gpu":
        return {}
    # XLA turns a product of one row into a sum of products, and writes all of these.
    return {"xla_disable_hlo_passes": "dot-strength-reduction"}


def _copy(carry: Carry) -> Carry:
    return jax.block_until_ready(jax.tree.map(jnp.copy, carry))


def _time(call: Any, parameters: Parameters, filled: Carry, count: int) -> float:
    """Milliseconds a token, host and device together."""
    carry = _copy(filled)
    start = time.perf_counter()
    jax.block_until_ready(call(parameters, carry))
    return 1e3 * (time.perf_counter() - start) / count
