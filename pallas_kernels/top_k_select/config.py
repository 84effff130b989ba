"""How the `top_k_select` kernel keeps a row, and which way a call gets."""

from __future__ import annotations

import dataclasses

from pallas_kernels._common import hw, tuning
from pallas_kernels._common.pieces import WARPGROUP


# Keys of a row that a thread may have in registers; what else it needs fits beside.
MAX_IN_REGISTERS = 160
# Of shared memory: sums over threads, barriers.
OTHER_BYTES = 4096
UNROLL = 8


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """One way to count.

    Attributes:
      in_registers: whether a row stays in registers between two counts; else each
        count reads it from shared memory.
    """

    in_registers: bool = True


def run(columns: int) -> int:
    """Neighbouring columns of one thread: odd, so that threads meet in no bank.

    Longer ones are one more than a multiple of `UNROLL`, which loops are unrolled by.
    """
    least = -(-columns // WARPGROUP)
    if least > 2 * UNROLL:
        return -(-(least - 1) // UNROLL) * UNROLL + 1
    return least + 1 - least % 2


def heuristic(columns: int) -> Config:
    """The way for rows that were not measured."""
    return Config(in_registers=run(columns) <= MAX_IN_REGISTERS)


def table_key(columns: int) -> str:
    """The key of a call in `tuned/<device>/top_k_select.json`."""
    return tuning.key(columns=tuning.bucket(columns))


def pick(columns: int) -> Config:
    """The measured way where there is one, else a guess."""
    found = tuning.lookup("top_k_select", table_key(columns))
    if found is None or run(columns) > MAX_IN_REGISTERS:
        return heuristic(columns)
    return Config(in_registers=found["in_registers"])


def shared_bytes(columns: int) -> int:
    """Shared memory of one block."""
    return 4 * WARPGROUP * run(columns) + OTHER_BYTES


def refusal(rows: int, columns: int) -> str | None:
    """Why the kernel cannot select in such rows, `None` if it can."""
    if not rows:
        return "0 rows, the kernel takes one or more"
    if columns < WARPGROUP:
        return f"rows of {columns} scores are shorter than a block's {WARPGROUP}"
    if (size := shared_bytes(columns)) > (limit := hw.device()).smem_bytes:
        return (
            f"a row of {columns} scores asks for {size} bytes of shared memory, a "
            f"block of {limit.kind} has {limit.smem_bytes}"
        )
    return None
