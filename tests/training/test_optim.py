"""Schedules, decay mask and one AdamW step against the formula."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxaccel.training.config import OptimConfig, TrainConfig
from jaxaccel.training.optim import decay_mask, learning_rate, make_optimizer


@pytest.mark.parametrize("kind", ["cosine", "wsd", "constant"])
def test_schedule_warms_up_holds_and_falls(kind):
    config = OptimConfig(
        peak_lr=1.0, schedule=kind, warmup_steps=10, final_lr_fraction=0.1
    )
    rate = np.asarray(jax.vmap(learning_rate(config, 100))(jnp.arange(100)))
    assert 0 < rate[0] < 0.1
    assert (np.diff(rate[:10]) > 0).all()
    assert rate[10] == pytest.approx(1.0)
    assert (np.diff(rate[10:]) <= 1e-7).all()
    assert rate[-1] == pytest.approx(1.0 if kind == "constant" else 0.1, rel=1e-5)
    if kind == "wsd":
        np.testing.assert_allclose(rate[10:80], 1.0)
        np.testing.assert_allclose(np.diff(rate[80:], n=2), 0, atol=1e-6)
    if kind == "cosine":
        assert rate[54] == pytest.approx(0.55, abs=0.02)


def test_schedule_without_warmup_starts_at_the_peak():
    rate = learning_rate(OptimConfig(peak_lr=2.0, warmup_steps=0), 5)
    assert float(rate(0)) == 2.0


def test_decay_mask():
    shapes = {
        "embed/embedding": (10, 4),
        "final_norm/scale": (4,),
        "layers/0/mixer/A_log": (3, 2),
        "layers/0/mixer/conv_kernel": (3, 4, 8),
        "layers/0/mixer/dt_bias": (3, 2),
        "layers/0/mixer/qkv_proj/kernel": (3, 4, 8),
        "layers/0/mixer_norm/scale": (3, 4),
        "layers/1/mixer/q_proj/bias": (3, 4),
        "layers/1/mixer/sinks": (3, 2),
        "layers/1/mlp/router/kernel": (3, 4, 8),
        "layers/1/mlp/w_in": (3, 8, 4, 4),
        "lm_head/kernel": (4, 10),
    }
    params = {n: jax.ShapeDtypeStruct(s, jnp.float32) for n, s in shapes.items()}
    decayed = {name for name, decays in decay_mask(params).items() if decays}
    assert decayed == {
        "layers/0/mixer/qkv_proj/kernel",
        "layers/1/mlp/router/kernel",
        "layers/1/mlp/w_in",
        "lm_head/kernel",
    }
    assert decay_mask(params, decay_embeddings=True)["embed/embedding"]


def test_first_adamw_step_is_the_formula():
    config = OptimConfig(
        peak_lr=0.1,
        schedule="constant",
        warmup_steps=0,
        weight_decay=0.5,
        clip_norm=1.0,
    )
    params = {"a/kernel": jnp.full((2, 2), 3.0), "a/scale": jnp.full((2,), 3.0)}
    grads = jax.tree.map(lambda p: 100.0 * jnp.ones_like(p), params)
    optimizer = make_optimizer(config, 10)
    update = jax.jit(optimizer.update)
    updates, _ = update(grads, optimizer.init(params), params)
    # Clipped or not, the first bias-corrected step is the sign of the gradient.
    np.testing.assert_allclose(updates["a/scale"], -0.1, rtol=1e-5)
    np.testing.assert_allclose(updates["a/kernel"], -0.1 * (1 + 0.5 * 3), rtol=1e-5)


def test_joined_moments_give_the_same_updates_in_fewer_arrays():
    keys = jax.random.split(jax.random.key(0), 3)
    params = {
        "a/kernel": jax.random.normal(keys[0], (4, 4)),
        "a/scale": jax.random.normal(keys[1], (4,)),
        "b/scale": jax.random.normal(keys[2], (3,)),
    }
    grads = jax.tree.map(jnp.square, params)

    def steps(join_below):
        optimizer = make_optimizer(OptimConfig(join_below=join_below), 200)
        state, update = optimizer.init(params), jax.jit(optimizer.update)
        for scale in (1.0, 0.5):
            scaled = jax.tree.map(lambda g, s=scale: g * s, grads)
            updates, state = update(scaled, state, params)
        return updates, [x.shape for x in jax.tree.leaves(state) if x.ndim]

    apart, shapes = steps(0)
    assert sorted(shapes) == sorted([(4, 4), (4,), (3,)] * 2)
    for join_below, want in ((8, [(4, 4), (7,)] * 2), (17, [(23,)] * 2)):
        joined, shapes = steps(join_below)
        chex.assert_trees_all_close(joined, apart, rtol=1e-6)
        assert sorted(shapes) == sorted(want)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: OptimConfig(schedule="cosin"), "'cosin'"),
        (lambda: OptimConfig(clip_norm=0.0), "clip_norm is 0.0"),
        (lambda: OptimConfig(join_below=-1), "join_below is -1"),
        (lambda: learning_rate(OptimConfig(warmup_steps=11), 10), "warmup_steps is 11"),
        (lambda: TrainConfig(accumulation=0), "accumulation is 0"),
        (lambda: TrainConfig(num_steps=0), "num_steps is 0"),
        (lambda: TrainConfig(ema_decay=1.5), "ema_decay is 1.5"),
    ],
)
def test_bad_values_are_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()
