"""What an attention layer holds between calls, and the tokens that it is given."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels._common.dispatch import Implementation


type Rotate = Callable[[jax.Array, jax.Array], jax.Array]
"""(x [B, T, H, K], positions i32[B, T]) -> x rotated; hashable, such as a frozen
dataclass, because it is part of what programs are compiled for."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionSpec:
    """What a cache must know of the attention layer that it serves; hashable.

    Attributes:
      num_heads: query heads H.
      num_kv_heads: key and value heads G; query head h reads h // (H / G).
      head_dim: K, of keys and of values.
      scale: factor on the scores.
      logit_cap: scores become cap * tanh(score / cap); `None` for no cap.
      rotate: the rotary embedding, `None` for none.
      decode: implementation of `pallas_kernels.decode_attention` that caches of all
        tokens run; `None` multiplies whole caches.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    logit_cap: float | None = None
    rotate: Rotate | None = None
    decode: Implementation | None = None

    def rotated(self, x: jax.Array, positions: jax.Array) -> jax.Array:
        """Keys of each kv head, [B, G, N, K], at positions i32[B, 1 or G, N]."""
        if self.rotate is None:
            return x
        batch, heads, count, width = x.shape
        positions = jnp.broadcast_to(positions, (batch, heads, count))
        flat = x.reshape(batch * heads, count, 1, width)
        return self.rotate(flat, positions.reshape(-1, count)).reshape(x.shape)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Tokens:
    """New tokens of one attention layer.

    Attributes:
      q_pre, k_pre: [B, T, H, K] and [B, T, G, K] before the rotary embedding.
      q, k: the same after it.
      v: [B, T, G, K].
      positions: i32[B, T], index inside the row's document.
      is_real: bool[B, T], false on padding, which no cache keeps.
      sinks: f32[H], a logit per head that takes weight and gives nothing, or `None`.
    """

    q_pre: jax.Array
    k_pre: jax.Array
    q: jax.Array
    k: jax.Array
    v: jax.Array
    positions: jax.Array
    is_real: jax.Array
    sinks: jax.Array | None = None

    @property
    def count(self) -> jax.Array:
        """i32[B], real tokens."""
        return jnp.sum(self.is_real, axis=1, dtype=jnp.int32)

    def left_aligned(self) -> Self:
        """The same with each row's real tokens in front, in their order."""
        order = jnp.argsort(~self.is_real, axis=1, stable=True)  # [B, T]

        def move(x):
            index = order.reshape(order.shape + (1,) * (x.ndim - 2))
            return jnp.take_along_axis(x, index, axis=1)

        names = ("q_pre", "k_pre", "q", "k", "v", "positions", "is_real")
        return dataclasses.replace(self, **{n: move(getattr(self, n)) for n in names})

    def in_place(self, x: jax.Array) -> jax.Array:
        """[B, T, H, K] of the tokens of `left_aligned`, where these tokens stand."""
        before = jnp.cumsum(self.is_real, axis=1, dtype=jnp.int32)
        index = jnp.arange(self.is_real.shape[1], dtype=jnp.int32)[None]
        padding = before[:, -1:] + index - before
        index = jnp.where(self.is_real, before - 1, padding)
        return jnp.take_along_axis(x, index[..., None, None], axis=1)


