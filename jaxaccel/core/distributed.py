"""Start of `jax.distributed` for a run of several processes, and what they agree on."""

from __future__ import annotations

import dataclasses
import os

import jax
import numpy as np
from jax.experimental import multihost_utils


_ENVIRONMENT = {
    "coordinator": "JAXACCEL_COORDINATOR",
    "num_processes": "JAXACCEL_NUM_PROCESSES",
    "process_id": "JAXACCEL_PROCESS_ID",
}
# What launchers that `jax.distributed.initialize` detects by itself set, the number of
# processes first. One inside a Slurm allocation but outside of `srun` has no step.
_LAUNCHERS = (
    (
        "SLURM_NTASKS",
        "SLURM_JOB_ID",
        "SLURM_STEP_NODELIST",
        "SLURM_PROCID",
        "SLURM_LOCALID",
    ),
    ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK"),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DistributedConfig:
    """Where the processes of a run meet.

    Attributes:
      coordinator: "host:port" of process 0; `None` means a single process.
      num_processes: how many processes the run has.
      process_id: which of them this one is, from 0.
    """

    coordinator: str | None = None
    num_processes: int | None = None
    process_id: int | None = None


def from_environment(config: DistributedConfig | None = None) -> DistributedConfig:
    """Fills what `config` leaves open from `JAXACCEL_COORDINATOR`,
    `JAXACCEL_NUM_PROCESSES` and `JAXACCEL_PROCESS_ID`.

    Raises:
      ValueError: a variable is not a number, or only part of the three is known.
    """
    config = config or DistributedConfig()
    values = dataclasses.asdict(config)
    for field, variable in _ENVIRONMENT.items():
        text = os.environ.get(variable)
        if values[field] is not None or text is None:
            continue
        if field == "coordinator":
            values[field] = text
        elif text.isdecimal():
            values[field] = int(text)
        else:
            raise ValueError(f"{variable} is {text!r}, expected a number >= 0")
    known = [field for field, value in values.items() if value is not None]
    if known and len(known) < len(values):
        missing = sorted(set(values) - set(known))
        wanted = ", ".join(f"{name} ({_ENVIRONMENT[name]})" for name in missing)
        raise ValueError(f"several processes also need {wanted}")
    return DistributedConfig(**values)


def is_launched_by_cluster() -> bool:
    """Whether Slurm (`srun`) or Open MPI (`mpirun`) started several processes."""
    for count, *others in _LAUNCHERS:
        tasks = os.environ.get(count, "")
        if (
            tasks.isdecimal()
            and int(tasks) > 1
            and all(v in os.environ for v in others)
        ):
            return True
    return False


def initialize(config: DistributedConfig | None = None) -> bool:
    """Connects this process to the others; call it before any other use of JAX.

    Without a coordinator in `config` or the environment, processes that Slurm or Open
    MPI started find each other through the launcher's variables. JAX then gives each
    process one GPU, so the launcher has to start one task a GPU. Open MPI 5 also needs
    the package mpi4py.

    Args:
      config: where they meet; what it leaves open comes from the environment.

    Returns:
      Whether a run of several processes was started.

    Raises:
      ValueError: the description is incomplete.
      RuntimeError: JAX was used before, or the processes did not meet.
    """
    config = from_environment(config)
    if config.coordinator is None and not is_launched_by_cluster():
        return False
    # Processes without an accelerator exchange data over TCP.
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    if config.coordinator is None:
        jax.distributed.initialize()
        return True
    jax.distributed.initialize(
        coordinator_address=config.coordinator,
        num_processes=config.num_processes,
        process_id=config.process_id,
    )
    return True


def from_first_process(value: int) -> int:
    """Process 0's value, in every process; all of them must call this."""
    if jax.process_count() == 1:
        return value
    return int(multihost_utils.broadcast_one_to_all(np.int32(value)))


def processes_that_differ(digest: str) -> list[int]:
    """Which processes have another digest than process 0; all of them must call this.

    Args:
      digest: hex, of the same length in every process.

    Returns:
      Indices of processes, the same list in every process.
    """
    if jax.process_count() == 1:
        return []
    own = np.frombuffer(bytes.fromhex(digest), np.uint8)
    every = np.asarray(multihost_utils.process_allgather(own))  # [processes, bytes]
    return [i for i, row in enumerate(every) if not np.array_equal(row, every[0])]
