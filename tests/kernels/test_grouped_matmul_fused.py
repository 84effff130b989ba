"""Experts' two layers, and the pieces that a training step is made of."""

import functools
import itertools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels._common import hw
from pallas_kernels._common.interpret import interpreted
from pallas_kernels._common.testing import assert_close
from pallas_kernels.grouped_matmul import (
    activated_product,
    activation_gradient,
    choose,
    choose_activation_gradient,
    choose_mlp,
    choose_weight_gradient,
    config_fused,
    grouped_matmul,
    grouped_mlp,
    weight_gradient,
)
from pallas_kernels.grouped_matmul.activation import ACTIVATIONS
from pallas_kernels.grouped_matmul.config_fused import MlpConfig
from pallas_kernels.grouped_matmul.config_mosaic import Config, Tile, heuristic


NAMES = ("y", "dx", "dw_in", "dw_out", "db_in", "db_out", "d_scale")


def card(sms):
    return hw.Device(kind=hw.H200.kind, sms=sms, smem_bytes=hw.H200.smem_bytes)


@pytest.fixture
def one_block():
    # The interpreter compiles a kernel anew for each warpgroup of each block.
    with hw.assume(card(1)), interpreted():
        yield


def layers(activation, sizes, d_model, d_ff, *, dtype, tail=0, biased, scaled):
    """(x, w_in, w_out, bias_in, bias_out, row_scale, dy), sorted rows of experts."""
    parts = ACTIVATIONS[activation].parts
    rows, experts = sum(sizes) + tail, len(sizes)
    rng = np.random.default_rng(0)
    x, dy = rng.normal(size=(2, rows, d_model))
    w_in = rng.normal(size=(experts, d_model, parts * d_ff)) / d_model**0.5
    w_out = rng.normal(size=(experts, d_ff, d_model)) / d_ff**0.5
    # Wide enough that the clamped activation clamps.
    bias_in = 4.0 * rng.normal(size=(experts, parts * d_ff))
    bias_out = rng.normal(size=(experts, d_model))
    scale = rng.normal(size=rows).astype(np.float32)
    scale[:2] = 0.0
    arrays = [x, w_in, w_out, *((bias_in, bias_out) if biased else (None, None))]
    cast = [None if a is None else jnp.asarray(a, dtype) for a in (*arrays, dy)]
    return [*cast[:5], jnp.asarray(scale) if scaled else None, cast[5]]


def run(op, args):
    """(y, its gradients) of a function of all but dy; `None` for what is absent."""
    *inputs, dy = args
    y, pull = jax.vjp(op, *inputs)
    return (y, *pull(dy))


def op_of(implementation, activation, sizes):
    def op(x, w_in, w_out, bias_in, bias_out, row_scale):
        return grouped_mlp(
            x,
            w_in,
            w_out,
            jnp.asarray(sizes, jnp.int32),
            activation=activation,
            bias_in=bias_in,
            bias_out=bias_out,
            row_scale=row_scale,
            implementation=implementation,
        )

    return op


def by_hand(activation, sizes):
    """Each row with its own copy of its expert's parameters; gradients are JAX's."""
    owner = np.repeat(np.arange(len(sizes)), sizes)

    def act(z):
        if activation == "relu2":
            return jax.nn.relu(z) ** 2
        gate, up = jnp.split(z, 2, axis=-1)
        if activation == "swiglu":
            return jax.nn.silu(gate) * up
        gate, up = jnp.minimum(gate, 7.0), jnp.clip(up, -7.0, 7.0)
        return (up + 1.0) * gate * jax.nn.sigmoid(1.702 * gate)

    def op(x, w_in, w_out, bias_in, bias_out, row_scale):
        z = jnp.einsum("md,mdf->mf", x[: owner.size], w_in[owner])
        a = act(z if bias_in is None else z + bias_in[owner])
        y = jnp.einsum("mf,mfd->md", a, w_out[owner])
        y = y if bias_out is None else y + bias_out[owner]
        y = y if row_scale is None else y * row_scale[: owner.size, None]
        return jnp.pad(y, ((0, len(x) - owner.size), (0, 0)))

    return op


