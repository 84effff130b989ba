"""Mosaic kernels of `grouped_matmul`, interpreted, expert by expert."""

import functools
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
    cut,
    lowered,
)

from pallas_kernels._common import hw, tuning
from pallas_kernels._common.interpret import interpreted
from pallas_kernels._common.testing import assert_close
from pallas_kernels.grouped_matmul import choose, grouped_matmul, specs, tasks
from pallas_kernels.grouped_matmul.config_mosaic import (
    ALIGN,
    CANDIDATES,
    Config,
    Tile,
    heuristic,
    pick,
    refusal,
    table_key,
)
from pallas_kernels.grouped_matmul.tasks import Column


KERNEL = {s.name: s for s in specs.specs("ci") if s.name.startswith("ci_kernel")}


@pytest.fixture
def one_block():
    # The interpreter compiles a kernel anew for each warpgroup of each block.
    with hw.assume(card(1)), interpreted():
        yield


def run(spec, args):
    op = functools.partial(grouped_matmul, implementation="mosaic")
    out = jax.jit(specs.run(spec, op, backward=True))(*args)
    return [np.asarray(a) for a in out]


def assert_experts_close(got, want, sizes, except_for=()):
    """Each expert on its own: one wrong expert of many is a small error in all."""
    ends = borders(sizes)
    for name, a, b in zip(("y", "dx"), got, want, strict=False):
        for expert, (start, end) in enumerate(itertools.pairwise(ends)):
            if end > start and expert not in except_for:
                label = f"{name} of expert {expert}"
                assert_close(a[start:end], b[start:end], name=label)
        assert not np.any(a[ends[-1] :]), f"{name} of no expert"
    for expert, size in enumerate(sizes):
        if expert not in except_for:
            assert_close(got[2][expert], want[2][expert], name=f"dw of {expert}")
        if not size:
            assert not np.any(got[2][expert])


def test_every_expert_on_its_own_whatever_the_others_hold(one_block):
    """NaN in one expert's rows, which share tiles with its neighbours', in its weights,
    and behind the last expert."""
    spec = KERNEL["ci_kernel_borders"]
    x, w, sizes, dy = arguments(spec)
    want = by_hand(x, w, sizes, dy)
    ends = borders(sizes)
    x[ends[2] - 1] = dy[ends[1]] = np.nan
    x[ends[-1] :] = dy[ends[-1] :] = w[1] = np.nan
    got = run(spec, (x, w, sizes, dy))
    assert_experts_close(got, want, sizes, except_for=[1])
    assert np.isnan(got[2][1]).all()
    assert np.isnan(got[0][ends[1] : ends[2]]).all()


TILES = (
    Tile(block_n=128, stages=3, panel=1, swizzled=False, tail_rows=64),
    Tile(block_n=128, stages=2, split="columns", panel=2),
    Tile(block_m=64, block_n=64, stages=4, split="tiles"),
)


@pytest.mark.parametrize(
    "what, tile, name",
    [
        ("y", TILES[0], "ci_kernel_empty"),
        ("dx", TILES[1], "ci_kernel_empty"),
        ("dw", TILES[0], "ci_kernel_narrow"),
        ("dw", TILES[2], "ci_kernel_empty"),
    ],
    ids=["y-rows", "dx-columns", "dw-rows", "dw-tiles"],
)
def test_however_it_is_cut(what, tile, name):
    spec = KERNEL[name]
    got = cut(what, tile, 1, arguments(spec))
    want = by_hand(*arguments(spec))[PRODUCTS.index(what)]
    empty = np.array(spec.sizes) == 0
    assert_close(got, want, name=what)
    assert what != "dw" or not np.any(got[empty])


def test_squared_relu_is_applied_before_rounding(one_block):
    from pallas_kernels.grouped_matmul import mosaic

    spec = KERNEL["ci_kernel_empty"]
    args = arguments(spec)
    x, w, sizes, _ = (jnp.asarray(a) for a in args)
    tiles = dict.fromkeys(("forward", "data", "weight"), TILES[1])
    got = mosaic.grouped_matmul(x, w, sizes, x.dtype, Config(**tiles), "relu2")
    assert_close(got, np.maximum(by_hand(*args)[0], 0.0) ** 2)


def test_blocks_share_the_tiles_and_give_the_same_bits():
    """Results in f32, which leave in other pieces than those of 16 bits."""
    spec = KERNEL["ci_kernel_narrow"]
    one, two = (cut("y", TILES[2], sms, arguments(spec), jnp.float32) for sms in (1, 2))
    assert one.dtype == np.float32
    assert_close(one, by_hand(*arguments(spec))[0], rel=1e-6)
    np.testing.assert_array_equal(one, two)


def tiles_of(table, count):
    """(group, first row, first and last row that is the group's) of each tile."""
    for index in range(count):
        group, base, tiles, start, end = table[index]
        assert 0 <= index - base < tiles
        yield group, start // ALIGN * ALIGN, index - base, start, end


