"""The gradients that need no order, and what their kernels share.

What carries over from chunk to chunk, the states S at their entry, dS at their exit, D
and what dV follows from, was written by `kernel_bwd`. With A, G, P, R as there, and
rows i and columns j of [C, C]:

    U = K S                      D = R W              W = V - diag(enter) U
    dD = diag(leave) K dS + P^T dO                    dU = -diag(enter) dV
    dR = dD W^T    dP = dO D^T   (both count only where G does)
    dQ = scale diag(enter) dO S^T + scale (dP o G) K
    dA = dR o G diag(beta)       dL = -strictLower(A^T dA A^T)     E = diag(beta) dL
    dK = diag(leave) D dS^T + dU S^T + scale (dP o G)^T Q + (E + E^T) K
    dbeta_j = sum_i (dR o A o G)_ij + sum_i (dL o K K^T)_ji
    Z = strictLower(dR o R + dP o P)

    dtotal = rowsum Z - colsum Z + rowsum(Q o dQ's first term) + rowsum(dU o U)
             - rowsum(K o dK's first term)
    dg_j = sum of dtotal_i over i >= j of j's document, and, if that document reaches
           the chunk's exit, sum(K o dK's first term) + across <dS, S>

where dU o U is summed as K o (dU S^T), which is at hand. Z without its diagonal,
whose row and column sums cancel, keeps dg precise under strong decay.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels._common import hw
from pallas_kernels.gated_delta_rule import tensor_core as tc
from pallas_kernels.gated_delta_rule.config_mosaic import CHUNK, SQUARE, Gate


REDUCTION_BYTES = 8192


def document_bounds(gates: Any) -> tuple[jax.Array, jax.Array]:
    """Start of each token's document, `PER_COLUMN`, and of the last token's."""
    starts = tc.load(gates.at[Gate.START], tc.PER_COLUMN).astype(jnp.int32)
    return starts, gates[Gate.START, CHUNK - 1].astype(jnp.int32)


def decay_gradient(
    index: tuple[jax.Array, jax.Array],
    bounds: tuple[jax.Array, jax.Array],
    d_total: jax.Array,
    at_exit: jax.Array,
) -> jax.Array:
    """dg of each token.

    Args:
      index: row and column index of each element of [C, C].
      bounds: from `document_bounds`.
      d_total: `PER_COLUMN`, gradient of the sum of decays up to each token.
      at_exit: `PER_COLUMN`, gradient of the sum up to the chunk's exit.

    Returns:
      f32[C], `PER_ROW`.
    """
    row, column = index
    starts, last_start = bounds
    later = (row <= column) & (row > tc.per_column(starts, SQUARE))
    terms = jnp.where(later, tc.per_column(d_total, SQUARE), 0.0)
    terms = terms + jnp.where(row > last_start, tc.per_column(at_exit, SQUARE), 0.0)
    return jnp.sum(terms, axis=1)


def launch_grads(
    kernel: Callable[..., None],
    name: str,
    sources: dict[str, jax.Array],
    out_type: dict[str, jax.ShapeDtypeStruct],
    *,
    blocks: int,
    threads: int,
    registers: Sequence[int],
    scratch: dict[str, Any],
    auto_barriers: bool = True,
) -> dict[str, jax.Array]:
    """Runs a kernel of gradients that need no order.

    Args:
      kernel: called as kernel(sources, outputs, scratch) with refs by name.
      name: of the kernel in profiles.
      sources, out_type: device memory by name.
      blocks, threads: of the grid, and warpgroups of a block.
      registers: that a block's warpgroups ask for.
      scratch: shared memory and barriers.
      auto_barriers: as for `tensor_core.params`.

    Returns:
      The outputs by name.
    """
    hw.check_registers(registers)
    hw.check_smem(tc.shared_bytes(scratch) + REDUCTION_BYTES, name)

    def body(*refs, **smem):
        inputs, outputs = refs[: len(sources)], refs[len(sources) :]
        kernel(
            dict(zip(sources, inputs, strict=True)),
            dict(zip(out_type, outputs, strict=True)),
            smem,
        )

    results = plgpu.kernel(
        body,
        out_type=tuple(out_type.values()),
        grid=(blocks,),
        grid_names=("block",),
        num_threads=threads,
        thread_name="warpgroup",
        scratch_types=scratch,
        kernel_name=name,
        compiler_params=tc.params(REDUCTION_BYTES, auto_barriers=auto_barriers),
    )(*sources.values())
    return dict(zip(out_type, results, strict=True))
