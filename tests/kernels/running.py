"""`jax.jit` for programs whose time is in running, not in compiling."""

import functools

import jax


# The suite compiles without optimization (conftest.py); loops over states of 128 x 128
# then take longer than the compiler would.
_OPTIONS = {"xla_backend_optimization_level": 2}

jit = functools.partial(
    jax.jit, compiler_options=_OPTIONS if jax.default_backend() == "cpu" else None
)
