"""Tiles that hold all rows of an expert, and other ways to share out a block's work."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from grouped_products import (
    PRODUCTS,
    arguments,
    borders,
    by_hand,
    card,
    lowered,
    single,
)

from pallas_kernels._common import hw
from pallas_kernels._common.interpret import interpreted
from pallas_kernels._common.testing import assert_close
from pallas_kernels.grouped_matmul import (
    activated_product,
    activation_gradient,
    specs,
)
from pallas_kernels.grouped_matmul.config_mosaic import (
    CANDIDATES,
    CLEANING,
    WIDE,
    Config,
    Tile,
)


def spec_of(sizes, in_dim, out_dim, tail=3):
    return specs.Spec(
        name="ragged",
        tag="ci",
        rows=sum(sizes) + tail,
        in_dim=in_dim,
        out_dim=out_dim,
        experts=len(sizes),
        sizes=sizes,
    )


# None, one row, one tile from the middle of eight rows on, a row more than a tile.
RAGGED = spec_of((0, 1, 150, 0, 193), 128, 192)
ONE_HAS_ALL = spec_of((0, 200, 0), 64, 192, tail=0)

WHOLE = Tile(block_m=192, block_n=256, stages=2, computing=3, eager=True)
# The second block of the cluster has no columns, and brings rows all the same.
SHARED = Tile(block_m=192, block_n=256, stages=2, computing=3, eager=True, cluster=2)
NARROW = Tile(block_m=192, block_n=64, stages=3, computing=3, cluster=2, slots=1)
TWO = Tile(block_m=192, block_n=128, stages=3, split="columns", cluster=2, panel=1)
IN_TURN = Tile(block_m=64, block_n=64, stages=6, computing=3, split="tiles", slots=4)
CLEANED = Tile(block_m=128, block_n=128, stages=3, cleans=True)
CLEANED_IN_TURN = Tile(block_m=64, block_n=64, stages=4, split="tiles", cleans=True)


@pytest.mark.parametrize(
    "what, tile, spec",
    [
        ("y", SHARED, ONE_HAS_ALL),
        ("y", NARROW, RAGGED),
        ("y", IN_TURN, RAGGED),
        ("dx", WHOLE, ONE_HAS_ALL),
        ("dx", TWO, RAGGED),
        ("dw", WHOLE, ONE_HAS_ALL),
        ("dw", IN_TURN, RAGGED),
        ("dw", CLEANED, RAGGED),
        ("dw", CLEANED_IN_TURN, RAGGED),
    ],
    ids=[
        "y-shared",
        "y-narrow",
        "y-in_turn",
        "dx-whole",
        "dx-two",
        "dw-whole",
        "dw-in_turn",
        "dw-cleaned",
        "dw-cleaned_in_turn",
    ],
)
def test_every_expert_in_wide_tiles(what, tile, spec):
    """NaN behind the rows, and races are found."""
    x, w, sizes, dy = arguments(spec)
    want = by_hand(x, w, sizes, dy)[PRODUCTS.index(what)]
    x[sum(sizes) :] = dy[sum(sizes) :] = np.nan

    @jax.jit
    def product(*args):
        return single(what, tile, args, jnp.bfloat16)

    with hw.assume(card(tile.cluster)), interpreted():
        got = np.asarray(product(x, w, sizes, dy))
    if what == "dw":
        for expert in range(len(sizes)):
            assert_close(got[expert], want[expert], name=f"dw of {expert}")
        assert not np.any(got[np.array(sizes) == 0])
        return
    for expert, (start, end) in enumerate(itertools.pairwise(borders(sizes))):
        if end > start:
            name = f"{what} of {expert}"
            assert_close(got[start:end], want[start:end], name=name)
    assert not np.any(got[sum(sizes) :])


def test_fused_products_in_wide_tiles():
    """A gated product whose halves are sums of their own, and its gradient."""
    from pallas_kernels.grouped_matmul import mosaic_fused

    rng = np.random.default_rng(0)
    sizes = np.array([0, 1, 70], np.int32)

    def draw(*shape):
        return jnp.asarray(rng.normal(size=shape) / 8, jnp.bfloat16)

    x, w_in, w_out, dy = draw(74, 64), draw(3, 64, 256), draw(3, 128, 64), draw(74, 64)
    narrow = Tile(block_m=192, block_n=64, stages=2, computing=3, cluster=2)

    @jax.jit
    def exact(*args):
        x, w_in, dy, w_out = (a.astype(jnp.float32) for a in args)
        kind = {"activation": "swiglu", "implementation": "xla"}
        a, z = activated_product(x, w_in, sizes, **kind)
        saved = z.astype(jnp.bfloat16)
        rounded = saved.astype(jnp.float32)
        back = activation_gradient(dy, w_out, sizes, rounded, **kind)
        return (a, z), saved, back.dz

    @jax.jit
    def forward(x, w_in, sizes):
        return mosaic_fused.activated_product(x, w_in, None, sizes, SHARED, "swiglu")

    @jax.jit
    def backward(dy, w_out, sizes, saved):
        args = (dy, w_out, sizes, saved, None, narrow, "swiglu")
        return mosaic_fused.activation_gradient(*args, emits=False)

    want, saved, want_dz = exact(x, w_in, dy, w_out)
    with hw.assume(card(2)), interpreted():
        got = forward(x, w_in, sizes)
    for a, b in zip(got, want, strict=True):
        assert_close(a, b)
    with hw.assume(card(2)), interpreted():
        got = backward(dy, w_out, sizes, saved)
    assert_close(got["dz"][:71], want_dz[:71])


CLUSTERED = {t.split: t for t in WIDE if t.cluster > 1}.values()


@pytest.mark.parametrize("tile", CLUSTERED, ids=lambda tile: tile.split)
def test_clusters_lower_for_the_card(tile):
    text = lowered("y", tile, in_dim=2048, out_dim=1024)
    assert "pk_grouped_matmul_fwd" in text


def test_weights_in_wide_tiles_lower_for_the_card():
    for tile in (WIDE[0], CLEANING[0]):
        assert "pk_grouped_matmul_wgrad" in lowered("dw", tile)


def test_what_is_tried_has_the_registers_and_the_memory():
    for tile in CANDIDATES:
        hw.check_registers(tile.registers)
        hw.check_smem(tile.smem_bytes())
        rows, columns = tile.part
        # Beside its sums a thread has addresses and counts.
        assert rows * columns // 128 + 32 <= tile.registers[0], tile
        # One product of a block of four warpgroups names 128 registers at most.
        width = columns // tile.accumulators
        assert len(tile.registers) == 3 or 64 * width // 128 < 128 - 24, tile


def test_wrong_tiles_are_refused_with_the_number():
    with pytest.raises(ValueError, match="computing=4"):
        Tile(computing=4)
    with pytest.raises(ValueError, match="slots=3"):
        Tile(slots=3)
    with pytest.raises(ValueError, match="cluster=4"):
        Tile(cluster=4)
    with pytest.raises(ValueError, match="3 warpgroups 42"):
        Tile(block_m=128, computing=3)
    with pytest.raises(ValueError, match=r"192 x 128 sums.* 16384"):
        Tile(block_m=192, block_n=128, stages=6, split="tiles", computing=3)
    with pytest.raises(ValueError, match="cluster=2 with block_m=16"):
        Tile(block_m=16, split="columns", cluster=2)
    with pytest.raises(ValueError, match="cluster=2 of a weight gradient"):
        lowered("dw", SHARED)
    with pytest.raises(ValueError, match="cleans=True, only weight"):
        lowered("y", CLEANED)
    with pytest.raises(ValueError, match="cleans=True with computing=3"):
        Tile(block_m=192, block_n=128, computing=3, cleans=True)


def test_a_tuning_run_of_some_tiles(monkeypatch):
    from pallas_kernels.grouped_matmul import tune

    tried = []

    def measured(product, tile, args, want):
        del product, args, want
        tried.append(tile)
        return float(len(tried))

    monkeypatch.setattr(tune, "_measured", measured)
    monkeypatch.setattr(tune, "_exact", lambda product, x, *_: x)
    found = tune.tune(ONE_HAS_ALL, ["forward"], only=["cluster=2", "block_m=256"])
    want = [t for t in CANDIDATES if t.cluster == 2 or t.block_m == 256]
    assert tried[1:] == want
    assert tried[0] not in want  # the heuristic's, and the fastest here
    (entry,) = found.values()
    assert entry["block_n"] == tried[0].block_n


@pytest.mark.gpu
@pytest.mark.parametrize("tile", [*WIDE, *CLEANING], ids=str)
def test_weights_on_the_card(tile):
    """Expert by expert, NaN in the rows of one and behind all, 100 repeats."""
    from pallas_kernels.grouped_matmul import mosaic

    if tile.cluster > 1:
        pytest.skip("weight gradients have no clusters")
    spec = next(s for s in specs.specs("model") if s.name == "borders")
    x, w, sizes, dy = jax.jit(spec.arguments)(jax.random.key(1))
    ends = borders(spec.sizes)
    x, dy = (a.at[ends[1] : ends[2]].set(jnp.nan) for a in (x, dy))
    x, dy = (a.at[ends[-1] :].set(jnp.nan) for a in (x, dy))
    weights = jax.jit(mosaic.weight_gradient, static_argnums=4)
    got = weights(x, w, sizes, dy, Config(weight=tile))
    want = by_hand(*(np.asarray(a) for a in (x, w, sizes, dy)))[2]
    for expert in (0, 2, 3):
        assert_close(np.asarray(got)[expert], want[expert], name=f"dw of {expert}")
    same = jnp.bool_(True)
    for _ in range(100):
        again = weights(x, w, sizes, dy, Config(weight=tile))
        same &= jnp.array_equal(got, again, equal_nan=True)
    assert bool(same)


@pytest.mark.gpu
@pytest.mark.parametrize("tile", WIDE, ids=lambda t: f"{t.split}-{t.part}-{t.cluster}")
def test_wide_tiles_on_the_card(tile):
    """Expert by expert, and 100 repeats have the same bits."""
    from pallas_kernels.grouped_matmul import mosaic

    spec = next(s for s in specs.specs("model") if s.name == "borders")
    x, w, sizes, dy = jax.jit(spec.arguments)(jax.random.key(1))
    config = Config(forward=tile, data=tile)

    @jax.jit
    def both(x, w, sizes, dy):
        y = mosaic.grouped_matmul(x, w, sizes, x.dtype, config)
        return y, mosaic.data_gradient(x, w, sizes, dy, config)

    got = both(x, w, sizes, dy)
    want = by_hand(*(np.asarray(a) for a in (x, w, sizes, dy)))
    for name, a, b in zip(PRODUCTS, got, want, strict=False):
        for start, end in itertools.pairwise(borders(spec.sizes)):
            assert_close(np.asarray(a)[start:end], b[start:end], name=name)
    same = jnp.bool_(True)
    for _ in range(100):
        for a, b in zip(got, both(x, w, sizes, dy), strict=True):
            same &= jnp.array_equal(a, b)
    assert bool(same)
