"""Tiny Nemotron-H models against transformers, from the folder to gradients."""

import json
import pathlib
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file

from jaxaccel import load_pretrained, save_pretrained
from jaxaccel.models.hf import checkpoint_tensors, family_config


GOLDENS = pathlib.Path(__file__).parent.parent / "goldens"
ATOL = 5e-4
GRAD_RTOL = 1e-3
# These programs run once, for milliseconds: compiling them well takes seconds.
QUICK = {
    "xla_backend_optimization_level": 0,
    "xla_llvm_disable_expensive_passes": True,
}
TIME, NEW = 72, 16
PATTERNS = {"nemotron_nano": "MEMEM*EM", "nemotron_h": "MEM*E-ME/*E"}


def close(got, want, atol=ATOL):
    np.testing.assert_allclose(np.asarray(got), want, rtol=0, atol=atol)


def quick(function):
    return jax.jit(function, compiler_options=QUICK)


class Golden:
    """A model of a folder, and what it has to give."""

    def __init__(self, name):
        self.name = name
        self.folder = GOLDENS / name
        self.want = load_file(self.folder / "golden.safetensors")
        self.model = load_pretrained(self.folder)
        self.graphdef, self.state = nnx.split(self.model)

        def read(state, tokens, segments):
            model = nnx.merge(self.graphdef, state)
            cache = model.init_cache(2, TIME + NEW)
            return model(tokens, segments, cache=cache, output_hidden_states=True)

        compiled = quick(read)
        self.read = lambda tokens, segments: compiled(self.state, tokens, segments)
        tokens = jnp.asarray(self.want["input_ids"])
        self.prefill = self.read(tokens, jnp.ones_like(tokens))


@pytest.fixture(scope="module", params=PATTERNS)
def golden(request):
    return Golden(request.param)


def test_logits_hidden_states_and_modules(golden):
    want, out = golden.want, golden.prefill
    close(out.logits, want["logits"])
    np.testing.assert_array_equal(
        np.argmax(out.logits, -1), np.argmax(want["logits"], -1)
    )
    states = out.hidden_states
    assert len(states) == 9
    for i, hidden in enumerate(states):
        close(hidden[:1], want[f"hidden_states.{i}"])
    for i in range(7):  # The last layer's output is kept after the final norm only.
        added = states[i + 1] - states[i]
        close(added[:1], want[f"module_out.model.layers.{i}.mixer"])
    config = family_config(golden.model.config)
    assert config.pattern == PATTERNS[golden.name]


def test_states(golden):
    config, cache = golden.model.config, golden.prefill.cache
    np.testing.assert_array_equal(cache.length, [TIME, TIME])
    mixing = [
        i for i, block in enumerate(golden.model.layers) if block.mixer is not None
    ]
    assert len(cache.layers) == len(mixing)
    seen = 0
    for layer, (position, row) in enumerate(config.layer_places):
        if config.layer_types[layer] != "mamba":
            assert f"cache.{layer}.conv_state" not in golden.want
            continue
        seen += 1
        part = cache.layers[mixing.index(position)]
        close(part.state[row], golden.want[f"cache.{layer}.recurrent_state"])
        stored = golden.want[f"cache.{layer}.conv_state"][..., 1:]
        close(part.conv[row], stored.swapaxes(1, 2))
    assert seen == PATTERNS[golden.name].count("M")


def by_expert(ids, weights):
    ids = np.asarray(ids).reshape(2 * TIME, -1)
    weights = np.asarray(weights).reshape(2 * TIME, -1)
    order = np.argsort(ids, axis=-1)
    return np.take_along_axis(ids, order, -1), np.take_along_axis(weights, order, -1)


def test_routing(golden):
    config, states = golden.model.config, golden.prefill.hidden_states
    places = [
        (layer, *place)
        for layer, place in enumerate(config.layer_places)
        if config.layer_types[layer] == "moe"
    ]

    def route(state, states):
        found = []
        for layer, position, row in places:
            stacked = nnx.split(nnx.merge(golden.graphdef, state).layers[position])
            block = nnx.merge(stacked[0], jax.tree.map(lambda m: m[row], stacked[1]))  # noqa: B023
            found.append(block.mlp.router(block.mlp_norm(states[layer])))
        return found

    routings = quick(route)(golden.state, states)
    assert len(routings) == 3
    for i, routing in enumerate(routings):
        want = {
            key: golden.want[f"router.{i}.{key}"]
            for key in ("logits", "indices", "weights")
        }
        close(routing.logits.reshape(-1, 8), want["logits"])
        ids, weights = by_expert(routing.expert_ids, routing.weights)
        want_ids, want_weights = by_expert(want["indices"], want["weights"])
        np.testing.assert_array_equal(ids, want_ids)
        close(weights, want_weights)
        # And the layers' reports come in the same order.
        counts = np.bincount(ids.ravel(), minlength=8)
        np.testing.assert_array_equal(golden.prefill.aux.counts[i], counts)


