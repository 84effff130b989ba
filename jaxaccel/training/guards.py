"""What watches a run from outside its steps: SIGTERM, the profiler, the NaN report."""

from __future__ import annotations

import contextlib
import logging
import pathlib
import signal
import threading
from collections.abc import Callable, Generator, Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from jaxaccel.data.batch import PackedBatch
from jaxaccel.training.step import TrainState


_LOGGER = logging.getLogger(__name__)


@contextlib.contextmanager
def termination() -> Generator[Callable[[int], bool]]:
    """Gives a function that says, after a step, whether the run was told to end."""
    if jax.process_count() > 1:
        # All processes must stop at the same step; JAX's own handler agrees on one.
        yield multihost_utils.reached_preemption_sync_point
        return
    told = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield lambda step: False
        return
    before = signal.signal(signal.SIGTERM, lambda number, frame: told.set())
    try:
        yield lambda step: told.is_set()
    finally:
        signal.signal(signal.SIGTERM, before)


class Profiler:
    """Writes a profiler trace of a range of steps."""

    def __init__(self, steps: tuple[int, int] | None, folder: pathlib.Path):
        self._steps = steps
        self._folder = folder
        self._is_on = False

    def before(self, step: int, state: TrainState) -> None:
        """Starts or ends the trace before a step."""
        if self._steps is None:
            return
        if step == self._steps[0]:
            jax.block_until_ready(state.step)
            jax.profiler.start_trace(str(self._folder))
            self._is_on = True
        elif step == self._steps[1]:
            self.close(state)

    def close(self, state: TrainState) -> None:
        """Ends the trace if it is on."""
        if self._is_on:
            jax.block_until_ready(state.step)
            jax.profiler.stop_trace()
            self._is_on = False
            _LOGGER.info("wrote a profiler trace to %s", self._folder)


def save_bad_batch(
    folder: pathlib.Path,
    step: int,
    state: TrainState,
    batch: PackedBatch,
    figures: Mapping[str, float],
) -> pathlib.Path:
    """Writes what is needed to look into a step whose loss is not finite.

    Args:
      folder: of the run.
      step: the step, from 0.
      state: frozen as that step found it, see `TrainState.finite`.
      batch: this process's rows, host arrays.
      figures: metrics of the step.

    Returns:
      The file: "step", "rng", "batch/*", "metrics/*" and "param_norm/*".
    """
    name = "nan_batch.npz"
    if jax.process_count() > 1:
        name = f"nan_batch.{jax.process_index()}.npz"
    norms = jax.jit(lambda p: jax.tree.map(jnp.linalg.norm, p))(
        {k: x.astype(jnp.float32).reshape(-1) for k, x in state.params.items()}
    )
    arrays = {"step": np.asarray(step), "rng": jax.random.key_data(state.rng)}
    arrays |= {f"batch/{k}": v for k, v in vars(batch).items()}
    arrays |= {f"metrics/{k}": v for k, v in figures.items()}
    arrays |= {f"param_norm/{k}": v for k, v in norms.items()}
    with open(folder / name, "wb") as file:
        np.savez(file, allow_pickle=False, **jax.tree.map(np.asarray, arrays))
    return folder / name
