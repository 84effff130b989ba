"""Measures launch parameters of the kernels that move rows; writes the best of each.

    python -m pallas_kernels.sort_dispatch.tune --json \
        pallas_kernels/tuned/nvidia_h200/sort_dispatch.json
"""

from __future__ import annotations

import types
from collections.abc import Iterator

import jax.numpy as jnp

from pallas_kernels._common import sweep
from pallas_kernels.sort_dispatch import config, kernel, specs, xla
from pallas_kernels.sort_dispatch.plan import DispatchPlan


def moving(spec: specs.Spec, tiling: config.Config) -> types.SimpleNamespace:
    """The functions of `specs.run`, rows moved by the kernels with these parameters."""
    launch = kernel.Plan(
        tokens=spec.tokens,
        slots=spec.slots,
        rows=spec.tokens * spec.slots,
        dim=spec.dim,
        dtype=jnp.dtype(spec.dtype),
        config=tiling,
    )

    def routed(plan: DispatchPlan):
        return jnp.sum(plan.group_sizes, dtype=jnp.int32)[None]

    def permute(x, plan):
        return kernel.gather(launch, x, plan.token, routed(plan))

    def combine(y, plan, weights):
        row, flat = plan.row.reshape(-1), weights.reshape(-1)
        return kernel.reduce(launch, y, row, routed(plan), flat)

    return types.SimpleNamespace(
        sort_dispatch=xla.sort_dispatch, permute=permute, combine=combine
    )


def sweeps(spec: specs.Spec) -> Iterator[sweep.Sweep]:
    """What to try at one size: the way there and back."""
    yield sweep.Sweep(
        key=config.table_key(spec.slots, spec.dim, spec.dtype),
        tilings=config.CANDIDATES,
        make=lambda tiling: specs.run(spec, moving(spec, tiling), backward=False),
        exact=specs.run(spec, xla, backward=False),
    )


if __name__ == "__main__":
    sweep.main("sort_dispatch", specs.specs, sweeps)
