"""Decoding a model whose layers have one part, are scanned in runs, and remember."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxaccel.decoding.generate import generate
from jaxaccel.decoding.sampling import SamplingConfig
from jaxaccel.decoding.speculative import generate_speculative
from jaxaccel.models.nemotron_h import NemotronHConfig
from jaxaccel.nn.engram_config import EngramConfig
from pallas_kernels._common.dispatch import recorded_choices


GREEDY = SamplingConfig(temperature=0.0)
PROMPTS = [[5, 3, 8], [1], [7, 7, 2, 9, 4, 11, 6, 100]]
NEW, DRAFTS, WIDTH = 8, 2, 16


# Two runs, "ME" twice and "*" once, and the memory stands between them.
CONFIG = dataclasses.replace(
    NemotronHConfig.tiny(pattern="MEME*/*E").decoder(),
    engram=EngramConfig(layers=(5,), heads=2, head_dim=8, bases=41, conv_width=2),
)


@pytest.fixture(scope="module")
def models(random_model):
    """The same weights without a setting and with products of few rows."""
    assert [run.repeats for run in CONFIG.runs] == [2, 1]
    named = dataclasses.replace(
        CONFIG, implementation={"expert_gemv": "xla", "gemv": "xla"}
    )
    return tuple(remembering(random_model(config, 1)) for config in (CONFIG, named))


@pytest.fixture(scope="module")
def model(models):
    return models[0]


def remembering(model):
    # As large as the embeddings: whoever remembers another text says another.
    for layer in model.memory.layers:
        layer.table.rows[...] *= 64.0
    return model


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


def test_one_row_reads_its_experts_without_a_sort(models, plain):
    options = {"max_new_tokens": NEW, "sampling": GREEDY, "vocab_limit": 3}
    drafts = {**options, "num_drafts": DRAFTS}
    with recorded_choices() as of_steps:
        assert generate(models[1], PROMPTS[2:], **options) == plain[2:]
    with recorded_choices() as of_drafts:
        drafted = generate_speculative(models[1], PROMPTS[2:], **drafts)
    assert drafted.tokens == plain[2:]
    for choices in (of_steps, of_drafts):
        assert {"expert_gemv", "gemv"} <= {choice.op for choice in choices}
