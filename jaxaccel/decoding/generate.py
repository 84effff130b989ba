"""Text from a decoder: a prefill, then one token at a time over its caches."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxaccel.cache.plan import CachePlanConfig
from jaxaccel.decoding.cached import init_cache, read_prompts
from jaxaccel.decoding.layer_loop import read_tokens
from jaxaccel.decoding.sampling import SamplingConfig, sample


_SMALLEST_BUCKET = 16


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class _Carry:
    """What one decoding step hands to the next.

    Attributes:
      step: i32[], tokens drawn so far; `last` is the newest of them.
      last: i32[B], the token each row reads next.
      is_done: bool[B], rows that met a stop token.
      tokens: i32[B, N], what was drawn, -1 where a row had ended.
      cache: the decoder's cache.
    """

    step: jax.Array
    last: jax.Array
    is_done: jax.Array
    tokens: jax.Array
    cache: Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class Draw:
    """Draws the next token of each row, of those below `vocab_limit`."""

    sampling: SamplingConfig
    vocab_limit: int

    def __call__(self, logits: jax.Array, keys: jax.Array, step: jax.Array):
        """f32[B, V] logits, a key a row, the step's number -> i32[B]."""
        step_keys = jax.vmap(jax.random.fold_in, in_axes=(0, None))(keys, step)
        return sample(self.allowed(logits), step_keys, self.sampling)

    def allowed(self, logits: jax.Array) -> jax.Array:
        """Logits f32[..., M] of the tokens that may be drawn, of [..., V]."""
        return logits[..., : self.vocab_limit].astype(jnp.float32)


def bucket(length: int) -> int:
    """The padded length that programs are compiled for: a power of two, or 3/4 of one.

    Two sizes an octave waste at most a third of a prompt's work and keep the number
    of compiled programs logarithmic in the longest prompt.
    """
    size = _SMALLEST_BUCKET
    while size < length:
        if size * 3 // 2 >= length:
            return size * 3 // 2
        size *= 2
    return size


def generate(
    model: Any,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    sampling: SamplingConfig | None = None,
    stop_tokens: Sequence[int] = (),
    vocab_limit: int | None = None,
    seed: int | Sequence[int] = 0,
    stream: Callable[[int, int], None] | None = None,
    cache: CachePlanConfig | None = None,
) -> list[list[int]]:
    """Continues each prompt.

    Prompts of any lengths share one batch. Without `stream` the whole continuation
    is one call to the device; with it, one call a token. Both give the same tokens.

    Args:
      model: a `Decoder`.
      prompts: token ids, at least one a prompt.
      max_new_tokens: the most tokens a continuation has.
      sampling: how tokens are drawn; `None` draws from the plain distribution.
      stop_tokens: a row ends before the first of these; it is not returned.
      vocab_limit: only tokens below this are drawn, for a model with more logits than
        its tokenizer has ids; `None`, or more than the vocabulary, allows them all.
      seed: one seed, from which each row gets its own by its index, or one seed a
        row. A row's draws depend on its seed and prompt, not on the other rows.
      stream: called with (row, token) for each token as soon as it is there.
      cache: what the attention layers keep and read, see `jaxaccel.cache`; `None`
        keeps and reads all.

    Returns:
      The new tokens of each row.

    Raises:
      ValueError: an empty prompt, or a token outside the vocabulary, or a bad count,
        or the cache cannot hold or serve this.
      NotImplementedError: the cache cannot serve this model, or on this device.
    """
    rows: list[list[int]] = [[] for _ in prompts]
    events = _events(
        model,
        prompts,
        max_new_tokens=max_new_tokens,
        sampling=sampling or SamplingConfig(),
        stop_tokens=stop_tokens,
        vocab_limit=vocab_limit,
        seed=seed,
        tokens_per_call=1 if stream else max_new_tokens,
        cache=cache,
    )
    for row, token in events:
        rows[row].append(token)
        if stream:
            stream(row, token)
    return rows


def generate_stream(
    model: Any,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    sampling: SamplingConfig | None = None,
    stop_tokens: Sequence[int] = (),
    vocab_limit: int | None = None,
    seed: int | Sequence[int] = 0,
    tokens_per_call: int = 1,
    cache: CachePlanConfig | None = None,
) -> Iterator[tuple[int, int]]:
    """Like `generate`, as an iterator of (row, token).

    Args:
      model: as in `generate`, like the arguments not named here.
      prompts: likewise.
      max_new_tokens: likewise.
      sampling: likewise.
      stop_tokens: likewise.
      vocab_limit: likewise.
      seed: likewise.
      tokens_per_call: steps that run on the device before the host hears of them.
      cache: likewise.

    Returns:
      The pairs, by step and then by row.
    """
    return _events(
        model,
        prompts,
        max_new_tokens=max_new_tokens,
        sampling=sampling or SamplingConfig(),
        stop_tokens=stop_tokens,
        vocab_limit=vocab_limit,
        seed=seed,
        tokens_per_call=tokens_per_call,
        cache=cache,
    )


