"""Router biases move by the load of their own layer, however layers are scanned."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxaccel.core.tree import split_model
from jaxaccel.models.decoder import Decoder
from jaxaccel.models.nemotron_h import NemotronHConfig
from jaxaccel.training.step import BatchSums, update_router_biases


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
    zero = jnp.zeros(())
    sums = BatchSums(
        **dict.fromkeys(("loss", "nats", "correct", "bytes"), zero),
        **dict.fromkeys(("mtp_nats", "balance"), zero),
        counts=jnp.asarray(counts, jnp.int32),
        mtp_counts=None,
    )
    new = jax.jit(lambda b: update_router_biases(b, sums, 0.5, places))(buffers)
    for row, (position, index) in zip(counts, places, strict=True):
        found = new[f"layers/{position}/mlp/router/bias"][index]
        np.testing.assert_array_equal(found, -0.5 * np.sign(row - row.mean()))
