"""Measures rings of several depths and writes the table of the best.

    python -m pallas_kernels.engram_gate.tune --json \
        pallas_kernels/tuned/nvidia_h200/engram_gate.json
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp

from pallas_kernels._common import hw, sweep
from pallas_kernels.engram_gate import config, kernel, specs, xla


_FORMULA: dict[str, Any] = {"eps": 1e-6, "clamp": 1e-6}


def sweeps(spec: specs.Spec) -> Iterator[sweep.Sweep]:
    """What to try at one size, each direction on its own."""
    out = spec.out_dtype or spec.dtype
    formula = _FORMULA | {"copies_sign": spec.copies_sign}

    def parts(args: tuple[Any, ...]) -> tuple[Any, ...]:
        h, kv, query_scale, key_scale, is_live, dy, dgate = args
        gain = query_scale * key_scale
        return h, kv, gain, is_live if spec.dead else None, dy, dgate

    for direction in ("fwd", "bwd"):
        call = (spec.streams, spec.dim, spec.dtype, out, direction)
        if config.refusal(1, *call) is not None:
            continue
        room = hw.device().smem_bytes
        fixed, stage = (
            config.fixed_bytes(*call[:2], direction),
            config.stage_bytes(*call),
        )

        def make(tiling, direction=direction):
            plan = kernel.Plan(
                tokens=spec.batch * spec.time,
                streams=spec.streams,
                dim=spec.dim,
                dtype=jnp.dtype(spec.dtype),
                out_dtype=jnp.dtype(out),
                has_live=bool(spec.dead),
                config=tiling,
                **formula,
            )

            def run(*args):
                h, kv, gain, is_live, dy, dgate = parts(args)
                h, kv, dy = (x.reshape(-1, *x.shape[2:]) for x in (h, kv, dy))
                if is_live is not None:
                    is_live = is_live.reshape(-1).astype(jnp.int32)
                if direction == "fwd":
                    return kernel.engram_gate_fwd(plan, h, kv, gain, is_live)
                dgate = dgate.reshape(-1, spec.streams)
                return kernel.engram_gate_bwd(plan, h, kv, gain, is_live, dy, dgate)

            return run

        def exact(*args, direction=direction):
            h, kv, gain, is_live, dy, dgate = parts(args)
            if direction == "fwd":
                y, gate = xla.forward(h, kv, gain, is_live, dtype=out, **formula)
                return y.reshape(-1, *y.shape[2:]), gate.reshape(-1, spec.streams)
            dh, dkv, dgain = xla.backward(h, kv, gain, is_live, dy, dgate, **formula)
            return *(x.reshape(-1, *x.shape[2:]) for x in (dh, dkv)), dgain

        yield sweep.Sweep(
            key=config.table_key(*call),
            tilings=[
                tiling
                for tiling in config.CANDIDATES
                if (fixed + tiling.stages * stage) * tiling.blocks_per_sm <= room
            ],
            make=make,
            exact=exact,
        )


if __name__ == "__main__":
    sweep.main("engram_gate", specs.specs, sweeps)
