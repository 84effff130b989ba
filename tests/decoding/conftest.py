"""Models with random weights that need no program to draw them."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxaccel.models.config import DecoderConfig
from jaxaccel.models.decoder import Decoder


@pytest.fixture(scope="module")
def random_model() -> Callable[..., Decoder]:
    """A function of (config, seed): a decoder whose weights are all drawn by NumPy.

    Matrices keep the size of what they multiply; norms, gates and decays differ from
    head to head and channel to channel, as they do not before training.
    """

    def draw(config: DecoderConfig, seed: int = 0) -> Decoder:
        shapes = nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0)))
        graphdef, state = nnx.split(shapes)
        rng = np.random.default_rng(seed)

        def array(leaf):
            scale = leaf.shape[-2] ** -0.5 if leaf.ndim > 1 else 0.3
            drawn = rng.normal(scale=scale, size=leaf.shape)
            return jnp.asarray(drawn.astype(leaf.dtype))

        return nnx.merge(graphdef, jax.tree.map(array, state))

    return draw