CASES = {
    "relu2": {"biased": False, "scaled": True},
    "clamped_swiglu": {"biased": True, "scaled": True},
}


@pytest.mark.parametrize("activation", CASES)
def test_two_layers_and_all_gradients(activation):
    sizes = (17, 0, 30)
    args = layers(
        activation, sizes, 24, 20, dtype=jnp.float32, tail=3, **CASES[activation]
    )

    @jax.jit
    def all_of_them(args):
        ops = [op_of(name, activation, sizes) for name in ("reference", "xla")]
        return [run(op, args) for op in (by_hand(activation, sizes), *ops)]

    want, *others = all_of_them(args)
    for got in others:
        for name, a, b in zip(NAMES, got, want, strict=True):
            assert (a is None) == (b is None), name
            if a is not None:
                assert_close(a, b, name=name)
        y, dx, dw_in, dw_out = got[:4]
        assert not np.any(y[-3:])
        assert not np.any(dx[-3:])
        assert not np.any(dw_in[1])
        assert not np.any(dw_out[1])


@pytest.fixture
def plain_products(monkeypatch):
    """The products that other tests interpret, each expert's rows selected."""
    from pallas_kernels.grouped_matmul import mosaic

    def mine(sizes, rows):
        ends = jnp.cumsum(sizes)[:, None]
        row = jnp.arange(rows)[None]
        return (ends - sizes[:, None] <= row) & (row < ends)  # [E, M]

    def data_gradient(x, w, sizes, dy, config):
        del x, config
        rows = jnp.where(mine(sizes, len(dy))[..., None], dy[None], 0)
        each = jnp.einsum(
            "emn,ekn->emk", rows, w, preferred_element_type=jnp.float32
        )  # [E, M, K]
        each = jnp.where(mine(sizes, len(dy))[..., None], each, 0)
        return jnp.sum(each, axis=0).astype(dy.dtype)

    def weight_sums(x, dy, sizes, dtype, tile, into=None):
        del tile
        assert into is None
        here = mine(sizes, len(dy))[..., None]
        rows, dys = (jnp.where(here, a[None], 0) for a in (x, dy))
        return jnp.einsum(
            "emk,emn->ekn", rows, dys, preferred_element_type=jnp.float32
        ).astype(dtype)

    monkeypatch.setattr(mosaic, "data_gradient", data_gradient)
    monkeypatch.setattr(mosaic, "weight_sums", weight_sums)


SHORT = Tile(block_m=16, block_n=256, stages=2, split="columns")
COLUMNS = Tile(block_m=64, block_n=128, stages=2, split="columns")
ROWS = Tile(block_m=128, block_n=64, stages=2, split="rows")


def test_kernels_of_two_layers_keep_experts_apart(
    one_block, plain_products, monkeypatch
):
    """A gated activation, biases, a scale; NaN in all that is one expert's or none's.

    The tail of 64 columns of both layers is less than a tile.
    """
    tiles = dict.fromkeys(("up", "down", "back", "data", "weight_in", "weight_out"))
    config = MlpConfig(**{**tiles, "up": SHORT, "down": COLUMNS, "back": COLUMNS})
    monkeypatch.setattr(config_fused, "pick", lambda **_: config)
    name, sizes = "clamped_swiglu", (33, 5, 0, 20)
    args = layers(
        name, sizes, 64, 64, dtype=jnp.bfloat16, tail=3, biased=True, scaled=True
    )
    exact = [a.astype(jnp.float32) for a in args]
    want = jax.jit(functools.partial(run, by_hand(name, sizes)))(exact)
    x, w_in, w_out, bias_in, bias_out, scale, dy = args
    ends = np.cumsum(sizes)
    mine = slice(ends[0], ends[1])
    x, dy = (a.at[ends[0]].set(jnp.nan).at[ends[-1] :].set(jnp.nan) for a in (x, dy))
    w_in, w_out, bias_in, bias_out = (
        a.at[1].set(jnp.nan) for a in (w_in, w_out, bias_in, bias_out)
    )
    scale = scale.at[ends[-1] :].set(jnp.nan)
    args = x, w_in, w_out, bias_in, bias_out, scale, dy
    got = jax.jit(functools.partial(run, op_of("mosaic", name, sizes)))(args)
    for label, a, b in zip(NAMES, got, want, strict=True):
        a, b = np.array(a), np.array(b)
        per_row = label in ("y", "dx", "d_scale")
        here = mine if per_row else 1
        assert np.isnan(a[here]).any(), label
        a[here], b[here] = 0, 0
        # One number a row may be small beside the terms that were rounded.
        axes = () if a.ndim == 1 else (0,)
        assert_close(a, b, name=label, rel=4e-3, block_axes=axes)
        assert not np.any(a[ends[-1] :] if per_row else a[2]), label


