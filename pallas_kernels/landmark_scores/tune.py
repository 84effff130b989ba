"""Measures clusters and rings of several sizes and writes the table of the best.

    python -m pallas_kernels.landmark_scores.tune --json \
        pallas_kernels/tuned/nvidia_h200/landmark_scores.json
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

from pallas_kernels._common import sweep
from pallas_kernels.landmark_scores import api, config, kernel, specs


def sweeps(spec: specs.Spec) -> Iterator[sweep.Sweep]:
    """What to try at one size."""
    sizes = {
        "landmarks": spec.landmarks,
        "group": spec.heads // spec.kv_heads,
        "head_dim": spec.head_dim,
    }

    def make(tiling):
        def call(q, landmarks, allowed, layer=None):
            plan = kernel.Plan.of(
                q, allowed, scale=None, logit_cap=spec.logit_cap, config=tiling
            )
            return kernel.landmark_scores(plan, q, landmarks, allowed, layer)

        return call

    exact = functools.partial(api.landmark_scores, implementation="reference")
    yield sweep.Sweep(
        key=config.table_key(rows=spec.batch * spec.kv_heads, **sizes),
        tilings=config.candidates(**sizes),
        make=make,
        exact=specs.run(spec, exact),
    )


if __name__ == "__main__":
    sweep.main("landmark_scores", specs.specs, sweeps)
