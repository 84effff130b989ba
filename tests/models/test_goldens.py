"""Tiny random models against transformers, from the folder on the disk to gradients."""

import dataclasses
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


ROOT = pathlib.Path(__file__).parent.parent / "goldens"
ATOL = 5e-4
GRAD_RTOL = 1e-3
# These programs run once, for milliseconds: compiling them well takes seconds.
QUICK = {
    "xla_backend_optimization_level": 0,
    "xla_llvm_disable_expensive_passes": True,
}


@dataclasses.dataclass
class Golden:
    name: str
    folder: pathlib.Path
    want: dict[str, np.ndarray]
    model: object
    graphdef: object
    state: object

    @property
    def tokens(self):
        return jnp.asarray(self.want["input_ids"])

    def run(self, function, *args):
        """Compiles `function(model, *args)` and runs it."""

        def pure(state, *args):
            return function(nnx.merge(self.graphdef, state), *args)

        return jax.jit(pure, compiler_options=QUICK)(self.state, *args)


@pytest.fixture(scope="module", params=["qwen3_next", "qwen3_5_text"])
def golden(request):
    folder = ROOT / request.param
    model = load_pretrained(folder)
    return Golden(
        request.param,
        folder,
        load_file(folder / "golden.safetensors"),
        model,
        *nnx.split(model),
    )


@pytest.fixture(scope="module")
def read(golden):
    """Reads tokens of documents into a fresh cache; compiled once."""

    def forward(state, tokens, segments):
        model = nnx.merge(golden.graphdef, state)
        cache = model.init_cache(2, tokens.shape[1] + 16)
        return model(tokens, segments, cache=cache, output_hidden_states=True)

    compiled = jax.jit(forward, compiler_options=QUICK)
    return lambda tokens, segments: compiled(golden.state, tokens, segments)


@pytest.fixture(scope="module")
def prefill(golden, read):
    return read(golden.tokens, jnp.ones_like(golden.tokens))


def close(got, want, atol=ATOL):
    np.testing.assert_allclose(np.asarray(got), want, rtol=0, atol=atol)


def test_logits_and_hidden_states(golden, prefill):
    close(prefill.logits, golden.want["logits"])
    np.testing.assert_array_equal(
        np.argmax(prefill.logits, -1), np.argmax(golden.want["logits"], -1)
    )
    assert len(prefill.hidden_states) == golden.model.config.num_layers + 1
    for i, hidden in enumerate(prefill.hidden_states):
        close(hidden[:1], golden.want[f"hidden_states.{i}"])


def test_states_after_prefill(golden, prefill):
    for i in range(3):
        cache = prefill.cache.layers[i]
        # Theirs is [B, Hv, K, V] and keeps W inputs of the convolution, newest last.
        want = golden.want[f"cache.{i}.recurrent_state"]
        close(cache.state[0], want.swapaxes(-1, -2))
        want = golden.want[f"cache.{i}.conv_state"]
        close(cache.conv[0], want[:, :, 1:].swapaxes(1, 2))
    np.testing.assert_array_equal(prefill.cache.length, [100, 100])


def test_reference_implementation_agrees(golden):
    model = load_pretrained(golden.folder, implementation="reference")
    graphdef, state = nnx.split(model)
    logits = jax.jit(
        lambda state, tokens: nnx.merge(graphdef, state)(tokens).logits,
        compiler_options=QUICK,
    )(state, golden.tokens)
    close(logits, golden.want["logits"])


