"""What caches lose: a trained model's tasks, and attention of its own layers.

The context is read once by dense attention; a cache then keeps of it what it keeps, and
the questions are read through it, token by token. Eviction chooses before it knows the
question ("after"), or with the question at the end of the prompt, which is then asked
again ("aware"). Beside the answers stand, over all layers and steps of the dense run,
the relative error of attention's output, the share of its weights that was read, and
how many of its sixteen heaviest tokens were.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxaccel.benchmarks.kv_cache_record import Record, layer_tokens, record_prompt
from jaxaccel.benchmarks.ruler import task_key
from jaxaccel.cache.attend import decode_attention, scores_of
from jaxaccel.cache.decoder import DecoderCache
from jaxaccel.cache.full import DenseCacheConfig
from jaxaccel.cache.h2o import H2OCacheConfig
from jaxaccel.cache.layer_state import AttentionSpec, LayerState, Tokens, by_head
from jaxaccel.cache.plan import PolicyCache
from jaxaccel.cache.policy import CachePolicy
from jaxaccel.cache.quest import QuestCacheConfig
from jaxaccel.cache.reads import tokens_read
from jaxaccel.cache.shadowkv import ShadowKVCacheConfig
from jaxaccel.cache.snapkv import SnapKVCacheConfig
from jaxaccel.cache.streaming import StreamingCacheConfig
from jaxaccel.config.ruler import RulerBenchConfig
from jaxaccel.core.tree import split_model
from jaxaccel.data.ruler import QUESTION, RulerRows, is_right, ruler_rows
from jaxaccel.decoding.layer_loop import read_tokens
from pallas_kernels._common.bench import digits


HEAVIEST = 16
"""Tokens that recall counts, those with the largest weights of dense attention."""

SWEEPS = ("budget", "rank", "chunk", "outliers", "refresh", "slots", "places")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Asked:
    """A cache and what is varied.

    Attributes:
      sweep: one of `SWEEPS`, or "dense".
      method: the cache's name.
      policy: the cache.
      setting: value of what the sweep varies.
      is_aware: whether the question also ends the prompt.
    """

    sweep: str
    method: str
    policy: CachePolicy
    setting: float
    is_aware: bool = False


def _whole(tokens: float, unit: int) -> int:
    """A number of tokens in whole units, at least one."""
    return max(round(tokens / unit), 1) * unit


def shadowkv(config: RulerBenchConfig, budget: int, **changes: Any) -> CachePolicy:
    """ShadowKV with values on the device and slots for twice the chosen chunks."""
    chunk = changes.get("chunk", 8)
    chosen = _whole(budget, chunk)
    settings: dict[str, Any] = {
        "budget": chosen,
        "num_outliers": config.outliers,
        "num_sinks": min(config.outliers, 1),
        "local_window": _whole(config.local_window, chunk),
        "values": "device",
        "slots": 2 * (chosen // chunk),
        **changes,
    }
    return ShadowKVCacheConfig(**settings)


def methods(
    config: RulerBenchConfig, budget: int
) -> Iterator[tuple[str, CachePolicy, bool]]:
    """Every cache with that many chosen tokens and the same newest ones."""
    window = config.local_window
    yield "shadowkv", shadowkv(config, budget), False
    page = min(16, budget)
    quest = QuestCacheConfig(
        budget=_whole(budget, page), page=page, local_window=max(window, page + 1)
    )
    yield "quest", quest, False
    observed = min(window, 32)
    snapkv = SnapKVCacheConfig(budget=budget, window=observed, generated=64)
    h2o = H2OCacheConfig(heavy=budget, recent=window)
    for is_aware in (False, True):
        yield "snapkv", snapkv, is_aware
        yield "h2o", h2o, is_aware
    streaming = StreamingCacheConfig(
        num_sinks=4, window=budget + window, move_sinks=False
    )
    yield "streaming", streaming, False


def plan(config: RulerBenchConfig, sweeps: Sequence[str]) -> Iterator[Asked]:
    """The caches of the sweeps.

    Raises:
      ValueError: a sweep is unknown.
    """
    for name in sweeps:
        if name not in SWEEPS:
            raise ValueError(
                f"sweep {name!r} is unknown, allowed are {', '.join(SWEEPS)}"
            )
    context, width = config.rows.context, config.model.decoder().attention
    width = width.num_kv_heads * width.head_dim
    # What the method publishes, 1.56 % of the context, or what of it is a whole chunk.
    usual = _whole(context / 64, 8)

    def one(sweep: str, setting: float, policy: CachePolicy, name: str = "shadowkv"):
        return Asked(sweep=sweep, method=name, policy=policy, setting=setting)

    # Whatever is varied, dense attention says first which tasks mean something.
    yield one("dense", 1.0, DenseCacheConfig(), "dense")
    if "budget" in sweeps:
        for share in config.budgets:
            for name, policy, is_aware in methods(config, _whole(share * context, 8)):
                yield Asked(
                    sweep="budget",
                    method=name,
                    policy=policy,
                    setting=share,
                    is_aware=is_aware,
                )
    if "rank" in sweeps:
        for share in (5 / 64, 5 / 32, 1 / 4, 1 / 2, 1.0):
            rank = max(round(share * width), 1)
            yield one("rank", rank, shadowkv(config, usual, rank=rank))
    if "chunk" in sweeps:
        for chunk in (4, 8, 16, 32):
            yield one("chunk", chunk, shadowkv(config, usual, chunk=chunk))
    if "outliers" in sweeps:
        for count in (0, 1, 2, 8, 48):
            policy = shadowkv(
                config, usual, num_outliers=count, num_sinks=min(count, 1)
            )
            yield one("outliers", count, policy)
    if "refresh" in sweeps:
        for n in (1, 2, 4, 8):
            yield one("refresh", n, shadowkv(config, usual, refresh_every=n))
            window = max(config.local_window, 16 + n)
            quest = QuestCacheConfig(
                budget=_whole(usual, 16), local_window=window, refresh_every=n
            )
            yield one("refresh", n, quest, "quest")
    if "slots" in sweeps:
        for times in (1, 2, 4, 8):
            slots = times * (usual // 8)
            yield one("slots", times, shadowkv(config, usual, slots=slots))
    if "places" in sweeps:
        for name, policy, is_aware in methods(config, usual):
            if not is_aware:
                yield one("places", usual, policy, name)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Found:
    """What one cache did with some rows, sums over them.

    Attributes:
      right: bool[B, Q], questions answered.
      error: f32[], relative error of attention's output, mean over layers and steps.
      mass: f32[], share of dense attention's weights that was read, likewise; that of
        keys of low rank is what their own scores add up to.
      recall: f32[], share of dense attention's `HEAVIEST` tokens that was read.
      hits, misses: f32[], chosen chunks that were in slots or not; 0 without slots.
    """

    right: jax.Array
    error: jax.Array
    mass: jax.Array
    recall: jax.Array
    hits: jax.Array
    misses: jax.Array


def filled(
    policy: CachePolicy,
    spec: AttentionSpec,
    record: Record,
    prompt: int,
    room: int,
) -> PolicyCache:
    """The caches of all layers after a recorded prompt's first tokens."""
    layers, batch = record.k.shape[:2]
    cache = PolicyCache.init([policy] * layers, spec, batch, room, record.k.dtype)

    def keep(index, state):
        tokens = layer_tokens(record, index, jnp.arange(prompt, dtype=jnp.int32))
        state = dataclasses.replace(state, index=index)
        state = policy.prefill(state, tokens, spec)
        return dataclasses.replace(state, index=None)

    state = jax.lax.fori_loop(0, layers, keep, cache.states[0])
    return dataclasses.replace(cache, states=(state,)).as_mode("decode")


