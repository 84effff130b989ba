"""Mixture of experts and dense MLP against sums over all experts."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxaccel.data.batch import packing_metadata
from jaxaccel.nn.latent_moe import LatentMoE
from jaxaccel.nn.mlp import MLP, MLPConfig
from jaxaccel.nn.moe import MoE
from jaxaccel.nn.router import MoEConfig
from pallas_kernels._common.dispatch import recorded_choices
from pallas_kernels._common.interpret import interpreted


CONFIGS = {
    "qwen": MoEConfig(num_experts=4, top_k=2, d_ff=6, shared_d_ff=5, shared_gate=True),
    "nemotron": MoEConfig(
        num_experts=4,
        top_k=2,
        d_ff=6,
        d_latent=4,
        activation="relu2",
        score="sigmoid",
        scale=2.5,
        bias_update_rate=1e-3,
        shared_d_ff=5,
    ),
}
SEGMENTS = np.array([[1, 1, 1, 1, 1, 2, 2], [1, 1, 1, 0, 0, 0, 0]], np.int32)


def _dense(layer, x, real):
    """The same mixture as a sum over all experts."""
    config = layer.config
    routing = layer.router(x)
    one_hot = jax.nn.one_hot(routing.expert_ids, config.num_experts)
    weights = jnp.einsum("btke,btk->bte", one_hot, routing.weights)
    weights = jnp.where(real[:, :, None], weights, 0.0)
    h = x @ layer.latent_in.kernel[...] if config.d_latent else x
    hidden = jnp.einsum("btd,edf->btef", h, layer.w_in[...])
    if config.activation == "swiglu":
        gate, up = jnp.split(hidden, 2, -1)
        hidden = jax.nn.silu(gate) * up
    else:
        hidden = jax.nn.relu(hidden) ** 2
    y = jnp.einsum("btef,efd,bte->btd", hidden, layer.w_out[...], weights)
    if config.d_latent:
        y = y @ layer.latent_out.kernel[...]
    shared = layer.shared(x)
    if config.shared_gate:
        shared = shared * jax.nn.sigmoid(layer.shared_gate(x))
    return y + shared


def test_router_and_shared_expert_read_the_full_width():
    shapes = nnx.eval_shape(lambda: LatentMoE(CONFIGS["nemotron"], 8, rngs=nnx.Rngs(0)))
    kernels = {
        "router": (8, 4),
        "latent_in": (8, 4),
        "latent_out": (4, 8),
    }
    for name, shape in kernels.items():
        assert getattr(shapes, name).kernel.shape == shape
    assert (shapes.w_in.shape, shapes.w_out.shape) == ((4, 4, 6), (4, 6, 4))
    assert shapes.shared.up_proj.kernel.shape == (8, 5)
    with pytest.raises(ValueError, match="d_latent=0"):
        LatentMoE(CONFIGS["qwen"], 8, rngs=nnx.Rngs(0))
    shapes = nnx.eval_shape(lambda: MoE(CONFIGS["qwen"], 8, rngs=nnx.Rngs(0)))
    assert not hasattr(shapes, "latent_in")


@pytest.fixture(scope="module", params=sorted(CONFIGS))
def case(request, build):
    """The layer's parts, input, metadata, and what sparse and dense forms return."""
    layer = build(lambda rngs: MoE(CONFIGS[request.param], 8, rngs=rngs))
    graphdef, params, rest = nnx.split(layer, nnx.Param, ...)
    x = jax.random.normal(jax.random.key(1), (2, 7, 8))
    meta = packing_metadata((2, 7), segment_ids=jnp.asarray(SEGMENTS))
    probe = jax.random.normal(jax.random.key(2), x.shape)

    @jax.jit
    def both(params, x, meta):
        def loss(params, x, dense):
            layer = nnx.merge(graphdef, params, rest)
            if dense:
                y, aux = _dense(layer, x, meta.is_real), None
            else:
                y, aux = layer(x, meta)
            return jnp.sum(y * probe), (y, aux)

        return [
            jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(params, x, dense)
            for dense in (False, True)
        ]

    return params, x, meta, both


def test_equals_the_sum_over_all_experts_with_gradients(case):
    params, x, meta, both = case
    ((_, (y, _)), gradients), ((_, (want, _)), want_gradients) = both(params, x, meta)
    np.testing.assert_allclose(y, want, atol=1e-5)
    for got, want in zip(
        jax.tree.leaves(gradients), jax.tree.leaves(want_gradients), strict=True
    ):
        np.testing.assert_allclose(got, want, atol=2e-5)