def test_modules(golden, prefill):
    """Each mixer, feed-forward part and router on its own input."""
    tokens = golden.tokens
    meta = packing_metadata(tokens.shape)

    def run(graphdef):
        def block_parts(state, x):
            block = nnx.merge(graphdef, jax.tree.map(lambda leaf: leaf[0], state))
            mixed, _ = block.mixer(block.mixer_norm(x), meta)
            h = block.mlp_norm(x + mixed)
            if hasattr(block.mlp, "router"):
                return mixed, block.mlp(h, meta)[0], block.mlp.router(h)
            return mixed, block.mlp(h), None

        return jax.jit(block_parts, compiler_options=QUICK)

    compiled = {}
    for i, kind in enumerate(golden.model.config.layer_types):
        graphdef, state = nnx.split(golden.model.layers[i])
        # The three GDN layers are one program.
        block_parts = compiled.setdefault(kind, run(graphdef))
        mixed, fed, routing = block_parts(state, prefill.hidden_states[i])
        theirs = "linear_attn" if kind == "gdn" else "self_attn"
        close(mixed[:1], golden.want[f"module_out.model.layers.{i}.{theirs}"])
        close(fed[:1], golden.want[f"module_out.model.layers.{i}.mlp"])
        if routing is None:
            continue
        close(routing.logits.reshape(200, 8), golden.want[f"router.{i}.logits"])
        ids, weights = by_expert(routing.expert_ids, routing.weights)
        want_ids, want_weights = by_expert(
            golden.want[f"router.{i}.indices"], golden.want[f"router.{i}.weights"]
        )
        np.testing.assert_array_equal(ids, want_ids)
        close(weights, want_weights)


def by_expert(ids, weights):
    ids = np.asarray(ids).reshape(200, -1)
    weights = np.asarray(weights).reshape(200, -1)
    order = np.argsort(ids, axis=-1)
    return np.take_along_axis(ids, order, -1), np.take_along_axis(weights, order, -1)


def test_decode(golden, prefill):
    """Sixteen tokens from the cache, each chosen by the logits before it."""

    def step(state, token, cache):
        out = nnx.merge(golden.graphdef, state)(token, cache=cache)
        return out.logits[:, 0], out.cache

    step = jax.jit(step, compiler_options=QUICK)
    logits, cache = prefill.logits[:, -1], prefill.cache
    for i in range(16):
        close(logits, golden.want["decode.logits"][:, i])
        token = jnp.argmax(logits, -1).astype(jnp.int32)
        np.testing.assert_array_equal(token, golden.want["decode.ids"][:, i])
        if i < 15:
            logits, cache = step(golden.state, token[:, None], cache)


def test_left_padded_batch(golden, read):
    tokens = jnp.asarray(golden.want["padded.input_ids"])
    segments = jnp.asarray(golden.want["padded.attention_mask"])
    out = read(tokens, segments)
    logits = out.logits
    np.testing.assert_array_equal(out.cache.length, [100, 93])
    close(logits[1, 7:], golden.want["padded.logits_row1_valid"])
    close(logits[0], golden.want["logits"][0])


@pytest.fixture(scope="module")
def loss_and_gradients(golden):
    def loss(state, tokens):
        logits = nnx.merge(golden.graphdef, state)(tokens).logits[:, :-1]
        target = tokens[:, 1:, None]
        chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), target, -1)
        return -jnp.mean(chosen)

    function = jax.jit(jax.value_and_grad(loss), compiler_options=QUICK)
    return function(golden.state, golden.tokens)


def test_loss_and_every_gradient(golden, loss_and_gradients):
    loss, gradients = loss_and_gradients
    np.testing.assert_allclose(loss, golden.want["loss"][0], rtol=0, atol=1e-5)
    config = family_config(golden.model.config)
    found = dict(checkpoint_tensors(config, gradients))
    wanted = load_file(golden.folder / "grads.safetensors")
    # The prediction block takes no part in this loss.
    assert {name for name in found if not name.startswith("mtp.")} == set(wanted)
    for name, want in wanted.items():
        atol = GRAD_RTOL * np.abs(want).max()
        np.testing.assert_allclose(found[name], want, rtol=0, atol=atol, err_msg=name)


def test_prediction_block(golden, prefill):
    if "mtp.logits" not in golden.want:
        assert golden.model.config.num_mtp_layers == 0
        return
    logits = golden.run(
        lambda model, hidden, tokens: model.mtp_logits(hidden, tokens),
        prefill.hidden,
        golden.tokens,
    )
    close(logits, golden.want["mtp.logits"])
    np.testing.assert_array_equal(
        np.argmax(logits, -1), np.argmax(golden.want["mtp.logits"], -1)
    )
