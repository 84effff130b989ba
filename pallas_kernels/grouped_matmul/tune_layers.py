"""Measures the tiles of `config_fused` and adds the best to the table of `tune`.

    python -m pallas_kernels.grouped_matmul.tune_layers \
        --json pallas_kernels/tuned/nvidia_h200/grouped_matmul.json

A tile whose result is not XLA's gets no time. Sizes are those of whole layers. The
table's other entries stay.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import pathlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax

from pallas_kernels._common import bench, trial, tuning
from pallas_kernels.grouped_matmul import (
    config_fused,
    mosaic_fused,
    pieces,
    specs_layers,
)
from pallas_kernels.grouped_matmul.activation import parts_of
from pallas_kernels.grouped_matmul.config_mosaic import Tile, table_key


def _best(
    tiles: Iterable[Tile], one: Callable[..., Any], args: tuple[Any, ...], want: Any
) -> dict[str, Any] | None:
    """The fields of the fastest tile and its time "ms"; `None` if none is right."""
    times = {
        t: ms
        for t in dict.fromkeys(tiles)
        if (ms := trial.milliseconds(t, functools.partial(one, t), args, want))
        is not None
    }
    if not times:
        return None
    best = min(times, key=lambda tile: times[tile])
    return dataclasses.asdict(best) | {"ms": bench.digits(times[best])}


def tune(spec: specs_layers.Layers) -> dict[str, dict[str, Any]]:
    """The best tiles of what one layer fuses.

    Args:
      spec: the layer's sizes.

    Returns:
      Table key -> the tile's fields and its time "ms".
    """
    x, w_in, w_out, bias, _, scale, sizes, dy = jax.jit(spec.arguments)(
        jax.random.key(0)
    )
    bias = bias if spec.biased else None
    name, parts = spec.activation, parts_of(spec.activation)
    group = {"rows": spec.rows, "experts": spec.experts}
    first = group | {"in_dim": spec.d_model, "out_dim": spec.d_in}
    second = group | {"in_dim": spec.d_ff, "out_dim": spec.d_model}
    kind: dict[str, Any] = {"activation": name, "implementation": "xla"}
    product = jax.jit(functools.partial(pieces.activated_product, **kind))
    want = product(x, w_in, sizes, bias=bias)
    entries = {}
    if parts > 1:
        print(f"{spec.name} pair", flush=True)

        def pair(tile, x, w_in, bias, sizes):
            return mosaic_fused.activated_product(x, w_in, bias, sizes, tile, name)

        found = _best(config_fused.PAIRS, pair, (x, w_in, bias, sizes), want)
        if found is not None:
            entries[table_key("pair", **first)] = found
    saved = want[1]
    emits = parts > 1 or spec.d_ff < spec.d_model
    print(f"{spec.name} back{parts}", flush=True)

    def back(tile, dy, w_out, sizes, saved, scale):
        found = mosaic_fused.activation_gradient(
            dy, w_out, sizes, saved, scale, tile, name, emits=emits
        )
        return [found[k] for k in ("dz", "d_scale", "scaled") if k in found]

    gradient = functools.partial(pieces.activation_gradient, **kind, needs_scaled=emits)
    args = dy, w_out, sizes, saved, scale
    want = jax.jit(lambda *args: gradient(*args[:-1], row_scale=args[-1]))(*args)
    found = _best(config_fused.backward_candidates(parts), back, args, want)
    if found is not None:
        entries[table_key(f"back{parts}", **second)] = found
    return entries


def main(argv: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m pallas_kernels.grouped_matmul.tune_layers"
    )
    parser.add_argument("--json", type=pathlib.Path, required=True)
    parser.add_argument("--specs", default="perf", help="model or perf")
    parser.add_argument("--names", help="of layers, separated by commas; default all")
    options = parser.parse_args(argv)
    about = bench.stamp()
    entries: dict[str, dict[str, Any]] = {}
    if options.json.is_file():
        entries |= json.loads(options.json.read_text())["entries"]
    for spec in specs_layers.LAYERS:
        named = not options.names or spec.name in options.names.split(",")
        if named and spec.tag == options.specs:
            entries |= tune(spec)
            tuning.write(options.json, about, entries)


if __name__ == "__main__":
    main()
