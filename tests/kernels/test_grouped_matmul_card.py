"""Experts' two layers and the pieces of their training step on a Hopper GPU."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels._common.testing import assert_close
from pallas_kernels.grouped_matmul import (
    activated_product,
    activation_gradient,
    config_fused,
    grouped_matmul,
    grouped_mlp,
    specs,
    specs_layers,
    weight_gradient,
)
from pallas_kernels.grouped_matmul.activation import ACTIVATIONS
from pallas_kernels.grouped_matmul.config_mosaic import Config, Tile


pytestmark = pytest.mark.gpu

SHORT = tuple(
    Tile(block_m=height, block_n=256, split="columns") for height in (8, 16, 32)
)
CARD_LAYERS = {spec.name: spec for spec in specs_layers.LAYERS if spec.tag == "model"}


def drawn(spec):
    return jax.jit(spec.arguments)(jax.random.key(0))


def exact(args):
    floats = (jnp.issubdtype(a.dtype, jnp.floating) for a in args)
    return [
        a.astype(jnp.float32) if is_float else a
        for a, is_float in zip(args, floats, strict=True)
    ]


@pytest.mark.parametrize("name", CARD_LAYERS)
def test_layers_on_the_card(name):
    """Against f32, NaN behind the rows, 100 repeats."""
    spec = CARD_LAYERS[name]
    args = list(drawn(spec))
    args[6] = args[6].at[-1].add(-5)
    routed = int(jnp.sum(args[6]))

    def op(implementation):
        one = functools.partial(grouped_mlp, implementation=implementation)
        return jax.jit(specs_layers.run(spec, one, backward=True))

    want = op("xla")(*exact(args))
    for i in (0, 5, 7):  # x, the scale and dy
        args[i] = args[i].at[routed:].set(jnp.nan)
    kernels = op("mosaic")
    got = kernels(*args)
    for label, a, b in zip(
        ("y", "dx", "dw_in", "dw_out", "d_scale", "db_in", "db_out"),
        got,
        want,
        strict=False,
    ):
        # One number a row may be small beside the terms that were rounded.
        axes = () if a.ndim == 1 else (0,)
        assert_close(a, b, name=label, rel=4e-3, block_axes=axes)
    for a in (got[0], got[1], got[4]):
        assert not np.any(np.asarray(a)[routed:])
    same = jnp.bool_(True)
    for _ in range(100):
        for a, b in zip(got, kernels(*args), strict=True):
            same &= jnp.array_equal(a, b)
    assert bool(same)


@pytest.mark.parametrize("name", CARD_LAYERS)
def test_fused_kernels_however_they_are_cut_on_the_card(name):
    from pallas_kernels.grouped_matmul import mosaic_fused

    spec = CARD_LAYERS[name]
    parts = ACTIVATIONS[spec.activation].parts
    x, w_in, w_out, bias, _, scale, sizes, dy = drawn(spec)
    kind = {"activation": spec.activation, "implementation": "xla"}
    want = activated_product(*exact((x, w_in, sizes)), bias=exact((bias,))[0], **kind)
    tiles = (*config_fused.PAIRS, *SHORT) if parts > 1 else (Tile(), *SHORT)
    for tile in tiles:
        got = mosaic_fused.activated_product(
            x, w_in, bias, sizes, tile, spec.activation
        )
        for a, b in zip(got, want, strict=True):
            assert_close(a, b, name=str(tile))
    saved = want[1].astype(x.dtype)
    want = activation_gradient(
        *exact((dy, w_out, sizes, saved)), row_scale=scale, needs_scaled=True, **kind
    )
    for tile in config_fused.backward_candidates(parts):
        got = mosaic_fused.activation_gradient(
            dy, w_out, sizes, saved, scale, tile, spec.activation, emits=True
        )
        for label, b in want._asdict().items():
            axes = () if b.ndim == 1 else (0,)
            assert_close(got[label], b, name=f"{label} {tile}", block_axes=axes)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weight_gradients_in_place_on_the_card(dtype):
    rng = np.random.default_rng(0)
    sizes = jnp.array([257, 0, 255, 1, 511], jnp.int32)
    x, dy = (jnp.asarray(rng.normal(size=(1030, n)), jnp.bfloat16) for n in (576, 1856))
    into = jnp.asarray(rng.normal(size=(5, 576, 1856)), dtype)
    x, dy = (a.at[1024:].set(jnp.nan) for a in (x, dy))
    add = jax.jit(
        functools.partial(weight_gradient, implementation="mosaic"),
        donate_argnames="into",
    )
    got = np.asarray(add(x, dy, sizes, into=into + 0))
    want = weight_gradient(
        *exact((x, dy)), sizes, into=exact((into,))[0], implementation="xla"
    )
    assert_close(got, want, rel=1e-5 if dtype == "float32" else None)
    np.testing.assert_array_equal(got[1], np.asarray(into[1]))


@pytest.mark.parametrize("block_m", [8, 16, 32])
def test_short_tiles_on_the_card(block_m):
    from pallas_kernels.grouped_matmul import mosaic

    spec = next(s for s in specs.specs("model") if s.name == "few_rows")
    x, w, sizes, _ = jax.jit(spec.arguments)(jax.random.key(0))
    want = grouped_matmul(*exact((x, w)), sizes, implementation="xla")
    for width in (128, 256):
        tile = Tile(block_m=block_m, block_n=width, stages=4, split="columns")
        config = Config(forward=tile)
        got = mosaic.grouped_matmul(x, w, sizes, x.dtype, config)
        assert_close(got, want, name=str(tile))
