"""Kernels without a gradient say so by their op's name, and what has one."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np


def forward_only(op: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, whose derivative is an error that names the op.

    Without it a gradient through a kernel ends in an error that names neither the op
    nor a way out. Where no derivative is asked for, nothing changes.

    Args:
      op: the op's name, for the message.
      function: of arrays, in pytrees and keywords too, and of anything else; arrays
        that it closes over are not seen.

    Returns:
      A function of the same arguments. Its derivative with respect to any array raises
      NotImplementedError.
    """

    @functools.wraps(function)
    def call(*args: Any, **options: Any) -> Any:
        leaves, structure = jax.tree.flatten((args, options))
        places = [
            i
            for i, leaf in enumerate(leaves)
            if isinstance(leaf, jax.Array | np.ndarray)
        ]

        @jax.custom_jvp
        def run(*arrays: Any) -> Any:
            filled = list(leaves)
            for place, array in zip(places, arrays, strict=True):
                filled[place] = array
            args, options = jax.tree.unflatten(structure, filled)
            return function(*args, **options)

        @run.defjvp
        def refuse(primals: Any, tangents: Any) -> Any:
            raise NotImplementedError(
                f'{op}: implementation="mosaic" has no gradient, implementation="xla" '
                "has one"
            )

        return run(*(leaves[place] for place in places))

    return call
