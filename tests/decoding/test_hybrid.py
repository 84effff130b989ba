"""Decoding a model whose layers have one part and do not repeat as a whole."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxaccel.decoding.generate import generate
from jaxaccel.decoding.sampling import SamplingConfig
from jaxaccel.decoding.speculative import generate_speculative
from jaxaccel.models.nemotron_h import NemotronHConfig


GREEDY = SamplingConfig(temperature=0.0)
PROMPTS = [[5, 3, 8], [1], [7, 7, 2, 9, 4, 11, 6, 100]]
NEW, DRAFTS, WIDTH = 8, 2, 16


@pytest.fixture(scope="module")
def model(random_model):
    # Two runs: "ME" twice, then "M*E-" once.
    config = NemotronHConfig.tiny(pattern="MEMEM*E-/*E")
    assert [run.repeats for run in config.decoder().runs] == [2, 1]
    return random_model(config.decoder(), 1)


@pytest.fixture(scope="module")
def plain(model):
    """Greedy tokens by whole forwards."""
    graphdef, state = nnx.split(model)

    @jax.jit
    def forward(state, tokens, segments):
        return nnx.merge(graphdef, state)(tokens, segments).logits

    texts = [list(prompt) for prompt in PROMPTS]
    for _ in range(NEW):
        tokens = np.zeros((len(texts), WIDTH), np.int32)
        segments = np.zeros_like(tokens)
        for row, text in enumerate(texts):
            tokens[row, : len(text)], segments[row, : len(text)] = text, 1
        logits = np.asarray(forward(state, jnp.asarray(tokens), jnp.asarray(segments)))
        for row, text in enumerate(texts):
            text.append(int(logits[row, len(text) - 1, :3].argmax()))
    return [text[-NEW:] for text in texts]


def test_steps_and_drafts_give_the_tokens_of_whole_forwards(model, plain):
    options = {"max_new_tokens": NEW, "sampling": GREEDY, "vocab_limit": 3}
    assert generate(model, PROMPTS, **options) == plain
    drafted = generate_speculative(model, PROMPTS, num_drafts=DRAFTS, **options)
    assert drafted.tokens == plain
    # The states were rolled back to where rows differ.
    assert len(set(drafted.acceptance.histogram)) > 1