def _answers(
    model: Any, cache: PolicyCache, rows: RulerRows, prompt: int, context: int
) -> tuple[jax.Array, PolicyCache]:
    """Reads the questions; bool[B, Q] right ones, and the caches after them."""
    batch = rows.tokens.shape[0]
    whole = DecoderCache(layers=(cache,), length=jnp.full((batch,), prompt, jnp.int32))
    asked = rows.tokens[:, context:].T  # [2 Q, B]

    def step(whole, token):
        ones = jnp.ones((batch, 1), jnp.int32)
        hidden, whole = read_tokens(model, token[:, None], ones, whole)
        return whole, hidden[:, 0]

    whole, hidden = jax.lax.scan(step, whole, asked)
    hidden = hidden[QUESTION - 1 :: QUESTION]  # [Q, B, D]
    logits = jnp.swapaxes(model.unembed(hidden), 0, 1)
    after = whole.layers[0]
    assert isinstance(after, PolicyCache)
    return is_right(logits, rows.answers), after


def _compared(
    policy: CachePolicy,
    state: LayerState,
    tokens: Tokens,
    k: jax.Array,
    v: jax.Array,
    spec: AttentionSpec,
) -> tuple[LayerState, jax.Array]:
    """One step of one layer beside dense attention over k, v [B, G, N, K].

    Returns:
      The state, and f32[3]: error, mass and recall.
    """
    state = policy.append(state, tokens, spec)
    selection, state = policy.select(state, tokens, spec)
    o, lse = policy.attend(state, tokens, selection, spec)
    seen = jnp.arange(k.shape[2], dtype=jnp.int32)[None] <= tokens.positions[:, :1]
    dense, dense_lse = decode_attention(tokens.q, k, v, seen[:, None], spec)
    apart = jnp.linalg.norm(o - dense, axis=-1)
    error = jnp.mean(apart / jnp.maximum(jnp.linalg.norm(dense, axis=-1), 1e-9))
    mass = jnp.mean(jnp.exp(lse - dense_lse))
    scores = scores_of(tokens.q, k, spec)[:, :, :, 0]  # [B, G, R, N]
    weights = jnp.where(seen[:, None, None], scores, -jnp.inf)
    weights = jnp.max(jax.nn.softmax(weights, axis=-1), axis=2)
    _, heaviest = jax.lax.top_k(weights, min(HEAVIEST, weights.shape[-1]))
    read = tokens_read(policy, state, selection, k.shape[2])
    recall = jnp.mean(jnp.take_along_axis(read, heaviest, axis=-1).astype(jnp.float32))
    return state, jnp.stack([error, mass, recall])


