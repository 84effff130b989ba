"""Measures ways to read over the link and writes the table of the best.

    python -m pallas_kernels.host_gather.tune --json \
        pallas_kernels/tuned/nvidia_h200/host_gather.json
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

from pallas_kernels._common import sweep
from pallas_kernels.host_gather import config, kernel, reference, specs


def sweeps(spec: specs.Spec) -> Iterator[sweep.Sweep]:
    """What to try at one size; ids lie in one row."""
    size = config.row_bytes(spec.dim, spec.dtype)
    if len(spec.lookups) != 1:
        return
    yield sweep.Sweep(
        key=config.table_key(spec.dim, spec.dtype),
        tilings=[
            reading
            for reading in config.candidates(spec.dim, spec.dtype)
            if size * reading.rows <= config.MAX_ROW_BYTES
            and spec.lookups[0] % reading.rows == 0
        ],
        make=lambda reading: functools.partial(kernel.host_gather, reading),
        exact=reference.host_gather,
    )


if __name__ == "__main__":
    sweep.main("host_gather", specs.specs, sweeps)
