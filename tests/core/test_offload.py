"""The stored inputs come back to their layers: every mode gives remat's gradients."""

import functools
import os
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxaccel.core.offload import OFFLOADING, offload_scan
from jaxaccel.core.offload_plan import (
    CANARY_TOLERANCE,
    OffloadPlan,
    compiler_options,
    gradient_canary,
    verify_offload,
)
from pallas_kernels._common import aot


D = 8
# Gradients are compared bit for bit, so bfloat16 has to be rounded where it is stored
# whatever else is in the program.
EXACT = {"xla_allow_excess_precision": False}


def layer(w, carry, consts):
    """Weights, dropout, a counter and parameters shared through the carry."""
    x, count, shared = carry["x"], carry["count"], carry["shared"]
    h = jnp.tanh(x @ w["kernel"]) * consts["gain"][None, :] + shared[None, :]
    kept = jax.random.bernoulli(w["key"], 0.8, h.shape)
    seven = jax.random.key_data(consts["key"])[1].astype(h.dtype)
    h = jnp.where(kept, h, seven / 10)
    h = jnp.where(consts["segments"][:, None] == 1, h, jnp.zeros_like(h))
    y = x + h
    aux = {
        "norm": jnp.sum(jnp.square(y.astype(jnp.float32))),
        "tokens": jnp.sum(consts["segments"]) + count,
        "scaled": y * consts["scale"].astype(y.dtype),
    }
    return {"x": y, "count": count + 1, "shared": shared}, aux


def arguments(length, dtype):
    keys = jax.random.split(jax.random.key(length), 5)
    kernel = jax.random.normal(keys[0], (length, D, D), jnp.float32) * 0.3
    return (
        {"kernel": kernel.astype(dtype), "key": jax.random.split(keys[1], length)},
        {
            "x": jax.random.normal(keys[2], (6, D), jnp.float32).astype(dtype),
            "count": jnp.int32(0),
            "shared": jax.random.normal(keys[3], (D,), jnp.float32).astype(dtype),
        },
        {
            "gain": jax.random.normal(keys[4], (D,), jnp.float32).astype(dtype),
            "scale": jnp.float32(0.7),
            "segments": jnp.asarray([1, 1, 2, 2, 1, 0], jnp.int32),
            "key": jax.random.key(7),
            "absent": None,
        },
    )


@functools.cache
def value_and_gradients(mode, length, dtype, **options):
    """Outputs, and the gradients of every float in ws, x and consts."""
    ws, x, consts = arguments(length, dtype)

    def loss(kernel, start, shared, gain, scale):
        y, aux = offload_scan(
            layer,
            ws | {"kernel": kernel},
            x | {"x": start, "shared": shared},
            consts | {"gain": gain, "scale": scale},
            mode=mode,
            **options,
        )
        total = jnp.sum(y["x"].astype(jnp.float32) ** 3) + jnp.sum(jnp.sin(aux["norm"]))
        return total + jnp.sum(aux["scaled"].astype(jnp.float32)), (aux, y["count"])

    function = jax.value_and_grad(loss, argnums=(0, 1, 2, 3, 4), has_aux=True)
    return jax.jit(function, compiler_options=EXACT)(
        ws["kernel"], x["x"], x["shared"], consts["gain"], consts["scale"]
    )


def assert_equal_bits(got, want):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


@pytest.mark.parametrize(
    ("length", "dtype"),
    [(1, jnp.float32), (2, jnp.float32), (7, jnp.float32), (3, jnp.bfloat16)],
)
def test_ring_is_remat_bit_for_bit(length, dtype):
    got = value_and_gradients("ring", length, dtype)
    want = value_and_gradients("remat", length, dtype)
    assert_equal_bits(got, want)
    (_, (aux, count)), gradients = want
    assert int(count) == length
    np.testing.assert_array_equal(aux["tokens"], 7 + np.arange(length))
    assert all(np.any(np.asarray(g)) for g in gradients)


@pytest.mark.parametrize(
    ("mode", "options"), [("policy", {}), ("save", {}), ("group", {"group": 2})]
)
def test_other_modes_are_remat(mode, options):
    got = value_and_gradients(mode, 4, jnp.float32, **options)
    want = value_and_gradients("remat", 4, jnp.float32)
    if mode == "policy":
        assert_equal_bits(got, want)
    # Other programs, or sums over the layers in another order.
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


def affine(w, x, consts):
    return x + jnp.sin(x * w[None, :] + consts), None


def curved(w, x, consts):
    return x * jnp.cos(w["a"] + consts)[None, :], jnp.sum(x)


