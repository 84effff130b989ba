"""Which tiles of a score matrix a kernel visits, and which of them need no mask.

Every mask that the kernels have lets a query see one interval of keys: documents are
runs of a row, and causal, window and prefix masks cut such a run at its ends. Two
integers per query are therefore the whole mask, and four per tile say where a kernel
begins and ends and which part between needs no comparison. All of it is small; it is
built once per batch and handed to every layer.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp


# The length of a tile in the inner direction of both tables; kernels visit multiples.
TILE = 64
# Both ends of all intervals of a row that intervals cannot say: o is NaN there.
INVALID = -1


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=(
        *("key_start", "key_stop"),
        *("q_tiles", "kv_tiles", "q_order", "kv_order"),
        *("tile_keys", "first_pair"),
    ),
    meta_fields=(
        *("time", "length", "block_q", "block_kv", "causal", "window", "prefix"),
        "documents",
    ),
)
@dataclasses.dataclass(frozen=True, kw_only=True)
class TileBounds:
    """What `tile_bounds` makes of a mask.

    A table has four columns per block of its outer direction: the first and the
    one-past-last inner tile of 64 that any pair of the block allows, and the first
    and one-past-last of the inner tiles, inside those, with all pairs allowed. An
    empty range begins and ends at the same tile.

    Attributes:
      key_start, key_stop: i32[B, T'], T padded to a multiple of `block_q`: query t
        sees the keys in [key_start, key_stop). 0 and 0 for a query that sees nothing,
        -1 and -1 in rows that are not valid.
      q_tiles: i32[B, T' / block_q, 4], tiles of keys.
      kv_tiles: i32[B, S' / block_kv, 4], tiles of queries; S padded likewise.
      q_order: i32[B T' / block_q], row * blocks + block of each block of queries, the
        one with most tiles first.
      kv_order: i32[B S' / block_kv], the same for blocks of keys.
      tile_keys: i32[B, T' / 64, 2], the first and one-past-last tile of keys that a
        tile of 64 queries sees.
      first_pair: i32[B, S' / block_kv]; this plus the index of a tile of queries is
        its place in a list of all pairs of a block of keys and a tile of queries that
        `kv_tiles` has for a row. Every tile of keys in `tile_keys` is in such a pair.
      time, length: T and S.
      block_q, block_kv: outer blocks, multiples of 64.
      causal, window: the mask's options, compared with those of the call.
      prefix: whether there are prefixes.
      documents: whether there are segment ids.
    """

    key_start: jax.Array
    key_stop: jax.Array
    q_tiles: jax.Array
    kv_tiles: jax.Array
    q_order: jax.Array
    kv_order: jax.Array
    tile_keys: jax.Array
    first_pair: jax.Array
    time: int
    length: int
    block_q: int
    block_kv: int
    causal: bool
    window: int | None
    prefix: bool
    documents: bool

    @property
    def pairs(self) -> jax.Array:
        """How long the list of `first_pair` is in the row where it is longest, i32."""
        return jnp.max(self.first_pair[:, -1] + self.kv_tiles[:, -1, 1])

    @property
    def most_pairs(self) -> int:
        """How long the list of `first_pair` can be, whatever the documents are.

        A window bounds the queries that see a block of keys from above, a causal mask
        without prefixes from below.
        """
        tiles = self.key_start.shape[1] // TILE
        total = 0
        for begin in range(0, self.length, self.block_kv):
            first, stop = 0, tiles
            if self.causal and not self.prefix:
                first = begin // TILE
            if self.window is not None:
                last = begin + self.block_kv + self.window - 1
                stop = min(stop, -(-last // TILE))
            total += max(0, stop - first)
        return total


def _runs(
    q_ids: jax.Array, kv_ids: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The run of keys with each query's id, and whether the row has such runs.

    Args:
      q_ids: i32[B, T], 0 for padding.
      kv_ids: i32[B, S].

    Returns:
      start and stop, i32[B, T]; bool[B], false where ids descend or a document is
      interrupted by padding.
    """
    # Padding has the id of the document that it follows.
    before = jax.lax.cummax(kv_ids, axis=1)
    is_key = kv_ids != 0
    valid = jnp.all(~is_key | (kv_ids == before), axis=1)
    resumed = is_key[:, 1:] & ~is_key[:, :-1] & (before[:, 1:] == before[:, :-1])
    valid &= ~jnp.any(resumed, axis=1)

    def search(side):
        find = functools.partial(jnp.searchsorted, side=side, method="scan_unrolled")
        return jax.vmap(find)(before, q_ids).astype(jnp.int32)

    start = search("left")
    stop = _after(is_key, start, search("right"))
    return start, jnp.where(q_ids == 0, start, stop), valid


def _after(first: jax.Array, start: jax.Array, stop: jax.Array) -> jax.Array:
    """One past the last marked key in [start, stop), if marked ones come first.

    Args:
      first: bool[B, S], the marks.
      start, stop: i32[B, T].

    Returns:
      i32[B, T], `start` where none is marked.
    """
    counts = jnp.cumsum(first.astype(jnp.int32), axis=1)
    counts = jnp.pad(counts, ((0, 0), (1, 0)))  # [B, S + 1]
    inside = jnp.take_along_axis(counts, stop, axis=1)
    return start + inside - jnp.take_along_axis(counts, start, axis=1)


def _prefixes_are_first(is_prefix: jax.Array, kv_ids: jax.Array | None) -> jax.Array:
    """bool[B], false where a prefix token follows another one of its document."""
    late = is_prefix[:, 1:] & ~is_prefix[:, :-1]
    if kv_ids is not None:
        late &= (kv_ids[:, 1:] == kv_ids[:, :-1]) & (kv_ids[:, 1:] != 0)
    return ~jnp.any(late, axis=1)


def key_intervals(
    *,
    batch: int,
    time: int,
    length: int,
    q_segment_ids: jax.Array | None,
    kv_segment_ids: jax.Array | None,
    causal: bool,
    window: int | None,
    is_prefix: jax.Array | None,
) -> tuple[jax.Array, jax.Array]:
    """The keys that each query sees; arguments as for `tile_bounds`.

    Returns:
      start and stop, i32[B, T]; equal for a query that sees nothing, `INVALID` in
      rows whose documents are no runs or whose prefixes are not at their start.
    """
    index = jnp.broadcast_to(jnp.arange(time, dtype=jnp.int32)[None], (batch, time))
    start, stop = jnp.zeros_like(index), jnp.full_like(index, length)
    valid = None
    if q_segment_ids is not None and kv_segment_ids is not None:
        start, stop, valid = _runs(
            q_segment_ids.astype(jnp.int32), kv_segment_ids.astype(jnp.int32)
        )
    if causal:
        last = index + 1
        if is_prefix is not None:
            last = jnp.maximum(last, _after(is_prefix, start, stop))
            first = _prefixes_are_first(is_prefix, kv_segment_ids)
            valid = first if valid is None else valid & first
        stop = jnp.minimum(stop, last)
    if window is not None:
        start = jnp.maximum(start, index - (window - 1))
    empty = stop <= start
    start, stop = jnp.where(empty, 0, start), jnp.where(empty, 0, stop)
    if valid is not None:
        start, stop = (jnp.where(valid[:, None], x, INVALID) for x in (start, stop))
    return start, stop


def _blocks(x: jax.Array, size: int) -> jax.Array:
    return x.reshape(x.shape[0], -1, size)


def _ranges(
    some: tuple[jax.Array, jax.Array], full: tuple[jax.Array, jax.Array]
) -> jax.Array:
    """The table of two ranges per block, each (first, stop), empty ones repaired."""
    first, stop = some
    stop = jnp.maximum(first, stop)
    inner_first = jnp.clip(full[0], first, stop)
    inner_stop = jnp.clip(full[1], inner_first, stop)
    empty = inner_first == inner_stop
    inner_first = jnp.where(empty, first, inner_first)
    inner_stop = jnp.where(empty, first, inner_stop)
    return jnp.stack([first, stop, inner_first, inner_stop], axis=-1)


def _q_tiles(start: jax.Array, stop: jax.Array, block: int) -> jax.Array:
    """Table of blocks of queries from intervals of keys, [B, T'] each."""
    start, stop = _blocks(start, block), _blocks(stop, block)
    seeing = stop > start
    big = jnp.iinfo(jnp.int32).max - TILE
    first = jnp.min(jnp.where(seeing, start, big), axis=-1) // TILE
    last = -(-jnp.max(jnp.where(seeing, stop, 0), axis=-1) // TILE)
    nothing = ~jnp.any(seeing, axis=-1)
    first, last = jnp.where(nothing, 0, first), jnp.where(nothing, 0, last)
    # A query that sees nothing has start = stop = 0, which leaves no full tile.
    full = -(-jnp.max(start, axis=-1) // TILE), jnp.min(stop, axis=-1) // TILE
    return _ranges((first, last), full)


def _kv_tiles(some: jax.Array, padded: int, block: int) -> jax.Array:
    """Table of blocks of keys: all pairs of a tile of queries and a block of keys.

    Args:
      some: i32[B, T' / TILE, 4], the table of tiles of queries.
      padded: S'.
      block: keys of a block.
    """
    begin = jnp.arange(0, padded, block, dtype=jnp.int32)[None, :, None]
    begin_tile, end_tile = begin // TILE, (begin + block) // TILE
    first, last, full_first, full_last = (some[:, None, :, i] for i in range(4))
    # [B, S' / block, T' / TILE]
    touched = (first < end_tile) & (last > begin_tile)
    full = (full_first <= begin_tile) & (full_last >= end_tile)
    index = jnp.arange(some.shape[1], dtype=jnp.int32)[None, None]
    big = jnp.int32(some.shape[1])

    def range_of(mask):
        low = jnp.min(jnp.where(mask, index, big), axis=-1)
        high = jnp.max(jnp.where(mask, index + 1, 0), axis=-1)
        none = high == 0
        return jnp.where(none, 0, low), jnp.where(none, 0, high)

    low, high = range_of(full)
    # Only a range without gaps can go without masks.
    whole = jnp.sum(full, axis=-1, dtype=jnp.int32) == high - low
    return _ranges(range_of(touched), (low, jnp.where(whole, high, low)))


def _first_pairs(kv_tiles: jax.Array) -> jax.Array:
    """Where the pairs of each block of keys begin, less its first tile of queries."""
    first, stop = kv_tiles[..., 0], kv_tiles[..., 1]
    after = jnp.cumsum(stop - first, axis=1, dtype=jnp.int32)
    return after - stop


def most_first(table: jax.Array) -> jax.Array:
    """Row * blocks + block of each place of a table, the one with most tiles first."""
    work = (table[..., 1] - table[..., 0]).reshape(-1)
    return jnp.argsort(-work, stable=True).astype(jnp.int32)


def tile_bounds(
    *,
    batch: int,
    time: int,
    length: int | None = None,
    q_segment_ids: jax.Array | None = None,
    kv_segment_ids: jax.Array | None = None,
    causal: bool = True,
    window: int | None = None,
    is_prefix: jax.Array | None = None,
    block_q: int = 128,
    block_kv: int = 128,
) -> TileBounds:
    """Which tiles `attention` visits, for one mask and all layers that share it.

    Args:
      batch, time, length: B, T and S; S = T if `None`.
      q_segment_ids, kv_segment_ids: i32[B, T] and i32[B, S] as for `attention`, both
        or none. A row of `kv_segment_ids` has one run per document and ids that never
        descend, 0 aside; another row gives NaN.
      causal, window: as for `attention`, by index.
      is_prefix: bool[B, S] as for `attention`; the prefix of a document is at its
        start, another row gives NaN.
      block_q, block_kv: what `attention.tiling` says for the head dim.

    Returns:
      The bounds, of fixed shapes.

    Raises:
      ValueError: a block is no positive multiple of 64, or a causal or windowed mask
        has T != S.
    """
    length = time if length is None else length
    for name, block in (("block_q", block_q), ("block_kv", block_kv)):
        if block < TILE or block % TILE:
            raise ValueError(f"{name} is {block}, allowed are multiples of {TILE}")
    if (causal or window is not None) and time != length:
        raise ValueError(
            f"T is {time} and S is {length}, expected one for a causal or windowed mask"
        )
    start, stop = key_intervals(
        batch=batch,
        time=time,
        length=length,
        q_segment_ids=q_segment_ids,
        kv_segment_ids=kv_segment_ids,
        causal=causal,
        window=window,
        is_prefix=is_prefix,
    )
    start, stop = (jnp.pad(x, ((0, 0), (0, -time % block_q))) for x in (start, stop))
    q_tiles = _q_tiles(start, stop, block_q)
    tiles = _q_tiles(start, stop, TILE)
    kv_tiles = _kv_tiles(tiles, length + -length % block_kv, block_kv)
    return TileBounds(
        key_start=start,
        key_stop=stop,
        q_tiles=q_tiles,
        kv_tiles=kv_tiles,
        q_order=most_first(q_tiles),
        kv_order=most_first(kv_tiles),
        tile_keys=tiles[..., :2],
        first_pair=_first_pairs(kv_tiles),
        time=time,
        length=length,
        block_q=block_q,
        block_kv=block_kv,
        causal=causal,
        window=window,
        prefix=is_prefix is not None,
        documents=q_segment_ids is not None,
    )
