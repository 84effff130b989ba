"""Running Mosaic GPU kernels on a CPU: threads, barriers and copies are simulated.

    with interpreted():
        y = rms_norm(x, scale, implementation="mosaic")

Every kernel traced inside runs in the interpreter with its race detector on,
memory that nobody wrote reading as NaN, and reads outside an array raising.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator
from typing import TYPE_CHECKING

import jax


if TYPE_CHECKING:
    from jax.experimental.pallas import mosaic_gpu as plgpu


_active: contextvars.ContextVar[bool] = contextvars.ContextVar(
    "interpreting", default=False
)


def is_interpreting() -> bool:
    """Whether kernels traced now run in the interpreter."""
    return _active.get()


def strict() -> plgpu.InterpretGPUParams:
    """Finds races, memory that nobody wrote, and reads that leave an array."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    return plgpu.InterpretGPUParams(
        detect_races=True, uninitialized_memory="nan", out_of_bounds_reads="raise"
    )


@contextlib.contextmanager
def interpreted(params: plgpu.InterpretGPUParams | None = None) -> Iterator[None]:
    """Runs the kernels traced inside it in the interpreter.

    Args:
      params: how strict; `strict()` if not given.

    Raises:
      RuntimeError: on leaving, if two threads touched the same memory without a
        barrier between them.
    """
    # Here, because every op asks `is_interpreting` and Mosaic GPU takes a second to
    # import that a CPU user need not pay.
    from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks
    from jax.experimental.pallas import mosaic_gpu as plgpu

    token = _active.set(True)
    found: list[gpu_callbacks.GPURaceDetectionState] = []
    detector = gpu_callbacks.GPURaceDetectionState

    def remember(**options):
        found.append(detector(**options))
        return found[-1]

    # The interpreter keeps the findings of its last kernel only, and a gradient runs
    # two. This name is where it makes the record of each.
    gpu_callbacks.GPURaceDetectionState = remember  # pyrefly: ignore[bad-assignment]
    try:
        with plgpu.force_gpu_interpret_mode(strict() if params is None else params):
            yield
            jax.effects_barrier()
        if any(record.races_found for record in found):
            raise RuntimeError("the interpreter found a data race, see its output")
    finally:
        gpu_callbacks.GPURaceDetectionState = detector
        _active.reset(token)
        # A raised error leaves its threads' state behind, and the next kernel
        # would be refused.
        gpu_callbacks.reset_gpu_interpret_mode_state()
