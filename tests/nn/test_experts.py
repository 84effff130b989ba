"""The written-out backward of routed experts: what it gives, and what it keeps."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxaccel.nn.experts import (
    ExpertOps,
    ExpertWeights,
    routed_experts,
)
from pallas_kernels._common.testing import assert_close
from pallas_kernels.grouped_matmul import grouped_matmul
from pallas_kernels.grouped_matmul.activation import LIMIT
from pallas_kernels.sort_dispatch import combine, permute, sort_dispatch


T, K, E, D, F = 96, 4, 8, 16, 32
M = T * K


@pytest.fixture(scope="module", autouse=True)
def quick_compile():
    """Without the expensive passes: compiling is what these tests spend time on."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


def plain(ops, h, weights, plan, experts):
    """relu^2 experts with their gradients left to JAX."""
    rows = permute(h, plan)
    z = grouped_matmul(rows, experts.w_in.astype(ops.dtype), plan.group_sizes)
    a = jnp.square(jax.nn.relu(z.astype(jnp.float32))).astype(ops.dtype)
    y = grouped_matmul(a, experts.w_out.astype(ops.dtype), plan.group_sizes)
    return combine(y, plan, weights)


@functools.cache
def arguments(activation, layers=None, biases=False):
    """h, weights, ids and experts; with `layers`, the last three of each layer."""
    rng = np.random.default_rng(0)
    lead = () if layers is None else (layers,)
    width = 2 * F if activation == "swiglu" else F
    ids = rng.permuted(np.tile(np.arange(E), (*lead, T, 1)), axis=-1)[..., :K]
    # The last tokens go nowhere, expert 5 has nobody.
    ids = np.where(ids == 5, 6, ids)
    ids[..., -9:, :] = E
    weights = rng.random((*lead, T, K), np.float32)
    weights[..., 0, :] = 0.0
    h = rng.standard_normal((T, D), np.float32)
    shapes = [(*lead, E, D, width), (*lead, E, F, D)]
    scales = [D**-0.5, F**-0.5]
    if biases:
        shapes += [(*lead, E, width), (*lead, E, D)]
        scales += [1.0, 1.0]
    drawn = (
        rng.standard_normal(shape, np.float32) * np.float32(scale)
        for shape, scale in zip(shapes, scales, strict=True)
    )
    return h, weights, ids.astype(np.int32), ExpertWeights(*drawn)


def dense(ops, h, weights, ids, experts):
    """The sum over all experts of every token."""
    by_expert = jnp.einsum("tke,tk->te", jax.nn.one_hot(ids, E), weights)
    z = jnp.einsum("td,edf->tef", h, experts.w_in) + experts.bias_in[None]
    gate, up = jnp.split(z, 2, axis=-1)
    gate, up = (
        jnp.minimum(gate, ops.swiglu_limit),
        jnp.clip(up, -ops.swiglu_limit, ops.swiglu_limit),
    )
    a = (up + 1) * gate * jax.nn.sigmoid(1.702 * gate)
    y = jnp.einsum("tef,efd->ted", a, experts.w_out) + experts.bias_out[None]
    return jnp.einsum("te,ted->td", by_expert, y)


def test_gradients_are_those_of_the_sum_over_all_experts():
    """Of gpt-oss's experts, the ones with most parts; relu^2 is in test_moe.py."""
    ops = ExpertOps(activation="swiglu", dtype=jnp.float32, swiglu_limit=LIMIT)
    h, weights, ids, experts = arguments("swiglu", biases=True)
    h = 4 * h  # some gates are beyond the bound

    @jax.jit
    def both(h, weights, ids, experts):
        plan = sort_dispatch(ids, E)

        def loss(run, where, h, weights, experts):
            return jnp.sum(jnp.sin(run(ops, h, weights, where, experts)))

        return [
            jax.value_and_grad(functools.partial(loss, *run), argnums=(0, 1, 2))(
                h, weights, experts
            )
            for run in ((routed_experts, plan), (dense, ids))
        ]

    got, want = both(h, weights, ids, experts)
    again, _ = both(h, weights, ids, experts)
    jax.tree.map(np.testing.assert_array_equal, got, again)
    jax.tree.map(functools.partial(assert_close, rel=2e-5), got, want)
    (_, (dh, d_weights, d_experts)) = got
    # Of tokens without weight the weight's gradient is what it would bring.
    assert np.abs(d_weights[0]).min() > 0
    assert not np.any(dh[-9:])
    assert not np.any(d_weights[-9:])
    for leaf in jax.tree.leaves(d_experts):
        assert not np.any(leaf[5])


def test_a_bound_that_has_no_kernel_is_computed():
    ops = ExpertOps(
        activation="swiglu", dtype=jnp.float32, swiglu_limit=1.0, matmul="reference"
    )
    h, weights, ids, experts = arguments("swiglu", biases=True)

    @jax.jit
    def both(h, weights, ids, experts):
        plan = sort_dispatch(ids, E)
        return [
            run(ops, h, weights, where, experts)
            for run, where in ((routed_experts, plan), (dense, ids))
        ]

    assert_close(*both(h, weights, ids, experts), rel=1e-5)


@pytest.mark.parametrize("activation", ["relu2", "swiglu"])
def test_what_is_kept(activation):
    ops = ExpertOps(activation=activation, dtype=jnp.bfloat16)
    hidden = 2 * F if activation == "swiglu" else F

    def kept(h, weights, ids, experts):
        plan = sort_dispatch(ids, E)
        run = functools.partial(routed_experts, ops)
        return jax.vjp(lambda *a: run(*a[:2], plan, a[2]), h, weights, experts)[1]

    h, *others = jax.eval_shape(lambda: arguments(activation))
    h = jax.ShapeDtypeStruct(h.shape, jnp.bfloat16)
    found = jax.tree.leaves(jax.eval_shape(kept, h, *others))
    assert sorted((x.shape, x.dtype.name) for x in found) == sorted(
        [
            *(((T, D), "bfloat16"), ((M, hidden), "bfloat16")),
            *(((T, K), "float32"), ((T, K), "int32"), ((M,), "int32"), ((E,), "int32")),
            # The parameters themselves, not their casts.
            *(((E, D, hidden), "float32"), ((E, F, D), "float32")),
        ]
    )


def test_a_compiled_step_keeps_no_more():
    """The bytes of a step over many layers are those of what each of them keeps.

    Weights, ids and parameters are arguments here, so that they count as nothing.
    """
    layers = 64
    ops = ExpertOps(activation="relu2", dtype=jnp.float32)

    def temporaries(run):
        def loss(h, weights, ids, experts):
            def layer(h, own):
                weights, ids, experts = own
                y = run(ops, h, weights, sort_dispatch(ids, E), experts)
                return h + y, None

            h, _ = jax.lax.scan(layer, h, (weights, ids, experts))
            return jnp.sum(jnp.square(h))

        step = jax.jit(jax.grad(loss, argnums=(0, 1, 3)))
        shapes = jax.eval_shape(lambda: arguments("relu2", layers))
        memory = step.lower(*shapes).compile().memory_analysis()
        return memory.temp_size_in_bytes / layers

    kept = 4 * (T * D + M * F + 2 * M + E)
    # Above it, a sixty-fourth of what one layer's backward needs while it runs.
    ours = temporaries(routed_experts)
    assert kept <= ours <= 1.15 * kept
    # Plain differentiation also keeps the sorted copies of h, the rows that `combine`
    # sums, and z beside its activation.
    assert temporaries(plain) >= ours + 4 * (2 * M * D + M * F)