@pytest.mark.parametrize("block_m", [64, 128])
def test_every_row_is_in_one_tile(block_m):
    rng = np.random.default_rng(0)
    rows, experts = 1000, 9
    build = jax.jit(lambda sizes: tasks.row_tiles(sizes, rows, block_m))
    cases = [
        rng.multinomial(rng.integers(0, rows + 1), rng.dirichlet(np.full(experts, 0.3)))
        for _ in range(20)
    ]
    cases += [np.zeros(experts), np.eye(experts)[8] * rows, np.ones(experts)]
    # One row, then groups that each just need another tile.
    cases.append(np.array([1] + [block_m - 6] * (experts - 1)))
    for sizes in cases:
        table, count = (np.asarray(a) for a in build(sizes.astype(np.int32)))
        assert count[0] <= table.shape[0] == tasks.table_length(rows, experts, block_m)
        owner = np.full(rows, -1)
        for group, begin, at, start, end in tiles_of(table, count[0]):
            low = max(begin + at * block_m, start)
            high = min(begin + (at + 1) * block_m, end)
            assert low < high  # no tile is empty
            assert (owner[low:high] == -1).all()
            owner[low:high] = group
        want = np.repeat(np.arange(experts), sizes.astype(int))
        assert (owner[: want.size] == want).all()
        assert (owner[want.size :] == experts).all()
        assert np.all(np.diff(table[:, Column.EXPERT]) >= 0)


