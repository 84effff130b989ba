"""How the `gemv` kernel divides its weights among blocks, and what it takes."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from pallas_kernels._common import tuning
from pallas_kernels._common.pieces import PIECE_BYTES, WARPGROUP


MAX_ROWS = 4  # each has its own sums in registers
DTYPES = ("bfloat16", "float16")
PIECE = PIECE_BYTES // 2  # columns that a thread reads at once
COLUMNS = (8, 16, 32, 64)
RING_COLUMNS = (8, 16, 32, 64, 128)
WARPGROUPS = (1, 2, 4)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """How to divide.

    Attributes:
      columns: of a weight that a block multiplies, at most; a weight whose N they do
        not divide is cut into narrower strips.
      burst: rows of a weight that a thread asks for before it waits for the first.
      warpgroups: of a block, which share the rows.
      paired: whether a burst comes in two halves, of which one is on its way while the
        other is added up.
      ring: bursts that are on their way to shared memory; with 0 a burst comes straight
        into registers.
    """

    columns: int = 16
    burst: int = 16
    warpgroups: int = 1
    paired: bool = False
    ring: int = 0

    def __post_init__(self):
        if self.columns not in COLUMNS:
            raise ValueError(
                f"columns={self.columns}, allowed are {', '.join(map(str, COLUMNS))}"
            )
        if self.warpgroups not in WARPGROUPS:
            raise ValueError(
                f"warpgroups={self.warpgroups}, allowed are "
                f"{', '.join(map(str, WARPGROUPS))}"
            )
        if self.ring < 0 or (self.ring and self.paired):
            raise ValueError(
                f"ring={self.ring} with paired={self.paired}, allowed are numbers from "
                "0 on, and 0 alone with pairs"
            )
        if self.burst < 1 + self.paired:
            least = "numbers from 2 on" if self.paired else "positive numbers"
            raise ValueError(f"burst={self.burst}, allowed are {least}")


RINGS = tuple(
    Config(burst=burst, warpgroups=4, ring=ring)
    for burst in (4, 2)
    for ring in range(6, 1, -1)
)
"""Of a chain, whose columns each product has its own of: from the most bytes on their
way to the fewest, the first that fits."""


REGISTERS = 88
"""Of a thread, for its sums and what it has asked for, of 128 with four warpgroups."""


def strip(width: int, columns: int) -> int:
    """Columns of a block of a weight with N = `width`."""
    while width % columns:
        columns //= 2
    return columns


def heuristic(
    *, depth: int, widths: Sequence[int], rows: int, gated: bool, sms: int
) -> Config:
    """The division of sizes that were not measured.

    Args:
      depth: K.
      widths: N of each result.
      rows: M.
      gated: whether a result has two weights.
      sms: of the card.

    Returns:
      The widest strips that leave no more than a third of the SMs without one, for
      memory is read in rows of them; as many warpgroups as then find room, and as many
      loads in flight as the registers have room for.
    """
    weights = 2 if gated else 1
    columns = COLUMNS[0]
    strips = sum(n // strip(n, columns) for n in widths)
    for wider in COLUMNS[1:]:
        if (found := sum(n // strip(n, wider) for n in widths)) >= 2 * sms // 3:
            columns, strips = wider, found
    warpgroups = max((n for n in WARPGROUPS if n * strips <= 4 * sms), default=1)
    rows_a_step = WARPGROUP * PIECE // columns * warpgroups
    most = (REGISTERS - sums(rows, weights)) // loads(rows, weights)
    burst = max(1, min(-(-depth // rows_a_step), most))
    return Config(columns=columns, burst=burst, warpgroups=warpgroups)


def sums(rows: int, weights: int) -> int:
    """Registers of a thread that adds up M rows of x with its piece of each weight."""
    return PIECE * rows * weights


def loads(rows: int, weights: int) -> int:
    """Registers of a thread for what it asks for in one row of the weights."""
    return PIECE_BYTES // 4 * weights + rows


def table_key(*, depth: int, widths: Sequence[int], rows: int, gated: bool) -> str:
    """The key of a call in `tuned/<device>/gemv.json`."""
    sizes = "+".join(map(str, widths)) + ("*2" if gated else "")
    return tuning.key(depth=depth, widths=sizes, rows=rows)


def pick(
    *, depth: int, widths: Sequence[int], rows: int, gated: bool, sms: int
) -> Config:
    """The measured division where there is one, else the heuristic's."""
    sizes = {"depth": depth, "widths": widths, "rows": rows, "gated": gated}
    if (found := tuning.lookup("gemv", table_key(**sizes))) is not None:
        fields = {f.name: found[f.name] for f in dataclasses.fields(Config)[:3]}
        return Config(**fields, paired=found.get("paired", False))
    return heuristic(**sizes, sms=sms)


def refusal(
    *, rows: int, depth: int, widths: Sequence[int], dtypes: Sequence[Any]
) -> str | None:
    """Why the kernel cannot run a call, `None` if it can."""
    names = {jnp.dtype(dtype).name for dtype in dtypes}
    if len(names) > 1 or not names <= set(DTYPES):
        return (
            f"x and weights are {', '.join(sorted(names))}, the kernel has one dtype "
            f"of {', '.join(DTYPES)}"
        )
    if not 1 <= rows <= MAX_ROWS:
        return f"M = {rows}, the kernel has 1 to {MAX_ROWS} rows"
    if depth < 1:
        return f"K = {depth}, the kernel has 1 and more"
    for width in widths:
        if width < PIECE or width % PIECE:
            return f"N = {width}, the kernel has multiples of {PIECE}"
    return None
