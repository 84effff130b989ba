"""Start of `jax.distributed` for a run of several processes."""

from __future__ import annotations

import dataclasses
import os

import jax


_ENVIRONMENT = {
    "coordinator": "JAXACCEL_COORDINATOR",
    "num_processes": "JAXACCEL_NUM_PROCESSES",
    "process_id": "JAXACCEL_PROCESS_ID",
}


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


def initialize(config: DistributedConfig | None = None) -> bool:
    """Connects this process to the others; call it before any other use of JAX.

    Args:
      config: where they meet; what it leaves open comes from the environment.

    Returns:
      Whether a run of several processes was started.

    Raises:
      ValueError: the description is incomplete.
    """
    config = from_environment(config)
    if config.coordinator is None:
        return False
    # Processes without an accelerator exchange data over TCP.
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(
        coordinator_address=config.coordinator,
        num_processes=config.num_processes,
        process_id=config.process_id,
    )
    return True