def test_backward_of_a_single_product(one_block, monkeypatch):
    """Without the scaled result; several tiles of an expert, one row, none at all."""
    monkeypatch.setattr(config_fused, "backward_tile", lambda *_, **__: ROWS)
    _, _, w, _, _, scale, dy = layers(
        "relu2", (150, 0, 7), 64, 64, dtype=jnp.bfloat16, biased=False, scaled=True
    )
    saved = jnp.abs(jax.random.normal(jax.random.key(1), (157, 64), jnp.bfloat16))

    @functools.partial(jax.jit, static_argnums=(0, 1))
    def op(implementation, dtype, sizes):
        cast = (a.astype(dtype) for a in (dy, w))
        return activation_gradient(
            *cast,
            sizes,
            saved.astype(dtype),
            activation="relu2",
            row_scale=scale,
            implementation=implementation,
        )

    for sizes in ((150, 0, 7), (0, 157, 0), (1, 1, 60), (0, 0, 0)):
        rows, sizes = sum(sizes), jnp.array(sizes, jnp.int32)
        got = op("mosaic", jnp.bfloat16, sizes)
        want = op("reference", jnp.float32, sizes)
        if rows:
            assert_close(got.dz[:rows], want.dz[:rows], name="dz")
            assert np.any(np.asarray(got.d_scale)[:2])  # where the scale is 0
            assert not np.any(got.dz[:2])
        assert_close(got.d_scale, want.d_scale, name="d_scale")
        assert not np.any(np.asarray(got.d_scale)[rows:])
        assert got.scaled is None


def test_pieces_are_those_of_the_whole():
    """What a step written out of pieces gets is the gradient of the function."""
    name, sizes = "swiglu", (9, 0, 4)
    x, w_in, w_out, _, _, scale, dy = layers(
        name, sizes, 8, 12, dtype=jnp.float32, biased=False, scaled=True
    )
    sizes_ = jnp.array(sizes, jnp.int32)

    def step(implementation):
        kind = {"implementation": implementation}
        a, saved = activated_product(x, w_in, sizes_, activation=name, **kind)
        found = activation_gradient(
            dy,
            w_out,
            sizes_,
            saved,
            activation=name,
            row_scale=scale,
            needs_scaled=True,
            **kind,
        )
        return (
            a,
            weight_gradient(x, found.dz, sizes_, **kind),
            weight_gradient(found.scaled, dy, sizes_, into=w_out, **kind),
            found.d_scale,
        )

    @jax.jit
    def all_of_them():
        args = x, w_in, w_out, None, None, scale, dy
        want = run(by_hand(name, sizes), args)
        gate, up = jnp.split(
            jnp.einsum("md,mdf->mf", x, w_in[np.repeat([0, 2], [9, 4])]), 2, axis=1
        )
        return want, jax.nn.silu(gate) * up, [step(i) for i in ("reference", "xla")]

    @jax.jit
    def rounded_totals():
        args = x, dy, sizes_
        into = jnp.ones((3, 8, 8), jnp.bfloat16)
        return [
            weight_gradient(*args, into=into, implementation=name)
            for name in ("reference", "xla")
        ]

    first, second = rounded_totals()
    assert first.dtype == jnp.bfloat16
    assert_close(second, np.asarray(first, np.float32))
    want, want_a, results = all_of_them()
    for a, dw_in, total, d_scale in results:
        assert_close(a, want_a)
        assert_close(dw_in, want[2])
        assert_close(total, w_out + want[3])
        np.testing.assert_array_equal(total[1], w_out[1])
        assert_close(d_scale, want[6])


