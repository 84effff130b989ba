"""Keys of low rank on the device, values in host memory, and landmarks to choose by."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jaxaccel.cache import low_rank, shadowkv_attend, slot_map
from jaxaccel.cache.attend import decode_attention
from jaxaccel.cache.choose import best, every
from jaxaccel.cache.host_values import Tier, choose_tier, fetch
from jaxaccel.cache.layer_state import (
    AttentionSpec,
    LayerState,
    Tokens,
    by_head,
    gather_tokens,
    ring_positions,
    rows_of,
)
from jaxaccel.cache.policy import CachePolicy, Selection, check_room
from jaxaccel.cache.shadowkv_state import ShadowKVState, chunk_statistics
from pallas_kernels._common.dispatch import Implementation
from pallas_kernels.host_gather import api as host_gather
from pallas_kernels.landmark_scores import api as landmark_scores
from pallas_kernels.top_k_select import api as top_k_select


_COPIED = 8


@dataclasses.dataclass(frozen=True)
class _Sizes:
    """The sizes of a state: C, N, M, O and R, and the rank."""

    chunks: int
    chosen: int
    slots: int
    outliers: int
    ring: int
    rank: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShadowKVCacheConfig(CachePolicy):
    """Reads chunks that their landmarks name; keys are computed, values fetched.

    A chunk's keys are its rows of a low-rank factor times the row's basis, rotated: the
    same at every step, whatever was chosen before. Chunks whose keys are unlike their
    mean are outliers, kept and read as they are; so are the first chunks, where the
    attention sinks are, and the newest tokens. Generated tokens become chunks as they
    leave the ring.

    Attributes:
      budget: tokens that the landmarks choose, per row and kv head.
      chunk: tokens per chunk, c.
      rank: r, of the keys of all kv heads together; `None` for 5/32 of their width.
      num_outliers: outlier chunks of the prompt, per row and kv head, O; those of
        `num_sinks` among them.
      num_sinks: first chunks of a row that are outliers whatever their keys are.
      generated_outliers: places for further outliers, of generated tokens.
      residual_limit: a generated chunk is an outlier, while there are places, if the
        basis misses more than this share of one of its keys.
      local_window: newest tokens that are always read, at least; a multiple of `chunk`.
      refresh_every: steps between two choices.
      slots: chunks whose values are on the device, per row and kv head, M; `None` for
        twice the chosen ones in the tier "host", and none in the tier "device".
      values: where values are, "host" or "device"; `None` is the host where it has
        memory of its own that the device can read.
      fetch: implementation of `pallas_kernels.host_gather`, which reads them.
      landmarks: implementation of `pallas_kernels.landmark_scores`, which scores them.
      top_k: implementation of `pallas_kernels.top_k_select`, which takes the best.
      attention: implementation of `pallas_kernels.sparse_decode_attention`, which
        attends to them; `None` for gathers and one softmax.
      oversampling: see `low_rank.basis`.
      iterations: see `low_rank.basis`.

    Source: ShadowKV (arXiv 2410.21465). Different from it: sinks are named, selection
    is in f32 and the log domain, keys are never cached, generated tokens are chunked,
    and slots are more than chosen chunks.
    """

    budget: int = 2048
    chunk: int = 8
    rank: int | None = None
    num_outliers: int = 48
    num_sinks: int = 1
    generated_outliers: int = 16
    residual_limit: float = 0.3
    local_window: int = 32
    refresh_every: int = 1
    slots: int | None = None
    values: Tier | None = None
    fetch: Implementation | None = None
    landmarks: Implementation | None = None
    top_k: Implementation | None = None
    attention: Implementation | None = None
    oversampling: int = 16
    iterations: int = 3

    def __post_init__(self):
        super().__post_init__()
        self._require_positive("chunk", "refresh_every", "local_window")
        name = type(self).__name__
        for field in ("num_outliers", "num_sinks", "generated_outliers"):
            if getattr(self, field) < 0:
                raise ValueError(
                    f"{name}: {field}={getattr(self, field)} must not be negative"
                )
        if self.num_sinks > self.num_outliers:
            raise ValueError(
                f"{name}: num_sinks={self.num_sinks} are outliers, of which there are "
                f"num_outliers={self.num_outliers}"
            )
        for field in ("budget", "local_window"):
            value = getattr(self, field)
            if value < self.chunk or value % self.chunk:
                raise ValueError(
                    f"{name}: {field}={value} must be a multiple of chunk={self.chunk}"
                )
        if self.rank is not None and self.rank < 1:
            raise ValueError(f"{name}: rank={self.rank} must be positive or None")
        if self.values not in (None, "host", "device"):
            raise ValueError(
                f"{name}: values={self.values!r} is unknown, allowed are 'host', "
                "'device' and None"
            )
        if self.slots is not None and self.slots < self.budget // self.chunk:
            raise ValueError(
                f"{name}: slots={self.slots} must hold the {self.budget // self.chunk} "
                "chunks of the budget"
            )

    def check(self, spec: AttentionSpec, max_length: int) -> None:
        """As `CachePolicy.check`."""
        width = spec.num_kv_heads * spec.head_dim
        if self.rank is not None and self.rank > width:
            raise ValueError(
                f"ShadowKVCacheConfig: rank={self.rank} is more than the {width} "
                f"dimensions of {spec.num_kv_heads} kv heads of {spec.head_dim}"
            )
        if self.fetch is not None:
            # Told before anything is allocated: the rows are those of one chunk.
            table = jax.ShapeDtypeStruct((1, self.chunk * spec.head_dim), jnp.bfloat16)
            ids = jax.ShapeDtypeStruct((1,), jnp.int32)
            host_gather.choose(table, ids, implementation=self.fetch)
        n = self._sizes(spec, max_length)
        heads = spec.num_kv_heads, n.chunks
        if self.landmarks is not None:
            struct, width = jax.ShapeDtypeStruct, spec.head_dim
            landmark_scores.choose(
                struct((1, spec.num_heads, width), jnp.bfloat16),
                struct((1, *heads, width), jnp.bfloat16),
                struct((1, *heads), jnp.bool_),
                implementation=self.landmarks,
            )
        if self.top_k is not None:
            scores = jax.ShapeDtypeStruct((1, *heads), jnp.float32)
            top_k_select.choose(scores, n.chosen, implementation=self.top_k)
        if self.attention is not None:
            shadowkv_attend.check(self, spec, max_length, self.attention)

    @property
    def _tier(self) -> Tier:
        return choose_tier(self.values, "ShadowKVCacheConfig: values")

    def _sizes(self, spec: AttentionSpec, max_length: int) -> _Sizes:
        # One place more than chunks: what is no chunk yet is written there.
        chunks = max_length // self.chunk + 1
        if chunks >= _COPIED * _COPIED:
            # The kernel that scores landmarks copies as many as one.
            chunks = -(-chunks // _COPIED) * _COPIED
        chosen = min(self.budget // self.chunk, chunks)
        slots = self.slots
        if slots is None:
            slots = 2 * chosen if self._tier == "host" else 0
        width = spec.num_kv_heads * spec.head_dim
        ring = self.local_window + 2 * self.chunk + self.refresh_every - 1
        return _Sizes(
            chunks=chunks,
            chosen=chosen,
            slots=slots and max(min(slots, chunks), chosen),
            outliers=min(self.num_outliers + self.generated_outliers, chunks),
            ring=-(-ring // self.chunk) * self.chunk,
            rank=self.rank or max(width * 5 // 32, 1),
        )

    def host_names(self) -> tuple[str, ...]:
        """As `CachePolicy.host_names`."""
        return ("values",) if self._tier == "host" else ()

    def host_bytes(
        self, spec: AttentionSpec, batch: int, max_length: int, dtype: DTypeLike
    ) -> int:
        """As `CachePolicy.host_bytes`."""
        if self._tier != "host":
            return 0
        chunks = self._sizes(spec, max_length).chunks
        count = batch * spec.num_kv_heads * chunks * self.chunk * spec.head_dim
        return count * jnp.dtype(dtype).itemsize

    def init(
        self, spec: AttentionSpec, batch: int, max_length: int, dtype: DTypeLike
    ) -> ShadowKVState:
        """As `CachePolicy.init`; `values` on the device, see `host_names`."""
        n = self._sizes(spec, max_length)
        c, width, heads = self.chunk, spec.head_dim, spec.num_kv_heads
        shapes = {
            "basis": ((heads * width, n.rank), dtype),
            "rank_used": ((), jnp.int32),
            "a": ((n.chunks, c, n.rank), dtype),
            "landmark": ((heads, n.chunks, width), dtype),
            "excluded": ((heads, n.chunks), jnp.bool_),
            "first": ((n.chunks,), jnp.int32),
            "values": ((heads, n.chunks, c * width), dtype),
            "v_slot": ((heads, n.slots, c * width), dtype),
            "slot_chunk": ((heads, n.slots), jnp.int32),
            "slot_age": ((heads, n.slots), jnp.int32),
            "out_k": ((heads, n.outliers, c, width), dtype),
            "out_v": ((heads, n.outliers, c, width), dtype),
            "out_count": ((), jnp.int32),
            "ring_k": ((heads, n.ring, width), dtype),
            "ring_v": ((heads, n.ring, width), dtype),
            "ring_a": ((n.ring, n.rank), dtype),
            "ring_residual": ((n.ring,), jnp.float32),
            **{
                name: ((), jnp.int32)
                for name in ("start", "seen_start", "seen_outliers")
            },
            "length": ((), jnp.int32),
            "ids": ((heads, n.chosen), jnp.int32),
            "is_chosen": ((heads, n.chosen), jnp.bool_),
            "energy": ((), jnp.float32),
            "residual": ((), jnp.float32),
            "hits": ((), jnp.int32),
            "misses": ((), jnp.int32),
        }
        empty = ShadowKVState.EMPTY
        return ShadowKVState(
            next_chunk=jnp.int32(0),
            step=jnp.int32(0),
            **{
                name: jnp.full((batch, *shape), empty.get(name, 0), kind)
                for name, (shape, kind) in shapes.items()
            },
        )

    def prefill(
        self, state: LayerState, tokens: Tokens, spec: AttentionSpec
    ) -> LayerState:
        """As `CachePolicy.prefill`."""
        c, count = self.chunk, tokens.count
        batch, time = tokens.k.shape[:2]
        room = state.size("first")[1] * c - 1
        check_room(self, time, room, "tokens")
        flat = tokens.k_pre.reshape(batch, time, -1)
        found, rank_used, energy = low_rank.basis(
            low_rank.gram(flat, tokens.is_real),
            state.size("basis")[2],
            oversampling=self.oversampling,
            iterations=self.iterations,
        )
        # What is read later is the stored basis, so keys are written in that one.
        found = found.astype(state.dtype("basis"))
        a = low_rank.project(flat, found)
        kept = jnp.maximum(count // c - self.local_window // c, 0)  # [B], chunks
        state = self._keep_chunks(state, tokens, a, kept)
        ring = ring_positions(count, state.size("ring_a")[1])
        ring = jnp.clip(ring, 0, time - 1)  # [B, R]
        # Of these alone it is asked: for a whole prompt it would be as large as keys.
        ring_a = jnp.take_along_axis(a, ring[:, :, None], axis=1)
        newest = jnp.take_along_axis(flat, ring[:, :, None], axis=1)
        _, residual = low_rank.missing(newest, ring_a, found)
        return state.replace(
            basis=found,
            rank_used=rank_used,
            energy=energy,
            ring_k=gather_tokens(by_head(tokens.k), ring[:, None, :]),
            ring_v=gather_tokens(by_head(tokens.v), ring[:, None, :]),
            ring_a=ring_a,
            ring_residual=residual,
            start=kept * c,
            length=count,
            next_chunk=jnp.int32(time // c),
        )

    def _keep_chunks(
        self, state: LayerState, tokens: Tokens, a: jax.Array, kept: jax.Array
    ) -> LayerState:
        """The first `kept` chunks of each row: landmarks, outliers, factors, values."""
        c, batch = self.chunk, kept.shape[0]
        total = tokens.k.shape[1] // c
        if total == 0:
            return state

        def chunked(x):  # [B, T, G, K] -> [B, G, C, c, K]
            x = by_head(x[:, : total * c])
            return x.reshape(*x.shape[:2], total, c, x.shape[-1])

        k, v = chunked(tokens.k), chunked(tokens.v)
        mean, closeness = chunk_statistics(k)
        number = jnp.arange(total, dtype=jnp.int32)
        is_kept = (number[None, :] < kept[:, None])[:, None, :]  # [B, 1, C]
        closeness = jnp.where(number[None, None] < self.num_sinks, -2.0, closeness)
        closeness = jnp.where(is_kept, closeness, jnp.inf)
        wanted = min(self.num_outliers, total, state.size("out_k")[2])
        excluded = jnp.broadcast_to(~is_kept, closeness.shape)
        if wanted:
            _, outlier = jax.lax.top_k(-closeness, wanted)  # [B, G, O]
            row, head = (
                rows_of(batch)[:, None, None],
                rows_of(k.shape[1])[None, :, None],
            )
            # Places beyond the kept chunks name chunks that are excluded already.
            excluded = excluded.at[row, head, outlier].set(True)
            state = state.put_block("out_k", k[row, head, outlier], (0,) * 5)
            state = state.put_block("out_v", v[row, head, outlier], (0,) * 5)
            state = state.replace(out_count=jnp.minimum(kept, wanted))
        a = a[:, : total * c].reshape(batch, total, c, -1)
        values = v.reshape(*v.shape[:3], -1)
        first = jnp.broadcast_to(number * c, (batch, total))
        state = state.put_block("landmark", mean, (0,) * 4)
        state = state.put_block("excluded", excluded, (0,) * 3)
        state = state.put_block("a", a, (0,) * 4)
        state = state.put_block("first", first, (0,) * 2)
        return state.put_block("values", values, (0,) * 4)

    def append(
        self, state: LayerState, tokens: Tokens, spec: AttentionSpec
    ) -> LayerState:
        """As `CachePolicy.append`; every `chunk` steps, rows give up a chunk."""
        del spec
        length, is_real = state["length"], tokens.is_real[:, 0]
        batch, size = length.shape[0], state.size("ring_a")[1]
        row = rows_of(batch)
        state, a, residual = self._write_in_basis(state, tokens)
        slot = jnp.where(is_real, jnp.mod(length, size), size)
        state = state.put("ring_k", (row, slice(None), slot), tokens.k[:, 0])
        state = state.put("ring_v", (row, slice(None), slot), tokens.v[:, 0])
        state = state.put("ring_a", (row, slot), a)
        state = state.put("ring_residual", (row, slot), residual)
        length = length + is_real.astype(jnp.int32)
        step = state["step"] + 1
        return self._roll(state.replace(length=length, step=step))

    def _write_in_basis(
        self, state: LayerState, tokens: Tokens
    ) -> tuple[LayerState, jax.Array, jax.Array]:
        """The factors f32[B, r] of one key a row, and f32[B], the share they miss.

        While directions are left, as after a prompt with fewer tokens than the rank,
        what a key lacks becomes one: it is then held exactly, and no earlier key has a
        part in that direction.
        """
        batch = tokens.k.shape[0]
        flat = tokens.k_pre.reshape(batch, 1, -1)
        a = low_rank.project(flat, state["basis"])
        lack, residual = low_rank.missing(flat, a, state["basis"])
        lack, residual = lack[:, 0], residual[:, 0]
        used, rank = state["rank_used"], a.shape[2]
        rounding = 8 * float(jnp.finfo(state.dtype("basis")).eps)
        grows = tokens.is_real[:, 0] & (residual > rounding) & (used < rank)
        norm = jnp.linalg.norm(lack, axis=-1, keepdims=True)  # [B, 1]
        direction = lack / jnp.where(norm > 0, norm, 1.0)
        row, place = rows_of(batch), jnp.where(grows, used, rank)
        state = state.put("basis", (row, slice(None), place), direction)
        state = state.replace(rank_used=used + grows.astype(jnp.int32))
        a = a[:, 0].at[row, place].set(norm[:, 0], mode="drop")
        return state, a, jnp.where(grows, 0.0, residual)

    def _roll(self, state: LayerState) -> LayerState:
        """Makes a chunk of the oldest tokens in the ring, in rows that have enough.

        All rows do so at the same steps, so that their chunks have one number and one
        write takes them to the host. Whatever comes of it, the place of the next chunk
        is written at every step, because a GPU's conditional waits for the host; only
        rows that gave up a chunk have one there.
        """
        c, step, number = self.chunk, state["step"], state["next_chunk"]
        start, out_count = state["start"], state["out_count"]
        batch = start.shape[0]
        is_due = (jnp.mod(step, c) == 0) & (number < state.size("first")[1] - 1)
        enough = state["length"] - start >= self.local_window + c
        gives = enough & is_due  # [B]
        offset = jnp.arange(c, dtype=jnp.int32)[None, :]
        slot = jnp.mod(start[:, None] + offset, state.size("ring_a")[1])  # [B, c]
        k = gather_tokens(state["ring_k"], slot[:, None, :])  # [B, G, c, K]
        v = gather_tokens(state["ring_v"], slot[:, None, :])
        a = jnp.take_along_axis(state["ring_a"], slot[:, :, None], axis=1)
        missed = jnp.max(
            jnp.take_along_axis(state["ring_residual"], slot, axis=1), axis=1
        )
        has_place = out_count < state.size("out_k")[2]
        is_outlier = gives & (missed > self.residual_limit) & has_place
        mean, _ = chunk_statistics(k[:, :, None])  # [B, G, 1, K]
        excluded = jnp.broadcast_to(
            ~(gives & ~is_outlier)[:, None, None], (*k.shape[:2], 1)
        )
        state = state.put_block("landmark", mean, (0, 0, number, 0))
        state = state.put_block("excluded", excluded, (0, 0, number))
        state = state.put_block("a", a[:, None], (0, number, 0, 0))
        state = state.put_block("first", start[:, None], (0, number))
        flat = v.reshape(batch, v.shape[1], 1, -1)
        state = state.put_block("values", flat, (0, 0, number, 0))
        place = jnp.where(is_outlier, out_count, state.size("out_k")[2])
        where = (rows_of(batch), slice(None), place)
        state = state.put("out_k", where, k).put("out_v", where, v)
        lost = jnp.where(gives & ~is_outlier, missed, 0.0)
        return state.replace(
            start=start + c * gives.astype(jnp.int32),
            out_count=out_count + is_outlier.astype(jnp.int32),
            residual=jnp.maximum(state["residual"], lost),
            next_chunk=number + is_due.astype(jnp.int32),
        )

    def select(
        self, state: LayerState, tokens: Tokens, spec: AttentionSpec
    ) -> tuple[Selection, LayerState]:
        """As `CachePolicy.select`; brings the values of what it chose into slots."""

        def choose():
            landmark, _ = state.place("landmark")
            weights, _ = landmark_scores.landmark_scores(
                tokens.q[:, 0],
                landmark,
                ~state["excluded"],
                scale=spec.scale,
                logit_cap=spec.logit_cap,
                layer=state.index,
                implementation=self.landmarks,
            )
            return best(weights, state.size("ids")[2], self.top_k)

        last = state["ids"], state["is_chosen"]
        ids, valid = every(self.refresh_every, state["step"] - 1, choose, last)
        if self.refresh_every > 1:
            state = state.replace(ids=ids, is_chosen=valid)
        state = self._see(state)
        if state.size("v_slot")[2] == 0:
            return Selection(ids=ids, valid=valid), state
        # Rows that read padding ask for nothing: their slots stay.
        asks = valid & tokens.is_real[:, :, None]
        plan = slot_map.assign(
            state["slot_chunk"], state["slot_age"], ids, asks, state["step"]
        )
        batch, heads, _ = ids.shape
        row, head = rows_of(batch)[:, None, None], rows_of(heads)[None, :, None]
        fetched = self._fetch(state, ids, plan.is_miss)
        slot = jnp.where(plan.is_miss, plan.slots, state.size("v_slot")[2])
        state = state.put("v_slot", (row, head, slot), fetched)
        misses = jnp.sum(plan.is_miss, axis=(1, 2), dtype=jnp.int32)
        asked = jnp.sum(asks, axis=(1, 2), dtype=jnp.int32)
        state = state.replace(
            slot_chunk=plan.slot_chunk,
            slot_age=plan.slot_age,
            hits=state["hits"] + asked - misses,
            misses=state["misses"] + misses,
        )
        return Selection(ids=ids, valid=valid, slots=plan.slots), state

    def _see(self, state: LayerState) -> LayerState:
        """Notes what the last choice was made of."""
        is_due = jnp.mod(state["step"] - 1, self.refresh_every) == 0
        return state.replace(
            seen_start=jnp.where(is_due, state["start"], state["seen_start"]),
            seen_outliers=jnp.where(is_due, state["out_count"], state["seen_outliers"]),
        )

    def counters(self, state: LayerState) -> dict[str, jax.Array]:
        """As `CachePolicy.counters`.

        Returns:
          `energy`, `residual`, `hits` and `misses`, see `ShadowKVState`; `outliers`, a
          kv head's number of them, and `outlier_share`, what they are of its tokens;
          `fetched_bytes`, f32, of the misses of all kv heads.
        """
        tokens = jnp.maximum(state["length"], 1).astype(jnp.float32)
        outliers, misses = state["out_count"], state["misses"]
        row_bytes = state.size("values")[-1] * state.dtype("values").itemsize
        return {
            **{name: state[name] for name in ("energy", "residual", "hits")},
            "misses": misses,
            "fetched_bytes": misses.astype(jnp.float32) * row_bytes,
            "outliers": outliers,
            "outlier_share": outliers.astype(jnp.float32) * self.chunk / tokens,
        }

    def _fetch(
        self, state: LayerState, ids: jax.Array, is_wanted: jax.Array
    ) -> jax.Array:
        """The values of chunks i32[B, G, N], [B, G, N, c K] on the device."""
        batch, heads, _ = ids.shape
        table, _ = state.place("values")
        layer = jnp.int32(0) if state.index is None else state.index
        row, head = rows_of(batch)[:, None, None], rows_of(heads)[None, :, None]
        first = ((layer * batch + row) * heads + head) * table.shape[-2]
        rows = jnp.where(is_wanted, first + ids, -1)
        return fetch(table, rows, self.fetch)

    def attend(
        self,
        state: LayerState,
        tokens: Tokens,
        selection: Selection | None,
        spec: AttentionSpec,
    ) -> tuple[jax.Array, jax.Array]:
        """As `CachePolicy.attend`: chosen chunks, outliers, and the ring."""
        assert selection is not None  # of `select`
        in_ring = ring_positions(state["length"], state.size("ring_a")[1])
        in_ring = (in_ring >= 0) & (in_ring >= state["seen_start"][:, None])
        if self.attention is not None:
            return shadowkv_attend.attend(
                state, tokens, selection, spec, in_ring, self.attention
            )
        c, ids = self.chunk, selection.ids
        batch, heads, _ = ids.shape
        k = self._chunk_keys(state, ids, spec)  # [B, G, N c, K]
        if selection.slots is None:
            v = self._fetch(state, ids, selection.valid)
        else:
            row, head = rows_of(batch)[:, None, None], rows_of(heads)[None, :, None]
            v = state.take("v_slot", row, head, selection.slots)
        out_k, out_v = state["out_k"], state["out_v"]
        ring_k, ring_v = state["ring_k"], state["ring_v"]
        place = jnp.arange(out_k.shape[2], dtype=jnp.int32)
        is_outlier = place[None, :] < state["seen_outliers"][:, None]  # [B, O]

        def per_head(x):
            return jnp.broadcast_to(x[:, None, :], (batch, heads, x.shape[-1]))

        def tokens_of(x):
            return x.reshape(batch, heads, -1, spec.head_dim)

        valid = [
            jnp.repeat(selection.valid, c, axis=-1),
            per_head(jnp.repeat(is_outlier, c, axis=-1)),
            per_head(in_ring),
        ]
        keys = [k.astype(ring_k.dtype), tokens_of(out_k), ring_k]
        values = [tokens_of(v), tokens_of(out_v), ring_v]
        return decode_attention(
            tokens.q,
            jnp.concatenate(keys, axis=2),
            jnp.concatenate(values, axis=2),
            jnp.concatenate(valid, axis=2),
            spec,
            tokens.sinks,
        )

    def _chunk_keys(
        self, state: LayerState, ids: jax.Array, spec: AttentionSpec
    ) -> jax.Array:
        """The keys of chunks i32[B, G, N], rotated, f32[B, G, N c, K]."""
        batch, heads, count = ids.shape
        row = rows_of(batch)[:, None, None]
        a = state.take("a", row, ids)  # [B, G, N, c, r]
        basis = state["basis"].reshape(batch, heads, spec.head_dim, -1)
        k = jnp.einsum(
            "bgncr,bgkr->bgnck",
            a,
            basis,
            precision=jax.lax.Precision.HIGHEST,
            preferred_element_type=jnp.float32,
        ).reshape(batch, heads, count * self.chunk, spec.head_dim)
        offset = jnp.arange(self.chunk, dtype=jnp.int32)
        first = state.take("first", row, ids)  # [B, G, N]
        positions = (first[..., None] + offset[None, None, None]).reshape(
            batch, heads, -1
        )
        return spec.rotated(k, positions)
