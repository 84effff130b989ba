"""Router biases move by the load of their own layer, however layers are scanned."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxaccel.core.tree import split_model
from jaxaccel.models.decoder import Decoder
from jaxaccel.models.nemotron_h import NemotronHConfig
from jaxaccel.training.step import BatchSums, update_router_biases


def sums_of(counts):
    zero = jnp.zeros(())
    return BatchSums(
        **dict.fromkeys(("loss", "nats", "correct", "bytes"), zero),
        **dict.fromkeys(("mtp_nats", "balance"), zero),
        counts=jnp.asarray(counts, jnp.int32),
        mtp_counts=None,
    )


@pytest.mark.parametrize("experts", [7, 60, 512])
def test_biases_of_even_loads_stay(experts):
    """Compiled as well, where a mean may be a product with 1 / E."""
    name = "layers/0/mlp/router/bias"
    buffers = {name: jnp.zeros((4, experts))}
    counts = np.full((4, experts), 3)  # 21 times 1 / 7 is not 3
    counts[1, 0] += 1  # above the mean, all others below it
    counts[2] = 715_827_882 // experts  # a total of nearly 2^30
    counts[3, :2] += (-1, 1)
    run = jax.jit(lambda b, c: update_router_biases(b, sums_of(c), 0.5))
    found = run(buffers, counts)[name]
    want = -0.5 * np.sign(counts * experts - counts.sum(axis=1, keepdims=True))
    np.testing.assert_array_equal(found, want)


def test_biases_of_runs_of_layers():
    # Runs "ME" x 2, "M*E" x 1 and "ME" x 3: routers at three positions, not in step.
    config = NemotronHConfig.tiny(pattern="MEME" + "M*E" + "MEMEME").decoder()
    places = config.router_places
    assert len(places) == 6
    assert len({position for position, _ in places}) == 3
    abstract = nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0)))
    buffers = {
        name: jnp.zeros(leaf.shape, leaf.dtype)
        for name, leaf in split_model(abstract)[1].items()
    }
    counts = np.random.default_rng(0).integers(0, 9, (6, 4))
    sums = sums_of(counts)
    new = jax.jit(lambda b: update_router_biases(b, sums, 0.5, places))(buffers)
    for row, (position, index) in zip(counts, places, strict=True):
        found = new[f"layers/{position}/mlp/router/bias"][index]
        np.testing.assert_array_equal(found, -0.5 * np.sign(row - row.mean()))
