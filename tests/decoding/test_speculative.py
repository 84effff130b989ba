"""Self-speculation changes the number of passes, and nothing else."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxaccel.decoding import speculative
from jaxaccel.decoding.generate import generate
from jaxaccel.decoding.sampling import SamplingConfig, probabilities
from jaxaccel.decoding.speculative import generate_speculative, judge
from jaxaccel.decoding.verify import commit, verify
from jaxaccel.models.decoder import init_decoder
from jaxaccel.models.qwen3_5_text import Qwen3_5TextConfig


GREEDY = SamplingConfig(temperature=0.0)
PROMPTS = [[5, 3, 8], [1], [7, 7, 2, 9, 4, 11, 6, 100], [12, 13, 14, 15, 16]]
NEW, DRAFTS = 12, 3
# Of so few tokens a block that was never trained guesses some.
FEW = 3


@pytest.fixture(scope="module")
def model():
    config = Qwen3_5TextConfig.tiny(
        pattern=("gdn", "attention"), num_layers=2, num_mtp_layers=1
    )
    return init_decoder(config.decoder(), 1)


@pytest.fixture(scope="module")
def plain(model):
    return generate(
        model, PROMPTS, max_new_tokens=NEW, sampling=GREEDY, vocab_limit=FEW
    )


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


def test_a_row_does_not_depend_on_the_others(model):
    options = {"max_new_tokens": NEW, "num_drafts": DRAFTS, "vocab_limit": FEW}
    rows = generate_speculative(model, PROMPTS, seed=[4, 5, 6, 7], **options).tokens
    swapped = [PROMPTS[1], PROMPTS[0], PROMPTS[3], PROMPTS[2]]
    again = generate_speculative(model, swapped, seed=[5, 4, 7, 6], **options).tokens
    assert again == [rows[1], rows[0], rows[3], rows[2]]


def test_sampled_tokens_have_the_distribution_of_plain_decoding(model):
    prompt, rows, length = [5, 3, 8], 1024, 3
    config = SamplingConfig(temperature=0.7, top_k=2)
    options = {"max_new_tokens": length, "sampling": config, "vocab_limit": FEW}
    output = generate_speculative(model, [prompt] * rows, num_drafts=2, **options)
    assert 0.2 < output.acceptance.rate < 0.95
    # The chance of each of the continuations, from whole forwards.
    texts = np.stack(np.meshgrid(*[range(FEW)] * length, indexing="ij"), axis=-1)
    texts = texts.reshape(-1, length)
    inputs = np.concatenate([np.tile(prompt, (len(texts), 1)), texts], axis=1)
    graphdef, state = nnx.split(model)

    @jax.jit
    def forward(state, tokens):
        return nnx.merge(graphdef, state)(tokens).logits[:, len(prompt) - 1 : -1]

    logits = forward(state, jnp.asarray(inputs, jnp.int32))[..., :FEW]
    chances = probabilities(logits.reshape(-1, FEW), config).reshape(-1, length, FEW)
    chance = np.take_along_axis(np.asarray(chances), texts[..., None], axis=-1)
    chance = chance[..., 0].prod(axis=1)
    assert chance.sum() == pytest.approx(1.0, abs=1e-5)
    drawn = np.asarray(output.tokens) @ FEW ** np.arange(length - 1, -1, -1)
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
    tokens = jax.random.randint(jax.random.key(3), (5, 4), 0, 128)
    accepted = jnp.asarray([0, 1, 2, 3, 4], jnp.int32)
    before = jax.random.randint(jax.random.key(4), (5, 6), 0, 128)
    real = jnp.asarray([[1] * 6, [1] * 2 + [0] * 4, [1] * 6, [0] * 6, [1] * 6])
    all_real = jnp.ones((5, 4), jnp.int32)
    after = jnp.ones((5, 1), jnp.int32)

    @jax.jit
    def read(state, kept):
        model = nnx.merge(graphdef, state)
        cache = model(before, real, cache=model.init_cache(5, 16)).cache
        output = model(tokens, kept, cache=cache)
        last = model(after, after, cache=output.cache)
        return output.hidden, output.cache, last.hidden

    @jax.jit
    def speculate(state):
        model = nnx.merge(graphdef, state)
        cache = model(before, real, cache=model.init_cache(5, 16)).cache
        hidden, pending = verify(model, tokens, all_real, cache)
        cache = commit(model, pending, accepted)
        return hidden, cache, model(after, after, cache=cache).hidden

    kept = (jnp.arange(4)[None, :] < accepted[:, None]).astype(jnp.int32)
    hidden, cache, last = speculate(state)
    np.testing.assert_allclose(hidden, read(state, all_real)[0], atol=1e-5)
    _, expected, expected_last = read(state, kept)
    np.testing.assert_array_equal(cache.length, expected.length)
    for ours, theirs in zip(cache.layers, expected.layers, strict=True):
        if hasattr(ours, "state"):
            np.testing.assert_allclose(ours.state, theirs.state, atol=1e-5)
            np.testing.assert_allclose(ours.conv, theirs.conv, atol=1e-5)
        else:
            np.testing.assert_array_equal(ours.positions, theirs.positions)
    np.testing.assert_allclose(last, expected_last, atol=1e-5)


def test_bad_input_is_named(model):
    config = Qwen3_5TextConfig.tiny(pattern=("attention",), num_layers=1)
    without = init_decoder(config.decoder())
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
