"""`Mamba2`: one call, several calls, packed, padded, drafted, all the same."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxaccel.cache.recurrent import RecurrentCacheOfLayer
from jaxaccel.core.tree import split_model
from jaxaccel.data.batch import ChunkStarts, ConvBorders, packing_metadata
from jaxaccel.nn.implementation import normalize
from jaxaccel.nn.mamba2 import Mamba2, Mamba2Config
from jaxaccel.nn.norm import RMSNorm
from jaxaccel.training.optim import decay_mask
from pallas_kernels._common import hw
from pallas_kernels._common.dispatch import recorded_choices
from pallas_kernels._common.interpret import interpreted
from pallas_kernels.gated_delta_rule import tables
from pallas_kernels.ssd import mosaic as ssd_kernels


D, T = 12, 40
CONFIG = Mamba2Config(
    num_heads=4,
    head_dim=6,
    num_groups=2,
    state_dim=8,
    chunk_size=16,
    # Both ends are met, in every path.
    dt_limit=(0.3, 1.5),
)

jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})


def same(got, want, atol=2e-5):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, atol=atol)


def rows(tree, row):
    # By NumPy, as `outputs` are: JAX would compile each place and length.
    return jax.tree.map(lambda leaf: np.asarray(leaf)[row], tree)


def only(lengths, left=False):
    """i32[B, T] segments with that many real tokens, padded right (or left)."""
    index, lengths = np.arange(T)[None], np.asarray(lengths)[:, None]
    return jnp.asarray(index >= T - lengths if left else index < lengths, jnp.int32)


def shift(x, amounts):
    """Moves each row left by its amount; what falls in behind is noise."""
    rows = zip(np.asarray(x), amounts, strict=True)
    return jnp.asarray(np.stack([np.roll(row, -n, axis=0) for row, n in rows]))


class Layer:
    """The layer as compiled functions."""

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

        def verified(state, x, cache, accepted, length):
            module = nnx.merge(graphdef, state)
            meta = packing_metadata(x.shape[:2], cached_length=length)
            y, pending = module.verify(x, meta, cache, length)
            return y, module.commit(pending, accepted)

        self.packed, self.cached, self.verified = (
            functools.partial(jit(f), self.state) for f in (packed, cached, verified)
        )

    def empty(self, batch):
        cache = self.module.init_cache(batch, T, jnp.float32)
        return cache, jnp.zeros((batch,), jnp.int32)


@pytest.fixture(scope="module")
def layer(build):
    return Layer(build(lambda rngs: Mamba2(CONFIG, D, rngs=rngs)))


@pytest.fixture(scope="module")
def x():
    return jnp.asarray(np.random.default_rng(0).normal(size=(2, T, D)), jnp.float32)


@pytest.fixture(scope="module")
def stepped(layer, x):
    """Outputs and caches of feeding one token at a time."""
    cache, length = layer.empty(2)
    outputs, caches = [], [cache]
    one = jnp.ones((2, 1), jnp.int32)
    for t in range(T):
        y, cache, length = layer.cached(x[:, t : t + 1], one, cache, length)
        outputs.append(y)
        caches.append(cache)
    return np.concatenate(outputs, axis=1), caches


def test_steps_prefill_and_chunked_prefill_agree(layer, x, stepped):
    outputs, caches = stepped
    same(layer.packed(x, jnp.ones((2, T), jnp.int32)), outputs)
    for n in (1, 3, 15, 16, 17, 33, T):
        # Rows of unequal length, padded at the right with noise.
        lengths = [n, max(1, n - 5)]
        y, cache, length = layer.cached(x, only(lengths), *layer.empty(2))
        rest = [T - count for count in lengths]
        z, final, _ = layer.cached(shift(x, lengths), only(rest), cache, length)
        for row, count in enumerate(lengths):
            same(np.asarray(y)[row, :count], outputs[row, :count])
            same(rows(cache, row), rows(caches[count], row))
            same(np.asarray(z)[row, : T - count], outputs[row, count:])
        same(final, caches[T])


def test_left_padding_and_finished_rows_change_nothing(layer, x, stepped):
    outputs, caches = stepped
    lengths = [37, 21]
    moved, segments = shift(x, [n - T for n in lengths]), only(lengths, left=True)
    y, cache, _ = layer.cached(moved, segments, *layer.empty(2))
    plain = layer.packed(moved, segments)
    for row, count in enumerate(lengths):
        same(np.asarray(y)[row, T - count :], outputs[row, :count])
        same(np.asarray(plain)[row, T - count :], outputs[row, :count])
        same(rows(cache, row), rows(caches[count], row))
    alive = jnp.array([[1], [0]], jnp.int32)
    _, after, _ = layer.cached(x[:, 20:21], alive, caches[20], jnp.full((2,), 20))
    same(rows(after, 1), rows(caches[20], 1), atol=0)
    same(rows(after, 0), rows(caches[21], 0))


def test_packed_documents_equal_separate_ones(layer, x):
    lengths = (3, 1, 17, 2, 10)
    starts = np.cumsum([0, *lengths[:-1]])
    ids = np.zeros(T, np.int32)
    for number, (start, length) in enumerate(zip(starts, lengths, strict=True), 1):
        ids[start : start + length] = number
    ids[4:21] = 1  # An id that comes back is another document.
    ids[21:23] = 0
    segments = jnp.asarray(np.stack([ids, ids]))
    y = layer.packed(x, segments)
    for start, length in zip(starts, lengths, strict=True):
        if ids[start]:
            alone = layer.packed(shift(x, [start, start]), only([length, length]))
            same(y[:, start : start + length], alone[:, :length])
    # Another document moves no bit.
    other = layer.packed(jnp.where(segments[..., None] == 5, x, -3.0 * x), segments)
    np.testing.assert_array_equal(y[:, 23:33], other[:, 23:33])


@pytest.mark.parametrize("start", [0, 6])
def test_kept_drafts_are_as_if_read_one_by_one(layer, x, stepped, start):
    outputs, caches = stepped
    drafts = x[:, start : start + 4]
    length = jnp.full((2,), start, jnp.int32)
    for kept in ([0, 4], [1, 2]):
        y, cache = layer.verified(
            drafts, caches[start], jnp.array(kept, jnp.int32), length
        )
        same(y, outputs[:, start : start + 4])
        for row, count in enumerate(kept):
            same(rows(cache, row), rows(caches[start + count], row))


def test_a_layers_part_of_stacked_caches_moves_alone(layer, x, stepped):
    _, caches = stepped
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *caches[4:7])
    part = RecurrentCacheOfLayer(stacked=stacked, index=jnp.int32(1))
    _, after, _ = layer.cached(
        x[:, 5:6], jnp.ones((2, 1), jnp.int32), part, jnp.full((2,), 5)
    )
    same(rows(after.stacked, 1), caches[6])
    for index in (0, 2):
        same(rows(after.stacked, index), caches[4 + index], atol=0)


def test_initial_values_and_what_decays():
    config = Mamba2Config(num_heads=256, head_dim=1, num_groups=1, state_dim=1)

    def make(seed):
        return Mamba2(config, 4, dtype="bfloat16", rngs=nnx.Rngs(seed))

    graphdef, _ = nnx.split(nnx.eval_shape(lambda: make(0)))
    module = nnx.merge(
        graphdef, jit(lambda key: nnx.split(make(key))[1])(jax.random.key(0))
    )
    steps = jax.nn.softplus(module.dt_bias[...])
    assert 1e-3 <= steps.min() < 2e-3
    assert 0.05 < steps.max() <= 0.1001
    rates = jnp.exp(module.A_log[...])
    assert 1.0 <= rates.min() < 2.0
    assert 15.0 < rates.max() <= 16.001
    assert (module.D[...] == 1).all()
    assert 0.4 < jnp.abs(module.conv_bias[...]).max() <= 0.5
    params, _ = split_model(module)
    stacked = {f"layers/0/mixer/{name}": leaf[None] for name, leaf in params.items()}
    decays = {
        name.removeprefix("layers/0/mixer/")
        for name, d in decay_mask(stacked).items()
        if d
    }
    assert decays == {f"{name}_proj/kernel" for name in ("z", "xbc", "dt", "out")}
    cache = module.init_cache(1, 5, jnp.bfloat16)
    y, after = jax.eval_shape(
        lambda x: module(x, packing_metadata((1, 3)), cache, None),
        jax.ShapeDtypeStruct((1, 3, 4), jnp.bfloat16),
    )
    assert (y.dtype, after.conv.dtype) == (jnp.bfloat16, jnp.bfloat16)
    assert after.state.dtype == jnp.float32


# Sizes that the kernels have.
KERNELS = Mamba2Config(num_heads=4, head_dim=64, num_groups=2, state_dim=128)


def abstract(config, implementation=None, dtype="bfloat16"):
    def make():
        kind = {"dtype": dtype, "param_dtype": dtype, "rngs": nnx.Rngs(0)}
        return Mamba2(config, D, implementation=normalize(implementation), **kind)

    return nnx.eval_shape(make)


def test_tables_are_those_of_the_kernels_that_run():
    starts, borders = ChunkStarts(chunk=64), ConvBorders(width=4)
    named = abstract(KERNELS, {"ssd": "mosaic", "causal_conv1d": "mosaic"})
    with hw.assume():
        assert named.tables(2, 64) == (starts, borders)
        # A row's first document goes on; one token is a step.
        assert named.tables(2, 64, cached=True) == (starts,)
        assert named.tables(2, 1, cached=True) == ()
        assert abstract(KERNELS, "xla").tables(2, 64) == ()
        with pytest.raises(NotImplementedError, match=r"ssd: .* cannot run this call"):
            abstract(CONFIG, {"ssd": "mosaic"}).tables(2, 64)
    assert abstract(KERNELS).tables(2, 64) == ()


@pytest.mark.parametrize("cached", [False, True])
def test_no_layer_finds_the_borders_again(monkeypatch, cached):
    """What the kernels get is the table of the batch."""
    module = abstract(KERNELS, {"ssd": "mosaic", "causal_conv1d": "mosaic"})
    got = []

    def run(x, *tokens, starts, initial_state, **options):
        got.append(starts)
        return x, initial_state

    def refuse(*_):
        raise AssertionError("a layer derives the table")

    monkeypatch.setattr(ssd_kernels, "ssd", run)
    monkeypatch.setattr(tables, "document_starts", refuse)
    ids = jnp.asarray(np.repeat([[1, 2, 0]], [5, 90, 33], axis=1), jnp.int32)
    graphdef, state = nnx.split(module)

    def call(state, x, length, cache):
        module = nnx.merge(graphdef, state)
        meta = packing_metadata(
            (1, 128),
            segment_ids=ids,
            cached_length=length if cached else None,
            tables=module.tables(1, 128, cached=cached),
        )
        y, _ = module(x, meta, cache if cached else None, length)
        assert got.pop() is meta.table(ChunkStarts(chunk=64))
        return y

    with hw.assume():
        y = jax.eval_shape(
            call,
            state,
            jax.ShapeDtypeStruct((1, 128, D), jnp.bfloat16),
            jax.ShapeDtypeStruct((1,), jnp.int32),
            jax.eval_shape(lambda: module.init_cache(1, 128, jnp.bfloat16)),
        )
    assert y.shape == (1, 128, D)
    assert not got


def test_a_kernel_moves_a_layers_part_where_it_is(build):
    def make(setting):
        setting = normalize(setting)
        layer = functools.partial(Mamba2, KERNELS, D, implementation=setting)
        return Layer(build(lambda rngs: layer(rngs=rngs)))

    named, plain = make({"ssd_step": "mosaic"}), make(None)
    cache, length = plain.empty(2)
    draw = np.random.default_rng(0)
    caches = [
        jax.tree.map(lambda x: jnp.asarray(draw.normal(size=x.shape), x.dtype), cache)
        for _ in range(2)
    ]
    x = jnp.asarray(draw.normal(size=(2, 1, D)), jnp.float32)
    alive = jnp.array([[1], [0]], jnp.int32)  # the second row has ended
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *caches)
    part = RecurrentCacheOfLayer(stacked=stacked, index=jnp.int32(1))
    with hw.assume(), interpreted(), recorded_choices() as choices:
        y, after, _ = named.cached(x, alive, part, length + 3)
    assert {c.implementation for c in choices if c.op == "ssd_step"} == {"mosaic"}
    want, cache, _ = plain.cached(x, alive, caches[1], length + 3)
    same(y, want)
    same(rows(after.stacked, 1), cache)
    same(rows(after.stacked, 0), caches[0], atol=0)
    same(rows(rows(after.stacked, 1), 1), rows(caches[1], 1), atol=0)


@pytest.mark.parametrize("time", [1, 3])
def test_few_rows_take_norm_and_sum_along(layer, x, stepped, time):
    _, caches = stepped
    module = nnx.eval_shape(
        lambda: Mamba2(
            CONFIG, D, implementation=normalize({"gemv": "xla"}), rngs=nnx.Rngs(0)
        )
    )
    graphdef, _ = nnx.split(module)
    norm = RMSNorm(D)
    few, length = 3 * x[:, 6 : 6 + time], jnp.full((2,), 6, jnp.int32)

    @jit
    def added(state, x):
        meta = packing_metadata(x.shape[:2], cached_length=length)
        module = nnx.merge(graphdef, state)
        return module.added(x, norm, meta, caches[6], length)

    with recorded_choices() as choices:
        y, cache = added(layer.state, few)
    assert ("gemv" in {c.op for c in choices}) == (time == 1)
    ones = jnp.ones((2, time), jnp.int32)
    want, after, _ = layer.cached(norm(few), ones, caches[6], length)
    same(y, few + want)
    same(cache, after)


@pytest.mark.parametrize("time", [1, 2])
def test_one_token_has_an_op_of_its_own(time):
    def call(x, setting):
        config = dataclasses.replace(CONFIG, head_dim=2, state_dim=2)
        setting = normalize(setting)
        module = Mamba2(config, 4, implementation=setting, rngs=nnx.Rngs(0))
        length = jnp.zeros((1,), jnp.int32)
        meta = packing_metadata((1, time), cached_length=length)
        return module(x, meta, module.init_cache(1, 8, jnp.float32), length)[0]

    x = jax.ShapeDtypeStruct((1, time, 4), jnp.float32)
    names = ["ssd", "ssd_step"] if time > 1 else ["ssd_step", "ssd"]
    refused, free = ({name: "mosaic"} for name in names)
    assert jax.eval_shape(lambda x: call(x, free), x).shape == x.shape
    with pytest.raises(NotImplementedError, match=rf"{names[0]}: .* cannot run this"):
        jax.eval_shape(lambda x: call(x, refused), x)


@pytest.mark.parametrize(
    "changes, match",
    [
        ({"num_groups": 3}, "num_heads=4 must be a multiple of num_groups=3"),
        ({"state_dim": 0}, "state_dim=0"),
        ({"chunk_size": 8}, "chunk_size=8 must be a power of two of at least 16"),
        ({"chunk_size": 48}, "chunk_size=48 must be a power of two of at least 16"),
        ({"conv_width": 1}, "conv_width=1"),
        ({"dt_limit": (0.1, 0.1)}, r"dt_limit=\(0\.1, 0\.1\)"),
        ({"dt_min": 0.2}, r"dt_min=0\.2"),
        ({"rate_range": (0.0, 1.0)}, r"rate_range=\(0\.0, 1\.0\)"),
        ({"state_dtype": "float16"}, "state_dtype='float16'"),
    ],
)
def test_errors_name_the_value(changes, match):
    sizes = {"num_heads": 4, "head_dim": 2, "num_groups": 2, "state_dim": 3}
    with pytest.raises(ValueError, match=match):
        Mamba2Config(**{**sizes, **changes})
