"""Layers that decode with `gemv`: the decoder's values, in fewer launches."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxaccel.cache.dense import KVCache
from jaxaccel.data.batch import packing_metadata
from jaxaccel.decoding.layer_loop import read_tokens
from jaxaccel.decoding.verify import commit, verify
from jaxaccel.models.qwen3_5_text import Qwen3_5TextConfig
from jaxaccel.nn import few_rows
from jaxaccel.nn.attention import Attention, AttentionConfig
from jaxaccel.nn.mlp import MLP
from jaxaccel.nn.norm import RMSNorm
from jaxaccel.nn.rope import RopeConfig
from pallas_kernels._common import hw
from pallas_kernels._common.dispatch import recorded_choices
from pallas_kernels._common.interpret import interpreted
from pallas_kernels._common.testing import assert_close
from pallas_kernels.gemv import gemv_chain


CONFIG = Qwen3_5TextConfig.tiny(pattern=("gdn", "attention"), num_layers=2).decoder()


@pytest.fixture(scope="module")
def models(random_model):
    """The same weights with and without `gemv`; of attention without its gate too."""
    ungated = dataclasses.replace(
        CONFIG,
        num_layers=1,
        pattern=("attention",),
        attention=dataclasses.replace(CONFIG.attention, output_gate=False),
    )
    return {
        name: tuple(
            random_model(dataclasses.replace(config, implementation=implementation))
            for implementation in (None, {"gemv": "xla"})
        )
        for name, config in (("gated", CONFIG), ("ungated", ungated))
    }


def read(model):
    """Hidden states of 5 tokens, 1 and 2 more, and how often `gemv` ran in each."""
    graphdef, state = nnx.split(model)
    tokens = jax.random.randint(jax.random.key(1), (2, 8), 0, 128)
    counts = []

    @jax.jit
    def run(state):
        model = nnx.merge(graphdef, state)
        cache, hidden = model.init_cache(2, 16), []
        for piece in (tokens[:, :5], tokens[:, 5:6], tokens[:, 6:]):
            with recorded_choices() as choices:
                output = model(piece, cache=cache)
            counts.append(sum(choice.op == "gemv" for choice in choices))
            hidden.append(output.hidden)
            cache = output.cache
        return hidden, cache

    return run(state), counts


# In, out, gate and up, down of each layer; the prompt has too many rows, and the
# recurrence of several tokens has products of its own.
@pytest.mark.parametrize(
    ("name", "counts"), [("gated", [0, 8, 6]), ("ungated", [0, 4, 4])]
)
def test_a_decoder_reads_the_same_in_fewer_products(models, name, counts):
    plain, few = models[name]
    want, none = read(plain)
    got, found = read(few)
    assert (none, found) == ([0, 0, 0], counts)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-5)


def test_products_of_neighbours_are_one_launch(models, random_model, monkeypatch):
    """In of the first layer; out, gate and up, down, in of the next; the rest."""
    fetched = []

    def spied(*args, prefetch, **options):
        fetched.append([w.shape for w in prefetch])
        return gemv_chain(*args, prefetch=prefetch, **options)

    monkeypatch.setattr(few_rows, "gemv_chain", spied)
    named = {"gemv": "xla", "gemv_chain": "xla"}
    chained = random_model(dataclasses.replace(CONFIG, implementation=named))
    tokens = jax.random.randint(jax.random.key(1), (2, 3), 0, 128)

    def run(model):
        graphdef, state = nnx.split(model)

        @jax.jit
        def go(state):
            model = nnx.merge(graphdef, state)
            cache, hidden = model.init_cache(2, 8), []
            for t in range(3):
                piece = tokens[:, t : t + 1]
                h, cache = read_tokens(model, piece, jnp.ones_like(piece), cache)
                hidden.append(h)
            return hidden

        with recorded_choices() as choices:
            found = go(state)
        return found, [choice.op for choice in choices].count("gemv_chain")

    want, none = run(models["gated"][0])
    got, count = run(chained)
    assert (none, count) == (0, 3 * 3)
    # Each has the maps of its layer brought that the next launch begins with.
    wide, narrow = CONFIG.mlp.d_ff, CONFIG.d_model
    for *layers, last in (fetched[i : i + 3] for i in (0, 3, 6)):
        assert not last
        for _, *inward in layers:
            assert inward == [(narrow, wide)] * 2
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-5)


def test_drafts_are_verified_in_few_products(random_model):
    """Two tokens of two rows, of which the second row has ended but for one."""
    ops = {"gemv": "xla", "gemv_chain": "xla", "decode_attention": "xla"}
    plain, few = (
        random_model(dataclasses.replace(CONFIG, implementation=x)) for x in (None, ops)
    )
    tokens = jax.random.randint(jax.random.key(1), (2, 7), 0, 128)
    segments, accepted = jnp.array([[1, 1], [1, 0]]), jnp.array([2, 0])

    def speculate(model):
        graphdef, state = nnx.split(model)

        @jax.jit
        def run(state):
            model = nnx.merge(graphdef, state)
            cache = model(tokens[:, :5], cache=model.init_cache(2, 16)).cache
            with recorded_choices() as choices:
                hidden, pending = verify(model, tokens[:, 5:], segments, cache)
            found.append([choice.op for choice in choices])
            return hidden, commit(model, pending, accepted)

        found = []
        hidden, cache = run(state)
        return (hidden[0], hidden[1, :1], cache), found[0]

    (want, _), (got, ops) = speculate(plain), speculate(few)
    assert ops.count("gemv_chain") == 3  # in; out, gate and up, down, in; the rest
    assert "decode_attention" in ops
    assert "attention" not in ops
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize(
    "ops",
    [
        {"rope_append": "xla"},
        {"rope_append": "reference", "decode_attention": "xla", "gemv": "xla"},
    ],
    ids=["alone", "with others"],
)
def test_new_tokens_go_to_the_cache_at_once(random_model, ops):
    """A token, which the second row has not, then two drafts, of which it has one."""
    config = dataclasses.replace(CONFIG, num_layers=1, pattern=("attention",))
    plain, once = (
        random_model(dataclasses.replace(config, implementation=x)) for x in (None, ops)
    )
    tokens = jax.random.randint(jax.random.key(1), (2, 8), 0, 128)

    def decode(model):
        graphdef, state = nnx.split(model)

        @jax.jit
        def run(state):
            model = nnx.merge(graphdef, state)
            cache = model(tokens[:, :5], cache=model.init_cache(2, 16)).cache
            with recorded_choices() as choices:
                first = jnp.array([[1], [0]])
                one, cache = read_tokens(model, tokens[:, 5:6], first, cache)
                second = jnp.array([[1, 1], [1, 0]])
                two, pending = verify(model, tokens[:, 6:], second, cache)
            found.extend(choice.op for choice in choices)
            cache = commit(model, pending, jnp.array([1, 1]))
            return one[0], two[0], two[1, :1], cache

        found = []
        return run(state), found

    (want, without), (got, found) = decode(plain), decode(once)
    assert (without.count("rope_append"), found.count("rope_append")) == (0, 2)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-5)


def test_kernels_run_an_attention_layers_step():
    """Queries go from kernel to kernel in rows of eight, NaN where no token is."""
    sizes = {"num_heads": 2, "num_kv_heads": 1, "head_dim": 64}
    config = AttentionConfig(
        **sizes,
        rope=RopeConfig(fraction=0.25),
        qk_norm=True,
        output_gate=True,
    )
    kernels = (("decode_attention", "mosaic"), ("rope_append", "mosaic"))
    plain, fused = (
        Attention(config, 16, dtype="bfloat16", implementation=x, rngs=nnx.Rngs(0))
        for x in ((("decode_attention", "xla"),), kernels)
    )
    draw, length = np.random.default_rng(0), np.array([62], np.int32)
    is_held = np.arange(64)[None, :] < length[:, None]
    key, value = draw.normal(size=(2, 1, 64, 1, 64))
    key[~is_held], value[~is_held] = np.nan, np.nan
    x, key, value = (
        jnp.asarray(a, "bfloat16") for a in (draw.normal(size=(1, 1, 16)), key, value)
    )
    positions = jnp.asarray(np.where(is_held, 0, -1), jnp.int32)
    cache = KVCache(k=key, v=value, positions=positions)

    def step(layer):
        graphdef, state = nnx.split(layer)

        @jax.jit
        def run(state):
            meta = packing_metadata((1, 1), cached_length=jnp.asarray(length))
            return nnx.merge(graphdef, state)(x, meta, cache, jnp.asarray(length))

        return run(state)

    want, after = step(plain)
    one = hw.assume(dataclasses.replace(hw.H200, sms=1))
    with one, interpreted(), recorded_choices() as choices:
        got, cache = step(fused)
    runs = {choice.op: choice.implementation for choice in choices}
    assert (runs["decode_attention"], runs["rope_append"]) == ("mosaic", "mosaic")
    assert_close(got, want, rel=1e-2, name="y")
    np.testing.assert_array_equal(cache.positions, after.positions)
    for a, b in ((cache.k, after.k), (cache.v, after.v)):
        a, b = np.asarray(a, np.float32), np.asarray(b, np.float32)
        np.testing.assert_array_equal(np.isnan(a), np.isnan(b))
        assert_close(np.nan_to_num(a), np.nan_to_num(b), rel=4e-3)


def test_a_kernel_runs_a_feed_forward_part():
    kind = {"dtype": "bfloat16", "param_dtype": "bfloat16", "rngs": nnx.Rngs(0)}
    mlp = MLP(64, 48, implementation=(("gemv", "mosaic"),), **kind)
    norm = RMSNorm(64, zero_centered=True)
    x = jax.random.normal(jax.random.key(0), (2, 1, 64), jnp.bfloat16)
    # On few SMs sizes of tests are few blocks.
    few = hw.assume(dataclasses.replace(hw.H200, sms=1))
    with few, interpreted(), recorded_choices() as choices:
        got = mlp.added(x, norm)
    assert [choice.implementation for choice in choices] == ["mosaic"] * 2
    assert_close(got, x + mlp(norm(x)), rel=1e-2, name="y")


def test_which_products_are_few():
    x = jnp.ones((2, 2, 8))
    assert few_rows.applies("xla", x)
    assert not few_rows.applies("xla", jnp.ones((5, 1, 8)))
    assert not few_rows.applies(None, x)
    assert few_rows.named("mosaic") is None
    assert few_rows.named((("gemv", "mosaic"),)) == "mosaic"
    mlp = MLP(8, 8, implementation=(("gemv", "xla"),), rngs=nnx.Rngs(0))
    assert few_rows.adds_itself(mlp, x, decodes=True)
    assert not few_rows.adds_itself(mlp, x, decodes=False)  # it may be trained
    config = dataclasses.replace(CONFIG.attention, use_bias=True)
    with pytest.raises(NotImplementedError, match=r"'xla' for gemv, .* use_bias=True"):
        Attention(config, 16, implementation=(("gemv", "xla"),), rngs=nnx.Rngs(0))
