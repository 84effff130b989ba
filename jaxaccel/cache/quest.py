"""All tokens, of which a query reads the pages that could matter most."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jaxaccel.cache.attend import decode_attention
from jaxaccel.cache.choose import best, check_schedule, every
from jaxaccel.cache.full import FullState, empty_tokens, keep_prompt, keep_token
from jaxaccel.cache.layer_state import AttentionSpec, LayerState, Tokens, rows_of
from jaxaccel.cache.policy import CachePolicy, Selection, padded_to


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class QuestState(FullState):
    """`FullState` with the range of the keys in each page.

    Attributes:
      low, high: [B, G, P, K], the smallest and largest key of a page, by dimension.
      step: i32[], decoding steps.
      ids, is_chosen: i32 and bool[B, G, N], the last choice.
    """

    low: jax.Array
    high: jax.Array
    step: jax.Array
    ids: jax.Array
    is_chosen: jax.Array

    EMPTY: ClassVar[dict[str, Any]] = {"low": float("inf"), "high": -float("inf")}
    SHARED: ClassVar[tuple[str, ...]] = ("step",)


@dataclasses.dataclass(frozen=True, kw_only=True)
class QuestCacheConfig(CachePolicy):
    """Reads the pages with the largest upper bound on a score, and the newest tokens.

    The query heads of a kv head choose together, by the largest of their bounds. The
    method leaves the first two layers dense; `CachePlanConfig.layers` says so.

    Attributes:
      budget: tokens of the chosen pages, per row and kv head.
      page: tokens per page.
      local_window: newest tokens that are always read.
      refresh_every: steps between two choices.

    Source: Quest (arXiv 2406.10774), section 3.
    """

    budget: int = 2048
    page: int = 16
    local_window: int = 32
    refresh_every: int = 1

    def __post_init__(self):
        super().__post_init__()
        self._require_positive("page", "local_window", "refresh_every")
        if self.budget < self.page or self.budget % self.page:
            raise ValueError(
                f"QuestCacheConfig: budget={self.budget} must be a multiple of "
                f"page={self.page}"
            )
        check_schedule(
            "QuestCacheConfig", self.local_window, self.refresh_every, self.page
        )

    def init(
        self, spec: AttentionSpec, batch: int, max_length: int, dtype: DTypeLike
    ) -> QuestState:
        """As `CachePolicy.init`."""
        pages = -(-max_length // self.page)
        chosen = min(self.budget // self.page, pages)
        heads = (batch, spec.num_kv_heads)
        bounds = (*heads, pages, spec.head_dim)
        return QuestState(
            **empty_tokens(spec, batch, max_length, dtype),
            low=jnp.full(bounds, jnp.inf, dtype),
            high=jnp.full(bounds, -jnp.inf, dtype),
            step=jnp.int32(0),
            ids=jnp.zeros((*heads, chosen), jnp.int32),
            is_chosen=jnp.zeros((*heads, chosen), bool),
        )

    def prefill(
        self, state: LayerState, tokens: Tokens, spec: AttentionSpec
    ) -> LayerState:
        """As `CachePolicy.prefill`."""
        del spec
        state = keep_prompt(self, state, tokens)
        time = tokens.k.shape[1]
        pages = -(-time // self.page)
        k = padded_to(tokens.k, pages * self.page, 1)
        is_real = padded_to(tokens.is_real, pages * self.page, 1, value=False)

        def reduced(reduce, nothing):
            masked = jnp.where(is_real[:, :, None, None], k, nothing)
            paged = masked.reshape(k.shape[0], pages, self.page, *k.shape[2:])
            return jnp.swapaxes(reduce(paged, axis=2), 1, 2)  # [B, G, P, K]

        infinity = jnp.asarray(jnp.inf, k.dtype)
        state = state.put_block("low", reduced(jnp.min, infinity), (0, 0, 0, 0))
        return state.put_block("high", reduced(jnp.max, -infinity), (0, 0, 0, 0))

    def append(
        self, state: LayerState, tokens: Tokens, spec: AttentionSpec
    ) -> LayerState:
        """As `CachePolicy.append`."""
        del spec
        length, is_real = state["length"], tokens.is_real[:, 0]
        row, pages = rows_of(length.shape[0]), state.size("low")[2]
        page = jnp.where(is_real, length // self.page, pages)
        k = tokens.k[:, 0].astype(state.dtype("low"))
        where = (row, slice(None), jnp.minimum(page, pages - 1))
        low = jnp.minimum(state.take("low", *where), k)
        high = jnp.maximum(state.take("high", *where), k)
        state = state.put("low", (row, slice(None), page), low)
        state = state.put("high", (row, slice(None), page), high)
        return keep_token(state.replace(step=state["step"] + 1), tokens)

    def select(
        self, state: LayerState, tokens: Tokens, spec: AttentionSpec
    ) -> tuple[Selection, LayerState]:
        """As `CachePolicy.select`, of pages that the window does not cover for good."""

        def choose():
            low, high = state["low"], state["high"]
            first = jnp.arange(low.shape[2], dtype=jnp.int32) * self.page
            # What the window covers now, but not at the last step before the next
            # choice, may be chosen, too: else it would be seen by no step.
            outside = state["length"] - self.local_window + self.refresh_every - 1
            may = (first[None, :] < outside[:, None])[:, None, :]  # [B, 1, P]
            bounds = upper_bounds(tokens.q, low, high, may, spec)
            return best(jnp.where(may, bounds, -jnp.inf), state.size("ids")[2])

        last = state["ids"], state["is_chosen"]
        ids, valid = every(self.refresh_every, state["step"] - 1, choose, last)
        if self.refresh_every > 1:
            state = state.replace(ids=ids, is_chosen=valid)
        return Selection(ids=ids, valid=valid), state

    def attend(
        self,
        state: LayerState,
        tokens: Tokens,
        selection: Selection | None,
        spec: AttentionSpec,
    ) -> tuple[jax.Array, jax.Array]:
        """As `CachePolicy.attend`."""
        assert selection is not None  # of `select`
        length = state["length"]
        batch, heads, _ = selection.ids.shape
        offset = jnp.arange(self.page, dtype=jnp.int32)[None, None, None]
        paged = (selection.ids[..., None] * self.page + offset).reshape(
            batch, heads, -1
        )
        # A page that reaches into the window is read up to it.
        outside = (length - self.local_window)[:, None, None]
        is_read = jnp.repeat(selection.valid, self.page, axis=-1) & (paged < outside)
        newest = jnp.arange(-self.local_window, 0, dtype=jnp.int32)[None, None]
        newest = jnp.broadcast_to(
            newest + length[:, None, None], (batch, heads, self.local_window)
        )
        where = jnp.concatenate([paged, newest], axis=-1)
        valid = jnp.concatenate([is_read, newest >= 0], axis=-1)
        where = jnp.clip(where, 0, state.size("k")[2] - 1)
        row, head = rows_of(batch)[:, None, None], rows_of(heads)[None, :, None]
        k = state.take("k", row, head, where)
        v = state.take("v", row, head, where)
        return decode_attention(tokens.q, k, v, valid, spec, tokens.sinks)


def upper_bounds(
    q: jax.Array, low: jax.Array, high: jax.Array, may: jax.Array, spec: AttentionSpec
) -> jax.Array:
    """The most that a score with any key between `low` and `high` can be.

    Args:
      q: [B, 1, H, K].
      low, high: [B, G, P, K].
      may: bool[B, 1, P], false where a page has no bounds.
      spec: the layer.

    Returns:
      f32[B, G, P], the largest of a kv head's query heads. A dimension adds the larger
      of q low and q high: q high where q is positive, else q low.
    """
    batch, width = q.shape[0], q.shape[3]
    groups = low.shape[1]
    q = spec.scale * q.astype(jnp.float32).reshape(batch, groups, -1, width)

    def product(q, bound):
        bound = jnp.where(may[..., None], bound, jnp.zeros((), bound.dtype))
        return jnp.einsum(
            "bgrk,bgpk->bgrp",
            q,
            bound.astype(jnp.float32),
            precision=jax.lax.Precision.HIGHEST,
        )

    bounds = product(jnp.maximum(q, 0.0), high) + product(jnp.minimum(q, 0.0), low)
    return jnp.max(bounds, axis=2)
