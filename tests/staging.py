"""Keeps JAX from compiling what only moves data, for a suite on two cores.

`jnp.asarray` of an array of NumPy's runs a program that returns its argument, and so
compiles one for each shape; so do `jnp.zeros`, `x[0]` and `x.reshape(-1)`, and each
takes a hundredth of a second. By count they are a large part of all that the suite
would compile. Here arrays of NumPy's are put where `jax.device_put` puts them, and what
moves values and computes none, outside of any program, is NumPy's work.
"""

import functools

import jax
import numpy as np


try:
    from jax._src import core
    from jax._src.lax import lax, slicing
    from jax._src.literals import TypedNdArray

    _PRIMITIVES = (core.stage_p, lax.convert_element_type_p)
except (ImportError, AttributeError):
    _PRIMITIVES = ()

_PLAIN = frozenset(
    jax.numpy.dtype(name)
    for name in (
        *("bool", "int8", "int16", "int32", "uint8", "uint16", "uint32"),
        *("float32", "bfloat16", "float16"),
    )
)


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


def _of_numpy(x):
    """The value as NumPy's; `None` where its type or its place has to be kept."""
    if _is_plain(x):
        return np.asarray(x) if x.dtype in _PLAIN else None
    if not isinstance(x, jax.Array) or isinstance(x, core.Tracer):
        return None
    if x.dtype not in _PLAIN or x.weak_type or x.committed:
        return None
    # Of a view of its own: an array whose values were asked for keeps them.
    return np.asarray(x.addressable_data(0))


def _broadcast_in_dim(x, *, shape, broadcast_dimensions, sharding):
    if sharding is not None:
        return None
    sizes = [1] * len(shape)
    for dimension, size in zip(broadcast_dimensions, x.shape, strict=True):
        sizes[dimension] = size
    return np.broadcast_to(x.reshape(sizes), shape)


def _reshape(x, *, new_sizes, dimensions, sharding):
    moved = dimensions is not None or sharding is not None
    return None if moved else x.reshape(new_sizes)


def _iota(*, dtype, shape, dimension, sharding):
    if sharding is not None or dtype not in _PLAIN:
        return None
    sizes = [-1 if i == dimension else 1 for i in range(len(shape))]
    return np.broadcast_to(np.arange(shape[dimension]).reshape(sizes), shape).astype(
        dtype
    )


def _squeeze(x, *, dimensions):
    return x.squeeze(dimensions)


def _slice(x, *, start_indices, limit_indices, strides):
    steps = strides or (1,) * x.ndim
    return x[tuple(map(slice, start_indices, limit_indices, steps))]


def _concatenate(*xs, dimension):
    return np.concatenate(xs, axis=dimension)


def _stack(*xs, axis):
    return np.stack(xs, axis=axis)


def _transpose(x, *, permutation):
    return x.transpose(permutation)


def _tile(x, *, reps):
    return np.tile(x, reps)


_MOVES = {
    "broadcast_in_dim": _broadcast_in_dim,
    "iota": _iota,
    "reshape": _reshape,
    "squeeze": _squeeze,
    "slice": _slice,
    "concatenate": _concatenate,
    "stack": _stack,
    "transpose": _transpose,
    "tile": _tile,
}


def _moving(move, impl):
    @functools.wraps(impl)
    def run(*args, **params):
        xs = [_of_numpy(x) for x in args]
        here = jax.default_backend() == "cpu" and jax.sharding.get_abstract_mesh().empty
        if here and all(x is not None for x in xs):
            moved = move(*xs, **params)
            if moved is not None:
                return jax.device_put(np.array(moved, order="C"))
        return impl(*args, **params)

    return run


def put_numpy() -> None:
    """Does so for the rest of the process; where JAX calls it otherwise, nothing."""
    for primitive in _PRIMITIVES:
        primitive.def_impl(_putting(primitive.impl))
    for name, move in _MOVES.items() if _PRIMITIVES else ():
        for module in (lax, slicing):
            primitive = getattr(module, f"{name}_p", None)
            if primitive is not None:
                primitive.def_impl(_moving(move, primitive.impl))
                break
