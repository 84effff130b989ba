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

import jax
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks
from jax.experimental.pallas import mosaic_gpu as plgpu


STRICT = plgpu.InterpretGPUParams(
    detect_races=True, uninitialized_memory="nan", out_of_bounds_reads="raise"
)

_active: contextvars.ContextVar[bool] = contextvars.ContextVar(
    "interpreting", default=False
)


def is_interpreting() -> bool:
    """Whether kernels traced now run in the interpreter."""
    return _active.get()


@contextlib.contextmanager
def interpreted(params: plgpu.InterpretGPUParams = STRICT) -> Iterator[None]:
    """Runs the kernels traced inside it in the interpreter.

    Args:
      params: how strict; the default finds races, unwritten memory and reads that
        leave an array.

    Raises:
      RuntimeError: on leaving, if two threads touched the same memory without a
        barrier between them.
    """
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
        with plgpu.force_gpu_interpret_mode(params):
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
