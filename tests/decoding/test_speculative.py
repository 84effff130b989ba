"""Self-speculation changes the number of passes, and nothing else."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxaccel.decoding import speculative
from jaxaccel.decoding.sampling import SamplingConfig, probabilities
from jaxaccel.decoding.speculative import generate_speculative, judge
from jaxaccel.decoding.verify import commit, verify
from jaxaccel.models.decoder import Decoder
from jaxaccel.models.qwen3_5_text import Qwen3_5TextConfig


GREEDY = SamplingConfig(temperature=0.0)
PROMPTS = [[5, 3, 8], [1], [7, 7, 2, 9, 4, 11, 6, 100], [12, 13, 14, 15, 16]]
NEW, DRAFTS = 12, 2
# Of so few tokens a block that was never trained guesses some.
FEW = 3


@pytest.fixture(scope="module")
def model(random_model):
    config = Qwen3_5TextConfig.tiny(
        pattern=("gdn", "attention"), num_layers=2, num_mtp_layers=1
    )
    return random_model(config.decoder(), 1)


TEXTS, WIDTH = FEW**3, 20


@pytest.fixture(scope="module")
def logits_of(model):
    """Whole forwards: texts -> f32[len(texts), WIDTH, FEW], one program for all."""
    graphdef, state = nnx.split(model)

    @jax.jit
    def forward(state, tokens, segments):
        return nnx.merge(graphdef, state)(tokens, segments).logits

    def call(texts):
        tokens = np.zeros((TEXTS, WIDTH), np.int32)
        segments = np.zeros_like(tokens)
        for row, text in enumerate(texts):
            tokens[row, : len(text)] = text
            segments[row, : len(text)] = 1
        return np.asarray(forward(state, tokens, segments))[: len(texts), :, :FEW]

    return call


@pytest.fixture(scope="module")
def plain(logits_of):
    """What plain greedy decoding draws; `generate` does, by its own test."""
    texts = [list(prompt) for prompt in PROMPTS]
    for _ in range(NEW):
        logits = logits_of(texts)
        for row, text in enumerate(texts):
            text.append(int(logits[row, len(text) - 1].argmax()))
    return [text[-NEW:] for text in texts]


def test_greedy_tokens_are_those_of_plain_decoding(model, plain):
    options = {"max_new_tokens": NEW, "sampling": GREEDY, "vocab_limit": FEW}
    output = generate_speculative(model, PROMPTS, num_drafts=DRAFTS, **options)
    assert output.tokens == plain
    found = output.acceptance
    # Rows kept different numbers of drafts in one pass, and some more than one.
    assert len(set(found.accepted)) > 1
    assert sum(count > 0 for count in found.histogram) > 2
    assert sum(found.histogram) == sum(found.passes)
    for row, passes, kept in zip(plain, found.passes, found.accepted, strict=True):
        assert passes + kept >= len(row) - 1
    assert found.rate == sum(found.accepted) / (DRAFTS * sum(found.passes))
    assert found.tokens_per_pass > 1


def test_each_row_ends_before_a_stop_token_inside_its_drafts(model, plain):
    options = {"max_new_tokens": NEW, "sampling": GREEDY, "vocab_limit": FEW}
    for stop in range(FEW):
        expected = [row[: row.index(stop)] if stop in row else row for row in plain]
        output = generate_speculative(
            model, PROMPTS, num_drafts=DRAFTS, stop_tokens=[stop], **options
        )
        assert output.tokens == expected


def test_a_row_is_as_long_as_was_asked(model, plain):
    options = {"sampling": GREEDY, "vocab_limit": FEW, "num_drafts": DRAFTS}
    for length in (1, 2, 5):
        output = generate_speculative(model, PROMPTS, max_new_tokens=length, **options)
        assert output.tokens == [row[:length] for row in plain]


# One program for both tests of sampling.
SAMPLED = {
    "num_drafts": DRAFTS,
    "sampling": SamplingConfig(temperature=0.7, top_k=2),
    "vocab_limit": FEW,
}
ROWS = 64


def test_a_row_does_not_depend_on_the_others(model):
    prompts = (PROMPTS * ROWS)[:ROWS]
    options = {"max_new_tokens": NEW, **SAMPLED}
    seeds = list(range(ROWS))
    rows = generate_speculative(model, prompts, seed=seeds, **options).tokens
    backwards = generate_speculative(
        model, prompts[::-1], seed=seeds[::-1], **options
    ).tokens
    assert backwards == rows[::-1]
    assert len(set(map(tuple, rows))) > ROWS // 2


def test_sampled_tokens_have_the_distribution_of_plain_decoding(model, logits_of):
    prompt, length, calls = [5, 3, 8], 3, 24
    config, rows = SAMPLED["sampling"], calls * ROWS
    drawn = []
    for call in range(calls):
        output = generate_speculative(
            model, [prompt] * ROWS, max_new_tokens=length, seed=call, **SAMPLED
        )
        assert 0.1 < output.acceptance.rate < 0.95
        drawn += output.tokens
    # The chance of each of the continuations, from whole forwards.
    texts = np.stack(np.meshgrid(*[range(FEW)] * length, indexing="ij"), axis=-1)
    texts = texts.reshape(-1, length)
    inputs = np.concatenate([np.tile(prompt, (len(texts), 1)), texts], axis=1)
    logits = logits_of(inputs)[:, len(prompt) - 1 : inputs.shape[1] - 1]
    chances = jax.jit(probabilities, static_argnums=1)(logits.reshape(-1, FEW), config)
    chances = chances.reshape(-1, length, FEW)
    chance = np.take_along_axis(np.asarray(chances), texts[..., None], axis=-1)
    chance = chance[..., 0].prod(axis=1)
    assert chance.sum() == pytest.approx(1.0, abs=1e-5)
    drawn = np.asarray(drawn) @ FEW ** np.arange(length - 1, -1, -1)
    share = np.bincount(drawn, minlength=len(texts)) / rows
    assert (share[chance == 0] == 0).all()
    deviation = np.sqrt(chance * (1 - chance) / rows)
    assert (np.abs(share - chance) <= 4 * deviation + 1e-9).all()
    # As a whole, too: about one a degree of freedom.
    possible = chance > 0
    statistic = rows * np.sum((share - chance)[possible] ** 2 / chance[possible])
    assert statistic < possible.sum() + 5 * np.sqrt(2 * possible.sum())


def test_the_rule_keeps_the_distribution_whatever_the_drafts_are():
    rows, vocab = 40_000, 4
    p = jnp.asarray([[0.5, 0.3, 0.2, 0.0], [0.1, 0.1, 0.1, 0.7]])
    q = jnp.asarray([[0.05, 0.0, 0.25, 0.7]])
    keys = jax.random.split(jax.random.key(0), rows)
    drafts = jax.random.categorical(
        jax.random.key(1), jnp.log(q[0]), shape=(rows, 1)
    ).astype(jnp.int32)
    kept, following = jax.jit(judge, static_argnums=4)(
        drafts,
        jnp.broadcast_to(q, (rows, 1, vocab)),
        jnp.broadcast_to(jnp.log(p), (rows, 2, vocab)),
        keys,
        SamplingConfig(),
    )
    kept, following = np.asarray(kept), np.asarray(following)
    first = np.where(kept == 1, np.asarray(drafts)[:, 0], following)
    for token in range(vocab):
        assert np.mean(first == token) == pytest.approx(float(p[0, token]), abs=0.01)
        after = following[kept == 1] == token
        assert np.mean(after) == pytest.approx(float(p[1, token]), abs=0.02)
    # Kept with the mass that both distributions share.
    assert np.mean(kept) == pytest.approx(
        float(jnp.minimum(p[0], q[0]).sum()), abs=0.01
    )


def test_verified_and_committed_is_read(model):
    """Keeping a tokens of a row equals having read them, whatever came behind."""
    graphdef, state = nnx.split(model)

    @jax.jit
    def read(state, tokens, segments, cache):
        output = nnx.merge(graphdef, state)(tokens, segments, cache=cache)
        return output.hidden, output.cache

    @jax.jit
    def speculate(state, tokens, segments, cache):
        model = nnx.merge(graphdef, state)
        hidden, pending = verify(model, tokens, segments, cache)
        return hidden, commit(model, pending, accepted)

    rows, time = 6, 4
    before, tokens, after = jax.random.randint(
        jax.random.key(3), (3, rows, time), 0, 128
    )
    accepted = jnp.asarray([0, 1, 2, 3, 4, 0], jnp.int32)
    index = np.arange(time)[None, :]
    real = jnp.asarray(index < np.asarray([[4], [2], [4], [0], [1], [3]]), jnp.int32)
    # The last row has ended: nothing of it is real.
    drafted = jnp.asarray(index < np.asarray([[4]] * 5 + [[0]]), jnp.int32)
    kept = jnp.asarray(index < np.asarray(accepted)[:, None], jnp.int32)
    _, cache = read(state, before, real, model.init_cache(rows, 16))
    hidden, committed = speculate(state, tokens, drafted, cache)
    whole, _ = read(state, tokens, drafted, cache)
    np.testing.assert_allclose(hidden[:5], whole[:5], atol=1e-5)
    _, expected = read(state, tokens, kept, cache)
    np.testing.assert_array_equal(committed.length, expected.length)
    gdn, attention = committed.layers
    np.testing.assert_allclose(gdn.state, expected.layers[0].state, atol=1e-5)
    np.testing.assert_allclose(gdn.conv, expected.layers[0].conv, atol=1e-5)
    np.testing.assert_array_equal(attention.positions, expected.layers[1].positions)
    one = jnp.asarray(np.broadcast_to(index < 1, (rows, time)), jnp.int32)
    last, _ = read(state, after, one, committed)
    expected_last, _ = read(state, after, one, expected)
    np.testing.assert_allclose(last[:, 0], expected_last[:, 0], atol=1e-5)


def test_bad_input_is_named(model):
    config = Qwen3_5TextConfig.tiny(pattern=("attention",), num_layers=1)
    without = nnx.eval_shape(lambda: Decoder(config.decoder(), rngs=nnx.Rngs(0)))
    with pytest.raises(ValueError, match="num_mtp_layers=0"):
        generate_speculative(without, [[1]], num_drafts=1, max_new_tokens=2)
    with pytest.raises(ValueError, match="num_drafts=0"):
        generate_speculative(model, [[1]], num_drafts=0, max_new_tokens=2)
    with pytest.raises(ValueError, match=r"prompts\[0\] is empty"):
        generate_speculative(model, [[]], num_drafts=1, max_new_tokens=2)
    empty = generate_speculative(model, [], num_drafts=2, max_new_tokens=2)
    assert empty.tokens == []
    assert empty.acceptance == speculative.acceptance(np.zeros((0, 3), np.int32))
    assert empty.acceptance.rate == 0.0
