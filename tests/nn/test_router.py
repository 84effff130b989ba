"""Routing: who is chosen, with what weight, and what is counted."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxaccel.nn.router import (
    MoEConfig,
    Router,
    RouterBias,
    Routing,
    router_aux,
    select_experts,
)


def _config(**changes):
    return MoEConfig(**({"num_experts": 8, "top_k": 3, "d_ff": 4} | changes))


def _route(config, x, is_real=None, bias=None):
    """Routes with the identity as the router's kernel: x are the logits."""

    def run(x):
        router = Router(config, config.num_experts, rngs=nnx.Rngs(0))
        router.kernel[...] = jnp.eye(config.num_experts)
        if bias is not None:
            router.bias[...] = jnp.asarray(bias, jnp.float32)
        return router(x, is_real)

    return jax.jit(run)(x)


@pytest.fixture(scope="module")
def logits():
    return jax.random.normal(jax.random.key(0), (2, 5, 8))


def _softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


@pytest.mark.parametrize("score", ["softmax", "sigmoid", "topk_softmax"])
def test_ids_and_weights_match_the_formula(logits, score):
    got = _route(_config(score=score, scale=2.5), logits)
    x = np.asarray(logits, np.float64)
    ids = np.argsort(-x, -1, kind="stable")[..., :3]
    np.testing.assert_array_equal(got.expert_ids, ids)
    chosen = np.take_along_axis(
        1 / (1 + np.exp(-x)) if score == "sigmoid" else np.exp(x), ids, -1
    )
    want = 2.5 * chosen / chosen.sum(-1, keepdims=True)
    np.testing.assert_allclose(got.weights, want, rtol=1e-5)


def test_weights_can_stay_unnormalised(logits):
    got = _route(_config(normalize_weights=False), logits)
    want = np.sort(_softmax(np.asarray(logits)), -1)[..., :-4:-1]
    np.testing.assert_allclose(got.weights, want, rtol=1e-5)


def test_bias_changes_the_selection_and_never_the_weights(logits):
    config = _config(score="sigmoid", bias_update_rate=1e-3, normalize_weights=False)
    bias = [0.0, 0.0, 0.0, 0.0, 0.0, 5.0, 0.0, -5.0]
    got = _route(config, logits, bias=bias)
    ids = np.asarray(got.expert_ids)
    assert (ids == 5).any(-1).all()
    assert not (ids == 7).any()
    scores = 1 / (1 + np.exp(-np.asarray(logits)))
    np.testing.assert_allclose(
        got.weights, np.take_along_axis(scores, ids, -1), rtol=1e-5
    )


def test_bias_is_no_parameter():
    router = Router(_config(bias_update_rate=1e-3), 4, rngs=nnx.Rngs(0))
    _, params, rest = nnx.split(router, nnx.Param, ...)
    assert set(params) == {"kernel"}
    assert isinstance(rest["bias"], RouterBias)
    assert not hasattr(Router(_config(), 4, rngs=nnx.Rngs(0)), "bias")


def test_ties_go_to_the_lowest_expert():
    x = jnp.zeros((1, 2, 8)).at[0, 1, 4].set(1.0)
    got = _route(_config(), x)
    np.testing.assert_array_equal(got.expert_ids, [[[0, 1, 2], [4, 0, 1]]])


def test_no_expert_outside_the_best_groups_wins_under_negative_bias():
    config = _config(score="sigmoid", num_groups=4, top_groups=2, bias_update_rate=1e-3)
    # Groups (0,1) and (6,7) are best; all choices are negative, so that masking the
    # other groups with 0 would pick them.
    choice = jnp.array([[-1.0, -2.0, -5.0, -5.0, -4.0, -4.0, -3.0, -1.5]])
    np.testing.assert_array_equal(select_experts(choice, config), [[0, 7, 1]])


def test_group_score_sums_the_best_few():
    choice = jnp.array([[9.0, 0.0, 0.0, 0.0, 5.0, 5.0, 5.0, 0.0]])
    shared = {"num_groups": 2, "top_k": 2}
    for top, want in ((1, [0, 1]), (2, [4, 5]), (3, [4, 5])):
        got = select_experts(choice, _config(**shared, group_score_top=top))
        np.testing.assert_array_equal(got, [want])


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_a_single_expert_still_trains_the_router(logits, score):
    config = _config(top_k=1, score=score)
    gradient = jax.grad(lambda x: _route(config, x).weights.sum())(logits)
    assert float(jnp.abs(gradient).max()) > 1e-2


def test_vanishing_sigmoid_scores_give_finite_weights():
    x = jnp.full((1, 1, 8), -200.0)
    config = _config(score="sigmoid")
    value, gradient = jax.value_and_grad(lambda x: _route(config, x).weights.sum())(x)
    assert np.isfinite(value)
    assert np.isfinite(gradient).all()


