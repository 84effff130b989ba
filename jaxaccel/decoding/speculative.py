"""Self-speculation: the model's own prediction block drafts, its trunk verifies.

The multi-token prediction block (DeepSeek-V3, arXiv:2412.19437, section 2.2) reads
the trunk's hidden state of a token beside the token that follows, and predicts the
one after that. Given its own output in place of the trunk's it drafts further. The
trunk then reads all drafts in one pass and keeps those it would have drawn itself:
with temperature 0 the tokens are those of plain decoding, with sampling each has the
distribution of plain decoding (Leviathan et al., arXiv:2211.17192, algorithm 1). Both
hold as far as one pass over several tokens gives the logits of one token at a time:
its sums round in another order, and in bfloat16 that decides between near ties.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxaccel.cache.decoder import DecoderCache
from jaxaccel.cache.dense import KVCache
from jaxaccel.data.batch import packing_metadata
from jaxaccel.decoding.generate import Draw, bucket, check_request, pad, row_keys
from jaxaccel.decoding.sampling import SamplingConfig, probabilities
from jaxaccel.decoding.verify import commit, verify


@dataclasses.dataclass(frozen=True, kw_only=True)
class Acceptance:
    """How drafts fared.

    Attributes:
      num_drafts: drafts n of a pass.
      histogram: n + 1 counts: passes of a row in which 0, 1, ... n drafts were kept.
        Drafts beyond a row's end count as they were judged.
      passes: verifying passes of each row while it had not ended.
      accepted: drafts that were kept, of each row.
    """

    num_drafts: int
    histogram: tuple[int, ...]
    passes: tuple[int, ...]
    accepted: tuple[int, ...]

    @property
    def rate(self) -> float:
        """Share of the drafts that were kept; 0 without passes."""
        drafted = self.num_drafts * sum(self.passes)
        return sum(self.accepted) / drafted if drafted else 0.0

    @property
    def tokens_per_pass(self) -> float:
        """Mean tokens a verifying pass yields a row, its own one included."""
        passes = sum(self.passes)
        return 1.0 + sum(self.accepted) / passes if passes else 0.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class SpeculativeOutput:
    """What `generate_speculative` returns.

    Attributes:
      tokens: the new tokens of each row.
      acceptance: how the drafts fared.
    """

    tokens: list[list[int]]
    acceptance: Acceptance


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class SpeculativeCarry:
    """What one verifying pass hands to the next.

    Attributes:
      last: i32[B], the newest token of each row, which the trunk has not read.
      count: i32[B], tokens drawn so far.
      is_done: bool[B], rows that met a stop token or have all their tokens.
      tokens: i32[B, N], what was drawn, -1 behind it.
      cache: the trunk's cache.
      drafter: the prediction block's cache; it holds as many tokens as the trunk's.
      hidden: [B, D], the block's output from which the next draft is drawn.
      histogram: i32[B, n + 1], passes by the number of kept drafts.
    """

    last: jax.Array
    count: jax.Array
    is_done: jax.Array
    tokens: jax.Array
    cache: DecoderCache
    drafter: KVCache
    hidden: jax.Array
    histogram: jax.Array


def generate_speculative(
    model: Any,
    prompts: Sequence[Sequence[int]],
    *,
    num_drafts: int,
    max_new_tokens: int,
    sampling: SamplingConfig | None = None,
    stop_tokens: Sequence[int] = (),
    vocab_limit: int | None = None,
    seed: int | Sequence[int] = 0,
) -> SpeculativeOutput:
    """Continues each prompt as `generate` does, in fewer passes of the trunk.

    Args:
      model: a `Decoder` with a prediction block.
      prompts: as in `generate`, like the arguments not named here.
      num_drafts: drafts n of a pass, at least 1; a pass yields 1 to n + 1 tokens.
      max_new_tokens: likewise.
      sampling: likewise. In float32 a temperature of 0 gives the tokens of `generate`;
        in bfloat16 it does up to ties that rounding decides, behind which the row is
        another text. Any other gives the distribution of `generate`, not its draws.
      stop_tokens: likewise.
      vocab_limit: likewise.
      seed: likewise.

    Returns:
      The new tokens of each row, and how the drafts fared.

    Raises:
      ValueError: the model has no prediction block, or as `generate` raises.
    """
    if not model.config.num_mtp_layers:
        raise ValueError("self-speculation needs a prediction block: num_mtp_layers=0")
    if num_drafts < 1:
        raise ValueError(f"num_drafts={num_drafts} is less than 1")
    draw = check_request(
        model,
        prompts,
        max_new_tokens=max_new_tokens,
        sampling=sampling or SamplingConfig(),
        stop_tokens=stop_tokens,
        vocab_limit=vocab_limit,
    )
    keys = row_keys(seed, len(prompts))
    if not prompts:
        histogram = np.zeros((0, num_drafts + 1), np.int32)
        return SpeculativeOutput(tokens=[], acceptance=acceptance(histogram))
    tokens, segments = pad(prompts)
    capacity = bucket(max_new_tokens)
    slots = bucket(tokens.shape[1] + capacity + num_drafts + 1)
    stops = jnp.asarray([*stop_tokens] or [-1], jnp.int32)
    limit = jnp.int32(max_new_tokens)
    graphdef, state = nnx.split(model)
    carry = prefill(
        graphdef,
        (num_drafts, slots, capacity, draw),
        state,
        tokens,
        segments,
        keys,
        stops,
        limit,
    )
    carry = decode(graphdef, num_drafts, draw, state, carry, keys, stops, limit)
    rows = np.asarray(carry.tokens)
    return SpeculativeOutput(
        tokens=[row[row >= 0].tolist() for row in rows],
        acceptance=acceptance(np.asarray(carry.histogram)),
    )


def acceptance(histogram: np.ndarray) -> Acceptance:
    """The statistics of `SpeculativeCarry.histogram`, [B, n + 1]."""
    kept = np.arange(histogram.shape[1])
    return Acceptance(
        num_drafts=histogram.shape[1] - 1,
        histogram=tuple(histogram.sum(axis=0).tolist()),
        passes=tuple(histogram.sum(axis=1).tolist()),
        accepted=tuple((histogram * kept).sum(axis=1).tolist()),
    )


@functools.partial(jax.jit, static_argnums=(0, 1))
def prefill(
    graphdef: Any,
    plan: tuple[int, int, int, Draw],
    state: Any,
    tokens: jax.Array,
    segments: jax.Array,
    keys: jax.Array,
    stops: jax.Array,
    limit: jax.Array,
) -> SpeculativeCarry:
    """Reads the prompts, draws a token of each row and makes the block follow.

    Args:
      graphdef: of the model.
      plan: (drafts n, slots of the attention caches, columns N, how tokens are drawn).
      state: of the model.
      tokens: i32[B, T], padded at the right.
      segments: i32[B, T], 1 on real tokens.
      keys: [B] random keys.
      stops: i32[M], tokens that end a row.
      limit: i32[], tokens that end a row.
    """
    num_drafts, slots, capacity, draw = plan
    model = nnx.merge(graphdef, state)
    cache = model.init_cache(tokens.shape[0], slots)
    output = model(tokens, segments, cache=cache)
    end = jnp.sum(segments, axis=1) - 1  # [B]
    first = draw(model.unembed(_at(output.hidden, end)), keys, jnp.int32(0))
    shape = (num_drafts, slots, capacity)
    return begin(
        model, shape, output.hidden, output.cache, tokens, segments, first, stops, limit
    )


def begin(
    model: Any,
    shape: tuple[int, int, int],
    hidden: jax.Array,
    cache: DecoderCache,
    tokens: jax.Array,
    segments: jax.Array,
    first: jax.Array,
    stops: jax.Array,
    limit: jax.Array,
) -> SpeculativeCarry:
    """Makes the prediction block follow a trunk that has read the prompts.

    Args:
      model: a `Decoder`.
      shape: (drafts n, slots of the block's cache, columns N).
      hidden: [B, T, D] of the trunk.
      cache: the trunk's, with the prompts in it.
      tokens: i32[B, T], the prompts, padded at the right.
      segments: i32[B, T], 1 on real tokens.
      first: i32[B], drawn behind the prompts.
      stops: i32[M], tokens that end a row.
      limit: i32[], tokens that end a row.
    """
    num_drafts, slots, capacity = shape
    batch, time = tokens.shape
    end = jnp.sum(segments, axis=1) - 1  # [B]
    ahead = jnp.pad(tokens[:, 1:], ((0, 0), (0, 1)))
    at_end = jnp.arange(time)[None, :] == end[:, None]
    ahead, drafter = read_drafter(
        model,
        hidden,
        jnp.where(at_end, first[:, None], ahead),
        segments,
        model.mtp.block.mixer.init_cache(batch, slots, model.config.compute_dtype),
        jnp.zeros((batch,), jnp.int32),
    )
    carry = SpeculativeCarry(
        last=first,
        count=jnp.zeros((batch,), jnp.int32),
        is_done=jnp.zeros((batch,), bool),
        tokens=jnp.full((batch, capacity), -1, jnp.int32),
        cache=cache,
        drafter=drafter,
        hidden=_at(ahead, end),
        histogram=jnp.zeros((batch, num_drafts + 1), jnp.int32),
    )
    return _emit(carry, first[:, None], jnp.zeros_like(end), stops, limit)


@functools.partial(jax.jit, static_argnums=(0, 1, 2), donate_argnums=4)
def decode(
    graphdef: Any,
    num_drafts: int,
    draw: Draw,
    state: Any,
    carry: SpeculativeCarry,
    keys: jax.Array,
    stops: jax.Array,
    limit: jax.Array,
) -> SpeculativeCarry:
    """Drafts and verifies until every row has ended; arguments as for `prefill`."""
    model = nnx.merge(graphdef, state)

    def body(carry: SpeculativeCarry) -> SpeculativeCarry:
        return _one_pass(model, num_drafts, draw, carry, keys, stops, limit)

    return jax.lax.while_loop(lambda c: ~jnp.all(c.is_done), body, carry)


def read_drafter(
    model: Any,
    hidden: jax.Array,
    ahead: jax.Array,
    segments: jax.Array,
    cache: KVCache,
    length: jax.Array,
) -> tuple[jax.Array, KVCache]:
    """Runs the prediction block behind what its cache holds.

    Args:
      model: a `Decoder`.
      hidden: [B, T, D], the trunk's hidden states, or the block's own outputs.
      ahead: i32[B, T], the token after each of them.
      segments: i32[B, T], 1 on real tokens.
      cache: of the block's attention.
      length: i32[B], tokens it holds.

    Returns:
      [B, T, D], of which `unembed` makes logits of the second token after each, and
      the cache.
    """
    batch, time = ahead.shape
    meta = packing_metadata((batch, time), segment_ids=segments, cached_length=length)
    mtp = model.mtp
    embedded = mtp.embed_norm(model.embed(ahead))
    x = mtp.proj(jnp.concatenate([embedded, mtp.hidden_norm(hidden)], axis=-1))
    x, cache, _ = mtp.block(x, meta, cache, length)
    return mtp.final_norm(x), cache


def judge(
    drafts: jax.Array,
    draft_probs: jax.Array | None,
    logits: jax.Array,
    keys: jax.Array,
    sampling: SamplingConfig,
) -> tuple[jax.Array, jax.Array]:
    """Decides how many drafts a row keeps and which token follows them.

    A draft d is kept with probability min(1, p(d) / q(d)); behind the first one that
    is not, the token is drawn from max(p - q, 0), and behind n kept ones from p. The
    tokens then have the distribution p, whatever q is.

    Args:
      drafts: i32[B, n].
      draft_probs: f32[B, n, V], the distribution q that each draft was drawn from;
        unused for a temperature of 0.
      logits: f32[B, n + 1, V], the trunk's, before temperature and filters.
      keys: [B] random keys.
      sampling: makes the distribution p of the logits.

    Returns:
      i32[B] drafts kept, and i32[B] the token behind them.
    """
    batch, num_drafts = drafts.shape
    if sampling.temperature == 0.0:
        best = jnp.argmax(logits, axis=-1).astype(jnp.int32)  # [B, n + 1]
        kept = _leading(drafts == best[:, :-1])
        return kept, _at(best, kept)
    assert draft_probs is not None
    vocab = logits.shape[-1]
    probs = probabilities(logits.reshape(-1, vocab), sampling)
    probs = probs.reshape(batch, num_drafts + 1, vocab)
    chance = jnp.take_along_axis(probs[:, :-1], drafts[..., None], axis=-1)[..., 0]
    drawn = jnp.take_along_axis(draft_probs, drafts[..., None], axis=-1)[..., 0]
    accept_keys, next_keys = (_fold(keys, jnp.int32(i)) for i in range(2))
    uniform = jax.vmap(lambda key: jax.random.uniform(key, (num_drafts,)))(accept_keys)
    kept = _leading(uniform * drawn < chance)
    q = _at(jnp.pad(draft_probs, ((0, 0), (0, 1), (0, 0))), kept)  # [B, V]
    p = _at(probs, kept)
    rest = jnp.maximum(p - q, 0.0)
    # Rounding can reject where p and q are equal, and then nothing is left over.
    rest = jnp.where(jnp.sum(rest, axis=-1, keepdims=True) > 0.0, rest, p)
    following = jax.vmap(jax.random.categorical)(next_keys, jnp.log(rest))
    return kept, following.astype(jnp.int32)


def _one_pass(
    model: Any,
    num_drafts: int,
    draw: Draw,
    carry: SpeculativeCarry,
    keys: jax.Array,
    stops: jax.Array,
    limit: jax.Array,
) -> SpeculativeCarry:
    # By the row's own count: what a row draws does not depend on the other rows.
    keys = _fold(keys, carry.count)
    live = ~carry.is_done
    segments = jnp.broadcast_to(live[:, None], (live.shape[0], num_drafts + 1))
    drafts, draft_probs = _draft(model, num_drafts, draw, carry, _fold(keys, 0))
    tokens = jnp.concatenate([carry.last[:, None], drafts], axis=1)  # [B, n + 1]
    hidden, pending = verify(model, tokens, segments.astype(jnp.int32), carry.cache)
    logits = draw.allowed(model.unembed(hidden))  # [B, n + 1, V]
    kept, following = judge(drafts, draft_probs, logits, _fold(keys, 1), draw.sampling)
    index = jnp.arange(num_drafts + 1)[None, :]
    drawn = jnp.pad(drafts, ((0, 0), (0, 1)))
    drawn = jnp.where(index == kept[:, None], following[:, None], drawn)
    # The block reads what the trunk read, now from the trunk's own hidden states.
    is_kept = segments & (index <= kept[:, None])
    ahead, drafter = read_drafter(
        model,
        hidden,
        drawn,
        is_kept.astype(jnp.int32),
        carry.drafter,
        carry.cache.length,
    )
    counted = (index == kept[:, None]) & live[:, None]
    carry = dataclasses.replace(
        carry,
        cache=commit(model, pending, jnp.where(live, kept + 1, 0)),
        drafter=drafter,
        hidden=_at(ahead, kept),
        histogram=carry.histogram + counted.astype(jnp.int32),
    )
    return _emit(carry, drawn, kept, stops, limit)


def _draft(
    model: Any,
    num_drafts: int,
    draw: Draw,
    carry: SpeculativeCarry,
    keys: jax.Array,
) -> tuple[jax.Array, jax.Array | None]:
    """Drafts i32[B, n], and f32[B, n, V] what they were drawn from if at random.

    The block's cache is left as it was: what it holds of its own outputs is dropped.
    """
    segments = jnp.where(carry.is_done, 0, 1).astype(jnp.int32)[:, None]
    hidden, cache, length = carry.hidden, carry.drafter, carry.cache.length
    tokens, probs = [], []
    for number in range(num_drafts):
        if number:
            hidden, cache = read_drafter(
                model, hidden[:, None], tokens[-1][:, None], segments, cache, length
            )
            hidden, length = hidden[:, 0], length + segments[:, 0]
        logits = model.unembed(hidden)
        tokens.append(draw(logits, keys, jnp.int32(number)))
        if draw.sampling.temperature > 0.0:
            probs.append(probabilities(draw.allowed(logits), draw.sampling))
    return jnp.stack(tokens, 1), jnp.stack(probs, 1) if probs else None


def _emit(
    carry: SpeculativeCarry,
    drawn: jax.Array,
    kept: jax.Array,
    stops: jax.Array,
    limit: jax.Array,
) -> SpeculativeCarry:
    """Hands out drawn[:, : kept + 1], up to a stop token or the limit.

    Args:
      carry: its `last`, `count`, `is_done` and `tokens` are brought up to date.
      drawn: i32[B, M].
      kept: i32[B].
      stops: i32[...], tokens that end a row and are not handed out.
      limit: i32[], tokens that end a row and are handed out.
    """
    index = jnp.arange(drawn.shape[1])[None, :]
    is_stop = jnp.any(drawn[:, :, None] == stops[None, None, :], axis=-1)
    before_stop = jnp.cumsum(is_stop, axis=1) == 0
    is_drawn = ~carry.is_done[:, None] & (index <= kept[:, None])
    told = is_drawn & before_stop & (carry.count[:, None] + index < limit)
    count = carry.count + jnp.sum(told, axis=1, dtype=jnp.int32)
    columns = carry.tokens.shape[1]
    column = jnp.where(told, carry.count[:, None] + index, columns)
    row = jnp.broadcast_to(jnp.arange(drawn.shape[0])[:, None], drawn.shape)
    return dataclasses.replace(
        carry,
        last=_at(drawn, kept),
        count=count,
        is_done=carry.is_done | jnp.any(is_drawn & is_stop, axis=1) | (count >= limit),
        tokens=carry.tokens.at[row, column].set(drawn, mode="drop"),
    )


def _leading(flags: jax.Array) -> jax.Array:
    """Number of true values before the first false one, bool[B, n] -> i32[B]."""
    return jnp.sum(jnp.cumprod(flags.astype(jnp.int32), axis=1), axis=1)


def _at(x: jax.Array, index: jax.Array) -> jax.Array:
    """x[b, index[b]] of x [B, T, ...]."""
    where = index.reshape(-1, *(1,) * (x.ndim - 1))
    return jnp.take_along_axis(x, where, axis=1)[:, 0]


def _fold(keys: jax.Array, number: jax.Array | int) -> jax.Array:
    """Folds one number, or one a row, into each row's key."""
    numbers = jnp.broadcast_to(jnp.asarray(number, jnp.uint32), keys.shape)
    return jax.vmap(jax.random.fold_in)(keys, numbers)
