"""Launches that begin before the one in front of them has ended.

Between two launches that depend on each other an H200 pauses, and then needs a while
until its memory is busy again. As programmatic dependent launches (CUDA C++ Programming
Guide) the blocks of the second come to an SM as soon as the first has no block left to
place and there is room, and wait themselves before they read what it writes. XLA's own
kernels do not take part: launches beside them come one after the other as ever.

Every block of such a kernel calls `wait` before it reads or writes what other launches
write or read. That one may also begin early is of no harm: it cannot end before those
in front of it have.
"""

from __future__ import annotations

from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels._common import interpret


def let_next_begin() -> None:
    """Allows the launch behind this one to begin; first thing in a kernel."""
    if not interpret.is_interpreting():
        plgpu.griddepcontrol_launch_dependents()


def wait() -> None:
    """Waits until the launch in front of this one has ended, its writes done.

    Each warpgroup calls it for itself. Before it a kernel may read what no launch of
    the program writes, but nothing else, and nothing that was read before is read
    again through the cache for constants (`indexed.take(cached=True)`) behind it.
    """
    if not interpret.is_interpreting():
        plgpu.griddepcontrol_wait()
