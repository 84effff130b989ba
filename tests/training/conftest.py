"""Compilation without the expensive passes, for tests that compile a lot."""

import jax
import pytest


@pytest.fixture(scope="module")
def quick_compile():
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)