def test_the_table_is_long_enough_for_the_worst_sizes():
    for block_m, rows, experts in itertools.product((64, 128), (1, 7, 500), (1, 3, 40)):
        length = tasks.table_length(rows, experts, block_m)
        # The most tiles: as many groups as there are rows for, each of one row, or
        # each of one row more than whole tiles when it starts at a multiple of 8 + 7.
        for size in (1, 2, block_m - 6, block_m + 1):
            groups = min(experts + 1, rows // size)
            worst = groups * -(-(size + ALIGN - 1) // block_m)
            assert worst <= length, (block_m, rows, experts, size)


def possible(name):
    """Every tile that the heuristic gives to a product, over sizes that matter."""
    means = (1, 64, 65, 160, 352, 512, 513, 4096)
    dims = (64, 128, 512, 1024, 1856, 2688, 2880, 4096, 3072)
    return sorted(
        {
            getattr(heuristic(rows=m, experts=1, in_dim=k, out_dim=n), name)
            for m, k, n in itertools.product(means, dims, dims)
        },
        key=str,
    )


WHAT = {"y": "forward", "dx": "data", "dw": "weight"}
CONFIGS = [(what, t) for what, name in WHAT.items() for t in possible(name)]
# Width changes no more than the number of columns: one of each split is lowered.
DISTINCT = list({(what, t.split): (what, t) for what, t in CONFIGS}.values())


def test_every_config_fits_the_card():
    for _, tile in CONFIGS:
        hw.check_smem(tile.smem_bytes())


@pytest.mark.parametrize(
    "what, tile",
    DISTINCT,
    ids=[f"{w}-{t.split}-{t.block_m}x{t.block_n}" for w, t in DISTINCT],
)
def test_every_split_lowers_for_the_card(what, tile):
    names = {"y": "fwd", "dx": "dgrad", "dw": "wgrad"}
    assert f"pk_grouped_matmul_{names[what]}" in lowered(what, tile)


def test_layers_of_equal_sizes_share_their_kernels():
    like = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.bfloat16)
    x, w = like((4096, 512)), like((16, 512, 512))

    def layers(x, w, sizes):
        for _ in range(3):
            x = grouped_matmul(x, w, sizes, activation="relu2", implementation="mosaic")
        return jnp.sum(x.astype(jnp.float32))

    sizes = jax.ShapeDtypeStruct((16,), jnp.int32)
    with hw.assume():
        traced = jax.jit(jax.grad(layers, argnums=(0, 1))).trace(x, w, sizes)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    # One of y, dx and dw each, whatever the number of layers.
    assert text.count("custom_call @mosaic_gpu") == 3


def test_kernels_are_picked_on_the_card_where_rows_speak_for_them():
    spec = KERNEL["ci_kernel_empty"]
    args = jax.eval_shape(spec.arguments, jax.random.key(0))[:3]
    with pytest.raises(NotImplementedError, match="Hopper"):
        grouped_matmul(*args, implementation="mosaic")
    with hw.assume():
        choice = choose(*args)
        assert choice.implementation == "xla"
        assert "58 rows of 4 experts are fewer than 64" in choice.refused["mosaic"]
        x = jax.ShapeDtypeStruct((256, args[0].shape[1]), args[0].dtype)
        assert choose(x, *args[1:]).implementation == "mosaic"
        named = choose(*args, implementation="mosaic")
    assert named.implementation == "mosaic"
    assert named.config == heuristic(rows=58, experts=4, in_dim=64, out_dim=192)


def test_a_measured_tile_replaces_the_guess_of_its_product(monkeypatch):
    sizes = {"rows": 4096, "experts": 8, "in_dim": 2048, "out_dim": 1024}
    key = table_key("weight", **sizes)
    assert key == "product=weight,mean=512,in_dim=2048,out_dim=1024"
    found = {"block_m": 64, "block_n": 128, "stages": 6, "split": "tiles", "ms": 1.5}
    monkeypatch.setattr(tuning, "_table", lambda device, op: {key: found})
    picked, guess = pick(**sizes), heuristic(**sizes)
    assert picked.weight == Tile(block_m=64, block_n=128, stages=6, split="tiles")
    assert (picked.forward, picked.data) == (guess.forward, guess.data)


def test_what_a_tuning_run_tries_fits_the_card():
    assert len(set(CANDIDATES)) == len(CANDIDATES)
    for tile in CANDIDATES:
        hw.check_smem(tile.smem_bytes())


def test_tuning_keeps_the_fastest_tile_that_is_right(monkeypatch, capsys):
    from pallas_kernels.grouped_matmul import config_mosaic, tune

    right, wrong, refused = TILES

    def run(product, config, *args):
        if config.data == refused:
            raise ValueError("does not fit")
        factor = 1.5 if config.data == wrong else 1.0
        return tune._exact(product, *args) * jnp.asarray(factor, jnp.bfloat16)

    monkeypatch.setattr(tune, "_one", run)
    monkeypatch.setattr(tune, "_variants", lambda *_: ())
    monkeypatch.setattr(config_mosaic, "CANDIDATES", (refused, right))
    monkeypatch.setattr(config_mosaic, "heuristic", lambda **_: Config(data=wrong))
    (entry,) = tune.tune(KERNEL["ci_kernel_narrow"], ["data"]).values()
    assert entry.pop("ms") > 0
    assert Tile(**entry) == right
    printed = capsys.readouterr().out
    assert "does not fit" in printed
    assert "relative error" in printed


def test_refusals_name_the_number():
    call = {"rows": 64, "experts": 2, "in_dim": 64, "out_dim": 128}
    call |= {"dtype": jnp.bfloat16, "out_dtype": jnp.float32}
    assert refusal(**call) is None
    assert refusal(**call | {"dtype": jnp.float16}) is None
    for changed, text in (
        ({"in_dim": 33}, "K = 33"),
        ({"out_dim": 160}, "N = 160"),
        ({"dtype": jnp.float32}, "dtype = float32"),
        ({"out_dtype": jnp.float16}, "result's dtype = float16"),
        ({"rows": 0}, "M = 0"),
        ({"rows": 2**31, "in_dim": 2**14}, "tiles"),
    ):
        assert text in refusal(**call | changed)
    with pytest.raises(ValueError, match="128 x 256 sums"):
        Tile(split="tiles")
    with pytest.raises(ValueError, match="96"):
        Tile(block_n=192, split="columns")
    with pytest.raises(ValueError, match="stages=5"):
        Tile(block_n=128, stages=5, split="tiles")


MODEL = {spec.name: spec for spec in specs.specs("model")}


@functools.cache
def on_the_card(spec):
    op = functools.partial(grouped_matmul, implementation="mosaic")
    return jax.jit(specs.run(spec, op, backward=True))


@pytest.mark.gpu
@pytest.mark.parametrize("name", MODEL)
def test_model_shapes_on_the_card(name):
    """Expert by expert against f32 products, NaN behind the rows, 100 repeats."""
    spec = MODEL[name]
    x, w, sizes, dy = jax.jit(spec.arguments)(jax.random.key(0))
    behind = jnp.arange(spec.rows)[:, None] >= jnp.sum(sizes)
    x, dy = (jnp.where(behind, jnp.nan, a) for a in (x, dy))
    args = x, w, sizes, dy
    got = jax.block_until_ready(on_the_card(spec)(*args))
    f32 = (a.astype(jnp.float32) for a in args if a is not sizes)
    x, w, dy = (np.asarray(a) for a in f32)
    want = [np.zeros(a.shape, np.float32) for a in got]
    for expert, (start, end) in enumerate(itertools.pairwise(borders(sizes))):
        rows = slice(start, end)
        want[0][rows] = x[rows] @ w[expert]
        want[1][rows] = dy[rows] @ w[expert].T
        want[2][expert] = x[rows].T @ dy[rows]
    assert_experts_close([np.asarray(a) for a in got], want, np.asarray(sizes))
    same = jnp.bool_(True)
    for _ in range(100):
        again = on_the_card(spec)(*args)
        for a, b in zip(got, again, strict=True):
            same &= jnp.array_equal(a, b)
    assert bool(same)


@pytest.mark.gpu
@pytest.mark.parametrize("tile", TILES, ids=lambda tile: tile.split)
def test_however_it_is_cut_on_the_card(tile):
    from pallas_kernels.grouped_matmul import mosaic

    spec = MODEL["borders"]
    x, w, sizes, dy = jax.jit(spec.arguments)(jax.random.key(1))
    config = Config(forward=tile, data=tile, weight=tile)

    def op(x, w, sizes):
        return mosaic.grouped_matmul(x, w, sizes, x.dtype, config)

    got = jax.jit(specs.run(spec, op, backward=True))(x, w, sizes, dy)
    want = by_hand(*(np.asarray(a) for a in (x, w, sizes, dy)))
    assert_experts_close([np.asarray(a) for a in got], want, np.asarray(sizes))
