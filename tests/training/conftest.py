"""Compilation without the expensive passes, for tests that compile a lot."""

import jax
import pytest


@pytest.fixture(scope="module")
def quick_compile():
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture(scope="module")
def compile_cache(tmp_path_factory):
    """A cache on disk: runs with the same program compile it once."""
    yield str(tmp_path_factory.mktemp("compile_cache"))
    jax.config.update("jax_compilation_cache_dir", None)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 1.0)
