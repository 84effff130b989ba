"""Builds modules in one compiled call: eagerly, each parameter compiles by itself."""

import jax
import pytest
from flax import nnx


def _build(make, seed=0):
    def parameters(key):
        return nnx.split(make(nnx.Rngs(key)))[1]

    graphdef, _ = nnx.split(nnx.eval_shape(lambda: make(nnx.Rngs(0))))
    return nnx.merge(graphdef, jax.jit(parameters)(jax.random.key(seed)))


@pytest.fixture(scope="session")
def build():
    """build(make, seed=0) calls make(rngs) and returns the module."""
    return _build