def _errors(
    policy: CachePolicy,
    spec: AttentionSpec,
    cache: PolicyCache,
    record: Record,
    prompt: int,
) -> jax.Array:
    """f32[3], means of `_compared` over layers and the steps behind the prompt."""
    layers, total = record.k.shape[0], record.k.shape[2]
    steps = total - prompt

    def layer(index, carry):
        state, sums = carry
        k, v = by_head(record.k[index]), by_head(record.v[index])

        def step(i, carry):
            state, sums = carry
            tokens = layer_tokens(record, index, (prompt + i)[None])
            state = dataclasses.replace(state, index=index)
            state, found = _compared(policy, state, tokens, k, v, spec)
            return dataclasses.replace(state, index=None), sums + found

        return jax.lax.fori_loop(0, steps, step, (state, sums))

    zeros = jnp.zeros((3,), jnp.float32)
    _, sums = jax.lax.fori_loop(0, layers, layer, (cache.states[0], zeros))
    return sums / (layers * steps)


def make_ask(
    config: RulerBenchConfig, parts: Any, policy: CachePolicy, is_aware: bool
) -> Any:
    """A jitted (params, buffers, record, rows) -> `Found` of one cache."""
    context = config.rows.context
    prompt = context + (config.room - context) // 2 * is_aware

    def ask(params, buffers, record: Record, rows: RulerRows) -> Found:
        model: Any = parts.merge(params, buffers)
        spec = model.layers[0].mixer.cache_spec
        cache = filled(policy, spec, record, prompt, config.room + 8)
        right, after = _answers(model, cache, rows, prompt, context)
        error, mass, recall = _errors(policy, spec, cache, record, prompt)
        told = policy.counters(after.states[0])
        zero = jnp.zeros((), jnp.float32)
        hits, misses = (
            jnp.sum(told[name]).astype(jnp.float32) if name in told else zero
            for name in ("hits", "misses")
        )
        return Found(
            right=right, error=error, mass=mass, recall=recall, hits=hits, misses=misses
        )

    return jax.jit(ask)