def test_weight_gradients_are_added_in_place(one_block, monkeypatch):
    """Nothing of one expert's NaN, nothing to an expert without rows."""
    from pallas_kernels.grouped_matmul import config_mosaic

    sizes = (20, 0, 9, 3)
    rng = np.random.default_rng(0)
    x, dy = (jnp.asarray(rng.normal(size=(34, 64)), jnp.bfloat16) for _ in range(2))
    into = jnp.asarray(rng.normal(size=(4, 64, 64)), jnp.float32)
    tile = Tile(block_m=64, block_n=128, stages=4, split="tiles")
    monkeypatch.setattr(config_mosaic, "pick", lambda **_: Config(weight=tile))
    arrays = x, dy, jnp.array(sizes, jnp.int32)
    exact = [a.astype(jnp.float32) for a in (x, dy)]
    reference = functools.partial(weight_gradient, implementation="reference")
    want = jax.jit(reference)(*exact, arrays[2], into=into)
    x, dy = (a.at[29].set(jnp.nan).at[32:].set(jnp.nan) for a in (x, dy))
    add = jax.jit(
        functools.partial(weight_gradient, implementation="mosaic"),
        donate_argnames="into",
    )
    got = np.asarray(add(x, dy, arrays[2], into=into + 0))
    assert got.dtype == np.float32
    assert_close(got[:3], want[:3], rel=1e-6)
    assert np.isnan(got[3]).all()
    np.testing.assert_array_equal(got[1], np.asarray(into[1]))


def test_short_tiles_write_their_rows_only(one_block):
    """Rows that were never read are multiplied; none of that leaves."""
    from pallas_kernels.grouped_matmul import mosaic

    sizes = (9, 1, 0, 20)
    x, _, w, _, _, _, _ = layers(
        "relu2", sizes, 128, 64, dtype=jnp.bfloat16, tail=4, biased=False, scaled=False
    )
    tile = Tile(block_m=8, block_n=128, stages=2, split="columns")
    rows = x[:, :64]

    @jax.jit
    def product(rows, w, sizes):
        return mosaic.grouped_matmul(rows, w, sizes, jnp.float32, Config(forward=tile))

    got = np.asarray(product(rows, w, jnp.array(sizes, jnp.int32)))
    rows, w = (np.asarray(a, np.float32) for a in (rows, w))
    for expert, (start, end) in enumerate(itertools.pairwise(np.cumsum((0, *sizes)))):
        if start == end:
            continue
        assert_close(got[start:end], rows[start:end] @ w[expert], rel=1e-6)
    assert not np.any(got[30:])


def test_gradients_with_a_bias_and_a_gate(plain_products, monkeypatch):
    """Of one product: how the kernels' results are put together."""
    from pallas_kernels.grouped_matmul import mosaic_fused, pieces

    def product(x, w, sizes, dtype, tile, *, bias, activation, saves):
        del tile
        kind = {"bias": bias, "activation": activation, "implementation": "xla"}
        if saves:
            return pieces.activated_product(x, w, sizes, **kind)
        return (grouped_matmul(x, w, sizes, preferred_element_type=dtype, **kind),)

    monkeypatch.setattr(mosaic_fused, "_forward_product", product)
    sizes = jnp.array([5, 0, 6], jnp.int32)
    x, w, _, bias, _, _, _ = layers(
        "swiglu",
        (5, 0, 6),
        64,
        64,
        dtype=jnp.bfloat16,
        tail=2,
        biased=True,
        scaled=False,
    )
    dy = jnp.ones((13, 64), jnp.bfloat16)

    def op(implementation, x, w, bias):
        kind = {"activation": "swiglu", "implementation": implementation}
        return grouped_matmul(x, w, sizes, bias=bias, **kind)

    @jax.jit
    def both(*args):
        with hw.assume():
            got = run(functools.partial(op, "mosaic"), args)
        exact = [a.astype(jnp.float32) for a in args]
        return got, run(functools.partial(op, "reference"), exact)

    for a, b in zip(*both(x, w, bias, dy), strict=True):
        assert_close(a, b, rel=4e-3)


