"""Values in a GPU's host memory: the same numbers, and no copy of the whole."""

import dataclasses

import jax
import jax.numpy as jnp
import layer_text as lt
import numpy as np
import pytest

from jaxaccel.cache.plan import PolicyCache
from jaxaccel.cache.shadowkv import ShadowKVCacheConfig


pytestmark = pytest.mark.gpu

POLICY = ShadowKVCacheConfig(
    budget=64, chunk=8, rank=10, num_outliers=4, local_window=32, slots=12
)
# Chunks that a step has written are fetched at later ones: every row of them is told
# apart from every other by its values.
ROWS, PROMPT, COUNT = 4, 256, 500
TEXT = lt.draw(rows=ROWS, length=PROMPT + COUNT)


def decoded(values):
    """Outputs of a decode over one layer, and the compiled loop."""
    policy = dataclasses.replace(POLICY, values=values)
    room = PROMPT + COUNT
    cache = PolicyCache.init([policy], lt.SPEC, ROWS, room, jnp.float32)
    arrays = tuple(TEXT.__dict__.values())
    lengths = jnp.asarray([PROMPT, 100, 7, 201], jnp.int32)

    @jax.jit
    def read(cache, arrays, lengths):
        where = jnp.broadcast_to(jnp.arange(PROMPT, dtype=jnp.int32), (ROWS, PROMPT))
        tokens = lt.take(*arrays, where, where < lengths[:, None])
        o, part = cache.layer(jnp.int32(0)).mix(tokens, lt.SPEC)
        return o, part.stacked.as_mode("decode")

    def steps(cache, arrays, lengths):
        def step(i, carry):
            cache, out = carry
            real = jnp.ones((ROWS, 1), bool)
            tokens = lt.take(*arrays, (lengths + i)[:, None], real)
            o, part = cache.layer(jnp.int32(0)).mix(tokens, lt.SPEC)
            return part.stacked, out.at[i].set(o[:, 0])

        out = jnp.zeros((COUNT, ROWS, lt.SPEC.num_heads, lt.SPEC.head_dim))
        return jax.lax.fori_loop(0, COUNT, step, (cache, out))

    _, cache = read(cache, arrays, lengths)
    run = jax.jit(steps, donate_argnums=0).lower(cache, arrays, lengths).compile()
    cache, out = run(cache, arrays, lengths)
    return np.asarray(out), cache, run


def test_the_host_tier_reads_what_the_device_tier_reads():
    on_host, cache, _ = decoded("host")
    on_device, other, _ = decoded("device")
    assert cache.states[0].values.sharding.memory_kind == "pinned_host"
    assert other.states[0].values.sharding.memory_kind == "device"
    np.testing.assert_array_equal(on_host, on_device)
    assert PolicyCache.init([POLICY], lt.SPEC, 1, 64, jnp.float32).num_bytes()[1] > 0


def test_a_decode_copies_no_host_buffer():
    _, cache, run = decoded("host")
    values = cache.states[0].values
    memory = run.memory_analysis()
    assert memory.host_alias_size_in_bytes >= values.nbytes
    assert memory.host_temp_size_in_bytes < values.nbytes
    whole = f"f32[{','.join(map(str, values.shape))}]"
    lines = [line for line in run.as_text().splitlines() if f"= {whole}" in line]
    assert lines
    assert not [line for line in lines if " copy(" in line or "copy-start" in line]