def test_decode(golden):
    """Sixteen tokens from the cache, each chosen by the logits before it."""

    def step(state, token, cache):
        out = nnx.merge(golden.graphdef, state)(token, cache=cache)
        return out.logits[:, 0], out.cache

    step = quick(step)
    logits, cache = golden.prefill.logits[:, -1], golden.prefill.cache
    for i in range(NEW):
        close(logits, golden.want["decode.logits"][:, i])
        token = jnp.argmax(logits, -1).astype(jnp.int32)
        np.testing.assert_array_equal(token, golden.want["decode.ids"][:, i])
        if i < NEW - 1:
            logits, cache = step(golden.state, token[:, None], cache)


def test_padded_batches(golden):
    """Left padding as in the golden; right padding goes on where it left off."""
    want = golden.want
    tokens = jnp.asarray(want["padded.input_ids"])
    out = golden.read(tokens, jnp.asarray(want["padded.attention_mask"]))
    np.testing.assert_array_equal(out.cache.length, [TIME, TIME - 7])
    close(out.logits[1, 7:], want["padded.logits_row1_valid"])
    close(out.logits[0], want["logits"][0])
    moved = np.asarray(tokens)
    moved = np.stack([moved[0], np.roll(moved[1], -7)])
    real = np.arange(TIME) < np.array([[TIME], [TIME - 7]])
    right = golden.read(jnp.asarray(moved), jnp.asarray(real, jnp.int32))
    close(right.logits[1, :-7], want["padded.logits_row1_valid"])
    for got, there in zip(
        jax.tree.leaves(right.cache), jax.tree.leaves(out.cache), strict=True
    ):
        close(got, there, atol=2e-5)


def test_loss_and_every_gradient(golden):
    def loss(state, tokens):
        logits = nnx.merge(golden.graphdef, state)(tokens).logits
        target = tokens[:, 1:, None]
        chosen = jnp.take_along_axis(jax.nn.log_softmax(logits[:, :-1]), target, -1)
        return -jnp.mean(chosen)

    tokens = jnp.asarray(golden.want["input_ids"])
    found, gradients = quick(jax.value_and_grad(loss))(golden.state, tokens)
    close(found, golden.want["loss"][0], atol=1e-5)
    config = family_config(golden.model.config)
    tensors = dict(checkpoint_tensors(config, gradients))
    wanted = load_file(golden.folder / "grads.safetensors")
    assert {name for name in tensors if not name.startswith("mtp.")} == set(wanted)
    for name, gradient in wanted.items():
        atol = GRAD_RTOL * np.abs(gradient).max()
        # The selection bias is moved by load alone.
        assert (atol == 0) == name.endswith("e_score_correction_bias"), name
        np.testing.assert_allclose(
            tensors[name], gradient, rtol=0, atol=atol, err_msg=name
        )


def test_prediction_block(golden):
    if "mtp.logits" not in golden.want:
        assert golden.model.config.num_mtp_layers == 0
        with pytest.raises(ValueError, match="num_mtp_layers=0"):
            golden.model.mtp_hidden(None, None)
        return

    def predict(state, hidden, tokens):
        model = nnx.merge(golden.graphdef, state)
        h, aux = model.mtp_hidden(hidden, tokens)
        return h, model.unembed(h), aux.counts

    tokens = jnp.asarray(golden.want["input_ids"])
    _, logits, counts = quick(predict)(golden.state, golden.prefill.hidden, tokens)
    close(logits, golden.want["mtp.logits"])
    np.testing.assert_array_equal(
        np.argmax(logits, -1), np.argmax(golden.want["mtp.logits"], -1)
    )
    assert counts.sum() == 2 * (TIME - 1) * 3


def test_step_limit_of_a_file(tmp_path):
    """The floor that transformers puts under the steps of a prefill, named here."""
    folder = GOLDENS / "nemotron_nano"
    raw = json.loads((folder / "config.json").read_text())
    raw["time_step_limit"] = [0.001, {"__float__": "Infinity"}]
    (tmp_path / "config.json").write_text(json.dumps(raw))
    shutil.copyfile(folder / "model.safetensors", tmp_path / "model.safetensors")
    graphdef, state = nnx.split(load_pretrained(tmp_path))
    want = load_file(folder / "golden.safetensors")
    forward = quick(lambda state, tokens: nnx.merge(graphdef, state)(tokens).logits)
    logits = forward(state, jnp.asarray(want["input_ids"]))
    close(logits, want["hf_clamped.logits"])
    assert np.abs(logits - want["logits"]).max() > 0.5


def test_saving_gives_the_same_bytes(golden, tmp_path):
    save_pretrained(golden.model, tmp_path)
    wanted, found = {}, load_file(tmp_path / "model.safetensors")
    for file in golden.folder.glob("m*.safetensors"):
        wanted |= load_file(file)
    assert set(found) == set(wanted)
    for name, want in wanted.items():
        assert found[name].dtype == want.dtype, name
        np.testing.assert_array_equal(found[name], want, err_msg=name)
    again = load_pretrained(tmp_path)
    assert again.config == golden.model.config
    low = load_pretrained(tmp_path, dtype="bfloat16")
    mamba = low.layers[0].mixer
    assert mamba.xbc_proj.kernel.dtype == jnp.bfloat16
    for name in ("A_log", "D", "dt_bias"):
        assert getattr(mamba, name).dtype == jnp.float32
