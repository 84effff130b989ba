"""What every mixer must obey: one call, several calls, packed, padded, all the same."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from sequence_checks import T, only, same, shift

from jaxaccel.cache.dense import KVCache
from jaxaccel.cache.recurrent import RecurrentCacheOfLayer
from jaxaccel.data.batch import packing_metadata
from jaxaccel.nn.attention import Attention, AttentionConfig
from jaxaccel.nn.gated_deltanet import GatedDeltaNet, GatedDeltaNetConfig
from jaxaccel.nn.rope import RopeConfig
from pallas_kernels._common import hw
from pallas_kernels._common.dispatch import recorded_choices
from pallas_kernels._common.interpret import interpreted


D = 12
SPLITS = (1, 63, 64, 65, 127, 128, 129)
ATTENTION = AttentionConfig(
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    rope=RopeConfig(fraction=0.5),
    qk_norm=True,
    output_gate=True,
    window=20,
    sinks=True,
    logit_cap=5.0,
)
GDN = GatedDeltaNetConfig(num_key_heads=1, num_value_heads=2, key_dim=8, value_dim=6)


def _make(kind, dtype="float32"):
    def make(rngs):
        shared = {"dtype": dtype, "param_dtype": dtype, "rngs": rngs}
        if kind == "gdn":
            return GatedDeltaNet(GDN, D, **shared)
        return Attention(ATTENTION, D, zero_centered=True, **shared)

    return make


class Mixer:
    """A mixer as compiled functions of (x, segments)."""

    def __init__(self, module):
        self.module = module
        graphdef, self.state = nnx.split(module)

        def packed(state, x, segments):
            meta = packing_metadata(x.shape[:2], segment_ids=segments)
            return nnx.merge(graphdef, state)(x, meta)[0]

        def cached(state, x, segments, cache, length):
            meta = packing_metadata(
                x.shape[:2], segment_ids=segments, cached_length=length
            )
            y, cache = nnx.merge(graphdef, state)(x, meta, cache, length)
            return y, cache, length + jnp.sum(meta.is_real, 1, dtype=jnp.int32)

        def gradient(state, x, segments, weights):
            return jax.vjp(lambda x: packed(state, x, segments), x)[1](weights)[0]

        self.packed, self.cached, self.gradient = map(
            jax.jit, (packed, cached, gradient)
        )

    def empty(self, batch):
        cache = self.module.init_cache(batch, T, self.module.dtype)
        return cache, jnp.zeros((batch,), jnp.int32)


@pytest.fixture(scope="module", params=["gdn", "attention"])
def mixer(request, build):
    return Mixer(build(_make(request.param)))


@pytest.fixture(scope="module")
def x():
    return jax.random.normal(jax.random.key(0), (2, T, D))


def _row(cache, row):
    # By NumPy, as outputs are cut too: JAX would compile each place and length.
    return jax.tree.map(lambda leaf: np.asarray(leaf)[row], cache)


@pytest.fixture(scope="module")
def stepped(mixer, x):
    """Outputs and caches of feeding one token at a time."""
    cache, length = mixer.empty(2)
    outputs, caches = [], {}
    one = jnp.ones((2, 1), jnp.int32)
    for t in range(T):
        y, cache, length = mixer.cached(
            mixer.state, x[:, t : t + 1], one, cache, length
        )
        outputs.append(y)
        caches[t + 1] = cache
    return np.concatenate(outputs, axis=1), caches


@pytest.fixture(scope="module")
def packed_whole(mixer, x):
    return mixer.packed(mixer.state, x, jnp.ones((2, T), jnp.int32))


def test_steps_and_one_prefill_agree(mixer, x, stepped, packed_whole):
    outputs, caches = stepped
    same(outputs, packed_whole)
    ones = jnp.ones((2, T), jnp.int32)
    y, cache, length = mixer.cached(mixer.state, x, ones, *mixer.empty(2))
    same((y, cache), (outputs, caches[T]))
    np.testing.assert_array_equal(length, [T, T])


@pytest.mark.parametrize("n", SPLITS)
def test_right_padded_prefill_then_the_rest(mixer, x, stepped, n):
    outputs, caches = stepped
    # Rows of unequal length: the second stops ten tokens earlier if it can.
    lengths = [n, max(1, n - 10)]
    y, cache, length = mixer.cached(mixer.state, x, only(lengths), *mixer.empty(2))
    for row, count in enumerate(lengths):
        same(np.asarray(y)[row, :count], outputs[row, :count])
        here, there = (_row(c, row) for c in (cache, caches[count]))
        same(here, there)
    np.testing.assert_array_equal(length, lengths)
    rest = [T - count for count in lengths]
    y, cache, _ = mixer.cached(
        mixer.state, shift(x, lengths), only(rest), cache, length
    )
    for row, count in enumerate(rest):
        same(np.asarray(y)[row, :count], outputs[row, T - count :])
    same(cache, caches[T])


def test_a_finished_row_keeps_its_state(mixer, x, stepped):
    _, caches = stepped
    alive = jnp.array([[1], [0]], jnp.int32)
    length = jnp.array([65, 65], jnp.int32)
    _, cache, after = mixer.cached(mixer.state, x[:, 65:66], alive, caches[65], length)
    np.testing.assert_array_equal(after, [66, 65])
    same(*(_row(c, 1) for c in (cache, caches[65])), 0)
    same(*(_row(c, 0) for c in (cache, caches[66])))


def test_left_padding_changes_nothing(mixer, x, stepped):
    outputs, caches = stepped
    lengths = [127, 64]
    moved = shift(x, [n - T for n in lengths])
    segments = only(lengths, left=True)
    y, cache, _ = mixer.cached(mixer.state, moved, segments, *mixer.empty(2))
    plain = mixer.packed(mixer.state, moved, segments)
    for row, count in enumerate(lengths):
        want = outputs[row, :count]
        same(np.asarray(y)[row, T - count :], want)
        same(np.asarray(plain)[row, T - count :], want)
        here, there = (_row(c, row) for c in (cache, caches[count]))
        same(here, there)


# Lengths of documents and their ids, any that change at each border; 0 or less pads.
# What stands between two of one id is shorter than the window, or hides the leak.
LAYOUTS = (
    ([50, 65], [1, 2]),
    ([1, 64, 1, 63], [1, 2, 3, 4]),
    ([128, 2], [1, 2]),
    ([3, 1, 1, 60], [1, 2, 3, 4]),
    ([40, 5, 50], [1, 2, 1]),
    ([40, 5, 50], [1, 0, 1]),
    ([40, 5, 50], [-1, 2, 3]),
    ([1, 64, 1, 63], [9, 2, 9, 2]),
)


def _segments(documents, ids=None):
    numbers = np.zeros(T, np.int32)
    ids = range(1, len(documents) + 1) if ids is None else ids
    start = 0
    for number, length in zip(ids, documents, strict=True):
        numbers[start : start + length] = number
        start += length
    return jnp.asarray(numbers)


@pytest.mark.parametrize("pair", [LAYOUTS[i : i + 2] for i in range(0, 8, 2)])
def test_packed_documents_equal_separate_ones(mixer, x, pair):
    segments = jnp.stack([_segments(*layout) for layout in pair])
    y = mixer.packed(mixer.state, x, segments)
    for row, (documents, ids) in enumerate(pair):
        starts = np.cumsum([0, *documents[:-1]])
        real = [i for i, number in enumerate(ids) if number > 0]
        # Two documents at a time, each alone in its row.
        for first in range(0, len(real), 2):
            some = real[first : first + 2]
            alone = [np.roll(np.asarray(x)[row], -starts[i], axis=0) for i in some]
            lengths = [documents[i] for i in some]
            if len(alone) == 1:
                alone, lengths = alone * 2, lengths * 2
            separate = mixer.packed(
                mixer.state, jnp.asarray(np.stack(alone)), only(lengths)
            )
            for slot, i in enumerate(some):
                start, length = starts[i], documents[i]
                same(
                    np.asarray(y)[row, start : start + length],
                    np.asarray(separate)[slot, :length],
                )


def test_no_gradient_from_the_future_or_another_document(mixer, x):
    segments = jnp.stack([_segments([50, 65]), _segments([128, 2])])
    weights = jnp.zeros((2, T, D)).at[0, 70].set(1.0).at[1, 64].set(1.0)
    moved = np.asarray(
        jnp.abs(mixer.gradient(mixer.state, x, segments, weights)).max(-1)
    )
    seen = np.zeros((2, T), bool)
    oldest = 20 if isinstance(mixer.module, Attention) else T
    seen[0, max(50, 71 - oldest) : 71] = True
    seen[1, max(0, 65 - oldest) : 65] = True
    assert (moved[~seen] == 0.0).all()
    near = seen & (np.arange(T) > np.array([[60], [54]]))
    assert (moved[near] > 0.0).all()


def test_another_document_moves_no_bit(mixer, x):
    segments = jnp.stack([_segments([50, 65]), _segments([64, 64])])
    y = mixer.packed(mixer.state, x, segments)
    other = mixer.packed(
        mixer.state, jnp.where((segments == 1)[:, :, None], -3.0 * x, x), segments
    )
    second = np.asarray(segments) == 2
    np.testing.assert_array_equal(np.asarray(y)[second], np.asarray(other)[second])


@pytest.mark.parametrize("kind", ["gdn", "attention"])
def test_low_precision_keeps_f32_where_it_must(build, kind, x):
    module = build(_make(kind, "bfloat16"))
    low = Mixer(module)
    x = x.astype(jnp.bfloat16)
    y, cache, _ = jax.eval_shape(low.cached, low.state, x, only([T, T]), *low.empty(2))
    assert y.dtype == jnp.bfloat16
    if kind == "attention":
        assert isinstance(cache, KVCache)
        assert cache.k.dtype == jnp.bfloat16
        assert module.sinks.dtype == jnp.float32
        return
    assert cache.state.dtype == jnp.float32
    assert cache.conv.dtype == jnp.bfloat16
    assert module.A_log.dtype == module.dt_bias.dtype == jnp.float32
    meta = packing_metadata((2, T))
    for gate in jax.eval_shape(module.gates, x, meta):
        assert gate.dtype == jnp.float32


def _verify_and_commit(module):
    """(x, cache, accepted, length) -> (y of all tokens, the cache of the kept ones)."""
    graphdef, state = nnx.split(module)

    def run(state, x, cache, accepted, length):
        module = nnx.merge(graphdef, state)
        meta = packing_metadata(x.shape[:2], cached_length=length)
        y, pending = module.verify(x, meta, cache, length)
        return y, module.commit(pending, accepted)

    return functools.partial(jax.jit(run), state)


@pytest.fixture(scope="module")
def deltanet(build):
    """A mixer and its `_verify_and_commit`."""
    mixer = Mixer(build(_make("gdn")))
    return mixer, _verify_and_commit(mixer.module)


@pytest.mark.parametrize("start", [0, 6])
def test_kept_drafts_are_as_if_read_one_by_one(deltanet, start):
    mixer, verify_and_commit = deltanet
    drafts, rows = 4, 5
    # One row for each number of drafts that may be kept.
    x = jax.random.normal(jax.random.key(1), (rows, start + drafts + 1, D))
    one = jnp.ones((rows, 1), jnp.int32)
    cache, length = mixer.empty(rows)
    caches, outputs = [cache], []
    for t in range(start + drafts):
        y, cache, length = mixer.cached(
            mixer.state, x[:, t : t + 1], one, cache, length
        )
        caches.append(cache)
        outputs.append(y)
    kept = jnp.arange(rows, dtype=jnp.int32)
    length = jnp.full((rows,), start, jnp.int32)
    y, cache = verify_and_commit(
        x[:, start : start + drafts], caches[start], kept, length
    )
    same(y, jnp.concatenate(outputs[start:], axis=1))
    want = [
        jax.tree.map(lambda leaf, r=row: leaf[r], caches[start + row])
        for row in range(rows)
    ]
    want = jax.tree.map(lambda *leaves: jnp.stack(leaves), *want)
    same(cache, want)
    for got, old in zip(
        jax.tree.leaves(cache), jax.tree.leaves(caches[start]), strict=True
    ):
        np.testing.assert_array_equal(got[0], old[0])
    # A step without drafts after it.
    last, after = x[:, -1:], length + kept
    got = mixer.cached(mixer.state, last, one, cache, after)
    same(got, mixer.cached(mixer.state, last, one, want, after))


def _stacked(caches):
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *caches)


@pytest.mark.parametrize("time", [1, 3])
def test_a_layers_part_of_stacked_caches_moves_alone(deltanet, time):
    mixer, _ = deltanet
    draw = np.random.default_rng(0)
    caches = [
        jax.tree.map(
            lambda leaf: jnp.asarray(draw.normal(size=leaf.shape), leaf.dtype),
            mixer.empty(2)[0],
        )
        for _ in range(3)
    ]
    x = jnp.asarray(draw.normal(size=(2, time, D)), jnp.float32)
    real = jnp.ones((2, time), jnp.int32).at[1, -1].set(0)
    length = jnp.array([7, 7], jnp.int32)
    part = RecurrentCacheOfLayer(stacked=_stacked(caches), index=jnp.int32(1))
    y, after, _ = mixer.cached(mixer.state, x, real, part, length)
    want, cache, _ = mixer.cached(mixer.state, x, real, caches[1], length)
    same((y, after.stacked), (want, _stacked([caches[0], cache, caches[2]])), 1e-6)


def test_a_kernel_moves_a_layers_part_where_it_is(build):
    config = _gdn(num_key_heads=1, num_value_heads=1, key_dim=128, value_dim=128)

    def make(implementation):
        layer = functools.partial(GatedDeltaNet, config, D)
        return Mixer(
            build(lambda rngs: layer(implementation=implementation, rngs=rngs))
        )

    named, plain = make((("gated_delta_step", "mosaic"),)), make(None)
    cache, length = plain.empty(1)
    draw = np.random.default_rng(0)
    caches = [
        jax.tree.map(lambda x: jnp.asarray(draw.normal(size=x.shape), x.dtype), cache)
        for _ in range(2)
    ]
    x, one = jnp.asarray(draw.normal(size=(1, 1, D)), jnp.float32), only([1])[:, :1]
    part = RecurrentCacheOfLayer(stacked=_stacked(caches), index=jnp.int32(1))
    with hw.assume(), interpreted(), recorded_choices() as choices:
        got = named.cached(named.state, x, one, part, length + 3)
    # The way was chosen once.
    assert [c.implementation for c in choices if c.op == "gated_delta_step"] == [
        "mosaic"
    ]
    y, cache, _ = plain.cached(plain.state, x, one, caches[1], length + 3)
    same(got[0], y)
    same(got[1].stacked, _stacked([caches[0], cache]))


def test_a_kernel_of_whole_sequences_is_not_asked_for_cached_ones(build):
    config = AttentionConfig(num_heads=2, num_kv_heads=1, head_dim=128)
    kind = {"dtype": "bfloat16", "param_dtype": "bfloat16"}
    named = {"implementation": (("attention", "mosaic"),)}
    low = Mixer(build(lambda rngs: Attention(config, D, rngs=rngs, **kind, **named)))
    x = jax.ShapeDtypeStruct((1, 128, D), jnp.bfloat16)
    ids = jax.ShapeDtypeStruct((1, 128), jnp.int32)
    with hw.assume():
        whole = low.packed.trace(low.state, x, ids)
        assert "pk_" in whole.lower(lowering_platforms=("cuda",)).as_text()
        with recorded_choices() as choices:
            jax.eval_shape(low.cached, low.state, x, ids, *low.empty(1))
    assert [c.implementation for c in choices if c.op == "attention"] == ["xla"]
    exact = Attention(config, D, implementation="reference", rngs=nnx.Rngs(0))
    with recorded_choices() as choices:
        meta = packing_metadata((1, 2))
        cache = exact.init_cache(1, 2, "float32")
        length = jnp.zeros((1,), jnp.int32)
        jax.eval_shape(lambda x: exact(x, meta, cache, length)[0], jnp.ones((1, 2, D)))
    assert [c.implementation for c in choices if c.op == "attention"] == ["reference"]


def test_a_bfloat16_state_is_kept_as_such_and_read_in_f32(build, x):
    results = {}
    for dtype in ("float32", "bfloat16"):
        config = dataclasses.replace(GDN, state_dtype=dtype)
        mixer = Mixer(build(lambda rngs, c=config: GatedDeltaNet(c, D, rngs=rngs)))
        cache, length = mixer.empty(2)
        whole = jax.eval_shape(
            mixer.cached, mixer.state, x, only([T, T]), cache, length
        )
        assert whole[1].state.dtype == cache.state.dtype == jnp.dtype(dtype)
        outputs, one = [], jnp.ones((2, 1), jnp.int32)
        for t in range(12):
            y, cache, length = mixer.cached(
                mixer.state, x[:, t : t + 1], one, cache, length
            )
            outputs.append(y)
        assert cache.state.dtype == jnp.dtype(dtype)
        results[dtype] = np.asarray(jnp.concatenate(outputs, axis=1))
    error = np.linalg.norm(results["bfloat16"] - results["float32"])
    assert 1e-5 < error / np.linalg.norm(results["float32"]) < 1e-2


def test_gates_stand_still_on_padding(build, x):
    module = build(_make("gdn"))
    segments = only([5, T])
    meta = packing_metadata((2, T), segment_ids=segments)
    g, beta = jax.jit(module.gates)(x, meta)
    assert (np.asarray(g)[0, 5:] == 0).all()
    assert (np.asarray(beta)[0, 5:] == 0).all()
    assert (np.asarray(g)[1] < 0).all()
    assert (np.asarray(beta)[1] > 0).all()


@pytest.mark.parametrize("dt_init", ["inverse_softplus", "ones"])
def test_initial_decay_is_in_its_range(dt_init):
    config = GatedDeltaNetConfig(
        num_key_heads=1, num_value_heads=64, key_dim=1, value_dim=1, dt_init=dt_init
    )

    def parameters(key):
        layer = GatedDeltaNet(config, 1, rngs=nnx.Rngs(key))
        return layer.A_log[...], layer.dt_bias[...], layer.conv_kernel[...]

    A_log, dt_bias, conv = jax.jit(parameters)(jax.random.key(0))
    rate = np.exp(np.asarray(A_log))
    assert rate.min() >= 0.01
    assert 8 < rate.max() < 16
    assert np.abs(conv).max() <= 0.5
    if dt_init == "ones":
        np.testing.assert_array_equal(dt_bias, 1.0)
    else:
        dt = np.logaddexp(0, np.asarray(dt_bias, np.float64))
        assert 0.99e-3 <= dt.min() < 3e-3
        assert 0.03 < dt.max() <= 0.101


def _attention(**changes):
    return AttentionConfig(
        **({"num_heads": 4, "num_kv_heads": 2, "head_dim": 8} | changes)
    )


def _gdn(**changes):
    sizes = {"num_key_heads": 2, "num_value_heads": 4, "key_dim": 8, "value_dim": 8}
    return GatedDeltaNetConfig(**(sizes | changes))


@pytest.mark.parametrize(
    "make, changes, message",
    [
        (_attention, {"num_kv_heads": 3}, "num_heads=4 must be a multiple of num_kv"),
        (_attention, {"head_dim": 0}, "head_dim=0"),
        (_attention, {"window": 0}, "window=0"),
        (_attention, {"logit_cap": -1.0}, r"logit_cap=-1\.0"),
        (_attention, {"head_dim": 7}, "rotates 7 dim"),
        (_gdn, {"num_key_heads": 3}, "num_value_heads=4 must be a multiple"),
        (_gdn, {"conv_width": 1}, "conv_width=1"),
        (_gdn, {"dt_init": "zeros"}, "dt_init='zeros'"),
        (_gdn, {"chunk_size": 0}, "chunk_size=0"),
        (_gdn, {"state_dtype": "float16"}, "state_dtype='float16'"),
    ],
)
def test_bad_configs_raise(make, changes, message):
    with pytest.raises(ValueError, match=message):
        make(**changes)


def test_a_cache_without_its_length_raises(build, x):
    module = build(_make("attention"))
    cache = module.init_cache(2, T, jnp.float32)
    with pytest.raises(ValueError, match="needs `length`"):
        module(x, packing_metadata((2, T)), cache)
