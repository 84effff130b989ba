"""A tiny gpt-oss against transformers, from the folder on the disk to gradients."""

import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file

from jaxaccel import load_pretrained
from jaxaccel.data.batch import packing_metadata
from jaxaccel.models.hf import checkpoint_tensors, family_config


GOLDEN = pathlib.Path(__file__).parent.parent / "goldens" / "gpt_oss"
ATOL = 5e-4
GRAD_RTOL = 1e-3
# These programs run once, for milliseconds: compiling them well takes seconds.
QUICK = {
    "xla_backend_optimization_level": 0,
    "xla_llvm_disable_expensive_passes": True,
}
TIME, NEW = 72, 16


def close(got, want, atol=ATOL):
    np.testing.assert_allclose(np.asarray(got), want, rtol=0, atol=atol)


@pytest.fixture(scope="module")
def want():
    return load_file(GOLDEN / "golden.safetensors")


@pytest.fixture(scope="module")
def model():
    return load_pretrained(GOLDEN)


@pytest.fixture(scope="module")
def read(model):
    """Reads tokens of documents into a fresh cache; compiled once."""
    graphdef, state = nnx.split(model)

    def forward(state, tokens, segments):
        model = nnx.merge(graphdef, state)
        cache = model.init_cache(2, TIME + NEW)
        return model(tokens, segments, cache=cache, output_hidden_states=True)

    compiled = jax.jit(forward, compiler_options=QUICK)
    return lambda tokens, segments: compiled(state, tokens, segments)


@pytest.fixture(scope="module")
def prefill(want, read):
    tokens = jnp.asarray(want["input_ids"])
    return read(tokens, jnp.ones_like(tokens))


def test_logits_and_hidden_states(want, model, prefill):
    close(prefill.logits, want["logits"])
    np.testing.assert_array_equal(
        np.argmax(prefill.logits, -1), np.argmax(want["logits"], -1)
    )
    assert model.config.layer_types == ("sliding_attention", "attention") * 2
    assert len(prefill.hidden_states) == 5
    for i, hidden in enumerate(prefill.hidden_states):
        close(hidden[:1], want[f"hidden_states.{i}"])
    np.testing.assert_array_equal(prefill.cache.length, [TIME, TIME])


def test_modules(want, model, prefill):
    """Each mixer and router on its own input, and what each mixture adds."""
    meta = packing_metadata((2, TIME))

    def run(graphdef):
        def block_parts(state, x):
            block = nnx.merge(graphdef, state)
            mixed, _ = block.mixer(block.mixer_norm(x), meta)
            return mixed, block.mlp.router(block.mlp_norm(x + mixed))

        return jax.jit(block_parts, compiler_options=QUICK)

    compiled = [(run(g), state) for g, state in map(nnx.split, model.layers)]
    states = prefill.hidden_states
    for i in range(4):
        period, position = divmod(i, 2)
        block_parts, stacked = compiled[position]
        state = jax.tree.map(lambda leaf, row=period: leaf[row], stacked)
        mixed, routing = block_parts(state, states[i])
        close(mixed[:1], want[f"module_out.model.layers.{i}.self_attn"])
        if i < 3:  # The last layer's output is kept after the final norm only.
            fed = states[i + 1] - states[i] - mixed
            close(fed[:1], want[f"module_out.model.layers.{i}.mlp"])
        close(routing.logits.reshape(-1, 8), want[f"router.{i}.logits"])
        ids, weights = by_expert(routing.expert_ids, routing.weights)
        want_ids, want_weights = by_expert(
            want[f"router.{i}.indices"], want[f"router.{i}.weights"]
        )
        np.testing.assert_array_equal(ids, want_ids)
        close(weights, want_weights)


def by_expert(ids, weights):
    ids = np.asarray(ids).reshape(2 * TIME, -1)
    weights = np.asarray(weights).reshape(2 * TIME, -1)
    order = np.argsort(ids, axis=-1)
    return np.take_along_axis(ids, order, -1), np.take_along_axis(weights, order, -1)


def test_decode(want, model, prefill):
    """Sixteen tokens from the cache, each chosen by the logits before it."""
    graphdef, state = nnx.split(model)

    def step(state, token, cache):
        out = nnx.merge(graphdef, state)(token, cache=cache)
        return out.logits[:, 0], out.cache

    step = jax.jit(step, compiler_options=QUICK)
    logits, cache = prefill.logits[:, -1], prefill.cache
    for i in range(NEW):
        close(logits, want["decode.logits"][:, i])
        token = jnp.argmax(logits, -1).astype(jnp.int32)
        np.testing.assert_array_equal(token, want["decode.ids"][:, i])
        if i < NEW - 1:
            logits, cache = step(state, token[:, None], cache)


def test_left_padded_batch(want, read):
    tokens = jnp.asarray(want["padded.input_ids"])
    out = read(tokens, jnp.asarray(want["padded.attention_mask"]))
    np.testing.assert_array_equal(out.cache.length, [TIME, TIME - 7])
    close(out.logits[1, 7:], want["padded.logits_row1_valid"])
    close(out.logits[0], want["logits"][0])


def test_loss_and_every_gradient(want, model):
    graphdef, state = nnx.split(model)

    def loss(state, tokens):
        logits = nnx.merge(graphdef, state)(tokens).logits
        target = tokens[:, 1:, None]
        chosen = jnp.take_along_axis(jax.nn.log_softmax(logits[:, :-1]), target, -1)
        return -jnp.mean(chosen), logits

    both = jax.jit(jax.value_and_grad(loss, has_aux=True), compiler_options=QUICK)
    (found, logits), gradients = both(state, jnp.asarray(want["input_ids"]))
    close(found, want["loss"][0], atol=1e-5)
    close(logits, want["logits"])
    tensors = dict(checkpoint_tensors(family_config(model.config), gradients))
    wanted = load_file(GOLDEN / "grads.safetensors")
    assert set(tensors) == set(wanted)
    for name, gradient in wanted.items():
        atol = GRAD_RTOL * np.abs(gradient).max()
        assert atol > 0, name
        np.testing.assert_allclose(
            tensors[name], gradient, rtol=0, atol=atol, err_msg=name
        )
