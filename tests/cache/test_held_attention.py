"""Caches of all tokens that are read by `pallas_kernels.decode_attention`."""

import dataclasses

import jax
import jax.numpy as jnp
import layer_text as lt
import numpy as np
import pytest
from flax import nnx

from jaxaccel.cache.dense import KVCache, KVCacheOfLayer
from jaxaccel.cache.full import DenseCacheConfig
from jaxaccel.cache.layer_state import AttentionSpec
from jaxaccel.cache.paged import PagedCacheConfig
from jaxaccel.cache.plan import PolicyCache, decode_step
from jaxaccel.data.batch import packing_metadata
from jaxaccel.nn.attention import Attention, AttentionConfig
from jaxaccel.nn.rope import RopeConfig
from pallas_kernels._common import hw
from pallas_kernels._common.dispatch import recorded_choices


LENGTHS, COUNT = [13, 0, 21], 4
CAPPED = dataclasses.replace(lt.SPEC, logit_cap=3.0)
PAGED = PagedCacheConfig(page=4)
POLICIES = (DenseCacheConfig(), PAGED)


@pytest.mark.parametrize("policy", POLICIES, ids=lambda x: type(x).__name__)
@pytest.mark.parametrize("name", ["xla", "reference"])
def test_a_named_implementation_reads_all_tokens_and_no_other(policy, name):
    text = lt.draw(sinks=True)
    spec = dataclasses.replace(CAPPED, decode=name)
    with recorded_choices() as choices:
        _, o, _ = lt.run(policy, text, LENGTHS, COUNT, spec=spec, poison=True)
    assert name in {x.implementation for x in choices if x.op == "decode_attention"}
    expected = lt.expected(text, LENGTHS, COUNT, lt.everything, CAPPED)
    np.testing.assert_allclose(o, expected, atol=2e-6)


def test_lost_pages_are_not_read():
    text, policy = lt.draw(), PagedCacheConfig(page=4, num_pages=7)
    plain = lt.run(policy, text, LENGTHS, COUNT)
    spec = dataclasses.replace(lt.SPEC, decode="xla")
    named = lt.run(policy, text, LENGTHS, COUNT, spec=spec, poison=True)
    assert np.asarray(named[2].lost).any()
    np.testing.assert_allclose(named[1], plain[1], atol=2e-6)


@pytest.mark.parametrize("policy", POLICIES, ids=lambda x: type(x).__name__)
def test_a_layer_of_several_is_read_where_it_is(policy):
    text = lt.draw()
    tokens = text.tokens([[0]] * 3)

    def step(decode):
        spec = dataclasses.replace(lt.SPEC, decode=decode)
        cache = PolicyCache.init((policy,) * 2, spec, 3, 8, jnp.float32)
        state = dataclasses.replace(cache.states[0], index=jnp.int32(1))
        return decode_step(policy, state, tokens, spec)

    named, plain = (jax.jit(step, static_argnums=0)(x) for x in ("xla", None))
    np.testing.assert_allclose(named[0], plain[0], atol=2e-6)


@pytest.mark.parametrize("policy", POLICIES, ids=lambda x: type(x).__name__)
def test_the_kernel_reads_a_layer_without_a_copy(policy):
    spec = AttentionSpec(
        num_heads=4, num_kv_heads=2, head_dim=64, scale=0.125, decode="mosaic"
    )
    policy = dataclasses.replace(policy, page=16) if policy is PAGED else policy
    text = lt.draw(spec=spec).astype(jnp.bfloat16)
    tokens = lt.take(*text.__dict__.values(), jnp.zeros((3, 1), jnp.int32), True, spec)

    def read(state):
        return policy.attend(state, tokens, None, spec)

    cache = PolicyCache.init((policy,) * 2, spec, 3, 64, jnp.bfloat16)
    state = dataclasses.replace(cache.states[0], index=jnp.int32(1))
    with hw.assume():
        jaxpr = str(jax.make_jaxpr(read)(state))
    assert "pk_decode_attention" in jaxpr
    # Of the small arrays alone: lengths and the table of pages.
    cut = [line for line in jaxpr.splitlines() if "dynamic_slice" in line]
    assert len(cut) == (2 if isinstance(policy, PagedCacheConfig) else 1)
    assert all(":i32" in line for line in cut)


ATTENTION = AttentionConfig(
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    rope=RopeConfig(),
    window=5,
    sinks=True,
    logit_cap=5.0,
)


@pytest.mark.parametrize("layers", [0, 2])
def test_a_layer_decodes_through_the_op_that_is_named(layers):
    def make(setting):
        shared = {"dtype": "float32", "param_dtype": "float32"}
        rngs = nnx.Rngs(0)
        return Attention(ATTENTION, 12, implementation=setting, rngs=rngs, **shared)

    x = jax.random.normal(jax.random.key(1), (2, 1, 12))
    held = jnp.array([7, 0], jnp.int32)
    real = jnp.array([[1], [0]], jnp.int32)
    k, v = jax.random.normal(jax.random.key(2), (2, 2, 9, 2, 8))
    slot = jnp.arange(9, dtype=jnp.int32)[None]
    cache = KVCache(k=k, v=v, positions=jnp.where(slot < held[:, None], slot, -1))
    if layers:
        stacked = jax.tree.map(lambda leaf: jnp.stack([leaf + 1, leaf]), cache)
        cache = KVCacheOfLayer(stacked=stacked, index=jnp.int32(1))

    def step(setting):
        module = make(setting)
        meta = packing_metadata((2, 1), segment_ids=real, cached_length=held)
        return jax.jit(lambda x, c: module(x, meta, c, held))(x, cache)

    plain, after = step(None)
    with recorded_choices() as choices:
        named, same = step((("decode_attention", "xla"),))
    assert [(c.op, c.implementation) for c in choices] == [("decode_attention", "xla")]
    np.testing.assert_allclose(named, plain, atol=2e-6)
    jax.tree.map(np.testing.assert_array_equal, same, after)
    # One name for all ops is of those that read whole sequences.
    assert make("reference").decode is None
