"""The filters keep exactly the set they promise, and draws follow the logits."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxaccel.decoding.sampling import SamplingConfig, filter_logits, sample


filtered = jax.jit(filter_logits, static_argnums=1)
drawn_by = jax.jit(sample, static_argnums=2)


def kept_tokens(logits, **options):
    """Token ids that a filter leaves, one set a row."""
    kept, tokens = filtered(np.asarray(logits, np.float32), SamplingConfig(**options))
    kept = np.asarray(kept)
    if tokens is None:
        tokens = np.broadcast_to(np.arange(kept.shape[1]), kept.shape)
    tokens = np.asarray(tokens)
    return [set(t[np.isfinite(k)].tolist()) for k, t in zip(kept, tokens, strict=True)]


def test_top_k_keeps_exactly_k_and_breaks_ties_by_the_lower_id():
    assert kept_tokens([[1.0, 3.0, 3.0, 3.0, 0.0]], top_k=2) == [{1, 2}]
    assert kept_tokens([[0.0] * 6], top_k=4) == [{0, 1, 2, 3}]


def test_top_k_above_the_vocabulary_keeps_everything():
    assert kept_tokens([[1.0, 2.0, 3.0]], top_k=100) == [{0, 1, 2}]


def test_top_p_keeps_the_smallest_set_that_holds_the_mass():
    logits = jnp.log(jnp.asarray([[0.125, 0.5, 0.25, 0.125]]))
    assert kept_tokens(logits, top_p=0.5) == [{1}]
    assert kept_tokens(logits, top_p=0.51) == [{1, 2}]
    assert kept_tokens(logits, top_p=0.75) == [{1, 2}]
    assert kept_tokens(logits, top_p=0.8) == [{0, 1, 2}]
    assert kept_tokens(logits, top_p=1.0) == [{0, 1, 2, 3}]
    assert kept_tokens(logits, top_p=1e-30) == [{1}]


def test_top_p_counts_the_mass_that_top_k_left():
    logits = jnp.log(jnp.asarray([[0.4, 0.3, 0.2, 0.1]]))
    # After top_k=2 the shares are 4/7 and 3/7: one token holds 0.5, two hold 0.6.
    assert kept_tokens(logits, top_k=2, top_p=0.5) == [{0}]
    assert kept_tokens(logits, top_k=2, top_p=0.6) == [{0, 1}]


def test_min_p_is_relative_to_the_likeliest():
    logits = jnp.log(jnp.asarray([[0.6, 0.31, 0.09], [0.4, 0.35, 0.25]]))
    assert kept_tokens(logits, min_p=0.5) == [{0, 1}, {0, 1, 2}]
    assert kept_tokens(logits, min_p=1.0) == [{0}, {0}]
    assert kept_tokens(logits, min_p=0.0) == [{0, 1, 2}] * 2


def test_temperature_comes_before_the_filters():
    logits = jnp.log(jnp.asarray([[0.7, 0.2, 0.1]]))
    assert kept_tokens(logits, top_p=0.7) == [{0}]
    assert kept_tokens(logits, temperature=10.0, top_p=0.7) == [{0, 1, 2}]


@settings(derandomize=True, max_examples=30, deadline=None)
@given(
    st.lists(st.integers(-6, 6), min_size=8, max_size=8),
    st.sampled_from([0.05, 0.3, 0.6, 0.9, 0.99]),
)
def test_top_p_agrees_with_a_plain_loop(values, top_p):
    logits = np.asarray(values, np.float64)
    probs = np.exp(logits - logits.max())
    probs /= probs.sum()
    expected, mass = set(), 0.0
    for token in sorted(range(8), key=lambda i: (-values[i], i)):
        expected.add(token)
        mass += probs[token]
        if abs(mass - top_p) < 1e-5:
            return  # Rounding decides: no right answer.
        if mass > top_p:
            break
    assert kept_tokens(logits[None], top_p=top_p) == [expected]


@pytest.mark.parametrize("options", [{}, {"top_p": 0.9}, {"top_k": 3, "min_p": 0.1}])
def test_a_tiny_temperature_draws_the_likeliest(options):
    logits = np.asarray(
        [[90.0, 100.0, -np.inf, -80.0], [-7.0, -6.0, -5.0, -5.0]], np.float32
    )

    @jax.jit
    def all_temperatures(logits, keys):
        results = []
        for temperature in (1e-300, 1e-40, 1e-38, 1e-30):
            config = SamplingConfig(temperature=temperature, **options)
            draw = functools.partial(sample, logits, config=config)
            results.append((filter_logits(logits, config)[0], jax.vmap(draw)(keys)))
        return results

    keys = jax.random.split(jax.random.key(0), 8)
    for kept, drawn in all_temperatures(logits, keys):
        assert (np.asarray(kept).max(-1) == 0).all()
        assert not np.isnan(kept).any()
        assert set(np.asarray(drawn)[:, 0].tolist()) == {1}
        assert set(np.asarray(drawn)[:, 1].tolist()) <= {2, 3}


def test_a_huge_temperature_draws_what_is_allowed():
    logits = jnp.asarray([[9.0, -jnp.inf, -9.0, 0.0]])
    kept, _ = filter_logits(logits, SamplingConfig(temperature=1e300))
    np.testing.assert_allclose(kept, [[0.0, -jnp.inf, 0.0, 0.0]], atol=1e-30)


def test_greedy_ignores_key_and_filters():
    logits = jnp.asarray([[0.0, 5.0, 5.0], [9.0, 1.0, 2.0]])
    config = SamplingConfig(temperature=0.0, top_k=1, top_p=0.1)
    for seed in range(3):
        tokens = sample(logits, jax.random.key(seed), config)
        assert tokens.dtype == jnp.int32
        assert tokens.tolist() == [1, 0]


@pytest.mark.parametrize(
    "options", [{}, {"top_k": 4}, {"top_p": 0.999999}, {"top_k": 9, "top_p": 0.999999}]
)
def test_draws_follow_the_distribution(options):
    probs = jnp.asarray([0.5, 0.3, 0.15, 0.05])
    logits = jnp.broadcast_to(jnp.log(probs)[None], (20_000, 4))
    tokens = drawn_by(logits, jax.random.key(0), SamplingConfig(**options))
    share = np.bincount(np.asarray(tokens), minlength=4) / 20_000
    np.testing.assert_allclose(share, np.asarray(probs), atol=0.015)


def test_a_row_draws_the_same_alone_and_in_company():
    logits = jax.random.normal(jax.random.key(1), (5, 33))
    keys = jax.random.split(jax.random.key(2), 5)
    config = SamplingConfig(top_k=20, top_p=0.95, min_p=0.01)
    together = drawn_by(logits, keys, config)
    alone = [drawn_by(logits[i : i + 1], keys[i : i + 1], config)[0] for i in range(5)]
    assert together.tolist() == [int(t) for t in alone]


@pytest.mark.parametrize(
    "options, message",
    [
        ({"temperature": -1.0}, "temperature=-1.0"),
        ({"temperature": float("nan")}, "temperature=nan"),
        ({"top_k": 0}, "top_k=0"),
        ({"top_p": 0.0}, "top_p=0.0"),
        ({"top_p": 1.5}, "top_p=1.5"),
        ({"min_p": -0.1}, "min_p=-0.1"),
    ],
)
def test_bad_settings_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        SamplingConfig(**options)