def shapes(rows, experts, d_model, d_ff, activation):
    like = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.bfloat16)
    parts = ACTIVATIONS[activation].parts
    return (
        like((rows, d_model)),
        like((experts, d_model, parts * d_ff)),
        like((experts, d_ff, d_model)),
        like((experts, parts * d_ff)),
        like((experts, d_model)),
        jax.ShapeDtypeStruct((rows,), jnp.float32),
        jax.ShapeDtypeStruct((experts,), jnp.int32),
    )


# rows, E, D, F of gpt-oss-20b, Nemotron 3 Nano, and decoding with Qwen3-Next.
MODELS = (
    (32768, 32, 2880, 2880, "clamped_swiglu"),
    (49152, 128, 2688, 1856, "relu2"),
    (320, 512, 2048, 512, "swiglu"),
)


@pytest.mark.parametrize("sizes", MODELS, ids=lambda s: s[-1])
def test_the_fused_kernels_lower_for_the_card(sizes):
    *_, activation = sizes
    x, w_in, w_out, bias_in, _, scale, groups = shapes(*sizes)
    parts = ACTIVATIONS[activation].parts
    saved = jax.ShapeDtypeStruct((x.shape[0], parts * w_out.shape[1]), x.dtype)

    def both(x, w_in, w_out, bias_in, saved, scale, groups):
        kind = {"activation": activation, "implementation": "mosaic"}
        first = activated_product(x, w_in, groups, bias=bias_in, **kind)
        if x.shape[0] < 1024:  # decoding: nothing goes back
            return first
        return first, activation_gradient(
            x, w_out, groups, saved, row_scale=scale, needs_scaled=parts > 1, **kind
        )

    args = x, w_in, w_out, bias_in, saved, scale, groups
    with hw.assume():
        text = jax.jit(both).trace(*args).lower(lowering_platforms=("cuda",)).as_text()
    assert "pk_grouped_matmul_fused_fwd" in text
    assert ("pk_grouped_matmul_fused_dgrad" in text) == (sizes[0] >= 1024)


def test_every_config_fits_the_card():
    for parts, mean, experts, d_model, d_ff in itertools.product(
        (1, 2), (0.1, 4, 64, 65, 1024), (32, 512), (1024, 2880), (512, 1856, 2880)
    ):
        sizes = {"rows": int(mean * experts), "experts": experts}
        config = config_fused.pick(**sizes, d_model=d_model, d_ff=d_ff, parts=parts)
        kept = config_fused.saved_bytes(config.back, parts)
        hw.check_smem(config.back.smem_bytes() + kept)
        for tile in (config.up, config.down, config.data, config.weight_in):
            hw.check_smem(tile.smem_bytes())
        assert parts == 1 or config_fused.is_for_pairs(config.up)
    for tile in config_fused.PAIRS:
        assert config_fused.is_for_pairs(tile)
        hw.check_smem(tile.smem_bytes())
    for parts in (1, 2):
        tiles = config_fused.backward_candidates(parts)
        assert len(set(tiles)) == len(tiles) > 3
        for tile in tiles:
            hw.check_smem(tile.smem_bytes() + config_fused.saved_bytes(tile, parts))


def test_decoding_gets_low_tiles_for_all_blocks():
    sizes = {"experts": 512, "in_dim": 2048, "out_dim": 1024}
    few = heuristic(rows=10, **sizes)
    assert (few.forward.block_m, few.forward.block_n) == (16, 128)
    assert heuristic(rows=2560, **sizes).forward.block_n == 256
    assert heuristic(rows=5120, **sizes).forward.block_m == 32
    assert heuristic(rows=32768, **sizes).forward.block_m == 64
    assert heuristic(rows=65536, **sizes).forward.block_m == 128
    assert few.weight.block_m % 64 == 0


