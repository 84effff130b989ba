"""Compilation without the expensive passes, for tests that compile a lot."""

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache


@pytest.fixture(scope="module")
def quick_compile():
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture(scope="module")
def compile_cache(tmp_path_factory):
    """A cache on disk: runs with the same program compile it once."""
    names = (
        "jax_enable_compilation_cache",
        "jax_compilation_cache_dir",
        "jax_persistent_cache_min_compile_time_secs",
    )
    before = {name: getattr(jax.config, name) for name in names}
    # JAX looks at the first of them once.
    jax.config.update("jax_enable_compilation_cache", True)
    compilation_cache.reset_cache()
    yield str(tmp_path_factory.mktemp("compile_cache"))
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()
