"""Launches that begin before the one in front of them has ended.

Between two launches that depend on each other an H200 pauses, and then needs a while
until its memory is busy again. As programmatic dependent launches (CUDA C++ Programming
Guide) the blocks of the second come to an SM as soon as the first has no block left to
place and there is room, and wait themselves before they read what it writes. XLA's own
kernels do not take part: launches beside them come one after the other as ever.

Every warpgroup of such a kernel calls `wait` before it reads or writes what other
launches write or read. That the one in front may have begun early too does no harm: it
cannot end before those in front of it have.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels._common import interpret


_is_on = True


@contextlib.contextmanager
def one_by_one() -> Iterator[None]:
    """Kernels that are traced here come one after the other.

    For timers that add up how long each launch takes: one that begins early takes
    longer by its wait.
    """
    global _is_on
    before, _is_on = _is_on, False
    try:
        yield
    finally:
        _is_on = before


def launch(*static: int) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorates what launches a kernel: one of equal sizes is lowered once a module.

    As `jax.jit`, whose programs do not know of `one_by_one`.

    Args:
      *static: numbers of the arguments that are no arrays.
    """

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        # Programs are kept by function: this is another one.
        alone = functools.wraps(function)(lambda *args: function(*args))
        early, late = (jax.jit(x, static_argnums=static) for x in (function, alone))

        @functools.wraps(function)
        def call(*args: Any) -> Any:
            return (early if _is_on else late)(*args)

        return call

    return decorate


def let_next_begin() -> None:
    """Allows the launch behind this one to begin; first thing in a kernel."""
    if _is_on and not interpret.is_interpreting():
        plgpu.griddepcontrol_launch_dependents()


def wait() -> None:
    """Waits until the launch in front of this one has ended, its writes done.

    Before it a kernel may read what no launch of the program writes, but nothing else;
    and behind it nothing comes through the cache for constants that another launch may
    have written (`indexed.take(cached=False)`).
    """
    if _is_on and not interpret.is_interpreting():
        plgpu.griddepcontrol_wait()


def overlapping(body: Callable[..., Any]) -> Callable[..., Any]:
    """A kernel's body, begun early; all of it is behind the wait."""

    @functools.wraps(body)
    def run(*args: Any, **kwargs: Any) -> Any:
        let_next_begin()
        wait()
        return body(*args, **kwargs)

    return run