def generate_text(
    model: Any,
    tokenizer: Any,
    prompts: Sequence[str],
    *,
    max_new_tokens: int,
    sampling: SamplingConfig | None = None,
    seed: int | Sequence[int] = 0,
    stream: Callable[[int, str], None] | None = None,
    cache: CachePlanConfig | None = None,
) -> list[str]:
    """Continues texts, each up to the end-of-document token.

    Args:
      model: a `Decoder`.
      tokenizer: with `encode`, `decode`, `vocab_size`, `bos_id` and `eos_id`; ids that
        it lacks are never drawn.
      prompts: texts; an empty one begins a new document.
      max_new_tokens: the most tokens a continuation has.
      sampling: how tokens are drawn.
      seed: as in `generate`.
      stream: called with (row, text) whenever more of a row can be read; characters
        that several tokens make up arrive whole.
      cache: what attention layers keep; `None` keeps all tokens.

    Returns:
      The continuation of each prompt, without the prompt.

    Raises:
      ValueError: as in `generate`.
    """
    encoded = [np.asarray(tokenizer.encode(text)).tolist() for text in prompts]
    start = tokenizer.eos_id if tokenizer.bos_id is None else tokenizer.bos_id
    encoded = [ids or [start] for ids in encoded]
    rows: list[list[int]] = [[] for _ in prompts]
    told = [""] * len(prompts)

    def tell(row: int, token: int) -> None:
        rows[row].append(token)
        text = tokenizer.decode(rows[row])
        # An unfinished character decodes to the replacement character.
        if stream and not text.endswith("\ufffd") and text != told[row]:
            stream(row, text[len(told[row]) :])
            told[row] = text

    rows_out = generate(
        model,
        encoded,
        max_new_tokens=max_new_tokens,
        sampling=sampling,
        stop_tokens=(tokenizer.eos_id,),
        vocab_limit=tokenizer.vocab_size,
        seed=seed,
        stream=tell if stream else None,
        cache=cache,
    )
    texts = [tokenizer.decode(ids) for ids in rows_out]
    if stream:
        for row, text in enumerate(texts):
            if text != told[row]:
                stream(row, text[len(told[row]) :])
    return texts


def _events(
    model: Any,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    sampling: SamplingConfig,
    stop_tokens: Sequence[int],
    vocab_limit: int | None,
    seed: int | Sequence[int],
    tokens_per_call: int,
    cache: CachePlanConfig | None,
) -> Iterator[tuple[int, int]]:
    draw = check_request(
        model,
        prompts,
        max_new_tokens=max_new_tokens,
        sampling=sampling,
        stop_tokens=stop_tokens,
        vocab_limit=vocab_limit,
    )
    if tokens_per_call < 1:
        raise ValueError(f"tokens_per_call={tokens_per_call} is less than 1")
    keys = row_keys(seed, len(prompts))
    if cache is not None:
        cache.check_lengths(list(map(len, prompts)), max_new_tokens)
    if not prompts:
        return iter(())
    return _run(
        *(model, prompts, max_new_tokens, draw, stop_tokens, keys, tokens_per_call),
        plan=cache,
    )


def _run(
    model: Any,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    draw: Draw,
    stop_tokens: Sequence[int],
    keys: jax.Array,
    tokens_per_call: int,
    plan: CachePlanConfig | None,
) -> Iterator[tuple[int, int]]:
    tokens, segments = pad(prompts)
    capacity = bucket(max_new_tokens)
    # At least one entry, so that "none" and "one" run the same program.
    stops = jnp.asarray([*stop_tokens] or [-1], jnp.int32)
    graphdef, state = nnx.split(model)
    length = bucket(tokens.shape[1] + capacity)
    cache = None if plan is None else init_cache(model, plan, len(prompts), length)
    carry = _prefill(
        *(graphdef, length, capacity, draw, state, tokens, segments, keys), cache
    )
    carry = _end_rows(carry, stops)
    told = 0
    while told < max_new_tokens:
        limit = min(told + tokens_per_call, max_new_tokens)
        if int(carry.step) < limit:
            carry = _decode(graphdef, draw, state, carry, keys, stops, limit)
        step = int(carry.step)
        drawn = np.asarray(carry.tokens)[:, told:step]
        for column in drawn.T:
            yield from (
                (row, int(token)) for row, token in enumerate(column) if token >= 0
            )
        if step < limit or bool(jnp.all(carry.is_done)):
            return
        told = step


