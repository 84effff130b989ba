"""Chains of products in one launch, against the products one by one."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels._common import hw
from pallas_kernels._common.dispatch import recorded_choices
from pallas_kernels._common.interpret import interpreted
from pallas_kernels._common.testing import assert_close
from pallas_kernels.gemv import Product, chain, gemv_chain, kernel_ring, specs
from pallas_kernels.gemv.config import Config


def numbers(*shape, seed=0, dtype="bfloat16"):
    draw = np.random.default_rng(seed).standard_normal(shape) / shape[0] ** 0.5
    return jnp.asarray(draw, jnp.dtype(dtype))


def layer(d_model, width, d_ff, inward, rows=1):
    """The stream, what a mixer made, and the products of a layer's other half."""
    draw = functools.partial(numbers, seed=3)
    scales = 1 + numbers(2, d_model, seed=4, dtype="float32")
    products = (
        Product(weights=(draw(width, d_model),), adds=True),
        Product(
            weights=(draw(d_model, d_ff), numbers(d_model, d_ff, seed=5)),
            norm_scale=scales[0],
            swiglu=True,
        ),
        Product(weights=(draw(d_ff, d_model),), adds=True),
        Product(
            weights=tuple(numbers(d_model, n, seed=n) for n in inward),
            norm_scale=scales[1] - 1,
            zero_centered=True,
            out_dtypes=("bfloat16",) * (len(inward) - 1) + ("float32",),
        ),
    )
    stream = numbers(rows, d_model, seed=1) * d_model**0.5
    return stream, numbers(rows, width, seed=2) * width**0.5, products


def compiled(sizes, implementation, **options):
    """The chain as a function of nothing, compiled once."""
    stream, y, products = sizes
    call = functools.partial(gemv_chain, implementation=implementation, **options)
    weights = tuple(p.weights for p in products)

    @jax.jit
    def go(stream, y, weights):
        made = [
            dataclasses.replace(p, weights=w)
            for p, w in zip(products, weights, strict=True)
        ]
        return call(stream, made, y=y)

    return functools.partial(go, stream, y, weights)


def run(sizes, implementation, **options):
    return compiled(sizes, implementation, **options)()


def assert_same(got, want):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert a.dtype == b.dtype
        assert_close(a, b, rel=5e-3)


def blocks(count):
    return hw.assume(dataclasses.replace(hw.H200, sms=count))


@pytest.mark.parametrize(
    ("sms", "inward", "rows", "config"),
    [
        # One block: the ring goes on from phase to phase, as on the card.
        (1, (64,), 1, Config(columns=64, burst=2, warpgroups=2, ring=5)),
        # Blocks without a strip, strips that are no whole, a launch a phase.
        (3, (56, 40), 2, Config(columns=64, burst=2, warpgroups=1, ring=2)),
    ],
)
def test_a_chain_is_its_products_one_by_one(sms, inward, rows, config):
    sizes = layer(48, 72, 56, inward, rows)
    want = run(sizes, "reference")
    with blocks(sms), interpreted():
        assert_same(run(sizes, "mosaic", config=config), want)
    assert_same(run(sizes, "xla"), want)


def test_what_cannot_follow_is_named():
    stream, y, products = layer(16, 24, 8, (8, 8))
    call = functools.partial(gemv_chain, stream, implementation="reference")
    with pytest.raises(ValueError, match=r"products are \(\)"):
        call(())
    with pytest.raises(ValueError, match=r"product 0 has no norm.*y is None"):
        call(products)
    with pytest.raises(ValueError, match="product 0 has 2 results, only the last"):
        call((products[3], products[0]), y=y)
    with pytest.raises(ValueError, match=r"expected float\[24, N\]"):
        call((products[2],), y=y)
    wide = dataclasses.replace(products[0], out_dtypes=("float32",))
    with pytest.raises(ValueError, match="adds to a stream of bfloat16"):
        call((wide,), y=y)
    mosaic = functools.partial(gemv_chain, stream, implementation="mosaic", y=y)
    with blocks(1), pytest.raises(NotImplementedError, match="more than 1 strips"):
        mosaic(products)
    with pytest.raises(NotImplementedError, match="Hopper"):
        mosaic(products)


def test_a_layer_is_one_launch_on_the_card():
    sizes = dataclasses.replace(specs.CHAIN, layers=2)

    def call(implementation):
        args = jax.eval_shape(sizes.arguments, jax.random.key(0))
        layers = sizes.chained(
            functools.partial(gemv_chain, implementation=implementation), at_rest=True
        )
        with hw.assume():
            traced = jax.jit(layers).trace(*args)
            return traced.lower(lowering_platforms=("cuda",)).as_text()

    with recorded_choices() as choices:
        named = call("mosaic")
    assert [x.op for x in choices].count("gemv_chain") == 1 + sizes.layers
    meets = ("red.release.gpu", "ld.relaxed.gpu", "atom.acq_rel.gpu")
    for text in ("pk_gemv_chain", "griddepcontrol.wait", "cp.async.cg", *meets):
        assert text in named
    # No result shares memory with an argument: a fusion with slices would forget it.
    assert "output_operand_alias<" not in named
    assert "prefetch.L2" not in named
    assert "pk_gemv_chain" not in call(None)


