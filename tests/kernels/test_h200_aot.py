"""What XLA schedules for an H200, read off without one."""

import os
import subprocess
import sys

import pytest

from pallas_kernels._common import aot


# In its own process: the CUDA plugin's presence must not change the other tests.
SCRIPT = """
import jax
import jax.numpy as jnp

from pallas_kernels import rms_norm
from pallas_kernels._common import aot, hw

x = jax.ShapeDtypeStruct((4096, 2048), jnp.bfloat16)
scale = jax.ShapeDtypeStruct((2048,), jnp.float32)


def loss(x, scale, implementation):
    y = rms_norm(x, scale, zero_centered=True, implementation=implementation)
    return jnp.sum(y.astype(jnp.float32) ** 2)


def schedule(fn):
    return aot.compile_for_h200(fn, x, scale).as_text()


forward = schedule(lambda x, s: rms_norm(x, s, implementation="xla"))
entry = forward[forward.index("ENTRY") :]
assert entry.count(" fusion(") == 1, entry
with hw.assume():
    gradient = schedule(jax.grad(lambda x, s: loss(x, s, "mosaic"), argnums=(0, 1)))
assert gradient.count("custom-call(") == 2, gradient
assert "pk_rms_norm_fwd" in gradient and "pk_rms_norm_bwd" in gradient
print("compiled for", aot.h200().device_kind)
"""


IN_PLACE = """
import functools

import jax
import jax.numpy as jnp

from pallas_kernels._common import aot, hw
from pallas_kernels.gated_delta_step import gated_delta_step, specs

aot.h200()  # before jax looks for plugins itself
spec = next(iter(specs.specs("model")))
args = jax.eval_shape(spec.arguments, jax.random.key(0))
like = jax.ShapeDtypeStruct
pools = tuple(like((3, *x.shape), x.dtype) for x in args[4:6])
run = specs.run(spec, functools.partial(gated_delta_step, implementation="mosaic"))


def layers(args, pools):
    def layer(total, pools):
        y, *pools = run(*args[:4], *pools, *args[6:])
        return total + y.astype(jnp.float32), tuple(pools)

    return jax.lax.scan(layer, jnp.zeros(args[3].shape, jnp.float32), pools)


with hw.assume():
    text = aot.compile_for_h200(layers, args, pools).as_text()
inside = None
for line in text.splitlines():
    if line.startswith(("%", "ENTRY")):
        inside = line.split()[0]
    if "pk_gated_delta_step" in line and " custom-call(" in line:
        assert "fusion" not in inside, inside
        assert "output_to_operand_aliasing" in line, line[:500]
        print("in place in", inside)
"""


def run(script):
    """What a script printed in a process with the CUDA plugin."""
    env = os.environ | {"JAX_PLATFORMS": "cpu", "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1"}
    done = subprocess.run(
        [sys.executable, "-c", script], env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.skipif(aot.missing() is not None, reason=str(aot.missing()))
def test_a_kernel_that_writes_in_place_is_in_no_fusion():
    assert "in place in" in run(IN_PLACE)


@pytest.mark.skipif(aot.missing() is not None, reason=str(aot.missing()))
def test_one_fusion_for_xla_and_two_kernels_for_mosaic():
    assert "compiled for" in run(SCRIPT)


def test_a_missing_extra_is_named(monkeypatch):
    monkeypatch.setattr(aot, "_PLUGIN", "no_such_plugin")
    with pytest.raises(NotImplementedError, match="h200-aot"):
        aot.h200()


def test_the_target_describes_an_h200():
    text = aot.target_config()
    assert "core_count: 132" in text
    assert text.count("{") == text.count("}")
