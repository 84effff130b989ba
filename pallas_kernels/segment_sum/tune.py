"""Measures strips of several lengths and writes the table of the best.

    python -m pallas_kernels.segment_sum.tune --json \
        pallas_kernels/tuned/nvidia_h200/segment_sum.json

The sort is part of each time, and the same for all.
"""

from __future__ import annotations

from collections.abc import Iterator

import jax.numpy as jnp

from pallas_kernels._common import sweep
from pallas_kernels.segment_sum import api, config, kernel, specs, xla


def sweeps(spec: specs.Spec) -> Iterator[sweep.Sweep]:
    """What to try at one size."""

    def make(tiling):
        def call(values, ids, dy):
            del dy
            order = api.sort_ids(ids, spec.num_segments)
            is_kept = order.ids < spec.num_segments
            keys = jnp.where(is_kept, order.ids, kernel.NOTHING)
            return kernel.segment_sum(
                tiling, values, keys, order.source, spec.num_segments
            )

        return call

    def exact(values, ids, dy):
        del dy
        order = api.sort_ids(ids, spec.num_segments)
        return xla.segment_sum(values, order.ids, order.source, spec.num_segments)

    yield sweep.Sweep(
        key=config.table_key(spec.dim, spec.dtype),
        tilings=config.CANDIDATES,
        make=make,
        exact=exact,
    )


if __name__ == "__main__":
    sweep.main("segment_sum", specs.specs, sweeps)