@dataclasses.dataclass(frozen=True)
class LayerState:
    """Base of the caches' states: named arrays, of one layer or of several stacked.

    Reading and writing look the same in both cases. With several layers every array
    has a leading axis of layers, and `index` says which of them is meant: a write then
    changes that layer's part where it is, so that a loop over layers which carries the
    state copies none of it.

    Arrays are [B, ...] per layer, those of `SHARED` apart.

    Attributes:
      index: i32[], the layer; `None` where the arrays are one layer's.
    """

    index: jax.Array | None = dataclasses.field(default=None, kw_only=True)

    EMPTY: ClassVar[dict[str, Any]] = {}
    """What an empty row holds, where it is not 0."""
    SHARED: ClassVar[tuple[str, ...]] = ()
    """Arrays that `reset` leaves as they are."""

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """The arrays' names."""
        return tuple(f.name for f in dataclasses.fields(cls) if f.name != "index")

    def __getitem__(self, name: str) -> jax.Array:
        """One layer's array."""
        array = getattr(self, name)
        if self.index is None:
            return array
        return jax.lax.dynamic_index_in_dim(array, self.index, keepdims=False)

    def place(self, name: str, *where: Any) -> tuple[jax.Array, tuple[Any, ...]]:
        """The array of all layers, and where in it a layer's elements are."""
        array = getattr(self, name)
        return array, where if self.index is None else (self.index, *where)

    def size(self, name: str) -> tuple[int, ...]:
        """The shape of one layer's array."""
        shape = getattr(self, name).shape
        return shape if self.index is None else shape[1:]

    def dtype(self, name: str) -> jnp.dtype:
        """The dtype of an array."""
        return jnp.dtype(getattr(self, name).dtype)

    def take(self, name: str, *where: Any) -> jax.Array:
        """`self[name][where]` without a copy of the layer's array."""
        array, where = self.place(name, *where)
        return array[where]

    def put(self, name: str, where: tuple[Any, ...], value: jax.Array) -> Self:
        """Writes elements; what lies outside of the array is dropped."""
        array, where = self.place(name, *where)
        written = array.at[where].set(value.astype(array.dtype), mode="drop")
        return dataclasses.replace(self, **{name: written})

    def put_block(self, name: str, block: jax.Array, start: tuple[Any, ...]) -> Self:
        """Writes a box of elements, which must lie inside of the array.

        Where the array is in host memory, this is the one way to write it without a
        copy of the whole.
        """
        array = getattr(self, name)
        block = block.astype(array.dtype)
        if self.index is not None:
            block, start = block[None], (self.index, *start)
        if is_on_host(array):
            block = jax.device_put(block, jax.memory.Space.Host)
        at = [jnp.asarray(i, jnp.int32) for i in start]
        written = jax.lax.dynamic_update_slice(array, block, at)
        return dataclasses.replace(self, **{name: written})

    def replace(self, **arrays: jax.Array) -> Self:
        """Writes whole arrays of the layer."""
        if self.index is None:
            held = {n: a.astype(getattr(self, n).dtype) for n, a in arrays.items()}
            return dataclasses.replace(self, **held)
        state = self
        for name, array in arrays.items():
            state = state.put_block(name, array, (0,) * array.ndim)
        return state

    def reset(self, rows: jax.Array) -> Self:
        """Empties rows bool[B] of every layer of a stacked state."""
        held = {}
        for name in self.names():
            array = getattr(self, name)
            if name in self.SHARED or array is None:
                continue
            mask = rows.reshape((1, -1) + (1,) * (array.ndim - 2))
            empty = jnp.asarray(self.EMPTY.get(name, 0), array.dtype)
            held[name] = jnp.where(mask, empty, array)
        return dataclasses.replace(self, **held)


def is_on_host(array: Any) -> bool:
    """Whether an array, traced or not, is in host memory."""
    return getattr(jax.typeof(array), "memory_space", None) == jax.memory.Space.Host


def by_head(x: jax.Array) -> jax.Array:
    """[B, T, G, K] -> [B, G, T, K], the order in which caches keep tokens."""
    return jnp.swapaxes(x, 1, 2)


def rows_of(batch: int) -> jax.Array:
    """i32[B], the row numbers, for `LayerState.take` and `put`."""
    return jnp.asarray(np.arange(batch, dtype=np.int32))


def ring_positions(length: jax.Array, size: int, first: int = 0) -> jax.Array:
    """Which token is in each slot of a ring.

    Token p >= first is written to slot (p - first) mod size.

    Args:
      length: i32[B], tokens written, those before `first` among them.
      size: slots of the ring, at least 1.
      first: tokens that never enter the ring.

    Returns:
      i32[B, size], -1 where a slot is empty.
    """
    newest = length[:, None] - 1 - first  # [B, 1], counted from `first`
    slot = jnp.arange(size, dtype=jnp.int32)[None, :]
    offset = newest - jnp.mod(newest - slot, size)
    return jnp.where(offset >= 0, offset + first, -1)


def gather_tokens(x: jax.Array, where: jax.Array) -> jax.Array:
    """Tokens of each kv head.

    Args:
      x: [B, G, S, ...].
      where: i32[B, 1 or G, N], in 0..S-1.

    Returns:
      [B, G, N, ...].
    """
    batch, heads = x.shape[:2]
    where = jnp.broadcast_to(where, (batch, heads, where.shape[-1]))
    index = where.reshape(where.shape + (1,) * (x.ndim - 3))
    return jnp.take_along_axis(x, index, axis=2)
