"""All tokens, in pages that rows take as they grow."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jaxaccel.cache.attend import decode_attention, held_attention
from jaxaccel.cache.layer_state import (
    AttentionSpec,
    LayerState,
    Tokens,
    by_head,
    rows_of,
)
from jaxaccel.cache.policy import CachePolicy, Selection, check_room, padded_to


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class PagedState(LayerState):
    """A pool of pages for all rows, and which of them a row has.

    Attributes:
      k, v: [P, G, page, K], the pool; keys after the rotary embedding.
      table: i32[B, N], the pages of a row in the order of its tokens, -1 for none.
      length: i32[B], tokens read.
      lost: i32[B], tokens for which there was no page.
    """

    k: jax.Array
    v: jax.Array
    table: jax.Array
    length: jax.Array
    lost: jax.Array

    EMPTY: ClassVar[dict[str, Any]] = {"table": -1}
    SHARED: ClassVar[tuple[str, ...]] = ("k", "v")


@dataclasses.dataclass(frozen=True, kw_only=True)
class PagedCacheConfig(CachePolicy):
    """`DenseCacheConfig` with memory for the tokens that there are.

    A row takes a page when its last one is full, and gives all of them back when it is
    reset. Tokens without a page are counted and lost; `generate` refuses prompts with
    which that could happen.

    Attributes:
      page: tokens per page.
      num_pages: pages of all rows together; `None` for as many as could be needed.

    Source: PagedAttention (arXiv 2309.06180), section 4.1.
    """

    page: int = 64
    num_pages: int | None = None

    def __post_init__(self):
        super().__post_init__()
        self._require_positive("page")
        if self.num_pages is not None and self.num_pages < 1:
            raise ValueError(
                f"PagedCacheConfig: num_pages={self.num_pages} must be positive or None"
            )

    def check_lengths(self, lengths: Sequence[int]) -> None:
        """As `CachePolicy.check_lengths`."""
        needed = sum(-(-length // self.page) for length in lengths)
        if self.num_pages is not None and needed > self.num_pages:
            raise ValueError(
                f"PagedCacheConfig: {len(lengths)} rows of {sum(lengths)} tokens "
                f"together need {needed} pages of {self.page}, there are "
                f"num_pages={self.num_pages}"
            )

    def init(
        self, spec: AttentionSpec, batch: int, max_length: int, dtype: DTypeLike
    ) -> PagedState:
        """As `CachePolicy.init`."""
        width = -(-max_length // self.page)
        pages = batch * width if self.num_pages is None else self.num_pages
        pool = (pages, spec.num_kv_heads, self.page, spec.head_dim)
        return PagedState(
            k=jnp.zeros(pool, dtype),
            v=jnp.zeros(pool, dtype),
            table=jnp.full((batch, width), -1, jnp.int32),
            length=jnp.zeros((batch,), jnp.int32),
            lost=jnp.zeros((batch,), jnp.int32),
        )

    def prefill(
        self, state: LayerState, tokens: Tokens, spec: AttentionSpec
    ) -> LayerState:
        """As `CachePolicy.prefill`."""
        del spec
        batch, time = tokens.k.shape[:2]
        check_room(self, time, state.size("table")[1] * self.page, "slots")
        count, pages = tokens.count, -(-time // self.page)
        number = jnp.arange(pages, dtype=jnp.int32)[None, :]
        needs = number * self.page < count[:, None]  # [B, pages]
        table = _take_free(state["table"], needs, state.size("k")[0])

        def paged(x):
            x = padded_to(x, pages * self.page, 1)
            return by_head(x.reshape(-1, self.page, *x.shape[2:])).reshape(
                batch, pages, x.shape[2], self.page, x.shape[3]
            )

        page = jnp.where(table >= 0, table, state.size("k")[0])  # none is dropped
        state = state.put("k", (page,), paged(tokens.k))
        state = state.put("v", (page,), paged(tokens.v))
        state = state.put_block("table", table, (0, 0))
        held = jnp.sum(table >= 0, axis=1, dtype=jnp.int32) * self.page
        return state.replace(length=count, lost=jnp.maximum(count - held, 0))

    def append(
        self, state: LayerState, tokens: Tokens, spec: AttentionSpec
    ) -> LayerState:
        """As `CachePolicy.append`."""
        del spec
        length, is_real = state["length"], tokens.is_real[:, 0]
        table = state["table"]
        row, pool = rows_of(length.shape[0]), state.size("k")[0]
        number = length // self.page
        needs = is_real & (length % self.page == 0) & (number < table.shape[1])
        fresh = _take_free(table, needs[:, None], pool)[:, 0]
        # A full table has no room for a page either.
        where = jnp.where(needs, number, table.shape[1])
        table = table.at[row, where].set(fresh, mode="drop")
        page = table.at[row, number].get(mode="fill", fill_value=-1)
        has_page = is_real & (page >= 0)
        at = (jnp.where(has_page, page, pool), slice(None), length % self.page)
        state = state.put("k", at, tokens.k[:, 0]).put("v", at, tokens.v[:, 0])
        lost = (is_real & ~has_page).astype(jnp.int32)
        return state.replace(
            table=table,
            length=length + is_real.astype(jnp.int32),
            lost=state["lost"] + lost,
        )

    def counters(self, state: LayerState) -> dict[str, jax.Array]:
        """As `CachePolicy.counters`: `lost`, see `PagedState`."""
        return {"lost": state["lost"]}

    def attend(
        self,
        state: LayerState,
        tokens: Tokens,
        selection: Selection | None,
        spec: AttentionSpec,
    ) -> tuple[jax.Array, jax.Array]:
        """As `CachePolicy.attend`."""
        del selection
        if spec.decode is not None:
            return held_attention(state, tokens, spec, state["table"])
        table, length = state["table"], state["length"]
        batch, width = table.shape

        def whole(name):  # [B, G, N page, K]
            x = state.take(name, jnp.maximum(table, 0))
            x = jnp.moveaxis(x, 1, 2)
            return x.reshape(batch, x.shape[1], width * self.page, -1)

        token = jnp.arange(width * self.page, dtype=jnp.int32)
        valid = token[None, :] < length[:, None]
        valid = valid & jnp.repeat(table >= 0, self.page, axis=1)
        return decode_attention(
            tokens.q, whole("k"), whole("v"), valid[:, None, :], spec, tokens.sinks
        )


def _take_free(table: jax.Array, needs: jax.Array, num_pages: int) -> jax.Array:
    """Pages that no row has, for rows that need one.

    Args:
      table: i32[B, N], the pages that rows have.
      needs: bool[B, n].
      num_pages: pages of the pool.

    Returns:
      i32[B, n], each page once, the lowest first; -1 where none is needed or left.
    """
    taken = jnp.where(table >= 0, table, num_pages).reshape(-1)
    is_used = jnp.zeros((num_pages,), bool).at[taken].set(True, mode="drop")
    order = jnp.argsort(is_used, stable=True).astype(jnp.int32)
    free = num_pages - jnp.sum(is_used, dtype=jnp.int32)
    rank = jnp.cumsum(needs.reshape(-1).astype(jnp.int32)) - 1
    rank = rank.reshape(needs.shape)
    page = order.at[rank].get(mode="fill", fill_value=-1)
    return jnp.where(needs & (rank < free), page, -1)