def test_unmeasured_kernels_run_if_they_are_named(monkeypatch):
    """Each kind of kernel has its own measured rows."""
    x, w_in, w_out, bias_in, _, _, groups = shapes(256, 2, 64, 64, "swiglu")
    dy, z = x, jax.ShapeDtypeStruct((256, 128), x.dtype)
    kind = {"activation": "swiglu"}
    calls = {
        "mlp": lambda **i: choose_mlp(x, w_in, w_out, groups, **kind, **i),
        "back": lambda **i: choose_activation_gradient(
            dy, w_out, groups, z, **kind, **i
        ),
        "into": lambda **i: choose_weight_gradient(x, z, groups, into=w_in, **i),
        "gated": lambda **i: choose(x, w_in, groups, **kind, **i),
        "bias": lambda **i: choose(x, w_in, groups, bias=bias_in, **i),
        "plain": lambda **i: choose(x, w_in, groups, activation="relu2", **i),
        "weight": lambda **i: choose_weight_gradient(x, z, groups, **i),
    }
    with hw.assume():
        picked = {name: call().implementation for name, call in calls.items()}
        for call in calls.values():
            assert call(implementation="mosaic").config is not None
    measured = {name for name, what in picked.items() if what == "mosaic"}
    assert measured == {"plain", "weight"}


def test_errors_name_the_value():
    args = shapes(64, 2, 64, 64, "swiglu")
    x, w_in, w_out, bias_in, bias_out, scale, groups = args
    call = functools.partial(choose_mlp, x, w_in, w_out, groups, activation="swiglu")
    assert call(bias_in=bias_in, row_scale=scale).implementation == "xla"
    with pytest.raises(ValueError, match="activation is 'gelu'"):
        call(activation="gelu")
    with pytest.raises(ValueError, match="expected \\[E, D, 1 F\\]"):
        call(activation="relu2")
    with pytest.raises(ValueError, match="bias_in is bfloat16\\[2, 64\\]"):
        call(bias_in=bias_out)
    with pytest.raises(ValueError, match="row_scale is int32"):
        call(row_scale=groups)
    with pytest.raises(NotImplementedError, match="Hopper"):
        call(implementation="mosaic")
    odd = jax.ShapeDtypeStruct((2, 64, 192), jnp.bfloat16)
    with hw.assume(), pytest.raises(NotImplementedError, match="N = 192 of gate"):
        grouped_matmul(x, odd, groups, activation="swiglu", implementation="mosaic")
    into = jax.ShapeDtypeStruct((2, 64, 32), jnp.float32)
    with pytest.raises(ValueError, match="into is float32"):
        weight_gradient(x, x, groups, into=into)
    with pytest.raises(ValueError, match="saved is bfloat16\\[64, 64\\]"):
        activation_gradient(x, w_out, groups, x, activation="swiglu")
    with pytest.raises(ValueError, match="block_m=8"):
        Tile(block_m=8, block_n=128, split="rows")


def test_tuning_adds_to_the_table(monkeypatch, tmp_path, capsys):
    """The fastest tile that is right, beside the entries of other products."""
    from pallas_kernels.grouped_matmul import tune_layers

    right, wrong, refused = COLUMNS, ROWS, SHORT
    want = jnp.arange(8.0, dtype=jnp.float32)

    def one(tile, x):
        if tile == refused:
            raise ValueError("does not fit")
        return [x * (1.5 if tile == wrong else 1.0)]

    def tune(spec):
        del spec
        found = tune_layers._best((refused, wrong, right), one, (want,), [want])
        return {"found": found}

    monkeypatch.setattr(tune_layers, "tune", tune)
    file = tmp_path / "table.json"
    file.write_text('{"entries": {"other": {"ms": 1.0}}}')
    options = ["--specs", "model", "--names", "relu2_layers"]
    tune_layers.main(["--json", str(file), *options])
    entries = json.loads(file.read_text())["entries"]
    assert set(entries) == {"other", "found"}
    assert entries["found"].pop("ms") > 0
    assert Tile(**entries["found"]) == right
    printed = capsys.readouterr().out
    assert "does not fit" in printed
    assert "relative error" in printed
