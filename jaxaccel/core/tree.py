"""Model state as flat dictionaries, `{"layers/0/mixer/q_proj/kernel": array}`.

The optimizer, the sharding table, the checkpoint and the decay mask all speak of
parameters by these names. A flat dictionary also costs the least host time per step.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx


STACKED_PREFIX = "layers/"
"""Arrays under this path hold all periods of the layer pattern on a leading axis."""


def num_stacked_axes(name: str) -> int:
    """Leading [num_periods] axes of the array called `name`: 1 or 0."""
    return 1 if name.startswith(STACKED_PREFIX) else 0


def flatten_state(state: nnx.State) -> dict[str, jax.Array]:
    """Names and arrays of a state, in the order of their names."""
    named = {
        "/".join(map(str, path)): variable.get_value()
        for path, variable in nnx.to_flat_state(state)
    }
    return dict(sorted(named.items()))


def unflatten_state(template: nnx.State, arrays: Mapping[str, jax.Array]) -> nnx.State:
    """Puts named arrays in the place of those in `template`.

    Args:
      template: gives the paths and the variable types; its arrays may be abstract.
      arrays: one array for each of the template's names.

    Returns:
      A new state.

    Raises:
      ValueError: the names differ.
    """
    flat = [("/".join(map(str, p)), p, v) for p, v in nnx.to_flat_state(template)]
    expected = {name for name, _, _ in flat}
    if expected != set(arrays):
        missing = sorted(expected - set(arrays))
        unexpected = sorted(set(arrays) - expected)
        raise ValueError(f"missing {missing}, unexpected {unexpected}")
    pairs = [(path, variable.replace(arrays[name])) for name, path, variable in flat]
    return nnx.from_flat_state(pairs)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelParts:
    """A model taken apart once: its structure, and abstract parameters and buffers.

    Attributes:
      graphdef: the static structure.
      params: abstract state of the `nnx.Param` variables.
      buffers: abstract state of all other variables (router biases, for one).
    """

    graphdef: nnx.GraphDef
    params: nnx.State
    buffers: nnx.State

    def merge(
        self, params: Mapping[str, jax.Array], buffers: Mapping[str, jax.Array]
    ) -> nnx.Module:
        """The module that holds the given named arrays."""
        return nnx.merge(
            self.graphdef,
            unflatten_state(self.params, params),
            unflatten_state(self.buffers, buffers),
        )


def split_model(model: nnx.Module) -> tuple[dict, dict]:
    """Named parameters and named buffers of a module."""
    _, params, buffers = nnx.split(model, nnx.Param, ...)
    return flatten_state(params), flatten_state(buffers)


def model_parts(build: Callable[[], nnx.Module]) -> ModelParts:
    """Takes apart the module that `build` returns, without allocating its arrays."""
    structure: list[nnx.GraphDef] = []

    def split() -> tuple[nnx.State, nnx.State]:
        graphdef, params, buffers = nnx.split(build(), nnx.Param, ...)
        structure.append(graphdef)
        return params, buffers

    params, buffers = jax.eval_shape(split)
    return ModelParts(graphdef=structure[0], params=params, buffers=buffers)


def cast_floats(tree, dtype: jax.typing.DTypeLike):
    """Casts the floating-point arrays of a tree and leaves the others."""

    def cast(x):
        return x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x

    return jax.tree.map(cast, tree)


def num_bytes(tree: Any) -> int:
    """Bytes of a tree's arrays, or of those that its shapes stand for."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def path_names(path: tuple) -> tuple[str, ...]:
    """The keys of a `jax.tree_util` key path as strings."""
    return tuple(
        str(getattr(key, "key", getattr(key, "name", getattr(key, "idx", key))))
        for key in path
    )
