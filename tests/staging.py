"""Makes arrays of NumPy's into JAX's without a program, for a suite on two cores.

`jnp.asarray` of an array of NumPy's runs a program that returns its argument, and so
compiles one for each shape: by count a large part of all that the suite would compile.
Here they are put where `jax.device_put` puts them.
"""

import jax
import numpy as np


try:
    from jax._src import core
    from jax._src.lax import lax
    from jax._src.literals import TypedNdArray

    _PRIMITIVES = (core.stage_p, lax.convert_element_type_p)
except (ImportError, AttributeError):
    _PRIMITIVES = ()


def _is_plain(x) -> bool:
    """Whether the value is NumPy's, of a dtype that was asked for."""
    if not isinstance(x, (np.ndarray, np.generic, TypedNdArray)):
        return False
    return not core.typeof(x).weak_type and jax.sharding.get_abstract_mesh().empty


def _putting(impl):
    def put(x, **params):
        keeps = params.get("new_dtype") in (None, getattr(x, "dtype", None))
        asked = params.get("weak_type") or params.get("sharding") is not None
        if not keeps or asked or not _is_plain(x):
            return impl(x, **params)
        # A copy: on a CPU the array would share the memory of what it was made from.
        return jax.device_put(np.array(x))

    return put


def put_numpy() -> None:
    """Does so for the rest of the process; where JAX calls it otherwise, nothing."""
    for primitive in _PRIMITIVES:
        primitive.def_impl(_putting(primitive.impl))
