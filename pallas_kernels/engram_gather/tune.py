"""Measures blocks of several sizes and writes the table of the best.

    python -m pallas_kernels.engram_gather.tune --json \
        pallas_kernels/tuned/nvidia_h200/engram_gather.json
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

import jax.numpy as jnp

from pallas_kernels._common import sweep
from pallas_kernels.engram_gather import config, kernel, specs, xla


def sweeps(spec: specs.Spec) -> Iterator[sweep.Sweep]:
    """What to try at one size."""
    least = config.step(spec.dim, spec.dtype)

    def gather(tiling, table, ids, *, scale):
        plan = kernel.Plan(
            num_rows=spec.num_rows,
            dim=spec.dim,
            dtype=jnp.dtype(spec.dtype),
            out_dtype=jnp.dtype(jnp.bfloat16 if spec.is_narrow else spec.dtype),
            config=tiling,
        )
        rows = kernel.engram_gather(plan, table, ids.reshape(-1), scale)
        return rows.reshape(*ids.shape, spec.dim)

    yield sweep.Sweep(
        key=config.table_key(spec.dim, spec.dtype),
        tilings=[config.Config(rows=least * m) for m in config.MULTIPLES],
        make=lambda tiling: specs.run(spec, functools.partial(gather, tiling)),
        exact=specs.run(spec, xla.engram_gather),
    )


if __name__ == "__main__":
    sweep.main("engram_gather", specs.specs, sweeps)
