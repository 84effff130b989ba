"""`rms_norm`: every form against the reference, kernels in the interpreter."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import rms_norm
from pallas_kernels._common import hw
from pallas_kernels._common.interpret import interpreted
from pallas_kernels._common.testing import assert_close
from pallas_kernels.rms_norm import api, config, reference, specs


Config = config.Config

CI = {spec.name: spec for spec in specs.specs("ci")}
MODEL = {spec.name: spec for spec in specs.specs("model")}

# Two SMs and one block each leave every block with more than one tile.
SMALL = dataclasses.replace(hw.H200, sms=2)

NAMES = ("y", "dx", "dscale", "dgate")


@functools.cache
def arguments(spec):
    """As `spec.arguments` draws them, without a program."""
    draw = np.random.default_rng(0)
    shapes = jax.eval_shape(spec.arguments, jax.random.key(0))
    x, scale, *others = (draw.normal(size=x.shape) for x in shapes)
    scale = 0.1 * scale + (0.0 if spec.zero_centered else 1.0)
    arrays = (x, scale, *others)
    return tuple(jnp.asarray(a, x.dtype) for a, x in zip(arrays, shapes, strict=True))


@functools.cache
def expected(spec):
    """y and gradients of the reference from float32 copies of the arguments."""
    exact = tuple(a.astype(jnp.float32) for a in arguments(spec))
    return jax.jit(specs.run(spec, reference.rms_norm, backward=True))(*exact)


def assert_results(spec, got):
    for name, a, b in zip(NAMES, got, expected(spec), strict=False):
        # dscale sums rows of rounded products; its own dtype bounds it otherwise.
        rel = 1e-5 if a.dtype == jnp.float32 else None
        assert_close(a, b, rel=rel, name=f"{spec.name} {name}")


def results(spec, *implementations):
    """Of each implementation, by one program."""
    ops = [functools.partial(rms_norm, implementation=x) for x in implementations]

    @jax.jit
    def all_of_them(args):
        return [specs.run(spec, op, backward=True)(*args) for op in ops]

    return all_of_them(arguments(spec))


@pytest.fixture
def tiled(monkeypatch):
    """Fixes the tiling of both kernels and shrinks the card to two SMs."""

    def use(tiling):
        monkeypatch.setattr(config, "pick", lambda **_: tiling)

    with hw.assume(SMALL):
        yield use


# Two have rows as long as others', and a dtype and an option of the tilings below.
WIDTHS = [name for name in CI if name not in ("ci_zero_centered", "ci_f32")]


@pytest.mark.parametrize("name", WIDTHS)
def test_xla_and_the_kernel_as_the_heuristic_tiles_it_are_the_reference(name):
    spec = CI[name]
    with hw.assume(SMALL), interpreted():
        got = results(spec, "xla", "mosaic")
    for each in got:
        assert_results(spec, each)


VARIANTS = {
    "plain": Config(threads=16, rows=8, stages=0, blocks_per_sm=1),
    "plain, two parts a tile": Config(threads=16, rows=16, stages=0, blocks_per_sm=1),
    "ring deeper than the tiles": Config(threads=16, rows=8, stages=4, blocks_per_sm=1),
    "ring, bulk store": Config(
        threads=16, rows=8, stages=2, blocks_per_sm=1, bulk_store=True
    ),
    "plain, bulk store": Config(
        threads=16, rows=8, stages=0, blocks_per_sm=1, bulk_store=True
    ),
    "a warp a row": Config(threads=32, rows=4, stages=2, blocks_per_sm=2),
    "two warps a row": Config(threads=64, rows=2, stages=2, blocks_per_sm=4),
}


@pytest.mark.parametrize(
    ("variant", "gate"),
    [
        # Every way to move rows, with each gate for loads, rings and bulk stores.
        ("plain", "before"),
        ("plain, two parts a tile", "after"),
        ("plain, bulk store", "no"),
        ("ring, bulk store", "before"),
        ("ring, bulk store", "after"),
        ("ring deeper than the tiles", "no"),
        ("a warp a row", "before"),
        ("two warps a row", "after"),
    ],
)
def test_tilings_give_every_flag(tiled, variant, gate):
    tiled(VARIANTS[variant])
    spec = specs.Spec(
        name="tiled",
        tag="ci",
        shape=(32, 128),
        gate=gate,
        zero_centered=gate != "before",
        dtype="float32" if gate == "before" else "bfloat16",
    )
    with interpreted():
        (got,) = results(spec, "mosaic")
    assert_results(spec, got)


def lowered(spec, names=("pk_rms_norm_fwd", "pk_rms_norm_bwd")):
    args = jax.eval_shape(spec.arguments, jax.random.key(0))
    op = functools.partial(rms_norm, implementation="mosaic")
    step = jax.jit(specs.run(spec, op, backward=True))
    text = step.trace(*args).lower(lowering_platforms=("cuda",)).as_text()
    return all(name in text for name in names)


# A width, a gate, a dtype each; long rows without a gate are lowered below, and fewer
# rows, or more, are another number of turns of the same loop.
MEASURED = [
    x for x in specs.specs("perf") if x.name not in ("row_4096", "decode_residual")
]
LOWERED = [*MEASURED, MODEL["f32_row"], CI["ci_f16"]]


@pytest.mark.parametrize("spec", LOWERED, ids=lambda spec: spec.name)
def test_lowers_for_the_card_at_every_size(spec):
    with hw.assume():
        assert lowered(spec)


@pytest.mark.parametrize(
    ("tiling", "gate"),
    [
        (Config(threads=128, rows=1, stages=0, blocks_per_sm=8), "after"),
        (Config(threads=128, rows=1, stages=4, blocks_per_sm=4), "no"),
        (
            Config(threads=128, rows=2, stages=2, blocks_per_sm=1, bulk_store=True),
            "before",
        ),
    ],
    ids=str,
)
def test_lowers_with_every_way_to_move_rows(monkeypatch, tiling, gate):
    monkeypatch.setattr(config, "pick", lambda **_: tiling)
    with hw.assume():
        assert lowered(
            specs.Spec(name="row", tag="perf", shape=(16384, 4096), gate=gate)
        )


@pytest.mark.parametrize("implementation", ["xla", "mosaic"])
def test_rows_do_not_see_each_other(implementation):
    x = np.random.default_rng(3).normal(size=(4, 256)).astype(np.float32)
    holed = x.copy()
    holed[2] = np.nan
    op = jax.jit(functools.partial(rms_norm, implementation=implementation))
    with interpreted():
        clean, dirty = (op(rows, np.ones(256, np.float32)) for rows in (x, holed))
    keep = np.array([0, 1, 3])
    np.testing.assert_array_equal(np.asarray(clean)[keep], np.asarray(dirty)[keep])
    assert np.isnan(np.asarray(dirty)[2]).all()


def test_groups_are_norms_of_their_own():
    draw = np.random.default_rng(4)
    x, scale = (draw.normal(size=n).astype(np.float32) for n in ((3, 4, 32), 128))

    @jax.jit
    def both(x, scale):
        own = functools.partial(rms_norm, implementation="reference")
        parts = [own(x[:, g], scale.reshape(4, 32)[g]) for g in range(4)]
        whole = rms_norm(x.reshape(3, 128), scale, num_groups=4)
        return whole, jnp.stack(parts, 1).reshape(3, 128)

    assert_close(*both(x, scale))


def test_a_row_of_zeros_gives_zeros_and_finite_gradients():
    x, scale = jnp.zeros((4, 256)), jnp.ones(256)

    @functools.partial(jax.jit, static_argnums=0)
    def run(implementation, x, scale):
        op = functools.partial(rms_norm, implementation=implementation)
        y, pull = jax.vjp(op, x, scale)
        return y, pull(jnp.ones_like(y))

    for implementation in ("reference", "xla"):
        y, grads = run(implementation, x, scale)
        assert not np.asarray(y).any()
        assert all(np.isfinite(np.asarray(g)).all() for g in grads)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"scale": jnp.ones(7)}, r"scale\.shape=\(7,\)"),
        ({"gate": jnp.ones((2, 7))}, r"gate\.shape=\(2, 7\)"),
        ({"num_groups": 3}, "num_groups=3"),
        ({"x": jnp.ones((2, 8), jnp.int32)}, "int32"),
    ],
)
def test_caller_errors_name_the_value(arguments, message):
    call = {"x": jnp.ones((2, 8)), "scale": jnp.ones(8)} | arguments
    with pytest.raises(ValueError, match=message):
        rms_norm(**call)


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((8, 2880), "2880"),
        ((8, 16384), "registers"),
        ((3, 128), "3 rows"),
        ((128, 32), "64 bytes"),
        ((0, 128), "0 rows"),
    ],
)
def test_what_the_kernel_cannot_do_is_said_and_runs_on_xla(shape, message):
    x = jax.ShapeDtypeStruct(shape, jnp.bfloat16)
    scale = jax.ShapeDtypeStruct(shape[-1:], jnp.float32)
    with hw.assume():
        choice = api.choose(x, scale)
        assert choice.implementation == "xla"
        assert message in choice.refused["mosaic"]
        with pytest.raises(NotImplementedError, match=message):
            api.choose(x, scale, implementation="mosaic")


def test_without_a_hopper_the_kernel_is_refused():
    if hw.is_hopper():
        return
    with pytest.raises(NotImplementedError, match="Hopper"):
        rms_norm(jnp.ones((4, 256)), jnp.ones(256), implementation="mosaic")


@pytest.mark.parametrize(
    "fields",
    [{"threads": 3, "rows": 4}, {"threads": 16, "rows": 4}, {"stages": 99}],
)
def test_impossible_tilings_are_refused(fields):
    with pytest.raises(ValueError, match="allowed are"):
        Config(**({"threads": 16, "rows": 8} | fields))


def test_a_tile_too_large_for_the_card_is_refused_before_the_launch(monkeypatch):
    tiling = Config(threads=128, rows=16, stages=4)
    monkeypatch.setattr(config, "pick", lambda **_: tiling)
    with hw.assume(), pytest.raises(ValueError, match="shared memory"):
        lowered(specs.Spec(name="row", tag="perf", shape=(64, 4096)))


@pytest.mark.gpu
@pytest.mark.parametrize("name", MODEL)
def test_the_kernel_on_the_card(name):
    spec = MODEL[name]
    (got,) = results(spec, "mosaic")
    assert_results(spec, got)


@pytest.mark.gpu
@pytest.mark.parametrize("name", MODEL)
def test_a_hundred_runs_give_the_same_bits(name):
    spec = MODEL[name]
    args = spec.arguments(jax.random.key(7))
    op = functools.partial(rms_norm, implementation="mosaic")
    step = jax.jit(specs.run(spec, op, backward=True))
    first = [np.asarray(leaf) for leaf in step(*args)]
    for _ in range(100):
        for a, b in zip(first, step(*args), strict=True):
            np.testing.assert_array_equal(a, np.asarray(b))
