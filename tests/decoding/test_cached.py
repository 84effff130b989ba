"""Generating with planned caches: any decoder, mixed per layer, from gin."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxaccel.cache.decoder import DecoderCache
from jaxaccel.cache.dense import KVCache
from jaxaccel.cache.full import DenseCacheConfig
from jaxaccel.cache.paged import PagedCacheConfig
from jaxaccel.cache.plan import CachePlanConfig, PolicyCache
from jaxaccel.cache.quest import QuestCacheConfig
from jaxaccel.cache.shadowkv import ShadowKVCacheConfig
from jaxaccel.cache.streaming import StreamingCacheConfig
from jaxaccel.decoding import cached
from jaxaccel.decoding import generate as generate_lib
from jaxaccel.decoding.generate import generate
from jaxaccel.decoding.layer_loop import read_tokens
from jaxaccel.decoding.sampling import SamplingConfig
from jaxaccel.models.gpt_oss import GptOssConfig
from jaxaccel.models.qwen3_5_text import Qwen3_5TextConfig
from jaxaccel.nn.mlp import MLPConfig


GREEDY = SamplingConfig(temperature=0.0)
PROMPTS = [[5, 3, 8], [1], [7, 7, 2, 9, 4, 11, 6, 100], [*range(12, 28)]]
NEW = 14


@pytest.fixture(scope="module")
def model(random_model):
    """Gated attention between recurrent layers; layers 1 and 3 attend."""
    config = Qwen3_5TextConfig.tiny(pattern=("gdn", "attention"), num_layers=4)
    return random_model(config.decoder())


@pytest.fixture(scope="module")
def plain(model):
    return generate(model, PROMPTS, max_new_tokens=NEW, sampling=GREEDY)


def test_a_dense_plan_gives_the_tokens_of_no_plan(model, plain):
    plan = CachePlanConfig()
    options = {"max_new_tokens": NEW, "sampling": GREEDY, "cache": plan}
    assert generate(model, PROMPTS, **options) == plain
    programs = generate_lib._decode._cache_size()
    assert generate(model, PROMPTS, **options, stream=lambda *_: None) == plain
    # As many calls as tokens, and the program of the one call before.
    assert generate_lib._decode._cache_size() == programs


# Holds whatever the rows have.
LONG = StreamingCacheConfig(num_sinks=2, window=62)


def test_layers_may_differ(model, plain):
    short = StreamingCacheConfig(num_sinks=0, window=1)
    plan = CachePlanConfig(policy=LONG, layers=((3, short),))
    options = {"max_new_tokens": NEW, "sampling": GREEDY}
    assert generate(model, PROMPTS, **options, cache=plan) != plain


@pytest.mark.parametrize(
    ("values", "others"), [("device", ((-1, LONG),)), ("host", ())]
)
def test_policies_with_room_for_all_give_the_tokens_of_no_plan(
    model, plain, values, others
):
    policy = ShadowKVCacheConfig(
        budget=16,
        chunk=4,
        rank=16,
        num_outliers=1,
        local_window=8,
        values=values,
    )
    plan = CachePlanConfig(policy=policy, layers=others)
    options = {"max_new_tokens": NEW, "sampling": GREEDY}
    assert generate(model, PROMPTS, **options, cache=plan) == plain
    attention = cached.init_cache(model, plan, 2, 64).layers[1]
    assert attention.ends == ((1, 2) if others else (2,))
    kind = attention.states[0].values.sharding.memory_kind
    assert kind == ("pinned_host" if values == "host" else "device")
    # Two layers of 2 rows, 1 kv head and 64 / 4 + 1 chunks of 4 times 16 values.
    on_host = 2 * 2 * 17 * 4 * 16 * 4 if values == "host" else 0
    device, host = attention.num_bytes()
    assert (host, device > 0) == (on_host, True)


def test_learned_sinks_and_windows_of_other_layers_stay(random_model):
    """gpt-oss: every second layer sees a window, and keeps what it has."""
    # Dense: experts keep nothing, and take longest to compile.
    config = dataclasses.replace(GptOssConfig.tiny().decoder(), mlp=MLPConfig(d_ff=32))
    model = random_model(config)
    full = QuestCacheConfig(budget=32, page=4, local_window=8)
    plan = CachePlanConfig(policy=full, layers=((1, PagedCacheConfig(page=8)),))
    cache = cached.init_cache(model, plan, 1, 32)
    kinds = [type(layer) for layer in cache.layers]
    assert kinds == [KVCache, PolicyCache]
    rows = generate(model, PROMPTS, max_new_tokens=NEW, sampling=GREEDY, cache=plan)
    tokens = np.zeros((len(PROMPTS), 32), np.int32)
    for row, (prompt, new) in enumerate(zip(PROMPTS, rows, strict=True)):
        tokens[row, : len(prompt) + NEW] = prompt + new
    graphdef, state = nnx.split(model)

    @jax.jit
    def likeliest(state, tokens):
        return jnp.argmax(nnx.merge(graphdef, state)(tokens).logits, axis=-1)

    # Tokens look back only: what stands behind a row's text changes nothing in it.
    best = np.asarray(likeliest(state, tokens))
    for row, (prompt, new) in enumerate(zip(PROMPTS, rows, strict=True)):
        assert best[row, len(prompt) - 1 : len(prompt) - 1 + NEW].tolist() == new


def test_a_host_that_would_not_hold_the_values_is_told_of(model, monkeypatch):
    monkeypatch.setenv("XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB", "1")
    policy = ShadowKVCacheConfig(budget=16, chunk=4, local_window=8, values="host")
    plan = CachePlanConfig(policy=policy)
    with pytest.raises(
        ValueError,
        match=r"the values of 64 rows of 1000000 tokens needs .* GiB of pinned host "
        r"memory, the pool's limit is 1 GiB: set XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB to",
    ):
        cached.init_cache(model, plan, 64, 1_000_000)


def test_states_have_the_shapes_of_their_policies(model):
    plan = CachePlanConfig(layers=((1, StreamingCacheConfig(num_sinks=2, window=6)),))
    cache = cached.init_cache(model, plan, 2, 32)
    attention = cache.layers[1]
    assert isinstance(attention, PolicyCache)
    assert attention.ends == (1, 2)
    assert [state.k.shape[0] for state in attention.states] == [1, 1]
    assert [state.k.shape[3] for state in attention.states] == [8, 32]
    assert [cache.mode for cache in cached.as_mode(cache, "decode").layers[1:2]] == [
        "decode"
    ]


def test_a_short_prompt_is_a_prompt_and_a_row_may_be_empty(model):
    graphdef, state = nnx.split(model)

    @jax.jit
    def run(state, tokens, segments, cache):
        model = nnx.merge(graphdef, state)
        _, cache = cached.read_prompts(model, tokens, segments, cache)
        hidden, cache = read_tokens(
            model, jnp.asarray([[9], [9]]), jnp.ones((2, 1), jnp.int32), cache
        )
        alone = model(jnp.asarray([[4, 9], [9, 0]])).hidden
        return hidden, cache, alone

    cache = cached.init_cache(model, CachePlanConfig(), 2, 4)
    tokens, segments = jnp.asarray([[4], [4]]), jnp.asarray([[1], [0]], jnp.int32)
    hidden, cache, alone = run(state, tokens, segments, cache)
    np.testing.assert_array_equal(cache.length, [2, 1])
    np.testing.assert_allclose(hidden[0, 0], alone[0, 1], atol=2e-5)
    np.testing.assert_allclose(hidden[1, 0], alone[1, 0], atol=2e-5)


def test_reset_empties_rows(model):
    cache = cached.init_cache(model, CachePlanConfig(), 2, 4)
    full = jax.tree.map(lambda leaf: jnp.ones_like(leaf), cache)
    cleared = full.reset(jnp.asarray([False, True]))
    assert isinstance(cleared, DecoderCache)
    for got, empty in zip(
        jax.tree.leaves(cleared.layers), jax.tree.leaves(cache.layers), strict=True
    ):
        got, empty = np.asarray(got), np.asarray(empty)
        np.testing.assert_array_equal(got[:, 1], empty[:, 1])
        assert np.all(got[:, 0] == 1)


def test_a_whole_decode_is_one_program_that_copies_no_layer(model):
    plan = CachePlanConfig()
    graphdef, state = nnx.split(model)
    carry = generate_lib._Carry(
        step=jnp.int32(1),
        last=jnp.zeros((4,), jnp.int32),
        is_done=jnp.zeros((4,), bool),
        tokens=jnp.zeros((4, 16), jnp.int32),
        cache=cached.as_mode(cached.init_cache(model, plan, 4, 256), "decode"),
    )
    draw = generate_lib.Draw(sampling=GREEDY, vocab_limit=128)
    keys = generate_lib.row_keys(0, 4)
    stops = jnp.asarray([-1], jnp.int32)
    compiled = generate_lib._decode.lower(
        graphdef, draw, state, carry, keys, stops, jnp.int32(9)
    ).compile()
    memory = compiled.memory_analysis()
    assert memory is not None
    held = sum(leaf.nbytes for leaf in jax.tree.leaves(carry.cache))
    assert memory.alias_size_in_bytes >= held
    # Less than a copy of them would take.
    assert memory.temp_size_in_bytes < held


def test_what_a_plan_cannot_mean_is_refused(model):
    options = {"max_new_tokens": NEW, "sampling": GREEDY}
    with pytest.raises(
        ValueError, match=r"prompts\[2\] has 8 tokens, with 14 new ones"
    ):
        generate(model, PROMPTS, **options, cache=CachePlanConfig(capacity=20))
    dense = cached.init_cache(model, CachePlanConfig(), 1, 8)
    with pytest.raises(ValueError, match=r"by `jaxaccel\.decoding\.cached`"):
        model(jnp.zeros((1, 1), jnp.int32), cache=dense)
    with pytest.raises(ValueError, match=r"prompts\[1\] is empty"):
        generate(model, [[1], []], **options, cache=CachePlanConfig())
    for layers, message in (
        (((0, DenseCacheConfig()),), "names 0, which is no attention layer"),
        (((4, DenseCacheConfig()),), "names 4, the model has 4 layers"),
        (((1, DenseCacheConfig()), (-3, DenseCacheConfig())), "names 1 twice"),
    ):
        plan = CachePlanConfig(layers=layers)
        with pytest.raises(ValueError, match=message):
            generate(model, PROMPTS, **options, cache=plan)