def test_stages_of_an_iteration_each_keep_their_input():
    ws = (jnp.arange(12.0).reshape(4, 3) / 7, {"a": jnp.arange(12.0).reshape(4, 3) / 5})
    x = jnp.linspace(-1.0, 1.0, 6).reshape(2, 3)
    got, want = (
        jax.jit(
            jax.grad(
                lambda ws, x, c, mode=mode: jnp.sum(
                    offload_scan((affine, curved), ws, x, c, mode=mode)[0] ** 3
                ),
                argnums=(0, 1, 2),
            )
        )(ws, x, jnp.float32(0.3))
        for mode in ("ring", "remat")
    )
    assert_equal_bits(got, want)
    _, aux = offload_scan((affine, curved), ws, x, jnp.float32(0.3), mode="ring")
    assert aux[0] is None
    assert aux[1].shape == (4,)


def test_each_layer_gets_its_own_input_back():
    """Read off the gradient: dy/dw_i is the input of layer i and nothing else."""
    ws = jnp.zeros((5, 1), jnp.float32)
    x = jnp.ones((1, 1), jnp.float32)
    scales = jnp.asarray([2.0, 3.0, 5.0, 7.0, 11.0]).reshape(5, 1)

    def scaled(w, x, consts):
        return x * w["scale"][None, :] + x * w["own"][None, :], None

    def y(own):
        ws = {"own": own, "scale": scales}
        return jnp.sum(offload_scan(scaled, ws, x, mode="ring")[0])

    whole = 2 * 3 * 5 * 7 * 11
    expected = [[whole / s] for s in (2, 3, 5, 7, 11)]
    np.testing.assert_allclose(jax.jit(jax.grad(y))(ws), expected, rtol=1e-6)


def annotations(mode, **options):
    ws, x, consts = arguments(4, jnp.float32)

    def loss(kernel):
        y, _ = offload_scan(
            layer, ws | {"kernel": kernel}, x, consts, mode=mode, **options
        )
        return jnp.sum(y["x"])

    lowered = jax.jit(jax.grad(loss)).trace(ws["kernel"])
    text = lowered.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("annotate_device_placement") == len(
        re.findall(r'_xla_buffer_placement = "(?:pinned_host|device)"', text)
    )
    return (text.count('"pinned_host"'), text.count('placement = "device"'))


@pytest.mark.parametrize(
    ("mode", "options", "expected"),
    [
        ("save", {}, 0),
        ("remat", {}, 0),
        # The carry has two arrays of floats: each goes out once and comes back once.
        ("ring", {}, 2),
        ("group", {"group": 2}, 2),
        # Here JAX sees that one of them never changes.
        ("policy", {}, 1),
    ],
)
def test_copies_in_the_cuda_lowering(mode, options, expected):
    assert annotations(mode, **options) == (expected, expected)


def test_named_values_are_offloaded_too():
    def named(w, x, consts):
        h = jax.ad_checkpoint.checkpoint_name(jnp.tanh(x @ w), "inner")
        return x + jnp.sin(h), None

    ws = jax.random.normal(jax.random.key(0), (3, D, D), jnp.float32)
    x = jnp.ones((2, D), jnp.float32)

    def count(names):
        def loss(ws):
            y, _ = offload_scan(named, ws, x, mode="policy", names=names)
            return jnp.sum(y)

        traced = jax.jit(jax.grad(loss)).trace(ws)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
        return text.count('"pinned_host"')

    assert (count(()), count(("inner",))) == (1, 2)


def test_nothing_is_stored_without_a_gradient():
    ws, x, consts = arguments(4, jnp.float32)
    traced = jax.jit(lambda ws: offload_scan(layer, ws, x, consts, mode="ring")[0])
    text = traced.trace(ws).lower(lowering_platforms=("cuda",)).as_text()
    assert "annotate_device_placement" not in text


def test_memory_spaces_do_not_mix_in_silence():
    def leaky(w, x, consts):
        return x + jax.device_put(w, jax.memory.Space.Host), None

    with pytest.raises(ValueError, match="memory_space"):
        offload_scan(leaky, jnp.ones((3, D)), jnp.ones((D,)), mode="ring")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mode": "rings"}, "'rings' is unknown, allowed are 'save', "),
        ({"mode": "ring", "group": 2}, "group=2 does not fit mode='ring'"),
        ({"mode": "group", "group": 0}, "group=0"),
        ({"mode": "group", "group": 2}, "group=2 must divide the 3 layers"),
        ({"mode": "ring", "names": ("a",)}, "need mode='policy'"),
    ],
)
def test_what_does_not_fit_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        offload_scan(affine, jnp.ones((3, D)), jnp.ones((2, D)), 0.0, **options)


def test_forward_mode_is_refused():
    ws, x = jnp.ones((3, D)), jnp.ones((2, D))
    with pytest.raises(TypeError, match="forward-mode"):
        jax.jvp(lambda x: offload_scan(affine, ws, x, 0.0, mode="ring")[0], (x,), (x,))


def test_stacks_of_two_lengths_are_refused():
    ws = (jnp.ones((3, D)), {"a": jnp.ones((2, D))})
    with pytest.raises(ValueError, match=r"leading axes \[2, 3\]"):
        offload_scan((affine, curved), ws, jnp.ones((2, D)), 0.0, mode="ring")


