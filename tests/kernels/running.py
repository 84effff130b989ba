"""`jax.jit` for programs whose time is in running, not in compiling."""

import functools

import jax


# The suite compiles with XLA's plain emitters (conftest.py); their code for loops over
# states of 128 x 128 runs far longer than the others take to compile.
_OPTIONS = {"xla_backend_extra_options": ""}

jit = functools.partial(
    jax.jit, compiler_options=_OPTIONS if jax.default_backend() == "cpu" else None
)