def state_bytes(
    config: RulerBenchConfig, spec: AttentionSpec, policy: CachePolicy
) -> tuple[float, float]:
    """Bytes a token of context and layer: on the device, and in the host's memory.

    ShadowKV's values count as the host's, where they would be, wherever they are here.
    """
    dtype = config.model.decoder().compute_dtype
    state = jax.eval_shape(lambda: policy.init(spec, 1, config.room, dtype))
    sizes = {
        name: math.prod(state.size(name)) * state.dtype(name).itemsize
        for name in state.names()
    }
    host = sizes.pop("values", 0)
    return sum(sizes.values()) / config.rows.context, host / config.rows.context


_drawn = jax.jit(ruler_rows, static_argnums=(0, 1, 3))


def rows_for(config: RulerBenchConfig, name: str) -> list[tuple[str, RulerRows]]:
    """The rows of a task, or with the name "places" of needles at chosen places."""
    if name != "places":
        rows = _drawn(
            config.rows, config.task(name), task_key(config, name), config.eval_rows
        )
        return [(name, rows)]
    context, chunk = config.rows.context, 8
    places = {
        "first chunk": 2,
        "across the first border": chunk - 1,
        "behind the first border": chunk,
        "a quarter": context // 4 + 3,
        "across a border in the middle": context // 2 + chunk - 1,
        "three quarters": 3 * context // 4 + 1,
        "before the window": context - config.local_window - chunk - 2,
        "into the window": context - config.local_window - 1,
        "the last tokens": context - 2,
    }
    key = jax.random.fold_in(jax.random.key(config.seed), 3)
    task, count = config.task("single"), config.eval_rows
    return [
        (
            text,
            _drawn(
                config.rows,
                task,
                jax.random.fold_in(key, place),
                count,
                jnp.full((count,), place, jnp.int32),
            ),
        )
        for text, place in places.items()
        if 0 < place < context - 1
    ]


def _some(rows: RulerRows, first: int, count: int) -> RulerRows:
    return jax.tree.map(lambda x: x[first : first + count], rows)


def _record_program(parts: Any, aware: bool) -> Any:
    """A jitted (params, buffers, rows, context) -> `Record` of dense attention."""

    def record(params, buffers, rows: RulerRows, context: int) -> Record:
        model: Any = parts.merge(params, buffers)
        tokens = rows.tokens
        if aware:
            tokens = jnp.concatenate([tokens, tokens[:, context:]], axis=1)
        return record_prompt(model, tokens)

    return jax.jit(record, static_argnums=3)


