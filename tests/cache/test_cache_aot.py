"""What XLA makes of a decode with values in host memory on an H200, without one."""

import os
import subprocess
import sys

import pytest

from pallas_kernels._common import aot


# In its own process: the CUDA plugin's presence must not change the other tests. Arrays
# of the CPU stand for those in host memory, which a compile-only device has none of.
SCRIPT = """
import math
import re

import jax
import jax.numpy as jnp

from pallas_kernels._common import aot

aot.h200()

from jaxaccel.cache.layer_state import AttentionSpec, Tokens
from jaxaccel.cache.plan import PolicyCache
from jaxaccel.cache.shadowkv import ShadowKVCacheConfig

B, LAYERS, SLOTS = 2, 2, 512
SPEC = AttentionSpec(num_heads=4, num_kv_heads=2, head_dim=64, scale=0.125)
POLICY = ShadowKVCacheConfig(
    budget=64, chunk=8, num_outliers=4, local_window=32, values="host"
)
cache = PolicyCache.init([POLICY] * LAYERS, SPEC, B, SLOTS, jnp.bfloat16)
cache = cache.as_mode("decode")
q, k = (jnp.zeros((B, 1, heads, 64), jnp.bfloat16) for heads in (4, 2))


def decode(cache, q, k):
    def layer(carry, index):
        cache, x = carry
        tokens = Tokens(
            **{"q_pre": x, "k_pre": k, "q": x, "k": k, "v": k},
            positions=jnp.zeros((B, 1), jnp.int32),
            is_real=jnp.ones((B, 1), bool),
        )
        o, part = cache.layer(index).mix(tokens, SPEC)
        return (part.stacked, o), None

    def step(_, carry):
        return jax.lax.scan(layer, carry, jnp.arange(LAYERS))[0]

    return jax.lax.fori_loop(0, 16, step, (cache, q))


traced = jax.jit(decode, donate_argnums=0).trace(cache, q, k)
lowered = traced.lower(lowering_platforms=("cuda",))
program = aot.program_for_h200(lowered)

values = cache.states[0].values
memory = program.get_compiled_memory_stats()
assert memory.host_alias_size_in_bytes == values.nbytes, memory
# Fetched rows, on their way.
assert memory.host_temp_size_in_bytes < values.nbytes / 10, memory
on_device = sum(x.nbytes for x in jax.tree.leaves(cache)) - values.nbytes
assert memory.alias_size_in_bytes >= on_device, memory
hlo = program.hlo_modules()[0].to_string()
# Of the host's memory, a block is written where it is, and rows are gathered there.
whole = "[" + ",".join(map(str, values.shape)) + "]"
assert f"{whole}{{4,3,2,1,0:S(5)}} dynamic-update-slice(" in hlo
assert re.search(r"gather[(]%bitcast\\S*, .*slice_sizes=.1,512.", hlo)
# Of what is held nothing is copied: only indices, queries, and the rows fetched.
for line in hlo.splitlines():
    if re.search(r" copy[(]|copy-start[(]", line):
        sizes = re.search(r"= [(]?\\w+\\[([\\d,]*)\\]", line)[1]
        is_small = math.prod(int(n) for n in sizes.split(",") if n) < 1024
        assert is_small or sizes == "2,2,8,512", line
print("compiled for", aot.h200().device_kind)
"""


@pytest.mark.skipif(aot.missing() is not None, reason=str(aot.missing()))
def test_a_decode_moves_rows_and_copies_no_cache():
    env = os.environ | {"JAX_PLATFORMS": "cpu", "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1"}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "compiled for" in done.stdout