# In its own process: the CUDA plugin's presence must not change the other tests.
SCRIPT = """
import re

import jax
import jax.numpy as jnp

from jaxaccel.core.offload import offload_scan
from jaxaccel.core.offload_plan import OffloadFailed, OffloadPlan, verify_offload
from pallas_kernels._common import aot

L, T, D, F = 4, 2048, 1024, 4096
ws = {
    "up": jax.ShapeDtypeStruct((L, D, F), jnp.bfloat16),
    "down": jax.ShapeDtypeStruct((L, F, D), jnp.bfloat16),
}
x = jax.ShapeDtypeStruct((T, D), jnp.bfloat16)


def layer(w, x, consts):
    return x + jax.nn.silu(x @ w["up"]) @ w["down"], None


def compiled_in(mode):
    def loss(ws, x):
        y, _ = offload_scan(layer, ws, x, mode=mode)
        return jnp.mean(jnp.square(y.astype(jnp.float32)))

    return aot.compile_for_h200(jax.grad(loss, argnums=(0, 1)), ws, x)


compiled, one = compiled_in("ring"), T * D * 2
assert compiled.memory_analysis().host_temp_size_in_bytes == L * one
plan = OffloadPlan(mode="ring", host_bytes=L * one, device_bytes=2 * one, reason="")
verify_offload(compiled, plan, "gpu")
remat = compiled_in("remat")
try:
    verify_offload(remat, plan, "gpu")
    raise SystemExit("an executable without host memory passed")
except OffloadFailed as error:
    print(error)
device = [c.memory_analysis().temp_size_in_bytes for c in (compiled, remat)]
assert device[0] <= device[1] - (L - 3) * one, device
lines = compiled.as_text().splitlines()
# Copies by descriptor, not a kernel that reads host memory; backward, downwards.
strides = re.findall(r'"byte_stride":"(-?[0-9]+)"', compiled.as_text())
assert str(one) in strides and str(-one) in strides, strides
start = next(i for i, s in enumerate(lines) if "dynamic-slice-start" in s)
done = next(i for i, s in enumerate(lines) if " %dynamic-slice-done" in s)
assert "S(5)" in lines[start], lines[start]
matmuls = [s for s in lines[start:done] if " fusion(" in s or "custom-call(" in s]
matmuls = [s for s in matmuls if "gemm" in s or "dot_general" in s]
print("matrix products behind the copy:", len(matmuls))
assert len(matmuls) >= 2, lines[start:done]
"""


@pytest.mark.skipif(aot.missing() is not None, reason=str(aot.missing()))
def test_the_copy_back_runs_behind_matrix_products_on_an_h200():
    env = os.environ | {"JAX_PLATFORMS": "cpu", "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1"}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "matrix products behind the copy" in done.stdout


@pytest.mark.gpu
def test_ring_repeats_bit_for_bit_on_the_card():
    length, rows, width = 8, 4096, 1024
    keys = jax.random.split(jax.random.key(0), 2)
    ws = jax.random.normal(keys[0], (length, width, width), jnp.bfloat16)
    x = jax.random.normal(keys[1], (rows, width), jnp.bfloat16)

    def wide(w, x, consts):
        return x + jnp.tanh(x @ w * jnp.asarray(width**-0.5, x.dtype)), None

    def gradient(mode):
        def loss(ws, x):
            y, _ = offload_scan(wide, ws, x, mode=mode)
            return jnp.mean(jnp.square(y.astype(jnp.float32)))

        options = compiler_options(mode, "gpu")
        jitted = jax.jit(jax.grad(loss, argnums=(0, 1)), compiler_options=options)
        return jitted.lower(ws, x).compile()

    ring = gradient("ring")
    size = length * rows * width * 2
    plan = OffloadPlan(mode="ring", host_bytes=size, device_bytes=0, reason="")
    verify_offload(ring, plan, "gpu")
    first, want = ring(ws, x), gradient("remat")(ws, x)
    for got, expected in zip(first, want, strict=True):
        got, expected = (np.asarray(a, np.float32) for a in (got, expected))
        axes = tuple(range(got.ndim - 2, got.ndim))  # layer by layer
        difference = np.linalg.norm(got - expected, axis=axes)
        assert (difference <= 1e-2 * np.linalg.norm(expected, axis=axes)).all()
    same = jax.jit(
        lambda a, b: jnp.all(
            jnp.asarray(
                jax.tree.leaves(jax.tree.map(lambda x, y: jnp.all(x == y), a, b))
            )
        )
    )
    assert all(bool(same(ring(ws, x), first)) for _ in range(100))


@pytest.mark.gpu
@pytest.mark.parametrize("mode", OFFLOADING)
def test_the_canary_on_the_card(mode):
    assert gradient_canary(mode) <= CANARY_TOLERANCE