def test_what_the_next_launch_reads_is_fetched_behind_the_last_product():
    stream, _, products = layer(16, 24, 8, (8,))
    sizes = stream, numbers(1, 8, seed=2), products[2:]
    ahead = numbers(16, 24, seed=6)
    with hw.assume():
        op = functools.partial(gemv_chain, implementation="mosaic", prefetch=(ahead,))
        traced = jax.jit(lambda x, y: op(x, sizes[2], y=y)).trace(*sizes[:2])
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert "cp.async.bulk.prefetch.L2" in text
    with blocks(2), interpreted():
        got = run(sizes, "mosaic", prefetch=(ahead,))
    assert_same(got, run(sizes, "reference"))
    with pytest.raises(ValueError, match=r"prefetch has bfloat16\[3\], expected mult"):
        run(sizes, "xla", prefetch=(ahead[0, :3],))


@pytest.mark.parametrize("rows", [1, 2, 4])
def test_as_many_bursts_as_fit_are_on_their_way(rows):
    """Of models' sizes; where there is no room it is refused by name."""
    like = jax.ShapeDtypeStruct
    for d_model, d_ff in ((1024, 3584), (2048, 6144), (2560, 9216), (4096, 64_000)):
        stream = like((rows, d_model), jnp.bfloat16)
        products = (
            Product(
                weights=(like((d_model, 64), jnp.bfloat16),) * 2,
                norm_scale=like((d_model,), jnp.float32),
                swiglu=True,
            ),
            Product(weights=(like((d_ff, d_model), jnp.bfloat16),), adds=True),
        )
        with hw.assume():
            choose = functools.partial(chain.choose, stream, implementation="mosaic")
            if d_ff == 64_000:
                with pytest.raises(
                    NotImplementedError, match="shared memory, the card"
                ):
                    choose(products[1:])
                continue
            plan, _ = chain._plan(
                *(choose(products).config, stream, products), at_rest=False
            )
            assert kernel_ring.bytes_of(plan) <= hw.device().smem_bytes


def test_a_batch_of_launches_is_refused_by_name():
    stream, y, products = layer(16, 24, 8, (8,))
    op = functools.partial(gemv_chain, products=products, implementation="mosaic")
    with hw.assume(), pytest.raises(NotImplementedError, match="has no vmap"):
        jax.eval_shape(jax.vmap(lambda x: op(x, y=y)), stream[None])


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 2, 4])
def test_ends_of_strips_and_blocks_without_one_on_the_card(rows):
    sizes = layer(48, 72, 56, (56, 40), rows)
    want = run(sizes, "reference")
    config = Config(columns=64, burst=2, warpgroups=2, ring=3)
    for given in (None, config):
        chain = compiled(sizes, "mosaic", config=given)
        got = chain()
        assert_same(got, want)
        for _ in range(100):
            again = chain()
            for a, b in zip(jax.tree.leaves(again), jax.tree.leaves(got), strict=True):
                assert jnp.array_equal(a, b)


@pytest.mark.gpu
def test_a_chain_of_layers_on_the_card():
    sizes = dataclasses.replace(specs.CHAIN, layers=4)
    args = jax.jit(sizes.arguments)(jax.random.key(0))

    def call(implementation, at_rest):
        op = functools.partial(gemv_chain, implementation=implementation)
        return jax.jit(sizes.chained(op, at_rest=at_rest))

    want = call("reference", False)(*args)[0]
    run = call("mosaic", True)
    got = run(*args)[0]
    assert_close(got, want, rel=3e-2)
    assert jnp.array_equal(got, call("mosaic", False)(*args)[0])
    for _ in range(100):
        assert jnp.array_equal(run(*args)[0], got)


@pytest.mark.gpu
def test_layers_of_a_scan_meet_on_the_card():
    """A fusion with the slices of a scan knows of no result that is an argument."""
    stream, y, products = layer(512, 512, 1024, (512,))
    stacked = jax.tree.map(
        lambda w: jnp.stack([w, w[::-1], w]), tuple(p.weights for p in products)
    )

    def own(weights):
        pairs = zip(products, weights, strict=True)
        return [dataclasses.replace(p, weights=w) for p, w in pairs]

    def one(implementation, carry, weights):
        stream, y = carry
        op = functools.partial(gemv_chain, implementation=implementation)
        for _ in range(2):
            stream, (y,) = op(stream, own(weights), y=y.astype(jnp.bfloat16))
            stream = stream * jnp.bfloat16(0.5)
        return (stream, y), None

    def scanned(implementation):
        body = functools.partial(one, implementation)
        carry = stream, y.astype(jnp.float32)
        return jax.jit(lambda weights: jax.lax.scan(body, carry, weights)[0])

    run = scanned("mosaic")
    got = run(stacked)
    for a, b in zip(got, scanned("reference")(stacked), strict=True):
        assert_close(a, b, rel=3e-2)
    for _ in range(100):
        for a, b in zip(run(stacked), got, strict=True):
            assert jnp.array_equal(a, b)
