"""Linear, embedding, norm: dtypes, edges, and gradients where they could break."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxaccel.nn.implementation import implementation_of, normalize
from jaxaccel.nn.linear import Embed, Linear, fan_in_init
from jaxaccel.nn.norm import RMSNorm, l2_normalize


def test_linear_adds_its_bias_in_the_output_dtype(build):
    layer = build(lambda rngs: Linear(4, 3, use_bias=True, rngs=rngs))
    layer.bias[...] = jnp.array([1.0, 2.0, 3.0])
    x = jnp.ones((2, 5, 4))
    want = np.asarray(x) @ np.asarray(layer.kernel[...]) + np.array([1.0, 2.0, 3.0])
    np.testing.assert_allclose(layer(x), want, atol=1e-6)


def test_linear_keeps_f32_of_a_low_precision_product(build):
    layer = build(
        lambda rngs: Linear(
            64, 2, dtype=jnp.bfloat16, param_dtype=jnp.bfloat16, rngs=rngs
        )
    )
    x = jax.random.normal(jax.random.key(0), (3, 64), jnp.bfloat16)
    assert layer(x).dtype == jnp.bfloat16
    got = layer(x, out_dtype=jnp.float32)
    want = np.asarray(x, np.float64) @ np.asarray(layer.kernel[...], np.float64)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("experts", [False, True])
def test_fan_in_counts_only_the_summed_axis(experts):
    shape = (4, 256, 128) if experts else (1024, 128)
    kernel = fan_in_init(0.5, expert_axis=experts)(jax.random.key(0), shape)
    assert float(kernel.std()) == pytest.approx(0.5 * shape[-2] ** -0.5, rel=0.03)


def test_embedding_answers_unknown_ids_with_nan_or_an_error(build):
    embed = build(lambda rngs: Embed(5, 4, rngs=rngs))
    tokens = jnp.array([[0, 4, 5, -1]], jnp.int32)
    bad = np.asarray(jnp.isnan(embed(tokens)).all(-1))
    np.testing.assert_array_equal(bad, [[False, False, True, True]])
    for tokens, named in (([[0, -3]], "id -3"), ([[5, 1]], "id 5")):
        with pytest.raises(ValueError, match=f"{named} .* 0 to 4"):
            embed(np.array(tokens, np.int32))


def test_tied_output_is_the_table_in_f32(build):
    embed = build(lambda rngs: Embed(5, 4, dtype=jnp.bfloat16, rngs=rngs))
    x = jnp.ones((1, 2, 4), jnp.bfloat16)
    logits = embed.attend(x)
    assert logits.dtype == jnp.float32
    table = np.asarray(embed.embedding[...].astype(jnp.bfloat16), np.float32)
    np.testing.assert_allclose(logits[0, 0], table.sum(-1), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("zero_centered", [False, True])
def test_a_new_norm_is_the_identity_scale(zero_centered):
    norm = RMSNorm(8, zero_centered=zero_centered)
    x = jax.random.normal(jax.random.key(0), (2, 8))
    want = x / np.sqrt((np.asarray(x) ** 2).mean(-1, keepdims=True) + 1e-6)
    np.testing.assert_allclose(norm(x), want, rtol=1e-5)
    assert float(norm.scale[...].sum()) == (0.0 if zero_centered else 8.0)


def test_l2_normalize_at_zero():
    value, gradient = jax.value_and_grad(lambda x: l2_normalize(x).sum())(jnp.zeros(4))
    assert float(value) == 0.0
    np.testing.assert_allclose(gradient, 1e3 * np.ones(4), rtol=1e-5)
    assert l2_normalize(jnp.ones((1, 4), jnp.bfloat16)).dtype == jnp.float32


def test_implementation_settings():
    assert implementation_of("rms_norm", normalize("xla")) == "xla"
    setting = normalize({"rms_norm": "reference"})
    assert implementation_of("rms_norm", setting) == "reference"
    assert implementation_of("attention", setting) is None
    assert implementation_of("attention", normalize(None)) is None
    assert hash(setting) == hash((("rms_norm", "reference"),))
    with pytest.raises(ValueError, match="'cuda' is unknown"):
        normalize("cuda")
    with pytest.raises(ValueError, match="no op 'softmax'"):
        normalize({"softmax": "xla"})


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: RMSNorm(6, num_groups=4), "num_groups=4"),
        (lambda: RMSNorm(6, eps=-1.0), r"eps=-1\.0"),
        (lambda: Linear(0, 3, rngs=nnx.Rngs(0)), "0 -> 3"),
    ],
)
def test_bad_sizes_raise(make, message):
    with pytest.raises(ValueError, match=message):
        make()
