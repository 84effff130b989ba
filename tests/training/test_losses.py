"""Chunked cross-entropy equals the dense form and never holds all logits."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxaccel.training.losses import chunked_cross_entropy, dense_cross_entropy


B, T, D, VOCAB = 3, 20, 8, 50


@pytest.fixture
def problem():
    keys = jax.random.split(jax.random.key(0), 5)
    return {
        "kernel": jax.random.normal(keys[0], (D, VOCAB)),
        "hidden": jax.random.normal(keys[1], (B, T, D)),
        "targets": jax.random.randint(keys[2], (B, T), 0, VOCAB, jnp.int32),
        "weights": (jax.random.uniform(keys[3], (B, T)) > 0.4).astype(jnp.float32),
    }


def dense(kernel, hidden, targets, weights, z_loss):
    logits = jnp.einsum("btd,dv->btv", hidden, kernel)
    log_p = jax.nn.log_softmax(logits)
    nats = -jnp.take_along_axis(log_p, targets[..., None], axis=-1)[..., 0]
    z = jnp.square(jax.nn.logsumexp(logits, axis=-1))
    return jnp.sum(weights * (nats + z_loss * z))


@functools.partial(jax.jit, static_argnames="z_loss")
def of_whole_logits(kernel, hidden, targets, weights, z_loss):
    """Half the loss, its gradients, hits, and the sums of `dense_cross_entropy`."""
    loss, grads = jax.value_and_grad(
        lambda k, h: 0.5 * dense(k, h, targets, weights, z_loss), argnums=(0, 1)
    )(kernel, hidden)
    logits = hidden @ kernel[None]
    hits = (jnp.argmax(logits, -1) == targets).astype(jnp.float32)
    sums = dense_cross_entropy(logits, targets, weights, z_loss=z_loss)
    return loss, grads, hits, sums


@pytest.mark.parametrize("chunk", [1, 7, 10, 64])
@pytest.mark.parametrize("z_loss", [0.0, 0.1])
def test_equals_dense_with_gradients(problem, chunk, z_loss):
    targets, weights = problem["targets"], problem["weights"]

    def chunked(kernel, hidden):
        def unembed(x):
            return jnp.einsum("btd,dv->btv", x, kernel)

        sums = chunked_cross_entropy(
            unembed, hidden, targets, weights, chunk=chunk, z_loss=z_loss
        )
        return 0.5 * sums.loss, sums

    args = problem["kernel"], problem["hidden"]
    grad = jax.jit(jax.value_and_grad(chunked, argnums=(0, 1), has_aux=True))
    (loss, sums), got = grad(*args)
    want_loss, want, hits, want_sums = of_whole_logits(
        *args, targets, weights, z_loss=z_loss
    )
    np.testing.assert_allclose(loss, want_loss, rtol=1e-5)
    chex.assert_trees_all_close(got, want, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(sums.weight, weights.sum())
    np.testing.assert_allclose(sums.correct, (weights * hits).sum())
    chex.assert_trees_all_close(sums, want_sums, rtol=1e-5)


def test_masked_tokens_keep_nan_out(problem):
    weights = jnp.zeros((B, T)).at[:, :5].set(1.0)
    hidden = problem["hidden"].at[:, 5:].set(jnp.nan)

    def loss(hidden):
        return chunked_cross_entropy(
            lambda x: x @ problem["kernel"][None], hidden, problem["targets"], weights
        ).loss

    value, grad = jax.value_and_grad(loss)(hidden)
    assert np.isfinite(value)
    assert np.isfinite(grad[:, :5]).all()


@pytest.mark.parametrize("target", [-1, VOCAB, VOCAB + 7, -100])
def test_a_target_outside_of_the_vocabulary_stops_a_run_where_it_counts(
    problem, target
):
    kernel, hidden = problem["kernel"], problem["hidden"]
    targets = problem["targets"].at[1, 3].set(target)

    def chunked(hidden, weights):
        sums = chunked_cross_entropy(
            lambda x: x @ kernel[None], hidden, targets, weights, chunk=7, z_loss=0.1
        )
        return sums.loss, sums

    def whole(hidden, weights):
        sums = dense_cross_entropy(hidden @ kernel[None], targets, weights, z_loss=0.1)
        return sums.loss, sums

    for loss in (chunked, whole):
        grad = jax.jit(jax.value_and_grad(loss, has_aux=True))
        (value, sums), d_hidden = grad(hidden, jnp.ones((B, T)))
        assert np.isnan(value)
        assert np.isnan(sums.nats)
        assert np.isnan(d_hidden[1, 3]).all()
        assert np.isfinite(np.delete(d_hidden[1], 3, axis=0)).all()
        # Where it weighs nothing it is as harmless as any other.
        weights = jnp.ones((B, T)).at[1, 3].set(0.0)
        (value, sums), d_hidden = grad(hidden, weights)
        assert np.isfinite(value)
        assert (np.asarray(d_hidden[1, 3]) == 0).all()
        (want, _), _ = grad(hidden.at[1, 3].set(0.0), weights)
        np.testing.assert_allclose(value, want, rtol=1e-6)


def test_gradient_in_hidden_only_under_jit(problem):
    @jax.jit
    def gradient(kernel, hidden):
        def loss(hidden):
            return chunked_cross_entropy(
                lambda x: x @ kernel[None],
                hidden,
                problem["targets"],
                problem["weights"],
                chunk=5,
            ).loss

        return jax.value_and_grad(loss)(hidden), loss(hidden)

    args = problem["kernel"], problem["hidden"]
    (value, got), plain = gradient(*args)
    want = jax.grad(dense, argnums=1)(
        *args, problem["targets"], problem["weights"], 0.0
    )
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(value, plain, rtol=1e-6)


def _largest(jaxpr) -> int:
    sizes = [
        int(np.prod(v.aval.shape))
        for eqn in jaxpr.eqns
        for v in (*eqn.invars, *eqn.outvars)
        if hasattr(v.aval, "shape")
    ]
    for eqn in jaxpr.eqns:
        for value in eqn.params.values():
            for item in value if isinstance(value, tuple | list) else (value,):
                inner = getattr(item, "jaxpr", item)
                if hasattr(inner, "eqns"):
                    sizes.append(_largest(inner))
    return max(sizes, default=0)


def test_no_array_of_all_logits():
    rows, time, width, vocab, chunk = 2, 64, 8, 1000, 8

    def loss(kernel, hidden):
        targets = jnp.zeros((rows, time), jnp.int32)
        weights = jnp.ones((rows, time), jnp.float32)
        return chunked_cross_entropy(
            lambda x: jnp.einsum("btd,dv->btv", x, kernel),
            hidden,
            targets,
            weights,
            chunk=chunk,
        ).loss

    args = jnp.zeros((width, vocab)), jnp.zeros((rows, time, width))
    grad = jax.grad(loss, argnums=(0, 1))
    assert _largest(jax.make_jaxpr(grad)(*args).jaxpr) == rows * chunk * vocab
    # The compiled form neither: the float temporaries fit in a few chunks.
    memory = jax.jit(grad).lower(*args).compile().memory_analysis()
    assert memory.temp_size_in_bytes < rows * time * vocab * 4


def test_bfloat16_hidden_and_parameters(problem):
    def loss(kernel, hidden):
        return chunked_cross_entropy(
            lambda x: jnp.einsum(
                "btd,dv->btv", x, kernel, preferred_element_type=jnp.float32
            ),
            hidden,
            problem["targets"],
            problem["weights"],
            chunk=5,
        ).loss

    half = (
        problem["kernel"].astype(jnp.bfloat16),
        problem["hidden"].astype(jnp.bfloat16),
    )
    got = jax.grad(loss, argnums=(0, 1))(*half)
    want = jax.grad(loss, argnums=(0, 1))(*jax.tree.map(lambda x: x.astype("f4"), half))
    assert [g.dtype for g in got] == [jnp.bfloat16, jnp.bfloat16]
    for g, w in zip(got, want, strict=True):
        g = np.asarray(g, np.float32)
        assert np.linalg.norm(g - w) / np.linalg.norm(w) < 1e-2


def test_refuses_bad_input(problem):
    with pytest.raises(ValueError, match="must agree"):
        chunked_cross_entropy(
            lambda x: x,
            problem["hidden"],
            problem["targets"][:, 1:],
            problem["weights"],
        )
    with pytest.raises(ValueError, match="chunk is 0"):
        chunked_cross_entropy(
            lambda x: x,
            problem["hidden"],
            problem["targets"],
            problem["weights"],
            chunk=0,
        )
