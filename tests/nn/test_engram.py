"""Engram against the formulas in float64, cut into calls, packed, and left out."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxaccel.data.batch import packing_metadata
from jaxaccel.data.compressed_vocab import CompressedVocabulary
from jaxaccel.nn.engram import (
    Engram,
    GatheredRows,
    NGramHash,
    dilated_conv,
    engram_gate,
    init_engram_state,
)
from jaxaccel.nn.engram_config import VARIANTS, EngramConfig
from pallas_kernels.engram_hash import hash_on_host


VOCAB, D, G, T = 31, 6, 2, 11
TINY = EngramConfig(
    layers=(1,),
    heads=2,
    head_dim=4,
    bases=37,
    streams=G,
    eos_id=3,
    boundary="segment",
    conv_width=3,
)


def config_of(variant, **changes):
    changes = {"boundary": None, "index_base": None} | changes
    return dataclasses.replace(TINY, variant=variant, **changes)


@pytest.fixture(scope="module")
def made(build):
    """made(config) returns (hash, engram), its parameters far from their start."""

    @functools.cache
    def make(config):
        rows = config.layout(VOCAB).num_rows[0]
        engram = build(lambda rngs: Engram(config, D, rows, rngs=rngs))
        return NGramHash(config, VOCAB), engram

    return make


def inputs(batch=2, time=T, seed=0):
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, VOCAB, (batch, time)).astype(np.int32)
    h = rng.normal(size=(batch, time, G, D)).astype(np.float32)
    return jnp.asarray(tokens), jnp.asarray(h)


def forward(parts, tokens, h, segments=None, state=None, dead=None):
    """(y, state) of a call, as a decoder makes it."""
    ngrams, engram = parts
    length = None if state is None else jnp.ones(tokens.shape[:1], jnp.int32)
    meta = packing_metadata(tokens.shape, segment_ids=segments, cached_length=length)
    history = None if state is None else state.history
    ids, history = ngrams(tokens, meta, history, dead)
    conv = None if state is None or not state.conv else state.conv[0]
    y, conv = engram(h, ids[:, :, 0], meta, conv, dead)
    if state is not None:
        conv = () if conv is None else (conv,)
        state = dataclasses.replace(state, history=history, conv=conv)
    return y, state


def in_float64(config, engram, tokens, h):
    """One row without padding, from the formulas."""
    weights = {
        "/".join(map(str, path)): np.asarray(leaf.get_value(), np.float64)
        for path, leaf in nnx.to_flat_state(nnx.state(engram))
    }
    flags = {}
    if config.boundary == "eos":
        flags["is_last"] = tokens == config.eos_id
    ids, _ = hash_on_host(tokens, config.layout(VOCAB), **flags)
    e = weights["table/rows"][ids[0, :, 0]].reshape(len(ids[0]), -1)
    kv = e @ weights["kv_proj/kernel"] + weights.get("kv_proj/bias", 0.0)
    kv = kv.reshape(-1, G + 1, D)
    k, v, h = kv[:, :G], kv[:, G:], np.asarray(h[0], np.float64)

    def norm(x, eps):
        return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps)

    gain = weights["query_norm/scale"] * weights["key_norm/scale"]
    s = np.sum(norm(h, 1e-6) * norm(k, 1e-6) * gain, axis=-1) / np.sqrt(D)
    root = np.sign(s) * np.sqrt(np.maximum(np.abs(s), 1e-6))
    value = v / (1 + np.exp(-root))[..., None]
    if not VARIANTS[config.variant].has_conv:
        return value
    x = norm(value, 1e-5) * weights["conv_norm/scale"]
    mixed = np.zeros_like(x)
    width = config.conv_width
    for t, tap in itertools.product(range(len(x)), range(width)):
        if (source := t - (width - 1 - tap) * config.dilation) >= 0:
            mixed[t] += weights["conv_kernel"][tap].reshape(G, D) * x[source]
    return value + mixed / (1 + np.exp(-mixed))


@pytest.mark.parametrize("variant", VARIANTS)
def test_equals_the_formulas(variant, made):
    config = config_of(variant)
    parts = made(config)
    tokens, h = inputs(batch=1)
    y, _ = jax.jit(functools.partial(forward, parts))(tokens, h)
    want = in_float64(config, parts[1], np.asarray(tokens), h)
    np.testing.assert_allclose(y[0], want, rtol=1e-5, atol=2e-6)


def test_gate_equals_float64_with_its_gradient():
    rng = np.random.default_rng(0)
    h, k = (jnp.asarray(rng.normal(size=(1, 9, G, D)), jnp.float32) for _ in range(2))
    # Scores of exactly 0, of nearly 0, and large.
    h = h.at[0, 0].set(0.0).at[0, 1].multiply(1e-6)
    k = k.at[0, 2].set(h[0, 2])
    scales = [jnp.asarray(rng.normal(size=(G, D)), jnp.float32) for _ in range(2)]
    scales[0] = scales[0] * 40.0

    def plain(h, k, q, w):
        """As the paper writes it, in whatever type comes in."""
        rms = [jnp.sqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6) for x in (h, k)]
        products = (h / rms[0] * q[None, None]) * (k / rms[1] * w[None, None])
        s = jnp.sum(products, axis=-1) / D**0.5
        root = jnp.where(
            jnp.abs(s) > 1e-6, jnp.sqrt(jnp.where(s == 0, 1.0, jnp.abs(s))), 1e-3
        )
        return jax.nn.sigmoid(jnp.sign(s) * root)

    def both(form, *args):
        value, pull = jax.vjp(form, *args)
        return value, *pull(
            jnp.cos(jnp.arange(value.size, dtype=value.dtype)).reshape(value.shape)
        )

    got = jax.jit(functools.partial(both, engram_gate))(h, k, *scales)
    with jax.enable_x64(True):
        exact = [jnp.asarray(np.asarray(x, np.float64)) for x in (h, k, *scales)]
        want = jax.jit(functools.partial(both, plain))(*exact)
    np.testing.assert_allclose(got[0], np.asarray(want[0]), rtol=1e-5, atol=1e-6)
    for a, b in zip(got[1:], want[1:], strict=True):
        b = np.asarray(b)
        assert np.isfinite(a).all()
        np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-5 * np.abs(b).max())
    assert got[0][0, 0].tolist() == [0.5, 0.5]
    signed = jax.jit(functools.partial(engram_gate, copies_sign=True))
    zero = signed(h, k, *scales)[0, 0]
    np.testing.assert_allclose(np.abs(np.asarray(zero) - 0.5), 2.5e-4, rtol=1e-3)


def test_zero_filters_pass_the_value_alone(made):
    tokens, h = inputs()
    for variant, is_zero in (("paper", True), ("demo", False)):
        config = config_of(variant)
        rows = config.layout(VOCAB).num_rows[0]
        filters = jax.jit(
            lambda config=config, rows=rows: Engram(
                config, D, rows, rngs=nnx.Rngs(0)
            ).conv_kernel[...]
        )()
        assert bool(jnp.all(filters == 0)) == is_zero
    config = config_of("paper")
    ngrams, engram = made(config)
    engram = nnx.clone(engram)
    engram.conv_kernel[...] = jnp.zeros_like(engram.conv_kernel[...])
    without = dataclasses.replace(config, variant="v41", boundary="none", index_base=1)
    alone = made(without)[1]
    for name in ("table", "kv_proj", "query_norm", "key_norm"):
        setattr(alone, name, getattr(engram, name))
    run = jax.jit(lambda parts: forward((ngrams, parts), tokens, h)[0])
    np.testing.assert_array_equal(run(engram), run(nnx.clone(alone)))


def test_conv_is_shifted_taps_and_stops_at_documents():
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(1, T, 1, 2)), jnp.float32)
    weight = jnp.asarray(rng.normal(size=(3, 1, 2)), jnp.float32)
    documents = jnp.asarray([[1] * 5 + [2] * 6])
    y = dilated_conv(x, weight, 2, documents=documents)
    for start, stop in ((0, 5), (5, T)):
        alone = dilated_conv(x[:, start:stop], weight, 2)
        np.testing.assert_array_equal(y[:, start:stop], alone)
    want = x[0, 9] * weight[2] + x[0, 7] * weight[1] + x[0, 5] * weight[0]
    np.testing.assert_allclose(y[0, 9], want, rtol=1e-6)


def test_causal_and_finite_gradients(made):
    parts = made(config_of("paper"))
    tokens, h = inputs(batch=1)

    @jax.jit
    def outputs(h):
        y, pull = jax.vjp(lambda h: forward(parts, tokens, h)[0][:, 5], h)
        return pull(jnp.ones_like(y))[0]

    dh = np.asarray(outputs(h))[0]
    assert np.abs(dh[5]).min() > 0
    assert np.abs(dh[2]).min() > 0  # a tap of the convolution
    assert np.all(dh[6:] == 0)
    assert np.all(dh[[0, 1, 3, 4]] == 0)
    # Another token later changes nothing before.
    run = jax.jit(functools.partial(forward, parts))
    y, _ = run(tokens, h)
    other, _ = run(tokens.at[0, 6].set((tokens[0, 6] + 1) % VOCAB), h)
    np.testing.assert_array_equal(y[0, :6], other[0, :6])
    assert np.abs(np.asarray(y - other))[0, 6].max() > 0


def test_packed_equals_separate_bit_for_bit(made):
    parts = made(config_of("paper", boundary="segment"))
    tokens, h = inputs(batch=1)
    segments = jnp.asarray([[0, 1, 1, 1, 1, 2, 2, 2, 2, 2, 0]], jnp.int32)
    run = jax.jit(functools.partial(forward, parts))
    packed, _ = run(tokens, h, segments)
    assert np.all(np.asarray(packed)[0, [0, 10]] == 0)
    for start, stop in ((1, 5), (5, 10)):
        alone, _ = run(
            jnp.roll(tokens, -start, axis=1),
            jnp.roll(h, -start, axis=1),
            jnp.where(jnp.arange(T)[None] < stop - start, 1, 0),
        )
        np.testing.assert_array_equal(packed[:, start:stop], alone[:, : stop - start])
    joined, _ = jax.jit(functools.partial(forward, made(config_of("paper"))))(
        tokens, h, segments
    )
    np.testing.assert_array_equal(joined[:, 1:5], packed[:, 1:5])
    assert np.abs(np.asarray(joined - packed))[0, 5].max() > 0


@pytest.mark.parametrize("variant", ["paper", "qwen"])
def test_any_cutting_into_calls_gives_the_same(variant, made):
    config = config_of(variant)
    parts = made(config)
    tokens, h = inputs(time=16)
    tokens = tokens.at[:, 6].set(config.eos_id)
    full, _ = jax.jit(functools.partial(forward, parts))(tokens, h)
    step, length = jax.jit(functools.partial(forward, parts)), 6
    rng = np.random.default_rng(0)
    for side in ("left", "right"):
        borders = [0]
        while borders[-1] < 16:
            borders.append(min(16, borders[-1] + int(rng.integers(1, length + 1))))
        state = init_engram_state(config, 2, D, VOCAB, jnp.float32)
        for start, stop in itertools.pairwise(borders):
            missing = length - (stop - start)
            pad = (missing, 0) if side == "left" else (0, missing)
            at = slice(pad[0], pad[0] + stop - start)
            y, state = step(
                jnp.pad(tokens[:, start:stop], ((0, 0), pad)),
                jnp.pad(h[:, start:stop], ((0, 0), pad, (0, 0), (0, 0))),
                jnp.pad(jnp.ones((2, stop - start), jnp.int32), ((0, 0), pad)),
                state,
            )
            np.testing.assert_allclose(
                y[:, at], full[:, start:stop], rtol=1e-6, atol=1e-6
            )
        state = state.reset(jnp.asarray([True, False]))
        fresh = init_engram_state(config, 2, D, VOCAB, jnp.float32)
        for a, b in zip(jax.tree.leaves(state), jax.tree.leaves(fresh), strict=True):
            np.testing.assert_array_equal(a[0], b[0])


def test_dead_tokens_take_nothing_and_hide_what_is_older(made):
    parts = made(config_of("v41"))
    tokens, h = inputs(batch=1)
    dead = jnp.zeros((1, T), bool).at[0, 4].set(True)
    run = jax.jit(functools.partial(forward, parts))
    # Whatever id the place has, even one that is none.
    y, _ = run(tokens.at[0, 4].set(VOCAB + 5), h, dead=dead)
    whole, _ = run(tokens, h)
    changed = np.abs(np.asarray(y - whole))[0].max(axis=(1, 2)) > 0
    assert np.all(np.asarray(y)[0, 4] == 0)
    assert changed.tolist() == [t in (4, 5, 6) for t in range(T)]


def test_unknown_tokens_and_maps_are_never_silent(made):
    tokens, h = inputs(batch=1)
    run = jax.jit(functools.partial(forward, made(config_of("v41"))))
    y, _ = run(tokens.at[0, 3].set(VOCAB), h)
    assert np.isnan(y).any(axis=(2, 3))[0].tolist() == [t == 3 for t in range(T)]

    def vocabulary(offset):
        classes = ((np.arange(VOCAB) + offset) // 2).astype(np.int32)
        return CompressedVocabulary(
            token_map=classes,
            size=int(classes.max()) + 1,
            tokenizer="t",
            unicode_version="15.0.0",
        )

    config = config_of("v41").with_vocabulary(vocabulary(0))
    assert config.layout(VOCAB).pad_id == 1
    ngrams = NGramHash(config, VOCAB)
    hashed = jax.jit(lambda ngrams: ngrams(tokens, packing_metadata((1, T)))[0])
    assert np.all(np.asarray(hashed(ngrams)) == 2**31 - 1)
    ngrams.set_vocabulary(vocabulary(0))
    want, _ = hash_on_host(np.asarray(tokens) // 2, config.layout(VOCAB))
    np.testing.assert_array_equal(hashed(ngrams), want)
    with pytest.raises(ValueError, match="every row number would be wrong"):
        ngrams.set_vocabulary(vocabulary(1))
    with pytest.raises(ValueError, match="every row number would be wrong"):
        config.with_vocabulary(vocabulary(1))


def test_gathered_rows_take_the_tables_place(made):
    ngrams, engram = made(config_of("paper"))
    tokens, h = inputs()
    meta = packing_metadata(tokens.shape)
    ids = np.asarray(jax.jit(lambda tokens: ngrams(tokens, meta)[0])(tokens)[:, :, 0])
    run = jax.jit(lambda engram: forward((ngrams, engram), tokens, h)[0])
    want = run(engram)
    unique, slots = np.unique(ids, return_inverse=True)
    twin = nnx.clone(engram)
    rows = engram.table.rows[...][unique]
    twin.table = GatheredRows(rows, jnp.asarray(slots.reshape(ids.shape), jnp.int32))
    np.testing.assert_array_equal(run(twin), want)
    with pytest.raises(ValueError, match="this call has"):
        forward((ngrams, twin), tokens[:, :5], h[:, :5])


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"variant": "v5"}, "variant='v5' is unknown"),
        ({"layers": (2, 1)}, "must ascend"),
        ({"layers": (0,), "index_base": 1}, "count from 1"),
        ({"boundary": "eos", "eos_id": None}, "needs eos_id"),
        ({"heads": 0}, "heads=0 must be positive"),
        ({"compressed_size": 9}, "needs pad_class"),
        ({"gate_clamp": 0.0}, "gate_clamp=0.0"),
    ],
)
def test_configs_that_cannot_be(changes, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(TINY, **changes)


def test_published_widths():
    paper = EngramConfig(layers=(2, 15), head_dim=80, bases=2_262_400, streams=4)
    assert (paper.width, paper.places, paper.dilation) == (1280, (1, 14), 3)
    v41 = EngramConfig(
        layers=(1, 14),
        variant="v41",
        orders=(2, 3, 4),
        head_dim=256,
        bases=16_000_000,
        compressed_size=99_092,
        pad_class=2,
    )
    assert (v41.width, v41.places) == (6144, (1, 14))
    assert v41.layout(129_280).num_rows == (384_006_168, 384_016_682)
