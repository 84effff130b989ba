"""Tables of a packing: built once, found by name, carried through transformations."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxaccel.data.batch import AttentionTiles, ChunkStarts, packing_metadata


TILES = AttentionTiles(window=None, block_q=64, block_kv=64)
IDS = jnp.asarray(np.repeat([[5, 5, 2, 0]], [3, 61, 40, 24], axis=1), jnp.int32)


def test_tables_are_built_once_and_found_by_name():
    starts = ChunkStarts(chunk=64)

    @jax.jit
    def build(ids):
        return packing_metadata(
            ids.shape, segment_ids=ids, tables=[TILES, starts, TILES]
        )

    meta = build(IDS)
    assert meta.names == (TILES, starts)
    assert len(meta.tables) == 2
    assert meta.table(ChunkStarts(chunk=32)) is None
    assert packing_metadata((1, 8)).table(TILES) is None
    # The second document begins with the second chunk; padding begins none.
    np.testing.assert_array_equal(meta.table(starts)[0], [0] * 128)
    bounds = meta.table(TILES)
    np.testing.assert_array_equal(bounds.key_start[0], [0] * 64 + [64] * 40 + [0] * 24)
    np.testing.assert_array_equal(bounds.key_stop[0], [*range(1, 105), *[0] * 24])


def test_rows_without_ids_are_one_document():
    starts = ChunkStarts(chunk=64)
    meta = jax.jit(lambda: packing_metadata((1, 128), tables=[TILES, starts]))()
    np.testing.assert_array_equal(meta.table(starts)[0], [0] * 64 + [-1] * 64)
    np.testing.assert_array_equal(meta.table(TILES).key_stop[0], np.arange(1, 129))
    # What a cache has begun goes on.
    held = jax.jit(
        lambda n: packing_metadata((2, 64), cached_length=n, tables=[starts])
    )(jnp.array([0, 7], jnp.int32))
    np.testing.assert_array_equal(held.table(starts)[:, 0], [0, -1])
