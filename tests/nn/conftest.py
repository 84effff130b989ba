"""Modules with random parameters that no compiled program had to draw."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx


_MATRICES = {"kernel", "embedding", "w_in", "w_out", "conv_kernel"}


def _build(make, seed=0):
    draw = np.random.default_rng(seed)

    def leaf(path, abstract):
        name = [key.key for key in path if hasattr(key, "key")][-1]
        value = draw.normal(size=abstract.shape)
        if name in _MATRICES:
            value *= abstract.shape[-2] ** -0.5
        else:
            # Norm scales, decays and biases, away from zero and from one.
            value = 0.5 + 0.3 * value
        return jnp.asarray(np.asarray(value).astype(abstract.dtype))

    graphdef, abstract = nnx.split(nnx.eval_shape(lambda: make(nnx.Rngs(0))))
    return nnx.merge(graphdef, jax.tree_util.tree_map_with_path(leaf, abstract))


@pytest.fixture(scope="session")
def build():
    """build(make, seed=0) returns make(rngs) with its parameters drawn by numpy."""
    return _build