def test_the_kernels_are_used_by_name_with_gradients(build):
    found = {}
    for name in ("xla", "mosaic"):
        layer = build(
            lambda rngs, name=name: MoE(
                CONFIGS["nemotron"],
                8,
                implementation=(("sort_dispatch", name),),
                rngs=rngs,
            )
        )
        graphdef, params, rest = nnx.split(layer, nnx.Param, ...)
        x = jax.random.normal(jax.random.key(1), (2, 7, 8))
        meta = packing_metadata((2, 7), segment_ids=jnp.asarray(SEGMENTS))

        def loss(params, x, graphdef=graphdef, rest=rest, meta=meta):
            y, aux = nnx.merge(graphdef, params, rest)(x, meta)
            return jnp.sum(jnp.sin(y)), aux.counts

        run = jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))
        with interpreted(), recorded_choices() as choices:
            found[name] = run(params, x)
        used = [c.implementation for c in choices if c.op == "sort_dispatch"]
        assert set(used) == {name}
    for a, b in zip(*map(jax.tree.leaves, found.values()), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


def test_padding_is_sent_to_no_expert(case):
    params, x, meta, both = case
    ((_, (y, aux)), _), _ = both(params, x, meta)
    assert int(aux.counts.sum()) == 2 * np.count_nonzero(SEGMENTS)
    noise = jnp.where(meta.is_real[:, :, None], x, 100.0)
    ((_, (other, other_aux)), _), _ = both(params, noise, meta)
    np.testing.assert_array_equal(aux.counts, other_aux.counts)
    real = np.asarray(meta.is_real)
    np.testing.assert_array_equal(np.asarray(y)[real], np.asarray(other)[real])


def test_router_stays_f32_under_bf16(build):
    layer = build(
        lambda rngs: MoE(
            CONFIGS["qwen"],
            8,
            dtype=jnp.bfloat16,
            param_dtype=jnp.bfloat16,
            rngs=rngs,
        )
    )
    assert layer.router.kernel.dtype == jnp.float32
    assert layer.w_in.dtype == jnp.bfloat16
    x = jax.random.normal(jax.random.key(1), (1, 4, 8), jnp.bfloat16)
    graphdef, state = nnx.split(layer)

    def run(state, x):
        layer = nnx.merge(graphdef, state)
        return layer(x, packing_metadata((1, 4))), layer.router(x)

    (y, aux), routing = jax.eval_shape(run, state, x)
    assert y.dtype == jnp.bfloat16
    assert aux.entropy.dtype == jnp.float32
    assert routing.logits.dtype == jnp.float32
    assert routing.weights.dtype == jnp.float32


@pytest.mark.parametrize("time", [1, 4, 8])
def test_router_logits_of_few_and_many_bf16_rows_have_f32_quality(build, time):
    router = build(lambda rngs: MoE(CONFIGS["qwen"], 96, rngs=rngs)).router
    x = jax.random.normal(jax.random.key(1), (1, time, 96), jnp.bfloat16)
    dy = jax.random.normal(jax.random.key(2), (1, time, router.kernel.shape[1]))

    graphdef, params, rest = nnx.split(router, nnx.Param, ...)

    def logits(kernel, x):
        params["kernel"] = params["kernel"].replace(kernel)
        return nnx.merge(graphdef, params, rest)(x).logits

    @jax.jit
    def with_gradients(kernel, x):
        y, vjp = jax.vjp(logits, kernel, x)
        return y, *vjp(dy)

    kernel = params["kernel"][...]
    got, dkernel, dx = with_gradients(kernel, x)
    w, exact, d = (
        np.asarray(a.astype(jnp.float32), np.float64) for a in (kernel, x[0], dy[0])
    )
    np.testing.assert_allclose(got[0], exact @ w, rtol=0, atol=3e-6)
    np.testing.assert_allclose(dkernel, exact.T @ d, rtol=0, atol=1e-5)
    want = d @ w.T
    np.testing.assert_allclose(
        dx[0].astype(jnp.float32), want, rtol=0, atol=4e-3 * np.abs(want).max()
    )


@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_few_tokens_read_their_experts_without_a_sort(build, name):
    """Three tokens, one of them padding, where products are named; others sort."""
    config = CONFIGS[name]
    named = {"implementation": (("expert_gemv", "xla"), ("gemv", "xla"))}
    layer = build(lambda rngs: MoE(config, 8, **named, rngs=rngs))
    x = jax.random.normal(jax.random.key(1), (1, 3, 8))
    meta = packing_metadata((1, 3), segment_ids=jnp.array([[1, 1, 0]]))

    def run(decodes):
        with recorded_choices() as choices:
            y, aux = nnx.jit(lambda m: m(x, meta, decodes=decodes))(layer)
        return y, aux.counts, [choice.op for choice in choices]

    (want, counts, plain), (got, few_counts, few) = run(False), run(True)
    np.testing.assert_allclose(got, want, atol=1e-5)
    np.testing.assert_array_equal(few_counts, counts)
    maps = 2 * bool(config.d_latent) + 2
    assert sorted(few) == [
        *["expert_gemv"] * 2,
        *["gemv"] * maps,
        "sort_dispatch",  # the choice of the experts
    ]
    assert "expert_gemv" not in plain
    assert "gemv" not in plain


@pytest.mark.parametrize("special", [{"use_bias": True}, {"swiglu_limit": 0.5}])
def test_few_tokens_of_experts_with_more_than_products_are_sorted(build, special):
    config = dataclasses.replace(
        CONFIGS["qwen"], shared_d_ff=0, shared_gate=False, **special
    )
    setting = (("expert_gemv", "xla"), ("gemv", "xla"))
    layer = build(lambda rngs: MoE(config, 8, implementation=setting, rngs=rngs))
    # Of any size, so that a bias or a limit left out shows.
    graphdef, state = nnx.split(layer)
    state = jax.tree.map(lambda leaf: leaf + 0.5, state)
    layer = nnx.merge(graphdef, state)
    x = jax.random.normal(jax.random.key(1), (2, 2, 8))
    meta = packing_metadata((2, 2))
    with recorded_choices() as choices:
        got = jax.jit(lambda x: layer(x, meta, decodes=True)[0])(x)
    assert "expert_gemv" not in [choice.op for choice in choices]
    want = jax.jit(lambda x: layer(x, meta)[0])(x)
    np.testing.assert_allclose(got, want, atol=1e-4)


def test_few_tokens_in_bfloat16_over_float32_weights(build):
    def layer(setting):
        kind = {"dtype": jnp.bfloat16, "implementation": setting}
        return build(lambda rngs: MoE(CONFIGS["qwen"], 8, **kind, rngs=rngs))

    x = jax.random.normal(jax.random.key(1), (2, 2, 8), jnp.bfloat16)
    meta = packing_metadata((2, 2))
    plain, few = layer(None), layer((("expert_gemv", "xla"), ("gemv", "xla")))
    want = jax.jit(lambda x: plain(x, meta)[0])(x)
    got = jax.jit(lambda x: few(x, meta, decodes=True)[0])(x)
    assert got.dtype == jnp.bfloat16
    scale = np.abs(want.astype(jnp.float32)).max()
    np.testing.assert_allclose(
        got.astype(jnp.float32), want.astype(jnp.float32), atol=2e-2 * scale
    )


@pytest.mark.parametrize("activation", ["swiglu", "relu2"])
def test_dense_mlp_matches_the_formula(build, activation):
    layer = build(lambda rngs: MLP(4, 6, activation, rngs=rngs))
    x = jax.random.normal(jax.random.key(1), (2, 3, 4))
    up = np.asarray(x @ layer.up_proj.kernel[...])
    if activation == "swiglu":
        gate = np.asarray(x @ layer.gate_proj.kernel[...])
        hidden = gate / (1 + np.exp(-gate)) * up
    else:
        assert not hasattr(layer, "gate_proj")
        hidden = np.maximum(up, 0) ** 2
    want = hidden @ np.asarray(layer.down_proj.kernel[...])
    np.testing.assert_allclose(jax.jit(layer.__call__)(x), want, atol=1e-5)


def test_bad_mlp_configs_raise():
    with pytest.raises(ValueError, match="d_ff=0"):
        MLPConfig(d_ff=0)
    with pytest.raises(ValueError, match="'gelu' is unknown"):
        MLPConfig(d_ff=4, activation="gelu")
    with pytest.raises(ValueError, match="'gelu' is unknown"):
        MLP(4, 4, "gelu", rngs=nnx.Rngs(0))