def check_request(
    model: Any,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    sampling: SamplingConfig,
    stop_tokens: Sequence[int],
    vocab_limit: int | None,
) -> Draw:
    """Checks what `generate` is asked for.

    Args:
      model: as in `generate`, like the other arguments.
      prompts: likewise.
      max_new_tokens: likewise.
      sampling: likewise.
      stop_tokens: likewise.
      vocab_limit: likewise.

    Returns:
      How tokens are drawn.

    Raises:
      ValueError: as `generate` raises.
    """
    vocab = model.config.vocab_size
    _check_prompts(prompts, vocab)
    _check_tokens("stop_tokens", stop_tokens, vocab)
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens={max_new_tokens} is less than 1")
    if vocab_limit is not None and vocab_limit < 1:
        raise ValueError(f"vocab_limit={vocab_limit} is less than 1")
    # One number for all limits that exclude nothing, so that they share a program.
    vocab_limit = vocab if vocab_limit is None else min(vocab_limit, vocab)
    return Draw(sampling=sampling, vocab_limit=vocab_limit)


def _check_prompts(prompts: Sequence[Sequence[int]], vocab: int) -> None:
    for row, prompt in enumerate(prompts):
        if len(prompt) == 0:
            raise ValueError(f"prompts[{row}] is empty; it needs at least one token")
        _check_tokens(f"prompts[{row}]", prompt, vocab)


def _check_tokens(name: str, tokens: Sequence[int], vocab: int) -> None:
    for index, token in enumerate(tokens):
        if not 0 <= token < vocab:
            raise ValueError(
                f"{name}[{index}] is token {token}, outside the vocabulary "
                f"0..{vocab - 1}"
            )


def row_keys(seed: int | Sequence[int], batch: int) -> jax.Array:
    """One key a row; row i of `seed=s` is not row 0 of `seed=s+i`."""
    if isinstance(seed, int | np.integer):
        fold = jax.vmap(jax.random.fold_in, in_axes=(None, 0))
        return fold(jax.random.key(seed), jnp.arange(batch, dtype=jnp.uint32))
    if len(seed) != batch:
        raise ValueError(f"{len(seed)} seeds are given for {batch} prompts")
    keys = jax.vmap(jax.random.key)(jnp.asarray(seed, jnp.uint32))
    return jax.vmap(jax.random.fold_in, in_axes=(0, None))(keys, 0)


def pad(prompts: Sequence[Sequence[int]]) -> tuple[np.ndarray, np.ndarray]:
    """Right-pads to a bucket: i32[B, T] tokens and segments, both 0 where padded."""
    width = bucket(max(map(len, prompts)))
    tokens = np.zeros((len(prompts), width), np.int32)
    segments = np.zeros((len(prompts), width), np.int32)
    for row, prompt in enumerate(prompts):
        tokens[row, : len(prompt)] = prompt
        segments[row, : len(prompt)] = 1
    return tokens, segments


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3), donate_argnums=8)
def _prefill(
    graphdef, length, capacity, draw, state, tokens, segments, keys, cache=None
) -> _Carry:
    """Reads the prompts and draws the first token of each row."""
    model = nnx.merge(graphdef, state)
    batch = tokens.shape[0]
    if cache is None:
        output = model(tokens, segments, cache=model.init_cache(batch, length))
        hidden, cache = output.hidden, output.cache
    else:
        hidden, cache = read_prompts(model, tokens, segments, cache)
    end = jnp.sum(segments, axis=1) - 1  # [B]
    hidden = jnp.take_along_axis(hidden, end[:, None, None], axis=1)  # [B, 1, D]
    first = draw(model.unembed(hidden)[:, 0], keys, jnp.int32(0))
    drawn = jnp.full((batch, capacity), -1, jnp.int32).at[:, 0].set(first)
    return _Carry(
        step=jnp.int32(1),
        last=first,
        is_done=jnp.zeros((batch,), bool),
        tokens=drawn,
        cache=cache,
    )


@jax.jit
def _end_rows(carry: _Carry, stops: jax.Array) -> _Carry:
    """Ends the rows whose newest token is a stop token, and takes it back."""
    stopped = jnp.any(carry.last[:, None] == stops[None, :], axis=1)
    is_done = carry.is_done | stopped
    column = carry.step - 1
    newest = jnp.where(is_done, -1, carry.last)
    tokens = jax.lax.dynamic_update_slice(carry.tokens, newest[:, None], (0, column))
    return dataclasses.replace(carry, is_done=is_done, tokens=tokens)


@functools.partial(jax.jit, static_argnums=(0, 1), donate_argnums=3)
def _decode(graphdef, draw, state, carry, keys, stops, limit) -> _Carry:
    """Draws until `limit` tokens are there or every row has ended."""
    model = nnx.merge(graphdef, state)

    def body(carry: _Carry) -> _Carry:
        # An ended row reads padding, which leaves its caches as they are.
        segments = jnp.where(carry.is_done, 0, 1).astype(jnp.int32)
        hidden, cache = read_tokens(
            model, carry.last[:, None], segments[:, None], carry.cache
        )
        logits = model.unembed(hidden)[:, 0]  # [B, V]
        carry = dataclasses.replace(
            carry,
            step=carry.step + 1,
            last=draw(logits, keys, carry.step),
            cache=cache,
        )
        return _end_rows(carry, stops)

    return jax.lax.while_loop(
        lambda carry: (carry.step < limit) & ~jnp.all(carry.is_done), body, carry
    )