@functools.partial(jax.jit, static_argnums=0)
def _losses(config, logits, is_real):
    routing = _route(config, logits, is_real)
    counts = jnp.bincount(routing.expert_ids.reshape(-1), length=9)[:8]
    return routing, router_aux(routing, counts.astype(jnp.int32), config, is_real)


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_losses_match_the_formulas_on_real_tokens(logits, score):
    real = np.array([[1, 1, 1, 0, 0], [0, 1, 1, 1, 1]], bool)
    x = np.asarray(logits, np.float64)
    p = _softmax(x)
    if score == "sigmoid":
        p = 1 / (1 + np.exp(-x))
        p = p / p.sum(-1, keepdims=True)
    chosen = np.zeros_like(x)
    np.put_along_axis(chosen, np.argsort(-x, -1)[..., :3], 1.0, -1)

    def switch(keep):
        return 8 * (p[keep].sum(0) * chosen[keep].sum(0)).sum() / (3 * keep.sum() ** 2)

    by_row = [switch(real & (np.arange(2) == row)[:, None]) for row in (0, 1)]
    log_z = np.log(np.exp(x).sum(-1))
    want = {
        "balance_loss_coef": 0.1 * switch(real),
        "sequence_balance_loss_coef": 0.1 * np.mean(by_row),
        "z_loss_coef": 0.1 * (log_z[real] ** 2).mean(),
    }
    for name, value in want.items():
        _, aux = _losses(_config(score=score, **{name: 0.1}), logits, jnp.array(real))
        total = float(aux.balance_loss + aux.z_loss)
        assert total == pytest.approx(value, rel=1e-5), name


def test_unbiased_counts_ignore_the_bias(logits):
    coefs = {"balance_loss_coef": 1.0, "score": "sigmoid", "bias_update_rate": 1e-3}
    real = jnp.ones((2, 5), bool)
    plain = _route(_config(**coefs), logits)
    biased = _route(_config(**coefs), logits, bias=[0, 0, 0, 0, 0, 9, 0, 0])

    def loss(routing, counts_of):
        counts = jnp.bincount(routing.expert_ids.reshape(-1), length=8)
        config = _config(balance_counts=counts_of, **coefs)
        return float(router_aux(routing, counts, config, real).balance_loss)

    assert loss(biased, "unbiased") == pytest.approx(loss(plain, "selected"))
    assert loss(biased, "selected") != pytest.approx(loss(plain, "selected"))


def test_padding_leaves_the_report_alone(logits):
    config = _config(
        balance_loss_coef=1.0, sequence_balance_loss_coef=1.0, z_loss_coef=1.0
    )
    real = jnp.array([[True, True, True, False, False], [True] * 5])
    routing, aux = _losses(config, logits, real)
    np.testing.assert_array_equal(routing.expert_ids[0, 3:], 8)
    np.testing.assert_array_equal(routing.weights[0, 3:], 0.0)
    assert int(aux.counts.sum()) == 8 * 3
    other = logits.at[0, 3:].set(37.0)
    for got, want in zip(
        jax.tree.leaves(_losses(config, other, real)[1]),
        jax.tree.leaves(aux),
        strict=True,
    ):
        np.testing.assert_array_equal(got, want)


def test_load_figures():
    routing = Routing(
        expert_ids=jnp.zeros((1, 1, 3), jnp.int32),
        weights=jnp.zeros((1, 1, 3)),
        logits=jnp.zeros((1, 1, 8)),
    )
    even = router_aux(routing, jnp.full((8,), 5, jnp.int32), _config())
    assert float(even.entropy) == pytest.approx(np.log(8))
    assert float(even.max_violation) == pytest.approx(0.0, abs=1e-6)
    one = router_aux(routing, jnp.array([7] + [0] * 7, jnp.int32), _config())
    assert float(one.entropy) == pytest.approx(0.0, abs=1e-6)
    assert float(one.max_violation) == pytest.approx(7.0)
    none = router_aux(routing, jnp.zeros((8,), jnp.int32), _config())
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(none))


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"top_k": 9}, "top_k=9 must be from 1 to num_experts=8"),
        ({"score": "tanh"}, "score='tanh'"),
        ({"activation": "gelu"}, "activation='gelu'"),
        ({"balance_counts": "all"}, "balance_counts='all'"),
        ({"num_groups": 3}, "num_groups=3"),
        ({"num_groups": 4, "top_groups": 5}, "top_groups=5"),
        ({"num_groups": 4, "top_groups": 1}, "top_k=3 is more than the 2"),
        ({"num_groups": 8, "top_groups": 4}, "group_score_top=2"),
        ({"z_loss_coef": -1.0}, r"z_loss_coef=-1\.0"),
        ({"shared_gate": True}, "shared_gate=True"),
        ({"d_ff": 0}, "d_ff=0"),
        ({"d_latent": -1}, "d_latent=-1"),
        ({"expert_exchange": "ring"}, "expert_exchange='ring' is unknown"),
        ({"expert_capacity": -0.5}, r"expert_capacity=-0\.5"),
        (
            {"global_balance_loss_coef": 0.1, "balance_counts": "unbiased"},
            r"global_balance_loss_coef=0\.1 needs balance_counts='selected'",
        ),
    ],
)
def test_bad_configs_raise(changes, message):
    with pytest.raises(ValueError, match=message):
        _config(**changes)


def test_the_global_loss_counts_earlier_micro_batches(logits):
    """Alone it is the Switch loss; behind others its counts are theirs and its own."""
    switch = _losses(_config(balance_loss_coef=0.5), logits, None)[1]
    config = _config(global_balance_loss_coef=0.5)
    routing, alone = _losses(config, logits, None)
    np.testing.assert_allclose(alone.balance_loss, switch.balance_loss, rtol=1e-6)
    before = jnp.arange(8, dtype=jnp.int32) * 7
    counts = alone.counts
    got = router_aux(routing, counts, config, load_before=before)
    share = np.asarray(before + counts) / (np.asarray(before).sum() + counts.sum())
    mean = _softmax(np.asarray(logits)).mean(axis=(0, 1))
    want = 0.5 * 8 * np.sum(share * mean)
    np.testing.assert_allclose(got.balance_loss, want, rtol=1e-5)
    assert int(got.overflow) == 0