class Asker:
    """Asks one model through many caches, a few rows at a time."""

    def __init__(self, config: RulerBenchConfig, parts: Any, model: Any, few: int = 32):
        """Prepares the rows.

        Args:
          config: tasks and sizes.
          parts: the model taken apart.
          model: the trained `Decoder`.
          few: rows that are asked at a time.
        """
        self._config, self._parts = config, parts
        self._params, self._buffers = split_model(model)
        self._spec = model.layers[0].mixer.cache_spec
        self._few = math.gcd(config.eval_rows, few)
        self._record = {aware: _record_program(parts, aware) for aware in (False, True)}
        self._dense: dict[str, float] = {}
        self._rows: dict[str, list[tuple[str, RulerRows]]] = {}

    def _batches(self, name: str) -> list[tuple[str, RulerRows]]:
        if name not in self._rows:
            self._rows[name] = rows_for(self._config, name)
        return self._rows[name]

    def ask(self, asked: Asked) -> list[dict[str, Any]]:
        """Asks a cache every task; one row each.

        The dense cache comes first: what it answers says which cells mean something.
        """
        config = self._config
        program = make_ask(config, self._parts, asked.policy, asked.is_aware)
        record = self._record[asked.is_aware]
        device, host = state_bytes(config, self._spec, asked.policy)
        names = ("places",) if asked.sweep == "places" else config.tasks
        if isinstance(asked.policy, DenseCacheConfig):
            names = (*config.tasks, "places")
        found_rows = []
        for name in names:
            for text, rows in self._batches(name):
                parts = []
                for at in range(0, config.eval_rows, self._few):
                    some = _some(rows, at, self._few)
                    held = record(
                        self._params, self._buffers, some, config.rows.context
                    )
                    found = program(self._params, self._buffers, held, some)
                    parts.append(jax.tree.map(np.asarray, found))
                questions = 1 if name == "places" else config.task(name).questions
                row = self._row(asked, text, questions, parts)
                row["device_bytes_per_token"] = digits(device)
                row["host_bytes_per_token"] = digits(host)
                found_rows.append(row)
        return found_rows

    def _row(
        self, asked: Asked, task: str, questions: int, parts: Sequence[Found]
    ) -> dict[str, Any]:
        right = np.concatenate([found.right[:, :questions] for found in parts])
        accuracy = float(np.mean(np.all(right, axis=1)))
        if isinstance(asked.policy, DenseCacheConfig):
            self._dense[task] = accuracy
        dense = self._dense.get(task)
        hits = sum(float(found.hits) for found in parts)
        asks = hits + sum(float(found.misses) for found in parts)

        def mean(name: str) -> float:
            return digits(float(np.mean([getattr(f, name) for f in parts])))

        return {
            "op": "kv_cache_accuracy",
            "implementation": "jaxaccel",
            "workload": task,
            "sweep": asked.sweep,
            "method": asked.method,
            "setting": digits(asked.setting, 5),
            "question": "aware" if asked.is_aware else "after",
            "policy": str(asked.policy),
            "context": self._config.rows.context,
            "eval_rows": self._config.eval_rows,
            "accuracy": digits(accuracy, 5),
            "dense": None if dense is None else digits(dense, 5),
            # Where dense attention fails, a cache's failure says nothing: greyed.
            "discriminative": dense is not None and dense >= self._config.passes,
            "output_error": mean("error"),
            "mass": mean("mass"),
            "recall": mean("recall"),
            "hit_rate": digits(hits / asks) if asks else None,
        }


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Accuracy in percent, a line a cache and setting, a column a task.

    Cells whose task dense attention fails are in parentheses.
    """
    lines: dict[tuple[Any, ...], dict[str, Any]] = {}
    for row in rows:
        key = (row["sweep"], row["method"], row["question"], row["setting"])
        lines.setdefault(key, {})[row["workload"]] = row
    text = []
    for sweep in dict.fromkeys(key[0] for key in lines):
        of_sweep = {key: line for key, line in lines.items() if key[0] == sweep}
        tasks = list(dict.fromkeys(t for line in of_sweep.values() for t in line))
        head = f"{sweep:22s}" + "".join(f"{t[:12]:>13s}" for t in tasks)
        text.append(head + f"{'error':>8s}{'recall':>8s}{'B/token':>9s}{'hits':>7s}")
        for (_, method, question, setting), line in of_sweep.items():
            name = f"{method}{' aware' if question == 'aware' else ''} {setting:g}"
            cells = ""
            for task in tasks:
                row = line.get(task)
                cell = "" if row is None else f"{100 * row['accuracy']:.1f}"
                if row is not None and not row["discriminative"]:
                    cell = f"({cell})"
                cells += f"{cell:>13s}"
            found = list(line.values())
            error = np.mean([row["output_error"] for row in found])
            recall = np.mean([row["recall"] for row in found])
            size = found[0]["device_bytes_per_token"]
            rates = [row["hit_rate"] for row in found if row["hit_rate"] is not None]
            rate = f"{np.mean(rates):7.2f}" if rates else f"{'-':>7s}"
            text.append(f"{name:22s}{cells}{error:8.3f}{recall:8.2f}{size:9.0f}{rate}")
        text.append("")
    return "\n".join(text)
